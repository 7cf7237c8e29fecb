"""The sections of a report: the runs of one data set and their rounds, as frames of pandas."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property
from typing import Any

import pandas as pd

from fl_lightning.bench.comparison import Comparison, is_local
from fl_lightning.bench.criteria import Criteria
from fl_lightning.bench.results import CellResult, CellState
from fl_lightning.bench.shows import Best, ComparedRun, Fair, Final, RoundsTo, Show
from fl_lightning.bench.statistics import fairness
from fl_lightning.bench.suite import Table
from fl_lightning.bench.table_rendering import with_names
from fl_lightning.report.configs import UNKNOWN, config_frame, data_set, name_configs
from fl_lightning.report.reading import INFINITE
from fl_lightning.storage.metric_format import in_percent, is_minimized
from fl_lightning.storage.results import FitResult, History, RunState
from fl_lightning.utilities.errors import choices, require

# names of one metric
NAMES_OF_METRIC = (
    ("test/accuracy", "test_accuracy", "test/acc", "test_acc"),
    ("val/accuracy", "val_accuracy", "val/acc", "val_acc"),
    ("test/loss", "test_loss"),
    ("val/loss", "val_loss"),
    ("train/accuracy", "train_accuracy", "train/acc", "train_acc"),
    ("train/loss", "train_loss"),
)
# usual metrics of a report, the first choice first
METRICS = tuple(itertools.chain(*NAMES_OF_METRIC))
# a stopped run can resume, so its cell waits
CELL_STATES: Mapping[RunState, CellState] = {
    "finished": "done",
    "running": "running",
    "stopped": "waiting",
    "failed": "failed",
}
BYTES = ["bytes/down", "bytes/up"]
CLOCK = "clock/seconds"
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
        return f"{self.called} in %" if self.percent else self.called

    @property
    def unit(self) -> float:
        """Factor of the values that are shown."""
        return 100.0 if self.percent else 1.0


@dataclass
class Section:
    """The runs of one data set, or of one setting of it.

    Args:
        title: the data set, or the study.
        runs: a row for each run, by ``setting``, ``line`` (the label of its curve) and ``seed``: the ``run``, its
            ``state``, ``rounds``, ``plan``, its ``last`` and ``best`` value so far, finished or not, the ``seconds`` of
            a round, and the ``bytes`` of all rounds.
        rounds: the metrics of all rounds, with the columns ``setting``, ``line`` and ``seed``.
        lines: the labels of all curves, the baseline first.
        metric: the metric of the comparison.
        baseline: line that the others are compared with; empty for none.
        repeats: further runs of a configuration and a seed, which do not count.
        setting: the setting of a section of one setting.
        names: other names of methods, settings and metrics.
        intervals: ``confidence`` and ``decide`` of the suite of a study.
    """

    title: str
    runs: pd.DataFrame
    rounds: pd.DataFrame
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
        return list(dict.fromkeys(self.runs["setting"]))

    @property
    def full_title(self) -> str:
        """Its title and its setting."""
        return ", ".join(filter(None, [self.title, self.setting]))

    @cached_property
    def parts(self) -> list[Section]:
        """A section for each setting."""
        parts = []
        for setting, runs in self.runs.groupby("setting", sort=False):
            rounds = without_empty(self.rounds[self.rounds["setting"] == setting])
            baseline = self.baseline if self.baseline in set(runs["line"]) else ""
            parts.append(replace(self, runs=runs, rounds=rounds, setting=setting, baseline=baseline))
        return parts

    @cached_property
    def first_runs(self) -> pd.Series:
        """The run of the smallest seed of each configuration, by setting and line."""
        return self.runs.groupby(OF_GROUP, sort=False)["run"].first()

    @cached_property
    def configs(self) -> pd.DataFrame:
        """The config of each configuration by dotted key, by setting and line."""
        frame = config_frame([run.settings for run in self.first_runs])
        return frame.set_axis(self.first_runs.index)

    @property
    def common(self) -> dict[str, str]:
        """The keys and values that all configurations share."""
        shared = self.configs.loc[:, self.configs.nunique(dropna=False) == 1]
        return shared.iloc[0].to_dict()

    @cached_property
    def comparisons(self) -> dict[str, Comparison]:
        """The tables: ``final``, ``best``, with a target ``rounds_to``, and with clients' accuracies ``fair``."""
        metric, runs = self.metric, list[ComparedRun]()
        axes = {"method": self.lines, **({"setting": self.settings} if len(self.settings) > 1 else {})}
        for setting, line, seed, run in self.runs[[*OF_RUN, "run"]].itertuples(index=False):
            labels = {"method": line, "setting": setting}
            result = CellResult(
                run.name,
                digest="",
                state=CELL_STATES[run.state],
                reason=run.reason,
                values=run.values(metric.tag),
                seconds=run.seconds,
                plan=run.plan,
                metrics=run.metrics,
                machine=run.machine,
            )
            labels = {axis: labels[axis] for axis in axes}
            runs.append(ComparedRun(labels, seed, result, dict(run.settings), is_local(run.settings)))
        criteria = Criteria(
            metric=metric.tag,
            minimize=metric.minimize,
            percent=metric.percent,
            baseline={"method": self.baseline} if self.baseline else {},
            **self.intervals,
        )
        shows: list[Show] = [Final(), Best()]
        if metric.target is not None:
            shows.append(RoundsTo(metric.target))
        if any(fairness(run.metrics, {}) for run in self.runs["run"]):
            shows.append(Fair())
        columns = tuple(axis for axis in axes if axis != "method")
        tables = [Table(("method",), columns, show) for show in shows]
        return {table.show.name: Comparison(criteria, table, axes, runs) for table in tables}

    def renamed(self, names: Mapping[str, str]) -> Section:
        """Return the section with other names of methods, settings and metrics.

        Raises:
            UsageError: two lines would have one name.
        """
        lines = {line: with_names(line, names) for line in self.lines}
        hint = f"two methods would have one name; methods: {', '.join(lines)}"
        require(len(set(lines.values())) == len(lines), "--names", " ".join(map("=".join, names.items())), hint)
        frames = []
        for frame in (self.runs, self.rounds):
            settings = [with_names(setting, names) for setting in frame["setting"]]
            frames.append(frame.assign(line=frame["line"].map(lines), setting=settings))
        return replace(
            self,
            runs=frames[0],
            rounds=frames[1],
            lines=list(lines.values()),
            metric=replace(self.metric, called=names.get(self.metric.tag, self.metric.tag)),
            baseline=lines.get(self.baseline, ""),
            names=names,
        )


