"""Seeds until pairs are decided: what is asked for, in what order, and that it goes on where it was stopped."""

import random
from functools import partial

import pytest
from helpers.benches import FakeRunner, outcome, toy_database, toy_suite
from helpers.errors import refused

from fl_lightning.bench import driver as drivers
from fl_lightning.bench.decide import cells_of_pairs, shown_cells, wanted_cells
from fl_lightning.bench.driver import Driver
from fl_lightning.bench.process import Interrupt
from fl_lightning.bench.results import CellResult
from fl_lightning.bench.study import open_study

pytestmark = pytest.mark.filterwarnings("ignore:Heartbeat of storage")
TEXT = """
title: Toy
base: {model: {class_path: Toy}, trainer: {max_rounds: 3}}
axes:
  alpha: {key: data.alpha, values: [1, 2]}
  method: {FedAvg: {}, Alike: {method: [a]}, Better: {method: [b]}, Noisy: {method: [c]}}
seeds: 5
decide: {margin: 1.0, max_seeds: 12}
"""
# standard deviation of the differences of each method, and their mean, in points
DIFFERENCES = {"FedAvg": (0.0, 0.0), "Alike": (0.3, 0.0), "Better": (0.5, 4.0), "Noisy": (8.0, 0.0)}


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    monkeypatch.setattr(drivers, "QUEUE_POLL", 0.05)


@pytest.fixture
def suite(tmp_path):
    return toy_suite(tmp_path, TEXT)


def answer(cell):
    """The outcome of a cell, which depends on its name alone."""
    (method,) = (one for one in DIFFERENCES if f"method={one}" in cell["name"])
    deviation, mean = DIFFERENCES[method]
    drawn = random.Random(cell["name"]).gauss(mean, deviation)
    return outcome([0.5 + drawn / 100], plan=cell["name"].rpartition("=")[2])


def answered(suite, cells, answer=answer):
    """The results of what the rule asks for, cell by cell, until it asks for no more."""
    results = {}
    while missing := [cell for cell in wanted_cells(suite, cells, results) if cell.digest not in results]:
        told = answer({"name": missing[0].name})
        of_cell = {"state": "failed"} if "failed" in told else {"state": "done", **told["done"]}
        results[missing[0].digest] = CellResult(missing[0].name, missing[0].digest, **of_cell)
    return results


def seeds_of(names):
    """The number of seeds of each combination of labels; refuses others than the first ones, and repetitions."""
    seeds = {}
    for name in names:
        labels, _, seed = name.rpartition(",seed=")
        seeds.setdefault(labels, []).append(int(seed))
    assert all(sorted(of) == list(range(len(of))) for of in seeds.values())
    return {labels: len(of) for labels, of in seeds.items()}


def all_cells(suite):
    return suite.cells(seeds=range(suite.decide.max_seeds))


def test_seeds_go_to_undecided_pairs_alone_and_the_baseline_has_those_of_all(suite):
    cells = all_cells(suite)
    results = answered(suite, cells)
    seeds = seeds_of(result.cell for result in results.values())
    for alpha in ("1", "2"):
        own = {method: seeds[f"alpha={alpha},method={method}"] for method in DIFFERENCES}
        assert 5 <= own["Alike"] < 12
        assert 5 <= own["Better"] < 12
        assert own["Noisy"] == own["FedAvg"] == 12
    assert len(shown_cells(suite, cells, results)) == len(results) < len(cells)


def test_a_decided_pair_was_undecided_one_seed_earlier(suite):
    """With the last seed of a pair taken away, the same look asks for it: none was run that was not asked for."""
    cells = all_cells(suite)
    results = answered(suite, cells)
    longer = {name: n for name, n in seeds_of(one.cell for one in results.values()).items() if n > 5}
    assert longer
    for labels, number in longer.items():
        if "FedAvg" not in labels:
            (cell,) = (one for one in cells if one.name == f"{labels},seed={number - 1}")
            before = {digest: result for digest, result in results.items() if digest != cell.digest}
            assert cell in wanted_cells(suite, cells, before)


