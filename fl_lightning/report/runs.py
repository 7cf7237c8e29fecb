"""Several runs: read from their folders, grouped by configuration, as one frame and as curves."""

from __future__ import annotations

import glob
import math
import os
import warnings
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
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


@dataclass
class Configuration:
    """The runs of one configuration, which differ only in the seed.

    Args:
        line: label of its curve, such as the method.
        setting: keys and values that distinguish its setting, as one text.
        runs: by seed, in ascending order.
        config: its config by dotted key.
        repeats: further runs of a seed, which do not count.
        own: all keys and values in which its setting differs from others.
    """

    line: str
    setting: str
    runs: dict[int, FitResult]
    config: Flat
    repeats: list[FitResult] = field(default_factory=list)
    own: dict[str, str] = field(default_factory=dict)

    @property
    def first(self) -> FitResult:
        """The run of the smallest seed."""
        return next(iter(self.runs.values()))

    @property
    def label(self) -> str:
        """Its line and its setting."""
        return ", ".join(filter(None, [self.line, self.setting]))


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
        for group in configurations([one for one in self if one.history]):
            some = [*group.runs.values(), *group.repeats]
            groups[f"{group.label}{f' ({len(some)} runs)' * (len(some) > 1)}"] += some
        averaged = any(len(some) > 1 for some in groups.values())
        return groups, "mean and range of the runs of each configuration" * averaged


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


# ------------------------------------------------------------------ configurations
def configurations(runs: Iterable[FitResult]) -> list[Configuration]:
    """Group runs by configuration, and name each by its method and by the keys in which the configs differ.

    Cells of a study are grouped and named by their labels, and runs without a config by their folder.
    """
    by_config: dict[tuple[object, ...], list[FitResult]] = defaultdict(list)
    for run in runs:
        config = run.labels or in_texts(run.settings)
        parent = () if config or run.run_dir is None else (str(run.run_dir.parent),)
        by_config[(*parent, *sorted(config.items()))].append(run)
    groups = []
    for some in by_config.values():
        # of several runs with one seed, the one with most progress counts
        progress = sorted(some, key=lambda run: (run.state == "finished", run.state == "running", run.rounds))
        chosen = {run.seed: run for run in progress}
        repeats = [run for run in some if chosen[run.seed] is not run]
        groups.append(Configuration("", "", dict(sorted(chosen.items())), in_texts(some[0].settings), repeats))
    name_groups(groups)
    return groups


def name_groups(groups: Sequence[Configuration]) -> None:
    """Name configurations by the keys in which they differ: method and coefficients, then the setting.

    A key whose value follows from the method belongs to the method, such as a learning rate tuned for each method.
    Labels of a study, data, network and the amount of training always make a setting.
    """
    axes = {axis for group in groups for axis in group.first.labels}
    configs = [dict(group.first.labels) or group.config for group in groups]
    by_name: dict[str, list[int]] = defaultdict(list)
    for at, group in enumerate(groups):
        run, labels = group.first, group.first.labels
        of_folder = run.run_dir.parent.name if run.run_dir is not None else run.name
        of_config = method_names(run.config) if group.config else of_folder
        by_name[labels.get("method", next(iter(labels.values()))) if labels else of_config].append(at)
    for name, alike in by_name.items():
        own = [key for key in differing_between([configs[at] for at in alike]) if is_of_method(key)]
        short = short_keys(own)
        for at in alike:
            groups[at].line = " ".join(
                [name, *(f"{short[key]}={configs[at][key]}" for key in own if key in configs[at])]
            )
    lines = [group.line for group in groups]

    def makes_setting(key: str) -> bool:
        """Return whether a key is outside the methods, and its value does not follow from the method."""
        told = len(set(zip(lines, (config.get(key) for config in configs), strict=True))) == len(set(lines))
        always = key in axes or key == "model" or f"{key}.".startswith(tuple(f"{one}." for one in OF_SETTING))
        return not is_of_method(key) and (always or len(set(lines)) == 1 or not told)

    # a study without methods compares the labels of its first axis
    by_label = "method" if "method" in axes else next(iter(groups[0].first.labels), "")
    differing = differing_between(configs)
    settings = [key for key in differing if makes_setting(key) and not (key in axes and key in (by_label, "data"))]
    short, telling = short_keys(settings), telling_keys(settings, configs)
    for group, config in zip(groups, configs, strict=True):
        group.own = {short[key]: config[key] for key in settings if key in config}
        group.setting = ", ".join(f"{short[key]}={config.get(key, 'not set')}" for key in telling)
        if len(set(lines)) == 1 and settings and not axes:  # the settings are compared
            group.line, group.setting, group.own = group.setting or group.line, "", {}


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


def by_numbers(setting: str) -> list[tuple[float, str]]:
    """Return a key that sorts alpha=0.1 before alpha=10."""

    def key(part: str) -> tuple[float, str]:
        try:
            return float(part), ""
        except ValueError:
            return math.inf, part

    return [key(part) for pair in setting.split(", ") for part in reversed(pair.rpartition("=")[::2])]
