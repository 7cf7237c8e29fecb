"""Checkpoints: tensors and plain values in a file that is whole or not there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import LightningModule

from fl_lightning.errors import UsageError, require
from fl_lightning.state import State


def save_checkpoint(found: dict[str, Any], path: Path) -> None:
    """Write tensors and plain values, with the folder where it is missing; a crash leaves no half of a file."""
    path.parent.mkdir(exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save(found, partial)
    os.replace(partial, path)


def load_checkpoint(model: LightningModule, path: _PATH) -> dict[int, State]:
    """Load the global model of a checkpoint, tensors and plain values only; returns the clients' own entries.

    Raises:
        UsageError: no such file, or another model's.
    """
    require(Path(path).is_file(), "ckpt_path", str(path), "there is no such file; give RUN/checkpoints/last.ckpt")
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(found["state_dict"])
        return found.get("clients", {})
    except Exception as error:
        raise UsageError(f"ckpt_path={str(path)!r}: not a checkpoint of this model: {error}") from error
