"""Saves a run to a checkpoint, finds a checkpoint to resume from, and restores it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_info

from fl_lightning.callbacks.base import named
from fl_lightning.core.state import select, uncompiled_names
from fl_lightning.engine.fingerprint import changes_of, description_of, identity, record, touches
from fl_lightning.engine.model_io import call_on_load, restore_data
from fl_lightning.engine.run import Run
from fl_lightning.engine.run_state import load_state_of_round, recorded_state
from fl_lightning.storage.checkpoint import (
    client_files,
    find_checkpoint,
    newest_checkpoint,
    read,
    resumes_in_place,
    unpack_rows,
    valid_checkpoint,
)
from fl_lightning.utilities.errors import ChangedCodeError, UsageError

# parts of the state that are reset when one of these keys changes
FRESH = {
    "server_optimizer": ("trainer.server_optimizer", "trainer.server_optimizer_scope", "model.trained"),
    "methods": ("method", "trainer.buffers", "trainer.server_optimizer_scope", "model.trained"),
    "client_schedulers": ("model.optimizer", "model.lr_scheduler", "trainer.client_schedulers"),
}

# in the warning
NAMES = {"client_schedulers": "schedule that watches a metric"}


def save_run(run: Run, folder: Path) -> None:
    """Write ``last.ckpt``, and one file for each client that has trained since the last checkpoint.

    All workers call this. The old checkpoint becomes ``previous.ckpt``, and stays valid until the new one is complete.
    """
    memories, rounds_done = run.client.memories(), run.server.round + 1
    memories.write(folder / "clients", rounds_done, run.workers)
    if run.folder.checkpoints is not None:
        states, of_methods = (run.methods.evaluated_state(run.server), run.server.state), {*run.client.of_methods}
        frozen = run.folder.checkpoints.keep_frozen(select(run.server.state, run.client.frozen))
        frozen_ids = {id(run.server.state[name]) for name in frozen.get("names", ())}
        # the frozen parameters are in a file of their own
        evaluated, of_server = (
            {name: value for name, value in state.items() if id(value) not in frozen_ids} for state in states
        )
        state = {
            "state_dict": {n: v for n, v in uncompiled_names(evaluated).items() if n not in of_methods},
            "server": {**run.server.state_dict(), "state": of_server},
            "frozen": frozen,
            **recorded_state(run),
            "callbacks": {name: part.state_dict() for name, part in named(run.callbacks).items()},
            "changes": run.folder.changes,
            "round": rounds_done,
            "clients": memories.files,
        }
        run.folder.checkpoints.save(state, run.metrics.history, run.trainer.save_best)
    run.trainer.save_best = False


def checkpoint_to_resume(run: Run, ckpt_path: str | Path | None) -> Path | None:
    """Return the verified checkpoint from which a fit resumes; None if it begins with round 0. All workers call this.

    A restart by torchrun resumes from the last checkpoint automatically.

    Raises:
        UsageError: no run or checkpoint exists, or every checkpoint is damaged.
    """
    # each node counts its own restarts, and the first node may not have restarted
    restarts = run.workers.gather(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)), "restarts")
    if ckpt_path is None and any(restarts):
        ckpt_path = newest_checkpoint(run.folder.root)
    checkpoint = verified_checkpoint(run, ckpt_path, resumes=True)
    if checkpoint is None and ckpt_path is not None:
        text = f"no version of the run in {str(run.folder.root)!r} has a checkpoint; the run begins with round 0"
        rank_zero_info(f"ckpt_path={str(ckpt_path)!r}: {text}")
    return checkpoint


def verified_checkpoint(run: Run, ckpt_path: str | Path | None, resumes: bool = False) -> Path | None:
    """Return the requested checkpoint or, if damaged, the previous one; None without a request. All workers call this.

    The folder of a run that ``resumes`` is locked before it is read, so that the checkpoint remains the last one.

    Raises:
        UsageError: the checkpoint does not exist, or every candidate is damaged; a ChangedCodeError if another version
            of the package has written it.
    """
    path, error, changed = None, None, False
    if run.workers.rank == 0:  # verification reads all files, so only one worker does it
        try:
            path = find_checkpoint(ckpt_path, run.folder.root, resumes)
            if path is not None and resumes and resumes_in_place(path):
                run.folder.hold(path.parents[1])
            path = None if path is None else valid_checkpoint(path, run.trainer.warn)
        except UsageError as problem:
            error, changed = str(problem), isinstance(problem, ChangedCodeError)
    path, error, changed = run.workers.gather((path, error, changed), "checkpoint to resume")[0]
    if error is not None:
        raise (ChangedCodeError if changed else UsageError)(error)
    return path


def restore_run(run: Run, path: Path | None, allow_changes: bool = False) -> dict[str, Any]:
    """Restore a run, except its callbacks, from a checkpoint, and return the contents of the checkpoint.

    Without a path nothing is restored, and the contents only hold round 0. With ``allow_changes`` the run may differ
    from the checkpoint's; ``run.folder`` then records the changes.

    Raises:
        UsageError: the checkpoint belongs to another run: its seed, partition, model, methods or arguments differ; a
            ChangedCodeError if the user's source code differs.
    """
    own_identity = identity(run)  # before anything is restored
    if path is None:
        return {"round": 0}
    checkpoint = read(path)
    changes = changes_of(own_identity, run, path, checkpoint, allow_changes)
    run.folder.changes, run.folder.changed = record(path, checkpoint, changes), bool(changes)
    fresh = [part for part, keys in FRESH.items() if touches(changes, *keys)]
    server, files = checkpoint["server"], client_files(path, checkpoint)
    saved = {**checkpoint, "server_optimizer": server}
    if "server_optimizer" in fresh:
        server = {**server, "optimizer": run.server.state_dict()["optimizer"]}
    try:
        run.server.load_state_dict(server)
        if "methods" in fresh:
            files = {}
        load_state_of_round(run, checkpoint, without=fresh)
        run.metrics.history = unpack_rows(checkpoint["history"])
        run.metrics.current = dict(run.metrics.history[-1]) if run.metrics.history else {}
    except (KeyError, ValueError, RuntimeError, TypeError, AttributeError) as error:
        text = " ".join(str(error).split())
        raise UsageError(f"ckpt_path={str(path)!r}: not a checkpoint of this run: {text}") from error
    if reset_parts := [NAMES.get(part, part) for part in fresh if saved[part]]:
        run.trainer.warn(f"allow_changes: {', '.join(reset_parts)}: starts fresh, since the run has changed there")
    files_in_place = checkpoint["clients"] if resumes_in_place(path) and not changes else None
    run.client.memories().restore(files, run.workers, files_in_place)
    call_on_load(run, checkpoint)
    restore_data(run.data, checkpoint["datamodule"])
    return checkpoint


def restore_callbacks(run: Run, checkpoint: dict[str, Any]) -> None:
    """Restore each callback that the checkpoint holds with the same class and arguments; others get an empty state."""
    if "callbacks" not in checkpoint:
        return
    descriptions = checkpoint["description"]["callbacks"]
    saved_names = {repr(description): name for name, description in descriptions.items()}
    states = {}
    for name, description in description_of(run)["callbacks"].items():
        if saved_name := saved_names.pop(repr(description), None):
            states[name] = checkpoint["callbacks"][saved_name]
    if dropped := [name for name in saved_names.values() if checkpoint["callbacks"].get(name)]:
        text = "this run has no callback of this class with these arguments, so the saved state is dropped"
        run.trainer.warn(f"trainer.callbacks: {', '.join(dropped)}: {text}")
    for name, callback in named(run.callbacks).items():
        callback.load_state_dict(states.get(name, {}))
