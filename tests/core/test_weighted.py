"""Values that can only be added keep their digits, and have a mean, sum, maximum or minimum."""

import math

import pytest
import torch
from helpers.workers import together

from fl_lightning import Weighted
from fl_lightning.core.reduced import Reduced
from fl_lightning.core.update import Totals, Update


@pytest.mark.parametrize("number", [2**24 + 1, 2.0**24 + 1, 0.1, 1 / 3])
def test_a_plain_number_is_not_rounded(number):
    """2^24 + 1 examples would be 2^24 in float32."""
    assert Weighted.of(number).total.item() == number
    assert Weighted.of(torch.ones(2), number).weight.item() == number
    assert Weighted.of(torch.tensor(3.0), number).total.item() == 3 * number
    assert Weighted.summed(number, number).total.item() == number


def test_a_tensor_keeps_its_value_and_is_not_part_of_a_graph():
    value = torch.tensor([1.5, 2.5], requires_grad=True)
    one = Weighted.of(value, torch.tensor([True, False]))
    assert one.total.tolist() == [1.5, 0]
    assert one.weight.tolist() == [1, 0]
    assert one.total.dtype == one.weight.dtype == torch.float64
    assert not one.total.requires_grad


def test_a_mean_is_by_weight_and_0_where_nothing_was_added():
    both = Weighted.of(torch.tensor([1.0, 2.0]), 3.0) + Weighted.of(torch.tensor([5.0, 2.0]), 1.0)
    assert both.mean().tolist() == [2, 2]
    assert both.weight.item() == 4
    assert Weighted.of(torch.ones(2), torch.tensor([0.0, 2.0])).mean().tolist() == [0, 1]


def update(weight, **logged):
    values = {"delta": {"w": torch.tensor([weight])}, "others": {"mean": torch.tensor(2 * weight)}}
    return Update(**values, weight=weight, payload={}, logged=logged, drift=weight + 1, num_bytes=10)


def test_totals_are_means_by_weight_and_logged_values_by_their_reduction():
    totals = Totals()
    for weight, value in ((1.0, 4.0), (3.0, -2.0)):
        kinds = {kind: Reduced(kind, value, weight) for kind in ("mean", "sum", "max", "min")}
        totals.add(update(weight, **kinds, nothing=Reduced("mean", 0.0, 0.0)))
    means = totals.close()
    assert (means.num_clients, means.num_bytes) == (2, 20)
    assert means.drift == (1 * 2 + 3 * 4) / 4
    assert means.delta["w"].tolist() == [(1 * 1 + 3 * 3) / 4]
    assert means.others["mean"].item() == (1 * 2 + 3 * 6) / 4
    assert means.logged == {"mean": 0.5, "sum": 2.0, "max": 4.0, "min": -2.0, "nothing": 0.0}
    empty = Totals().close()
    assert (empty.num_clients, empty.drift, empty.num_bytes, empty.delta) == (0, 0.0, 0, {})


def test_the_totals_of_several_workers_are_those_of_all_updates():
    updates = [
        update(w, lowest=Reduced("min", -w), mean=Reduced("mean", w, w), **{f"k{w}": Reduced("sum", w)})
        for w in (1.0, 2.0, 5.0)
    ]

    def work(one):
        totals = Totals()
        for each in updates[one.rank :: one.size]:
            totals.add(each)
        totals.all_reduce(one)
        means = totals.close()
        return means.num_clients, means.drift, means.num_bytes, means.delta["w"].tolist(), means.logged

    (alone,) = together(1, work)
    assert together(2, work) == [alone, alone]
    assert alone[4]["lowest"] == -5.0 and alone[4]["k2.0"] == 2.0


@pytest.mark.parametrize("kind", ["max", "min"])
def test_extremes_are_nan_where_one_is_and_have_no_negative_zero(kind):
    for values, wanted in (((1.0, math.nan), math.nan), ((math.nan, 1.0), math.nan), ((-0.0, -0.0), 0.0)):
        totals = Totals()
        for value in values:
            totals.add(update(1.0, value=Reduced(kind, value)))
        found = totals.close().logged["value"]
        assert math.isnan(found) if math.isnan(wanted) else math.copysign(1, found) == 1
    assert Reduced("mean", 6.0, 3.0).value == 2 and Reduced("mean", 6.0).value == 6
    assert Reduced(kind, 6.0, 3.0).value == 6
