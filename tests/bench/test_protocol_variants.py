"""Readings of what a source leaves open: which are consistent with the published numbers, and which are not."""

import csv
import math

import pytest
import yaml
from helpers.benches import readings_of, result, save, tables_of, toy_suite, train
from helpers.errors import refused
from helpers.reports import report_of, undraw

pytest_plugins = ["helpers.bench_fixtures"]

PUBLISHED = {"FedAvg": {"a": 60, "b": 70}, "FedProx": {"a": 62, "b": 75}}
SUITE = {
    "title": "A paper, Table 4",
    "base": {"model": {"class_path": "X"}, "trainer": {"callbacks": []}},
    "axes": {"data": {"a": {}, "b": {"data": {"x": 1}}}, "method": {"FedAvg": {}, "FedProx": {"method": ["prox"]}}},
    "tables": [{"published": PUBLISHED}, {"show": "seconds"}],
    "open": {
        "margin": 2,
        "readings": {"E=1": {}, "E=5": {"trainer": {"local_epochs": 5}}},
        "config": {"trainer": {"max_rounds": 3}},
        "seeds": 2,
    },
}


@pytest.fixture
def make(tmp_path):
    """A suite from the common parts, with other keys of ``open``."""

    def load(keys=(), **of_open):
        return toy_suite(tmp_path, {**SUITE, "open": {**SUITE["open"], **of_open}, **dict(keys)})

    return load


def results_of(cells, number):
    """Results with the final metric ``number(labels)``, in points; None waits."""
    made = {}
    for cell in cells:
        value = number(cell.labels)
        if value is not None:
            scores = {"scores/pooled": value / 100, "scores/clients": 0.01}
            made[cell.digest] = result(cell, [value / 100], plan="p", metrics=scores)
    return made


def published(labels, shift=0.0):
    return PUBLISHED[labels["method"]][labels["data"]] + shift


def fit_of(suite, number):
    """The columns after the reading and the score in the table of readings: numbers, differences, what holds."""
    suite = readings_of(suite)
    cells = suite.cells()
    text = tables_of(suite, cells, results_of(cells, number))
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith(("| E=1", "| E=5"))]
    return {(row[0], row[1]): row[2:] for row in rows if len(row) == 7}, text


def test_each_cell_is_run_under_each_reading_with_its_config_last(make, tmp_path):
    suite = make(scores=["pooled"])
    with_readings = readings_of(suite)
    cells = with_readings.cells()
    assert len(cells) == 2 * len(suite.cells(seeds=[0, 1])) == 2 * 2 * 2 * 2
    (cell,) = (one for one in cells if one.name == "data=b,method=FedProx,reading=E_5,seed=1")
    assert cell.config["trainer"]["local_epochs"] == 5 and cell.config["trainer"]["max_rounds"] == 3
    assert cell.config["trainer"]["callbacks"] == [{"class_path": "Scores"}]
    files = save(with_readings, cells, {}, tmp_path / "results")
    assert {file.name.split(".")[0] for file in files} == {f"{suite.name}-readings"}


def test_an_override_or_exclusion_may_be_of_one_reading(make):
    override = {"when": {"method": "FedProx", "reading": "E=5"}, "config": {"method": ["other"]}}
    suite = make({"overrides": [override], "exclude": [{"reading": ["E=1"], "data": "b"}]})
    methods = {cell.name: cell.config["method"] for cell in readings_of(suite).cells(seeds=[0])}
    assert methods == {
        "data=a,method=FedAvg,reading=E_1,seed=0": [],
        "data=a,method=FedAvg,reading=E_5,seed=0": [],
        "data=a,method=FedProx,reading=E_1,seed=0": ["prox"],
        "data=a,method=FedProx,reading=E_5,seed=0": ["other"],
        "data=b,method=FedAvg,reading=E_5,seed=0": [],
        "data=b,method=FedProx,reading=E_5,seed=0": ["other"],
    }
    # without readings, none of it holds
    plain = make().cells()
    assert [cell.config for cell in suite.cells()] == [cell.config for cell in plain]
    with refused("overrides.when.reading", "E=7"):
        make({"overrides": [{"when": {"reading": "E=7"}, "config": {}}]})
    with refused("overrides.when", "reading"):
        make({"overrides": [override], "open": None})


def test_a_reading_is_consistent_with_the_numbers_that_it_reaches(make):
    made, text = fit_of(make(), lambda labels: published(labels, {"E=1": 1.5, "E=5": 30.0}[labels["reading"]]))
    assert made["E=1", "final"] == ["4 of 4", "1.50", "2 of 2", "0.00", "all"]
    # all numbers are off by the same, so that the differences are as published, which says nothing by itself
    assert made["E=5", "final"] == ["0 of 4", "30.00", "2 of 2", "0.00", "none"]
    assert len(made) == 2 and conclusion(text).endswith(": E=1 by final.")


def conclusion(text):
    """The line of the readings that are consistent with all numbers and differences."""
    (line,) = (one for one in text.splitlines() if one.startswith("Consistent with all"))
    return line


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        # each number is within the margin of 2, the difference is 3 off
        (lambda labels: published(labels, 1.5 if labels["method"] == "FedProx" else -1.5), ["4", "1.50", "0", "3.00"]),
        # what learns nothing reaches small differences
        (lambda labels: 10.0, ["0", "65.00", "1", "5.00"]),
        (lambda labels: math.nan if labels["method"] == "FedProx" else published(labels), ["2", "inf", "0", "inf"]),
    ],
    ids=["differences are off", "learns nothing", "diverges"],
)
def test_numbers_and_differences_count_by_themselves(make, number, expected):
    numbers, farthest, differences, farthest_difference, state = fit_of(make(), number)[0]["E=1", "final"]
    assert [numbers[0], farthest, differences[0], farthest_difference] == expected
    assert state == ("none" if numbers.startswith("0") else "some")


