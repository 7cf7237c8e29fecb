"""Several runs: read from their folders, named by their configuration, as one frame and as curves."""

from __future__ import annotations

import glob
import os
import warnings
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fl_lightning.bench.config_fragments import is_of_method
from fl_lightning.errors import UsageError, require
from fl_lightning.report.configs import Flat, differing_between, in_texts, method_names, short_keys
from fl_lightning.report.reading import find_runs, name_runs, read_run, why
from fl_lightning.results import FitResult, curves_of, frame_of, notebook_page, shown_tags
from fl_lightning.storage.metric_format import final

if TYPE_CHECKING:
    import pandas

    from fl_lightning.plotting.figures import ShownFigure

HINT = "pass the folder of a run, such as runs/fedavg/version_0, or use load_runs for several runs"
FIRST = ("run", "seed", "method", "round")
# keys that make a setting even if each method has a different value
OF_SETTING = (
    *("data", "model.encoder", "trainer.max_rounds", "trainer.local_epochs", "trainer.local_steps"),
    *("trainer.participation", "trainer.cohort_size", "trainer.sampler"),
)
# runs with a curve each at most; with more runs, each configuration has one curve
MOST_CURVES = 12


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
        """Draw metrics against the rounds in separate axes, with a curve for each run.

        With more than twelve runs, each configuration has one curve: the mean over its runs, for the rounds that all of
        them have, in a band from the least to the greatest value.

        Args:
            tags: the metrics; by default the metrics on the console, such as ``test/accuracy``.

        Raises:
            UsageError: no run has a metric of this name.
        """
        groups, title = self._curves()
        return curves_of(groups, tags, title)

    def _repr_html_(self) -> str:
        names, labels = shown_tags(self), self._labels()
        keys = list(dict.fromkeys(key for one in labels for key in one))
        rows = [
            [*(told.get(key, "") for key in keys), one.state, len(one.history)]
            + [final(one.history, name) for name in names]
            for told, one in zip(labels, self, strict=True)
        ]
        return notebook_page(f"{len(self)} runs", [*keys, "state", "rounds", *names], rows, self._curves()[0])

    def _labels(self) -> list[dict[str, object]]:
        """Return the name, the seed and the method of each run, and the keys in which the configs differ."""
        keys = differing_between([in_texts(one.settings) for one in self if one.settings])
        # short names must differ from the other columns, such as method
        short = short_keys([*FIRST, *(key for key in keys if key not in FIRST)])
        return [
            {"run": one.name, "seed": one.seed, "method": one.method}
            | {
                short[key]: value if isinstance(value, bool | int | float) else in_texts({key: value})[key]
                for key in short
                if (value := one.settings.get(key)) is not None and key not in FIRST
            }
            for one in self
        ]

    def _curves(self) -> tuple[dict[str, list[FitResult]], str]:
        """Return the runs by the label of their curve, and the title of their figure."""
        groups: dict[str, list[FitResult]] = defaultdict(list)
        if len(self) <= MOST_CURVES:
            for told, one in zip(self._labels(), self, strict=True):
                settings = [f"{key}={value}" for key, value in told.items() if key not in FIRST]
                groups[", ".join([one.name, *settings])].append(one)
            return groups, ""
        begun = [one for one in self if one.history]
        for (setting, line), one in zip(settings_and_lines(begun), begun, strict=True):
            groups[with_setting(line, setting)].append(one)
        averaged = any(len(some) > 1 for some in groups.values())
        counted = {f"{label}{f' ({len(some)} runs)' * (len(some) > 1)}": some for label, some in groups.items()}
        return counted, "mean and range of the runs of each configuration" * averaged


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
    check_path("load_run", path)
    folder = Path(path).expanduser()
    require(folder.is_dir(), "load_run", str(folder), f"no such folder; {HINT}")
    found = find_runs(folder)
    require(bool(found), "load_run", str(folder), f"no run in this folder or below it; {HINT}")
    some = f"there are {len(found)} runs below it; pass one of them, such as {found[-1]}, or call load_runs"
    require(len(found) == 1, "load_run", str(path), some)
    try:
        run = read_run(found[0])
    except ValueError as error:
        raise UsageError(f"load_run={str(path)!r}: {why(error)}; {HINT}") from error
    warn_of(run)
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
    folders: dict[Path, Path] = {}
    for path in paths:
        check_path("load_runs", path)
        text = os.path.expanduser(path)
        matching = sorted(glob.glob(text)) if not os.path.lexists(text) else [text]
        found = [run for one in matching if os.path.isdir(one) for run in find_runs(Path(one))]
        matched = "no such folder" if not matching else "no run in this folder or below it"
        require(bool(found), "load_runs", str(path), f"{matched}; {HINT}")
        folders.update({run.resolve(): run for run in found})
    runs = Runs()
    for folder in folders.values():
        try:
            runs.append(read_run(folder))
        except ValueError as error:
            warnings.warn(f"{folder} cannot be read and is skipped: {why(error)}", stacklevel=2)
    require(bool(runs), "load_runs", [str(path) for path in paths], f"none of its runs can be read; {HINT}")
    for run in runs:
        warn_of(run)
    name_runs(runs)
    return runs


