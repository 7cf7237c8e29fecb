"""The sections of a report: the runs of one data set, by setting, method and seed."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property
from typing import Any

import pandas as pd

from fl_lightning.bench.comparison import Comparison, Terms
from fl_lightning.bench.results import CellResult, CellState
from fl_lightning.bench.suite import Cell, Show, Table
from fl_lightning.bench.table_rendering import with_names
from fl_lightning.errors import choices, require
from fl_lightning.report.configs import UNKNOWN, data_set, differing_between
from fl_lightning.report.reading import INFINITE
from fl_lightning.report.runs import Configuration, by_numbers, configurations
from fl_lightning.results import FitResult, RunState
from fl_lightning.storage.metric_format import is_share

ACCURACIES, LOSSES = ("{}/accuracy", "{}_accuracy", "{}/acc", "{}_acc"), ("{}/loss", "{}_loss")
# usual metrics of a report, the first choice first
METRICS = tuple(
    name.format(phase)
    for phases, names in itertools.product((("test", "val"), ("train",)), (ACCURACIES, LOSSES))
    for phase in phases
    for name in names
)
# a stopped run can resume, so its cell waits
CELL_STATES: Mapping[RunState, CellState] = {
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
        target: value for which the needed rounds are counted; None for no target.
        percent: whether it is shown in percent.
        name: name that replaces the tag; empty for none.
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

    @property
    def unit(self) -> float:
        """Factor of the values that are shown."""
        return 100.0 if self.percent else 1.0

    def text(self, value: float | None) -> str:
        """Return a value as a table shows it."""
        return "-" if value is None else f"{self.unit * value:.{2 if self.percent else 4}f}"


@dataclass
class Section:
    """The runs of one data set.

    Args:
        title: the data set, or the study.
        groups: the configurations.
        metric: the metric of the comparison.
        baseline: line that the others are compared with; empty for none.
        names: other names of methods, settings and metrics.
        intervals: ``interval``, ``confidence`` and ``decide`` of a study, as for :class:`Terms`.
    """

    title: str
    groups: list[Configuration]
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
    def runs(self) -> list[FitResult]:
        """The runs without repeats."""
        return [run for group in self.groups for run in group.runs.values()]

    @property
    def in_order(self) -> list[Configuration]:
        """The groups, by setting and line."""
        return [group for setting in self.settings for group in self.at(setting)]

    @property
    def common(self) -> list[tuple[str, str]]:
        """The keys and values that all configurations share."""
        configs = [group.config for group in self.groups]
        differ = set(differing_between(configs))
        return [(key, value) for key, value in configs[0].items() if key not in differ] if configs else []

    @cached_property
    def rounds(self) -> pd.DataFrame:
        """The metrics of all rounds, with the columns ``setting``, ``line`` and ``seed``."""
        rows = [
            {"setting": group.setting, "line": group.line, "seed": seed, **row}
            for group in self.in_order
            for seed, run in group.runs.items()
            for row in run.history
        ]
        first = ["setting", "line", "seed", "round"]
        frame = pd.DataFrame(rows, columns=None if rows else first)
        numbers = frame.drop(columns=first)
        return frame[first].join(numbers.where(numbers.abs() < INFINITE))

    def rounds_at(self, setting: str) -> pd.DataFrame:
        """Return the rounds of a setting, without empty columns."""
        own = self.rounds[self.rounds["setting"] == setting]
        return own.dropna(axis=1, how="all") if len(own) else own

    @cached_property
    def parts(self) -> list[Section]:
        """A section for each setting."""
        groups = [self.at(setting) for setting in self.settings]
        lines = [{group.line for group in of_setting} for of_setting in groups]
        named = [self.baseline if self.baseline in of_setting else "" for of_setting in lines]
        return [replace(self, groups=some, baseline=one) for some, one in zip(groups, named, strict=True)]

    def at(self, setting: str) -> list[Configuration]:
        """Return the groups of a setting, in the order of their lines."""
        return [group for line in self.lines for group in self.groups if (group.line, group.setting) == (line, setting)]

    @cached_property
    def comparisons(self) -> dict[Show, Comparison]:
        """The tables of ``final`` and ``best`` values and, with a target, of ``rounds_to``."""
        settings = {"setting": self.settings} if len(self.settings) > 1 else {}
        axes, metric = {"method": self.lines, **settings}, self.metric
        cells, results = list[Cell](), dict[str, CellResult]()
        for group in self.groups:
            labels = {"method": group.line, **({"setting": group.setting} if settings else {})}
            for seed, run in group.runs.items():
                cell = Cell(labels, seed, (dict(run.settings),), known=f"{group.label} {seed}")
                known: Any = {"plan": run.plan, "machine": run.machine, "seconds": run.seconds, "reason": run.reason}
                known |= {"values": run.values(metric.tag)}
                cells.append(cell)
                results[cell.digest] = CellResult(cell.name, cell.digest, CELL_STATES[run.state], **known)
        baseline = {"method": self.baseline} if self.baseline else {}
        terms = Terms(self.title, axes, metric.tag, metric.minimize, metric.percent, baseline, **self.intervals)
        shows: tuple[Show, ...] = ("final", "best", *(() if metric.target is None else ("rounds_to",)))
        tables = [Table(show, ("method",), tuple(settings), target=metric.target) for show in shows]
        return {table.show: Comparison(terms, table, cells, results) for table in tables}


def in_percent(tag: str, values: Iterable[float] = ()) -> bool:
    """Return whether a metric is shown in percent: its name denotes a share, and its values lie in [0, 1]."""
    known = [value for value in values if math.isfinite(value)]
    return is_share(tag) and all(0 <= value <= 1 for value in known)


def choose_metric(
    runs: Sequence[FitResult], tag: str | None, minimize: bool, target: float | None, usual: Sequence[str] = METRICS
) -> Metric:
    """Return the metric of a report: ``tag``, or the first usual metric that a run has.

    Raises:
        UsageError: no run has the metric, or the target cannot be reached.
    """
    known = dict.fromkeys(key for run in runs for row in run.history for key in row)
    if tag is not None:
        some = [key for key in known if not key.startswith(("time/", "placed/", "spectrum/"))]
        near = choices(get_close_matches(tag, some, 3, cutoff=0.0))
        require(tag in known, "--metric", tag, f"no run has this metric; the nearest of {len(some)} are: {near}")
    chosen = tag or next((metric for metric in usual if metric in known), usual[0])
    values = [value for run in runs for value in run.values(chosen).values()]
    metric = Metric(chosen, minimize or "loss" in chosen, target, in_percent(chosen, values))
    if target is not None:
        hint = "use the scale of the logged values, such as 0.6 for 60 %"
        require(math.isfinite(target) and not (metric.percent and target > 1), "--target", target, hint)
    return metric


def sections_of(
    runs: Iterable[FitResult], metric: Metric, baseline: str | None, title: str = "", **intervals: Any
) -> list[Section]:
    """Return the sections of some runs, one for each data set.

    Args:
        runs: the runs, either all with labels of one study or all without labels.
        metric: the metric of the comparison.
        baseline: line to compare with; None for FedAvg, if it exists.
        title: beginning of the titles, such as the title of a study.
        intervals: as for :class:`Section`.
    """
    by_data: dict[str, list[FitResult]] = defaultdict(list)
    for run in runs:
        by_data[run.labels.get("data") or data_set(run.config)].append(run)
    made, wanted = [], "FedAvg" if baseline is None else baseline
    for data, some in by_data.items():
        groups = configurations(some)
        named = title if data == UNKNOWN and title else ": ".join(filter(None, [title, data]))
        known = wanted if wanted in {group.line for group in groups} else ""
        made.append(Section(named, groups, metric, known, intervals=intervals))
    return made


def with_other_names(section: Section, names: Mapping[str, str]) -> Section:
    """Return a section with other names of methods, settings and metric.

    Raises:
        UsageError: two lines would have one name.
    """
    lines = {line: with_names(line, names) for line in section.lines}
    hint = f"two methods would have one name; methods: {', '.join(lines)}"
    require(len(set(lines.values())) == len(lines), "--names", " ".join(map("=".join, names.items())), hint)
    for group in section.groups:
        group.line, group.setting = lines[group.line], with_names(group.setting, names)
        group.own = {with_names(key, names): value for key, value in group.own.items()}
    metric = replace(section.metric, name=names.get(section.metric.tag, ""))
    return replace(section, metric=metric, baseline=lines.get(section.baseline, ""), names=names)
