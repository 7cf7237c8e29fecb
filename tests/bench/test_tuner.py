"""``tune`` finds the best values on a validation split, and writes them as a config with what they come from."""

import math
import os
import signal

import pytest
import yaml
from helpers.benches import FakeWorkerClient, outcome, toy_suite
from helpers.errors import assert_names

from fl_lightning.bench import Cell

pytest_plugins = ["helpers.bench_fixtures"]

pytestmark = pytest.mark.filterwarnings("ignore:Heartbeat of storage")
ROUNDS = 4
SUITE = {
    "base": {"model": {"class_path": "M", "init_args": {"num_classes": 8}}, "trainer": {"max_rounds": ROUNDS}},
    "axes": {
        "alpha": {"key": "data.init_args.alpha", "values": [0.1, 1]},
        "method": {
            "FedAvg": {},
            "FedProx": {"method": [{"class_path": "FedProx", "init_args": {"mu": 0.3}}]},
            "Both": {"method": ["FedProx", {"class_path": "FedUV", "init_args": {"mu": 0.5, "lambda_": "C/4"}}]},
        },
    },
}
GRID = {"search": {"FedProx": {"mu": [0.001, 0.01, 0.1, 1]}}, "at": {"alpha": 0.1}}


def mu(config):
    return config["method"][-1]["init_args"]["mu"]


def near_a_tenth(config, round_):
    """The nearer mu is to 0.1, the better."""
    return (1 - abs(math.log10(mu(config)) + 1) / 4) * (1 + round_) / ROUNDS


@pytest.fixture
def tuned(tune, tmp_path):
    """``tuned(search, curve=...)`` tunes a suite; gives how it has ended, and the rounds of each cell by its config.

    A cell has the value ``curve(config, round_)`` after a round, fails with the ``ValueError`` that it raises, and is
    interrupted where it is None.
    """

    def run(tuning=GRID, *args, curve=near_a_tenth, **keys):
        path = toy_suite(tmp_path, {**SUITE, "tune": tuning, **keys}).path
        rounds = []

        def answer(cell, on_round):
            config, values = Cell({}, 0, tuple(cell["fragments"])).config, []
            assert cell["metric"] == "val/accuracy"
            rounds.append((config, values))
            try:
                for round_ in range(config["trainer"]["max_rounds"]):
                    value = curve(config, round_)
                    if value is None:
                        os.kill(os.getpid(), signal.SIGTERM)
                        return None
                    values.append(value)
                    if on_round(round_, value):
                        break
            except ValueError as error:
                return {"failed": str(error)}
            return outcome(values)

        return tune(path, "--output", "out", *args, answer=answer), rounds

    return run


@pytest.fixture
def best(tmp_path):
    """``best(label)`` is the config that was written for a method, and the lines of its head."""

    def read(label="FedProx"):
        text = (tmp_path / "out" / "tuned" / f"{label}.yaml").read_text(encoding="utf-8")
        return yaml.safe_load(text), [line for line in text.splitlines() if line.startswith("#")]

    return read


def test_each_point_of_a_grid_runs_once_and_the_best_is_written(tuned, best, tmp_path):
    ended, rounds = tuned()
    assert ended.status == 0 and [mu(config) for config, _ in rounds] == [0.001, 0.01, 0.1, 1]
    config, head = best()
    assert config == {"method": [{"class_path": "FedProx", "init_args": {"mu": 0.1}}]}
    assert head[0] == "# FedProx, tuned: the best of 4 trials (4 complete)"
    assert f"study {tmp_path.name}-toy/tune/FedProx in sqlite:///out/study.db" in head[1]
    assert head[2] == "# alpha=0.1, seed 100, 0.1 of the training examples held out"
    assert head[4:] == [
        f"#   {value} with mu {one}" for value, one in ((1, 0.1), (0.75, 0.01), (0.75, 1), (0.5, 0.001))
    ]
    for config, values in rounds:  # the suite's cell on the validation split
        assert config["data"]["init_args"] == {"alpha": 0.1, "val_fraction": 0.1}
        assert config["seed_everything"] == 100 and len(values) == config["trainer"]["max_rounds"] == ROUNDS
    assert tuned()[1] == []


def test_settings_that_the_suite_excludes_are_not_tuned(tuned):
    ended, rounds = tuned({"search": GRID["search"]}, exclude=[{"alpha": 1}])
    assert ended.status == 0 and {config["data"]["init_args"]["alpha"] for config, _ in rounds} == {0.1}


