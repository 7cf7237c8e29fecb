"""Collects what a module logs, as totals weighted by examples."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from fl_lightning.errors import require
from fl_lightning.sums import Weighted


class _Mean:
    """A running weighted mean. It counts how many values stayed finite, without waiting for the device at each step."""

    def __init__(self) -> None:
        self.weight = 0.0
        self.count = 0
        self._total = 0.0
        self._finite = 0
        self._pending: list[tuple[Tensor, float]] = []

    def add(self, value: Tensor, weight: float) -> None:
        # a step only appends to a list; reading the values would wait for the device
        self._pending.append((value, weight))
        self.weight += weight
        self.count += 1
        if len(self._pending) >= MANY:
            self._read()

    @property
    def total(self) -> float:
        self._read()
        return self._total

    @property
    def finite(self) -> int:
        """How many values were added before the total became nan or infinite."""
        self._read()
        return self._finite

    def _read(self) -> None:
        if self._pending:
            values = torch.stack([value for value, _ in self._pending]).tolist()
            for value, (_, weight) in zip(values, self._pending, strict=True):
                self._total += weight * value
                self._finite += math.isfinite(self._total)
            self._pending = []


class Logged:
    """Collects the values of ``self.log`` and the terms of the loss, in a visit or an evaluation.

    Attributes:
        batch_size: number of examples of the present batch, the weight of what is logged without one.
    """

    def __init__(self) -> None:
        self.batch_size = 1
        self._means: dict[str, _Mean] = {}
        self._marks: dict[str, tuple[float, float]] = {}
        self._metrics: dict[str, tuple[Metric, float]] = {}
        self._terms: dict[str, None] = {}
        self._named_by_module: set[str] = set()

    def begin_batch(self, size: int) -> None:
        """A batch of ``size`` examples, the weight of what is logged without one."""
        self.batch_size = size

    def clear(self) -> None:
        """Forget everything, for a new pass."""
        self._means, self._marks, self._metrics = {}, {}, {}
        self._terms, self._named_by_module = {}, set()

    def add(self, name: str, value: Any, weight: float | None = None) -> None:
        """Add a value that the module logged itself; it takes precedence over a term of the same name."""
        weight = self.batch_size if weight is None else weight
        if isinstance(value, Metric):
            _, seen = self._metrics.get(name, (value, 0))
            self._metrics[name] = (value, seen + weight)
            return
        self._named_by_module.add(name)
        self._mean(name, value, weight)

    def add_term(self, name: str, value: Tensor) -> None:
        """Add a term of the loss, which :meth:`first_bad_term` watches."""
        self._terms[name] = None
        if name not in self._named_by_module:
            self._mean(name, value, self.batch_size)

    def _mean(self, name: str, value: Any, weight: float) -> None:
        scalar = value.detach() if isinstance(value, Tensor) else torch.tensor(float(value))
        self._means.setdefault(name, _Mean()).add(scalar.reshape(()), weight)

    def first_bad_term(self) -> tuple[str, int] | None:
        """The term of the loss that was the first to be nan or infinite, and the step; None if all stayed finite."""
        finite = {name: self._means[name].finite for name in self._terms}
        bad = {name: steps for name, steps in finite.items() if steps < self._means[name].count}
        return min(bad.items(), key=lambda item: item[1]) if bad else None

    def mark(self) -> None:
        """Set the mark from which :meth:`current` counts."""
        self._marks = {name: (mean.total, mean.weight) for name, mean in self._means.items()}

    def current(self, name: str | None) -> float:
        """The mean of what was logged as ``name`` since the last mark, for a scheduler that watches it."""
        require(name in self._means, "monitor", name, f"it is not logged; choose one of {sorted(self._means)}")
        mean, (total, weight) = self._means[str(name)], self._marks.get(str(name), (0.0, 0.0))
        return (mean.total - total) / max(mean.weight - weight, 1)

    def take(self) -> dict[str, Weighted]:
        """The totals of the numbers logged so far, by name; they are then forgotten."""
        totals = {name: Weighted.summed(mean.total, mean.weight) for name, mean in self._means.items()}
        self._means = {}
        return totals

    def sums(self) -> dict[str, Weighted]:
        """As :meth:`take`, with torchmetrics objects: each gives its value, weighted by its examples, and is reset."""
        totals = self.take()
        for name, (metric, weight) in self._metrics.items():
            # this worker's value alone: the others may not compute this metric now, and it would wait for them
            metric.sync_on_compute = False
            totals[name] = Weighted.of(metric.compute(), weight)
            metric.reset()
        return totals


def tagged(phase: str, name: str) -> str:
    """``phase/name``; a name that already begins with its phase is kept as it is."""
    return name if name.startswith((f"{phase}/", f"{phase}_")) else f"{phase}/{name}"


# values of a mean after which they are read
MANY = 4096