def test_a_failed_seed_ends_its_pair(suite):
    """A pair must not pass over a seed because of what became of it."""

    def failing(cell):
        return {"failed": "no memory"} if "alpha=1,method=Noisy,seed=6" in cell["name"] else answer(cell)

    seeds = seeds_of(one.cell for one in answered(suite, all_cells(suite), failing).values())
    assert seeds["alpha=1,method=Noisy"] == 7
    assert seeds["alpha=2,method=Noisy"] == 12


def test_some_pairs_have_the_baseline_s_cells_with_them(suite):
    cells = all_cells(suite)
    chosen = cells_of_pairs(suite, cells, ["method=Better,alpha=2"])
    assert {cell.name.rpartition(",")[0] for cell in chosen} == {"alpha=2,method=Better", "alpha=2,method=FedAvg"}
    assert [cell.seed for cell in chosen] == sorted(2 * [*range(12)])
    assert cells_of_pairs(suite, cells, []) == cells
    alone = seeds_of(one.cell for one in answered(suite, chosen).values())
    assert alone["alpha=2,method=FedAvg"] == alone["alpha=2,method=Better"] < 12
    for pattern in ("method=FedAvg", "method=Better,seed=3"):
        with refused("--only"):
            cells_of_pairs(suite, cells, [pattern])


def deciding(suite, folder, runs=lambda cell, on_round: answer(cell), jobs=1):
    """A driver that adds seeds to two pairs until they are decided, and what it says."""
    cells = cells_of_pairs(suite, all_cells(suite), ["alpha=1,method=Better", "alpha=1,method=Alike"])
    said, runner, wanted = [], partial(FakeRunner, answer=runs), partial(wanted_cells, suite, cells)
    backend = toy_database(folder)
    open_study(suite, backend, cells)
    return Driver(suite, cells, backend, folder, jobs, said.append, runner, wanted=wanted), said


def test_jobs_side_by_side_and_after_a_stop_run_what_one_alone_would(tmp_path, suite):
    def stopping(cell, on_round):
        if len(first.runners[0].ran) == 8:
            first.stop()
            raise Interrupt
        return answer(cell)

    first, _ = deciding(suite, tmp_path, stopping)
    first.run()
    second, said = deciding(suite, tmp_path, jobs=2)
    second.run()
    ran = [*first.runners[0].ran[:-1], *(name for runner in second.runners for name in runner.ran)]
    alone = [one.cell for one in answered(suite, second.cells).values()]
    assert sorted(ran) == sorted(alone)
    assert f"({len(alone)} of {len(alone)} done so far)" in said[-1]


def test_after_the_hours_no_cell_is_begun(tmp_path, suite):
    driver, _ = deciding(suite, tmp_path)
    driver._end = 0.0
    driver.run()
    assert driver.late
    assert not driver.runners[0].ran


@pytest.mark.parametrize(
    ("old", "new", "keys"),
    [
        ("margin: 1.0, ", "", ["decide.margin"]),
        ("margin: 1.0", "margin: 0", ["decide.margin"]),
        ("margin: 1.0", "margin: .inf", ["decide.margin"]),
        ("margin: 1.0", "margin: 1, prior_scale: 0", ["decide.prior_scale"]),
        ("margin: 1.0", "margin: 1, alpha: 5", ["decide.alpha"]),
        ("max_seeds: 12", "max_seeds: 4", ["decide.max_seeds", "seeds"]),
        ("max_seeds: 12", "seeds: 12", ["decide", "max_seeds"]),
        ("decide:", "interval: t\ndecide:", ["interval", "decide"]),
        ("decide:", "confidence: 0.9\ndecide:", ["confidence", "alpha"]),
        ("decide:", "interval: sequence\n#", ["interval"]),
        ("decide:", "baseline: {}\ndecide:", ["baseline"]),
        ("decide:", "tables: [{show: seconds}]\ndecide:", ["tables.show", "final"]),
        ("decide:", "tables: [{show: final}, {show: rank}]\ndecide:", ["tables.show", "rank"]),
    ],
)
def test_a_rule_that_cannot_be_followed_is_refused(tmp_path, old, new, keys):
    assert old in TEXT
    with refused(*keys):
        toy_suite(tmp_path, TEXT.replace(old, new))
