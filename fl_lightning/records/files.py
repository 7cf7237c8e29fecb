"""Files of tensors and plain values, written atomically: a crash leaves the old file or the new one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def save(contents: Any, path: Path) -> None:
    """Write tensors and plain values; a missing folder is made."""
    write_atomically(path, lambda partial: torch.save(contents, partial))


def load(path: Path) -> Any:
    """Read tensors and plain values. The file is memory-mapped: tensors are read when they are used."""
    return torch.load(path, weights_only=True, mmap=True, map_location="cpu")


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` make a file beside ``path``, and rename it when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # np.savez adds .npz to a name that does not end so
    partial = path.with_name(f"{path.stem}.partial{path.suffix if path.suffix == '.npz' else ''}")
    write(partial)
    os.replace(partial, path)
