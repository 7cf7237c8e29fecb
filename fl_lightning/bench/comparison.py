"""The comparison of a table: our numbers, published numbers and paired differences by row and column."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fl_lightning.bench.config_fragments import is_of_method, leaves, look_up, merged_config, of_result
from fl_lightning.bench.results import CellResult, waiting
from fl_lightning.bench.statistics import (
    GAINS,
    POINTS,
    Difference,
    SeedSummary,
    bounded,
    decision,
    fairness,
    holm,
    p_value,
    paired_difference,
    point_of,
    ranks,
    seeds_to_decide,
    summarize,
    verdict,
)
from fl_lightning.bench.suite import (
    ADDED_AXES,
    FAIR,
    FAIRNESS,
    OF_METRIC,
    SCORE,
    SCORES,
    Cell,
    Labels,
    Suite,
    Table,
    first_seeds,
)
from fl_lightning.utilities.errors import printable, truncate

NOT_COMPARED = "not compared"
# verdicts on the sign of a difference
OF_SIGN = ("reversed", "reproduced", "same sign")
# larger values count as diverged, since their squares overflow
DIVERGED_BEYOND = 1e150
# values of fairness in squared percent, and values to minimise
SQUARED, UNEVEN = ("variance", "noise"), ("spread", "variance")
# labels of a row, or of a column
Part = tuple[str, ...]
Place = tuple[Part, Part]
Published = tuple[float, float | None]


@dataclass(eq=False)
class CellNumber:
    """The number of one cell.

    Args:
        cell: the cell.
        result: its result.
        state: ``done``, ``nan``, ``failed``, ``running`` or ``waiting``.
        value: its number; None without a number.
        partner: the baseline's cell of the same setting and seed; None for the baseline and without such a cell.
        local: the cell of the method ``Local`` of the same setting and seed; None without one.
        pair: its number and the partner's; None if one is missing, or if they must not be compared.
        missed: whether it missed the target.
        unequal: whether its partition or machine differs, so that it is not compared.
        notes: remarks for footnotes.
    """

    cell: Cell
    result: CellResult
    state: str
    value: float | None = None
    partner: CellNumber | None = None
    local: CellNumber | None = None
    pair: tuple[float, float] | None = None
    missed: bool = False
    unequal: bool = False
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class TableEntry:
    """One row and column of a table.

    Args:
        labels: label on each axis.
        states: number of its cells by state: ``done``, ``nan``, ``failed``, ``running``, ``waiting``.
        ours: our numbers.
        bound: whether our mean is a lower bound, since a run missed the target.
        difference: our paired difference to the baseline; None for the baseline.
        published: published number and its deviation, if known.
        published_difference: published difference to the baseline.
        decided: whether its difference to the baseline needs no more seeds.
        verdict: verdict on the published difference, or ``not compared``. Without published numbers, the decision on
            the difference to the baseline in a suite with ``decide``; otherwise empty.
        seeds: estimated number of seeds that decide it; None if it is decided, or without an estimate.
        notes: remarks for footnotes.
        scale: scale of the runs, a share of the suite's work.
        best: whether it has the best number of its column.
        baseline: mean of the baseline over the seeds of the pairs.
        student: difference with Student's interval in a suite with ``decide``, once all its seeds have run.
        holm: p-value of the difference, corrected for all comparisons of the table; None for a bootstrap. In a suite
            without ``decide``, a verdict on the sign needs a p-value below the error of the interval.
        student_holm: the same of ``student``.
    """

    labels: Labels
    states: Mapping[str, int]
    ours: SeedSummary | None
    bound: bool
    difference: Difference | None
    published: Published | None
    published_difference: float | None
    decided: bool
    verdict: str
    seeds: int | None
    notes: tuple[str, ...]
    scale: float
    best: bool = False
    baseline: float | None = None
    student: Difference | None = None
    holm: float | None = None
    student_holm: float | None = None

    @property
    def cells(self) -> int:
        """Number of cells, one for each seed."""
        return sum(self.states.values())


class Comparison:
    """A table's numbers and entries.

    Args:
        suite: the suite.
        table: one of its tables.
        cells: cells to show.
        results: results by the digest of the cell; a cell without one waits.

    Attributes:
        numbers: the cells' numbers.
        rows: labels of the rows with a cell, in the order of the suite.
        columns: labels of the columns with a cell, in the order of the suite.
        entries: entries by the labels of row and column.
    """

    def __init__(self, suite: Suite, table: Table, cells: Sequence[Cell], results: Mapping[str, CellResult]) -> None:
        if table.show in ADDED_AXES:
            suite, table, cells = with_added_axis(suite, table, cells, results)
        self.suite, self.table = suite, table
        self.settings = unequal_settings(suite, cells)
        by_place: dict[tuple[Part, int], CellNumber] = {}
        for cell in cells:
            result = results.get(cell.digest, waiting(cell))
            by_place[tuple(cell.labels.values()), cell.seed] = CellNumber(cell, result, result.state)
        self.numbers = list(by_place.values())
        local = [one for one in self.numbers if is_local(one.cell, suite)] if table.show == "fair" else []
        alone = {(without_method(one.cell.labels), one.cell.seed): one for one in local}
        for number in self.numbers:
            number.local = alone.get((without_method(number.cell.labels), number.cell.seed))
            number.value = self._value_of(number)
            partner = by_place.get((tuple({**number.cell.labels, **suite.baseline}.values()), number.cell.seed))
            number.partner = None if partner is number else partner
        if table.show == "rank":
            self._rank()
        for number in self.numbers:
            number.pair = self._pair_of(number)
        if table.show == "seconds" and suite.baseline:
            for number in self.numbers:  # ratios to the baseline
                number.pair = number.pair and (number.pair[0] / number.pair[1], 1.0)
                base = self.is_baseline(number.cell)
                number.value = (number.value and 1.0) if base else (number.pair and number.pair[0])

        parts = [
            [tuple(number.cell.labels[axis] for axis in axes) for number in self.numbers]
            for axes in (table.rows, table.columns)
        ]
        self.rows, self.columns = (
            [part for part in itertools.product(*(suite.axes[axis] for axis in axes)) if part in {*some}]
            for axes, some in zip((table.rows, table.columns), parts, strict=True)
        )
        alike: dict[Place, list[CellNumber]] = defaultdict(list)
        for row, column, number in zip(*parts, self.numbers, strict=True):
            alike[row, column].append(number)
        self.entries: dict[Place, TableEntry] = {}
        for column in self.columns:
            of_column = {row: alike[row, column] for row in self.rows if (row, column) in alike}
            entries = {row: self._entry(numbers) for row, numbers in of_column.items()}
            best = self._best(entries, of_column)
            self.entries |= {(row, column): replace(entry, best=row in best) for row, entry in entries.items()}
        self._correct()

    @property
    def baseline(self) -> str:
        """The name of the baseline."""
        labels = self.suite.baseline.items()
        return ", ".join(label if axis == "method" else f"{axis}={label}" for axis, label in labels)

    def is_baseline(self, cell: Cell) -> bool:
        """Return whether a cell belongs to the baseline."""
        return bool(self.suite.baseline) and {**cell.labels, **self.suite.baseline} == cell.labels

    @property
    def decimals(self) -> int:
        """Number of decimals, as papers print them."""
        if self.table.show == "rounds_to":
            return 1
        return 2 if self.suite.percent or self.table.show in ("seconds", "rank", "fair") else 4

    @property
    def lower_is_better(self) -> bool:
        """Whether smaller numbers are better; in a table of ``fair``, that depends on the column."""
        of_metric = self.suite.minimize and self.table.show not in ADDED_AXES
        return of_metric or self.table.show in ("rounds_to", "seconds", "rank")

    def _correct(self) -> None:
        """Correct the p-values of the differences for their number, and the verdicts of a suite with fixed seeds."""
        suite = self.suite
        scale = suite.decide.prior_scale if suite.decide else 1.0
        differences = {at: entry.difference for at, entry in self.entries.items()}
        p_values = {} if suite.interval == "bootstrap" else corrected(differences, suite.interval, scale)
        of_students = corrected({at: entry.student for at, entry in self.entries.items()}, "t")
        for at, entry in self.entries.items():
            made = replace(entry, holm=p_values.get(at), student_holm=of_students.get(at))
            lost = entry.verdict in OF_SIGN and self.is_undecided_by_holm(made)
            self.entries[at] = replace(made, verdict="undecided") if lost else made

    def is_undecided_by_holm(self, entry: TableEntry) -> bool:
        """Return whether the correction leaves the sign of a difference open, in a suite with fixed seeds."""
        p = None if self.suite.decide else entry.holm
        return p is not None and p >= 1 - self.suite.confidence

    def _value_of(self, number: CellNumber) -> float | None:
        """Return the number of a cell; None for a run that failed or diverged."""
        result, show, minimize = number.result, self.table.show, self.suite.minimize
        if result.state == "failed":
            number.notes.append(f"failed: {printable(result.reason) or 'unknown reason'}")
        if result.state != "done":
            return None
        number.notes += [result.note] if result.note else []
        lost = [round_ for round_, value in result.values.items() if not abs(value) < DIVERGED_BEYOND]
        if lost:
            number.state = "nan"
            number.notes.append(f"{self.suite.metric} was {result.values[min(lost)]} in round {min(lost)}")
            return None
        if not result.values:
            number.notes.append(f"no value of {self.suite.metric}")
            return None
        if show == "seconds":
            number.notes += [] if result.seconds else ["too few rounds to measure seconds"]
            return result.seconds or None
        unit, best = 100.0 if self.suite.percent else 1.0, min if minimize else max
        if show == "scores":
            value = result.metrics.get(f"scores/{number.cell.labels[SCORE]}")
            number.notes += ["does not log this score; add the callback Scores"] if value is None else []
            return None if value is None else unit * value
        if show == "fair":
            name, local = number.cell.labels[FAIRNESS], number.local
            comparable = local is not None and local.state == "done" and local.result.plan == result.plan != ""
            of_local = local.result.metrics if local is not None and comparable else {}
            value, point = fairness(result.metrics, of_local).get(name), POINTS[point_of(result.metrics)]
            number.notes += [point] if point and value is not None else []
            if name in GAINS and not comparable:
                number.notes.append("no finished run of Local with this seed and partition")
            elif value is None:
                number.notes.append("does not log this; add the callback PersonalAccuracy")
            return None if value is None else (1e4 if name in SQUARED else 100.0) * value
        if show == "rounds_to":
            target = self.table.target
            assert target is not None  # a suite without a target is refused
            reached = [round_ for round_, value in result.values.items() if best(value, target) == value]
            if not reached:
                # all its rounds count
                number.missed = True
                number.notes.append(f"missed the target in {max(result.values) + 1} rounds")
            return float(min(reached or [max(result.values)]) + 1)
        if show == "mean":
            first, last = self.table.rounds
            values = [value for round_, value in result.values.items() if first <= round_ <= last]
            if not values or max(result.values) < last:
                number.notes.append(f"lacks values of rounds {first} to {last}")
                return None
            return unit * math.fsum(values) / len(values)
        values = [result.values[round_] for round_ in sorted(result.values)]
        if show == "best":
            return unit * best(values)
        values = values[-self.table.k :] if show == "last" else values[-1:]
        return unit * math.fsum(values) / len(values)

    def _pair_of(self, number: CellNumber) -> tuple[float, float] | None:
        """Return the numbers of a cell and its partner if they share the partition and, for seconds, the machine."""
        partner = number.partner
        if partner is None or number.value is None or partner.value is None or (number.missed and partner.missed):
            return None
        ours, theirs = number.result, partner.result
        if ours.plan != theirs.plan:
            why = f"the hashes of the partitions differ ({ours.plan[:8] or 'none'}, {theirs.plan[:8] or 'none'})"
        elif not ours.plan:
            why = "the hash of the partition is unknown"
        elif self.table.show == "seconds" and ours.machine != theirs.machine:
            why = "they ran on different machines"
        else:
            return number.value, partner.value
        number.notes.append(f"not compared with {self.baseline}: {why}")
        number.unequal = True
        return None

    def _rank(self) -> None:
        """Replace numbers by ranks among the rows of each column and seed, once all of them exist."""
        groups: dict[tuple[Part, int], list[CellNumber]] = defaultdict(list)
        for number in self.numbers:
            groups[tuple(number.cell.labels[axis] for axis in self.table.columns), number.cell.seed].append(number)
        for group in groups.values():
            ranked = [(number, number.value) for number in group if number.value is not None]
            pending = any(number.state in ("running", "waiting") for number in group)
            differ = not pending and len({number.result.plan for number, _ in ranked}) > 1
            places = ranks([value for _, value in ranked], self.suite.minimize)
            for (number, _), place in zip(ranked, places, strict=True):
                number.value = None if pending or differ else place
                number.unequal = differ
                number.notes += ["not ranked: the hashes of the partitions of this column differ"] * differ

    def _entry(self, numbers: Sequence[CellNumber]) -> TableEntry:
        """Return the entry of cells that differ only in the seed."""
        suite, decide, labels = self.suite, self.suite.decide, numbers[0].cell.labels
        bounds = {">" if one.missed else "<" * bool(one.partner and one.partner.missed) for one in numbers if one.pair}
        if decide:
            # in the order of the seeds, up to the first seed without a pair: skipping slow or failed runs would make
            # the order of the looks depend on the results
            order = {seed: at for at, seed in enumerate(first_seeds(suite.seeds, decide.max_seeds))}
            numbers = sorted(numbers, key=lambda one: (order.get(one.cell.seed, len(order)), one.cell.seed))
            pairs = [one.pair for one in itertools.takewhile(lambda one: one.pair, numbers) if one.pair]
        else:
            pairs = [one.pair for one in numbers if one.pair]
        how = (suite.interval, suite.confidence, decide.prior_scale if decide else 1.0)
        ours = bounded(paired_difference(pairs, *how), bounds)
        spent = decide is not None and len(pairs) >= decide.max_seeds
        student = bounded(paired_difference(pairs, "t", suite.confidence), bounds) if spent else None
        margin = decide.margin if decide and self.table.show in OF_METRIC else None
        published, base, apart = self._published(labels), self._published({**labels, **suite.baseline}), None
        compared = not self.is_baseline(numbers[0].cell)
        if published and base and suite.baseline and compared:
            apart = round(published[0] - base[0], 9)  # papers print fewer decimals
        word: str = verdict(ours, apart, margin) or ""
        if apart is None and margin is not None and compared:
            word = decision(ours, margin)
        if word and not any(one.pair for one in numbers) and any(one.unequal for one in numbers):
            word = NOT_COMPARED
        undecided = decision(ours, margin) == "undecided"
        seeds: dict[str, list[str]] = defaultdict(list)
        for number in numbers:
            for note in number.notes:
                seeds[note].append(str(number.cell.seed))
        notes = [f"seed{'s' * (len(of) > 1)} {', '.join(of)}: {note}" for note, of in seeds.items()]
        notes += [self.settings[key]] if (key := tuple(labels.values())) in self.settings else []
        return TableEntry(
            labels,
            states=Counter(one.state for one in numbers),
            ours=summarize([one.value for one in numbers if one.value is not None]),
            bound=any(one.missed for one in numbers),
            difference=ours,
            published=published,
            published_difference=apart,
            decided=not undecided,
            verdict=word,
            seeds=seeds_to_decide(ours, *how, margin) if undecided else None,
            notes=tuple(notes),
            scale=next((one.result.scale for one in numbers if one.result.scale != 1), 1.0),
            baseline=math.fsum(theirs for _, theirs in pairs) / len(pairs) if pairs else None,
            student=student,
        )

    def _published(self, labels: Labels) -> Published | None:
        """Return the published number of labels; in a table of seconds, its ratio to the baseline's number."""
        axes = (*self.table.rows, *self.table.columns)
        own = self.table.published.get(tuple(labels[axis] for axis in axes))
        if own is None or self.table.show != "seconds" or not self.suite.baseline:
            return own
        base = self.table.published.get(tuple({**labels, **self.suite.baseline}[axis] for axis in axes))
        return None if base is None else (own[0] / base[0], None if own[1] is None else own[1] / base[0])

    def _best(self, entries: Mapping[Part, TableEntry], numbers: Mapping[Part, Sequence[CellNumber]]) -> set[Part]:
        """Return the rows whose shown number is the best of a column.

        The result is empty for a single number, and where partitions differ or rows have different seeds by ``decide``.
        """
        valued = [number for row in numbers.values() for number in row if number.value is not None]
        plans = {(number.cell.seed, number.result.plan) for number in valued}
        seeds = {frozenset(number.cell.seed for number in row if number.value is not None) for row in numbers.values()}
        unequal = self.suite.decide is not None and len(seeds - {frozenset()}) > 1
        alone = sum(entry.ours is not None for entry in entries.values()) < 2
        if alone or unequal or len(plans) > len({seed for seed, _ in plans}):
            return set()
        counted = {row: entry.ours for row, entry in entries.items() if entry.ours and not entry.bound}
        means = {row: round(ours.mean, self.decimals) for row, ours in counted.items()}
        fair = next((entry.labels[FAIRNESS] for entry in entries.values() if self.table.show == "fair"), "")
        if fair == "noise":  # a property of the test sets
            return set()
        best = (min if self.lower_is_better or fair in UNEVEN else max)(means.values(), default=None)
        return {row for row, mean in means.items() if mean == best}


