"""Checkpoints: ``last.ckpt`` with tensors and plain values, and a file in ``clients`` for each client's memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fl_lightning.errors import UsageError, choices, require
from fl_lightning.records.files import DamagedFileError, load_checked
from fl_lightning.records.history import HISTORY, MetricsRow, read_history, read_table
from fl_lightning.records.manifest import CLIENT_FILE, Manifest, manifest_path, read_manifest

LAST, PREVIOUS, BEST = "last.ckpt", "previous.ckpt", "best.ckpt"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files are as they were written.

    Args:
        path: its file.
        manifest: its manifest; None where it has none, as those of Lightning and of former versions.
        history: the rows of the rounds that are done; None where the file itself holds them.
    """

    path: Path
    manifest: Manifest | None = None
    history: list[MetricsRow] | None = None


def in_place(path: Path) -> bool:
    """Whether a checkpoint lies in the folder of its run."""
    return path.parent.name == "checkpoints"


def resumes_in_place(path: Path) -> bool:
    """Whether a run that resumes from a checkpoint goes on in its folder.

    From the best one, or one that a user has kept under another name, it goes on in a new version: the rounds after it
    stay as they are.
    """
    return in_place(path) and path.name in (LAST, PREVIOUS)


def find_checkpoint(ckpt_path: str | os.PathLike | None, versions: Path, resumes: bool = False) -> Path | None:
    """The checkpoint that is asked for: a path, or ``last`` for that of the newest version in the folder ``versions``.

    None where none is asked for, and where a run ``resumes`` that has none yet.

    Raises:
        UsageError: the path is empty, or that of a folder such as ``.``; no version has a ``last`` one.
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
    """The last checkpoint of the newest version that has one."""
    folders = [path for path in versions.glob("version_*/checkpoints") if path.parts[-2][8:].isdigit()]
    begun = [path for path in folders if any((path / name).is_file() for name in (LAST, PREVIOUS))]
    newest = max(begun, key=lambda path: int(path.parts[-2][8:]), default=None)
    return None if newest is None else newest / LAST


def valid_checkpoint(path: Path, warn: Callable[[str], None]) -> Checkpoint:
    """The checkpoint at ``path``, if all its files are as they were written; else the previous one beside it.

    Args:
        path: the checkpoint that is asked for.
        warn: told, in one line, what is wrong with one that is left.

    Raises:
        UsageError: there is none, or none is valid.
    """
    before = path.with_name(PREVIOUS)
    asked = [path, before] if path.name == LAST and before.is_file() else [path]
    hint = "there is no such file; give RUN/checkpoints/last.ckpt"
    require(len(asked) > 1 or path.is_file(), "ckpt_path", str(path), hint)
    wrong: list[str] = []
    for candidate in asked:
        try:
            checkpoint = verified(candidate, warn)
        except DamagedFileError as error:
            wrong.append(f"{candidate.name}: {error}" if candidate != path else str(error))
            continue
        if wrong:
            warn(f"ckpt_path={str(path)!r}: {wrong[0]}; {candidate.name} is taken instead")
        return checkpoint
    raise UsageError(f"ckpt_path={str(path)!r}: {'; '.join(wrong)}; give another checkpoint, or leave it out")


def verified(path: Path, warn: Callable[[str], None]) -> Checkpoint:
    """A checkpoint whose files are as they were written.

    Raises:
        DamagedFileError: one of them is not; the text names it.
    """
    if not path.is_file():
        raise DamagedFileError("there is no such file")
    if not manifest_path(path).is_file():
        # torch's own checksums are all that can be checked
        contents = load_checked(path, checksums=True)
        if isinstance(contents, dict) and "server" in contents:
            if "format" in contents:
                raise DamagedFileError(f"its manifest {manifest_path(path).name} is missing")
            for file in client_files(path, _of_run(contents)).values():
                load_checked(file, checksums=True)
            warn(f"ckpt_path={str(path)!r}: it has no manifest, as those of former versions, so it cannot be verified")
        return Checkpoint(path)
    manifest = read_manifest(path)
    manifest.check(path)
    if {name for _, name in _names(_of_run(load_checked(path)))} != set(manifest.clients):
        raise DamagedFileError("its manifest names other clients")
    for name in manifest.clients:
        load_checked(path.parent / "clients" / name)
    return Checkpoint(path, manifest, _history(path, manifest, warn))


def _of_run(contents: Any) -> dict[str, Any]:
    """What the checkpoint of a run holds.

    Raises:
        DamagedFileError: it holds something else.
    """
    if not (isinstance(contents, dict) and {"state_dict", "server"} <= contents.keys()):
        raise DamagedFileError("it is not the checkpoint of a run")
    if type(contents.get("round")) is not int or contents["round"] < 0:
        raise DamagedFileError("it does not say how many rounds are done")
    return contents


def _history(path: Path, manifest: Manifest, warn: Callable[[str], None]) -> list[MetricsRow]:
    """The rows of the rounds that are done; from the run's table where the file beside the checkpoint is damaged."""
    try:
        return read_history(path.parent / HISTORY, manifest.history)
    except DamagedFileError as error:
        if not in_place(path):
            raise
        try:
            rows = read_table(path.parents[1] / "metrics.csv", manifest.history)
        except DamagedFileError:
            raise error from None
        warn(f"ckpt_path={str(path)!r}: {error}; its rows are taken from metrics.csv, which has the same")
        return rows


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
        UsageError: no such file, damaged, or neither of the two.
    """
    contents = _contents(path, "weights", "give a checkpoint, or a file of a state dict", checksums=True)
    plain = isinstance(contents, dict) and bool(contents)
    usable = plain and ("state_dict" in contents or any(isinstance(value, Tensor) for value in contents.values()))
    require(usable, "weights", str(path), "it is neither a checkpoint nor a state dict")
    return contents


def _contents(path: Path, key: str, hint: str, checksums: bool = False) -> Any:
    """What a file holds, tensors and plain values only; ``key`` is the argument that names it."""
    require(path.is_file(), key, str(path), f"there is no such file; {hint}")
    try:
        if path.suffix != ".safetensors":
            if checksums and manifest_path(path).is_file():
                replace(read_manifest(path), clients={}).check(path)
            return load_checked(path, checksums)
        from safetensors.torch import load_file

        try:
            return load_file(path)
        except Exception as error:
            raise DamagedFileError("not a file of safetensors") from error
    except ImportError as error:
        raise UsageError(f"{key}={str(path)!r}: install safetensors to read it, or give a .pt file") from error
    except DamagedFileError as error:
        raise UsageError(f"{key}={str(path)!r}: {error}; {hint}") from error


def client_files(path: Path, contents: Mapping[str, Any]) -> dict[int, Path]:
    """The files of the clients' memories that belong to a checkpoint.

    Raises:
        UsageError: one is missing, or its name is none that a run gives.
    """
    try:
        files = {k: path.parent / "clients" / name for k, name in _names(contents)}
    except DamagedFileError as error:
        raise UsageError(f"ckpt_path={str(path)!r}: {error}; give another checkpoint") from error
    for file in files.values():
        require(file.is_file(), "ckpt_path", str(path), f"clients/{file.name}, which belongs to it, is not beside it")
    return files


def _names(contents: Mapping[str, Any]) -> list[tuple[int, str]]:
    """The clients that remember something, each with the name of its file, which lies in the folder ``clients``."""
    clients = contents.get("clients", {}) if isinstance(contents, dict) else {}
    if not isinstance(clients, dict):
        raise DamagedFileError("its clients are no names of files by id")
    for k, name in clients.items():
        match = CLIENT_FILE.fullmatch(name) if type(name) is str else None
        if type(k) is not int or match is None or int(match[1]) != k:
            raise DamagedFileError(
                f"it names {str(name)[:60]!r} for client {str(k)[:20]}, which is no file of a client"
            )
    return list(clients.items())
