"""The comparison of a table: our numbers, published numbers and paired differences by row and column."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fl_lightning.bench.cell import Cell, Labels
from fl_lightning.bench.config_fragments import is_of_method, leaves, look_up, merged_config, of_result
from fl_lightning.bench.criteria import Criteria
from fl_lightning.bench.results import CellResult, waiting
from fl_lightning.bench.shows import ComparedRun, Published
from fl_lightning.bench.statistics import (
    Difference,
    SeedSummary,
    bounded,
    decision,
    holm,
    p_value,
    paired_difference,
    seeds_to_decide,
    summarize,
    verdict,
)
from fl_lightning.bench.suite import Suite, Table, first_seeds
from fl_lightning.utilities.errors import printable, truncate

NOT_COMPARED = "not compared"
# verdicts on the sign of a difference
OF_SIGN = ("reversed", "reproduced", "same sign")
# larger values count as diverged, since their squares overflow
DIVERGED_BEYOND = 1e150
# labels of a row, or of a column
Part = tuple[str, ...]
Place = tuple[Part, Part]
# labels on each axis, in the order of the tables
Axes = Mapping[str, Iterable[str]]


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
        holm: p-value of the difference, corrected for all comparisons of the table. In a suite without ``decide``, a
            verdict on the sign needs a p-value below the error of the interval.
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
        criteria: how the runs are compared.
        table: the table.
        axes: labels on each axis, in the order of the table.
        runs: the runs; of several with the same labels and seed, the last one counts.

    Attributes:
        numbers: the runs' numbers.
        rows: labels of the rows with a run, in the order of the axes.
        columns: labels of the columns with a run, in the order of the axes.
        entries: entries by the labels of row and column.
    """

    def __init__(self, criteria: Criteria, table: Table, axes: Axes, runs: Sequence[ComparedRun]) -> None:
        show = table.show
        if show.added_axis:
            table, axes, runs = with_added_axis(table, axes, runs)
        self.criteria, self.table, self.axes = criteria, table, axes
        self.settings = unequal_settings(criteria, axes, runs)
        by_place: dict[tuple[Part, int], ComparedRun] = {}
        for run in runs:
            # other tables have other numbers
            by_place[tuple(run.labels.values()), run.seed] = replace(run, state=run.result.state, notes=[])
        self.numbers = list(by_place.values())
        local_runs = [run for run in self.numbers if run.is_local]
        of_local = {(without_method(run.labels), run.seed): run for run in local_runs}
        for number in self.numbers:
            labels, seed = number.labels, number.seed
            number.local = of_local.get((without_method(labels), seed))
            number.value = self._value_of(number)
            partner = by_place.get((tuple({**labels, **criteria.baseline}.values()), seed))
            number.partner = None if partner is number else partner
        show.compare_rows(self.numbers, table.columns, criteria)
        for number in self.numbers:
            number.pair = self._pair_of(number)
        show.compare_pairs(self.numbers, criteria)

        places: dict[Place, list[ComparedRun]] = defaultdict(list)
        for number in self.numbers:
            places[self._part(number, table.rows), self._part(number, table.columns)].append(number)
        self.rows = self._in_order(table.rows, {row for row, _ in places})
        self.columns = self._in_order(table.columns, {column for _, column in places})
        self.entries: dict[Place, TableEntry] = {}
        for column in self.columns:
            of_column = {row: places[row, column] for row in self.rows if (row, column) in places}
            entries = {row: self._entry(numbers) for row, numbers in of_column.items()}
            best = self._best(entries, of_column)
            for row, entry in entries.items():
                self.entries[row, column] = replace(entry, best=row in best)
        self._correct()

    @property
    def title(self) -> str:
        """The name of the numbers."""
        return self.table.show.title(self.criteria)

    @staticmethod
    def _part(number: ComparedRun, axes: Sequence[str]) -> Part:
        """Return the labels of a number on some axes."""
        return tuple(number.labels[axis] for axis in axes)

    def _in_order(self, axes: Sequence[str], parts: set[Part]) -> list[Part]:
        """Return labels on some axes in the order of the axes."""
        combinations = itertools.product(*(self.axes[axis] for axis in axes))
        return [part for part in combinations if part in parts]

    def _correct(self) -> None:
        """Correct the p-values of the differences for their number, and the verdicts of a suite with fixed seeds."""
        criteria, differences, of_student = self.criteria, dict[Place, Difference](), dict[Place, Difference]()
        for place, entry in self.entries.items():
            if entry.difference:
                differences[place] = entry.difference
            if entry.student:
                of_student[place] = entry.student
        scale = criteria.decide.prior_scale if criteria.decide else 1.0
        by_place = holm_by_place(differences, criteria.interval, scale)
        by_student = holm_by_place(of_student, "t")
        for place, entry in self.entries.items():
            corrected = replace(entry, holm=by_place.get(place), student_holm=by_student.get(place))
            if entry.verdict in OF_SIGN and self.is_undecided_by_holm(corrected):
                corrected = replace(corrected, verdict="undecided")
            self.entries[place] = corrected

    def is_undecided_by_holm(self, entry: TableEntry) -> bool:
        """Return whether the correction leaves the sign of a difference open, in a suite with fixed seeds."""
        p = None if self.criteria.decide else entry.holm
        return p is not None and p >= 1 - self.criteria.confidence

    def _value_of(self, number: ComparedRun) -> float | None:
        """Return the number of a run; None for a run that failed or diverged."""
        result, metric = number.result, self.criteria.metric
        if result.state == "failed":
            number.notes.append(f"failed: {printable(result.reason) or 'unknown reason'}")
        if result.state != "done":
            return None
        if result.note:
            number.notes.append(result.note)
        values = result.values.items()
        diverged = [round_ for round_, value in values if not abs(value) < DIVERGED_BEYOND]
        if diverged:
            number.state = "nan"
            number.notes.append(f"{metric} was {result.values[min(diverged)]} in round {min(diverged)}")
            return None
        if not result.values:
            number.notes.append(f"no value of {metric}")
            return None
        return self.table.show.value(number, self.criteria)

    def _pair_of(self, number: ComparedRun) -> tuple[float, float] | None:
        """Return the numbers of a run and its partner if they share the partition and, for seconds, the machine."""
        partner = number.partner
        if partner is None or number.value is None or partner.value is None or (number.missed and partner.missed):
            return None
        result, of_partner = number.result, partner.result
        if result.plan != of_partner.plan:
            hashes = f"{result.plan[:8] or 'none'}, {of_partner.plan[:8] or 'none'}"
            why = f"the hashes of the partitions differ ({hashes})"
        elif not result.plan:
            why = "the hash of the partition is unknown"
        elif self.table.show.same_machine and result.machine != of_partner.machine:
            why = "they ran on different machines"
        else:
            return number.value, partner.value
        number.notes.append(f"not compared with {self.criteria.baseline_name}: {why}")
        number.unequal = True
        return None

    def _entry(self, numbers: Sequence[ComparedRun]) -> TableEntry:
        """Return the entry of runs that differ only in the seed."""
        criteria, decide, labels = self.criteria, self.criteria.decide, numbers[0].labels
        if decide:
            # in the order of the seeds, up to the first seed without a pair: skipping slow or failed runs would make
            # the order of the looks depend on the results
            seeds = first_seeds(criteria.seeds, decide.max_seeds)
            order = {seed: index for index, seed in enumerate(seeds)}
            numbers = sorted(numbers, key=lambda number: (order.get(number.seed, len(order)), number.seed))
            pairs = list(itertools.takewhile(bool, (number.pair for number in numbers)))
        else:
            pairs = [number.pair for number in numbers]
        compared = [pair for pair in pairs if pair]
        of_pairs = [number for _, number in compared]
        bounds = [bound_of(number) for number in numbers if number.pair]
        how = (criteria.interval, criteria.confidence, decide.prior_scale if decide else 1.0)
        difference = bounded(paired_difference(compared, *how), bounds)
        student = None
        if decide and len(compared) >= decide.max_seeds:
            student = bounded(paired_difference(compared, "t", criteria.confidence), bounds)
        margin = decide.margin if decide and self.table.show.is_of_metric else None
        published, published_difference = self._published(labels), None
        of_baseline = self._published({**labels, **criteria.baseline})
        is_compared = not criteria.is_baseline(labels)
        if published and of_baseline and criteria.baseline and is_compared:
            published_difference = round(published[0] - of_baseline[0], 9)  # papers print fewer decimals
        word: str = verdict(difference, published_difference, margin) or ""
        if published_difference is None and margin is not None and is_compared:
            word = decision(difference, margin)
        if word and not compared and any(number.unequal for number in numbers):
            word = NOT_COMPARED
        undecided = decision(difference, margin) == "undecided"
        notes = notes_by_seed(numbers)
        if settings := self.settings.get(tuple(labels.values())):
            notes.append(settings)
        scales = [number.result.scale for number in numbers if number.result.scale != 1]
        return TableEntry(
            labels,
            states=Counter(number.state for number in numbers),
            ours=summarize([number.value for number in numbers if number.value is not None]),
            bound=any(number.missed for number in numbers),
            difference=difference,
            published=published,
            published_difference=published_difference,
            decided=not undecided,
            verdict=word,
            seeds=seeds_to_decide(difference, *how, margin) if undecided else None,
            notes=tuple(notes),
            scale=scales[0] if scales else 1.0,
            baseline=math.fsum(of_pairs) / len(of_pairs) if of_pairs else None,
            student=student,
        )

    def _published(self, labels: Labels) -> Published | None:
        """Return the published number of labels, as the table shows it."""
        axes, with_baseline = (*self.table.rows, *self.table.columns), {**labels, **self.criteria.baseline}
        number = self.table.published.get(tuple(labels[axis] for axis in axes))
        of_baseline = self.table.published.get(tuple(with_baseline[axis] for axis in axes))
        return None if number is None else self.table.show.published(number, of_baseline, self.criteria)

    def _best(self, entries: Mapping[Part, TableEntry], numbers: Mapping[Part, Sequence[ComparedRun]]) -> set[Part]:
        """Return the rows whose shown number is the best of a column.

        The result is empty for a single number, and where partitions differ or rows have different seeds by ``decide``.
        """
        plans, seeds = set[tuple[int, str]](), set[frozenset[int]]()
        for row_numbers in numbers.values():
            valued = [number for number in row_numbers if number.value is not None]
            plans |= {(number.seed, number.result.plan) for number in valued}
            seeds |= {frozenset(number.seed for number in valued)} if valued else set()
        single = sum(entry.ours is not None for entry in entries.values()) < 2
        unequal_seeds = self.criteria.decide is not None and len(seeds) > 1
        unequal_plans = len(plans) > len({seed for seed, _ in plans})
        labels = next(iter(entries.values())).labels
        best = self.table.show.best(labels, self.criteria)
        if single or unequal_seeds or unequal_plans or best is None:
            return set()
        decimals = self.table.show.decimals(self.criteria)
        means = {
            row: round(entry.ours.mean, decimals) for row, entry in entries.items() if entry.ours and not entry.bound
        }
        return {row for row, mean in means.items() if mean == best(means.values())}