def test_of_equal_trials_the_first_point_is_the_best_though_it_was_run_last(tuned, best):
    def failing(config, round_):
        if mu(config) == 0.001:
            raise ValueError("no memory")
        return 0.5

    tuned(curve=failing)
    tuned(GRID, "--retry", "--jobs", 2, curve=lambda config, round_: 0.5)
    assert mu(best()[0]) == 0.001


def test_a_trial_has_the_mean_over_the_seeds_and_less_may_be_better(tuned, best):
    def curve(config, round_):
        return near_a_tenth(config, round_) + config["seed_everything"]

    _, rounds = tuned({**GRID, "seeds": [5, 7], "minimize": True}, curve=curve)
    assert [config["seed_everything"] for config, _ in rounds] == [5, 7] * 4
    assert mu(best()[0]) == 0.001 and best()[1][4] == "#   6.5 with mu 0.001"


def test_a_range_is_searched_by_tpe(tuned, best):
    """After its ten random points it stays nearer to the best than they are."""
    space = {"low": 0.0001, "high": 10, "log": True}
    base = {**SUITE["base"], "trainer": {"max_rounds": 1}}
    tuning = {"search": {"FedProx": {"mu": space}}, "at": {"alpha": 1}}
    _, rounds = tuned(tuning, curve=lambda config, round_: -abs(math.log10(mu(config)) + 1), base=base)
    found = [mu(config) for config, _ in rounds]
    assert len(set(found)) == 20 and all(0.0001 <= one <= 10 for one in found)
    far = [abs(math.log10(one) + 1) for one in found]
    assert min(far) < 0.3 and sum(far[10:]) < sum(far[:10])
    assert mu(best()[0]) == found[far.index(min(far))]


def test_a_range_of_integers_has_integers(tuned):
    tuning = {"search": {"FedProx": {"trainer.local_epochs": {"low": 1, "high": 4}}}, "at": {"alpha": 1}, "trials": 6}
    _, rounds = tuned(tuning, curve=lambda config, round_: float(config["trainer"].get("local_epochs", 1)))
    epochs = [config["trainer"]["local_epochs"] for config, _ in rounds]
    assert len(epochs) == 6 and all(type(one) is int and 1 <= one <= 4 for one in epochs)


def test_hopeless_trials_are_pruned_by_their_rounds(tuned, best):
    values = [0.1, 0.2, 0.05, 0.15, 0.12, 10.0, 8.0, 0.11]
    tuning = {"search": {"FedProx": {"mu": values}}, "at": {"alpha": 0.1}}
    ended, rounds = tuned(tuning)
    assert {mu(config): len(of) for config, of in rounds if len(of) < ROUNDS} == {10.0: 2, 8.0: 2}
    assert_names(ended.out, "mu 10", "round 1", "seed 100")
    assert "(6 complete, 2 pruned)" in best()[1][0]
    assert tuned(tuning)[1] == []
    _, rounds = tuned({**tuning, "pruner": "none"}, "--output", "other")
    assert {len(of) for _, of in rounds} == {ROUNDS}


def test_a_trial_that_fails_has_its_reason_and_the_others_run(tuned, best):
    def curve(config, round_):
        if mu(config) == 1:
            raise ValueError("FedProx.mu=1: is too much")
        return near_a_tenth(config, round_)

    ended, _ = tuned(curve=curve)
    assert "mu 1: failed: FedProx.mu=1: is too much" in ended.out and "(3 complete, 1 failed)" in best()[1][0]
    assert tuned()[1] == []
    assert [mu(config) for config, _ in tuned(GRID, "--retry")[1]] == [1]


def test_without_a_complete_trial_nothing_is_written(tuned, tmp_path):
    def curve(config, round_):
        if round_:
            raise ValueError("no data")
        return 0.5

    ended, _ = tuned(curve=curve)
    assert ended.status == 1 and not (tmp_path / "out" / "tuned").exists()
    assert_names(ended.err, "FedProx", "no data", "--retry")


