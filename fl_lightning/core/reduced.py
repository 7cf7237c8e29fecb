"""Reductions of logged values: mean, sum, max and min."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from fl_lightning.core.weighted import Weighted

Kind = Literal["mean", "sum", "max", "min"]
KINDS: tuple[Kind, ...] = get_args(Kind)
# the total of no values
EMPTY: dict[Kind, float] = {"mean": 0.0, "sum": 0.0, "max": -math.inf, "min": math.inf}


@dataclass(frozen=True)
class Reduced:
    """The reduction of several values.

    Args:
        kind: the reduction.
        total: their weighted sum for ``mean``; else their sum, largest or smallest.
        weight: the sum of their weights.
    """

    kind: Kind
    total: float
    weight: float = 1.0

    @property
    def value(self) -> float:
        """Return the mean, sum, maximum or minimum; a mean without weight is 0."""
        if self.kind != "mean":
            return self.total
        return self.total / self.weight if self.weight else 0.0


def join(kind: Kind, a: float, b: float) -> float:
    """Combine two totals; nan if either is."""
    if kind in ("mean", "sum"):
        return a + b
    if math.isnan(a) or math.isnan(b):
        return math.nan
    # adding 0 turns -0 into 0, since max and min of 0 and -0 depend on the order of their arguments
    return (max(a, b) if kind == "max" else min(a, b)) + 0.0


def addable(values: Mapping[str, Reduced]) -> dict[str, dict[str, Weighted]]:
    """Return the means and sums among ``values``, which can be added, by kind and name."""
    by_kind: dict[str, dict[str, Weighted]] = {"mean": {}, "sum": {}}
    for name, value in values.items():
        if value.kind in by_kind:
            by_kind[value.kind][name] = Weighted.summed(value.total, value.weight)
    return by_kind


def update_extremes(extremes: dict[str, Reduced], values: Mapping[str, Reduced]) -> None:
    """Update the maxima and minima of a run by those among ``values``, in any order; ignore other kinds."""
    for name, value in values.items():
        if value.kind in ("max", "min"):
            before = extremes.get(name, value)
            extremes[name] = Reduced(value.kind, join(value.kind, before.total, value.total))


def reduced(totals: Mapping[str, Any], extremes: Mapping[str, Reduced]) -> dict[str, float]:
    """Return the value of each name, from sums over :func:`addable` values, and from the maxima and minima."""
    means = {name: float(total.mean()) for name, total in totals.get("mean", {}).items()}
    sums = {name: float(total.total) for name, total in totals.get("sum", {}).items()}
    return {**means, **sums, **{name: extreme.value for name, extreme in extremes.items()}}
