"""The statistics of tables agree with formulas by hand, and the guide quotes what is simulated here."""

import math
from pathlib import Path

import numpy as np
import pytest
from scipy import integrate, stats

from fl_lightning.bench.statistics import (
    MOST_SEEDS,
    Difference,
    bounded,
    decision,
    half_width,
    holm,
    p_value,
    paired_difference,
    ranks,
    seeds_to_decide,
    summarize,
    verdict,
)

GUIDE = " ".join((Path(__file__).resolve().parents[2] / "docs" / "bench.md").read_text().split())


def test_a_summary_of_none_one_and_many():
    assert summarize([]) is None
    assert (summarize([3.0]).mean, summarize([3.0]).deviation, summarize([3.0]).n) == (3.0, None, 1)
    assert summarize([1.0, 2.0, 6.0]).deviation == pytest.approx(math.sqrt((4 + 1 + 9) / 2))


def test_pairs_are_subtracted_before_the_spread_is_taken():
    """Seeds differ much, the differences do not."""
    low, high = paired_difference([(1.0, 0.0), (100.0, 99.0), (51.1, 50.0)], "t", 0.95).interval
    assert 0.8 < low < high < 1.3


def test_equal_numbers_in_another_order_of_addition_differ_by_0():
    """0.1 + 0.2 + 0.3 depends on the order in floating-point arithmetic; a tie is no win."""
    found = paired_difference([((0.1 + 0.2) + 0.3, 0.1 + (0.2 + 0.3))] * 3, "t", 0.95)
    assert (found.mean, found.interval, found.n) == (0.0, None, 3)
    assert verdict(found, 1.0) == "undecided"


@pytest.mark.parametrize("published", [1.0, -1.0])
@pytest.mark.parametrize(
    "pairs",
    [
        [(3.0, 1.0)] * 2,
        [(3.0, 1.0)] * 5,
        [(1e9 + 0.1 + 0.2, 1e9), (1e9 + 0.3, 1e9)] * 2,  # they differ by less than a float of their size can tell
        [(math.inf, 1.0), (2.0, 1.0), (3.0, 1.0), (2.0, 1.5)],
        [(-math.inf, 1.0), (2.0, 1.0), (3.0, 1.0), (2.0, 1.5)],
        [(math.nan, 1.0), (2.0, 1.0), (3.0, 1.0), (2.0, 1.5)],
        [(math.inf, math.inf)] * 4,
        [(1e308, -1e308), (3.0, 1.0), (3.0, 2.0), (3.0, 1.5)],
    ],
    ids=str,
)
def test_what_tells_no_spread_has_no_interval_and_decides_nothing(pairs, published):
    made = paired_difference(pairs, "t", 0.95)
    assert made.interval is None and made.why and made.why in made.notes[0]
    assert verdict(made, published) == "undecided"


def test_one_pair_a_bound_and_a_level_that_rounds_to_one_have_no_interval():
    assert paired_difference([], "t", 0.95) is None and verdict(None, 2.0) == "undecided"
    assert paired_difference([(3.0, 1.0)], "t", 0.95) == Difference(2.0, None, 1)
    assert bounded(paired_difference([(3.0, 1.0)] * 2, "t", 0.95), [">", ""]) == Difference(2.0, None, 2, ">")
    assert paired_difference([(3.0, 1.0), (5.0, 2.0)], "t", 1 - 2**-53).interval is None


@pytest.mark.parametrize(
    ("interval", "published", "expected"),
    [
        ((0.5, 1.5), 1.2, "reproduced"),
        ((0.5, 1.5), 1.0, "same sign"),  # the interval is as long as the difference
        ((0.5, 1.5), 2.0, "same sign"),  # which lies outside
        ((0.5, 1.5), -2.0, "reversed"),
        ((-1.5, -0.5), -1.2, "reproduced"),
        ((-1.5, -0.5), -2.0, "same sign"),
        ((-1.5, -0.5), 2.0, "reversed"),
        ((-0.5, 2.5), 2.0, "undecided"),
        ((0.0, 2.0), 2.0, "undecided"),
        (None, 2.0, "undecided"),
        ((0.5, 1.5), None, None),
        ((0.5, 1.5), 0.0, None),
        ((0.5, 1.5), math.nan, None),
        ((1.0, 1.0), 2.0, "undecided"),
        ((math.nan, math.nan), 2.0, "undecided"),
        ((math.nan, math.nan), -2.0, "undecided"),
        ((-math.inf, math.inf), 2.0, "undecided"),
    ],
)
def test_a_verdict(interval, published, expected):
    mean = 1.0 if interval is None else sum(interval) / 2
    assert verdict(Difference(mean, interval, 3), published) == expected


