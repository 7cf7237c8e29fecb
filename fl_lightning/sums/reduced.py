"""Logged values by their reduction: mean, sum, max or min."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from fl_lightning.sums.weighted import Weighted

Kind = Literal["mean", "sum", "max", "min"]
KINDS: tuple[Kind, ...] = get_args(Kind)
# the total of no values
EMPTY: dict[Kind, float] = {"mean": 0.0, "sum": 0.0, "max": -math.inf, "min": math.inf}


@dataclass(frozen=True)
class Reduced:
    """Values that were reduced to one.

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
        """The mean, sum, maximum or minimum; a mean of no weight is 0."""
        if self.kind != "mean":
            return self.total
        return self.total / self.weight if self.weight else 0.0


def join(kind: Kind, one: float, other: float) -> float:
    """The total of two totals; nan if one of them is."""
    if kind in ("mean", "sum"):
        return one + other
    if math.isnan(one) or math.isnan(other):
        return math.nan
    # adding 0 makes 0 of -0, which max and min would give by the order of their arguments
    return (max(one, other) if kind == "max" else min(one, other)) + 0.0


def addable(values: Mapping[str, Reduced]) -> dict[str, dict[str, Weighted]]:
    """The means and sums among ``values``, which can be added, by kind and name."""
    return {
        kind: {name: Weighted.summed(one.total, one.weight) for name, one in values.items() if one.kind == kind}
        for kind in ("mean", "sum")
    }


class Extremes:
    """The largest and smallest among values by name; their order has no effect."""

    def __init__(self) -> None:
        self.values: dict[str, Reduced] = {}

    def add(self, values: Mapping[str, Reduced]) -> None:
        """Take the maxima and minima among ``values`` into account; other kinds are left out."""
        for name, one in values.items():
            if one.kind in ("max", "min"):
                before = self.values.get(name, one)
                self.values[name] = Reduced(one.kind, join(one.kind, before.total, one.total))

    def merge(self, workers: Iterable[Mapping[str, Reduced]]) -> None:
        """Take the values of all workers into account."""
        for values in workers:
            self.add(values)


def reduced(totals: Mapping[str, Any], extremes: Extremes) -> dict[str, float]:
    """The value of each name.

    Args:
        totals: sums over what :func:`addable` gives.
        extremes: the maxima and minima.
    """
    means = {name: float(total.mean()) for name, total in totals.get("mean", {}).items()}
    sums = {name: float(total.total) for name, total in totals.get("sum", {}).items()}
    return {**means, **sums, **{name: one.value for name, one in extremes.values.items()}}
