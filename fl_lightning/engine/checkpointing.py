"""Saves a run to a checkpoint, part by part, and restores it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_lightning.callbacks.base import load_states, states
from fl_lightning.engine.changes import (
    changes_of,
    forget_the_rest,
    identity,
    memories_that_stay,
    methods_that_stay,
    record,
    restore_schedule,
    state_of_server,
    states_of_callbacks,
)
from fl_lightning.engine.model_files import call_on_load, entries_of_module, restore_data, state_of_data, storable
from fl_lightning.errors import UsageError
from fl_lightning.records.checkpoint import client_files, in_place, read
from fl_lightning.records.files import save

if TYPE_CHECKING:
    from fl_lightning.engine.run import Run


def save_run(run: Run, folder: Path) -> None:
    """Write ``last.ckpt``, and a file for each client that has trained since the last checkpoint.

    All workers call this. The old checkpoint stays valid until the new one is complete.
    """
    memories, done = run.client.memories(), run.server.round + 1
    memories.write(folder / "clients", done, run.workers)
    if run.workers.rank == 0:
        save({**contents(run), "round": done, "clients": memories.state_dict()}, folder / "last.ckpt")
        memories.remove_replaced(folder / "clients")


def contents(run: Run) -> dict[str, Any]:
    """The state of a run, without the clients' memories."""
    return {
        "state_dict": run.methods.evaluated_state(run.server),
        "server": run.server.state_dict(),
        "methods": run.methods.state_dict(),
        "module": storable(entries_of_module(run)),
        "datamodule": state_of_data(run.data),
        "client_schedulers": run.local_training.monitored.state_dict(),
        "evaluated": run.client.logged.evaluated,
        "callbacks": states(run.callbacks),
        "history": run.metrics.history,
        "changes": run.folder.changes,
        **identity(run),
    }


def restore_run(run: Run, path: Path | None, allow_changes: bool = False) -> dict[str, Any]:
    """Restore a run, without its callbacks, from a checkpoint, and return the contents of the checkpoint.

    Without a path nothing is restored, and the contents only say that no round is done. With ``allow_changes`` the run
    may be a changed one, whose changes are then in ``run.folder``.

    Raises:
        UsageError: it is not a checkpoint of this run: another seed, partition, model, list of methods, argument.
    """
    ours = identity(run)  # as the run begins
    if path is None:
        return {"round": 0}
    checkpoint = read(path)
    changes = changes_of(ours, run, path, checkpoint, allow_changes)
    run.folder.changes, run.folder.changed = record(path, checkpoint, changes), bool(changes)
    files, stay = client_files(path, checkpoint), methods_that_stay(run, checkpoint, changes)
    try:
        run.server.load_state_dict(state_of_server(run, checkpoint, changes))
        for method in stay:
            method.load_state_dict(checkpoint["methods"][method.name])
        restore_schedule(run, checkpoint.get("client_schedulers", {}), changes)
        run.client.logged.evaluated = checkpoint.get("evaluated", {})
    except (KeyError, ValueError, RuntimeError) as error:
        raise UsageError(f"ckpt_path={str(path)!r}: not a checkpoint of this run: {error}") from error
    if changes:
        files = memories_that_stay(run, files, stay)
    run.client.memories().restore(files, run.workers, in_place(path) and not changes)
    if changes:
        forget_the_rest(run, stay)
    run.metrics.restore(checkpoint["history"])
    call_on_load(run.client, checkpoint)
    restore_data(run.data, checkpoint.get("datamodule", {}))
    return checkpoint


def restore_callbacks(run: Run, checkpoint: dict[str, Any]) -> None:
    """Restore the callbacks from the contents of a checkpoint; nothing where no checkpoint was read."""
    if "callbacks" in checkpoint:
        load_states(run.callbacks, states_of_callbacks(run, checkpoint))
