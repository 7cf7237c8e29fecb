"""The metrics of a run: a row of values per round."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class Metrics:
    """The metrics of the present and of all completed rounds.

    Attributes:
        current: metrics of the present round, by tag.
        history: metrics of each completed round, by tag.
        not_finite: tags of the metrics that were nan or infinite in a round.
    """

    def __init__(self) -> None:
        self.current: dict[str, float] = {}
        self.history: list[dict[str, float]] = []
        self.not_finite: set[str] = set()
        self._carried = 0.0
        self._began = 0.0

    def begin(self, round_: int) -> None:
        """Begin the row of a round."""
        self.current, self._began = {"round": round_}, time.perf_counter()

    def end(self) -> None:
        """Complete the row, and add it to the history."""
        self.current["time/log"] = self.current.get("time/log", 0.0) + self._carried
        self.current["time/round"] = time.perf_counter() - self._began
        self.history.append(self.current)
        self._carried = 0.0

    def update(self, values: Mapping[str, float]) -> None:
        """Add values to the row."""
        self.current.update(values)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the seconds of a block to ``time/<phase>``."""
        began = time.perf_counter()
        yield
        self.current[f"time/{phase}"] = self.current.get(f"time/{phase}", 0.0) + time.perf_counter() - began

    @contextmanager
    def timed_writing(self) -> Iterator[None]:
        """Add the seconds of a block after the end of a row to ``time/log`` of the next row."""
        began = time.perf_counter()
        yield
        self._carried += time.perf_counter() - began
