"""Compares readings of an unclear protocol with published numbers.

Papers seldom state all details that their numbers depend on. A suite with the axis ``reading`` runs the rows of a table
under several readings of the missing details. This module counts the published numbers, and the published differences
to the baseline, that each reading reaches within a margin. A reading is consistent with the tables if it reaches all of
them; a reading that fits only the baseline proves nothing. ``make_results.py`` writes the result above the tables.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from fl_lightning.bench import Suite
from fl_lightning.bench.comparison import Comparison, TableEntry
from fl_lightning.bench.statistics import Difference, SeedSummary
from fl_lightning.bench.table_rendering import NONE, TextTable, plain_table

# the axis of the readings
READING = "reading"
# greatest distance to a published number at which a reading reaches it, in points. It was stated before the five seeds
# of FedLC's Table 4 were run; they deviate by more
MARGIN = 3.0


@dataclass
class Fit:
    """The number of published numbers or differences, and the distances of a reading from them."""

    published: int = 0
    distances: list[float] = field(default_factory=list)

    def within(self, margin: float = MARGIN) -> int:
        """Return the number of distances within the margin."""
        return sum(distance <= margin for distance in self.distances)

    def add(self, entry: TableEntry, ours: SeedSummary | Difference | None, published: float | None) -> None:
        """Add a published number, at infinite distance if all seeds diverged, without a distance while seeds run."""
        self.published += published is not None
        unpaired = ours is not None and ours.n < entry.states["done"]
        if published is None or entry.states["waiting"] or entry.states["running"] or unpaired:
            return
        if ours is not None:
            self.distances.append(abs(ours.mean - published))
        elif entry.states["nan"] == entry.cells:
            self.distances.append(math.inf)


def fits(comparisons: Sequence[Comparison]) -> dict[tuple[str, str], tuple[Fit, Fit]]:
    """Return the fits of numbers and differences over all rows of all tables, by reading and score."""
    made: dict[tuple[str, str], tuple[Fit, Fit]] = {}
    for comparison in comparisons:
        for (row, column), entry in comparison.entries.items():
            score = column[-1] if comparison.table.show.added_axis else comparison.table.show.name
            numbers, differences = made.setdefault((row[0], score), (Fit(), Fit()))
            numbers.add(entry, entry.ours, entry.published and entry.published[0])
            differences.add(entry, entry.difference, entry.published_difference)
    return made


def consistency(parts: Sequence[Fit], margin: float = MARGIN) -> tuple[str, ...]:
    """Return the possible verdicts on a reading: it fits ``all`` numbers and differences, ``some``, or ``none``.

    One verdict remains once all cells are done. A number outside the margin rules out ``all``. The verdict ``none``
    depends on the numbers alone, since a run that learns nothing has differences close to small published ones.
    """
    all_so_far = all(fit.within(margin) == len(fit.distances) for fit in parts)
    none_so_far = not parts[0].within(margin)
    if all(fit.published == len(fit.distances) for fit in parts):
        return ("all",) if all_so_far else ("none",) if none_so_far else ("some",)
    return tuple(word for word, possible in (("all", all_so_far), ("some", True), ("none", none_so_far)) if possible)


def readings_table(suite: Suite, comparisons: Sequence[Comparison]) -> TextTable:
    """Return a table with a row for each reading and score: the number of published values it fits, and its verdict."""
    rows = []
    for (reading, score), parts in fits(comparisons).items():
        texts = []
        for fit in parts:
            missing = fit.published - len(fit.distances)
            some = f"{fit.within()} of {len(fit.distances)}{f', {missing} without' * bool(missing)}"
            texts += [some, f"{max(fit.distances):.2f}"] if fit.distances else [NONE, NONE]
        words = consistency(parts)
        state = "unknown so far" if len(words) == 3 else " or ".join(words)
        rows.append([reading, score, *texts, state])
    caption = f"Number of published numbers, and of published differences to {suite.baseline_name}, "
    caption += f"that each reading reaches within {MARGIN:g}."
    heads = ["numbers", "farthest", "differences", "farthest", "consistent with"]
    return plain_table(caption, (READING, "score"), heads, rows)


def conclusions(comparisons: Sequence[Comparison]) -> Iterator[str]:
    """Yield sentences about the readings that are consistent with all published numbers, and with none."""
    made = fits(comparisons).items()
    possible = {f"{reading} by {score}": consistency(parts) for (reading, score), parts in made}
    for word, kind in (("all", "numbers and differences"), ("none", "numbers")):
        names = [name for name, words in possible.items() if words == (word,)]
        waiting = sum(word in words for words in possible.values()) - len(names)
        rest = f"no reading{f' so far; {waiting} are unknown' * bool(waiting)}"
        yield f"Consistent with {word} of the published {kind}: {'; '.join(names) or rest}."