def bound_of(number: ComparedRun) -> str:
    """Return the side on which a pair is a bound; empty if both runs have reached the target."""
    if number.missed:
        return ">"
    return "<" if number.partner and number.partner.missed else ""


def notes_by_seed(numbers: Sequence[ComparedRun]) -> list[str]:
    """Return the notes of numbers, each with the seeds that have it."""
    seeds: dict[str, list[str]] = defaultdict(list)
    for number in numbers:
        for note in number.notes:
            seeds[note].append(str(number.seed))
    texts = []
    for note, with_note in seeds.items():
        word = "seeds" if len(with_note) > 1 else "seed"
        texts.append(f"{word} {', '.join(with_note)}: {note}")
    return texts


def holm_by_place(differences: Mapping[Place, Difference], kind: str, prior_scale: float = 1.0) -> dict[Place, float]:
    """Return the p-value of each difference by Holm, for all differences together."""
    p_values = [p_value(difference, kind, prior_scale) for difference in differences.values()]
    return dict(zip(differences, holm(p_values), strict=True))


def with_added_axis(table: Table, axes: Axes, runs: Sequence[ComparedRun]) -> tuple[Table, Axes, list[ComparedRun]]:
    """Return table, axes and runs with the axis that the table adds, such as the scores.

    Each run becomes one run for each label of the axis, to which the published numbers apply, too.
    """
    axis, added = table.show.added_axis, table.show.added_labels(runs)
    published, runs_by_label = dict[Part, Published](), list[ComparedRun]()
    for place, number in table.published.items():
        published |= {(*place, label): number for label in added}
    for run in runs:
        runs_by_label += (replace(run, labels={**run.labels, axis: label}) for label in added)
    wider = replace(table, columns=(*table.columns, axis), published=published)
    return wider, {**axes, axis: added}, runs_by_label


