"""The statistics of a table: a mean over seeds, a paired difference with its interval, a verdict, ranks.

This is the one place that defines verdicts. Of a pair without a published number, :func:`decision` says how it stands
to the baseline; with one, :func:`verdict` says what became of the published difference.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from scipy import stats

Decision = Literal["no difference", "above", "below", "undecided"]
Verdict = Literal["no difference", "reversed", "reproduced", "same sign", "undecided"]
# the most seeds that an estimate names
MOST_SEEDS = 9999
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
        deviation: standard deviation of the differences, with n - 1 in the denominator; None where they tell none.
    """

    mean: float
    interval: tuple[float, float] | None
    n: int
    bound: str = ""
    why: str = ""
    deviation: float | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """What a footnote is to say of it."""
        return (f"no interval: {self.why}",) if self.why else ()


def summarize(values: Sequence[float]) -> SeedSummary | None:
    """The mean and the standard deviation of some numbers; None without a number."""
    if not values:
        return None
    return SeedSummary(float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None, len(values))


def half_width(n: Any, deviation: float, kind: str, confidence: float, prior_scale: float = 1.0) -> Any:
    r"""Half the length of the interval of a mean of n differences, for one n or an array of them.

    A ``sequence`` holds the mean at all n at once with the probability ``confidence``, if the differences are
    independent and normal with one mean and one variance. It may therefore be looked at after each pair, and a run may
    end whenever it says enough: its error holds at any time, however that is chosen. It comes from the mixture of
    likelihood ratios with the prior :math:`d\sigma / \sigma` of the standard deviation :math:`\sigma` and
    :math:`N(0, \sigma^2 / c^2)` of the mean, which is a martingale with mean 1 under the hypothesis that the mean is
    :math:`\mu`; the interval has all :math:`\mu` for which it is below :math:`1 / \alpha` (Wang and Ramdas,
    Anytime-valid t-tests and confidence sequences for Gaussian means with unknown variance,
    https://arxiv.org/abs/2310.03722, their Gaussian mixture):

    .. math::
        h_n = s \sqrt{\frac{1 - R}{n / (n + c^2) - (1 - R)}}, \qquad
        R = \left( \frac{\alpha^2 c^2}{n + c^2} \right)^{1 / n}

    Here :math:`s^2` is the variance with n in the denominator. Where the fraction is not positive, h is infinite.

    Args:
        n: number of pairs, 2 or more.
        deviation: standard deviation of the differences, with n - 1 in the denominator.
        kind: ``sequence``; others are by Student's t.
        confidence: the level, :math:`1 - \alpha`.
        prior_scale: 1/c, above 0.
    """
    n = np.asarray(n, dtype=float)
    if kind != "sequence":
        return stats.t.ppf((1 + confidence) / 2, n - 1) * deviation / np.sqrt(n)
    c2 = prior_scale**-2
    gap = -np.expm1((2 * math.log1p(-confidence) + np.log(c2 / (n + c2))) / n)
    rest = n / (n + c2) - gap
    with np.errstate(all="ignore"):
        return np.where(rest > 0, deviation * np.sqrt((n - 1) / n * gap / rest), np.inf)


def sequence_p(ours: Difference, prior_scale: float = 1.0) -> float:
    """Return the least alpha at which the confidence sequence of :func:`half_width` excludes 0.

    It is a p-value, in [0, 1], of "no difference" that holds at any look; 1 where the difference is only a bound.

    Args:
        ours: the mean difference of n pairs, with its deviation.
        prior_scale: scale of the differences that are expected, in deviations, above 0, as in :func:`half_width`.
    """
    if not ours.deviation or ours.bound:
        return 1.0
    n, c2, variance = ours.n, prior_scale**-2, ours.deviation**2 * (ours.n - 1) / ours.n
    shrunk = (variance + ours.mean**2 * c2 / (n + c2)) / (variance + ours.mean**2)
    return min(1.0, math.sqrt((n + c2) / c2) * shrunk ** (n / 2))


def holm(values: Sequence[float]) -> list[float]:
    """Return p-values in [0, 1] of m comparisons, corrected for their number, in the order given.

    The i-th smallest is multiplied by m - i, counted from 0, and is at least the one before it, so that an error holds
    for all comparisons together. Source: Holm, Scandinavian Journal of Statistics 6, 1979.
    """
    places, many = np.argsort(np.argsort(values)), len(values)
    rising = np.maximum.accumulate(np.sort(values) * np.arange(many, 0, -1))
    return [float(one) for one in np.minimum(rising, 1.0)[places]]


