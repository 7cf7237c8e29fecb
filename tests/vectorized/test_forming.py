"""Which clients share a group under ``clients_per_step=auto``."""

import pytest
import torch
from helpers.beside import rows
from helpers.runs import small_trainer
from helpers.tiny import TinyModule

pytestmark = pytest.mark.usefixtures("undrawn")


def fit(tmp_path, sizes, workers=2, **kwargs):
    """A run of a round; returns its state, and the clients and the steps on each worker."""
    torch.manual_seed(0)
    how = {"threads_per_worker": 1, "max_rounds": 1, "devices": workers, "clients_per_step": "auto", **kwargs}
    trainer = small_trainer(tmp_path, **how)
    trainer.fit(TinyModule(), rows(sizes))
    row = trainer.history[0]
    placed = sorted((row[f"placed/{n}/clients"], row[f"placed/{n}/steps"]) for n in range(workers) if workers > 1)
    return trainer.server.state, placed


def test_a_client_of_far_more_steps_trains_by_itself(tmp_path):
    _, placed = fit(tmp_path, [480, *[8] * 20])
    assert placed == [(1, 60), (20, 20)]


def test_clients_of_about_as_many_steps_share_a_group(tmp_path):
    _, placed = fit(tmp_path, [16, *[8] * 20])
    assert placed == [(0, 0), (21, 22)]
