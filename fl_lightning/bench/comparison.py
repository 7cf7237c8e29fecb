"""What a table says: for each row and column our numbers, the difference to the baseline and the paper's."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fl_lightning.bench.results import CellResult, waiting
from fl_lightning.bench.statistics import (
    Difference,
    SeedSummary,
    bounded,
    paired_difference,
    ranks,
    summarize,
    verdict,
)
from fl_lightning.bench.suite import Cell, Labels, Suite, Table
from fl_lightning.errors import printable

NOT_COMPARED = "not compared"
# a metric beyond this has diverged, too; the squares of smaller ones are still numbers
DIVERGED_BEYOND = 1e150
# labels of a row, or of a column
Part = tuple[str, ...]
# labels in the order of the suite's axes, and a seed
CellKey = tuple[Part, int]
Published = tuple[float, float | None]


class Numbers:
    """The numbers of a table, and what is to be said of them.

    Args:
        suite: the suite.
        table: one of its tables.
        cells: cells to show.
        results: results by the digest of the cell; a cell without one waits.

    Attributes:
        cells: by key.
        results: by key.
        values: a number of each cell that has one.
        seconds: seconds of a round, of the cells of a table that shows their ratio.
        missed: cells that did not reach the target.
        notes: what is to be said of a cell.
        unequal: cells that are not compared, since their partition or machine is another one.
    """

    def __init__(self, suite: Suite, table: Table, cells: Sequence[Cell], results: Mapping[str, CellResult]) -> None:
        self.suite, self.table = suite, table
        self.cells: dict[CellKey, Cell] = {(tuple(cell.labels.values()), cell.seed): cell for cell in cells}
        self.results = {key: results.get(cell.digest, waiting(cell)) for key, cell in self.cells.items()}
        self.missed: set[CellKey] = set()
        self.unequal: set[CellKey] = set()
        self.notes: dict[CellKey, list[str]] = defaultdict(list)
        own = {key: self._value(key, result) for key, result in self.results.items()}
        self.values: dict[CellKey, float] = {key: value for key, value in own.items() if value is not None}
        self.seconds = dict(self.values)
        if table.show == "seconds" and suite.baseline:
            self.values = self._ratios()
        elif table.show == "rank":
            self.values = self._ranks()

    @property
    def baseline(self) -> str:
        """What the others are compared with, in words."""
        labels = self.suite.baseline.items()
        return ", ".join(label if axis == "method" else f"{axis}={label}" for axis, label in labels)

    def is_baseline(self, key: CellKey) -> bool:
        """Whether a cell is one that the others are compared with."""
        labels = self.cells[key].labels
        return bool(self.suite.baseline) and {**labels, **self.suite.baseline} == labels

    def partner(self, key: CellKey) -> CellKey | None:
        """The baseline's cell of the same settings and seed; None for the baseline, and where there is no such cell."""
        cell = self.cells[key]
        other = (tuple({**cell.labels, **self.suite.baseline}.values()), cell.seed)
        return other if other != key and other in self.cells else None

    def state(self, key: CellKey) -> str:
        """What has become of a cell: ``done``, ``nan``, ``failed``, ``running`` or ``waiting``."""
        result = self.results[key]
        return "nan" if result.state == "done" and diverged(result) is not None else result.state

    def pair(self, key: CellKey) -> tuple[float, float] | None:
        """A cell's number and the baseline's; None where one of them lacks, or they are not to be compared."""
        partner = self.partner(key)
        if partner is None or not {key, partner} <= self.values.keys() or {key, partner} <= self.missed:
            return None
        return (self.values[key], self.values[partner]) if self._comparable(key, partner) else None

    def bound(self, key: CellKey) -> str:
        """How a difference is bounded: ``>`` if the cell missed the target, ``<`` if the baseline did, or empty."""
        if key in self.missed:
            return ">"
        return "<" if self.partner(key) in self.missed else ""

    def _comparable(self, key: CellKey, partner: CellKey) -> bool:
        """Whether two cells had the same partition, and the same machine where seconds count."""
        ours, theirs = self.results[key], self.results[partner]
        if ours.plan != theirs.plan:
            why = f"the hashes of the partitions differ ({ours.plan[:8] or 'none'}, {theirs.plan[:8] or 'none'})"
        elif not ours.plan:
            why = "the hash of the partition is not known"
        elif self.table.show == "seconds" and ours.machine != theirs.machine:
            why = "they ran on different machines"
        else:
            return True
        self._note(key, f"not compared with {self.baseline}: {why}")
        self.unequal.add(key)
        return False

    def _note(self, key: CellKey, note: str) -> None:
        if note not in self.notes[key]:
            self.notes[key].append(note)

    def _value(self, key: CellKey, result: CellResult) -> float | None:
        """A cell's own number; a run that has failed or that went to nan has none."""
        if result.state == "failed":
            self._note(key, f"failed: {printable(result.reason) or 'for an unknown reason'}")
        if result.state != "done":
            return None
        if result.note:
            self._note(key, result.note)
        if (lost := diverged(result)) is not None:
            self._note(key, f"{self.suite.metric} went to {result.values[lost]} in round {lost}")
            return None
        if not result.values:
            self._note(key, f"ended without a value of {self.suite.metric}")
            return None
        if self.table.show == "seconds":
            if not result.seconds:
                self._note(key, "too few rounds to tell the seconds of one")
            return result.seconds or None
        unit, best = 100.0 if self.suite.percent else 1.0, min if self.suite.minimize else max
        if self.table.show == "rounds_to":
            target = self.table.target
            assert target is not None  # such a suite is refused
            reached = [round_ for round_, value in result.values.items() if best(value, target) == value]
            if not reached:
                # it counts with all its rounds
                self.missed.add(key)
                self._note(key, f"did not reach the target in {max(result.values) + 1} rounds")
            return float(min(reached or [max(result.values)]) + 1)
        values = [result.values[round_] for round_ in sorted(result.values)]
        if self.table.show == "best":
            return unit * best(values)
        last = values[-self.table.k :] if self.table.show == "last" else values[-1:]
        return unit * math.fsum(last) / len(last)

    def _ratios(self) -> dict[CellKey, float]:
        """Seconds divided by those of the baseline, of the cells that are compared with it."""
        made: dict[CellKey, float] = {}
        for key, own in self.seconds.items():
            partner = self.partner(key)
            if self.is_baseline(key):
                made[key] = 1.0
            elif partner is not None and partner in self.seconds and self._comparable(key, partner):
                made[key] = own / self.seconds[partner]
        return made

    def _ranks(self) -> dict[CellKey, float]:
        """The ranks among the rows of each column and seed, once none of them is still to come."""
        groups: dict[tuple[tuple[str, ...], int], list[CellKey]] = defaultdict(list)
        for key, cell in self.cells.items():
            groups[tuple(cell.labels[axis] for axis in self.table.columns), cell.seed].append(key)
        made: dict[CellKey, float] = {}
        for keys in groups.values():
            if any(self.results[key].state in ("running", "waiting") for key in keys):
                continue
            ranked = [key for key in keys if key in self.values]
            if len({self.results[key].plan for key in ranked}) > 1:
                for key in ranked:
                    self._note(key, "not ranked: the hashes of the partitions of this column differ")
                    self.unequal.add(key)
                continue
            own = [self.values[key] for key in ranked]
            made.update(zip(ranked, ranks(own, self.suite.minimize), strict=True))
        return made


