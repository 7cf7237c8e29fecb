"""The result of a cell, as the study keeps it, and the modules of the user that have changed since."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from fl_lightning.bench.cell import Cell
from fl_lightning.utilities.code_fingerprint import digest_now, is_own_module
from fl_lightning.utilities.errors import printable

CellState = Literal["waiting", "running", "done", "failed"]


@dataclass(frozen=True)
class CellResult:
    """The result of one cell.

    Args:
        cell: its name, with labels and seed.
        digest: digest of its config.
        state: whether it is ``waiting``, ``running``, ``done`` or ``failed``.
        reason: reason of a failure.
        values: the suite's metric by round.
        seconds: median seconds of a round, without the first; None with too few rounds.
        plan: hash of the partition.
        metrics: all metrics of the last round.
        machine: processor or GPUs, and number of cores.
        run_dir: folder of its run.
        scale: share of the suite's work.
        code: digests of the user's modules in the run; None if unknown.
        warnings: the warnings of the run.
        note: remark for tables.
    """

    cell: str
    digest: str
    state: CellState
    reason: str = ""
    values: Mapping[int, float] = field(default_factory=dict)
    seconds: float | None = None
    plan: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    machine: str = ""
    run_dir: str = ""
    scale: float = 1.0
    code: Mapping[str, str] | None = None
    warnings: Sequence[str] = ()
    note: str = ""


# a cell with the digest that its result is stored with, and its result
StoredCell = tuple[Cell, CellResult]


def waiting(cell: Cell) -> CellResult:
    """The result of a cell that has none."""
    return CellResult(cell.name, cell.digest, "waiting", scale=cell.scale)


def changed_code(results: Mapping[str, CellResult]) -> dict[str, list[str]]:
    """Return the modules that have changed or disappeared since finished cells ran, by digest of the cell."""
    done = {digest: result.code for digest, result in results.items() if result.state == "done" and result.code}
    now = {module: digest_now(module) for module in {module for code in done.values() for module in code}}
    changed = {digest: [name for name, then in code.items() if now[name] != then] for digest, code in done.items()}
    return {digest: names for digest, names in changed.items() if names}


def with_notes(cells: Sequence[Cell], results: Mapping[str, CellResult]) -> dict[str, CellResult]:
    """Results with a note on those that may not be of the present code, or whose run has warned."""
    notes = {digest: f"run with another version of {', '.join(m)}" for digest, m in changed_code(results).items()}
    for cell in cells:
        result = results.get(cell.digest)
        if result is not None and result.state == "done" and result.code is None:
            modules = set(re.findall(r'"class_path": "(\w+)\.', json.dumps(cell.config, default=str)))
            unknown = [top for top in sorted(modules) if is_own_module(top)]
            if unknown:
                notes[cell.digest] = f"run with an unknown version of {', '.join(unknown)}"
    return {
        digest: replace(result, note="; ".join(filter(None, [notes.get(digest), *map(printable, result.warnings)])))
        for digest, result in results.items()
    }
