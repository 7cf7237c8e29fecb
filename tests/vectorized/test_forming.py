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


@pytest.mark.parametrize(("longest", "placed"), [(480, [(1, 60), (20, 20)]), (16, [(0, 0), (21, 22)])])
def test_a_client_of_far_more_steps_trains_by_itself_and_of_about_as_many_in_a_group(tmp_path, longest, placed):
    assert fit(tmp_path, [longest, *[8] * 20])[1] == placed
