"""What holds of every callback that measures clients: workers, resuming and the run itself."""

import numpy as np
import pytest
from helpers.runs import assert_same_bits, history, plain_sgd_model, small_data, small_trainer

from fl_lightning import callbacks
from fl_lightning.callbacks import Callback
from fl_lightning.callbacks.by_client import drawn, groups_of
from fl_lightning.errors import ClientError, UsageError
from fl_lightning.methods import SCAFFOLD, FedBN

FILES = {"Drift": "drift.npz"}
METHODS = {"fedavg": list, "SCAFFOLD": lambda: [SCAFFOLD()], "FedBN": lambda: [FedBN()]}


class Stops(Callback):
    """Ends the run in a round, after its rows are written and before its checkpoint is."""

    def __init__(self, round_):
        self.round = round_

    def on_client_end(self, trainer, client):
        if trainer.server.round == self.round:
            raise ClientError("stopped")


def fit(tmp_path, *observers, method="fedavg", ckpt_path=None, **kwargs):
    given = {"callbacks": list(observers), "max_rounds": 4, "participation": 0.6, "threads_per_worker": 1, **kwargs}
    trainer = small_trainer(tmp_path, **given)
    try:
        trainer.fit(plain_sgd_model(), small_data(num_clients=5, train_size=200), METHODS[method](), ckpt_path)
    except ClientError:
        assert any(isinstance(one, Stops) for one in observers)
    return trainer


def observer(name):
    return getattr(callbacks, name)(every_n_rounds=2, max_clients=2)


def same_file(first, second):
    one, other = np.load(first), np.load(second)
    assert set(one) == set(other)
    for name in one:
        assert one[name].dtype == other[name].dtype, name
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", FILES)
def test_it_changes_nothing_and_has_the_same_bits_with_two_workers_and_after_a_resume(tmp_path, name, method):
    plain = fit(tmp_path, method=method, name="plain")
    whole = fit(tmp_path, observer(name), method=method, name="whole")
    assert_same_bits(plain.server.state, whole.server.state)
    known = plain.history[-1].keys()
    assert [{k: row[k] for k in known if k in row} for row in history(whole)] == history(plain)

    two = fit(tmp_path, observer(name), method=method, name="two", devices=2)
    same_file(whole.run_dir / FILES[name], two.run_dir / FILES[name])
    assert history(two) == history(whole)

    fit(tmp_path, observer(name), Stops(3), method=method, name="stopped", devices=2)
    resumed = fit(tmp_path, observer(name), method=method, name="stopped", ckpt_path="last")
    same_file(whole.run_dir / FILES[name], resumed.run_dir / FILES[name])
    assert history(resumed) == history(whole)
    assert np.load(whole.run_dir / FILES[name])["rounds"].tolist() == [0, 2, 3]


@pytest.mark.parametrize("name", FILES)
def test_arguments_out_of_range_are_refused(name):
    for key in ("every_n_rounds", "max_clients"):
        with pytest.raises(UsageError, match=rf"{name}.{key}=0"):
            getattr(callbacks, name)(**{key: 0})


def test_of_many_clients_as_many_as_asked_are_drawn_and_others_in_another_round():
    assert drawn([3, 1, 2], 3, 0, "x") == [1, 2, 3]
    draws = [drawn(range(100), 5, 0, "x", r) for r in range(50)]
    assert all(len(set(one)) == 5 and one == sorted(one) for one in draws)
    assert len({k for one in draws for k in one}) > 70
    assert draws[0] == drawn(range(100), 5, 0, "x", 0) != draws[1]


def test_each_class_is_a_majority_minority_or_missing_one():
    groups = groups_of(np.array([0, 448, 2608, 448]), 1.0)
    assert {name: members.tolist() for name, members in groups.items()} == {
        "majority": [False, False, True, False],
        "minority": [False, True, False, True],
        "missing": [True, False, False, False],
    }
    assert groups_of(np.array([5, 5, 5]))["majority"].all()
    assert groups_of(np.array([1, 5, 5]), 0.1)["majority"].all()
