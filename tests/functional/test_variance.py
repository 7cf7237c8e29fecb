"""FedUV's variance hinge: gradients, saturation and ranges."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from fl_lightning.errors import UsageError
from fl_lightning.functional import probability_variance_hinge

HINGES = ["linear", "none", "square", "clamped_square"]


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("hinge", HINGES)
@pytest.mark.parametrize("shape", [(2, 4), (8, 3), (3, 10)])
def test_gradient(hinge, shape):
    assert gradcheck(lambda o: probability_variance_hinge(o, hinge), (2 * draw(*shape)).requires_grad_())


def test_hinges_differ_where_a_class_varies_more_than_the_identity():
    # two classes alternate and deviate by 1/sqrt(2), more than the identity's 1/sqrt(3); the third stays at 0
    logits = 100 * torch.tensor([[1.0, 0, 0], [0, 1, 0]]).double()
    gap = torch.tensor([1 / math.sqrt(3) - math.sqrt(0.5)] * 2 + [1 / math.sqrt(3)]).double()
    expected = [gap.relu().mean(), gap.mean(), gap.square().mean(), gap.relu().square().mean()]
    for hinge, value in zip(HINGES, expected, strict=True):
        assert probability_variance_hinge(logits, hinge).item() == pytest.approx(value.item(), rel=1e-6)
    assert len({round(value.item(), 6) for value in expected}) == 4


@pytest.mark.parametrize("hinge", HINGES)
def test_probabilities_near_underflow_have_a_finite_gradient(hinge):
    logits = torch.tensor([[0.0, -95.0, -40.0], [0.0, -99.0, -41.0]], requires_grad=True)
    probability_variance_hinge(logits, hinge).backward()
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("classes", [7, 10, 65, 100, 200])
def test_equal_predictions_lie_at_the_identitys_deviation(classes):
    expected = torch.eye(classes, dtype=torch.float64).std(0).mean().item()
    assert probability_variance_hinge(torch.zeros(6, classes).double()).item() == pytest.approx(expected)


@settings(max_examples=25, deadline=None)
@given(
    batch=st.integers(0, 9),
    classes=st.integers(1, 12),
    log=st.integers(-6, 6),
    hinge=st.sampled_from(HINGES),
    seed=st.integers(0, 99),
)
def test_in_range_for_any_shape_and_scale(batch, classes, log, hinge, seed):
    logits = (draw(batch, classes, seed=seed).float() * 10.0**log).requires_grad_()
    value = probability_variance_hinge(logits, hinge)
    value.backward()
    c = 1 / math.sqrt(classes)
    # a column of probabilities deviates at most as much as half zeros and half ones of two rows
    ranges = {"linear": (0, c), "none": (c - math.sqrt(0.5), c), "clamped_square": (0, c * c)}
    low, high = ranges.get(hinge, (0, 0.5))
    assert (low if batch > 1 else 0) - 1e-6 <= value.item() <= max(high, c * c) + 1e-6
    assert torch.isfinite(logits.grad).all()


def test_another_hinge_is_refused_by_name():
    with pytest.raises(UsageError, match=r"hinge='cubic'.*clamped_square"):
        probability_variance_hinge(torch.zeros(2, 2), hinge="cubic")
