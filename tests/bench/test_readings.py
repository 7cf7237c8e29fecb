"""Readings of what a source leaves open: which are consistent with all that was published, and which with none."""

import csv
import sys
from dataclasses import replace

import pytest
import yaml
from helpers.errors import refused

from fl_lightning.bench import load_suite
from fl_lightning.bench.comparison import Comparison
from fl_lightning.bench.readings import consistency, fits, with_readings
from fl_lightning.bench.results import CellResult
from fl_lightning.bench.table import render, write_tables
from fl_lightning.cli import main

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
        path = tmp_path / "paper" / "table4.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(yaml.safe_dump({**SUITE, "open": {**SUITE["open"], **of_open}, **dict(keys)}))
        return load_suite(path)

    return load


def results_of(cells, number):
    """Results with the final metric ``number(labels)``, in points; None waits."""
    made = {}
    for cell in cells:
        value = number(cell.labels)
        if value is not None:
            values = {0: value / 100}
            result = CellResult(cell.name, cell.digest, "done", values=values, plan="p")
            made[cell.digest] = replace(result, metrics={"scores/pooled": value / 100, "scores/clients": 0.01})
    return made


def published(labels, shift=0.0):
    return PUBLISHED[labels["method"]][labels["data"]] + shift


def fit_of(suite, number):
    suite = with_readings(suite)
    cells = suite.cells()
    results = results_of(cells, number)
    comparisons = [Comparison(suite, table, cells, results) for table in suite.tables]
    return {key: (*parts, consistency(parts, suite.open.margin)) for key, parts in fits(comparisons).items()}


def test_each_cell_is_run_under_each_reading_with_its_config_last(make):
    suite = make(scores=["pooled"])
    cells = with_readings(suite).cells()
    assert len(cells) == 2 * len(suite.cells(seeds=[0, 1])) == 2 * 2 * 2 * 2
    (cell,) = (one for one in cells if one.name == "data=b,method=FedProx,reading=E_5,seed=1")
    assert cell.config["trainer"]["local_epochs"] == 5 and cell.config["trainer"]["max_rounds"] == 3
    assert cell.config["trainer"]["callbacks"] == [{"class_path": "Scores"}]
    assert with_readings(suite).name == "paper-table4-readings" != suite.name


def test_an_override_or_exclusion_may_be_of_one_reading(make):
    override = {"when": {"method": "FedProx", "reading": "E=5"}, "config": {"method": ["other"]}}
    suite = make({"overrides": [override], "exclude": [{"reading": ["E=1"], "data": "b"}]})
    methods = {cell.name: cell.config["method"] for cell in with_readings(suite).cells(seeds=[0])}
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


def test_a_reading_that_reaches_all_numbers_is_consistent_with_all_and_one_that_reaches_none_with_none(make):
    made = fit_of(make(), lambda labels: published(labels, {"E=1": 1.5, "E=5": 30.0}[labels["reading"]]))
    numbers, differences, state = made["E=1", "final"]
    assert (numbers.published, differences.published, state) == (4, 2, ("all",))
    assert numbers.distances == pytest.approx([1.5] * 4) and differences.distances == pytest.approx([0.0] * 2)
    # all numbers are off by the same, so that the differences are as published, which says nothing by itself
    assert made["E=5", "final"][2] == ("none",)
    assert {row for row, _ in made} == {"E=1", "E=5"}


def test_differences_alone_can_be_off(make):
    """Each number is within the margin of 2, the difference is 3 off."""
    made = fit_of(make(), lambda labels: published(labels, 1.5 if labels["method"] == "FedProx" else -1.5))
    numbers, differences, state = made["E=1", "final"]
    assert numbers.within(2) == 4 and differences.within(2) == 0 and state == ("some",)


@pytest.mark.parametrize(
    ("shift", "possible", "state", "waiting"),
    [(0, ("all", "some"), "all or some", (2, 1)), (9, ("some", "none"), "some or none", (1, 2))],
)
def test_what_is_known_of_a_reading_before_all_its_cells_are_done(make, shift, possible, state, waiting):
    def first_row(labels):
        return published(labels, shift) if labels["reading"] == "E=1" and labels["method"] == "FedAvg" else None

    suite = with_readings(make())
    made = fit_of(make(), first_row)
    assert [words for *_, words in made.values()] == [possible, ("all", "some", "none")]
    text = render(suite, suite.cells(), results_of(suite.cells(), first_row))
    assert f"| {state} |" in text and "| not known yet |" in text
    sentences = ("all of the published numbers and differences", "none of the published numbers")
    for word, number in zip(sentences, waiting, strict=True):
        assert f"Consistent with {word}: no reading so far; {number}" in text


