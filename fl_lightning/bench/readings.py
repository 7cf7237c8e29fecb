"""Which readings of an unclear protocol are consistent with the numbers that were published.

A paper seldom states all that its numbers depend on. A suite names under ``open`` some readings of what is missing, and
ways of scoring. ``bench --readings`` runs all rows of its tables under each reading, and counts how many published
numbers, and published differences to the baseline, are reached within a margin. A reading is consistent with the tables
if all are: one that fits the baseline alone says nothing of the methods.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fl_lightning.bench.comparison import Comparison, TableEntry
from fl_lightning.bench.layout import NONE, Sheet, Text
from fl_lightning.bench.statistics import Difference, SeedSummary
from fl_lightning.bench.suite import OF_METRIC, READING, Suite
from fl_lightning.bench.suite_file import load_suite
from fl_lightning.errors import UsageError, require


def with_readings(suite: Suite) -> Suite:
    """The suite of all cells of ``suite`` under each reading."""
    if suite.open is None:
        hint = "give it the key open, with the readings of the details that its source leaves open"
        raise UsageError(f"{suite.path}: open=None: {hint}")
    of_metric = [table for table in suite.tables if table.published and table.show in OF_METRIC]
    hint = f"readings are compared with published numbers: give them to a table that shows {', '.join(OF_METRIC)}"
    require(bool(of_metric), f"{suite.path}: tables.published", None, hint)
    # a suite with a table of scores has the callback itself
    lacks = suite.open.scores and all(table.show != "scores" for table in suite.tables)
    scored = ({"trainer": {"callbacks+": [{"class_path": "Scores"}]}},) if lacks else ()
    hint = "it would take the place of the method of every row: give it to some by overrides with when: {reading: ...}"
    for key, parts in {"config": suite.open.config, **suite.open.readings}.items():
        for part in parts if "method" in suite.axes else ():
            require("method" not in part, f"{suite.path}: open.{key}: method", part.get("method"), hint)
    axis = {label: (*own, *suite.open.config, *scored) for label, own in suite.open.readings.items()}
    # all readings have the same published numbers
    tables = []
    for table in of_metric:
        numbers = {(name, *labels): number for name in axis for labels, number in table.published.items()}
        show = "scores" if suite.open.scores else table.show
        rows = (READING, *table.rows)
        tables.append(replace(table, rows=rows, published=numbers, scores=suite.open.scores, show=show))
    fixed: dict[str, Any] = {"interval": "t", "decide": None} if suite.decide else {}
    return replace(
        suite,
        title=f"{suite.title}: readings of what the source leaves open",
        axes={**suite.axes, READING: axis},
        tables=tuple(tables),
        seeds=suite.open.seeds,
        **fixed,
    )


def suites_in(path: str | Path) -> list[Suite]:
    """The suite of a file, and where it has the key ``open``, that of its readings."""
    suite = load_suite(path)
    return [suite, *([with_readings(suite)] if suite.open else [])]


@dataclass
class Fit:
    """The number of published numbers or differences, and the distances of a reading from those that it has."""

    published: int = 0
    distances: list[float] = field(default_factory=list)

    def within(self, margin: float) -> int:
        """How many are within the margin."""
        return sum(distance <= margin for distance in self.distances)

    def add(self, entry: TableEntry, ours: SeedSummary | Difference | None, published: float | None) -> None:
        """Add a published number: infinitely far where all seeds have diverged, without a distance before the last."""
        self.published += published is not None
        unpaired = ours is not None and ours.n < entry.states["done"]
        if published is None or entry.states["waiting"] or entry.states["running"] or unpaired:
            return
        if ours is not None:
            self.distances.append(abs(ours.mean - published))
        elif entry.states["nan"] == entry.cells:
            self.distances.append(math.inf)


def fits(comparisons: Sequence[Comparison]) -> dict[tuple[str, str], tuple[Fit, Fit]]:
    """By reading and score, the fit of the numbers and that of the differences, over all rows of all tables."""
    made: dict[tuple[str, str], tuple[Fit, Fit]] = {}
    for comparison in comparisons:
        for (row, column), entry in comparison.entries.items():
            score = column[-1] if comparison.table.show == "scores" else comparison.table.show
            numbers, differences = made.setdefault((row[0], score), (Fit(), Fit()))
            numbers.add(entry, entry.ours, entry.published and entry.published[0])
            differences.add(entry, entry.difference, entry.published_difference)
    return made


def consistency(parts: Sequence[Fit], margin: float) -> tuple[str, ...]:
    """The words that may hold for a reading: consistent with ``all`` numbers and differences, ``some``, or ``none``.

    It is one word once all cells are done. A number that is too far off rules out ``all``. Differences do not count for
    ``none``: where nothing is learned, they are near the small ones among the published.
    """
    all_so_far = all(fit.within(margin) == len(fit.distances) for fit in parts)
    none_so_far = not parts[0].within(margin)
    if all(fit.published == len(fit.distances) for fit in parts):
        return ("all",) if all_so_far else ("none",) if none_so_far else ("some",)
    return tuple(word for word, possible in (("all", all_so_far), ("some", True), ("none", none_so_far)) if possible)


def readings_sheet(suite: Suite, comparisons: Sequence[Comparison]) -> Sheet:
    """The table of the readings and scores, with how many published numbers and differences each reaches."""
    assert suite.open is not None
    margin, lines = suite.open.margin, []
    for (reading, score), parts in fits(comparisons).items():
        texts = []
        for fit in parts:
            missing = fit.published - len(fit.distances)
            some = f"{fit.within(margin)} of {len(fit.distances)}{f', {missing} without' * bool(missing)}"
            texts += [some, f"{max(fit.distances):.2f}"] if fit.distances else [NONE, NONE]
        words = consistency(parts, margin)
        state = "not known yet" if len(words) == 3 else " or ".join(words)
        lines.append([Text(text) for text in (reading, score, *texts, state)])
    caption = (
        f"With how many of the published numbers, and of the published differences to {comparisons[0].baseline}, each "
        f"reading is consistent: ours is within {margin:g} of them."
    )
    heads: list[tuple[str, list[str]]] = [
        (head, []) for head in ("numbers", "farthest", "differences", "farthest", "consistent with")
    ]
    return Sheet(caption, (READING, "score"), heads, lines, key=f"{suite.name}-readings")


def conclusions(suite: Suite, comparisons: Sequence[Comparison]) -> Iterator[str]:
    """In sentences, which readings are consistent with all published numbers, and which with none."""
    assert suite.open is not None
    made = fits(comparisons).items()
    possible = {f"{reading} by {score}": consistency(parts, suite.open.margin) for (reading, score), parts in made}
    for word, kind in (("all", "numbers and differences"), ("none", "numbers")):
        names = [name for name, words in possible.items() if words == (word,)]
        waiting = sum(word in words for words in possible.values()) - len(names)
        rest = f"no reading{f' so far; {waiting} are not known yet' * bool(waiting)}"
        yield f"Consistent with {word} of the published {kind}: {'; '.join(names) or rest}."
