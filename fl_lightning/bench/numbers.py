"""The numbers of a table, cell by cell: what it shows of a run, as a ratio or a rank where it asks for these."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from fl_lightning.bench.results import Result
from fl_lightning.bench.statistics import ranks
from fl_lightning.bench.suite import Cell, Suite, Table
from fl_lightning.errors import printable

# a metric beyond this has diverged, too; the squares of smaller ones are still numbers
LARGEST = 1e150
# labels in the order of the suite's axes, and a seed
Key = tuple[tuple[str, ...], int]


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

    def __init__(self, suite: Suite, table: Table, cells: Sequence[Cell], results: Mapping[str, Result]) -> None:
        self.suite, self.table = suite, table
        self.cells: dict[Key, Cell] = {(tuple(cell.labels.values()), cell.seed): cell for cell in cells}
        self.results = {key: results.get(cell.digest, waiting(cell)) for key, cell in self.cells.items()}
        self.missed: set[Key] = set()
        self.unequal: set[Key] = set()
        self.notes: dict[Key, list[str]] = defaultdict(list)
        found = {key: self._value(key, result) for key, result in self.results.items()}
        self.values: dict[Key, float] = {key: value for key, value in found.items() if value is not None}
        self.seconds = dict(self.values)
        if table.show == "seconds" and suite.baseline:
            self.values = self._ratios()
        elif table.show == "rank":
            self.values = self._ranks()

    @property
    def baseline(self) -> str:
        """What the others are compared with, in words."""
        named = self.suite.baseline.items()
        return ", ".join(label if axis == "method" else f"{axis}={label}" for axis, label in named)

    def is_baseline(self, key: Key) -> bool:
        """Whether a cell is one that the others are compared with."""
        labels = self.cells[key].labels
        return bool(self.suite.baseline) and {**labels, **self.suite.baseline} == labels

    def partner(self, key: Key) -> Key | None:
        """The baseline's cell of the same settings and seed; None for the baseline, and where there is no such cell."""
        cell = self.cells[key]
        other = (tuple({**cell.labels, **self.suite.baseline}.values()), cell.seed)
        return other if other != key and other in self.cells else None

    def state(self, key: Key) -> str:
        """What has become of a cell: ``done``, ``nan``, ``failed``, ``running`` or ``waiting``."""
        result = self.results[key]
        return "nan" if result.state == "done" and diverged(result) is not None else result.state

    def pair(self, key: Key) -> tuple[float, float] | None:
        """A cell's number and the baseline's; None where one of them lacks, or they are not to be compared."""
        partner = self.partner(key)
        if partner is None or not {key, partner} <= self.values.keys() or {key, partner} <= self.missed:
            return None
        return (self.values[key], self.values[partner]) if self._comparable(key, partner) else None

    def bound(self, key: Key) -> str:
        """How a difference is bounded: ``>`` if the cell missed the target, ``<`` if the baseline did, or empty."""
        if key in self.missed:
            return ">"
        return "<" if self.partner(key) in self.missed else ""

    def _comparable(self, key: Key, partner: Key) -> bool:
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

    def _note(self, key: Key, note: str) -> None:
        if note not in self.notes[key]:
            self.notes[key].append(note)

    def _value(self, key: Key, result: Result) -> float | None:
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
        return self._of_metric(key, [result.values[round_] for round_ in sorted(result.values)])

    def _of_metric(self, key: Key, values: list[float]) -> float:
        unit = 100.0 if self.suite.percent else 1.0
        if self.table.show == "rounds_to":
            return self._rounds(key)
        if self.table.show == "best":
            return unit * (min if self.suite.minimize else max)(values)
        last = values[-self.table.k :] if self.table.show == "last" else values[-1:]
        return unit * math.fsum(last) / len(last)

    def _rounds(self, key: Key) -> float:
        """The number of rounds after which the target is reached; that of all rounds where it never is."""
        values, target = self.results[key].values, self.table.target
        assert target is not None  # such a suite is refused
        reached = [at for at, one in values.items() if (one <= target if self.suite.minimize else one >= target)]
        if not reached:
            self.missed.add(key)
            self._note(key, f"did not reach the target in {max(values) + 1} rounds")
        return float(min(reached or [max(values)]) + 1)

    def _ratios(self) -> dict[Key, float]:
        """Seconds divided by those of the baseline, of the cells that are compared with it."""
        made: dict[Key, float] = {}
        for key, own in self.seconds.items():
            partner = self.partner(key)
            if self.is_baseline(key):
                made[key] = 1.0
            elif partner is not None and partner in self.seconds and self._comparable(key, partner):
                made[key] = own / self.seconds[partner]
        return made

    def _ranks(self) -> dict[Key, float]:
        """The ranks among the rows of each column and seed, once none of them is still to come."""
        groups: dict[tuple[tuple[str, ...], int], list[Key]] = defaultdict(list)
        for key, cell in self.cells.items():
            groups[tuple(cell.labels[axis] for axis in self.table.columns), cell.seed].append(key)
        made: dict[Key, float] = {}
        for keys in groups.values():
            if any(self.results[key].state in ("running", "waiting") for key in keys):
                continue
            ranked = [key for key in keys if key in self.values]
            if len({self.results[key].plan for key in ranked}) > 1:
                for key in ranked:
                    self._note(key, "not ranked: the hashes of the partitions of this column differ")
                    self.unequal.add(key)
                continue
            found = ranks([self.values[key] for key in ranked], self.suite.minimize)
            made.update(zip(ranked, found, strict=True))
        return made


def diverged(result: Result) -> int | None:
    """The first round whose value is not finite, or as good as that; None if there is none."""
    return min((round_ for round_, value in result.values.items() if not abs(value) < LARGEST), default=None)


def waiting(cell: Cell) -> Result:
    """The result of a cell that has none."""
    return Result(cell.name, cell.digest, "waiting", scale=cell.scale)
