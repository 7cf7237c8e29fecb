"""Files of tensors and plain values, written atomically: a crash leaves the old file or the new one."""

from __future__ import annotations

import hashlib
import os
import re
import zipfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

# files that are flushed or removed side by side: the file system then writes its journal once for several of them
TOGETHER = 16
# bytes that the tensors of a file may have beyond the file's own size; expanded tensors share their numbers
EXTRA_BYTES = 2**30
# a constructor that reserves as much as the file asks for
RESERVES = re.compile(rb"bytearray\n")
UNSAFE = re.compile(r"[Uu]nsupported global: GLOBAL (\S+)")
NO_CHECKPOINT = "not a checkpoint of tensors and plain values, as torch.save writes them since 1.6"


class Stamp(NamedTuple):
    """What tells a file from an altered one: its size in bytes, and its SHA-256 as hexadecimal digits."""

    size: int
    sha256: str


class DamagedFileError(ValueError):
    """A file is not what was written; the text says what is wrong."""


class Stamping:
    """Counts and hashes what is written, block by block.

    Args:
        file: gets the blocks; None for none.
    """

    def __init__(self, file: BinaryIO | None = None) -> None:
        self.file, self.size, self._digest = file, 0, hashlib.sha256()

    def write(self, block: Any) -> int:
        """Take a block of bytes into account, and write it."""
        self.size += len(block)
        self._digest.update(block)
        return len(block) if self.file is None else self.file.write(block)

    def flush(self) -> None:
        """Nothing is held back."""

    def stamp(self) -> Stamp:
        """The stamp of all that was written."""
        return Stamp(self.size, self._digest.hexdigest())


def save(contents: Any, path: Path) -> None:
    """Write tensors and plain values; a missing folder is made."""

    def write(partial: Path) -> None:
        with partial.open("wb") as file:
            _dump(contents, file)

    write_atomically(path, write)


def write_stamped(contents: Any, path: Path) -> Stamp:
    """Write tensors and plain values to ``path`` itself, neither atomically nor flushed, and return the stamp."""
    with path.open("wb") as file:
        stamping = Stamping(file)
        _dump(contents, stamping)
    return stamping.stamp()


def _dump(contents: Any, file: Any) -> None:
    """Write tensors and plain values into an open file, from front to back; a full disk is an OSError."""
    try:
        torch.save(contents, file)
    except RuntimeError as error:
        raise error.__context__ if isinstance(error.__context__, OSError) else error from None


def load(path: Path) -> Any:
    """Read tensors and plain values. The file is memory-mapped: tensors are read when they are used."""
    return torch.load(path, weights_only=True, mmap=True, map_location="cpu")


def load_checked(path: Path, checksums: bool = False) -> Any:
    """Read a file that a user has given, as :func:`load` does; nothing is reserved that the file does not hold.

    Args:
        path: the file.
        checksums: compare the checksums of its records, for which all of it is read.

    Raises:
        DamagedFileError: it is no such file, is damaged, or claims more than it holds.
    """
    check_records(path, checksums)
    try:
        # mapped, a tensor that claims more than the file holds is refused; read, it would be reserved
        contents = load(path)
    except Exception as error:  # whatever torch raises for what it cannot read
        unsafe = UNSAFE.search(str(error))
        raise DamagedFileError(f"{NO_CHECKPOINT}{f': it holds {unsafe[1]}' if unsafe else ''}") from error
    room, sizes = path.stat().st_size + EXTRA_BYTES, dict[int, int]()
    for value in _tensors(contents):
        # tied tensors share a storage; one that is expanded claims more than its storage has
        storage = value.untyped_storage().data_ptr() if value.layout == torch.strided else id(value)
        sizes[storage] = max(sizes.get(storage, 0), value.numel() * value.element_size())
    if sum(sizes.values()) > room:
        raise DamagedFileError(f"its tensors claim more than {room} bytes")
    return contents


def check_records(path: Path, checksums: bool = False) -> None:
    """Check that a file of ``torch.save`` holds the records it lists, with the ``checksums`` it has for them.

    Raises:
        DamagedFileError: it does not; in particular, it is compressed.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
            stored = [r for r in records if r.compress_type == zipfile.ZIP_STORED and r.file_size == r.compress_size]
            if len(stored) < len(records) or sum(r.file_size for r in records) > path.stat().st_size:
                raise DamagedFileError("its records claim more than the file holds")
            broken = archive.testzip() if checksums else None
            pickles = [record for record in records if record.filename.endswith("data.pkl")]
            reserves = any(RESERVES.search(archive.read(record)) for record in pickles)
    except DamagedFileError:
        raise
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, NotImplementedError, RuntimeError) as error:
        raise DamagedFileError(NO_CHECKPOINT) from error
    if broken or reserves:
        raise DamagedFileError("its checksums differ: it was altered" if broken else "it holds a bytearray")


def stamp_of(path: Path) -> Stamp:
    """The stamp of a file, which is read whole."""
    stamping = Stamping()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(2**20), b""):
            stamping.write(block)
    return stamping.stamp()


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` make a file beside ``path``, and rename it when it is complete.

    Raises:
        OSError: it cannot be written; names it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_of(path)
    try:
        write(partial)
    except OSError as error:
        error.filename = error.filename or str(path)  # an error of a write, unlike one of open, has no name
        raise
    os.replace(partial, path)


def set_aside(path: Path) -> Path | None:
    """Rename a file to the first free of ``name.1.npz``, ``name.2.npz``, ...; None where there is no such file."""
    if not path.exists():
        return None
    places = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in count(1))
    return path.rename(next(place for place in places if not place.exists()))


def partial_of(path: Path) -> Path:
    """Where a file lies until it is complete."""
    # np.savez adds .npz to a name that does not end so
    return path.with_name(f"{path.stem}.partial{path.suffix if path.suffix == '.npz' else ''}")


def flush(paths: Iterable[Path]) -> None:
    """Wait until files are on the disk."""
    _together(_flush, list(paths))


def remove(paths: Iterable[Path]) -> None:
    """Remove files; those that are not there do not matter."""
    _together(lambda path: path.unlink(missing_ok=True), list(paths))


def flush_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk; without effect where a system cannot do so."""
    with suppress(OSError):
        _flush(path, os.O_RDONLY)


def _together(work: Callable[[Path], object], paths: list[Path]) -> None:
    """Do something to many files side by side, as each waits for the disk."""
    if len(paths) < 4:
        for path in paths:
            work(path)
        return
    with ThreadPoolExecutor(TOGETHER) as pool:
        list(pool.map(work, paths))


def _flush(path: Path, mode: int = os.O_RDWR) -> None:
    number = os.open(path, mode)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _tensors(contents: Any) -> Iterable[Tensor]:
    """The tensors in nested containers, each once."""
    seen: set[int] = set()
    left = [contents]
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        if isinstance(value, Tensor):
            seen.add(id(value))
            yield value
        elif isinstance(value, (dict, list, tuple, set)):
            seen.add(id(value))
            left.extend([*value.keys(), *value.values()] if isinstance(value, dict) else value)