def without_method(labels: Labels) -> Part:
    """Return the labels on all axes but ``method``."""
    return tuple(label for axis, label in labels.items() if axis != "method")


def unequal_settings(criteria: Criteria, axes: Axes, runs: Sequence[ComparedRun]) -> dict[Part, str]:
    """Return a text about the keys outside ``method`` in which rows of a table differ, by labels.

    A row is compared with the baseline's method, or the first method, in the same setting. A key that the file of a
    method sets in addition to the method, such as a learning rate, is part of the comparison.
    """
    if "method" not in axes:
        return {}
    reference = criteria.baseline.get("method", next(iter(axes["method"]), ""))
    # a run that failed before it began has no config in a report
    configs = {tuple(run.labels.values()): run for run in reversed(runs) if run.config}
    texts = {}
    for labels, run in configs.items():
        of_reference = configs.get(tuple({**run.labels, "method": reference}.values()))
        if of_reference is None or of_reference is run:
            continue
        settings, expected = settings_of(run), settings_of(of_reference)
        differences = []
        for key in {**expected, **settings}:
            if settings.get(key) != expected.get(key) and not is_of_method(key):
                value, instead = truncate(settings.get(key, "not set")), truncate(expected.get(key, "not set"))
                differences.append(f"{key} {value} instead of {instead}")
        if differences:
            texts[labels] = printable(f"not the settings of {reference}: {', '.join(differences)}")
    return texts


