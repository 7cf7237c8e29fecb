"""The checkpoint of the best round is kept, and can be evaluated and resumed from."""

from functools import partial

import pytest
import torch
from helpers.errors import warned
from helpers.runs import assert_same_bits, plain_sgd_model, small_data, small_trainer, watched

from fl_lightning.callbacks import BestCheckpoint, Callback
from fl_lightning.methods import MOON

data = partial(small_data, num_clients=3, train_size=100)
fit = partial(watched, name="run", max_rounds=5, model=plain_sgd_model, data=data, methods=lambda: [MOON()])


class Rises(Callback):
    """Logs a score of each round, and keeps the states."""

    values = (1.0, 3.0, float("nan"), 2.0, 0.5)

    def __init__(self):
        self.states = {}

    def on_round_end(self, trainer):
        trainer.log("score", self.values[trainer.server.round])
        self.states[trainer.server.round] = {k: v.clone() for k, v in trainer.server.state.items()}


def best(tmp_path, version=0):
    return tmp_path / f"run/version_{version}/checkpoints/best.ckpt"


@pytest.mark.parametrize(("mode", "round_", "devices"), [("max", 1, 1), ("min", 4, 2)])
def test_the_best_round_is_kept_whatever_the_interval(tmp_path, mode, round_, devices):
    rises = Rises()
    how = {"devices": devices, "threads_per_worker": 1, "checkpoint_every_n_rounds": 100}
    with warned("round 2", "score"):
        fit(tmp_path, BestCheckpoint("score", mode), rises, **how)
    assert_same_bits(torch.load(best(tmp_path), weights_only=True)["state_dict"], rises.states[round_])


def test_a_run_that_resumes_knows_the_best_and_one_from_the_best_leaves_it(tmp_path):
    with warned("round 2", "score"):
        fit(tmp_path, BestCheckpoint("score", "max"), Rises(), max_rounds=3)
    whole = fit(tmp_path, BestCheckpoint("score", "max"), Rises(), ckpt_path="last")
    assert torch.load(best(tmp_path), weights_only=True)["round"] == 2
    with warned("round 2", "score"):
        again = fit(tmp_path, BestCheckpoint("score", "max"), Rises(), ckpt_path=best(tmp_path))
    assert_same_bits(whole.server.state, again.server.state)
    assert again.run_dir.name == "version_1"
    assert not best(tmp_path, 1).exists()  # no round after it was better
    with warned("ckpt_path=", "method=[]", "moon"):
        metrics = small_trainer(tmp_path).test(plain_sgd_model(), data(), best(tmp_path))
    assert metrics["test/accuracy"] == pytest.approx(whole.history[1]["test/accuracy"])
