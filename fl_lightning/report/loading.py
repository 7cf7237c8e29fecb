"""Finished runs in Python: one, or many at once."""

from __future__ import annotations

import glob
import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

from fl_lightning.errors import UsageError, require
from fl_lightning.report.configs import (
    config_text,
    deciding,
    differing_between,
    flat_config,
    methods_with_arguments,
    short_keys,
)
from fl_lightning.report.run import ReportedRun, find_runs, read_run, why
from fl_lightning.results import LABELS, FitResult, FitResults

HINT = "give the folder of a run, such as runs/fedavg/version_0, or load_runs a folder or a pattern of many"


def load_run(path: str | os.PathLike) -> FitResult:
    """What the fit of a run has returned, read from its folder; nothing is changed there.

    A run that was stopped, or that goes on, has the rounds that are done. What cannot be read is left out, with a
    warning.

    Args:
        path: the folder of the run, or one with this run alone below it.

    Raises:
        UsageError: there is no run, or there are several.
    """
    folder = Path(path).expanduser()
    require(folder.is_dir(), "load_run", str(folder), f"there is no such folder; {HINT}")
    found = find_runs(folder)
    require(bool(found), "load_run", str(folder), f"there is no run in it or below it; {HINT}")
    some = f"it has {len(found)} runs below it; give one of them, such as {found[-1]}, or call load_runs"
    require(len(found) == 1, "load_run", str(path), some)
    try:
        run = read_run(found[0])
    except ValueError as error:
        raise UsageError(f"load_run={str(path)!r}: {why(error)}; {HINT}") from error
    return result_of(found[0], "/".join(found[0].resolve().parts[-2:]), run, flat_config(run.config))


def load_runs(*paths: str | os.PathLike) -> FitResults:
    """Many runs at once, which have one table and one picture; nothing is changed in their folders.

    What cannot be read is left out, with a warning.

    Args:
        paths: folders that are runs or have runs below them, such as ``runs`` or the output of ``bench``; each may be
            a pattern, such as ``runs/fed*``.

    Raises:
        UsageError: a path or a pattern has no run.
    """
    require(bool(paths), "load_runs", paths, "give folders that have runs below them, such as runs")
    folders: dict[Path, Path] = {}
    for path in paths:
        text = os.path.expanduser(path)
        matching = sorted(glob.glob(text)) if not os.path.lexists(text) else [text]
        found = [run for one in matching if os.path.isdir(one) for run in find_runs(Path(one))]
        matched = "nothing is called so" if not matching else "there is no run in it or below it"
        require(bool(found), "load_runs", str(path), f"{matched}; {HINT}")
        folders.update({run.resolve(): run for run in found})
    read: dict[Path, ReportedRun] = {}
    for folder in folders.values():
        try:
            read[folder] = read_run(folder)
        except ValueError as error:
            warnings.warn(f"{folder} cannot be read and is left out: {why(error)}", stacklevel=2)
    require(bool(read), "load_runs", [str(path) for path in paths], f"none of its runs can be read; {HINT}")
    common = Path(os.path.commonpath([folder.resolve().parent.parent for folder in read]))
    # a run made from Python has no config, and so none in which it differs
    keys = differing_between([flat_config(run.config) for run in read.values() if run.config])
    return FitResults(
        result_of(folder, folder.resolve().relative_to(common).as_posix(), run, keys) for folder, run in read.items()
    )


def result_of(folder: Path, name: str, run: ReportedRun, keys: Iterable[str]) -> FitResult:
    """A run that was read as its fit would have returned it; what could not be read is a warning.

    Args:
        folder: its folder.
        name: its name.
        run: what was read.
        keys: the keys of its config that are its settings.
    """
    for note in run.notes:
        warnings.warn(f"{folder}: {note}", stacklevel=3)
    # the short names are none of the other columns, such as that of the method
    short, config = short_keys([*LABELS, *(key for key in keys if key not in LABELS)]), deciding(run.config)
    settings: Mapping[str, str | float] = {
        short[key]: config[key] if isinstance(config[key], bool | int | float) else config_text(config[key])
        for key in short
        if key in config and key not in LABELS
    }
    method = methods_with_arguments(run.config) if run.config else folder.resolve().parent.name
    return FitResult(name, run.rows, folder, run.seed, run.state, settings, method)
