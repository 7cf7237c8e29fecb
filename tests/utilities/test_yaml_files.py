"""A YAML file is read as it is meant, or refused by one line with its place."""

import codecs
from pathlib import Path

import pytest
import yaml
from helpers.errors import refused
from jsonargparse import get_loader

from fl_lightning.cli import parser_loading
from fl_lightning.utilities.errors import UsageError
from fl_lightning.utilities.yaml_files import read_yaml

ROOT = Path(__file__).resolve().parents[2]


def nested(levels):
    return "{a: " * levels + "1" + "}" * levels


# a file, the line and the column of its error, and what it names
REFUSED = {
    "tab": ("a:\n\tb: 1\n", 2, 1, "tab"),
    "Latin-1": (b"a: 1\nb: caf\xe9\n", 2, 7, "0xe9"),
    "two documents": ("a: 1\n---\nb: 1\n", 2, 1, "another document"),
    "tag": ("a: !mine b\n", 1, 4, "'!mine'"),
    "unclosed": ("a: [1, 2\nb: 3\n", 2, 2, "line 1, column 4"),
    "two colons": ("a: b: c\n", 1, 5, "quote"),
    "list as a key": ("a: 1\n? [b]\n: 1\n", 2, 3, "key"),
    "key twice": ("a: {b: 1}\nc: 2\na: {d: 1}\n", 3, 1, "line 1"),
    "inner key twice": ("a:\n  b: 1\n  c: 2\n  b: 3\n", 4, 3, "line 2"),
    "octal": ("a: 010\n", 1, 4, "is 8"),
    "base 60": ("a: [1:30]\n", 1, 5, "90"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_error_names_the_file_the_line_and_the_column(tmp_path, case):
    content, line, column, named = REFUSED[case]
    path = tmp_path / "given.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError) as caught:
        read_yaml(path)
    where, _, why = str(caught.value).partition(": ")
    assert where == f"{path}, line {line}, column {column}"
    assert named in why and "\n" not in why and len(why) < 200


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "deep.yaml").write_text(nested(3000))
    (tmp_path / "itself.yaml").write_text("a: &x [1, *x]")
    for path in (tmp_path, *(tmp_path / f"{name}.yaml" for name in ("nowhere", "deep", "itself"))):
        with refused(str(path)):
            read_yaml(path)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("# nothing\n", None),
        ("---\na: 1\n", {"a": 1}),
        ("a: 1\r\nb: é\r\n", {"a": 1, "b": "é"}),
        ("a: &a {b: 1, c: 2}\nd: {<<: *a, b: 3}\n", {"a": {"b": 1, "c": 2}, "d": {"b": 3, "c": 2}}),
        ("a: {<<: [{b: 1}, {b: 2, c: 3}]}\n", {"a": {"b": 1, "c": 3}}),
        ("1: a\n'1': b\n", {1: "a", "1": "b"}),
        ("a: '010'\nb: 08\nc: 0x10\nd: 1_000\ne: 0.5\n", {"a": "010", "b": "08", "c": 16, "d": 1000, "e": 0.5}),
        ("a: [1e-3, -2E5, 1.5e+2, '1e3']\n", {"a": [0.001, -2e5, 150.0, "1e3"]}),
        ("a: '1:30'\nb: 2024-01-01\n", {"a": "1:30", "b": "2024-01-01"}),
        (nested(100), None),
    ],
)
def test_a_sound_file_is_read(tmp_path, text, value):
    path = tmp_path / "given.yaml"
    for bom in (b"", codecs.BOM_UTF8):
        path.write_bytes(bom + text.encode())
        assert read_yaml(path) == (yaml.safe_load(text) if value is None else value)


def test_all_files_of_the_project_are_read_as_pyyaml_and_jsonargparse_read_them():
    paths = sorted((ROOT / "experiments").rglob("*.yaml"))
    assert len(paths) > 100
    for path in paths:
        text = path.read_text()
        assert read_yaml(path) == yaml.load(text, Loader=yaml.CSafeLoader)
        assert parser_loading.load_value(text) == get_loader("yaml")(text)


@pytest.mark.parametrize("text", ["1e-5", "{a, b}", "a:", "[1, a]", "x", "", "2024-01-01"])
def test_a_value_of_the_command_line_is_what_the_parser_makes_of_it(text):
    assert parser_loading.load_value(text) == get_loader("yaml")(text)


def test_a_value_that_is_no_yaml_is_a_text_and_one_with_a_key_twice_is_refused():
    with pytest.raises(yaml.YAMLError):
        parser_loading.load_value("a: b: c")
    with refused("a", "line 1", kind=parser_loading.ValueTextError):
        parser_loading.load_value("{a: 1, a: 2}")
