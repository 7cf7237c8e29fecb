"""The numbers of runs that a table may show: a class for each ``show`` of a suite."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from fl_lightning.bench.cell import Labels
from fl_lightning.bench.config_fragments import Fragment
from fl_lightning.bench.criteria import Criteria
from fl_lightning.bench.results import CellResult
from fl_lightning.bench.statistics import GAINS, POINTS, fairness, point_of, ranks
from fl_lightning.storage.metric_format import fixed

# the scores of the callback ``Scores``, in the order of its description
SCORES = (
    *("pooled", "class_balanced", "recalibrated", "clients", "worst_tenth", "training_logits", "label_mask"),
    *("label_prior", "local_steps", "best", "mean_of_last"),
)
# the columns of a table of fairness, see ``statistics.fairness``
FAIR_COLUMNS = ("accuracy", "worst_tenth", "spread", "variance", "noise", "gain", "gain_worst", "helped")
Published = tuple[float, float | None]


@dataclass(eq=False)
class ComparedRun:
    """A run in a comparison, with its number in a table, which the table sets.

    Args:
        labels: label on each axis.
        seed: its seed.
        result: its result.
        config: its config, nested or by dotted key; empty if it is unknown.
        is_local: whether its method is ``Local`` alone.
        state: ``done``, ``nan``, ``failed``, ``running`` or ``waiting``.
        value: its number; None without a number.
        partner: the baseline's run of the same setting and seed; None for the baseline and without such a run.
        local: the run of the method ``Local`` of the same setting and seed; None without one.
        pair: its number and the partner's; None if one is missing, or if they must not be compared.
        missed: whether it missed the target.
        unequal: whether its partition or machine differs, so that it is not compared.
        notes: remarks for footnotes.
    """

    labels: Labels
    seed: int
    result: CellResult
    config: Fragment
    is_local: bool = False
    state: str = ""
    value: float | None = None
    partner: ComparedRun | None = None
    local: ComparedRun | None = None
    pair: tuple[float, float] | None = None
    missed: bool = False
    unequal: bool = False
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Show:
    """The number of a run that a table shows. The fields of a subclass are its keys in the tables of a suite."""

    # its name under the key ``show``
    name: ClassVar[str]
    # whether the numbers are of the metric, and in its unit
    is_of_metric: ClassVar[bool] = False
    # axis of further columns, which the table adds to those of the suite
    added_axis: ClassVar[str] = ""
    # the callback that logs the numbers
    callback: ClassVar[str] = ""
    # whether runs of different machines are not compared
    same_machine: ClassVar[bool] = False
    # number of decimals; None for those of the metric, as papers print them
    num_decimals: ClassVar[int | None] = None
    # whether smaller numbers are better; None for what holds for the metric
    minimize: ClassVar[bool | None] = None

    def title(self, criteria: Criteria) -> str:
        """Return the name of the numbers."""
        raise NotImplementedError

    def value(self, number: ComparedRun, criteria: Criteria) -> float | None:
        """Return the number of a finished run with values of the metric; adds notes, such as why it is None."""
        values = self.shown_values(number, criteria)
        return criteria.unit * math.fsum(values) / len(values) if values else None

    def shown_values(self, number: ComparedRun, criteria: Criteria) -> list[float]:
        """Return the values of the metric whose mean is shown."""
        raise NotImplementedError

    def compare_rows(self, numbers: Sequence[ComparedRun], columns: Sequence[str], criteria: Criteria) -> None:
        """Change numbers by the other numbers of the same column."""

    def compare_pairs(self, numbers: Sequence[ComparedRun], criteria: Criteria) -> None:
        """Change numbers by the baseline's."""

    def decimals(self, criteria: Criteria) -> int:
        """Return the number of decimals."""
        of_metric = 2 if criteria.percent else 4
        return of_metric if self.num_decimals is None else self.num_decimals

    def text(self, value: float, criteria: Criteria) -> str:
        """Return a number as text."""
        return fixed(value, self.decimals(criteria))

    def lower_is_better(self, criteria: Criteria) -> bool:
        """Return whether smaller numbers are better."""
        return criteria.minimize if self.minimize is None else self.minimize

    def best(self, labels: Labels, criteria: Criteria) -> Callable[[Iterable[float]], float] | None:
        """Return the function that chooses the best number of the column with these labels; None for none."""
        return min if self.lower_is_better(criteria) else max

    def published(self, number: Published, of_baseline: Published | None, criteria: Criteria) -> Published | None:
        """Return a published number as the table shows it."""
        return number

    def added_labels(self, runs: Iterable[ComparedRun]) -> tuple[str, ...]:
        """Return the labels on the added axis."""
        return ()