def paired_difference(
    pairs: Sequence[tuple[float, float]], kind: str, confidence: float, prior_scale: float = 1.0
) -> Difference | None:
    """The mean of first minus second, with its confidence interval; None without a pair.

    Equal differences have no interval: they would give one without width, as if more seeds could not differ.

    Args:
        pairs: a number and the baseline's, seed by seed.
        kind: how the interval is made, by Student's ``t``, by ``bootstrap`` or as a ``sequence``.
        confidence: its level, in (0, 1).
        prior_scale: that of a sequence, see :func:`half_width`.
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
        deviation = float(np.std(values, ddof=1))
        if kind != "bootstrap":
            half = float(half_width(n, deviation, kind, confidence, prior_scale))
            interval = mean - half, mean + half
        else:
            # Always the same 9,999 resamples. The smallest mean of a resample of n values has the probability n^-n: the
            # percentiles of two or three values are their smallest and largest one, up to a level of 1 - 2 n^-n.
            how: Any = {"method": "percentile", "random_state": np.random.default_rng(0)}
            ends = stats.bootstrap((values,), np.mean, confidence_level=confidence, **how).confidence_interval
            interval = float(ends.low), float(ends.high)
    if all(map(math.isfinite, interval)):
        return Difference(mean, interval, n, deviation=deviation)
    if kind == "sequence" and math.isfinite(deviation):
        why = f"{n} pairs are too few for a sequence at {100 * confidence:g} %"
        return Difference(mean, None, n, why=why, deviation=deviation)
    return Difference(mean, None, n, why="its ends are not finite")


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


def decision(ours: Difference | None, margin: float | None = None) -> Decision:
    """What an interval says of a difference to the baseline.

    Args:
        ours: the difference.
        margin: the largest difference that does not matter; None where nobody has said it.

    Returns:
        ``no difference`` where the interval lies within the margin, ``above`` or ``below`` where it lies on one side of
        0, and ``undecided`` otherwise, or without an interval.
    """
    low, high = ours.interval if ours is not None and ours.interval is not None else (math.nan, math.nan)
    if not low < high:  # true for nan, too
        return "undecided"
    if margin is not None and -margin <= low and high <= margin:
        return "no difference"
    return "above" if low > 0 else "below" if high < 0 else "undecided"


def verdict(ours: Difference | None, published: float | None, margin: float | None = None) -> Verdict | None:
    """What became of a published difference, in five words, of which the first that holds counts.

    Args:
        ours: our difference to the baseline, with its interval.
        published: the published difference to the baseline.
        margin: as for :func:`decision`.

    Returns:
        ``no difference`` where the interval lies within the margin; ``reversed`` where it lies on the other side of 0
        than the published difference; ``reproduced`` where it excludes 0, contains the published difference, and is
        shorter than that is large; ``same sign`` where it excludes 0; else ``undecided``. None where nothing is
        published, or the published numbers are equal.
    """
    if not published or math.isnan(published):
        return None
    decided = decision(ours, margin)
    if decided in ("no difference", "undecided"):
        return decided
    if (decided == "above") != (published > 0):
        return "reversed"
    assert ours is not None
    assert ours.interval is not None
    low, high = ours.interval
    return "reproduced" if low <= published <= high and high - low < abs(published) else "same sign"


def seeds_to_decide(
    ours: Difference | None, kind: str, confidence: float, prior_scale: float = 1.0, margin: float | None = None
) -> int | None:
    """About how many seeds decide an undecided difference, if its mean and its deviation stay as they are.

    That is the least number, above the present one, at which :func:`half_width` is below the absolute mean, so that the
    interval excludes 0, or below what is left of the margin, so that the interval lies within it. For a ``bootstrap``,
    which has no formula, it is Student's.

    Returns:
        The number; ``MOST_SEEDS`` + 1 for any larger one; None where nothing tells the deviation.
    """
    if ours is None or ours.deviation is None or ours.bound:
        return None
    n = np.arange(ours.n + 1, MOST_SEEDS + 1)
    needed = max(abs(ours.mean), (margin or 0.0) - abs(ours.mean))
    enough = n[half_width(n, ours.deviation, kind, confidence, prior_scale) < needed]
    return int(enough[0]) if len(enough) else MOST_SEEDS + 1


def ranks(values: Sequence[float], minimize: bool) -> list[float]:
    """The rank of each value, where 1 is best; equal values share the mean of their ranks."""
    return [float(rank) for rank in stats.rankdata(values if minimize else [-value for value in values])]
