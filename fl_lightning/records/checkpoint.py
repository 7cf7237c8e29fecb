"""Checkpoints: ``last.ckpt`` with tensors and plain values, and a file in ``clients`` for each client's memory."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fl_lightning.errors import UsageError, require


def in_place(path: Path) -> bool:
    """Whether a checkpoint lies in the folder of its run, which then resumes there."""
    return path.parent.name == "checkpoints"


def find_checkpoint(ckpt_path: str | os.PathLike | None, versions: Path) -> Path | None:
    """The checkpoint to resume from: a path, or ``last`` for that of the newest version in the folder ``versions``.

    A restart by torchrun resumes from the last checkpoint, where there is one.

    Raises:
        UsageError: ``last``, and there is none.
    """
    restarted = ckpt_path is None and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
    if ckpt_path is not None and str(ckpt_path) != "last":
        return Path(ckpt_path)
    if ckpt_path is None and not restarted:
        return None
    paths = [path for path in versions.glob("version_*/checkpoints/last.ckpt") if path.parts[-3][8:].isdigit()]
    hint = f"no version of the run in {str(versions)!r} has a checkpoint; leave it out"
    require(restarted or bool(paths), "ckpt_path", str(ckpt_path), hint)
    return max(paths, key=lambda path: int(path.parts[-3][8:]), default=None)


def read(path: Path) -> dict[str, Any]:
    """The contents of a checkpoint, tensors and plain values only.

    Raises:
        UsageError: no such file, or no checkpoint.
    """
    contents = _contents(path, "ckpt_path", "give RUN/checkpoints/last.ckpt")
    usable = isinstance(contents, dict) and "state_dict" in contents
    require(usable, "ckpt_path", str(path), "it is not a checkpoint")
    return contents


def read_weights(path: Path) -> dict[str, Any]:
    """The contents of a file of weights: a checkpoint, with its key ``state_dict``, or a state dict itself.

    Raises:
        UsageError: no such file, or neither of the two.
    """
    contents = _contents(path, "weights", "give a checkpoint, or a file of a state dict")
    plain = isinstance(contents, dict) and bool(contents)
    usable = plain and ("state_dict" in contents or any(isinstance(one, Tensor) for one in contents.values()))
    require(usable, "weights", str(path), "it is neither a checkpoint nor a state dict")
    return contents


def sha256(path: Path) -> str:
    """The SHA-256 of a file, as hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(2**20), b""):
            digest.update(block)
    return digest.hexdigest()


def _contents(path: Path, key: str, hint: str) -> Any:
    """What a file holds, tensors and plain values only; ``key`` is the argument that names it."""
    require(path.is_file(), key, str(path), f"there is no such file; {hint}")
    try:
        if path.suffix == ".safetensors":
            return _safetensors(path, key)
        return torch.load(path, map_location="cpu", weights_only=True)
    except UsageError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        raise UsageError(f"{key}={str(path)!r}: not a checkpoint of tensors and plain values: {text}") from error


def _safetensors(path: Path, key: str) -> dict[str, Tensor]:
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise UsageError(f"{key}={str(path)!r}: install safetensors to read it, or give a .pt file") from error
    return load_file(path)


def client_files(path: Path, contents: Mapping[str, Any]) -> dict[int, Path]:
    """The files of the clients' memories that belong to a checkpoint.

    Raises:
        UsageError: one is missing.
    """
    files = {k: path.parent / "clients" / name for k, name in contents.get("clients", {}).items()}
    for file in files.values():
        require(file.is_file(), "ckpt_path", str(path), f"clients/{file.name}, which belongs to it, is not beside it")
    return files
