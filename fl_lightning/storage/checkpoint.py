"""Checkpoints of a run: ``last.ckpt``, ``previous.ckpt``, ``best.ckpt``, and a file for each client's memory.

A checkpoint holds the metrics of all rounds, and the names and SHA-256 digests of its client files. A CRC-32 follows
the archive of ``torch.save``, since the archive's own checksums do not cover its directory. Frozen parameters that have
not changed since the first checkpoint are in one file, ``frozen.pt``, for all checkpoints.
"""

from __future__ import annotations

import json
import os
import shutil
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fl_lightning.core.lazy_copies import is_lazy, lazy_copy, share_memory
from fl_lightning.core.state import State, same_bits, uncompiled_names
from fl_lightning.storage.atomic_io import (
    NO_CHECKPOINT,
    DamagedFileError,
    dump,
    flush,
    flush_folder,
    load,
    partial_of,
    save,
)
from fl_lightning.utilities.code_fingerprint import file_sha256
from fl_lightning.utilities.errors import ChangedCodeError, UsageError, choices, require
from fl_lightning.utilities.version import __version__

LAST, PREVIOUS, BEST, FROZEN = "last.ckpt", "previous.ckpt", "best.ckpt", "frozen.pt"
# layout of the contents, and package version
FORMAT = f"7 of {__version__}"
# digits of the CRC-32 at the end of a checkpoint
DIGITS = 8
# files left by killed processes
LEFTOVERS = (
    *("last.partial", "best.partial", "frozen.partial", "model.partial", "ccvr.partial"),
    "clients/[0-9]*-[0-9]*.p*t*",
)


class CheckpointFolder:
    """Writes checkpoints into a folder, from one process.

    A kill at any time leaves a valid checkpoint: each file is flushed before it is renamed, and the last checkpoint
    remains as the previous one until the next one is complete.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows = PackedRows()
        # client files of each checkpoint
        self._clients: dict[str, set[Path]] = {}
        # the contents of frozen.pt as lazy copies of the state, and its digest; None before the first checkpoint
        self._frozen: tuple[State, str] | None = None

    def resume(self, path: Path) -> None:
        """Continue after a valid checkpoint of this folder: make it the last one, and remove unreferenced files."""
        if path.name == PREVIOUS:
            os.replace(path, self.path / LAST)
        for name in (LAST, PREVIOUS, BEST):
            with suppress(DamagedFileError):
                self._clients[name] = {*client_files(self.path / name, load(self.path / name)).values()}
        client_paths = set[Path]().union(*self._clients.values())
        for pattern in LEFTOVERS:
            _remove({*self.path.glob(pattern)} - client_paths)

    def keep_frozen(self, frozen: State) -> dict[str, Any]:
        """Write frozen parameters into their file at the first checkpoint of the run.

        Returns:
            The ``names`` of those whose values the file holds, and its ``sha256``; empty if it holds none.
        """
        path = self.path / FROZEN
        frozen = {name: value for name, value in frozen.items() if is_lazy(value)}
        if self._frozen is None and frozen:
            if not path.is_file():
                save(frozen, path)
                flush(path)
            stored_values = load(path)
            stored_names = [name for name in frozen if name in stored_values]
            unchanged_names = [name for name in stored_names if same_bits(frozen[name], stored_values[name])]
            self._frozen = {name: lazy_copy(frozen[name]) for name in unchanged_names}, file_sha256(path)
        copies, digest = self._frozen or ({}, "")
        copied_names = [name for name in copies if name in frozen]
        names = [name for name in copied_names if share_memory(copies[name], frozen[name])]
        return {"names": names, "sha256": digest} if names else {}

    def save(self, contents: dict[str, Any], history: Sequence[Mapping[str, float]], best: bool = False) -> None:
        """Write the last checkpoint; the old one becomes the previous one.

        Args:
            contents: state of the run; ``clients`` has the name and digest of each client's file on the disk.
            history: metrics of all rounds so far.
            best: whether to write ``best.ckpt`` as well.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        path, partial = self.path / LAST, partial_of(self.path / LAST)
        dump({**contents, "format": FORMAT, "history": self._rows.pack(history)}, partial)
        checksum = _checksum(np.memmap(partial, mode="r"))
        with partial.open("ab") as file:
            file.write(checksum)
        flush(partial)
        if best:
            copy = partial_of(self.path / BEST)
            copy.unlink(missing_ok=True)
            try:
                os.link(partial, copy)
            except OSError:  # the file system has no hard links
                shutil.copyfile(partial, copy)
                flush(copy)
            os.replace(copy, self.path / BEST)
        if path.is_file():
            os.replace(path, self.path / PREVIOUS)
        os.replace(partial, path)
        flush_folder(self.path)
        before, now = set[Path]().union(*self._clients.values()), {*client_files(path, contents).values()}
        self._clients |= {PREVIOUS: self._clients.get(LAST, set()), LAST: now, **({BEST: now} if best else {})}
        _remove(before.difference(*self._clients.values()))