def corrected(
    differences: Mapping[Place, Difference | None], kind: str, prior_scale: float = 1.0
) -> dict[Place, float]:
    """Return the p-value of each difference by Holm, for all differences together."""
    compared = {at: difference for at, difference in differences.items() if difference}
    p_values = [p_value(difference, kind, prior_scale) for difference in compared.values()]
    return dict(zip(compared, holm(p_values), strict=True))


def with_added_axis(
    suite: Suite, table: Table, cells: Sequence[Cell], results: Mapping[str, CellResult]
) -> tuple[Suite, Table, list[Cell]]:
    """Return suite, table and cells with the scores, or the values of fairness, as an additional axis.

    Args:
        suite: the suite.
        table: a table that shows ``scores``, whose published numbers apply to each score, or ``fair``.
        cells: cells to show; each becomes one cell for each label of the axis.
        results: results by the digest of the cell, which contain the scores.
    """
    logged = {tag for cell in cells if cell.digest in results for tag in results[cell.digest].metrics}
    axis, labels = (
        ADDED_AXES[table.show],
        tuple(name for name in FAIR if name not in GAINS or any(is_local(cell, suite) for cell in cells)),
    )
    if axis == SCORE:
        labels = table.scores or tuple(score for score in SCORES if f"scores/{score}" in logged) or SCORES[:1]
    published = {(*place, label): number for place, number in table.published.items() for label in labels}
    wider = replace(table, columns=(*table.columns, axis), published=published)
    made = [replace(cell, labels={**cell.labels, axis: label}) for cell in cells for label in labels]
    axes: Any = {**suite.axes, axis: dict.fromkeys(labels, ())}
    return replace(suite, axes=axes), wider, made


