"""What holds of every callback that measures clients: workers, resuming and the run itself."""

import csv

import numpy as np
import pytest
from helpers.errors import refused
from helpers.runs import Stops, assert_same_bits, history, plain_sgd_model, small_data, small_trainer

from fl_lightning import callbacks
from fl_lightning.callbacks.by_client import drawn_clients, groups_of
from fl_lightning.errors import ClientError
from fl_lightning.methods import MOON, SCAFFOLD, FedBN, FedLC, FedProto

FILES = {
    "Drift": "drift.npz",
    "PerClassAccuracy": "per_class.npz",
    "PersonalAccuracy": "personal.npz",
    "DeviationBound": "deviation.npz",
}
METHODS = {
    "SCAFFOLD+FedLC": lambda: [SCAFFOLD(), FedLC()],
    "MOON+FedBN": lambda: [MOON(), FedBN()],
    "FedProto": lambda: [FedProto()],
}


def observers():
    every = [getattr(callbacks, name)(every_n_rounds=2, max_clients=2) for name in FILES]
    return [*every, callbacks.CostLedger(every_n_rounds=2)]


def fit(tmp_path, watching, method, name, stop=None, ckpt_path=None, **kwargs):
    given = {
        "callbacks": watching,
        "max_rounds": 4,
        "participation": 0.6,
        "threads_per_worker": 1,
        "name": name,
        **kwargs,
    }
    given["callbacks"] = watching + ([Stops(stop)] if stop is not None else [])
    trainer = small_trainer(tmp_path, **given)
    data = small_data(num_clients=5, train_size=200, eval_batch_size=100)
    try:
        trainer.fit(plain_sgd_model(), data, METHODS[method](), ckpt_path)
    except ClientError:
        assert stop is not None
    return trainer


def counted(trainer):
    """The rows of the run without what depends on the machine."""
    return [{k: v for k, v in row.items() if not k.startswith("memory/")} for row in history(trainer)]


def assert_same_files(first, second):
    for name in FILES.values():
        one, other = np.load(first.run_dir / name), np.load(second.run_dir / name)
        assert set(one) == set(other)
        for key in one:
            assert one[key].dtype == other[key].dtype, (name, key)
            np.testing.assert_array_equal(one[key], other[key], err_msg=f"{name}: {key}")
    assert costs(first) == costs(second)


def costs(trainer):
    with (trainer.run_dir / "cost.csv").open() as file:
        rows = list(csv.DictReader(file))
    return [{k: v for k, v in row.items() if not k.startswith(("seconds", "memory"))} for row in rows]


@pytest.mark.parametrize("method", METHODS)
def test_they_change_nothing_and_have_the_same_bits_with_two_workers_and_after_a_resume(tmp_path, method, undrawn):
    plain = fit(tmp_path, [], method, "plain")
    whole = fit(tmp_path, observers(), method, "whole")
    assert_same_bits(plain.server.state, whole.server.state)
    assert [
        {k: row[k] for k in row if k in known} for row, known in zip(counted(whole), counted(plain), strict=True)
    ] == (counted(plain))
    assert np.load(whole.run_dir / "drift.npz")["rounds"].tolist() == [0, 2, 3]

    fit(tmp_path, observers(), method, "stopped", stop=3, devices=2)
    resumed = fit(tmp_path, observers(), method, "stopped", ckpt_path="last", devices=2)
    assert_same_bits(plain.server.state, resumed.server.state)
    assert counted(resumed) == counted(whole)
    assert_same_files(whole, resumed)


@pytest.mark.parametrize("name", FILES)
def test_arguments_out_of_range_are_refused(name):
    for key in ("every_n_rounds", "max_clients"):
        with refused(f"{name}.{key}=0", "1"):
            getattr(callbacks, name)(**{key: 0})


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("PerClassAccuracy", {"examples": 0}),
        ("PerClassAccuracy", {"majority": 0}),
        ("PersonalAccuracy", {"examples": 0}),
        ("PersonalAccuracy", {"fine_tune_steps": -1}),
        ("PersonalAccuracy", {"fine_tune": "first"}),
        ("DeviationBound", {"examples": 0}),
        ("DeviationBound", {"tau": -1}),
        ("DeviationBound", {"majority": -1}),
        ("CostLedger", {"every_n_rounds": 0}),
    ],
)
def test_other_arguments_out_of_range_are_refused(name, arguments):
    with refused(f"{name}.{next(iter(arguments))}="):
        getattr(callbacks, name)(**arguments)


def test_of_many_clients_as_many_as_asked_are_drawn_and_others_in_another_round():
    assert drawn_clients([3, 1, 2], 3, 0, "x") == [1, 2, 3]
    draws = [drawn_clients(range(100), 5, 0, "x", r) for r in range(50)]
    assert all(len(set(one)) == 5 and one == sorted(one) for one in draws)
    assert len({k for one in draws for k in one}) > 70
    assert draws[0] == drawn_clients(range(100), 5, 0, "x", 0) != draws[1]


def test_each_class_is_a_majority_minority_or_missing_one():
    groups = groups_of(np.array([0, 448, 2608, 448]), 1.0)
    assert {name: members.tolist() for name, members in groups.items()} == {
        "majority": [False, False, True, False],
        "minority": [False, True, False, True],
        "missing": [True, False, False, False],
    }
    assert groups_of(np.array([5, 5, 5]))["majority"].all()
    assert groups_of(np.array([1, 5, 5]), 0.1)["majority"].all()
