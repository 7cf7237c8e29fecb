"""Exact sums: the bits of math.fsum, in any order and over any split."""

import math
import random

import pytest
import torch
from helpers.errors import refused
from helpers.workers import together
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_lightning.core.exact_sum import ADDITIONS, ExactSum
from fl_lightning.core.weighted import LARGE, MOST_ROWS, Sums, Weighted


def mixed(number, size, lowest=-40, highest=12):
    """Float32 vectors with magnitudes from 2^lowest to 2^highest, times fractional weights."""
    generator = torch.Generator().manual_seed(number)
    scale = 2.0 ** torch.randint(lowest, highest, (number, size), generator=generator).double()
    weights = torch.rand(number, 1, generator=generator).double() * 1000
    return torch.randn(number, size, generator=generator).double() * scale * weights


def added(values, order=None, workers=1):
    """The sum over ``workers`` that take the vectors in turn, joined as by a collective."""
    places = list(order or range(len(values)))

    def work(one):
        total = ExactSum(values.shape[1])
        for index in places[one.rank :: workers]:
            total.add(values[index].clone())
        total.all_reduce(one, {exponent for used in one.gather(total.exponents, "exponents") for exponent in used})
        return total.value()

    first, *others = together(workers, work)
    assert all(first.equal(other) or first.isnan().any() for other in others)
    return first


def fsum(values):
    return torch.tensor([math.fsum(column.tolist()) for column in values.T], dtype=torch.float64)


@pytest.mark.parametrize("lowest", [-40, -80])
def test_a_sum_rounds_as_fsum_does_to_float32_and_is_within_a_rounding_in_float64(lowest):
    values = mixed(100, 500, lowest)
    found, wanted = added(values), fsum(values)
    assert torch.equal(found.float(), wanted.float())
    torch.testing.assert_close(found, wanted, rtol=2**-52, atol=2**-90)
    assert not torch.equal(values.sum(0), wanted)  # a plain sum is not


def assert_one_sum(values, numbers):
    """Fail if an order, or a number of workers, changes a bit of the sum."""
    wanted = added(values)
    for seed, workers in enumerate(numbers):
        order = random.Random(seed).sample(range(len(values)), len(values))
        assert torch.equal(added(values, order, workers), wanted)


def test_no_order_and_no_split_changes_a_bit():
    assert_one_sum(mixed(60, 300), (1, 1, 1, 2, 2, 2, 7, 7, 7))


def test_halves_of_a_unit_have_one_form():
    # multiples of half a unit of a bin lie between two forms, which orders reach in different ways
    generator = torch.Generator().manual_seed(0)
    halves = torch.randint(-3, 4, (40, 400), generator=generator).double() * 2.0**-57
    small = torch.randint(-3, 4, (40, 400), generator=generator).double() * 2.0**-95
    large = torch.randint(-3, 4, (40, 400), generator=generator).double() * 2.0**-17
    assert_one_sum(torch.cat([halves, small, large]), (1, 2, 3, 1, 2))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.floats(-(2.0**100), 2.0**100, allow_subnormal=False), min_size=1, max_size=20), st.integers(1, 4))
def test_any_numbers_in_any_order(numbers, workers):
    values = torch.tensor(numbers, dtype=torch.float64)[:, None]
    found = added(values, workers=workers)
    assert torch.equal(found, added(values.flip(0)))
    torch.testing.assert_close(found, fsum(values), rtol=2**-51, atol=len(numbers) * 2**-96)


def test_large_numbers_open_larger_bins_and_cancel_to_the_last_bit():
    values = torch.tensor([[1e30], [3.0], [-1e30], [2.0**-60]], dtype=torch.float64)
    assert added(values).item() == 3.0 + 2.0**-60
    assert added(values, [1, 3, 2, 0], 2).item() == 3.0 + 2.0**-60


def test_more_additions_than_a_bin_can_hold_are_carried():
    number = 4 * ADDITIONS + 10
    one = ExactSum(1)
    for _ in range(number):
        one.add(torch.tensor([2.0**-30 + 2.0**-58], dtype=torch.float64))
    assert one.value().item() == number * (2.0**-30 + 2.0**-58)


@pytest.mark.parametrize(
    ("numbers", "wanted"),
    [([math.nan, 1.0], math.nan), ([math.inf, 1.0], math.inf), ([math.inf, -math.inf], math.nan), ([1e300], math.inf)],
)
def test_what_is_not_finite_makes_its_own_sum_so_and_no_other(numbers, wanted):
    values = torch.tensor([[number, 0.25] for number in numbers], dtype=torch.float64)
    for order in (list(range(len(numbers))), list(range(len(numbers)))[::-1]):
        found = added(values, order, 2)
        assert found[1].item() == 0.25 * len(numbers)
        assert found[0].item() == wanted or (math.isnan(wanted) and math.isnan(found[0]))


def test_sums_by_name_take_entries_that_only_some_send():
    sums = Sums()
    sums.add({"b": Weighted.of(torch.tensor([1.0, 2.0]), 3.0)})
    sums.add({"a": Weighted.of(5.0, 2.0), "b": Weighted.of(torch.tensor([2.0, 2.0]), 1.0)})
    sums.add({"a": Weighted.of(1.0, 2.0)})
    assert sums.means()["b"].tolist() == [1.25, 2.0]
    assert sums.means()["a"].item() == 3.0
    assert sums.totals["a"].weight.item() == 4.0


def test_an_entry_of_another_shape_is_refused():
    sums = Sums()
    sums.add({"a": Weighted.of(torch.zeros(2))})
    with refused("a", "(3,)", "(2,)", kind=ArithmeticError):
        sums.add({"a": Weighted.of(torch.zeros(3))})


def test_vectors_that_wait_to_be_added_have_the_bits_of_rows():
    values = torch.randn(MOST_ROWS + 50, 40, generator=torch.Generator().manual_seed(0)).double()
    values = values * 10.0 ** torch.arange(-20, 20)
    one_by_one, together = Sums(), Sums()
    for place, value in enumerate(values):
        one_by_one.add({"a": Weighted.of(value, 0.3), **({"b": Weighted.of(1.0)} if place == 70 else {})})
        if place == 20:
            assert one_by_one.totals["a"].weight.item() == math.fsum([0.3] * 21)
    weights = torch.full((len(values),), 0.3, dtype=torch.float64)
    together.add_rows({"a": Weighted(values * 0.3, weights)})
    assert one_by_one.totals["b"].total.item() == 1.0
    assert one_by_one.totals["a"].total.equal(together.totals["a"].total)
    assert one_by_one.totals["a"].weight.equal(together.totals["a"].weight)


def test_sums_are_read_between_additions_also_large_ones():
    sums, values = Sums(), {"small": torch.ones(2), "large": torch.full((LARGE,), 0.1)}
    for number in (1, 2, 3):
        sums.add({name: Weighted.of(value) for name, value in values.items()})
        assert sums.totals["small"].total.tolist() == [number, number]
        assert sums.totals["large"].total.unique().tolist() == [math.fsum([float(values["large"][0])] * number)]