def _remove(files: set[Path]) -> None:
    for file in files:
        file.unlink(missing_ok=True)


def _checksum(contents: Any) -> bytes:
    return b"%08x" % zlib.crc32(contents)


class PackedRows:
    """Compresses the metrics of all rounds as lines of JSON; each call only converts new rows."""

    def __init__(self) -> None:
        self._number, self._packer, self._packed = 0, zlib.compressobj(), b""

    def pack(self, rows: Sequence[Mapping[str, float]]) -> bytes:
        """Return the rows as bytes for :func:`unpack_rows`."""
        lines = [f"{json.dumps(row, default=float)}\n" for row in rows[self._number :]]
        self._packed += self._packer.compress("".join(lines).encode())
        self._number = len(rows)
        return self._packed + self._packer.copy().flush()


def unpack_rows(packed: bytes) -> list[dict[str, float]]:
    """Restore the rows of :meth:`PackedRows.pack`."""
    return [json.loads(line) for line in zlib.decompress(packed).splitlines()]


def in_place(path: Path) -> bool:
    """Return whether a checkpoint is in the folder of its run."""
    return path.parent.name == "checkpoints"


def resumes_in_place(path: Path) -> bool:
    """Return whether a run that resumes from a checkpoint continues in the same folder.

    From ``best.ckpt`` and from renamed checkpoints, a run continues in a new version, which preserves later rounds.
    """
    return in_place(path) and path.name in (LAST, PREVIOUS)


def find_checkpoint(ckpt_path: str | os.PathLike | None, versions: Path, resumes: bool = False) -> Path | None:
    """Return the requested checkpoint: a path, or ``last`` for the last checkpoint of the newest version.

    None without a request, and for a run that ``resumes`` and has not written a checkpoint.

    Raises:
        UsageError: the path is empty or a folder such as ``.``; no version has a last checkpoint.
    """
    if ckpt_path is None:
        return None
    if str(ckpt_path) != "last":
        is_path = isinstance(ckpt_path, (str, os.PathLike)) and Path(ckpt_path).name != ""
        require(is_path, "ckpt_path", str(ckpt_path), "pass the path of a checkpoint, or last; methods are one list")
        path = Path(ckpt_path)
        # seen from within the folder of the run, a path lacks the names of its folders
        return path.absolute() if len(path.parents) < 4 and in_place(path.absolute()) else path
    newest = newest_checkpoint(versions)
    if newest is None and not (resumes and any(versions.glob("version_*"))):
        hint = "set trainer.name and trainer.default_root_dir of a run with a checkpoint, or omit ckpt_path"
        checkpoints = versions.parent.glob(f"*/version_*/checkpoints/{LAST}")
        runs = sorted({path.parts[-4] for path in checkpoints})
        suggestion = f"; available: {choices(runs, versions.name)}" if runs else ""
        raise UsageError(f"ckpt_path='last': no run in {str(versions)!r} has a checkpoint; {hint}{suggestion}")
    return newest


def newest_checkpoint(versions: Path) -> Path | None:
    """Return the last checkpoint of the newest version with a checkpoint."""
    checkpoints = {}
    for name in (LAST, PREVIOUS):
        for path in versions.glob(f"version_*/checkpoints/{name}"):
            number = path.parts[-3].removeprefix("version_")
            if number.isdigit():
                checkpoints[int(number)] = path.with_name(LAST)
    return checkpoints[max(checkpoints)] if checkpoints else None


def valid_checkpoint(path: Path, warn: Callable[[str], None]) -> Path:
    """Return ``path`` if all files of the checkpoint are valid, otherwise the previous checkpoint in the same folder.

    Args:
        path: the requested checkpoint.
        warn: called with a message if the previous checkpoint is used.

    Raises:
        UsageError: no checkpoint is valid, or another version of the package has written it.
    """
    before = path.with_name(PREVIOUS)
    errors: list[str] = []
    for candidate in [path, before] if path.name == LAST and before.is_file() else [path]:
        try:
            verify(candidate)
        except DamagedFileError as error:
            errors.append(f"{candidate.name}: {error}" if errors else str(error))
            continue
        if errors:
            warn(f"ckpt_path={str(path)!r}: {errors[0]}; {candidate.name} is used instead")
        return candidate
    raise UsageError(f"ckpt_path={str(path)!r}: {'; '.join(errors)}; pass another checkpoint, or omit ckpt_path")


