"""A run of SCAFFOLD by several processes: ``python launched.py FOLDER NAME FITS [HOW]``."""

import os
import signal
import sys
from functools import partial

import torch
from torch.optim import SGD

from fl_lightning.callbacks import Callback
from fl_lightning.data import Digits, Dirichlet
from fl_lightning.distributed import launcher
from fl_lightning.methods import SCAFFOLD
from fl_lightning.models import MLP
from helpers.runs import small_data, small_trainer
from helpers.theirs import Synchronises


class KilledOnce(Callback):
    """Kills worker 1 in the last round, unless torchrun has started it again."""

    def on_round_start(self, trainer):
        first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if first and trainer.global_rank == 1 and trainer.server.round == 2:
            os.kill(os.getpid(), signal.SIGKILL)


class PreventsForks(Digits):
    """Data after whose set-up processes cannot be forked, as where it uses a GPU."""

    def setup(self, stage=None):
        super().setup(stage)
        launcher.can_fork = lambda: False


def fit(folder, name, data=small_data, **how):
    """Train a module that synchronises its numbers, and return the global model."""
    given = {"max_rounds": 3, "threads_per_worker": 1, "name": name, **how}
    trainer = small_trainer(folder, enable_progress_bar=False, **given)
    torch.manual_seed(0)
    trainer.fit(Synchronises(MLP(64, [8]), optimizer=partial(SGD, lr=0.02)), data(), SCAFFOLD())
    return {name: value.clone() for name, value in trainer.server.state.items()}


SMALL = {"batch_size": 32, "train_size": 400, "partitioner": Dirichlet(0.3)}
HOW = {
    "killed": {"callbacks": [KilledOnce()]},
    "several_threads": {"devices": 2, "threads_per_worker": 2},
    "no_fork_after_setup": {"devices": 2, "data": partial(PreventsForks, num_clients=4, **SMALL)},
}


def main(folder, name, fits, how=None):
    """Fit several times, as the processes of the tests do."""
    for _ in range(int(fits)):
        fit(folder, name, **HOW.get(how, {}))


if __name__ == "__main__":
    os.environ["PL_GLOBAL_SEED"] = "0"
    main(*sys.argv[1:])
