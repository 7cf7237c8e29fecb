"""Compare readings of an unclear protocol with published numbers.

Papers seldom state all details that their numbers depend on. The key ``open`` of a suite lists readings of the missing
details, and ways of scoring. ``bench --readings`` runs all rows of its tables under each reading, and counts the
published numbers, and the published differences to the baseline, that it reaches within a margin. A reading is
consistent with the tables if it reaches all of them; a reading that fits only the baseline proves nothing.

The package runs this file by its path, see ``fl_lightning.bench.suite_file.with_readings``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fl_lightning.bench.comparison import Comparison, TableEntry
from fl_lightning.bench.shows import OF_METRIC, ByScore
from fl_lightning.bench.statistics import Difference, SeedSummary
from fl_lightning.bench.suite import READING, Suite
from fl_lightning.bench.table_rendering import NONE, TextTable, plain_table
from fl_lightning.utilities.errors import UsageError, require


def with_readings(suite: Suite) -> Suite:
    """Return a suite with the cells of ``suite`` under each reading."""
    if suite.open is None:
        hint = "add the key open, with readings of the details that its source does not state"
        raise UsageError(f"{suite.path}: open=None: {hint}")
    of_metric = [table for table in suite.tables if table.published and table.show.is_of_metric]
    hint = f"readings need published numbers; add them to a table that shows {', '.join(OF_METRIC)}"
    require(bool(of_metric), f"{suite.path}: tables.published", None, hint)
    # a suite with a table of scores has this callback
    lacks = suite.open.scores and not any(isinstance(table.show, ByScore) for table in suite.tables)
    scored = ({"trainer": {"callbacks+": [{"class_path": "Scores"}]}},) if lacks else ()
    hint = "would replace the method of every row; use overrides with when: {reading: ...} for single rows"
    for key, parts in {"config": suite.open.config, **suite.open.readings}.items():
        for part in parts if "method" in suite.axes else ():
            require("method" not in part, f"{suite.path}: open.{key}: method", part.get("method"), hint)
    axis = {label: (*own, *suite.open.config, *scored) for label, own in suite.open.readings.items()}
    # all readings have the same published numbers
    tables = []
    for table in of_metric:
        numbers = {(name, *labels): number for name in axis for labels, number in table.published.items()}
        show = ByScore(suite.open.scores) if suite.open.scores else table.show
        tables.append(replace(table, rows=(READING, *table.rows), published=numbers, show=show))
    fixed: dict[str, Any] = {"interval": "t", "decide": None} if suite.decide else {}
    return replace(
        suite,
        title=f"{suite.title}: readings of details that the source does not state",
        axes={**suite.axes, READING: axis},
        tables=tuple(tables),
        seeds=suite.open.seeds,
        summary=summary,
        **fixed,
    )


@dataclass
class Fit:
    """The number of published numbers or differences, and the distances of a reading from them."""

    published: int = 0
    distances: list[float] = field(default_factory=list)

    def within(self, margin: float) -> int:
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


def consistency(parts: Sequence[Fit], margin: float) -> tuple[str, ...]:
    """Return the possible verdicts on a reading: it fits ``all`` numbers and differences, ``some``, or ``none``.

    One verdict remains once all cells are done. A number outside the margin rules out ``all``. The verdict ``none``
    depends on the numbers alone, since a run that learns nothing has differences close to small published ones.
    """
    all_so_far = all(fit.within(margin) == len(fit.distances) for fit in parts)
    none_so_far = not parts[0].within(margin)
    if all(fit.published == len(fit.distances) for fit in parts):
        return ("all",) if all_so_far else ("none",) if none_so_far else ("some",)
    return tuple(word for word, possible in (("all", all_so_far), ("some", True), ("none", none_so_far)) if possible)


def summary(suite: Suite, comparisons: Sequence[Comparison]) -> tuple[TextTable, list[str]]:
    """Return the table of the readings, and the sentences below it."""
    sentences = [line for text in conclusions(suite, comparisons) for line in (text, "")]
    return readings_table(suite, comparisons), sentences


def readings_table(suite: Suite, comparisons: Sequence[Comparison]) -> TextTable:
    """Return a table with a row for each reading and score: the number of published values it fits, and its verdict."""
    assert suite.open is not None
    margin, rows = suite.open.margin, []
    for (reading, score), parts in fits(comparisons).items():
        texts = []
        for fit in parts:
            missing = fit.published - len(fit.distances)
            some = f"{fit.within(margin)} of {len(fit.distances)}{f', {missing} without' * bool(missing)}"
            texts += [some, f"{max(fit.distances):.2f}"] if fit.distances else [NONE, NONE]
        words = consistency(parts, margin)
        state = "unknown so far" if len(words) == 3 else " or ".join(words)
        rows.append([reading, score, *texts, state])
    caption = f"Number of published numbers, and of published differences to {suite.baseline_name}, "
    caption += f"that each reading reaches within {margin:g}."
    heads = ["numbers", "farthest", "differences", "farthest", "consistent with"]
    return plain_table(caption, (READING, "score"), heads, rows, key=f"{suite.name}-readings")


def conclusions(suite: Suite, comparisons: Sequence[Comparison]) -> Iterator[str]:
    """Yield sentences about the readings that are consistent with all published numbers, and with none."""
    assert suite.open is not None
    made = fits(comparisons).items()
    possible = {f"{reading} by {score}": consistency(parts, suite.open.margin) for (reading, score), parts in made}
    for word, kind in (("all", "numbers and differences"), ("none", "numbers")):
        names = [name for name, words in possible.items() if words == (word,)]
        waiting = sum(word in words for words in possible.values()) - len(names)
        rest = f"no reading{f' so far; {waiting} are unknown' * bool(waiting)}"
        yield f"Consistent with {word} of the published {kind}: {'; '.join(names) or rest}."
