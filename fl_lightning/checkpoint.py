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
from fl_lightning.state import State

if TYPE_CHECKING:
    from fl_lightning.trainer import FederatedTrainer


def save_checkpoint(found: dict[Any, Any], path: Path) -> None:
    """Write tensors and plain values, with the folder where it is missing; a crash leaves no half of a file."""
    path.parent.mkdir(exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save(found, partial)
    os.replace(partial, path)


def save_run(trainer: FederatedTrainer, folder: Path) -> None:
    """Write all that a run needs to go on: ``last.ckpt``, and the clients' memories, in a file of each worker.

    Called by all workers. The old checkpoint stands until the new one is whole.
    """
    memories, done = dict(trainer.client.memories()), trainer.server.round + 1
    part = f"clients-{done}-{trainer.team.rank}.ckpt"
    if memories:
        save_checkpoint(memories, folder / part)
    parts = [name for name in trainer.team.gather(part if memories else "") if name]
    if trainer.team.rank == 0:
        save_checkpoint({**contents(trainer), "round": done, "parts": parts}, folder / "last.ckpt")
        for old in folder.glob("clients-*.ckpt"):
            if old.name not in parts:
                old.unlink()


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
    memories, team = clients_of(path, found), trainer.team
    for k in sorted(memories)[team.rank :: team.size]:
        trainer.client.memories().put(k, memories[k])
    trainer.holders = {k: place % team.size for place, k in enumerate(sorted(memories))}
    trainer.history = found["history"]
    return found


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


def clients_of(path: Path, found: dict[str, Any]) -> dict[int, Any]:
    """The clients' memories that belong to a checkpoint; they are read from disk where they are used."""
    memories: dict[int, Any] = {}
    for name in found.get("parts", []):
        part = path.parent / name
        require(part.is_file(), "ckpt_path", str(path), f"{name}, which belongs to it, is not beside it")
        memories |= torch.load(part, map_location="cpu", weights_only=True, mmap=True)
    return memories


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
    return {k: memory["state"] for k, memory in clients_of(Path(path), found).items() if "state" in memory}
