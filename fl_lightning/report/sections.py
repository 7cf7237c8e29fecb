"""The runs of a report in their order: by data set, then by setting and by method, with the seeds of one together."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fl_lightning.bench.comparison import Comparison
from fl_lightning.bench.fragments import is_of_method
from fl_lightning.bench.layout import with_names
from fl_lightning.bench.results import CellResult, CellState
from fl_lightning.bench.suite import Cell, Show, Suite, Table
from fl_lightning.errors import require
from fl_lightning.records.summary import is_share
from fl_lightning.report.configs import (
    UNKNOWN,
    Flat,
    data_set,
    deciding,
    differing_between,
    flat_config,
    method_names,
    short_keys,
)
from fl_lightning.report.run import ReportedRun, RunState

ACCURACIES, LOSSES = ("{}/accuracy", "{}_accuracy", "{}/acc", "{}_acc"), ("{}/loss", "{}_loss")
# what a report is about, in the order in which it is looked for
METRICS = tuple(
    name.format(phase)
    for phases, names in itertools.product((("test", "val"), ("train",)), (ACCURACIES, LOSSES))
    for phase in phases
    for name in names
)
# keys that make a setting even where each method has a value of its own
OF_SETTING = (
    *("data", "model.encoder", "trainer.max_rounds", "trainer.local_epochs", "trainer.local_steps"),
    *("trainer.participation", "trainer.cohort_size", "trainer.sampler"),
)
# a run that was stopped can go on: it waits for that
RESULT_STATES: Mapping[RunState, CellState] = {
    "finished": "done",
    "running": "running",
    "stopped": "waiting",
    "failed": "failed",
}


@dataclass(frozen=True)
class Metric:
    """The metric of a report.

    Args:
        tag: its tag.
        minimize: whether smaller values are better.
        target: value for which the rounds are counted that a run needs; None for none.
        percent: whether it is shown in percent.
        name: its other name; empty for none.
    """

    tag: str
    minimize: bool
    target: float | None
    percent: bool
    name: str = ""

    @property
    def called(self) -> str:
        """Its name, or else its tag."""
        return self.name or self.tag

    @property
    def label(self) -> str:
        """Its name with its unit."""
        return f"{self.called}{' in %' * self.percent}"

    def in_unit(self, value: float) -> float:
        """A value in the unit that is shown."""
        return 100 * value if self.percent else value

    def text(self, value: float) -> str:
        """A value in the unit that is shown, as text."""
        return f"{self.in_unit(value):.{2 if self.percent else 4}f}"


@dataclass
class Group:
    """The runs of one configuration, which differ in the seed alone.

    Args:
        line: what its curve is called, such as the method.
        setting: what tells its setting from the others, as one text.
        runs: by seed, in ascending order.
        config: its config by dotted keys.
        repeats: runs of a seed that is there already, which do not count.
        own: all keys in which its setting differs from others, with their values.
    """

    line: str
    setting: str
    runs: dict[int, ReportedRun]
    config: Flat
    repeats: list[ReportedRun] = field(default_factory=list)
    own: dict[str, str] = field(default_factory=dict)

    @property
    def first(self) -> ReportedRun:
        """The run of the smallest seed."""
        return next(iter(self.runs.values()))

    @property
    def label(self) -> str:
        """Its line and its setting."""
        return ", ".join(filter(None, [self.line, self.setting]))


@dataclass
class Section:
    """The runs of one data set.

    Args:
        title: the data set, or the study.
        groups: the configurations.
        metric: what they are compared by.
        baseline: the line with which the others are compared; empty for none.
        names: what methods, settings and metrics are called, where it is something else.
        intervals: how differences are judged, as arguments of a suite: ``interval``, ``confidence`` and ``decide``.
    """

    title: str
    groups: list[Group]
    metric: Metric
    baseline: str = ""
    names: Mapping[str, str] = field(default_factory=dict)
    intervals: Mapping[str, Any] = field(default_factory=dict)

    @property
    def lines(self) -> list[str]:
        """The labels of the curves, the baseline first."""
        labels = dict.fromkeys(group.line for group in self.groups)
        return sorted(labels, key=lambda label: label != self.baseline)

    @property
    def settings(self) -> list[str]:
        """The settings, by the numbers in them."""
        return sorted(dict.fromkeys(group.setting for group in self.groups), key=by_numbers)

    @property
    def runs(self) -> list[ReportedRun]:
        """The runs that count."""
        return [run for group in self.groups for run in group.runs.values()]

    @property
    def in_order(self) -> list[Group]:
        """The groups, by setting and line."""
        return [group for setting in self.settings for group in self.at(setting)]

    def parts(self) -> list[Section]:
        """A section for each setting, without the others."""
        groups = [self.at(setting) for setting in self.settings]
        lines = [{group.line for group in of_setting} for of_setting in groups]
        named = [self.baseline if self.baseline in of_setting else "" for of_setting in lines]
        return [replace(self, groups=some, baseline=one) for some, one in zip(groups, named, strict=True)]

    def at(self, setting: str) -> list[Group]:
        """The groups of a setting, in the order of their lines."""
        return [group for line in self.lines for group in self.groups if (group.line, group.setting) == (line, setting)]

    def comparisons(self) -> dict[Show, Comparison]:
        """The ``final`` and the ``best`` values and, with a target, the ``rounds_to`` it, as the tables of a suite."""
        axes = {"method": self.lines} | ({"setting": self.settings} if len(self.settings) > 1 else {})
        metric, cells, results = self.metric, list[Cell](), dict[str, CellResult]()
        for group in self.groups:
            labels = {axis: {"method": group.line, "setting": group.setting}[axis] for axis in axes}
            config = deciding(group.first.config)
            for seed, run in group.runs.items():
                # each cell needs a digest of its own; in "method" no two rows are said to differ
                named = {"method": f"{group.line} at {group.setting or 'one setting'}, seed {seed}"}
                cell = Cell(labels, seed, (config | named,))
                known: Any = {"plan": run.plan_hash, "machine": run.machine, "seconds": run.seconds}
                known |= {"values": run.values(metric.tag), "reason": run.reason}
                cells.append(cell)
                results[cell.digest] = CellResult(cell.name, cell.digest, RESULT_STATES[run.state], **known)
        suite = Suite(
            *(Path("report"), self.title, ()),
            {axis: dict.fromkeys(labels, ()) for axis, labels in axes.items()},
            *((), ()),
            metric=metric.tag,
            minimize=metric.minimize,
            percent=metric.percent,
            baseline={"method": self.baseline} if self.baseline else {},
            **self.intervals,
        )
        shows: tuple[Show, ...] = ("final", "best", *(() if metric.target is None else ("rounds_to",)))
        tables = [Table(show, ("method",), tuple(axes)[1:], target=metric.target) for show in shows]
        return {table.show: Comparison(suite, table, cells, results) for table in tables}


def by_numbers(setting: str) -> list[tuple[float, str]]:
    """What sorts settings so that alpha=0.1 comes before alpha=10."""

    def key(part: str) -> tuple[float, str]:
        try:
            return float(part), ""
        except ValueError:
            return math.inf, part

    return [key(part) for pair in setting.split(", ") for part in reversed(pair.rpartition("=")[::2])]


def in_percent(tag: str, values: Iterable[float] = ()) -> bool:
    """Whether a metric with these values is shown in percent: a share by its name that lies between 0 and 1."""
    known = [value for value in values if math.isfinite(value)]
    return is_share(tag) and all(0 <= value <= 1 for value in known)


def choose_metric(
    runs: Sequence[ReportedRun], tag: str | None, minimize: bool, target: float | None, usual: Sequence[str] = METRICS
) -> Metric:
    """The metric of a report: the one that is asked for, or the first of the usual ones that a run has.

    Raises:
        UsageError: no run has the one that is asked for, or the target cannot be reached.
    """
    known = dict.fromkeys(key for run in runs for row in run.rows for key in row)
    if tag is not None:
        some = ", ".join(key for key in known if not key.startswith(("time/", "placed/", "spectrum/"))) or "nothing"
        require(tag in known, "--metric", tag, f"no run has it; there are {some}")
    chosen = tag or next((metric for metric in usual if metric in known), usual[0])
    values = [value for run in runs for value in run.values(chosen).values()]
    metric = Metric(chosen, minimize or "loss" in chosen, target, in_percent(chosen, values))
    if target is not None:
        hint = "give the value as the run logs it, such as 0.6 for 60 %"
        require(math.isfinite(target) and not (metric.percent and target > 1), "--target", target, hint)
    return metric


def sections_of(runs: Iterable[ReportedRun], metric: Metric, baseline: str | None, title: str = "") -> list[Section]:
    """The sections of some runs, one for each data set.

    Args:
        runs: the runs, all with labels of one study or all without.
        metric: what they are compared by.
        baseline: the line to compare with; None for FedAvg where there is one.
        title: beginning of the titles, such as that of a study.
    """
    by_data: dict[str, list[ReportedRun]] = defaultdict(list)
    for run in runs:
        by_data[run.labels.get("data") or data_set(run.config)].append(run)
    made = []
    for data, some in by_data.items():
        groups = grouped(some)
        named = title if data == UNKNOWN and title else ": ".join(filter(None, [title, data]))
        wanted = "FedAvg" if baseline is None else baseline
        made.append(Section(named, groups, metric, wanted if wanted in {group.line for group in groups} else ""))
    return made


def with_other_names(section: Section, names: Mapping[str, str]) -> Section:
    """A section whose methods, settings and metric have other names.

    Raises:
        UsageError: two lines would have one name.
    """
    lines = {line: with_names(line, names) for line in section.lines}
    hint = f"give each its own; there are {', '.join(lines)}"
    require(len(set(lines.values())) == len(lines), "--names", " ".join(map("=".join, names.items())), hint)
    for group in section.groups:
        group.line, group.setting = lines[group.line], with_names(group.setting, names)
        group.own = {with_names(key, names): value for key, value in group.own.items()}
    metric = replace(section.metric, name=names.get(section.metric.tag, ""))
    return replace(section, metric=metric, baseline=lines.get(section.baseline, ""), names=names)


def grouped(runs: Sequence[ReportedRun]) -> list[Group]:
    """The runs of one data set by configuration."""
    by_config: dict[tuple[object, ...], list[ReportedRun]] = defaultdict(list)
    configs = {id(run): flat_config(run.config) for run in runs}
    for run in runs:
        # without a config, what has the same name is taken for the same
        alike = () if run.config or run.labels or run.folder is None else (str(run.folder.parent),)
        own = tuple(run.labels.items()) if run.labels else (*alike, *sorted(configs[id(run)].items()))
        by_config[own].append(run)
    groups = []
    for some in by_config.values():
        # of several runs with one seed, the one that has come furthest counts
        progress = sorted(some, key=lambda run: (run.state == "finished", run.state == "running", run.rounds))
        chosen = {run.seed: run for run in progress}
        counted = {id(run) for run in chosen.values()}
        repeats = [run for run in some if id(run) not in counted]
        groups.append(Group("", "", dict(sorted(chosen.items())), configs[id(some[0])], repeats))
    if any(run.labels for run in runs):
        name_by_labels(groups)
    else:
        name_by_configs(groups)
    return groups


def name_by_labels(groups: Sequence[Group]) -> None:
    """Name the cells of a study: the method is the line, and what the other axes say is the setting."""
    axes = dict.fromkeys(axis for group in groups for axis in group.first.labels)
    own = "method" if "method" in axes else next(iter(axes))
    others = [axis for axis in axes if axis not in (own, "data")]
    differing = [axis for axis in others if len({group.first.labels.get(axis) for group in groups}) > 1]
    for group in groups:
        labels = group.first.labels
        group.line = labels.get(own, "")
        group.own = {axis: labels[axis] for axis in differing if axis in labels}
        group.setting = ", ".join(f"{axis}={labels[axis]}" for axis in differing if axis in labels)


def name_by_configs(groups: Sequence[Group]) -> None:
    """Name configurations by the keys in which they differ: method and coefficients, then the setting.

    A key that follows from the method belongs to it, as a learning rate that each method has of its own; but data,
    network and how much is trained make a setting in any case.
    """
    keys = differing_between([group.config for group in groups])
    for group in groups:
        folder = group.first.folder
        of_folder = folder.parent.name if folder is not None else group.first.name
        group.line = method_names(group.first.config) if group.first.config else of_folder
    for name in dict.fromkeys(group.line for group in groups):
        alike = [group for group in groups if group.line == name]
        own = [key for key in differing_between([group.config for group in alike]) if is_of_method(key)]
        short = short_keys(own)
        for group in alike:
            more = [f"{short[key]}={group.config[key]}" for key in own if key in group.config]
            group.line = " ".join([name, *more])
    lines = {group.line for group in groups}
    in_any_case = [key for key in keys if key == "model" or any(f"{key}.".startswith(f"{one}.") for one in OF_SETTING)]
    settings = [
        key
        for key in keys
        if not is_of_method(key) and (len(lines) == 1 or key in in_any_case or not follows(key, groups))
    ]
    short, telling = short_keys(settings), telling_keys(settings, [group.config for group in groups])
    for group in groups:
        group.own = {short[key]: group.config[key] for key in settings if key in group.config}
        group.setting = ", ".join(f"{short[key]}={group.config.get(key, 'not set')}" for key in telling)
    if len(lines) == 1 and settings:  # the settings are what is compared
        for group in groups:
            group.line, group.setting, group.own = group.setting or group.line, "", {}


def telling_keys(keys: Sequence[str], configs: Sequence[Flat]) -> list[str]:
    """Return as few of some keys as tell apart the same configs, those of the data first.

    What comes with a class, such as the arguments of a network, needs no name beside that of the class.
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


def follows(key: str, groups: Sequence[Group]) -> bool:
    """Whether the line of a group tells its value of a key."""
    values: dict[str, set[str | None]] = defaultdict(set)
    for group in groups:
        values[group.line].add(group.config.get(key))
    return all(len(of_line) == 1 for of_line in values.values())