def check_path(function: str, path: object) -> None:
    """Refuse an argument that is not a path, such as a list of paths."""
    hint = "pass a path, or several to load_runs: load_runs('runs/fedavg', 'runs/feduv')"
    require(isinstance(path, str | os.PathLike), function, path, hint)


def warn_of(run: FitResult) -> None:
    """Warn of the files of a run that could not be read."""
    for note in run.notes:
        warnings.warn(f"{run.run_dir}: {note}", stacklevel=3)


# ------------------------------------------------------------------ names
def settings_and_lines(runs: Sequence[FitResult]) -> list[tuple[str, str]]:
    """Return the setting of each run and its line, the label of its curve, by the keys in which the configs differ.

    The line is the method with its coefficients; the other keys make the setting. A key whose value follows from the
    method belongs to the method, such as a learning rate tuned for each method. Labels of a study, data, network and
    the amount of training always make a setting. Runs without a config are named by their folder.
    """
    axes = list(dict.fromkeys(axis for run in runs for axis in run.labels))
    # a study without methods compares the labels of its first axis
    by_label = "method" if "method" in axes else "".join(axes[:1])
    configs = [dict(run.labels) or in_texts(run.settings) for run in runs]
    folders = [run.name if run.run_dir is None else run.run_dir.parent.name for run in runs]
    methods = [method_names(run.config) if run.settings else folder for run, folder in zip(runs, folders, strict=True)]
    lines = [config.get(by_label) or method for config, method in zip(configs, methods, strict=True)]
    for name in set(lines):
        alike = [at for at, line in enumerate(lines) if line == name]
        short = short_keys([key for key in differing_between([configs[at] for at in alike]) if is_of_method(key)])
        for at in alike:
            own = (f"{short[key]}={configs[at][key]}" for key in short if key in configs[at])
            lines[at] = " ".join([name, *own])

    def makes_setting(key: str) -> bool:
        """Return whether a key is outside the methods, and its value does not follow from the method."""
        if is_of_method(key) or key == by_label:
            return False
        follows = len(set(zip(lines, (config.get(key) for config in configs), strict=True))) == len(set(lines))
        always = key in axes or key == "model" or f"{key}.".startswith(tuple(f"{one}." for one in OF_SETTING))
        return always or len(set(lines)) == 1 or not follows

    settings = [key for key in differing_between(configs) if makes_setting(key) and not (key == "data" and axes)]
    telling = telling_keys(settings, configs)
    short = short_keys(settings)
    texts = [", ".join(f"{short[key]}={config.get(key, 'not set')}" for key in telling) for config in configs]
    if len(set(lines)) == 1 and not axes:  # the settings are compared
        return [("", text or line) for text, line in zip(texts, lines, strict=True)]
    return list(zip(texts, lines, strict=True))


def telling_keys(keys: Sequence[str], configs: Sequence[Flat]) -> list[str]:
    """Return the fewest keys that distinguish the configs, keys of the data first.

    Arguments of a class are omitted where the name of the class suffices.
    """

    def number(some: Sequence[str]) -> int:
        return len({tuple(config.get(key) for key in some) for config in configs})

    ordered = sorted(keys, key=lambda key: (not key.startswith("data"), key.count(".")))
    chosen: list[str] = []
    while number(chosen) < number(keys):
        chosen.append(max(ordered, key=lambda key: number([*chosen, key])))
    for key in list(chosen):
        rest = [other for other in chosen if other != key]
        chosen = rest if number(rest) == number(keys) else chosen
    return [key for key in ordered if key in chosen]


def with_setting(line: str, setting: str) -> str:
    """Return the label of a configuration: its line and its setting."""
    return ", ".join(filter(None, [line, setting]))
