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
        labels = self._labels()
        first = dict.fromkeys([key for one in labels for key in one] + ["round"])
        rows = [{**told, **row} for told, one in zip(labels, self, strict=True) for row in one.history]
        return frame_of(rows, list(first))

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
        averaged = any(len(some) > 1 for some in groups.values())
        return curves_of(groups, tags, "mean and range of the runs of each configuration" * averaged)

    def _repr_html_(self) -> str:
        names, labels = shown_tags(self), self._labels()
        keys = list(dict.fromkeys(key for one in labels for key in one))
        rows = [
            [*(told.get(key, "") for key in keys), one.state, len(one.history)]
            + [final(one.history, name) for name in names]
            for told, one in zip(labels, self, strict=True)
        ]
        return notebook_page(f"{len(self)} runs", [*keys, "state", "rounds", *names], rows, self._curves())

    def _labels(self) -> list[dict[str, object]]:
        """Return the name, the seed and the method of each run, and the keys in which the configs differ."""
        keys = differing_keys(config_frame([one.settings for one in self if one.settings]))
        # short names must differ from the other columns, such as method
        short = short_keys([*FIRST, *(key for key in keys if key not in FIRST)])
        return [
            {"run": one.name, "seed": one.seed, "method": one.method}
            | {
                short[key]: value if isinstance(value, bool | int | float) else config_text(value)
                for key in short
                if (value := one.settings.get(key)) is not None and key not in FIRST
            }
            for one in self
        ]

    def _curves(self) -> dict[str, list[FitResult]]:
        """Return the runs that have begun by the label of their curve."""
        begun = [one for one in self if one.history]
        names = name_configs(begun)
        groups = {
            with_setting(line, setting): [begun[at] for at in alike.index]
            for (setting, line), alike in names.groupby(["setting", "line"], sort=False)
        }
        return {
            f"{label} ({count(len(some), 'run')})" if len(some) > 1 else label: some for label, some in groups.items()
        }


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
    found = folders_of("load_run", path)
    some = f"there are {len(found)} runs below it; pass one of them, such as {found[-1]}, or call load_runs"
    require(len(found) == 1, "load_run", str(path), some)
    try:
        run = read_run(found[0])
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
    folders = {folder.resolve(): folder for path in paths for folder in folders_of("load_runs", path)}
    runs = Runs()
    for folder in folders.values():
        try:
            runs.append(read_run(folder))
        except ValueError as error:
            warnings.warn(f"{folder} cannot be read and is skipped: {why(error)}", stacklevel=2)
    require(bool(runs), "load_runs", [str(path) for path in paths], f"none of its runs can be read; {HINT}")
    warn_of(runs)
    name_runs(runs)
    return runs


def folders_of(function: str, path: str | os.PathLike) -> list[Path]:
    """Return the folders of the runs at and below a folder, or the folders that match a pattern; refuse none."""
    hint = "pass a path, or several to load_runs: load_runs('runs/fedavg', 'runs/feduv')"
    require(isinstance(path, str | os.PathLike), function, path, hint)
    text = os.path.expanduser(path)
    matching = [text] if os.path.lexists(text) else sorted(glob.glob(text))
    found = [folder for one in matching for folder in find_runs(Path(one))]
    require(bool(found), function, str(path), f"no run in this folder or below it; {HINT}")
    return found


def warn_of(runs: Sequence[FitResult]) -> None:
    """Warn of the files of runs that could not be read."""
    for run in runs:
        for note in run.notes:
            warnings.warn(f"{run.run_dir}: {note}", stacklevel=3)
