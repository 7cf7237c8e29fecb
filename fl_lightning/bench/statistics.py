"""The statistics of a table: a mean over seeds, a paired difference with its interval, a verdict, ranks."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from scipy import stats

Verdict = Literal["reproduced", "reversed", "undecided"]
# equal numbers, averaged in another order, differ by less than this many decimals show
DECIMALS = 12


@dataclass(frozen=True)
class SeedSummary:
    """Numbers of several seeds.

    Args:
        mean: their mean.
        deviation: their standard deviation, with n - 1 in the denominator; None for one number.
        n: how many there are.
    """

    mean: float
    deviation: float | None
    n: int


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences.

    Args:
        mean: the mean.
        interval: its confidence interval; None for one pair, for a bound, and where the pairs tell none.
        n: number of pairs.
        bound: ``>`` where the difference is at least the mean, ``<`` where it is at most the mean.
        why: why two or more pairs tell no interval; empty where they do, and for a bound.
    """

    mean: float
    interval: tuple[float, float] | None
    n: int
    bound: str = ""
    why: str = ""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a footnote is to say of it."""
        return (f"no interval: {self.why}",) if self.why else ()


def summarize(values: Sequence[float]) -> SeedSummary | None:
    """The mean and the standard deviation of some numbers; None without a number."""
    if not values:
        return None
    return SeedSummary(float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None, len(values))


def paired_difference(pairs: Sequence[tuple[float, float]], kind: str, confidence: float) -> Difference | None:
    """The mean of first minus second, with its confidence interval; None without a pair.

    Equal differences have no interval: they would give one without width, as if more seeds could not differ.

    Args:
        pairs: a number and the baseline's, seed by seed.
        kind: how the interval is made, by Student's ``t`` or by ``bootstrap``.
        confidence: its level, in (0, 1).
    """
    if not pairs:
        return None
    n = len(pairs)
    with np.errstate(all="ignore"):  # what is beyond a float's range leaves an interval that is not finite
        values = np.array([round(ours - theirs, DECIMALS) for ours, theirs in pairs])
        mean = float(values.mean())
        if n == 1:
            return Difference(mean, None, n)
        if np.ptp(values) <= 10.0**-DECIMALS * max(1.0, float(np.abs(pairs).max())):
            return Difference(mean, None, n, why=f"the differences of the {n} pairs are equal, which tells no spread")
        if kind == "bootstrap" and 2 / n**n >= 1 - confidence:
            return Difference(mean, None, n, why=f"{n} pairs are too few for a bootstrap at {100 * confidence:g} %")
        if not np.isfinite(values).all():
            return Difference(mean, None, n, why="a difference is not finite")
        if kind == "t":
            half = float(stats.t.ppf((1 + confidence) / 2, n - 1) * stats.sem(values))
            interval = mean - half, mean + half
        else:
            # Always the same 9,999 resamples. The smallest mean of a resample of n values has the probability n^-n: the
            # percentiles of two or three values are their smallest and largest one, up to a level of 1 - 2 n^-n.
            how: Any = {"method": "percentile", "random_state": np.random.default_rng(0)}
            ends = stats.bootstrap((values,), np.mean, confidence_level=confidence, **how).confidence_interval
            interval = float(ends.low), float(ends.high)
    finite = all(map(math.isfinite, interval))
    return Difference(mean, interval if finite else None, n, why="" if finite else "its ends are not finite")


def bounded(difference: Difference | None, bounds: Collection[str]) -> Difference | None:
    """A difference of pairs of which some are bounds, which leave no interval; None where they bound it on two sides.

    Args:
        difference: the difference.
        bounds: what the pairs are: ``>``, ``<`` or, for numbers that are known, nothing.
    """
    sides = {side for side in bounds if side}
    if difference is None or not sides:
        return difference
    return replace(difference, interval=None, bound=sides.pop(), why="") if len(sides) == 1 else None


def verdict(ours: Difference | None, published: float | None) -> Verdict | None:
    """Whether a difference has the sign of the published one.

    Args:
        ours: difference to the baseline, with its interval.
        published: the published difference to the baseline.

    Returns:
        ``undecided`` where the interval contains 0 or has no width, or there is none; None where nothing is published,
        or the published numbers are equal.
    """
    if not published or math.isnan(published):
        return None
    low, high = ours.interval if ours is not None and ours.interval is not None else (0.0, 0.0)
    if not (0 < low < high or low < high < 0):  # false for nan, too
        return "undecided"
    return "reproduced" if (low > 0) == (published > 0) else "reversed"


def ranks(values: Sequence[float], minimize: bool) -> list[float]:
    """The rank of each value, where 1 is best; equal values share the mean of their ranks."""
    return [float(rank) for rank in stats.rankdata(values if minimize else [-value for value in values])]
