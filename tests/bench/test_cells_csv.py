"""A file of cells comes back as it was written, and what bench does not write is refused by line, column and value."""

import csv
import json
import math
from dataclasses import replace

import pytest
import yaml
from helpers.errors import refused

from fl_lightning.bench import load_suite
from fl_lightning.bench.cells_csv import alive, cells_csv, inert, read_cells, stored_cells
from fl_lightning.bench.results import CellResult
from fl_lightning.errors import UsageError

LABELS = ["=1+1", "-x", "-1", "+1e3", "@a", "'=b", "''-c", "'d", "--lr", "a,b", 'c"d', "é|<y>", "2.5"]


def suite_of(folder, axes):
    path = folder / "own" / "suite.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump({"base": {"a": 1}, "axes": axes, "seeds": [-3, 5]}))
    return load_suite(path)


@pytest.fixture
def suite(tmp_path):
    return suite_of(tmp_path, {"method": {"A": {}, "B": {"method": ["b"]}}})


def done(cell, **keys):
    given = {"values": {0: 0.25, 1: 0.5}, "seconds": 1.5, "plan": "p", "machine": "m", "metrics": {"a": 1.0}}
    return CellResult(cell.name, cell.digest, "done", **{**given, "scale": cell.scale, **keys})


@pytest.fixture
def file(suite, tmp_path):
    """A file of cells, and a function that changes columns of one line of it."""
    path = tmp_path / "x.cells.csv"
    cells = suite.cells()[:3]

    def write(at=1, **columns):
        path.write_text(cells_csv(suite, cells, {cell.digest: done(cell) for cell in cells}))
        lines = list(csv.reader(path.open(newline="")))
        for name, value in columns.items():
            lines[at][lines[0].index(name)] = value
        with path.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(lines)
        return path

    return write


def test_texts_that_begin_like_a_formula_are_quoted_and_come_back(tmp_path):
    axis = {label: {"trainer": {"x": at}} for at, label in enumerate(LABELS)}
    suite = suite_of(tmp_path, {"=axis": axis, "method": {"A": {}}})
    cells = suite.cells()
    odd = {"machine": "=cmd|' /C calc'!A0", "plan": "@x", "run_dir": "+y", "reason": "-no such file"}
    results = {cell.digest: done(cell, **odd) for cell in cells}
    path = tmp_path / "x.cells.csv"
    path.write_text(cells_csv(suite, cells, results))
    rows = list(csv.reader(path.open(newline="")))
    for text in {text for row in rows for text in row}:
        assert text[:1] not in tuple("=@\t\r") and not (text[:1] in tuple("+-") and math.isnan(as_number(text)))
    assert {row[rows[0].index("seed")] for row in rows[1:]} == {"-3", "5"}
    assert [cell.labels for cell in stored_cells(path, suite)] == [cell.labels for cell in cells]
    assert read_cells(path) == results


def as_number(text):
    try:
        return float(text)
    except ValueError:
        return math.nan


@pytest.mark.parametrize("text", [*LABELS, "", "'", "\t=x", "\rx", "'\t", "-inf", "-nan", "'-1", "+", "-", "a=b"])
def test_quoting_is_undone(text):
    assert alive(inert(text)) == text
    assert inert(-1) == -1 and inert(None) is None


