"""A YAML file is read as it is meant, or refused by one line with its place."""

import codecs
from pathlib import Path

import pytest
import yaml
from helpers.errors import refused
from jsonargparse import get_loader

from fl_lightning import yaml_files
from fl_lightning.cli import reading
from fl_lightning.errors import UsageError
from fl_lightning.yaml_files import MOST_LEVELS, MOST_VALUES, read_yaml

ROOT = Path(__file__).resolve().parents[1]
# each list has the one before ten times
BOMB = "".join(
    f"{name}: &{name} [{', '.join([f'*{inner}'] * 10)}]\n" for inner, name in zip("abcdefgh", "bcdefghi", strict=True)
)
BOMB = f"a: &a [{', '.join('0' * 10)}]\n{BOMB}"


def nested(levels):
    return "{a: " * levels + "1" + "}" * levels


# a file, and the line, the column and the words of its error
DAMAGED = {
    "tab": ("a:\n\tb: 1\n", 2, 1, "tab"),
    "tab after spaces": ("a:\n  b: 1\n\tc: 1\n", 3, 1, "tab"),
    "UTF-16": ("a: 1\n".encode("utf-16"), 1, 1, "UTF-8"),
    "UTF-32": ("a: 1\n".encode("utf-32"), 1, 1, "UTF-8"),
    "Latin-1": (b"a: 1\nb: caf\xe9\n", 2, 7, "0xe9"),
    "NUL": ("a: 1\nb: \0\n", 2, 4, r"'\x00'"),
    "bell": ("é: \a\n", 1, 4, r"'\x07'"),
    "two documents": ("a: 1\n---\nb: 1\n", 2, 1, "second document"),
    "a tag of Python": ("a: !!python/object/apply:os.system [id]\n", 1, 4, "tag"),
    "an own tag": ("a: !mine b\n", 1, 4, "'!mine'"),
    "deep": (nested(MOST_LEVELS + 1), 1, 4 * MOST_LEVELS + 1, "levels"),
    "deep by aliases": (
        "".join(f"k{i}: &k{i} {{a: {f'*k{i - 1}' if i else 1}}}\n" for i in range(200)),
        100,
        6,
        "levels",
    ),
    "unclosed [": ("a: [1, 2\nb: 3\n", 2, 2, "line 1, column 4"),
    "unclosed {": ("a: {b: 1\n", 2, 1, "line 1, column 4"),
    "unclosed quote": ("a: 'b\nc: 3\n", 3, 1, "line 1, column 4"),
    "two colons": ("a: b: c\n", 1, 5, "quote"),
    "no alias": ("a: *b\n", 1, 4, "undefined alias"),
    "alias in itself": ("a: &a [*a]\n", 1, 4, "alias"),
    "document in itself": ("&a [*a]\n", 1, 1, "alias"),
    "mapping in itself": ("a: &a {b: {c: *a}}\n", 1, 4, "alias"),
    "bomb": (BOMB, 6, 4, f"{MOST_VALUES} values"),
    "bomb of merges": (
        BOMB.replace("[", "{<<: [").replace("]", "]}").replace("[0", "[{}").replace(" 0", " {}"),
        6,
        12,
        "values",
    ),
    "many values": ("[" + "1," * (MOST_VALUES + 1) + "]", 1, 2 * (MOST_VALUES - 1), "values"),
    "long integer": ("a: " + "9" * 5000, 1, 4, "int"),
    "no integer": ("a: !!int 018\n", 1, 4, "int"),
    "no integer, but empty": ("a: !!int ''\n", 1, 4, "int"),
    "no boolean": ("a: !!bool b\n", 1, 4, "bool"),
    "no base 60": ("a: !!float b:c\n", 1, 4, "float"),
    "list as a key": ("a: 1\n? [b]\n: 1\n", 2, 3, "key"),
    "key twice": ("a: {b: 1}\nc: 2\na: {d: 1}\n", 3, 1, "a stands in line 1"),
    "inner key twice": ("a:\n  b: 1\n  c: 2\n  b: 3\n", 4, 3, "b stands in line 2"),
    "key twice in a list": ("- {a: 1}\n- {a: 1, a: 1}\n", 2, 10, "a stands in line 2"),
    "quoted and plain": ("a: 1\n'a': 2\n", 2, 1, "a stands in line 1"),
    "equal numbers": ("1: a\n1.0: b\n", 2, 1, "1.0 stands in line 1"),
    "two merges": ("a: {<<: {b: 1}, <<: {c: 1}}\n", 1, 17, "<< stands in line 1"),
    "key twice in what is merged": ("a: &a {b: 1, b: 2}\nc: {<<: *a}\n", 1, 14, "b stands in line 1"),
    "merge of a number": ("a: {<<: 3}\n", 1, 9, "mapping"),
    "octal": ("a: 010\n", 1, 4, "8 or 10"),
    "octal below 0": ("a: -017\n", 1, 4, "-17 or -15"),
    "octal as a key": ("{a: {010: 1}}\n", 1, 6, "8 or 10"),
    "base 60": ("a: [1:30]\n", 1, 5, "90"),
    "base 60 with a fraction": ("a: 1:30.5\n", 1, 4, "90.5"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_refused_with_its_place(tmp_path, case):
    content, line, column, words = DAMAGED[case]
    path = tmp_path / "given.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError) as refused:
        read_yaml(path)
    where, _, why = str(refused.value).partition(": ")
    assert where == f"{path}, line {line}, column {column}"
    assert words in why and ";" in why and "\n" not in why and len(why) < 200


@pytest.mark.parametrize("text", ["[" * 10**6, "{a: " * 2000, "- " * 2000 + "a"])
def test_a_very_deep_file_is_refused_where_we_or_the_parser_stop_to_count(tmp_path, text):
    path = tmp_path / "given.yaml"
    path.write_text(text)
    with refused(f"{path}, line 1, column ", f"{MOST_LEVELS} levels"):
        read_yaml(path)


def test_a_file_that_cannot_be_read_or_is_too_large_is_refused(tmp_path, monkeypatch):
    for path in (tmp_path, tmp_path / "nowhere.yaml"):
        with refused(str(path)):
            read_yaml(path)
    path = tmp_path / "given.yaml"
    path.write_text("a: 1\n")
    monkeypatch.setattr(yaml_files, "MOST_BYTES", 5)
    assert read_yaml(path) == {"a": 1}
    monkeypatch.setattr(yaml_files, "MOST_BYTES", 4)
    with refused("given.yaml", "4 bytes"):
        read_yaml(path)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("# nothing\n", None),
        ("---\na: 1\n", {"a": 1}),
        ("a: 1\r\nb: é\r\n", {"a": 1, "b": "é"}),
        ("a: &a {b: 1, c: 2}\nd: {<<: *a, b: 3}\n", {"a": {"b": 1, "c": 2}, "d": {"b": 3, "c": 2}}),
        ("a: {<<: [{b: 1}, {b: 2, c: 3}]}\n", {"a": {"b": 1, "c": 3}}),
        ("a: &a [1]\nb: [*a, *a]\n", {"a": [1], "b": [[1], [1]]}),
        ("1: a\n'1': b\n", {1: "a", "1": "b"}),
        (
            "a: '010'\nb: 08\nc: 0x10\nd: 1_000\ne: 0\nf: 0.5\n",
            {"a": "010", "b": "08", "c": 16, "d": 1000, "e": 0, "f": 0.5},
        ),
        ("a: '1:30'\nb: 2024-01-01\n", {"a": "1:30", "b": "2024-01-01"}),
        (nested(MOST_LEVELS - 1), None),
    ],
)
def test_a_sound_file_is_read(tmp_path, text, value):
    path = tmp_path / "given.yaml"
    for bom in (b"", codecs.BOM_UTF8):
        path.write_bytes(bom + text.encode())
        assert read_yaml(path) == (yaml.safe_load(text) if value is None else value)


def test_all_files_of_the_project_are_read_as_before():
    """PyYAML and jsonargparse read the files of experiments/ so before there were checks."""
    paths = sorted((ROOT / "experiments").rglob("*.yaml"))
    assert len(paths) > 100
    for path in paths:
        text = path.read_text()
        assert read_yaml(path) == yaml.load(text, Loader=yaml.CSafeLoader)
        assert reading.load_value(text) == get_loader("yaml")(text)


@pytest.mark.parametrize("text", ["1e-5", "{a, b}", "a:", "[1, a]", "x", "", "2024-01-01"])
def test_a_value_is_what_the_parser_makes_of_it(text):
    assert reading.load_value(text) == get_loader("yaml")(text)


def test_a_value_that_is_no_yaml_is_a_text_to_the_parser_and_one_that_loses_something_is_refused():
    with pytest.raises(yaml.YAMLError):
        reading.load_value("a: b: c")
    with refused("a", "line 1", kind=reading.ValueTextError):
        reading.load_value("{a: 1, a: 2}")


def test_the_parsers_of_others_read_as_before():
    assert get_loader("yaml")("{a: 010, a: 1:30}") == {"a": 90}
