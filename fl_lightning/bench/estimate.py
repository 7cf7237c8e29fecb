"""How long the cells of a suite will take: seconds of a finished cell of each kind, or of one measured round."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_lightning.bench.fragments import config_digest, look_up
from fl_lightning.bench.process import Runner
from fl_lightning.bench.results import CellResult
from fl_lightning.bench.suite import Cell


@dataclass(frozen=True)
class Estimate:
    """What the cells of one kind, which differ in their seed alone, will take.

    Args:
        kind: labels that they have in common.
        left: how many of them are to be run.
        rounds: rounds of each.
        seconds: seconds of a round; None where it could not be measured.
        beside: seconds of a cell beside its rounds.
        reason: why it could not be measured.
    """

    kind: str
    left: int
    rounds: int
    seconds: float | None
    beside: float = 0.0
    reason: str = ""

    @property
    def total(self) -> float:
        """Seconds of all of them, one after another."""
        return self.left * (self.rounds * (self.seconds or 0.0) + self.beside)


def estimates(
    cells: Sequence[Cell], results: Mapping[str, CellResult], metric: str, runner: Any = None
) -> Iterator[Estimate]:
    """What the cells will take that are not done, kind by kind.

    Args:
        cells: the cells.
        results: what there is of them already.
        metric: the suite's metric.
        runner: runs one round of a kind without a finished cell, in a temporary folder; None starts one.
    """
    kinds: dict[str, list[Cell]] = {}
    for cell in cells:
        kinds.setdefault(config_digest({**cell.config, "seed_everything": None}), []).append(cell)
    runner = runner or Runner()
    try:
        for alike in kinds.values():
            left = [cell for cell in alike if results[cell.digest].state in ("waiting", "running")]
            rounds = int(look_up(alike[0].config, "trainer.max_rounds", 10))
            kind = alike[0].name.rpartition(",")[0] or alike[0].name
            known = [seconds for cell in alike if (seconds := results[cell.digest].seconds) is not None]
            if not left or known:
                yield Estimate(kind, len(left), rounds, sum(known) / len(known) if known else None)
            else:
                yield measured_estimate(kind, left, rounds, metric, runner)
    finally:
        runner.close()


def measured_estimate(kind: str, left: Sequence[Cell], rounds: int, metric: str, runner: Any) -> Estimate:
    """What the cells of one kind will take, from one round in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="fl_lightning-") as folder:
        fragments = [*left[0].fragments, {"trainer": {"max_rounds": 1}}]
        places = {"folder": "round", "output": folder, "log": str(Path(folder) / "log")}
        began = time.monotonic()
        answer = runner.run({"name": kind, "fragments": fragments, "metric": metric, **places}, lambda *_: None)
        whole = time.monotonic() - began
    if "failed" in answer:
        return Estimate(kind, len(left), rounds, None, reason=answer["failed"])
    seconds = answer["done"]["metrics"]["time/round"]
    return Estimate(kind, len(left), rounds, seconds, max(0.0, whole - seconds))


def as_time(seconds: float) -> str:
    """A duration as text, such as ``1 h 20 min``."""
    if seconds < 100:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