@pytest.mark.parametrize("line", [1, 3])
@pytest.mark.parametrize(
    ("column", "value"),
    [
        *(("state", one) for one in ("bogus", "", "Done", "nan", "state")),
        *(("scale", one) for one in ("nan", "-1", "0", "inf", "2", "", "half")),
        *(("seconds", one) for one in ("nan", "-1", "inf", "fast", "1e300")),
        *(("metrics", one) for one in ("[]", "", "nan", '{"a": "b"}', '{"a": null}', "{", '"a"', "[" * 100_000)),
        *(("values", one) for one in ("{}", "[]", "", "3", "null", '{"0": null}', '{"0": "x"}', '{"0": true}')),
        *(
            ("values", f'{{"{round_}": 0.5}}')
            for round_ in ("1e400", "1" + "0" * 30, "-1", "inf", "nan", "1.0", "01", "")
        ),
        ("values", f'{{"0": 1{"0" * 400}}}'),
        *(("seed", one) for one in ("", "x", "1.5", "9" * 40)),
        *(("digest", one) for one in ("", "xyz", "abc", "GGGGGGGG")),
        *(("config", one) for one in ("", "[]", "{")),
    ],
)
def test_what_bench_does_not_write_is_refused_by_line_column_and_value(file, suite, line, column, value):
    path = file(line, **{column: value})
    for read in (read_cells, lambda path: stored_cells(path, suite)):
        with pytest.raises(UsageError) as caught:
            read(path)
        text = str(caught.value)
        assert text.startswith(f"{path}: line {line + 1}, ") and f": {column}=" in text
        assert "give " in text and len(text.splitlines()) == 1


def test_a_run_that_diverged_is_data(file):
    values = {0: 0.5, 1: math.nan, 2: math.inf, 3: -math.inf}
    back = read_cells(file(values=json.dumps({str(key): one for key, one in values.items()}), metrics='{"a": NaN}'))
    first = next(iter(back.values()))
    assert str(first.values) == str(values) and math.isnan(first.metrics["a"])
    assert next(iter(read_cells(file(values='{"0": 1e400}')).values())).values == {0: math.inf}


def test_cells_that_are_not_done_need_no_values(file):
    for state in ("failed", "running", "waiting"):
        assert next(iter(read_cells(file(state=state, values="{}", metrics="{}", seconds="")).values())).state == state


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text.splitlines()[0] + "\n",  # no cell
        lambda text: text.replace("digest", "hash", 1),
        lambda text: text.replace("reason", "state", 1),
        lambda text: text.replace(",", ";"),
        lambda text: text[: len(text) // 2],
        lambda text: text[:-3],
        lambda text: text.rstrip("\n") + ",more\n",
        lambda text: text + "a line\n",
        lambda text: "\0\1\2" * 100,
        lambda text: text + text,  # its header again
        lambda text: text + text.partition("\n")[2],
        lambda text: text + text.splitlines()[-1] + "\n",
        lambda text: text + text.splitlines()[-1].replace("0.5", "0.75") + "\n",
    ],
    ids=range(14),
)
def test_a_damaged_file_is_refused_in_one_line(file, damage):
    path = file()
    path.write_text(damage(path.read_text()))
    with refused("x.cells.csv") as caught:
        read_cells(path)
    assert len(str(caught.value).splitlines()) == 1


def test_what_is_no_text_is_refused(tmp_path):
    (tmp_path / "x.csv").write_bytes(bytes(range(256)))
    for path in (tmp_path / "x.csv", tmp_path, tmp_path / "nothing"):
        with refused(str(path)):
            read_cells(path)


def test_a_spreadsheet_s_mark_of_utf8_does_not_matter(file):
    path = file()
    before = read_cells(path)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read_cells(path) == before


def test_cells_of_other_axes_are_refused(file, suite):
    other = replace(suite, axes={"alpha": {"1": ()}})
    with refused("x.cells.csv", "alpha"):
        read_cells(file(), other.axes)
    with refused("x.cells.csv", "alpha"):
        stored_cells(file(), other)


def test_labels_with_one_config_have_one_result(tmp_path):
    """Such as a method without arguments beside the baseline: both lines have one digest."""
    alike = suite_of(tmp_path, {"method": {"A": {}, "B": {}}})
    cells = alike.cells()[:2]
    assert cells[0].digest == cells[1].digest
    (tmp_path / "x.csv").write_text(cells_csv(alike, cells, {cells[0].digest: done(cells[0])}))
    assert len(stored_cells(tmp_path / "x.csv", alike)) == 2
    assert read_cells(tmp_path / "x.csv")[cells[0].digest].values == {0: 0.25, 1: 0.5}
