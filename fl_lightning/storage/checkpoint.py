"""Checkpoints of a run: ``last.ckpt``, the one before it, the best one, and a file for the memory of each client.

A checkpoint holds the metrics of all rounds, and the names and SHA-256 digests of the client files that belong to it.
Its own SHA-256 follows the archive of ``torch.save``: the checksums inside the archive do not cover its directory.
"""

from __future__ import annotations

import os
import re
import shutil
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.errors import UsageError, choices, require
from fl_lightning.storage.atomic_io import (
    DamagedFileError,
    digest_of,
    dump,
    flush,
    flush_folder,
    load,
    load_checked,
    partial_of,
    remove,
)
from fl_lightning.version import __version__

LAST, PREVIOUS, BEST = "last.ckpt", "previous.ckpt", "best.ckpt"
# layout of the contents, and the version of the package
FORMAT = f"3 of {__version__}"
# of a SHA-256, at the end of a checkpoint
DIGITS = 64
CLIENT_FILE = re.compile(r"\d+-\d+\.pt", re.ASCII)
# files that a killed process may have left, by folder
LEFTOVERS = {
    ".": re.compile(r"(last|best|model|ccvr)\.partial"),
    "clients": re.compile(r"\d+-\d+\.(pt|partial)", re.ASCII),
}


class CheckpointFolder:
    """Writes checkpoints into a folder, from one process.

    A kill at any time leaves a valid checkpoint: each file is flushed before it gets its name, and the last checkpoint
    is kept as the previous one until the next one is complete.

    Args:
        path: the folder.

    Raises:
        UsageError: ``torch.save`` is configured to write no checksums.
    """

    def __init__(self, path: Path) -> None:
        hint = "checkpoints are verified by these checksums; leave them on"
        require(torch.serialization.get_crc32_options(), "torch.serialization.set_crc32_options", False, hint)
        self.path = path
        self._rows = PackedRows()
        # client files of each checkpoint
        self._clients: dict[str, set[str]] = {}

    def resume(self, path: Path, warn: Callable[[str], None]) -> None:
        """Continue after a checkpoint of this folder: make it the last one, and remove files of no checkpoint.

        Args:
            path: the checkpoint, which is valid.
            warn: called with a message if ``best.ckpt`` is damaged.
        """
        if path.name == PREVIOUS:
            os.replace(path, self.path / LAST)
        try:
            if (self.path / BEST).is_file():
                verify(self.path / BEST)
        except DamagedFileError as error:
            text = f"{error}; it cannot be used, and the next better round replaces it"
            warn(f"{str(self.path / BEST)!r}: {text}")
        for name in (LAST, PREVIOUS, BEST):
            try:
                self._clients[name] = _names_of_clients(load(self.path / name))
            except DamagedFileError:
                self._clients[name] = set()
        known = set[str]().union(*self._clients.values())
        for folder, pattern in LEFTOVERS.items():
            files = [file for file in (self.path / folder).glob("*") if pattern.fullmatch(file.name)]
            remove(file for file in files if file.name not in known and file.is_file() and not file.is_symlink())

    def save(self, contents: dict[str, Any], history: Sequence[Mapping[str, float]], best: bool = False) -> None:
        """Write the last checkpoint, and keep the one before it as the previous one.

        Args:
            contents: state of the run; ``clients`` has the name and digest of each client's file, already on the disk.
            history: metrics of all rounds so far.
            best: whether to write the checkpoint as ``best.ckpt``, too.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        path, partial = self.path / LAST, partial_of(self.path / LAST)
        dump({**contents, "format": FORMAT, "history": self._rows.pack(history)}, partial)
        with partial.open("ab") as file:
            file.write(digest_of(partial).encode())
        flush(partial)
        if best:
            os.replace(_copy(partial, partial_of(self.path / BEST)), self.path / BEST)
        if path.is_file():
            os.replace(path, self.path / PREVIOUS)
        os.replace(partial, path)
        flush_folder(self.path)
        before, now = set[str]().union(*self._clients.values()), _names_of_clients(contents)
        self._clients |= {PREVIOUS: self._clients.get(LAST, set()), LAST: now, **({BEST: now} if best else {})}
        remove(self.path / "clients" / name for name in before.difference(*self._clients.values()))


def _copy(source: Path, target: Path) -> Path:
    """Give a file a second name; a copy where the file system has no hard links."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        flush(target)
    return target


