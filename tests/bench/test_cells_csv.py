"""A file of cells comes back as it was written; anything else is refused by its line, column and value."""

import csv
import math

import pytest
from helpers.benches import result, save, stored, tables_of, toy_suite
from helpers.errors import assert_names, refused

pytest_plugins = ["helpers.bench_fixtures"]

LABELS = ["=1+1", "-x", "-1", "+1e3", "@a", "'=b", "''-c", "'d", "--lr", "a,b", 'c"d', "é|<y>", "2.5", "'-9"]
SUITE = {"base": {"a": 1}, "axes": {"method": {"A": {}, "B": {"method": ["b"]}}}, "seeds": [-3, 5]}


@pytest.fixture
def suite(tmp_path):
    return toy_suite(tmp_path, SUITE)


@pytest.fixture
def file(suite, tmp_path):
    """``file(at, **columns)`` is a file of three cells, of which one line has other columns."""
    cells = suite.cells()[:3]

    def write(at=1, **columns):
        path = save(suite, cells, {cell.digest: result(cell) for cell in cells}, tmp_path)[-1]
        lines = list(csv.reader(path.open(newline="")))
        for name, value in columns.items():
            lines[at][lines[0].index(name)] = value
        with path.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(lines)
        return path

    return write


def test_the_tables_can_be_made_again_from_the_file(tmp_path):
    suite = toy_suite(tmp_path, {**SUITE, "tables": [{"published": {"A": 60, "B": 70}}, {"show": "seconds"}]})
    cells = suite.cells(0.5, extra=[{"trainer": {"precision": "bf16-mixed"}, "data": {"init_args": {"root": "/x"}}}])
    results = {cell.digest: result(cell) for cell in cells}
    diverged, failed = cells[0].digest, cells[1].digest
    values = {0: 0.5, 1: math.nan, 2: math.inf, 3: -math.inf}
    results[diverged] = result(cells[0], values, run_dir="/a/b/c", metrics={"test/loss": math.nan})
    results[failed] = result(cells[1], {}, "failed", reason='no "file",\nhere', seconds=None)
    files = save(suite, cells, results, tmp_path / "out")
    names = [f"{suite.name}_scale0.5.{end}" for end in ("table.md", "table.tex", "table.csv", "cells.csv")]
    assert [one.name for one in files] == names and len(list((tmp_path / "out").iterdir())) == 4
    again, back = stored(files[-1], suite)
    assert [(cell.name, cell.digest) for cell in again] == [(cell.name, cell.digest) for cell in cells]
    for form, one in zip(("md", "tex", "csv"), files, strict=False):
        assert tables_of(suite, again, back, form) == one.read_text()
    assert str(back[diverged].values) == str(values) and math.isnan(back[diverged].metrics["test/loss"])
    assert back[failed].state == "failed" and back[failed].values == {}
    text = files[-1].read_text()
    assert "/x" not in text and "/a/b" not in text  # where files lie on this machine
    # the mark of UTF-8 that a spreadsheet adds does not matter
    files[-1].write_bytes(b"\xef\xbb\xbf" + files[-1].read_bytes())
    assert str(stored(files[-1], suite)) == str((again, back))


def test_labels_come_back_as_they_are(tmp_path):
    axes = {"axis": {label: {"trainer": {"x": at}} for at, label in enumerate(LABELS)}, "method": {"A": {}}}
    axes["seconds"] = {"key": "trainer.y", "values": [1]}  # another column than the seconds of a round
    suite = toy_suite(tmp_path, {**SUITE, "axes": axes})
    cells = suite.cells()
    results = {cell.digest: result(cell) for cell in cells}
    again, back = stored(save(suite, cells, results, tmp_path)[-1], suite)
    assert [cell.labels for cell in again] == [cell.labels for cell in cells] and back == results


@pytest.mark.parametrize(
    ("column", "value"), [("state", "bogus"), ("seed", "1.5"), ("config", "[1]"), ("values", "{}"), ("values", "3")]
)
def test_a_line_that_bench_does_not_write_is_refused(file, suite, column, value):
    path = file(3, **{column: value})
    with refused(str(path), "line 4") as caught:
        stored(path, suite)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text.splitlines()[0] + "\n",
        lambda text: text.replace("digest", "hash", 1),
        lambda text: text[: len(text) // 2],
        lambda text: "\0\1\2" * 100,
        lambda text: text + text.splitlines()[-1].replace("0.5", "0.75") + "\n",
    ],
    ids=["empty", "no cell", "a column is missing", "cut", "binary", "a cell twice"],
)
def test_a_damaged_file_is_refused_in_one_line(file, suite, damage):
    path = file()
    path.write_text(damage(path.read_text()))
    with refused(path.name) as caught:
        stored(path, suite)
    assert len(str(caught.value).splitlines()) == 1


def test_cells_of_another_suite_are_refused(bench, file, tmp_path):
    path = file()
    for axes, named in (({"alpha": {"1": {}}}, "alpha"), ({"method": {"C": {"method": ["b"]}}}, "method")):
        with refused(named):
            stored(path, toy_suite(tmp_path, {**SUITE, "axes": axes}))
    ended = bench(toy_suite(tmp_path, {**SUITE, "axes": {"alpha": {"1": {}}}}).path, "--load", path)
    assert ended.status == 2
    assert_names(ended.err, path.name, "alpha")


def test_labels_with_one_config_have_one_result(tmp_path):
    """Such as a method without arguments beside the baseline: both lines have one digest."""
    suite = toy_suite(tmp_path, {**SUITE, "axes": {"method": {"A": {}, "B": {}}}})
    cells = suite.cells()[:2]
    again, back = stored(save(suite, cells, {cells[0].digest: result(cells[0])}, tmp_path)[-1], suite)
    assert len(again) == 2 and back[cells[1].digest].values == {0: 0.25, 1: 0.5}
