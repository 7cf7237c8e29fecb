"""Tuning finds the best values on a validation split, and says what they come from."""

import math

import pytest
import yaml
from helpers.benches import toy_database
from helpers.errors import refused

from fl_lightning.bench import load_suite
from fl_lightning.bench.fragments import merged_config
from fl_lightning.bench.process import Interrupt
from fl_lightning.bench.tune import Tuner, check_metric, open_search, retry_failed, trial_outcome, write_best
from fl_lightning.bench.tuning import Search, tuning_of
from fl_lightning.errors import UsageError

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


@pytest.fixture
def make(tmp_path):
    """A suite with a key ``tune``."""

    def load(tune=GRID, **keys):
        path = tmp_path / "own" / "table.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(yaml.safe_dump({**SUITE, "tune": tune, **keys}))
        return load_suite(path)

    return load


class FakeRunner:
    """Runs cells by a function from their config and a round to a value; an exception of it is what becomes of them.

    Attributes:
        rounds: rounds of each cell that it has run, with its config.
    """

    def __init__(self, curve):
        self.curve, self.rounds = curve, []

    def run(self, cell, on_round):
        config = merged_config(cell["fragments"])
        assert cell["metric"] == "val/accuracy"
        values = {}
        self.rounds.append((config, values))
        for round_ in range(config["trainer"]["max_rounds"]):
            try:
                values[round_] = self.curve(config, round_)
            except UsageError as error:
                return {"failed": str(error)}
            if on_round(round_, values[round_]):
                break
        return {"done": {"values": values, "metrics": {"time/round": 0.1}}}

    def interrupt(self):
        pass

    def kill(self):
        pass

    def close(self):
        pass


def mu(config):
    return config["method"][-1]["init_args"]["mu"]


def near_a_tenth(config, round_):
    """The nearer mu is to 0.1, the better."""
    return (1 - abs(math.log10(mu(config)) + 1) / 4) * (1 + round_) / ROUNDS


def tuned(suite, tmp_path, curve=near_a_tenth, jobs=1, trials=None, runner=None, label="FedProx"):
    """The search, its study and its runner, after all trials."""
    search = Search(suite, tuning_of(suite), label, trials=trials)
    backend = toy_database(tmp_path)
    runner = runner or FakeRunner(curve)
    tuner = Tuner(suite, [search], backend, tmp_path, jobs, lambda line: None, lambda job: runner)
    tuner.run()
    if tuner.error is not None:
        raise tuner.error
    return search, open_search(search, backend), runner


def test_a_grid_is_run_once_and_its_best_written(make, tmp_path):
    search, study, runner = tuned(make(), tmp_path)
    assert [mu(config) for config, _ in runner.rounds] == [0.001, 0.01, 0.1, 1]
    assert study.study_name == "own-table/tune/FedProx"
    path = write_best(search, study, tmp_path, "postgresql://me:secret@server/db")
    assert path == tmp_path / "tuned" / "FedProx.yaml"
    assert yaml.safe_load(path.read_text()) == {"method": [{"class_path": "FedProx", "init_args": {"mu": 0.1}}]}
    head = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert head == [
        "# FedProx, tuned: the best of 4 trials (4 complete)",
        "# study own-table/tune/FedProx in postgresql://me@server/db",
        "# alpha=0.1, seed 100, 0.1 of the training examples held out",
        "# val/accuracy after 4 rounds:",
        "#   1 with mu 0.1",
        "#   0.75 with mu 0.01",
        "#   0.75 with mu 1",
        "#   0.5 with mu 0.001",
    ]
    again = tuned(make(), tmp_path)[2]
    assert again.rounds == []