def verify(path: Path) -> None:
    """Check a checkpoint and its client files.

    Raises:
        DamagedFileError: a file is missing or altered. The message names it.
        ChangedCodeError: another version of the package has written the checkpoint.
    """
    if not path.is_file():
        raise DamagedFileError("the file does not exist")
    contents = _load_verified(path)
    of_run = isinstance(contents, dict) and not contents.keys().isdisjoint(("server", "failure"))
    if of_run and contents.get("format") != FORMAT:
        hint = "another version of fl_lightning has written it; resume with that version, or pass it as weights"
        raise ChangedCodeError(f"ckpt_path={str(path)!r}: {hint}")
    for k, file in client_files(path, contents).items():
        _compare(file, contents["clients"][k][1], f"clients/{file.name}")
    frozen_of(path, contents, verifies=True)


def _compare(file: Path, digest: str, name: str) -> None:
    if not file.is_file() or file_sha256(file) != digest:
        raise DamagedFileError(f"{name} {'was altered' if file.is_file() else 'is missing'}")


def _load_verified(path: Path) -> Any:
    """Read a file of ``torch.save``, and verify its CRC-32 or else the checksums in the archive."""
    contents_and_checksum = np.memmap(path, mode="r") if path.stat().st_size > DIGITS else np.zeros(0, np.uint8)
    is_valid = contents_and_checksum[-DIGITS:].tobytes() == _checksum(contents_and_checksum[:-DIGITS])
    if not is_valid:
        try:
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()
        except Exception as error:  # zipfile raises errors of many types
            raise DamagedFileError(NO_CHECKPOINT) from error
        if damaged:
            raise DamagedFileError("its checksums differ: it was altered")
    contents = load(path)
    if not is_valid and isinstance(contents, dict) and "server" in contents and contents.get("format") == FORMAT:
        raise DamagedFileError("its CRC-32 differs: it was altered")
    return contents


def client_files(path: Path, contents: Any) -> dict[int, Path]:
    """Return the memory file of each client in a checkpoint."""
    clients = contents.get("clients", {}) if isinstance(contents, dict) else {}
    return {k: path.parent / "clients" / Path(name).name for k, (name, _) in clients.items()}


def frozen_of(path: Path, contents: Any, verifies: bool) -> State:
    """Return the entries of a checkpoint's state that are in the file next to it, which is read in whole to verify it.

    Raises:
        DamagedFileError: the file is missing or altered.
    """
    if not isinstance(contents, dict) or "server" not in contents or not (frozen := contents.get("frozen")):
        return {}
    if verifies:
        _compare(path.with_name(FROZEN), frozen["sha256"], FROZEN)
    values = load(path.with_name(FROZEN))
    return {name: values[name] for name in frozen["names"]}


def read(path: Path, key: str = "ckpt_path") -> dict[str, Any]:
    """Read a checkpoint that :func:`valid_checkpoint` has returned; for the key ``weights`` also any file of weights.

    Files of weights are verified. They may be checkpoints with the key ``state_dict``, or state dicts.

    Raises:
        UsageError: the file does not exist, is damaged, or holds no weights.
    """
    are_weights = key == "weights"
    hint = "pass a checkpoint or a state dict" if are_weights else "pass RUN/checkpoints/last.ckpt"
    require(path.is_file(), key, str(path), f"the file does not exist; {hint}")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            contents = load_file(path)
        else:
            contents = _load_verified(path) if are_weights else load(path)
            if frozen := frozen_of(path, contents, verifies=are_weights):
                contents["state_dict"] = uncompiled_names(frozen) | contents["state_dict"]
                contents["server"]["state"] |= frozen
    except ImportError as error:
        raise UsageError(f"{key}={str(path)!r}: install safetensors to read it, or pass a .pt file") from error
    except Exception as error:  # safetensors raises errors of many types
        text = str(error) if isinstance(error, DamagedFileError) else "not a file of safetensors"
        raise UsageError(f"{key}={str(path)!r}: {text}; {hint}") from error
    values = contents if isinstance(contents, dict) else {}
    has_tensors = any(isinstance(value, Tensor) for value in values.values())
    usable = "state_dict" in values or (are_weights and has_tensors)
    require(usable, key, str(path), f"it is not a checkpoint{' or a state dict' if are_weights else ''}")
    return values
