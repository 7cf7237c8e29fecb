"""The arguments of the callbacks that measure clients, which clients they draw, and the groups of their classes."""

import numpy as np
import pytest
from helpers.errors import refused

from fl_lightning import callbacks
from fl_lightning.callbacks.by_client import drawn_clients, groups_of


@pytest.mark.parametrize(
    ("name", "argument", "value"),
    [
        ("PerClassAccuracy", "every_n_rounds", 0),
        ("PerClassAccuracy", "max_clients", 0),
        ("PerClassAccuracy", "examples", 0),
        ("PerClassAccuracy", "majority", 0),
        ("PersonalAccuracy", "max_clients", 0),
        ("PersonalAccuracy", "examples", 0),
        ("PersonalAccuracy", "fine_tune_steps", -1),
        ("PersonalAccuracy", "fine_tune", "first"),
        ("DeviationBound", "examples", 0),
        ("DeviationBound", "tau", -1),
        ("DeviationBound", "majority", -1),
        ("CostLedger", "every_n_rounds", 0),
    ],
)
def test_arguments_out_of_range_are_refused(name, argument, value):
    with refused(f"{name}.{argument}={value!r}"):
        getattr(callbacks, name)(**{argument: value})


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
