"""Writes files atomically, so that a crash leaves the old or the new file, and reads them safely."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch

from fl_lightning.core.lazy_copies import readable
from fl_lightning.storage.serializable import with_tensors

Result = TypeVar("Result")
# files handled in parallel, so that the file system commits its journal once for several of them
MAX_THREADS = 16
UNSAFE = re.compile(r"[Uu]nsupported global: GLOBAL (\S+)")
NO_CHECKPOINT = "it is cut off, or is not a file of torch.save (of torch 1.6 or newer)"


class DamagedFileError(ValueError):
    """A file cannot be read, or its contents have changed. The message says why."""


def save(contents: Any, path: Path) -> None:
    """Write tensors and plain values; create missing folders."""
    write_atomically(path, lambda partial: dump(contents, partial))


def dump(contents: Any, path: Path) -> None:
    """Write tensors and plain values to ``path`` directly, without renaming or flushing.

    Raises:
        OSError: the file cannot be written, for example because the disk is full.
    """
    copies: dict[int, torch.Tensor] = {}
    with path.open("wb") as file:
        try:
            torch.save(with_tensors(contents, lambda tensor: readable(tensor, copies)), file)
        except RuntimeError as error:
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None


def load(path: Path) -> Any:
    """Read tensors and plain values. The file is memory-mapped, so tensors are read on first use.

    Raises:
        DamagedFileError: ``torch.save`` did not write the file, or it holds other objects.
    """
    try:
        return torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    except Exception as error:  # torch raises errors of many types
        unsafe = UNSAFE.search(str(error))
        text = f"it holds {unsafe[1]}, and may hold only tensors and plain values" if unsafe else NO_CHECKPOINT
        raise DamagedFileError(text) from error


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` create a temporary file in the same folder, and rename the complete file.

    Raises:
        OSError: the file cannot be written. The error contains the file name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_of(path)
    try:
        write(partial)
    except OSError as error:
        error.filename = error.filename or str(path)  # unlike open(), write() raises errors without a file name
        raise
    os.replace(partial, path)


def partial_of(path: Path) -> Path:
    """Return the name of an incomplete file."""
    # np.savez appends .npz to other names
    return path.with_name(f"{path.stem}.partial{path.suffix if path.suffix == '.npz' else ''}")


def flush(path: Path) -> None:
    """Wait until a file is on the disk."""
    with path.open("r+b") as file:
        os.fsync(file)


def flush_folder(path: Path) -> None:
    """Wait until the file names in a folder are on the disk, if the operating system supports it."""
    with suppress(OSError):
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def in_parallel(work: Callable[[Path], Result], paths: Iterable[Path]) -> list[Result]:
    """Call a function for many files in threads, since each call waits for the disk."""
    with ThreadPoolExecutor(MAX_THREADS) as pool:
        return list(pool.map(work, paths))
