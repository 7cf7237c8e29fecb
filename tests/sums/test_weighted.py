"""A value that can only be added keeps the digits it was given."""

import pytest
import torch

from fl_lightning import Weighted


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
