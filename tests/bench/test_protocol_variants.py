"""Readings of what a source leaves open: which are consistent with the published numbers, and which are not."""

import math
import sys
from pathlib import Path

import pytest
from helpers.benches import result, toy_suite

from fl_lightning.bench.comparison import suite_comparison

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments" / "papers" / "programs"))

from protocol_variants import MARGIN, conclusions, readings_table

PUBLISHED = {"FedAvg": {"a": 60, "b": 70}, "FedProx": {"a": 62, "b": 75}}
SUITE = {
    "title": "A paper, Table 4",
    "base": {"model": {"class_path": "X"}, "trainer": {"max_rounds": 3}},
    "axes": {
        "data": {"a": {}, "b": {"data": {"x": 1}}},
        "method": {"FedAvg": {}, "FedProx": {"method": ["prox"]}},
        "reading": {"E=1": {}, "E=5": {"trainer": {"local_epochs": 5}}},
    },
    "seeds": 2,
    "tables": [{"rows": ["reading", "method"], "published": {"E=1": PUBLISHED, "E=5": PUBLISHED}}],
}


def fit_of(tmp_path, number, seeds=(0, 1), **table):
    """The columns after reading and score, and the sentences; ``number(labels)`` is a run's metric, None waits."""
    suite = toy_suite(tmp_path, {**SUITE, "tables": [{**SUITE["tables"][0], **table}]})
    cells, results = suite.cells(), {}
    for cell in cells:
        value = number(cell.labels) if cell.seed in seeds else None
        if value is not None:
            scores = {"scores/pooled": value / 100, "scores/clients": 0.01}
            results[cell.digest] = result(cell, [value / 100], plan="p", metrics=scores)
    comparisons = [suite_comparison(suite, table, cells, results) for table in suite.tables]
    rows = [[text.text for text in line] for line in readings_table(suite, comparisons).lines]
    return {(row[0], row[1]): row[2:] for row in rows}, list(conclusions(comparisons))


def published(labels, shift=0.0):
    return PUBLISHED[labels["method"]][labels["data"]] + shift


def test_a_reading_is_consistent_with_the_numbers_that_it_reaches(tmp_path):
    made, sentences = fit_of(tmp_path, lambda labels: published(labels, {"E=1": 1.5, "E=5": 30.0}[labels["reading"]]))
    assert made["E=1", "final"] == ["4 of 4", "1.50", "2 of 2", "0.00", "all"]
    # all numbers are off by the same, so that the differences are as published, which says nothing by itself
    assert made["E=5", "final"] == ["0 of 4", "30.00", "2 of 2", "0.00", "none"]
    assert len(made) == 2 and sentences[0].endswith(": E=1 by final.")


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        # each number is within the margin, the difference is not
        (lambda labels: published(labels, 2.0 if labels["method"] == "FedProx" else -2.0), ["4", "2.00", "0", "4.00"]),
        # what learns nothing reaches small differences
        (lambda labels: 10.0, ["0", "65.00", "1", "5.00"]),
        (lambda labels: math.nan if labels["method"] == "FedProx" else published(labels), ["2", "inf", "0", "inf"]),
    ],
    ids=["differences are off", "learns nothing", "diverges"],
)
def test_numbers_and_differences_count_by_themselves(tmp_path, number, expected):
    numbers, farthest, differences, farthest_difference, state = fit_of(tmp_path, number)[0]["E=1", "final"]
    assert MARGIN == 3 and [numbers[0], farthest, differences[0], farthest_difference] == expected
    assert state == ("none" if numbers.startswith("0") else "some")


@pytest.mark.parametrize(
    ("shift", "state", "waiting"), [(0, "all or some", (2, 1)), (9, "some or none", (1, 2))], ids=["within", "off"]
)
def test_what_is_known_of_a_reading_before_all_its_cells_are_done(tmp_path, shift, state, waiting):
    def first_row(labels):
        return published(labels, shift) if labels["reading"] == "E=1" and labels["method"] == "FedAvg" else None

    made, sentences = fit_of(tmp_path, first_row)
    assert [row[-1] for row in made.values()] == [state, "unknown so far"]
    starts = (
        "Consistent with all of the published numbers and differences",
        "Consistent with none of the published numbers",
    )
    for sentence, start, number in zip(sentences, starts, waiting, strict=True):
        assert sentence.startswith(f"{start}: no reading so far; {number}")


def test_a_mean_counts_once_all_its_seeds_are_done(tmp_path):
    """The second seed may bring it back."""
    made, sentences = fit_of(tmp_path, lambda labels: published(labels, 9), seeds=[0])
    assert {row[-1] for row in made.values()} == {"unknown so far"} and "2 are unknown" in sentences[0]


def test_each_score_is_judged_by_itself(tmp_path):
    made, sentences = fit_of(tmp_path, published, show="scores", scores=["pooled", "clients"])
    assert made["E=1", "pooled"] == ["4 of 4", "0.00", "2 of 2", "0.00", "all"]
    assert made["E=1", "clients"] == ["0 of 4", "74.00", "1 of 2", "5.00", "none"]
    assert sentences[0].endswith(": E=1 by pooled; E=5 by pooled.")