@pytest.mark.parametrize("space", [[0.001, 0.01, 0.1], {"low": 0.001, "high": 1, "log": True}])
def test_an_interrupted_trial_goes_on_with_its_own_values(tuned, space):
    tuning = {"search": {"FedProx": {"mu": space}}, "at": {"alpha": 0.1}, "trials": 3}
    begun = []

    def killed(config, round_):
        begun.append(mu(config))
        return None if len(set(begun)) == 2 else near_a_tenth(config, round_)

    ended, first = tuned(tuning, curve=killed)
    assert ended.status == 128 + signal.SIGTERM
    ended, second = tuned(tuning)
    tried = [mu(config) for config, _ in (*first, *second)]
    assert len(tried) == 4 and tried[1] in tried[2:] and ended.status == 0


def test_a_study_of_another_search_is_refused(tuned, tmp_path):
    tuned()
    ended, _ = tuned({**GRID, "seeds": [101]})
    assert ended.status == 2
    assert_names(ended.err, "--storage=", f"{tmp_path.name}-toy/tune/FedProx", "--output")


@pytest.mark.parametrize(
    ("label", "values", "fragment"),
    [
        ("FedProx", {"mu": 2}, {"method": [{"class_path": "FedProx", "init_args": {"mu": 2}}]}),
        ("FedProx", {"data.x": 1}, {"data": {"x": 1}, **SUITE["axes"]["method"]["FedProx"]}),
        (
            "Both",
            {"lambda_": "C/2", "method.0.init_args.mu": 0.1},
            {
                "method": [
                    {"class_path": "FedProx", "init_args": {"mu": 0.1}},
                    {"class_path": "FedUV", "init_args": {"mu": 0.5, "lambda_": 4.0}},
                ]
            },
        ),
        ("FedAvg", {"model.init_args.lr": 0.1}, {"model": {"init_args": {"lr": 0.1}}}),
    ],
)
def test_a_key_is_an_argument_of_a_method_or_of_the_config(tuned, best, label, values, fragment):
    search = {label: {key: [value] for key, value in values.items()}}
    tuned({"search": search, "at": {"alpha": 0.1}}, curve=lambda *_: 0.5)
    assert best(label)[0] == fragment


def of_mu(space):
    return {**GRID, "search": {"FedProx": {"mu": space}}}


@pytest.mark.parametrize(
    ("tune_key", "named"),
    [
        ({}, "tune=None"),
        ({"at": {"alpha": 1}}, "tune.search=None"),
        ({**GRID, "searches": 1}, "tune.searches=1"),
        ({**GRID, "at": {"alpha": 5}}, "tune.at.alpha='5'"),
        ({**GRID, "at": {"alpha": 1, "beta": 1}}, "tune.at='beta'"),
        ({**GRID, "search": {"MOON": {"mu": [1]}}}, "tune.search='MOON'"),
        ({**GRID, "search": {"FedProx": {}}}, "tune.search.FedProx={}"),
        (of_mu({"low": 0, "high": 1, "log": True}), "tune.search.FedProx.mu="),
        (of_mu({"low": 0, "hihg": 1}), "tune.search.FedProx.mu="),
        ({**GRID, "metric": "test/accuracy"}, "tune.metric='test/accuracy'"),
        ({**GRID, "pruner": "mean"}, "tune.pruner='mean'"),
        ({**GRID, "val_fraction": 2}, "tune.val_fraction=2"),
        ({**GRID, "search": {"FedAvg": {"mu": [1]}}}, "tune.search.FedAvg.mu"),
        ({**GRID, "search": {"FedProx": {"method.1.init_args.mu": [1]}}}, "tune.search.FedProx.method.1.init_args.mu"),
        ({**GRID, "search": {"FedProx": {"method.0.mu": [1]}}}, "tune.search.FedProx.method.0.mu"),
    ],
)
def test_what_cannot_be_tuned_is_refused_in_one_line(tuned, tune_key, named):
    ended, _ = tuned(tune_key, curve=pytest.fail)
    assert ended.status == 2 and ended.err.count("\n") == 1 and len(ended.err) < 500
    assert_names(ended.err, named)


def test_a_trial_that_cannot_be_built_is_refused_before_any_runs(tuned, tmp_path, monkeypatch):
    def check(client, metric, configs):
        ((name, fragments),) = configs.items()
        assert metric == "val/accuracy" and mu(Cell({}, 0, fragments).config) == 0.001
        return {name: "data: Data has no 'val_fraction'"}

    monkeypatch.setattr(FakeWorkerClient, "check", check)
    ended, rounds = tuned()
    assert ended.status == 2 and not rounds and not (tmp_path / "out").exists() and ended.err.count("\n") == 1
    assert_names(ended.err, "tune.search.FedProx: data: Data", "null", "val_dataloader")