@pytest.mark.parametrize(
    ("shift", "state", "waiting"), [(0, "all or some", (2, 1)), (9, "some or none", (1, 2))], ids=["within", "off"]
)
def test_what_is_known_of_a_reading_before_all_its_cells_are_done(make, shift, state, waiting):
    def first_row(labels):
        return published(labels, shift) if labels["reading"] == "E=1" and labels["method"] == "FedAvg" else None

    made, text = fit_of(make(), first_row)
    assert [row[-1] for row in made.values()] == [state, "unknown so far"]
    sentences = ("all of the published numbers and differences", "none of the published numbers")
    for word, number in zip(sentences, waiting, strict=True):
        assert f"Consistent with {word}: no reading so far; {number}" in text


def test_a_mean_counts_once_all_its_seeds_are_done(make):
    """The second seed may bring it back."""
    suite = readings_of(make())
    cells = suite.cells()
    half = results_of([cell for cell in cells if cell.seed == 0], lambda labels: published(labels, 9))
    text = tables_of(suite, cells, half)
    assert "no reading so far; 2 are unknown" in text and "| some" not in text


def test_a_method_for_all_rows_is_refused(make):
    for keys in ({"config": {"method": []}}, {"readings": {"E=1": {"method": ["prox"]}}}):
        with refused("open", "method", "overrides"):
            readings_of(make(**keys))
    with refused("--config: method", "method+"):
        make().cells(extra=[{"method": []}])
    assert make().cells(extra=[{"method+": ["prox"]}])


def test_each_score_is_judged_by_itself(make):
    made, text = fit_of(make(scores=["pooled", "clients"]), lambda labels: published(labels))
    assert made["E=1", "pooled"] == ["4 of 4", "0.00", "2 of 2", "0.00", "all"]
    assert made["E=1", "clients"] == ["0 of 4", "74.00", "1 of 2", "5.00", "none"]
    assert conclusion(text).endswith(": E=1 by pooled; E=5 by pooled.")


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        ({"open": None}, ["open=None"]),
        ({"tables": [{}]}, ["tables.published"]),
        ({"tables": [{"show": "seconds", "published": {"FedAvg": {"a": 1}}}]}, ["tables.published", "final"]),
        ({"axes": {**SUITE["axes"], "reading": {"x": {}}}, "tables": [{}]}, ["axes='reading'"]),
        ({"open": {"margin": 2}}, ["open.readings"]),
        ({"open": {**SUITE["open"], "margin": 0}}, ["open.margin=0"]),
        ({"open": {**SUITE["open"], "readings": []}}, ["open.readings"]),
        ({"open": {**SUITE["open"], "scores": ["unheard"]}}, ["open.scores=['unheard']", "pooled"]),
        ({"open": {**SUITE["open"], "unheard": 1}}, ["open.unheard=1"]),
    ],
)
def test_what_makes_no_readings_is_refused(make, keys, names):
    with refused(*names):
        readings_of(make(keys))


@pytest.mark.usefixtures("one_parser", "undrawn")
def test_a_tiny_suite_finds_the_reading_that_its_numbers_were_made_with(bench, tmp_path, monkeypatch):
    """The numbers of one reading and score are taken for published; the next look finds that reading alone."""
    suite = {
        "title": "Tiny",
        "base": {
            "model": {
                "class_path": "ImageClassifier",
                "init_args": {"encoder": {"class_path": "Logistic", "init_args": {"in_features": 60}}},
            },
            "data": {"class_path": "Synthetic", "init_args": {"num_clients": 4, "largest": 300, "batch_size": 32}},
            "trainer": {"max_rounds": 2},
        },
        "axes": {"method": {"FedAvg": {}, "FedLC": {"method": [{"class_path": "FedLC", "init_args": {"tau": 1.0}}]}}},
        "open": {
            "margin": 0.01,
            "scores": ["pooled", "label_mask"],
            "readings": {"E=1": {}, "E=8": {"trainer": {"local_epochs": 8}}},
        },
        "tables": [{"published": {"FedAvg": 1, "FedLC": 1}}],
    }
    path = toy_suite(tmp_path, suite).path
    ended = bench(path, "--readings", "--output", "out", answer=train)
    assert conclusion(ended.out).endswith("differences: no reading.")
    with next((tmp_path / "out").glob("*.table.csv")).open() as file:
        means = {(one["reading"], one["score"], one["method"]): float(one["mean"]) for one in csv.DictReader(file)}
    assert len(set(means.values())) > 3
    suite["tables"] = [{"published": {method: means["E=8", "pooled", method] for method in ("FedAvg", "FedLC")}}]
    path.write_text(yaml.safe_dump(suite))
    line = conclusion(bench(path, "--readings", "--output", "out", "--status").out)
    assert line.endswith("differences: E=8 by pooled.")
    undraw(monkeypatch)
    files = report_of(tmp_path, tmp_path / "out")
    assert (
        "| E=8 | pooled | 2 of 2 | 0.00 | 1 of 1 | 0.00 | all |" in files["md"].splitlines() and line in files["html"]
    )
