"""The hooks of the user's own methods meet one batch before anything is written, which shows what they return."""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING

from fl_lightning.engine.first_batch import BEFORE_A_STEP, said_by_fork
from fl_lightning.engine.launch import can_fork
from fl_lightning.errors import UsageError
from fl_lightning.seeding import ambient

if TYPE_CHECKING:
    from fl_lightning.engine.run import Run


def meet_methods(run: Run) -> None:
    """Let the methods' hooks of a client see one batch, in a forked process, of which nothing is left.

    A hook that fails in another way is left to the run, which calls all that this trial does not.

    Raises:
        UsageError: a hook returns what it must not, or writes to what it may only read.
    """
    own = any(not type(method).__module__.startswith("fl_lightning.") for method in run.methods.methods)
    forks = can_fork() and run.fabric.device.type == "cpu" and run.trainer.on_client_error == "raise"
    text = said_by_fork(partial(try_hooks, run)) if own and forks and not BEFORE_A_STEP & run.client.hooks else ""
    if text:
        raise UsageError(text)


def try_hooks(run: Run) -> None:
    """A visit of the first client that has a batch, without an optimizer's step."""
    client, sizes = run.client, ((k, run.local_training.batches(k)) for k in range(run.data.num_clients))
    k = next(k for k, number in sizes if number)
    run.methods.on_round_start(run.server)
    with ambient(run.seed, "first_batch/methods"), client.apart(run.methods), run.loaders.train(k, 0) as loader:
        for rows, batch in itertools.islice(run.loaders.batches(loader), 1):
            client.stand_in.clock.batches = len(loader)
            client.start(run.data.info(k), run.server.state)
            client.logged.begin_batch(batch)
            with client.stand_in.trial(), run.fabric.autocast():
                client.training_step(batch, 0, rows)
            client.finish()
