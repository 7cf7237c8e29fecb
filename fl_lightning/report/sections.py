"""The sections of a report: the runs of one data set as frames of pandas, by setting, method and seed."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from fl_lightning.bench.comparison import Comparison
from fl_lightning.bench.results import CellResult, CellState
from fl_lightning.bench.statistics import fairness
from fl_lightning.bench.suite import Cell, Show, Suite, Table
from fl_lightning.bench.table_rendering import with_names
from fl_lightning.errors import choices, require
from fl_lightning.report.configs import UNKNOWN, data_set, differing_between, in_texts
from fl_lightning.report.reading import INFINITE
from fl_lightning.report.runs import settings_and_lines, with_setting
from fl_lightning.results import FitResult, RunState
from fl_lightning.storage.metric_format import in_percent

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
BYTES = ["bytes/down", "bytes/up"]
# columns that say which configuration, and which run, a row is of
OF_GROUP = ["setting", "line"]
OF_RUN = [*OF_GROUP, "seed"]


@dataclass(frozen=True)
class Metric:
    """The metric of a report.

    Args:
        tag: its tag.
        minimize: whether smaller values are better.
        target: value for which the needed rounds are counted; None for no target.
        percent: whether it is shown in percent.
        called: its name in tables and figures.
    """

    tag: str
    minimize: bool
    target: float | None
    percent: bool
    called: str

    @property
    def label(self) -> str:
        """Its name with its unit."""
        return f"{self.called}{' in %' * self.percent}"

    @property
    def unit(self) -> float:
        """Factor of the values that are shown."""
        return 100.0 if self.percent else 1.0


@dataclass
class Section:
    """The runs of one data set, or of one setting of it.

    Args:
        title: the data set, or the study.
        found: a row for each run with the columns ``setting``, ``line`` (the label of its curve), ``seed`` and ``run``,
            by setting, line and seed.
        lines: the labels of all curves, the baseline first.
        metric: the metric of the comparison.
        baseline: line that the others are compared with; empty for none.
        repeats: further runs of a configuration and a seed, which do not count.
        setting: the setting of a section of one setting.
        names: other names of methods, settings and metrics.
        intervals: ``interval``, ``confidence`` and ``decide`` of the suite of a study.
    """

    title: str
    found: pd.DataFrame
    lines: list[str]
    metric: Metric
    baseline: str = ""
    repeats: Sequence[FitResult] = ()
    setting: str = ""
    names: Mapping[str, str] = field(default_factory=dict)
    intervals: Mapping[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> list[str]:
        """The settings, by the numbers in them."""
        return list(dict.fromkeys(self.found["setting"]))

    @property
    def runs(self) -> list[FitResult]:
        """The runs without repeats."""
        return list(self.found["run"])

    @property
    def full_title(self) -> str:
        """Its title and its setting."""
        return ", ".join(filter(None, [self.title, self.setting]))

    @cached_property
    def parts(self) -> list[Section]:
        """A section for each setting."""
        return [
            replace(self, found=some, setting=setting, baseline=self.baseline * (self.baseline in set(some["line"])))
            for setting, some in self.found.groupby("setting", sort=False)
        ]

    def groups(self) -> Iterator[tuple[str, list[FitResult]]]:
        """Yield the runs of each configuration, which differ only in the seed, with its line and setting."""
        for (setting, line), some in self.found.groupby(OF_GROUP, sort=False):
            yield with_setting(line, setting), list(some["run"])

    @cached_property
    def configs(self) -> dict[str, dict[str, str]]:
        """The config of each configuration by dotted key."""
        return {label: in_texts(runs[0].settings) for label, runs in self.groups()}

    @property
    def common(self) -> dict[str, str]:
        """The keys and values that all configurations share."""
        configs = list(self.configs.values())
        differ = set(differing_between(configs))
        return {key: value for key, value in configs[0].items() if key not in differ} if configs else {}

    @cached_property
    def rounds(self) -> pd.DataFrame:
        """The metrics of all rounds, with the columns ``setting``, ``line`` and ``seed``."""
        places = self.found[OF_RUN].to_dict("records")
        rows = [{**place, **row} for place, run in zip(places, self.runs, strict=True) for row in run.history]
        frame = pd.DataFrame(rows, columns=None if rows else [*OF_RUN, "round"])
        numbers = frame.drop(columns=[*OF_RUN, "round"])
        # a part has no columns that are empty in its setting
        return frame[[*OF_RUN, "round"]].join(numbers.where(numbers.abs() < INFINITE).dropna(axis=1, how="all"))

    @cached_property
    def by_run(self) -> pd.DataFrame:
        """A row for each run: its state, its last and best value so far, finished or not, and its cost."""
        rows = []
        for run in self.runs:
            values = run.values(self.metric.tag)
            known = [value for value in values.values() if value == value]
            best = (min if self.metric.minimize else max)(known, default=None)
            last = values[max(values)] if values else None
            rows.append(
                {
                    **{"state": run.state, "rounds": run.rounds, "metric": self.metric.tag, "last": last, "best": best},
                    **{"seconds": run.seconds, "plan": run.plan, "machine": run.machine, "name": run.name},
                }
            )
        known = self.rounds.reindex(columns=[*OF_RUN, *BYTES])
        sent = known.groupby(OF_RUN)[BYTES].agg(lambda column: column.sum(skipna=False)).sum(axis=1, skipna=False)
        made = self.found[OF_RUN].join(pd.DataFrame(rows, self.found.index))
        made = made.astype({"last": float, "best": float, "seconds": float})
        return made.join(sent.rename("bytes"), on=OF_RUN)

    @cached_property
    def comparisons(self) -> dict[Show, Comparison]:
        """The tables: ``final``, ``best``, with a target ``rounds_to``, and with clients' accuracies ``fair``."""
        settings = {"setting": self.settings} if len(self.settings) > 1 else {}
        cells, results = list[Cell](), dict[str, CellResult]()
        for setting, line, seed, run in self.found[[*OF_RUN, "run"]].itertuples(index=False):
            labels = {"method": line, **({"setting": setting} if settings else {})}
            cell = Cell(labels, seed, (dict(run.settings),), known=f"{line}, {setting}, {seed}")
            known: Any = {"plan": run.plan, "machine": run.machine, "seconds": run.seconds, "reason": run.reason}
            known |= {"values": run.values(self.metric.tag), "metrics": run.metrics}
            cells.append(cell)
            results[cell.digest] = CellResult(cell.name, cell.digest, CELL_STATES[run.state], **known)
        shows: list[Show] = ["final", "best"]
        shows += [] if self.metric.target is None else ["rounds_to"]
        shows += ["fair"] if any(fairness(run.metrics, {}) for run in self.runs) else []
        suite = Suite(
            path=Path("report.yaml"),
            title=self.title,
            base=(),
            axes={axis: dict.fromkeys(labels, ()) for axis, labels in {"method": self.lines, **settings}.items()},
            seeds=(),
            tables=tuple(Table(show, ("method",), tuple(settings), target=self.metric.target) for show in shows),
            metric=self.metric.tag,
            minimize=self.metric.minimize,
            percent=self.metric.percent,
            baseline={"method": self.baseline} if self.baseline else {},
            **self.intervals,
        )
        return {table.show: Comparison(suite, table, cells, results) for table in suite.tables}


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
    metric = Metric(chosen, minimize or "loss" in chosen, target, in_percent(chosen, values), chosen)
    if target is not None:
        hint = "use the scale of the logged values, such as 0.6 for 60 %"
        require(math.isfinite(target) and not (metric.percent and target > 1), "--target", target, hint)
    return metric