def diverged(result: CellResult) -> int | None:
    """The first round whose value is not finite, or as good as that; None if there is none."""
    return min((round_ for round_, value in result.values.items() if not abs(value) < DIVERGED_BEYOND), default=None)


@dataclass(frozen=True)
class TableEntry:
    """One row and column of a table.

    Args:
        labels: label on each axis.
        states: number of its cells by what has become of them: ``done``, ``nan``, ``failed``, ``running``, ``waiting``.
        ours: our numbers.
        bound: whether our mean is a lower bound, since a run did not reach the target.
        difference: our paired difference to the baseline; None for the baseline.
        published: published number, and its deviation where it is known.
        published_difference: published difference to the baseline.
        verdict: whether the paper's ordering is ``reproduced``, ``reversed`` or ``undecided``, or the cells are
            ``not compared``; empty where the paper gives no ordering.
        notes: what is to be said of its numbers.
        scale: share of the work that was done.
        best: whether it has the best number of its column.
    """

    labels: Labels
    states: Mapping[str, int]
    ours: SeedSummary | None
    bound: bool
    difference: Difference | None
    published: Published | None
    published_difference: float | None
    verdict: str
    notes: tuple[str, ...]
    scale: float
    best: bool = False

    @property
    def cells(self) -> int:
        """Number of its cells, which is that of the seeds."""
        return sum(self.states.values())