@pytest.mark.parametrize(
    ("interval", "margin", "of_pair", "of_published"),
    [
        ((0.5, 1.5), 1.5, "no difference", "no difference"),  # it comes before what the sign says
        ((-1.5, -0.5), 1.5, "no difference", "no difference"),
        ((0.5, 1.5), 1.4, "above", "reproduced"),
        ((-1.5, -0.5), 1.4, "below", "reversed"),
        ((-0.5, 1.5), 1.4, "undecided", "undecided"),
        ((0.0, 1.5), 1.4, "undecided", "undecided"),
        ((1.0, 1.0), 9.0, "undecided", "undecided"),
        (None, 9.0, "undecided", "undecided"),
    ],
)
def test_a_margin_comes_first(interval, margin, of_pair, of_published):
    ours = Difference(1.0, interval, 5)
    assert decision(ours, margin) == of_pair
    assert verdict(ours, 1.2, margin) == of_published
    assert decision(ours, None) != "no difference"


def test_the_ends_of_a_sequence_are_where_the_mixture_of_likelihood_ratios_is_one_by_alpha():
    """The mixture itself by quadrature: over sigma with d sigma / sigma, over the mean with N(0, sigma^2 / c^2)."""
    values, scale, alpha = np.array([1.2, 0.3, 2.0, 1.1, 0.4, 0.9, 1.6]), 0.7, 0.1
    low, high = paired_difference([(one, 0.0) for one in values], "sequence", 1 - alpha, scale).interval

    def likelihood(sigma, mean):
        return math.exp(-sum((values - mean) ** 2) / (2 * sigma**2)) / sigma ** len(values)

    for at in (low, high):

        def mixed(sigma, at=at):
            prior = stats.norm(at, sigma * scale).pdf
            ends = at - 8 * sigma * scale, at + 8 * sigma * scale
            return integrate.quad(lambda mean: likelihood(sigma, mean) * prior(mean), *ends, points=[at])[0] / sigma

        above = integrate.quad(mixed, 0.05, 60, limit=400, points=[0.3, 1, 3])[0]
        below = integrate.quad(lambda sigma, at=at: likelihood(sigma, at) / sigma, 0.05, 60, points=[0.3, 1, 3])[0]
        assert above / below == pytest.approx(1 / alpha, rel=1e-4)


def test_the_half_width_of_a_sequence_by_hand():
    r = (0.05**2 / 21) ** (1 / 20)
    of_biased = math.sqrt((1 - r) / (20 / 21 - (1 - r)))
    assert of_biased == pytest.approx(0.786, abs=5e-4)
    assert half_width(20, 1.0, "sequence", 0.95) == pytest.approx(of_biased * math.sqrt(19 / 20))
    assert np.isinf(half_width([2, 3, 4], 1.0, "sequence", 0.95)).all()
    assert half_width(3, 1.0, "t", 0.95) == pytest.approx(4.30265 / math.sqrt(3), rel=1e-5)  # a printed table


def test_the_p_value_of_students_test_is_scipys():
    found = paired_difference([(one, 0.0) for one in [1.2, 0.3, -2.0, 1.1, 0.4]], "t", 0.95)
    assert p_value(found, "t") == pytest.approx(stats.ttest_1samp([1.2, 0.3, -2.0, 1.1, 0.4], 0).pvalue)
    assert half_width(found.n, found.deviation, "t", 1 - p_value(found, "t")) == pytest.approx(found.mean)


@pytest.mark.parametrize("scale", [0.4, 1.0])
def test_the_p_value_of_a_sequence_is_the_error_at_which_an_end_is_0(scale):
    found = paired_difference([(one, 0.0) for one in [1.2, 0.3, 2.0, 1.1, 0.4, 0.9, 1.6]], "sequence", 0.9, scale)
    p = p_value(found, "sequence", scale)
    assert 0 < p < 1
    assert half_width(found.n, found.deviation, "sequence", 1 - p, scale) == pytest.approx(found.mean)
    # two differences of 3 and 1: by hand sqrt(3) (1 + 4/3) / (1 + 4)
    two = Difference(2.0, None, 2, deviation=math.sqrt(2))
    assert p_value(two, "sequence") == pytest.approx(math.sqrt(3) * (1 + 4 / 3) / 5)
    for tells_nothing in (Difference(2.0, None, 1), Difference(2.0, None, 2, bound=">", deviation=0.1)):
        assert p_value(tells_nothing, "sequence") == p_value(tells_nothing, "t") == 1


def test_p_values_are_corrected_by_holm_as_by_hand():
    # the least times 4, the next times 3, ..., at most 1, and none below a smaller one
    assert holm([0.02, 0.01, 0.6, 0.015]) == pytest.approx([0.045, 0.04, 0.6, 0.045])
    assert holm([0.9, 0.4, 0.4]) == [1.0, 1.0, 1.0]
    assert holm([]) == []


