"""The result of a cell, as the study keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

State = Literal["waiting", "running", "done", "failed"]


@dataclass(frozen=True)
class Result:
    """What became of one cell.

    Args:
        cell: its name, which has the labels and the seed.
        digest: that of its config.
        state: whether it is ``waiting``, ``running``, ``done`` or ``failed``.
        reason: why it failed.
        values: the suite's metric by round.
        seconds: median seconds of a round, without the first; None where there are too few.
        plan: hash of the partition.
        metrics: all metrics of the last round.
        machine: what it ran on.
        run_dir: folder of its run.
        scale: share of the work that was done.
        code: a digest of each of the user's modules that it was run with; None where nobody knows.
        note: what a table says of it.
    """

    cell: str
    digest: str
    state: State
    reason: str = ""
    values: Mapping[int, float] = field(default_factory=dict)
    seconds: float | None = None
    plan: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    machine: str = ""
    run_dir: str = ""
    scale: float = 1.0
    code: Mapping[str, str] | None = None
    note: str = ""