def sections_of(
    runs: Iterable[FitResult], metric: Metric, baseline: str | None, title: str = "", **more: Any
) -> Iterator[Section]:
    """Yield the sections of some runs, one for each data set.

    Args:
        runs: the runs, either all with labels of one study or all without labels.
        metric: the metric of the comparison.
        baseline: line to compare with; None for FedAvg, if it exists.
        title: beginning of the titles, such as the title of a study.
        more: ``names`` and ``intervals`` of :class:`Section`.
    """
    by_data: dict[str, list[FitResult]] = defaultdict(list)
    for run in runs:
        by_data[run.labels.get("data") or data_set(run.config)].append(run)
    wanted = "FedAvg" if baseline is None else baseline
    for data, some in by_data.items():
        found = pd.DataFrame(settings_and_lines(some), columns=OF_GROUP)
        found["seed"], found["run"] = [run.seed for run in some], some
        lines = sorted(dict.fromkeys(found["line"]), key=lambda line: line != wanted)
        # of several runs with one seed, the one with most progress counts
        progress = [(run.state == "finished", run.state == "running", run.rounds) for run in some]
        found = found.iloc[sorted(range(len(some)), key=progress.__getitem__)]
        repeated = found.duplicated(OF_RUN, keep="last")
        order = sorted(
            found.index[~repeated],
            key=lambda at: (by_numbers(found["setting"][at]), lines.index(found["line"][at]), found["seed"][at]),
        )
        whole = title if data == UNKNOWN and title else ": ".join(filter(None, [title, data]))
        repeats = list(found["run"][repeated])
        yield Section(whole, found.loc[order], lines, metric, wanted * (wanted in lines), repeats, **more)


def by_numbers(setting: str) -> list[tuple[float, str]]:
    """Return a key that sorts alpha=0.1 before alpha=10."""

    def key(part: str) -> tuple[float, str]:
        try:
            return float(part), ""
        except ValueError:
            return math.inf, part

    return [key(part) for pair in setting.split(", ") for part in reversed(pair.rpartition("=")[::2])]


def with_other_names(section: Section, names: Mapping[str, str]) -> Section:
    """Return a section with other names of methods, settings and metric.

    Raises:
        UsageError: two lines would have one name.
    """
    lines = {line: with_names(line, names) for line in section.lines}
    hint = f"two methods would have one name; methods: {', '.join(lines)}"
    require(len(set(lines.values())) == len(lines), "--names", " ".join(map("=".join, names.items())), hint)
    settings = [with_names(setting, names) for setting in section.found["setting"]]
    return replace(
        section,
        found=section.found.assign(line=section.found["line"].map(lines), setting=settings),
        lines=list(lines.values()),
        metric=replace(section.metric, called=names.get(section.metric.tag, section.metric.tag)),
        baseline=lines.get(section.baseline, ""),
        names=names,
    )