def in_order(values: Mapping[int, float]) -> list[float]:
    """Return values by round in the order of the rounds."""
    return [values[round_] for round_ in sorted(values)]


@dataclass(frozen=True)
class Final(Show):
    """The value of the last round."""

    name = "final"
    is_of_metric = True

    def title(self, criteria: Criteria) -> str:
        return f"final {criteria.metric_name}"

    def shown_values(self, number: ComparedRun, criteria: Criteria) -> list[float]:
        return in_order(number.result.values)[-1:]


@dataclass(frozen=True)
class Best(Show):
    """The best value of all rounds."""

    name = "best"
    is_of_metric = True

    def title(self, criteria: Criteria) -> str:
        return f"best {criteria.metric_name} of all rounds"

    def shown_values(self, number: ComparedRun, criteria: Criteria) -> list[float]:
        return [(min if criteria.minimize else max)(in_order(number.result.values))]


@dataclass(frozen=True)
class Last(Show):
    """The mean of the last ``k`` values."""

    name = "last"
    is_of_metric = True
    k: int = 5

    def title(self, criteria: Criteria) -> str:
        return f"mean {criteria.metric_name} of the last {self.k} rounds"

    def shown_values(self, number: ComparedRun, criteria: Criteria) -> list[float]:
        return in_order(number.result.values)[-self.k :]


@dataclass(frozen=True)
class Mean(Show):
    """The mean from the first to the last of ``rounds``, counted from 0."""

    name = "mean"
    is_of_metric = True
    rounds: tuple[int, int] = (0, 0)

    def title(self, criteria: Criteria) -> str:
        return f"mean {criteria.metric_name} of rounds {' to '.join(map(str, self.rounds))}"

    def shown_values(self, number: ComparedRun, criteria: Criteria) -> list[float]:
        (start, end), values = self.rounds, number.result.values
        between = [value for round_, value in values.items() if start <= round_ <= end]
        if between and max(values) >= end:
            return between
        number.notes.append(f"lacks values of rounds {start} to {end}")
        return []


@dataclass(frozen=True)
class RoundsTo(Show):
    """The number of rounds after which the metric has reached ``target``, in the metric's own unit."""

    name = "rounds_to"
    num_decimals = 1
    minimize = True
    target: float = math.nan

    def title(self, criteria: Criteria) -> str:
        target = f"{100 * self.target:g} %" if criteria.percent else f"{self.target:g}"
        return f"rounds until {criteria.metric} is {'at most' if criteria.minimize else 'at least'} {target}"

    def value(self, number: ComparedRun, criteria: Criteria) -> float | None:
        values, sign = number.result.values, -1 if criteria.minimize else 1
        target = sign * self.target
        reached = [round_ for round_, value in values.items() if sign * value >= target]
        if reached:
            return float(min(reached) + 1)
        number.missed = True
        number.notes.append(f"missed the target in {max(values) + 1} rounds")
        return float(max(values) + 1)

    def text(self, value: float, criteria: Criteria) -> str:
        return super().text(value, criteria).removesuffix(".0")


@dataclass(frozen=True)
class Seconds(Show):
    """The seconds of a round, divided by the baseline's."""

    name = "seconds"
    same_machine = True
    num_decimals = 2
    minimize = True

    def title(self, criteria: Criteria) -> str:
        ratio = f", divided by the seconds of {criteria.baseline_name}" if criteria.baseline else ""
        return f"seconds a round{ratio}"

    def value(self, number: ComparedRun, criteria: Criteria) -> float | None:
        if not number.result.seconds:
            number.notes.append("too few rounds to measure seconds")
        return number.result.seconds or None

    def compare_pairs(self, numbers: Sequence[ComparedRun], criteria: Criteria) -> None:
        for number in numbers if criteria.baseline else ():
            if number.pair:
                number.pair = (number.pair[0] / number.pair[1], 1.0)
            if criteria.is_baseline(number.labels):
                number.value = None if number.value is None else 1.0
            else:
                number.value = number.pair[0] if number.pair else None

    def published(self, number: Published, of_baseline: Published | None, criteria: Criteria) -> Published | None:
        if not criteria.baseline:
            return number
        if of_baseline is None:
            return None
        mean, deviation = number
        return mean / of_baseline[0], None if deviation is None else deviation / of_baseline[0]