def test_of_equal_trials_the_first_point_is_the_best_whenever_it_was_run(make, tmp_path):
    """A grid that was killed in the first trial ends with it, and has the same best as one that was not."""
    search = Search(make(), tuning_of(make()), "FedProx")
    study = open_search(search, toy_database(tmp_path))
    for slot in [*list(search.slots)[1:], next(iter(search.slots))]:
        study.enqueue_trial(search.slots[slot], user_attrs={"digest": slot})
    tuned(make(), tmp_path, lambda config, round_: 0.5)
    path = write_best(search, study, tmp_path, "sqlite:///study.db")
    assert yaml.safe_load(path.read_text())["method"][0]["init_args"]["mu"] == 0.001


def test_a_value_of_several_lines_stays_in_the_comment(make, tmp_path):
    tune = {"search": {"FedProx": {"name": ["a\nmodel: 1", "b\u202e"]}}, "at": {"alpha": 0.1}}
    search, study, _ = tuned(make(tune), tmp_path, lambda config, round_: 0.5)
    written = yaml.safe_load(write_best(search, study, tmp_path, "sqlite:///study.db").read_text(encoding="utf-8"))
    assert list(written) == ["method"]


def test_a_trial_is_the_suite_s_cell_on_the_validation_split(make, tmp_path):
    _, _, runner = tuned(make(), tmp_path)
    for config, _ in runner.rounds:
        assert config["data"]["init_args"] == {"alpha": 0.1, "val_fraction": 0.1}
        assert config["seed_everything"] == 100
        assert config["trainer"]["max_rounds"] == ROUNDS


def test_a_trial_has_the_mean_over_the_seeds(make, tmp_path):
    suite = make({**GRID, "seeds": [5, 7]})

    def curve(config, round_):
        return near_a_tenth(config, round_) + config["seed_everything"]

    _, study, runner = tuned(suite, tmp_path, curve)
    assert [config["seed_everything"] for config, _ in runner.rounds] == [5, 7] * 4
    assert study.best_value == pytest.approx(1 + 6)


def test_a_smaller_loss_is_better_where_the_suite_says_so(make, tmp_path):
    search, study, _ = tuned(make({**GRID, "minimize": True}), tmp_path)
    assert study.best_params == {"mu": 0.001}
    head = write_best(search, study, tmp_path, "sqlite:///x").read_text().splitlines()
    assert head[4] == "#   0.5 with mu 0.001"


def test_a_range_is_searched_by_tpe(make, tmp_path):
    """After its ten random points it stays nearer to the best than they are."""
    space = {"low": 0.0001, "high": 10, "log": True}
    base = {**SUITE["base"], "trainer": {"max_rounds": 1}}
    suite = make({"search": {"FedProx": {"mu": space}}, "at": {"alpha": 1}}, base=base)
    _, study, runner = tuned(suite, tmp_path, lambda config, round_: -abs(math.log10(mu(config)) + 1))
    found = [trial.params["mu"] for trial in study.get_trials()]
    assert len(found) == len(runner.rounds) == 20
    assert all(0.0001 <= one <= 10 for one in found)
    assert len(set(found)) == 20
    far = [abs(math.log10(one) + 1) for one in found]
    assert min(far) == -study.best_value < 0.3
    assert sum(far[10:]) < sum(far[:10])


def test_a_range_of_integers_has_integers(make, tmp_path):
    suite = make(
        {"search": {"FedProx": {"trainer.local_epochs": {"low": 1, "high": 4}}}, "at": {"alpha": 1}, "trials": 6}
    )
    _, _, runner = tuned(suite, tmp_path, lambda config, round_: float(config["trainer"]["local_epochs"]))
    epochs = [config["trainer"]["local_epochs"] for config, _ in runner.rounds]
    assert all(type(one) is int and 1 <= one <= 4 for one in epochs)