def settings_of(run: ComparedRun) -> dict[str, str]:
    """Return the settings of a run by dotted key, without the seed and what changes no result."""
    return dict(leaves(of_result({**run.config, "seed_everything": None})))


# ------------------------------------------------------------------ runs of a suite
def suite_comparison(
    suite: Suite, table: Table, cells: Sequence[Cell], results: Mapping[str, CellResult]
) -> Comparison:
    """Return a table of a suite.

    Args:
        suite: the suite.
        table: the table.
        cells: cells to show.
        results: results by the digest of the cell; a cell without one waits.
    """
    return Comparison(suite, table, suite.axes, compared_runs(suite, cells, results))


def compared_runs(suite: Suite, cells: Sequence[Cell], results: Mapping[str, CellResult]) -> list[ComparedRun]:
    """Return the cells of a suite as runs of a comparison."""
    runs = []
    for cell in cells:
        # a cell of a database has no config, so that the suite's counts
        of_method = suite.axes.get("method", {}).get(cell.labels.get("method", ""), ())
        local = is_local(cell.config or merged_config(of_method))
        result = results.get(cell.digest, waiting(cell))
        runs.append(ComparedRun(cell.labels, cell.seed, result, cell.config, local))
    return runs


def is_local(config: Mapping[str, Any]) -> bool:
    """Return whether the method of a config, nested or by dotted key, is ``Local`` alone."""
    nested = [look_up(method, "class_path", "") for method in config.get("method") or ()]
    names = nested or [key for key in config if re.fullmatch(r"method\.\w+", key)]
    return [str(name).rpartition(".")[2] for name in names] == ["Local"]