def choose_metric(
    runs: Sequence[FitResult], tag: str | None, minimize: bool, target: float | None, usual: Sequence[str] = METRICS
) -> Metric:
    """Return the metric of a report: ``tag``, or the first usual metric that a run has.

    Raises:
        UsageError: no run has the metric, or the target cannot be reached.
    """
    logged = dict.fromkeys(key for run in runs for row in run.history for key in row)
    if tag is None:
        tag = next((metric for metric in usual if metric in logged), usual[0])
    else:
        metrics = [key for key in logged if not key.startswith(("time/", "placed/", "spectrum/"))]
        near = choices(get_close_matches(tag, metrics, 3, cutoff=0.0))
        require(tag in logged, "--metric", tag, f"no run has this metric; the nearest of {len(metrics)} are: {near}")
    values = [value for run in runs for value in run.values(tag).values()]
    metric = Metric(tag, minimize or is_minimized(tag), target, in_percent(tag, values), tag)
    if target is not None:
        hint = "use the scale of the logged values, such as 0.6 for 60 %"
        require(math.isfinite(target) and not (metric.percent and target > 1), "--target", target, hint)
    return metric


def with_tag(run: FitResult, tag: str) -> FitResult:
    """Return a run whose metric has this tag; a run that logs another usual name of it gets the tag, and a note."""
    names = next((names for names in NAMES_OF_METRIC if tag in names), ())
    name = next((name for name in names if run.values(name)), tag)
    if name == tag or run.values(tag):
        return run
    renamed_rows = [{tag if key == name else key: row[key] for key in row} for row in run.history]
    history = History(renamed_rows)
    return replace(run, history=history, notes=[*run.notes, f"its {name} is shown as {tag}"])