def test_hopeless_trials_are_pruned_by_their_rounds(make, tmp_path):
    values = [0.1, 0.2, 0.05, 0.15, 0.12, 10.0, 8.0, 0.11]
    suite = make({"search": {"FedProx": {"mu": values}}, "at": {"alpha": 0.1}})
    search, study, runner = tuned(suite, tmp_path)
    rounds = {mu(config): len(values) for config, values in runner.rounds}
    assert {one: number for one, number in rounds.items() if number < ROUNDS} == {10.0: 2, 8.0: 2}
    states = {trial.params["mu"]: trial.state.name for trial in study.get_trials()}
    assert (states[10.0], states[8.0], states[0.11]) == ("PRUNED", "PRUNED", "COMPLETE")
    text = write_best(search, study, tmp_path, "sqlite:///x").read_text()
    assert "the best of 8 trials (6 complete, 2 pruned)" in text
    assert trial_outcome(study.get_trials()[5], search) == "mu 10: pruned after round 1 with seed 100"
    assert tuned(suite, tmp_path)[2].rounds == []


def test_nothing_is_pruned_where_that_is_asked_for(make, tmp_path):
    values = [0.1, 0.2, 0.05, 0.15, 0.12, 10.0]
    _, _, runner = tuned(
        make({"search": {"FedProx": {"mu": values}}, "at": {"alpha": 0.1}, "pruner": "none"}), tmp_path
    )
    assert {len(values) for _, values in runner.rounds} == {ROUNDS}


def test_a_trial_that_fails_has_the_reason_and_the_others_run(make, tmp_path):
    def curve(config, round_):
        if mu(config) == 1:
            raise UsageError("FedProx.mu=1: is too much")
        return near_a_tenth(config, round_)

    search, study, _ = tuned(make(), tmp_path, curve)
    assert [trial.state.name for trial in study.get_trials()] == ["COMPLETE"] * 3 + ["FAIL"]
    assert trial_outcome(study.get_trials()[-1], search) == "mu 1: failed: FedProx.mu=1: is too much"
    assert "(3 complete, 1 failed)" in write_best(search, study, tmp_path, "sqlite:///x").read_text()
    assert tuned(make(), tmp_path)[2].rounds == []
    retry_failed(search, study)
    assert [mu(config) for config, _ in tuned(make(), tmp_path)[2].rounds] == [1]


def test_without_a_complete_trial_nothing_is_written(make, tmp_path):
    def curve(config, round_):
        raise UsageError("no data")

    search, study, _ = tuned(make(), tmp_path, curve)
    assert write_best(search, study, tmp_path, "sqlite:///x") is None
    assert not (tmp_path / "tuned").exists()


@pytest.mark.parametrize("space", [[0.001, 0.01, 0.1], {"low": 0.001, "high": 1, "log": True}])
def test_an_interrupted_trial_goes_on_with_its_own_values(make, tmp_path, space):
    suite = make({"search": {"FedProx": {"mu": space}}, "at": {"alpha": 0.1}, "trials": 3})
    seen = []

    class Killed(FakeRunner):
        def run(self, cell, on_round):
            config = merged_config(cell["fragments"])
            seen.append((cell["folder"], mu(config)))
            if len(seen) == 2:
                raise Interrupt
            return super().run(cell, on_round)

    _, study, _ = tuned(suite, tmp_path, runner=Killed(near_a_tenth))
    assert len(seen) == 4
    assert seen[1] in seen[2:]  # the same folder, where its checkpoint lies
    assert sorted(trial.state.name for trial in study.get_trials()) == ["COMPLETE"] * 3 + ["FAIL"]


def test_two_jobs_share_the_trials(make, tmp_path):
    _, study, runner = tuned(make(), tmp_path, jobs=2)
    assert sorted(mu(config) for config, _ in runner.rounds) == [0.001, 0.01, 0.1, 1]
    assert study.best_params == {"mu": 0.1}


def test_a_study_of_another_search_is_refused(make, tmp_path):
    tuned(make(), tmp_path)
    with refused("--storage=", "own-table/tune/FedProx", "--output"):
        tuned(make({**GRID, "seeds": [101]}), tmp_path)