@dataclass(frozen=True)
class Rank(Final):
    """The rank by the final value among the rows of a column, where 1 is best."""

    name = "rank"
    is_of_metric = False
    num_decimals = 2
    minimize = True

    def title(self, criteria: Criteria) -> str:
        return f"rank by final {criteria.metric} among the rows of a column"

    def compare_rows(self, numbers: Sequence[ComparedRun], columns: Sequence[str], criteria: Criteria) -> None:
        groups: dict[tuple[object, ...], list[ComparedRun]] = defaultdict(list)
        for number in numbers:
            labels = tuple(number.labels[axis] for axis in columns)
            groups[labels, number.seed].append(number)
        for group in groups.values():
            ranked = [(number, number.value) for number in group if number.value is not None]
            pending = any(number.state in ("running", "waiting") for number in group)
            differ = not pending and len({number.result.plan for number, _ in ranked}) > 1
            places = ranks([value for _, value in ranked], criteria.minimize)
            for (number, _), place in zip(ranked, places, strict=True):
                number.value = None if pending or differ else place
                number.unequal = differ
                if differ:
                    number.notes.append("not ranked: the hashes of the partitions of this column differ")


@dataclass(frozen=True)
class ByScore(Show):
    """The final accuracy by each of some ``scores``; by default all that are logged."""

    name = "scores"
    added_axis = "score"
    callback = "Scores"
    minimize = False
    scores: tuple[str, ...] = ()

    def title(self, criteria: Criteria) -> str:
        return f"final accuracy by score{' in %' if criteria.percent else ''}"

    def value(self, number: ComparedRun, criteria: Criteria) -> float | None:
        value = number.result.metrics.get(f"scores/{number.labels[self.added_axis]}")
        if value is None:
            number.notes.append("does not log this score; add the callback Scores")
            return None
        return criteria.unit * value

    def added_labels(self, runs: Iterable[ComparedRun]) -> tuple[str, ...]:
        logged = {tag for run in runs for tag in run.result.metrics}
        logged_scores = tuple(score for score in SCORES if f"scores/{score}" in logged)
        return self.scores or logged_scores or SCORES[:1]


@dataclass(frozen=True)
class Fair(Show):
    """How even the clients' accuracies are, see :func:`fl_lightning.bench.statistics.fairness`."""

    name = "fair"
    added_axis = "fair"
    callback = "PersonalAccuracy"
    num_decimals = 2
    minimize = False

    def title(self, criteria: Criteria) -> str:
        return "accuracies of the clients on their own test data, in %, variance and noise in squared %"

    def value(self, number: ComparedRun, criteria: Criteria) -> float | None:
        result, local, column = number.result, number.local, number.labels[self.added_axis]
        comparable = local is not None and local.state == "done" and local.result.plan == result.plan != ""
        of_local = local.result.metrics if local is not None and comparable else {}
        value, point = fairness(result.metrics, of_local).get(column), POINTS[point_of(result.metrics)]
        if value is not None and point:
            number.notes.append(point)
        if column in GAINS and not comparable:
            number.notes.append("no finished run of Local with this seed and partition")
        elif value is None:
            number.notes.append("does not log this; add the callback PersonalAccuracy")
        in_squares = column in ("variance", "noise")
        return None if value is None else (1e4 if in_squares else 100.0) * value

    def best(self, labels: Labels, criteria: Criteria) -> Callable[[Iterable[float]], float] | None:
        column = labels[self.added_axis]
        if column == "noise":  # a property of the test sets
            return None
        return min if column in ("spread", "variance") else max

    def added_labels(self, runs: Iterable[ComparedRun]) -> tuple[str, ...]:
        with_local = any(run.is_local for run in runs)
        return tuple(column for column in FAIR_COLUMNS if with_local or column not in GAINS)


SHOWS: dict[str, type[Show]] = {
    show.name: show for show in (Final, Best, Last, Mean, RoundsTo, Seconds, Rank, ByScore, Fair)
}
# the shows whose numbers are of the metric
OF_METRIC = tuple(name for name, show in SHOWS.items() if show.is_of_metric)