def sections_of(
    runs: Iterable[FitResult], metric: Metric, baseline: str | None, title: str = "", **of_suite: Any
) -> Iterator[Section]:
    """Yield the sections of some runs, one for each data set.

    Args:
        runs: the runs, either all with labels of one study or all without labels.
        metric: the metric of the comparison.
        baseline: line to compare with; None for FedAvg, if it exists.
        title: beginning of the titles, such as the title of a study.
        of_suite: ``intervals`` of :class:`Section`.
    """
    by_data: dict[str, list[FitResult]] = defaultdict(list)
    for run in runs:
        recorded = str(run.environment.get("data_set", UNKNOWN))
        by_data[run.labels.get("data") or data_set(run.config, recorded)].append(run)
    preferred = "FedAvg" if baseline is None else baseline
    for name, of_data in by_data.items():
        rows = name_configs(of_data).join(pd.DataFrame([run_row(run, metric) for run in of_data]))
        lines = sorted(dict.fromkeys(rows["line"]), key=lambda line: line != preferred)
        # of several runs with one seed, the one with most progress counts
        ranks = {"stopped": 0, "failed": 0, "running": 1, "finished": 2}
        progress = rows.assign(rank=rows["state"].map(ranks)).sort_values(["rank", "rounds"], kind="stable")
        repeated = progress.index[progress.duplicated(OF_RUN, keep="last")]
        counting = rows.drop(repeated)
        numbers, places = counting["setting"].map(by_numbers), counting["line"].map(lines.index)
        order = sorted(counting.index, key=lambda at: (numbers[at], places[at], counting["seed"][at]))
        counting, repeats = counting.loc[order], list(rows["run"][repeated])
        full_title = title if name == UNKNOWN and title else ": ".join(filter(None, [title, name]))
        line = preferred if preferred in lines else ""
        yield Section(full_title, counting, rounds_frame(counting), lines, metric, line, repeats, **of_suite)


def run_row(run: FitResult, metric: Metric) -> dict[str, Any]:
    """Return a run as a row of :attr:`Section.runs`."""
    values = run.values(metric.tag)
    numbers = [value for value in values.values() if value == value]
    best = (min if metric.minimize else max)(numbers, default=math.nan)
    sent = [row.get(tag, math.nan) for row in run.history for tag in BYTES]
    return {
        **{"seed": run.seed, "run": run, "state": run.state, "rounds": run.rounds, "plan": run.plan},
        **{"last": values[max(values)] if values else math.nan, "best": best},
        **{"seconds": run.seconds or math.nan, "bytes": sum(sent) if sent else math.nan},
    }


def rounds_frame(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the metrics of all rounds of some runs; values that are not finite are empty."""
    rows = list[dict[str, Any]]()
    for *place, run in runs[[*OF_RUN, "run"]].itertuples(index=False):
        labels = dict(zip(OF_RUN, place, strict=True))
        rows += ({**labels, **row} for row in run.history)
    frame = pd.DataFrame(rows, columns=None if rows else [*OF_RUN, "round"])
    numbers = frame.drop(columns=[*OF_RUN, "round"])
    return without_empty(frame[[*OF_RUN, "round"]].join(numbers.where(numbers.abs() < INFINITE)))


def without_empty(rounds: pd.DataFrame) -> pd.DataFrame:
    """Return rounds without the metrics that none of them has."""
    return rounds.loc[:, rounds.notna().any() | rounds.columns.isin([*OF_RUN, "round"])]


def by_numbers(setting: str) -> list[tuple[float, str]]:
    """Return a key that sorts alpha=0.1 before alpha=10."""

    def key(part: str) -> tuple[float, str]:
        try:
            return float(part), ""
        except ValueError:
            return math.inf, part

    keys = []
    for pair in setting.split(", "):
        name, _, value = pair.rpartition("=")
        keys += [key(value), key(name)]
    return keys
