"""Sequential choice of seeds: the cells to run until each pair is decided, from all results so far.

A pair is a row of the suite's first table and the baseline in one setting; pairs in one setting share the baseline's
seeds. It starts with the suite's seeds. Each look then takes the pairs in the order of the seeds, and adds one seed if
the interval neither excludes 0 nor lies within the margin. The interval is a confidence sequence, whose error holds for
any number of looks, see :func:`fl_lightning.bench.statistics.half_width`. A look depends only on the results, so any
process that continues later chooses the same cells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fl_lightning.bench.cell import Cell
from fl_lightning.bench.comparison import suite_comparison
from fl_lightning.bench.results import CellResult
from fl_lightning.bench.suite import Suite, selected_cells
from fl_lightning.utilities.errors import require


def pending_cells(suite: Suite, cells: Sequence[Cell], results: Mapping[str, CellResult]) -> list[Cell]:
    """The cells that have been asked for by now.

    A seed of a pair that failed, went to nan or is not comparable has no number; the pair then asks for no further one.
    """
    number = {tuple(cell.labels.values()): len(suite.seeds) for cell in cells}
    for entry in suite_comparison(suite, suite.tables[0], cells, results).entries.values():
        pairs = entry.difference.n if entry.difference else 0
        base = {**entry.labels, **suite.baseline}
        for labels in (entry.labels, base) if base != entry.labels else ():
            place = tuple(labels.values())
            number[place] = max(number.get(place, 0), pairs + (not entry.decided))
    order = {seed: at for at, seed in enumerate(dict.fromkeys(cell.seed for cell in cells))}
    return [cell for cell in cells if order[cell.seed] < number[tuple(cell.labels.values())]]


def shown_cells(suite: Suite, cells: Sequence[Cell], results: Mapping[str, CellResult]) -> list[Cell]:
    """The cells that a table shows: of a suite that decides, those that have been asked for or begun; else all."""
    if suite.decide is None:
        return list(cells)
    digests = {cell.digest for cell in pending_cells(suite, cells, results)}
    digests |= {digest for digest, result in results.items() if result.state != "waiting"}
    return [cell for cell in cells if cell.digest in digests]


def paired_cells(suite: Suite, cells: Sequence[Cell], only: Sequence[str]) -> list[Cell]:
    """Return the cells of the pairs that match any of the patterns, and of their baseline."""
    for pattern in only:
        seeds = [term for term in pattern.split(",") if term.startswith("seed=")]
        require(not seeds, "--only", pattern, "--until-decided takes the seeds in their order: leave seed out")
    selected, paired = set[tuple[str, ...]](), set[tuple[str, ...]]()
    for cell in selected_cells(cells, only):
        labels, of_baseline = tuple(cell.labels.values()), tuple({**cell.labels, **suite.baseline}.values())
        selected.add(labels)
        paired |= {of_baseline} - {labels}
    hint = "these are cells of the baseline alone, which are half of a pair: give those to compare with it"
    require(bool(paired), "--only", " ".join(only), hint)
    return [cell for cell in cells if tuple(cell.labels.values()) in selected | paired]
