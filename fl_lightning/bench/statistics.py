"""The statistics of a table: means over seeds, paired differences with intervals, verdicts, ranks.

:func:`decision` compares a pair with the baseline, and :func:`verdict` compares the pair's difference with a published
one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from scipy import stats

Decision = Literal["no difference", "above", "below", "undecided"]
Verdict = Literal["no difference", "reversed", "reproduced", "same sign", "undecided"]
# prefixes of the tags of clients' models, and which models these are, unless those at the beginning of a visit
POINTS = {
    "personal/": "",
    "personal/trained/": "of the models at the end of a visit",
    "personal/adapted/": "of models adapted from the global one",
}
# values of :func:`fairness` that compare with the clients' own accuracies in a run of ``Local``
GAINS = ("gain", "gain_worst", "helped")
# greatest estimate of a number of seeds
MOST_SEEDS = 9999
# decimals beyond which numbers differ only by the order of additions
DECIMALS = 12


@dataclass(frozen=True)
class SeedSummary:
    """Numbers of several seeds.

    Args:
        mean: the mean.
        deviation: the standard deviation with n - 1 in the denominator; None for one number.
        n: number of numbers.
    """

    mean: float
    deviation: float | None
    n: int


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences.

    Args:
        mean: the mean.
        interval: its confidence interval; None for one pair, for a bound, or as ``why`` states.
        n: number of pairs.
        bound: ``>`` if the difference is at least the mean, ``<`` if it is at most the mean.
        why: reason why two or more pairs have no interval; otherwise empty.
        deviation: standard deviation of the differences with n - 1 in the denominator; None without a spread.
    """

    mean: float
    interval: tuple[float, float] | None
    n: int
    bound: str = ""
    why: str = ""
    deviation: float | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """The texts of its footnotes."""
        return (f"no interval: {self.why}",) if self.why else ()


def summarize(values: Sequence[float]) -> SeedSummary | None:
    """Return the mean and the standard deviation of numbers; None without a number."""
    if not values:
        return None
    return SeedSummary(float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None, len(values))


def half_width(n: Any, deviation: float, kind: str, confidence: float, prior_scale: float = 1.0) -> Any:
    r"""Return half the length of the interval of a mean of n differences, for a number or an array n.

    A ``sequence`` contains the mean at all n simultaneously with probability ``confidence``, if the differences are
    independent and normal with one mean and one variance. It may therefore be inspected after each pair, and sampling
    may stop at any time without a greater error. It comes from the mixture of likelihood ratios with the prior
    :math:`d\sigma / \sigma` of the standard deviation :math:`\sigma` and :math:`N(0, \sigma^2 / c^2)` of the mean,
    which is a martingale with mean 1 under the hypothesis that the mean is :math:`\mu`; the interval contains all
    :math:`\mu` for which it is below :math:`1 / \alpha` (Wang and Ramdas, Anytime-valid t-tests and confidence
    sequences for Gaussian means with unknown variance, https://arxiv.org/abs/2310.03722, their Gaussian mixture):

    .. math::
        h_n = s \sqrt{\frac{1 - R}{n / (n + c^2) - (1 - R)}}, \qquad
        R = \left( \frac{\alpha^2 c^2}{n + c^2} \right)^{1 / n}

    Here :math:`s^2` is the variance with n in the denominator. If the fraction is not positive, h is infinite.

    Args:
        n: number of pairs, 2 or more.
        deviation: standard deviation of the differences, with n - 1 in the denominator.
        kind: ``sequence``, or any other value for Student's t.
        confidence: the level, :math:`1 - \alpha`.
        prior_scale: 1/c, above 0.
    """
    n = np.asarray(n, dtype=float)
    if kind != "sequence":
        return stats.t.ppf((1 + confidence) / 2, n - 1) * deviation / np.sqrt(n)
    c2 = prior_scale**-2
    gap = -np.expm1((2 * math.log1p(-confidence) + np.log(c2 / (n + c2))) / n)
    denominator = n / (n + c2) - gap
    with np.errstate(all="ignore"):
        return np.where(denominator > 0, deviation * np.sqrt((n - 1) / n * gap / denominator), np.inf)


