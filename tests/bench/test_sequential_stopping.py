"""``bench --until-decided`` gives further seeds to the pairs that are undecided, and goes on where it was stopped."""

import os
import random
import signal

import pytest
from helpers.benches import outcome, toy_suite
from helpers.errors import assert_names, refused

pytest_plugins = ["helpers.bench_fixtures"]

pytestmark = pytest.mark.filterwarnings("ignore:Heartbeat of storage")
TEXT = """
title: Toy
base: {model: {class_path: Toy}, trainer: {max_rounds: 3}}
axes:
  alpha: {key: data.alpha, values: [1, 2]}
  method: {FedAvg: {}, Alike: {method: [a]}, Better: {method: [b]}, Noisy: {method: [c]}}
seeds: 5
decide: {margin: 1.0, max_seeds: 9}
"""
# standard deviation of the differences of each method, and their mean, in points
DIFFERENCES = {"FedAvg": (0.0, 0.0), "Alike": (0.3, 0.0), "Better": (0.5, 4.0), "Noisy": (8.0, 0.0)}
PAIR = ["--only", "alpha=1,method=Better", "alpha=1,method=Alike"]


@pytest.fixture
def decide(bench, tmp_path):
    """``decide(*args)`` runs the suite until its pairs are decided."""
    path = toy_suite(tmp_path, TEXT).path

    def run(*args, answer=lambda cell, on_round: drawn(cell)):
        return bench(path, "--until-decided", *args, answer=answer)

    return run


def drawn(cell):
    """The outcome of a cell, which depends on its name alone."""
    (method,) = (one for one in DIFFERENCES if f"method={one}" in cell["name"])
    deviation, mean = DIFFERENCES[method]
    value = random.Random(cell["name"]).gauss(mean, deviation)
    return outcome([0.5 + value / 100], plan=cell["name"].rpartition("=")[2])


def seeds_of(names):
    """The number of seeds of each combination of labels, which are the first ones, each once."""
    seeds = {}
    for name in names:
        labels, _, seed = name.rpartition(",seed=")
        seeds.setdefault(labels, []).append(int(seed))
    assert all(sorted(of) == list(range(len(of))) for of in seeds.values())
    return {labels: len(of) for labels, of in seeds.items()}


def test_only_undecided_pairs_get_further_seeds_and_the_baseline_has_those_of_all(decide):
    ended = decide("--only", "alpha=2")
    own = {labels.removeprefix("alpha=2,method="): number for labels, number in seeds_of(ended.ran).items()}
    assert own == {"FedAvg": 9, "Alike": 6, "Better": 5, "Noisy": 9}
    assert f"({len(ended.ran)} of {len(ended.ran)} done so far)" in ended.out
    assert decide("--only", "alpha=2").ran == []


def test_a_pair_was_undecided_one_seed_before_it_was_decided(decide, tmp_path):
    """With fewer seeds at most, each pair has that number of seeds, or as many as it needs."""
    seeds = seeds_of(decide(*PAIR).ran)
    most = seeds.pop("alpha=1,method=FedAvg")
    assert most == max(seeds.values()) > 5
    toy_suite(tmp_path, TEXT.replace("max_seeds: 9", f"max_seeds: {most - 1}"))
    ended = decide(*PAIR, "--output", "fewer")
    assert ended.out.count("| undecided") == sum(number == most for number in seeds.values())


def test_a_failed_seed_ends_its_pair(decide):
    def failing(cell, on_round):
        return {"failed": "no memory"} if "alpha=1,method=Noisy,seed=6" in cell["name"] else drawn(cell)

    seeds = seeds_of(decide("--only", "alpha=1,method=Noisy", answer=failing).ran)
    assert seeds == {"alpha=1,method=FedAvg": 7, "alpha=1,method=Noisy": 7}


def test_chosen_pairs_come_with_the_cells_of_the_baseline(decide):
    seeds = seeds_of(decide("--only", "method=Better,alpha=2").ran)
    assert set(seeds) == {"alpha=2,method=Better", "alpha=2,method=FedAvg"} and len(set(seeds.values())) == 1
    for pattern in ("method=FedAvg", "method=Better,seed=3"):
        ended = decide("--only", pattern)
        assert ended.status == 2
        assert_names(ended.err, "--only")


def test_two_jobs_and_a_stopped_run_ask_for_the_cells_of_one_whole_run(decide):
    alone = decide(*PAIR, "--output", "alone").ran
    began = []

    def stopping(cell, on_round):
        began.append(cell["name"])
        return os.kill(os.getpid(), signal.SIGTERM) if len(began) == 8 else drawn(cell)

    first = decide(*PAIR, answer=stopping)
    second = decide(*PAIR, "--jobs", 2)
    assert first.status == 128 + signal.SIGTERM and sorted([*first.ran[:-1], *second.ran]) == sorted(alone)


@pytest.mark.parametrize(
    ("old", "new", "keys"),
    [
        ("margin: 1.0, ", "", ["decide.margin"]),
        ("margin: 1.0", "margin: 0", ["decide.margin"]),
        ("margin: 1.0", "margin: .inf", ["decide.margin"]),
        ("margin: 1.0", "margin: 1, prior_scale: 0", ["decide.prior_scale"]),
        ("margin: 1.0", "margin: 1, alpha: 5", ["decide.alpha"]),
        ("max_seeds: 9", "max_seeds: 4", ["decide.max_seeds", "seeds"]),
        ("max_seeds: 9", "seeds: 12", ["decide", "max_seeds"]),
        ("seeds: 5\ndecide: {margin: 1.0, max_seeds: 9}", "decide: {margin: 1, max_seeds: 4}", ["decide.max_seeds=4"]),
        ("max_seeds: 9", "max_seeds: 9, alpha: 1.0e-9", ["decide.max_seeds=9"]),
        ("decide:", "confidence: 0.9\ndecide:", ["confidence", "alpha"]),
        ("decide:", "baseline: {}\ndecide:", ["baseline"]),
        ("decide:", "tables: [{show: final}, {show: rank}]\ndecide:", ["tables.show", "rank"]),
    ],
)
def test_a_rule_that_cannot_be_followed_is_refused(tmp_path, old, new, keys):
    with refused(*keys):
        toy_suite(tmp_path, TEXT.replace(old, new))
