"""FedUV's variance hinge: where its forms differ, saturated predictions, and equal predictions."""

import math

import pytest
import torch

from fl_lightning.functional import probability_variance_hinge

HINGES = ["linear", "none", "square", "clamped_square"]


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
def test_equal_predictions_give_c_without_gradient(classes):
    logits = torch.full((6, classes), 0.1, dtype=torch.float64, requires_grad=True)
    value = probability_variance_hinge(logits)
    value.backward()
    assert value.item() == pytest.approx(torch.eye(classes, dtype=torch.float64).std(0).mean().item())
    assert not logits.grad.any()


@pytest.mark.parametrize("hinge", HINGES)
def test_saturated_equal_predictions_give_c_without_gradient(hinge):
    logits = torch.tensor([[200.0, 0, -200]] * 4, requires_grad=True)
    value = probability_variance_hinge(logits, hinge)
    value.backward()
    assert value.item() == pytest.approx(1 / 3 if "square" in hinge else 3**-0.5)
    assert not logits.grad.any()