def p_value(difference: Difference, kind: str, prior_scale: float = 1.0) -> float:
    """Return the two-sided p-value in [0, 1] of "no difference"; 1 if the difference is a bound.

    For a ``sequence``, it is the least alpha at which the interval of :func:`half_width` excludes 0, and valid at any
    look; for any other kind, the p-value of Student's paired t-test.

    Args:
        difference: the mean difference of n pairs, with its deviation.
        kind: kind of interval, as in :func:`half_width`.
        prior_scale: scale of the differences that are expected, in deviations, above 0, as in :func:`half_width`.
    """
    n, mean, deviation = difference.n, difference.mean, difference.deviation
    if not deviation or difference.bound:
        return 1.0
    if kind != "sequence":
        return float(2 * stats.t.sf(abs(mean) * math.sqrt(n) / deviation, n - 1))
    c2, variance = prior_scale**-2, deviation**2 * (n - 1) / n
    shrunk = (variance + mean**2 * c2 / (n + c2)) / (variance + mean**2)
    return min(1.0, math.sqrt((n + c2) / c2) * shrunk ** (n / 2))


def holm(values: Sequence[float]) -> list[float]:
    """Return p-values in [0, 1] of m comparisons, corrected for their number, in the order given.

    The i-th smallest, counted from 0, is multiplied by m - i and is at least the one before it, so that the error is
    that of all comparisons together. Source: Holm, Scandinavian Journal of Statistics 6, 1979.
    """
    places, many = np.argsort(np.argsort(values)), len(values)
    rising = np.maximum.accumulate(np.sort(values) * np.arange(many, 0, -1))
    corrected: list[float] = np.minimum(rising, 1.0)[places].tolist()
    return corrected


def paired_difference(
    pairs: Sequence[tuple[float, float]], kind: str, confidence: float, prior_scale: float = 1.0
) -> Difference | None:
    """Return the mean of first minus second with its confidence interval; None without a pair.

    Equal differences have no interval, since an interval of length 0 would claim that more seeds could not differ.

    Args:
        pairs: a number and the baseline's, seed by seed.
        kind: kind of interval: Student's ``t`` or ``sequence``.
        confidence: its level, in (0, 1).
        prior_scale: for a sequence, see :func:`half_width`.
    """
    if not pairs:
        return None
    n = len(pairs)
    with np.errstate(all="ignore"):  # overflow makes the interval infinite
        values = np.array([round(number - of_baseline, DECIMALS) for number, of_baseline in pairs])
        mean = float(values.mean())
        if n == 1:
            return Difference(mean, None, n)
        if np.ptp(values) <= 10.0**-DECIMALS * max(1.0, float(np.abs(pairs).max())):
            return Difference(mean, None, n, why=f"the differences of the {n} pairs are equal")
        if not np.isfinite(values).all():
            return Difference(mean, None, n, why="a difference is not finite")
        deviation = float(np.std(values, ddof=1))
        half = float(half_width(n, deviation, kind, confidence, prior_scale))
        interval = mean - half, mean + half
    if all(map(math.isfinite, interval)):
        return Difference(mean, interval, n, deviation=deviation)
    if kind == "sequence" and math.isfinite(deviation):
        why = f"{n} pairs are too few for a sequence at {100 * confidence:g} %"
        return Difference(mean, None, n, why=why, deviation=deviation)
    return Difference(mean, None, n, why="its ends are not finite")


def bounded(difference: Difference | None, bounds: Collection[str]) -> Difference | None:
    """Return a difference with its bound, which replaces the interval; None if it is bounded on both sides.

    Args:
        difference: the difference.
        bounds: bounds of the pairs: ``>``, ``<``, or empty for exact pairs.
    """
    sides = {side for side in bounds if side}
    if difference is None or not sides:
        return difference
    return replace(difference, interval=None, bound=sides.pop(), why="") if len(sides) == 1 else None


def decision(difference: Difference | None, margin: float | None = None) -> Decision:
    """Return the decision on a difference to the baseline.

    Args:
        difference: the difference.
        margin: greatest difference that does not matter; None if not stated.

    Returns:
        ``no difference`` if the interval lies within the margin, ``above`` or ``below`` if it lies on one side of 0,
        and ``undecided`` otherwise, or without an interval.
    """
    interval = difference.interval if difference is not None else None
    low, high = interval or (math.nan, math.nan)
    if not low < high:  # also for nan
        return "undecided"
    if margin is not None and -margin <= low and high <= margin:
        return "no difference"
    return "above" if low > 0 else "below" if high < 0 else "undecided"