@pytest.mark.parametrize(
    ("label", "values", "fragment"),
    [
        ("FedProx", {"mu": 2}, {"method": [{"class_path": "FedProx", "init_args": {"mu": 2}}]}),
        ("FedProx", {"mu": 0.3}, SUITE["axes"]["method"]["FedProx"]),  # as it was
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
def test_a_key_is_an_argument_of_a_method_or_of_the_config(make, label, values, fragment):
    suite = make({"search": {label: {key: [value] for key, value in values.items()}}, "at": {"alpha": 0.1}})
    assert Search(suite, tuning_of(suite), label).fragment(values) == fragment


@pytest.mark.parametrize(
    ("label", "key"), [("FedAvg", "mu"), ("FedProx", "method.1.init_args.mu"), ("FedProx", "method.0.mu")]
)
def test_a_key_of_a_method_that_is_not_there_is_refused(make, label, key):
    suite = make({"search": {label: {key: [1]}}, "at": {"alpha": 0.1}})
    with refused(f"tune.search.{label}.{key}"):
        Search(suite, tuning_of(suite), label).fragment({key: 1})


@pytest.mark.parametrize(
    ("tune", "named"),
    [
        ({}, "tune=None"),
        ({"at": {"alpha": 1}}, "tune.search=None"),
        ({**GRID, "searches": 1}, "searches"),
        ({**GRID, "at": {}}, "tune.at.alpha=None"),
        ({**GRID, "at": {"alpha": 5}}, "tune.at.alpha='5'"),
        ({**GRID, "at": {"alpha": 1, "beta": 1}}, "tune.at='beta'"),
        ({**GRID, "search": {"MOON": {"mu": [1]}}}, "tune.search='MOON'"),
        ({**GRID, "search": {"FedProx": {}}}, "tune.search.FedProx={}"),
        ({**GRID, "search": {"FedProx": {"mu": []}}}, "tune.search.FedProx.mu=[]"),
        ({**GRID, "search": {"FedProx": {"mu": 1}}}, "tune.search.FedProx.mu=1"),
        ({**GRID, "search": {"FedProx": {"mu": {"low": 0, "high": 1, "log": True}}}}, "tune.search.FedProx.mu="),
        ({**GRID, "search": {"FedProx": {"mu": {"low": 0, "hihg": 1}}}}, "tune.search.FedProx.mu="),
        ({**GRID, "search": {"FedProx": {"mu": {"low": 0.1}}}}, "tune.search.FedProx.mu="),
        ({**GRID, "metric": "test/accuracy"}, "tune.metric='test/accuracy'"),
        ({**GRID, "pruner": "mean"}, "tune.pruner='mean'"),
        ({**GRID, "trials": 0}, "tune.trials=0"),
        ({**GRID, "seeds": "a"}, "tune.seeds='a'"),
        ({**GRID, "at": ["alpha"]}, "tune.at=['alpha']"),
        ({**GRID, "trials": "many"}, "tune.trials='many'"),
        ({**GRID, "val_fraction": 2}, "tune.val_fraction=2"),
        ({**GRID, "val_fraction": "a"}, "tune.val_fraction='a'"),
        ({**GRID, "metric": 5}, "tune.metric=5"),
        ({**GRID, "minimize": "yes"}, "tune.minimize='yes'"),
        (5, "tune=5"),
    ],
)
def test_what_cannot_be_tuned_is_refused_in_one_line(make, tune, named):
    with refused(named) as caught:
        tuning_of(make(tune))
    assert len(str(caught.value)) < 300 + len(str(make(GRID).path))


def test_a_run_without_the_metric_is_refused_with_the_remedy(make):
    class Lacks(FakeRunner):
        def run(self, cell, on_round):
            assert merged_config(cell["fragments"])["trainer"]["max_rounds"] == 1
            return {"failed": "metric='val/accuracy': the run does not log it; among others it logs test/accuracy"}

    suite = make()
    with refused("tune.metric='val/accuracy'", "tune.val_fraction"):
        check_metric(Search(suite, tuning_of(suite), "FedProx"), Lacks(None))
    check_metric(Search(suite, tuning_of(suite), "FedProx"), FakeRunner(near_a_tenth))
