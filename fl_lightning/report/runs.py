"""Several runs: read from their folders, named by their configuration, as one frame and as curves."""

from __future__ import annotations

import glob
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fl_lightning.report.configs import (
    config_frame,
    config_text,
    differing_keys,
    name_configs,
    short_keys,
    with_setting,
)
from fl_lightning.report.reading import find_runs, name_runs, read_run, why
from fl_lightning.storage.metric_format import final
from fl_lightning.storage.results import FitResult, curves_of, frame_of, notebook_page, shown_tags
from fl_lightning.utilities.errors import UsageError, count, require

if TYPE_CHECKING:
    import pandas

    from fl_lightning.plotting.figures import ShownFigure

HINT = "pass the folder of a run, such as runs/fedavg/version_0, or use load_runs for several runs"
FIRST = ("run", "seed", "method", "round")


class Runs(list[FitResult]):
    """Several runs, as :func:`fl_lightning.load_runs` reads them."""

    def frame(self) -> pandas.DataFrame:
        """Return a frame with a row for each run and round.

        Its first columns are ``run``, ``seed``, ``method``, and the keys of the configs in which the runs differ.
        """
        columns, rows = dict[str, None](), list[dict[str, object]]()
        for labels, run in zip(self._labels(), self, strict=True):
            columns |= dict.fromkeys(labels)
            rows += ({**labels, **row} for row in run.history)
        return frame_of(rows, [*columns, "round"])

    def plot(self, *tags: str) -> ShownFigure:
        """Draw metrics against the rounds in separate axes, with a curve for each configuration.

        The curve of several runs that differ only in the seed is their mean, for the rounds that all of them have, in a
        band from the least to the greatest value.

        Args:
            tags: the metrics; by default the metrics on the console, such as ``test/accuracy``.

        Raises:
            UsageError: no run has a metric of this name.
        """
        groups = self._curves()
        averaged = any(len(runs) > 1 for runs in groups.values())
        return curves_of(groups, tags, "mean and range of the runs of each configuration" if averaged else "")

    def _repr_html_(self) -> str:
        names, labels_of_runs = shown_tags(self), self._labels()
        keys = list(dict.fromkeys(key for labels in labels_of_runs for key in labels))
        rows = []
        for labels, run in zip(labels_of_runs, self, strict=True):
            finals = [final(run.history, name) for name in names]
            rows.append([*(labels.get(key, "") for key in keys), run.state, len(run.history), *finals])
        return notebook_page(f"{len(self)} runs", [*keys, "state", "rounds", *names], rows, self._curves())

    def _labels(self) -> list[dict[str, object]]:
        """Return the name, the seed and the method of each run, and the keys in which the configs differ."""
        keys = differing_keys(config_frame([run.settings for run in self if run.settings]))
        # short names must differ from the other columns, such as method
        names = short_keys([*FIRST, *(key for key in keys if key not in FIRST)])
        labels_of_runs = []
        for run in self:
            labels: dict[str, object] = {"run": run.name, "seed": run.seed, "method": run.method}
            for key, name in names.items():
                value = run.settings.get(key)
                if value is not None and key not in FIRST:
                    labels[name] = value if isinstance(value, bool | int | float) else config_text(value)
            labels_of_runs.append(labels)
        return labels_of_runs

    def _curves(self) -> dict[str, list[FitResult]]:
        """Return the runs that have begun by the label of their curve."""
        runs = [run for run in self if run.history]
        curves = {}
        for (setting, line), rows in name_configs(runs).groupby(["setting", "line"], sort=False):
            label = with_setting(line, setting)
            if len(rows) > 1:
                label = f"{label} ({count(len(rows), 'run')})"
            curves[label] = [runs[number] for number in rows.index]
        return curves


# ------------------------------------------------------------------ reading
def load_run(path: str | os.PathLike) -> FitResult:
    """Read a run as its fit returned it, without changing its folder.

    A run that is stopped or still running has its finished rounds. A file that cannot be read is skipped, with a
    warning.

    Args:
        path: the folder of the run, or a folder that contains only this run.

    Raises:
        UsageError: the folder contains no run, or several.
    """
    folders = folders_of("load_run", path)
    hint = f"there are {len(folders)} runs below it; pass one of them, such as {folders[-1]}, or call load_runs"
    require(len(folders) == 1, "load_run", str(path), hint)
    try:
        run = read_run(folders[0])
    except ValueError as error:
        raise UsageError(f"load_run={str(path)!r}: {why(error)}; {HINT}") from error
    warn_of([run])
    return run


def load_runs(*paths: str | os.PathLike) -> Runs:
    """Read several runs, without changing their folders.

    A file that cannot be read is skipped, with a warning.

    Args:
        paths: folders of runs, folders that contain runs, such as ``runs`` or the output of ``bench``, or patterns,
            such as ``runs/fed*``.

    Raises:
        UsageError: a path or a pattern has no run.
    """
    require(bool(paths), "load_runs", paths, "pass folders that contain runs, such as runs")
    folders, runs = dict[Path, Path](), Runs()
    for path in paths:
        folders |= {folder.resolve(): folder for folder in folders_of("load_runs", path)}
    for folder in folders.values():
        try:
            runs.append(read_run(folder))
        except ValueError as error:
            warnings.warn(f"{folder} cannot be read and is skipped: {why(error)}", stacklevel=2)
    require(bool(runs), "load_runs", [*map(str, paths)], f"none of its runs can be read; {HINT}")
    warn_of(runs)
    name_runs(runs)
    return runs


def folders_of(function: str, path: str | os.PathLike) -> list[Path]:
    """Return the folders of the runs at and below a folder, or the folders that match a pattern; refuse none."""
    hint = "pass a path, or several to load_runs: load_runs('runs/fedavg', 'runs/feduv')"
    require(isinstance(path, str | os.PathLike), function, path, hint)
    text = os.path.expanduser(path)
    matching = [text] if os.path.lexists(text) else sorted(glob.glob(text))
    folders = [folder for match in matching for folder in find_runs(Path(match))]
    require(bool(folders), function, str(path), f"no run in this folder or below it; {HINT}")
    return folders


def warn_of(runs: Sequence[FitResult]) -> None:
    """Warn of the files of runs that could not be read."""
    for run in runs:
        for note in run.notes:
            warnings.warn(f"{run.run_dir}: {note}", stacklevel=3)
