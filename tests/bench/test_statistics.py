"""The statistics of tables agree with formulas by hand."""

import math

import pytest

from fl_lightning.bench.statistics import Difference, bounded, paired_difference, ranks, summarize, verdict


def test_a_summary_of_none_one_and_many():
    assert summarize([]) is None
    assert (summarize([3.0]).mean, summarize([3.0]).deviation, summarize([3.0]).n) == (3.0, None, 1)
    assert summarize([1.0, 2.0, 6.0]).deviation == pytest.approx(math.sqrt((4 + 1 + 9) / 2))


def test_an_interval_of_two_pairs_by_t_is_known_in_closed_form():
    """With one degree of freedom, Student's t is Cauchy's distribution, whose quantile is a tangent."""
    for level in (0.5, 0.8, 0.95):
        low, high = paired_difference([(3.0, 1.0), (5.0, 2.0)], "t", level).interval
        half = math.tan(math.pi * level / 2) * 0.5
        assert (low, high) == pytest.approx((2.5 - half, 2.5 + half))


def test_pairs_are_subtracted_before_the_spread_is_taken():
    """Seeds differ much, the differences do not."""
    low, high = paired_difference([(1.0, 0.0), (100.0, 99.0), (51.1, 50.0)], "t", 0.95).interval
    assert 0.8 < low < high < 1.3


@pytest.mark.parametrize("kind", ["t", "bootstrap"])
def test_equal_numbers_in_another_order_of_addition_differ_by_0(kind):
    """0.1 + 0.2 + 0.3 depends on the order in floating-point arithmetic; a tie is no win."""
    found = paired_difference([((0.1 + 0.2) + 0.3, 0.1 + (0.2 + 0.3))] * 3, kind, 0.95)
    assert (found.mean, found.interval, found.n) == (0.0, None, 3)
    assert verdict(found, 1.0) == "undecided"


@pytest.mark.parametrize("kind", ["t", "bootstrap"])
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
def test_what_tells_no_spread_has_no_interval_and_decides_nothing(pairs, kind, published):
    made = paired_difference(pairs, kind, 0.95)
    assert made.interval is None and made.why and made.why in made.notes[0]
    assert verdict(made, published) == "undecided"


@pytest.mark.parametrize(
    ("n", "level", "enough"), [(2, 0.95, False), (3, 0.95, False), (4, 0.95, True), (3, 0.9, True)]
)
def test_a_bootstrap_has_the_pairs_that_its_level_needs(n, level, enough):
    """The smallest mean of n has the probability n^-n; above half of what is left out, it is every percentile."""
    made = paired_difference([(float(one), 0.0) for one in range(1, n + 1)], "bootstrap", level)
    assert (made.interval is not None) == enough == (not made.notes)
    assert paired_difference([(float(one), 0.0) for one in range(1, n + 1)], "t", level).interval is not None
    if enough:
        assert 1 <= made.interval[0] < made.interval[1] <= n


def test_a_level_that_rounds_to_one_has_no_interval():
    assert paired_difference([(3.0, 1.0), (5.0, 2.0)], "t", 1 - 2**-53).interval is None


def test_a_bound_says_nothing_of_its_spread():
    assert bounded(paired_difference([(3.0, 1.0)] * 2, "t", 0.95), [">", ""]) == Difference(2.0, None, 2, ">")


@pytest.mark.parametrize("kind", ["t", "bootstrap"])
def test_one_pair_has_no_interval(kind):
    assert paired_difference([], kind, 0.95) is None
    assert paired_difference([(3.0, 1.0)], kind, 0.95) == Difference(2.0, None, 1)


@pytest.mark.parametrize(
    ("interval", "published", "expected"),
    [
        ((0.5, 1.5), 2.0, "reproduced"),
        ((0.5, 1.5), -2.0, "reversed"),
        ((-1.5, -0.5), -2.0, "reproduced"),
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


def test_a_verdict_without_a_pair_is_undecided():
    assert verdict(None, 2.0) == "undecided"


def test_ranks_share_their_mean_where_values_are_equal():
    assert ranks([0.3, 0.9, 0.3, 0.1], minimize=False) == [2.5, 1.0, 2.5, 4.0]
    assert ranks([0.3, 0.9, 0.3, 0.1], minimize=True) == [2.5, 4.0, 2.5, 1.0]