def test_a_mean_counts_once_all_its_seeds_are_done(make):
    """The second seed may bring it back."""
    suite = with_readings(make())
    cells = suite.cells()
    half = results_of([cell for cell in cells if cell.seed == 0], lambda labels: published(labels, 9))
    text = render(suite, cells, half)
    assert "no reading so far; 2 are not known yet" in text and "| some" not in text


def test_a_reading_that_learns_nothing_is_consistent_with_none_though_small_differences_are_reached(make):
    made = fit_of(make(), lambda labels: 10.0)
    numbers, differences, state = made["E=1", "final"]
    assert (numbers.within(2), differences.within(2), state) == (0, 1, ("none",))


def test_a_method_for_all_rows_is_refused(make):
    for keys in ({"config": {"method": []}}, {"readings": {"E=1": {"method": ["prox"]}}}):
        with refused("open", "method", "overrides"):
            with_readings(make(**keys))
    with refused("--config: method", "method+"):
        make().cells(extra=[{"method": []}])
    assert make().cells(extra=[{"method+": ["prox"]}])


def test_a_reading_under_which_a_method_diverges_is_not_consistent(make):
    made = fit_of(make(), lambda labels: float("nan") if labels["method"] == "FedProx" else published(labels))
    numbers, differences, state = made["E=1", "final"]
    assert (numbers.within(2), max(numbers.distances), state) == (2, float("inf"), ("some",))
    assert differences.distances == [float("inf")] * 2


def test_each_score_is_judged_by_itself_and_the_page_says_what_holds(make):
    suite = with_readings(make(scores=["pooled", "clients"]))
    cells = suite.cells()
    text = render(suite, cells, results_of(cells, lambda labels: published(labels)))
    assert "| E=1 | pooled | 4 of 4 | 0.00 | 2 of 2 | 0.00 | all |" in text
    assert "| E=1 | clients | 0 of 4 | 74.00 | 1 of 2 | 5.00 | none |" in text
    (line,) = (one for one in text.splitlines() if one.startswith("Consistent with all"))
    assert line.endswith("differences: E=1 by pooled; E=5 by pooled.")


def test_its_cells_and_tables_have_names_of_their_own(make, tmp_path):
    suite = with_readings(make())
    cells = suite.cells()
    files = write_tables(suite, cells, results_of(cells, published), tmp_path / "results")
    assert {file.name.split(".")[0] for file in files} == {"paper-table4-readings"}


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
        ({"open": {**SUITE["open"], "scores": ["unheard"]}}, ["open.scores='unheard'", "pooled"]),
        ({"open": {**SUITE["open"], "unheard": 1}}, ["open: unheard"]),
    ],
)
def test_what_makes_no_readings_is_refused(make, keys, names):
    with refused(*names):
        with_readings(make(keys))


def test_a_tiny_suite_tells_the_reading_that_its_numbers_were_made_with(tmp_path, monkeypatch, capsys):
    """The numbers of one reading and score are taken for published; the next look finds that reading alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["cli.py"])
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
        "axes": {
            "method": {
                "FedAvg": {},
                "FedLC": {"method": [{"class_path": "FedLC", "init_args": {"tau": 1.0}}]},
            }
        },
        "open": {
            "margin": 0.01,
            "scores": ["pooled", "label_mask"],
            "readings": {
                "E=1": {},
                "E=8": {"trainer": {"local_epochs": 8}},
                "by class": {"data": {"class_path": "SyntheticPerClass"}},
            },
        },
        "tables": [{"published": {"FedAvg": 1, "FedLC": 1}}],
    }
    path = tmp_path / "paper" / "tiny.yaml"
    path.parent.mkdir()
    path.write_text(yaml.safe_dump(suite))
    main(["bench", str(path), "--readings"])
    assert "Consistent with all of the published numbers and differences: no reading." in capsys.readouterr().out
    with open(tmp_path / "runs" / "paper-tiny-readings" / "paper-tiny-readings.table.csv") as file:
        means = {(one["reading"], one["score"], one["method"]): float(one["mean"]) for one in csv.DictReader(file)}
    assert len(set(means.values())) > 6
    suite["tables"] = [{"published": {method: means["E=8", "pooled", method] for method in ("FedAvg", "FedLC")}}]
    path.write_text(yaml.safe_dump(suite))
    main(["bench", str(path), "--readings", "--status"])
    (line,) = (one for one in capsys.readouterr().out.splitlines() if one.startswith("Consistent with all"))
    assert line.endswith("differences: E=8 by pooled.")
    main(["report", str(tmp_path / "runs" / "paper-tiny-readings"), "--output", str(tmp_path / "page.html")])
    (row,) = (one for one in (tmp_path / "page.md").read_text().splitlines() if one.startswith("| E=8 | pooled | "))
    assert row.endswith(" 2 of 2 | 0.00 | 1 of 1 | 0.00 | all |")
    assert line in (tmp_path / "page.html").read_text()
