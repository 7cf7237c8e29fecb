"""What a table says: for each row and column our numbers, the difference to the baseline and the paper's."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fl_lightning.bench.numbers import Key, Numbers
from fl_lightning.bench.results import Result
from fl_lightning.bench.statistics import Difference, Summary, bounded, difference, summary, verdict
from fl_lightning.bench.suite import Cell, Labels, Suite, Table

NOT_COMPARED = "not compared"
# labels of a row, or of a column
Part = tuple[str, ...]
Published = tuple[float, float | None]


@dataclass(frozen=True)
class Entry:
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
    ours: Summary | None
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

    def __init__(self, suite: Suite, table: Table, cells: Sequence[Cell], results: Mapping[str, Result]) -> None:
        self.suite, self.table = suite, table
        self.numbers = Numbers(suite, table, cells, results)
        self._keys: dict[tuple[str, ...], list[Key]] = defaultdict(list)
        for key in self.numbers.cells:
            self._keys[key[0]].append(key)
        self.entries: dict[tuple[Part, Part], Entry] = {}
        for column in self.columns():
            self._add_column(column)

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
        found = {tuple(cell.labels[axis] for axis in axes) for cell in self.numbers.cells.values()}
        return sorted(found, key=lambda part: [order[axis].index(one) for axis, one in zip(axes, part, strict=True)])

    def _add_column(self, column: Part) -> None:
        made = {}
        for row in self.rows():
            given = dict(zip((*self.table.rows, *self.table.columns), (*row, *column), strict=True))
            labels = {axis: given[axis] for axis in self.suite.axes}
            if keys := self._keys.get(tuple(labels.values())):
                made[row] = self._entry(labels, keys)
        best = self._best(made)
        self.entries.update({(row, column): replace(one, best=row in best) for row, one in made.items()})

    def _entry(self, labels: Labels, keys: Sequence[Key]) -> Entry:
        numbers = self.numbers
        pairs = {key: pair for key in keys if (pair := numbers.pair(key)) is not None}
        ours = difference([*pairs.values()], self.suite.interval, self.suite.confidence)
        ours = bounded(ours, [numbers.bound(key) for key in pairs])
        apart = None if numbers.is_baseline(keys[0]) else self._published_difference(labels)
        said = verdict(ours, apart) or ""
        return Entry(
            labels,
            states=Counter(numbers.state(key) for key in keys),
            ours=summary([numbers.values[key] for key in keys if key in numbers.values]),
            bound=any(key in numbers.missed for key in keys),
            difference=ours,
            published=self._published(labels),
            published_difference=apart,
            verdict=NOT_COMPARED if said and not pairs and numbers.unequal & {*keys} else said,
            notes=self._notes(keys),
            scale=next((numbers.results[key].scale for key in keys if numbers.results[key].scale != 1), 1.0),
        )

    def _notes(self, keys: Sequence[Key]) -> tuple[str, ...]:
        """What is to be said of some cells, with the seeds of which it is said."""
        seeds: dict[str, list[str]] = defaultdict(list)
        for key in keys:
            for note in self.numbers.notes.get(key, ()):
                seeds[note].append(str(key[1]))
        return tuple(f"seed{'s' * (len(one) > 1)} {', '.join(one)}: {note}" for note, one in seeds.items())

    def _published(self, labels: Labels) -> Published | None:
        """The published number of some labels; in a table of seconds, its ratio to the baseline's."""
        axes = (*self.table.rows, *self.table.columns)
        found = self.table.published.get(tuple(labels[axis] for axis in axes))
        if found is None or self.table.show != "seconds" or not self.suite.baseline:
            return found
        base = self.table.published.get(tuple({**labels, **self.suite.baseline}[axis] for axis in axes))
        return None if base is None else (found[0] / base[0], None if found[1] is None else found[1] / base[0])

    def _published_difference(self, labels: Labels) -> float | None:
        ours, base = self._published(labels), self._published({**labels, **self.suite.baseline})
        if ours is None or base is None or not self.suite.baseline:
            return None
        return round(ours[0] - base[0], 9)  # the papers print fewer decimals

    def _best(self, column: Mapping[Part, Entry]) -> set[Part]:
        """The rows with the best number of a column, as it is shown; none where partitions differ."""
        plans: dict[int, set[str]] = defaultdict(set)
        for entry in column.values():
            for key in self._keys[tuple(entry.labels.values())]:
                if key in self.numbers.values:
                    plans[key[1]].add(self.numbers.results[key].plan)
        if any(len(found) > 1 for found in plans.values()):
            return set()
        means = {row: round(one.ours.mean, self.decimals) for row, one in column.items() if one.ours and not one.bound}
        best = (min if self.lower_is_better else max)(means.values(), default=None)
        return {row for row, mean in means.items() if mean == best}
