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
    digests, changed = dict[str, str | None](), dict[str, list[str]]()
    for digest, result in results.items():
        for module, of_run in (result.code or {}).items() if result.state == "done" else ():
            if module not in digests:
                digests[module] = digest_now(module)
            if digests[module] != of_run:
                changed.setdefault(digest, []).append(module)
    return changed


def with_notes(cells: Sequence[Cell], results: Mapping[str, CellResult]) -> dict[str, CellResult]:
    """Results with a note on those that may not be of the present code, or whose run has warned."""
    notes: dict[str, str] = {}
    for digest, modules in changed_code(results).items():
        notes[digest] = f"run with another version of {', '.join(modules)}"
    for cell in cells:
        result = results.get(cell.digest)
        if result is not None and result.state == "done" and result.code is None:
            packages = set(re.findall(r'"class_path": "(\w+)\.', json.dumps(cell.config, default=str)))
            of_user = [package for package in sorted(packages) if is_own_module(package)]
            if of_user:
                notes[cell.digest] = f"run with an unknown version of {', '.join(of_user)}"
    noted = {}
    for digest, result in results.items():
        texts = [notes.get(digest, ""), *map(printable, result.warnings)]
        noted[digest] = replace(result, note="; ".join(filter(None, texts)))
    return noted
