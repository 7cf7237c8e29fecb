"""Checkpoints: tensors and plain values in files that are whole or not there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import LightningModule

from fl_lightning.callbacks.base import Callback
from fl_lightning.errors import UsageError, require
from fl_lightning.memory import load, save
from fl_lightning.state import State

if TYPE_CHECKING:
    from fl_lightning.trainer import FederatedTrainer


def save_run(trainer: FederatedTrainer, folder: Path) -> None:
    """Write all that a run needs to go on: ``last.ckpt``, and a file for each client that remembers something.

    Only clients visited since the last checkpoint are written anew. Called by all workers. The old checkpoint stands
    until the new one is whole.
    """
    memories, done = trainer.client.memories(), trainer.server.round + 1
    written = {k: f"{k}-{done}.pt" for k in sorted(memories.changed)}
    for k, name in written.items():
        save(memories[k], folder / "clients" / name)
    memories.changed.clear()
    before = trainer.client_files
    trainer.client_files = before | {k: name for names in trainer.team.gather(written) for k, name in names.items()}
    if trainer.team.rank == 0:
        save({**contents(trainer), "round": done, "clients": trainer.client_files}, folder / "last.ckpt")
        for k, name in before.items():
            if trainer.client_files[k] != name:
                (folder / "clients" / name).unlink(missing_ok=True)


def contents(trainer: FederatedTrainer) -> dict[str, Any]:
    """The state of a run, but for the clients' memories."""
    return {
        "state_dict": trainer.methods.evaluated_state(trainer.server),
        "server": trainer.server.state_dict(),
        "methods": {method.name: method.state_dict() for method in trainer.methods.methods},
        "callbacks": {name: callback.state_dict() for name, callback in named(trainer.callbacks).items()},
        "history": trainer.history,
        **identity(trainer),
    }


def identity(trainer: FederatedTrainer) -> dict[str, Any]:
    """What must be the same in the run that goes on."""
    methods = [method.name for method in trainer.methods.methods]
    return {"seed_everything": trainer.seed, "method": methods, "plan_hash": trainer.data.plan.hash}


def load_run(trainer: FederatedTrainer, path: Path) -> dict[str, Any]:
    """Put a run, but for its callbacks, where the checkpoint left it; returns the checkpoint.

    Raises:
        UsageError: no checkpoint of this run: another seed, partition, model or list of methods.
    """
    found = read(path)
    for key, value in identity(trainer).items():
        mend = f"this run has {value!r}; give the same config and data"
        require(found.get(key) == value, f"ckpt_path={str(path)!r}: {key}", found.get(key), mend)
    try:
        trainer.server.load_state_dict(found["server"])
        for method in trainer.methods.methods:
            method.load_state_dict(found["methods"][method.name])
    except (KeyError, ValueError, RuntimeError) as error:
        raise UsageError(f"ckpt_path={str(path)!r}: not a checkpoint of this run: {error}") from error
    files, team, memories = clients_of(path, found), trainer.team, trainer.client.memories()
    trainer.holders = {k: place % team.size for place, k in enumerate(sorted(files))}
    for k in sorted(files)[team.rank :: team.size]:
        memories.take_file(k, files[k])
    if in_place(path):
        trainer.client_files = found["clients"]
    else:
        memories.changed.update(memories)  # the new folder has none of them yet
    trainer.history = found["history"]
    return found


def in_place(path: Path) -> bool:
    """Whether a checkpoint lies in the folder of its run, which then goes on there."""
    return path.parent.name == "checkpoints"


def load_callbacks(callbacks: list[Any], found: dict[str, Any]) -> None:
    """Give callbacks their state from a checkpoint, if there is one."""
    for name, callback in named(callbacks).items():
        if "callbacks" in found:
            callback.load_state_dict(found["callbacks"].get(name, {}))


def named(callbacks: list[Any]) -> dict[str, Callback]:
    """Our callbacks by class name, numbered from the second of a class on."""
    found: dict[str, Callback] = {}
    for callback in callbacks:
        kind = type(callback).__name__
        number = sum(name.split(".")[0] == kind for name in found)
        if isinstance(callback, Callback):
            found[f"{kind}.{number}" if number else kind] = callback
    return found


def find_checkpoint(given: _PATH | None, folder: Path) -> Path | None:
    """The checkpoint to go on from: ``given``, or ``last`` for that of the newest version of a run in ``folder``.

    A restart by torchrun goes on from the last one where there is one.

    Raises:
        UsageError: ``last``, and there is none.
    """
    restarted = given is None and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
    if given is not None and str(given) != "last":
        return Path(given)
    if given is None and not restarted:
        return None
    versions = [path for path in folder.glob("version_*/checkpoints/last.ckpt") if path.parts[-3][8:].isdigit()]
    mend = f"no version of the run in {str(folder)!r} has a checkpoint; leave it out"
    require(restarted or bool(versions), "ckpt_path", str(given), mend)
    return max(versions, key=lambda path: int(path.parts[-3][8:]), default=None)


def read(path: Path) -> dict[str, Any]:
    """The contents of a checkpoint, tensors and plain values only.

    Raises:
        UsageError: no such file, or no checkpoint.
    """
    require(path.is_file(), "ckpt_path", str(path), "there is no such file; give RUN/checkpoints/last.ckpt")
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        text = " ".join(str(error).split())
        raise UsageError(f"ckpt_path={str(path)!r}: not a checkpoint of tensors and plain values: {text}") from error
    require(isinstance(found, dict) and "state_dict" in found, "ckpt_path", str(path), "it is not a checkpoint")
    return found


def clients_of(path: Path, found: dict[str, Any]) -> dict[int, Path]:
    """The files of the clients' memories that belong to a checkpoint."""
    files = {k: path.parent / "clients" / name for k, name in found.get("clients", {}).items()}
    for file in files.values():
        require(file.is_file(), "ckpt_path", str(path), f"clients/{file.name}, which belongs to it, is not beside it")
    return files


def load_checkpoint(model: LightningModule, path: _PATH) -> dict[int, State]:
    """Load the global model of a checkpoint; returns the clients' own entries.

    Raises:
        UsageError: no such file, or another model's.
    """
    found = read(Path(path))
    try:
        model.load_state_dict(found["state_dict"])
    except Exception as error:
        raise UsageError(f"ckpt_path={str(path)!r}: not a checkpoint of this model: {error}") from error
    memories = {k: load(file) for k, file in clients_of(Path(path), found).items()}
    return {k: memory["state"] for k, memory in memories.items() if "state" in memory}