def is_local(cell: Cell, suite: Suite) -> bool:
    """Return whether the method of a cell is ``Local`` alone.

    A cell of a database has no config, so that the suite's counts; a report has configs by dotted key.
    """
    own = any(cell.fragments)
    config = cell.config if own else merged_config(suite.axes.get("method", {}).get(cell.labels.get("method", ""), ()))
    nested = [look_up(method, "class_path", "") for method in config.get("method") or ()]
    names = nested or [key for key in config if re.fullmatch(r"method\.\w+", key)]
    return [str(name).rpartition(".")[2] for name in names] == ["Local"]


def without_method(labels: Labels) -> Part:
    """Return the labels on all axes but ``method``."""
    return tuple(label for axis, label in labels.items() if axis != "method")


def unequal_settings(suite: Suite, cells: Sequence[Cell]) -> dict[Part, str]:
    """Return a text about the keys outside ``method`` in which rows of a table differ, by labels.

    A row is compared with the baseline's method, or the first method, in the same setting. A key that the file of a
    method sets in addition to the method, such as a learning rate, is part of the comparison.
    """
    methods = suite.axes.get("method", ())
    reference = suite.baseline.get("method", next(iter(methods), ""))
    # a cell that failed before its run began has no config in a report
    configs = {tuple(cell.labels.values()): cell for cell in reversed(cells) if methods and any(cell.fragments)}
    made = {}
    for labels, cell in configs.items():
        base = configs.get(tuple({**cell.labels, "method": reference}.values()))
        if base is None or base is cell:
            continue
        without_seed = [{**config, "seed_everything": None} for config in (cell.config, base.config)]
        ours, theirs = (dict(leaves(of_result(config))) for config in without_seed)
        keys = [key for key in {**theirs, **ours} if ours.get(key) != theirs.get(key) and not is_of_method(key)]
        both = [(key, *(truncate(config.get(key, "not set")) for config in (ours, theirs))) for key in keys]
        texts = [f"{key} {own} instead of {other}" for key, own, other in both]
        if texts:
            made[labels] = printable(f"not the settings of {reference}: {', '.join(texts)}")
    return made