def ever_missed(draws, kind, prior_scale=1.0):
    """The share of rows whose true mean, 0, lies outside the interval after any of 2, 3, ... numbers."""
    n = np.arange(1, draws.shape[1] + 1)
    means = draws.cumsum(1) / n
    deviations = np.sqrt(np.maximum((draws**2).cumsum(1) / n - means**2, 0)[:, 1:] * n[1:] / (n[1:] - 1))
    return (np.abs(means[:, 1:]) > half_width(n[1:], 1.0, kind, 0.95, prior_scale) * deviations).any(1).mean()


@pytest.mark.parametrize("prior_scale", [0.5, 1.0, 2.0])
def test_a_sequence_that_is_looked_at_after_each_pair_holds_and_student_s_interval_does_not(prior_scale):
    """Of 20,000 rows, 5 % have a standard error of 0.15 %."""
    draws = np.random.default_rng(0).normal(size=(20_000, 40))
    assert 0.005 < ever_missed(draws, "sequence", prior_scale) <= 0.05
    assert ever_missed(draws, "t") > 0.2


def test_the_guide_says_how_often_a_mean_is_missed_in_20_looks_and_what_a_sequence_costs():
    draws = np.random.default_rng(0).normal(size=(20_000, 20))
    assert f"misses the true mean at some look in {100 * ever_missed(draws, 't'):.0f} % of the cases" in GUIDE
    assert f"the sequence misses the mean in {100 * ever_missed(draws, 'sequence'):.0f} % of the cases" in GUIDE
    sequence, student = (half_width(20, 1.0, kind, 0.95) for kind in ("sequence", "t"))
    assert f"half of it is {sequence:.2f} standard deviations of a pair's difference" in GUIDE
    assert f"where half of Student's is {student:.2f}." in GUIDE


# the share of the runs that collapse, and by how many standard deviations of the others
RARE = ((0.5, 10), (0.2, 10), (0.05, 30))


def collapsing(share, depth, balanced=False):
    """Differences of which a share collapses by some deviations of the others, with the mean 0; as arrays."""
    generator = np.random.default_rng(1)
    fell = (generator.random((20_000, 20)) < share).astype(float)
    if balanced:  # either of the two runs may collapse
        return generator.normal(size=fell.shape) + depth * fell * generator.choice([-1.0, 1.0], fell.shape)
    return generator.normal(size=fell.shape) + depth * (fell - share)


def test_a_sequence_holds_where_either_run_may_collapse_and_not_where_one_does_and_the_guide_says_so():
    missed = max(ever_missed(collapsing(share, 10, balanced=True), "sequence") for share in (0.05, 0.2, 0.5))
    assert f"Where either of the two runs may collapse, it is at most {100 * missed:.0f} %, too." in GUIDE
    half, fifth, rare = (f"{100 * ever_missed(collapsing(*how), 'sequence'):.0f} %" for how in RARE)
    assert f"it is {half} if half of the runs do, and {fifth} if one in five does" in GUIDE
    assert f"by thirty standard deviations and one in twenty, {rare}." in GUIDE
    assert all(ever_missed(collapsing(*how), "t") > 0.4 for how in RARE)


@pytest.mark.parametrize("kind", ["t", "sequence"])
@pytest.mark.parametrize(("mean", "margin"), [(0.5, None), (0.5, 0.4), (0.1, 0.8), (-0.3, None)])
def test_an_estimate_is_the_least_number_that_decides(kind, mean, margin):
    """Of as many differences with this mean and deviation, the interval decides; of one less, it does not."""

    def decided(n):
        half = float(half_width(n, 1.0, kind, 0.95))
        return decision(Difference(mean, (mean - half, mean + half), n), margin) != "undecided"

    n = seeds_to_decide(Difference(mean, (-9.0, 9.0), 5, deviation=1.0), kind, 0.95, margin=margin)
    assert decided(n)
    assert not decided(n - 1)


def test_what_no_number_of_seeds_decides_is_more_than_the_most():
    assert seeds_to_decide(Difference(0.0, (-9.0, 9.0), 5, deviation=1.0), "t", 0.95) == MOST_SEEDS + 1
    assert seeds_to_decide(Difference(1.0, None, 1), "t", 0.95) is None
    assert seeds_to_decide(Difference(1.0, None, 3, ">", deviation=1.0), "t", 0.95) is None


def test_ranks_share_their_mean_where_values_are_equal():
    assert ranks([0.3, 0.9, 0.3, 0.1], minimize=False) == [2.5, 1.0, 2.5, 4.0]
    assert ranks([0.3, 0.9, 0.3, 0.1], minimize=True) == [2.5, 4.0, 2.5, 1.0]