class PackedRows:
    """Packs the metrics of all rounds into flat tensors, and only converts rows that are new since the last call."""

    def __init__(self) -> None:
        self._tags: dict[str, int] = {}
        self._parts: dict[str, array[Any]] = {
            "lengths": array("i"),
            "columns": array("i"),
            "integers": array("b"),
            "values": array("d"),
        }

    def pack(self, rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
        """Return the rows as tensors, from which :func:`unpack_rows` restores them.

        Returns:
            ``tags``, the names of the columns; ``lengths`` ``(R,)``, the number of values of each of R rows;
            ``columns``, ``integers`` and ``values`` ``(N,)``, the column, type and value of each of N values.
        """
        parts = self._parts
        for row in rows[len(parts["lengths"]) :]:
            parts["lengths"].append(len(row))
            parts["columns"].extend(self._tags.setdefault(tag, len(self._tags)) for tag in row)
            parts["integers"].extend(isinstance(value, int) for value in row.values())
            parts["values"].extend(row.values())
        return {"tags": list(self._tags), **{key: torch.from_numpy(np.array(part)) for key, part in parts.items()}}


def unpack_rows(packed: Mapping[str, Any]) -> list[dict[str, float]]:
    """Return the rows that :meth:`PackedRows.pack` was given."""
    parts = zip(*(packed[key].tolist() for key in ("columns", "integers", "values")), strict=True)
    values = ((packed["tags"][column], int(value) if integer else value) for column, integer, value in parts)
    return [dict(next(values) for _ in range(length)) for length in packed["lengths"].tolist()]


def in_place(path: Path) -> bool:
    """Return whether a checkpoint is in the folder of its run."""
    return path.parent.name == "checkpoints"


def resumes_in_place(path: Path) -> bool:
    """Return whether a run that resumes from a checkpoint continues in the same folder.

    From ``best.ckpt`` and from renamed checkpoints, a run continues in a new version, so that later rounds are kept.
    """
    return in_place(path) and path.name in (LAST, PREVIOUS)


def find_checkpoint(ckpt_path: str | os.PathLike | None, versions: Path, resumes: bool = False) -> Path | None:
    """Return the requested checkpoint: a path, or ``last`` for the last one of the newest version in ``versions``.

    None if no checkpoint is requested, and for a run that ``resumes`` and has none yet.

    Raises:
        UsageError: the path is empty or a folder such as ``.``; no version has a last checkpoint.
    """
    if ckpt_path is None:
        return None
    if str(ckpt_path) != "last":
        require(Path(ckpt_path).name != "", "ckpt_path", str(ckpt_path), "give the path of a checkpoint, or last")
        return Path(ckpt_path)
    newest = newest_checkpoint(versions)
    if newest is None and not (resumes and any(versions.glob("version_*"))):
        hint = "give trainer.name and trainer.default_root_dir of a run that has, or leave ckpt_path out"
        others = sorted({path.parts[-4] for path in versions.parent.glob(f"*/version_*/checkpoints/{LAST}")})
        there = f"; beside it are {choices(others, versions.name)}" if others else ""
        raise UsageError(f"ckpt_path='last': no run in {str(versions)!r} has a checkpoint; {hint}{there}")
    return newest


def newest_checkpoint(versions: Path) -> Path | None:
    """Return the last checkpoint of the newest version that has one."""
    folders = [path for path in versions.glob("version_*/checkpoints") if path.parts[-2][8:].isdigit()]
    begun = [path for path in folders if any((path / name).is_file() for name in (LAST, PREVIOUS))]
    newest = max(begun, key=lambda path: int(path.parts[-2][8:]), default=None)
    return None if newest is None else newest / LAST


def valid_checkpoint(path: Path, warn: Callable[[str], None]) -> Path:
    """Return ``path`` if all files of the checkpoint are valid, otherwise the previous checkpoint in the same folder.

    Args:
        path: the requested checkpoint.
        warn: called with a message if the previous checkpoint is used.

    Raises:
        UsageError: there is no valid checkpoint, or another version of the package has written it.
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
    raise UsageError(f"ckpt_path={str(path)!r}: {'; '.join(errors)}; give another checkpoint, or leave it out")


def verify(path: Path) -> None:
    """Check a checkpoint and its client files.

    Raises:
        DamagedFileError: a file is missing or altered. The message names it.
        UsageError: another version of the package has written the checkpoint.
    """
    if not path.is_file():
        raise DamagedFileError("there is no such file")
    contents = _load_verified(path)
    if isinstance(contents, dict) and not contents.keys().isdisjoint(("server", "failure")):
        hint = "another version of fl_lightning has written it; resume with that version, or give it as weights"
        require(contents.get("format") == FORMAT, "ckpt_path", str(path), hint)
    for k, file in client_files(path, contents).items():
        if not file.is_file() or digest_of(file) != contents["clients"][k][1]:
            raise DamagedFileError(f"clients/{file.name} {'was altered' if file.is_file() else 'is missing'}")


def _load_verified(path: Path) -> Any:
    """Read a file of ``torch.save``, and compare the SHA-256 at its end if it is a checkpoint of this format."""
    contents = load_checked(path)
    if isinstance(contents, dict) and "server" in contents and contents.get("format") == FORMAT:
        with path.open("rb") as file:
            file.seek(-DIGITS, os.SEEK_END)
            if file.read() != digest_of(path, path.stat().st_size - DIGITS).encode():
                raise DamagedFileError("its SHA-256 differs: it was altered")
    return contents


def client_files(path: Path, contents: Any) -> dict[int, Path]:
    """Return the file with the memory of each client that belongs to a checkpoint.

    Raises:
        UsageError: a name is not one of a client file.
    """
    clients = contents.get("clients", {}) if isinstance(contents, dict) else {}
    for name, _ in clients.values():
        hint = f"it names {name[:60]!r}, which is no file of a client; give another checkpoint"
        require(CLIENT_FILE.fullmatch(name) is not None, "ckpt_path", str(path), hint)
    return {k: path.parent / "clients" / name for k, (name, _) in clients.items()}


def _names_of_clients(contents: Mapping[str, Any]) -> set[str]:
    return {name for name, _ in contents["clients"].values()}


def read(path: Path) -> dict[str, Any]:
    """Read a checkpoint that :func:`valid_checkpoint` has returned.

    Raises:
        UsageError: there is no such file, or it is not a checkpoint.
    """
    contents = _contents(path, "ckpt_path", "give RUN/checkpoints/last.ckpt", load)
    usable = isinstance(contents, dict) and "state_dict" in contents
    require(usable, "ckpt_path", str(path), "it is not a checkpoint")
    return contents


def read_weights(path: Path) -> dict[str, Any]:
    """Read a file of weights: a checkpoint with the key ``state_dict``, or a state dict.

    Raises:
        UsageError: there is no such file, it is damaged, or it holds no weights.
    """
    contents = _contents(path, "weights", "give a checkpoint, or a file of a state dict", _load_verified)
    plain = isinstance(contents, dict) and bool(contents)
    usable = plain and ("state_dict" in contents or any(isinstance(value, Tensor) for value in contents.values()))
    require(usable, "weights", str(path), "it is neither a checkpoint nor a state dict")
    return contents


def _contents(path: Path, key: str, hint: str, load_file: Callable[[Path], Any]) -> Any:
    require(path.is_file(), key, str(path), f"there is no such file; {hint}")
    try:
        return _load_safetensors(path) if path.suffix == ".safetensors" else load_file(path)
    except ImportError as error:
        raise UsageError(f"{key}={str(path)!r}: install safetensors to read it, or give a .pt file") from error
    except DamagedFileError as error:
        raise UsageError(f"{key}={str(path)!r}: {error}; {hint}") from error


def _load_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except Exception as error:
        raise DamagedFileError("not a file of safetensors") from error