def verdict(difference: Difference | None, published: float | None, margin: float | None = None) -> Verdict | None:
    """Return the verdict on a published difference: the first of five that applies.

    Args:
        difference: our difference to the baseline, with its interval.
        published: the published difference to the baseline.
        margin: as for :func:`decision`.

    Returns:
        ``no difference`` if the interval lies within the margin; ``reversed`` if it lies on the other side of 0 than
        the published difference; ``reproduced`` if it excludes 0, contains the published difference, and is shorter
        than its absolute value; ``same sign`` if it excludes 0; otherwise ``undecided``. None without a published
        difference, or if that is 0.
    """
    if not published or math.isnan(published):
        return None
    decided = decision(difference, margin)
    if decided in ("no difference", "undecided"):
        return decided
    if (decided == "above") != (published > 0):
        return "reversed"
    assert difference is not None
    assert difference.interval is not None
    low, high = difference.interval
    return "reproduced" if low <= published <= high and high - low < abs(published) else "same sign"


def seeds_to_decide(
    difference: Difference | None, kind: str, confidence: float, prior_scale: float = 1.0, margin: float | None = None
) -> int | None:
    """Estimate the number of seeds that decide an undecided difference, if its mean and deviation do not change.

    It is the least greater number at which :func:`half_width` is below the absolute mean, so that the interval excludes
    0, or below the margin minus the absolute mean, so that the interval lies within the margin.

    Returns:
        The number; ``MOST_SEEDS`` + 1 for any greater one; None without a deviation.
    """
    if difference is None or difference.deviation is None or difference.bound:
        return None
    n = np.arange(difference.n + 1, MOST_SEEDS + 1)
    width = max(abs(difference.mean), (margin or 0.0) - abs(difference.mean))
    enough = n[half_width(n, difference.deviation, kind, confidence, prior_scale) < width]
    return int(enough[0]) if len(enough) else MOST_SEEDS + 1


def ranks(values: Sequence[float], minimize: bool) -> list[float]:
    """Return the rank of each value, where 1 is best; equal values share the mean of their ranks."""
    rising: list[float] = stats.rankdata(np.array(values) if minimize else -np.array(values)).tolist()
    return rising


def fairness(metrics: Mapping[str, float], local: Mapping[str, float]) -> dict[str, float]:
    r"""Return how even the accuracies :math:`a_k` of the clients are, by name; names without a metric are omitted.

    ``accuracy``, ``worst_tenth`` and ``spread`` are as the callback ``PersonalAccuracy`` logs them, ``variance`` is the
    square of ``spread``, and ``noise`` the part of it that small test sets explain. With the accuracies :math:`l_k`
    of the same clients in a run of ``Local``, ``gain`` is the mean of :math:`a_k - l_k`, ``gain_worst`` the least, and
    ``helped`` the share of the clients with :math:`a_k > l_k`. All clients count the same.

    Args:
        metrics: metrics of a run.
        local: metrics of a run of ``Local`` with the same seed, model, partition and local steps; empty without one.
    """
    names = ("accuracy", "worst_tenth", "spread")
    point = point_of(metrics)
    values = {name: metrics[f"{point}{name}"] for name in names if f"{point}{name}" in metrics}
    if "spread" in values:
        values["variance"] = values["spread"] ** 2
    if "fair/noise" in metrics:
        values["noise"] = metrics["fair/noise"]
    of_local = {tag.removeprefix("personal/client/"): value for tag, value in local.items()}
    of_clients = {tag.removeprefix(f"{point}client/"): value for tag, value in metrics.items()}
    gains = [value - of_local[k] for k, value in of_clients.items() if k.isdecimal() and k in of_local]
    if gains:
        helped = sum(gain > 0 for gain in gains) / len(gains)
        values |= dict(zip(GAINS, (math.fsum(gains) / len(gains), min(gains), helped), strict=True))
    return values


def point_of(metrics: Mapping[str, float]) -> str:
    """Return the prefix of the accuracies of the clients' models, the first of :data:`POINTS` by default."""
    return next((point for point in POINTS if f"{point}accuracy" in metrics), next(iter(POINTS)))