class Comparison:
    """A table's entries.

    Args:
        suite: the suite.
        table: one of its tables.
        cells: cells to show.
        results: results by the digest of the cell; a cell without one waits.

    Attributes:
        entries: by the labels of row and column; none where the suite has no cell.
    """

    def __init__(self, suite: Suite, table: Table, cells: Sequence[Cell], results: Mapping[str, CellResult]) -> None:
        self.suite, self.table = suite, table
        self.numbers = Numbers(suite, table, cells, results)
        self._keys: dict[tuple[str, ...], list[CellKey]] = defaultdict(list)
        for key in self.numbers.cells:
            self._keys[key[0]].append(key)
        self.entries: dict[tuple[Part, Part], TableEntry] = {}
        for column in self.columns():
            made: dict[Part, TableEntry] = {}
            for row in self.rows():
                labels = dict(zip((*table.rows, *table.columns), (*row, *column), strict=True))
                labels = {axis: labels[axis] for axis in suite.axes}
                if keys := self._keys.get(tuple(labels.values())):
                    made[row] = self._entry(labels, keys)
            best = self._best(made)
            self.entries.update({(row, column): replace(entry, best=row in best) for row, entry in made.items()})

    def rows(self) -> list[Part]:
        """Labels of the rows that have a cell, in the order of the suite."""
        return self._labels(self.table.rows)

    def columns(self) -> list[Part]:
        """Labels of the columns that have a cell, in the order of the suite."""
        return self._labels(self.table.columns)

    @property
    def decimals(self) -> int:
        """Decimals of a number, as papers print it."""
        if self.table.show == "rounds_to":
            return 1
        return 2 if self.suite.percent or self.table.show in ("seconds", "rank") else 4

    @property
    def lower_is_better(self) -> bool:
        """Whether the smallest number of a column is the best."""
        return self.suite.minimize or self.table.show in ("rounds_to", "seconds", "rank")

    def _labels(self, axes: Sequence[str]) -> list[Part]:
        order = {axis: list(self.suite.axes[axis]) for axis in axes}
        parts = {tuple(cell.labels[axis] for axis in axes) for cell in self.numbers.cells.values()}
        return sorted(
            parts, key=lambda part: [order[axis].index(label) for axis, label in zip(axes, part, strict=True)]
        )

    def _entry(self, labels: Labels, keys: Sequence[CellKey]) -> TableEntry:
        numbers = self.numbers
        pairs = {key: pair for key in keys if (pair := numbers.pair(key)) is not None}
        ours = paired_difference([*pairs.values()], self.suite.interval, self.suite.confidence)
        ours = bounded(ours, [numbers.bound(key) for key in pairs])
        published, base, apart = self._published(labels), self._published({**labels, **self.suite.baseline}), None
        if published and base and self.suite.baseline and not numbers.is_baseline(keys[0]):
            apart = round(published[0] - base[0], 9)  # the papers print fewer decimals
        ordering = verdict(ours, apart) or ""
        seeds: dict[str, list[str]] = defaultdict(list)
        for key in keys:
            for note in numbers.notes.get(key, ()):
                seeds[note].append(str(key[1]))
        return TableEntry(
            labels,
            states=Counter(numbers.state(key) for key in keys),
            ours=summarize([numbers.values[key] for key in keys if key in numbers.values]),
            bound=any(key in numbers.missed for key in keys),
            difference=ours,
            published=published,
            published_difference=apart,
            verdict=NOT_COMPARED if ordering and not pairs and numbers.unequal & {*keys} else ordering,
            notes=tuple(f"seed{'s' * (len(of) > 1)} {', '.join(of)}: {note}" for note, of in seeds.items()),
            scale=next((numbers.results[key].scale for key in keys if numbers.results[key].scale != 1), 1.0),
        )

    def _published(self, labels: Labels) -> Published | None:
        """The published number of some labels; in a table of seconds, its ratio to the baseline's."""
        axes = (*self.table.rows, *self.table.columns)
        own = self.table.published.get(tuple(labels[axis] for axis in axes))
        if own is None or self.table.show != "seconds" or not self.suite.baseline:
            return own
        base = self.table.published.get(tuple({**labels, **self.suite.baseline}[axis] for axis in axes))
        return None if base is None else (own[0] / base[0], None if own[1] is None else own[1] / base[0])

    def _best(self, column: Mapping[Part, TableEntry]) -> set[Part]:
        """The rows with the best number of a column, as it is shown; none where partitions differ."""
        plans: dict[int, set[str]] = defaultdict(set)
        for entry in column.values():
            for key in self._keys[tuple(entry.labels.values())]:
                if key in self.numbers.values:
                    plans[key[1]].add(self.numbers.results[key].plan)
        if any(len(of_seed) > 1 for of_seed in plans.values()):
            return set()
        counted = {row: entry.ours for row, entry in column.items() if entry.ours and not entry.bound}
        means = {row: round(ours.mean, self.decimals) for row, ours in counted.items()}
        best = (min if self.lower_is_better else max)(means.values(), default=None)
        return {row for row, mean in means.items() if mean == best}
