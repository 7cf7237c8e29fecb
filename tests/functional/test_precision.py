"""What the losses share: leaving autocast, zeros that stay in the graph, extreme scales, centering."""

from functools import partial

import pytest
import torch

from fl_lightning import functional as F
from fl_lightning.functional._precision import centered, linked_zero

OF_ONE_TENSOR = [F.rbf_uniformity, F.correlation_frobenius, F.probability_variance_hinge]
OF_TWO_TENSORS = [F.linear_cka, partial(F.linear_cka, debiased=True), F.linear_ckas, F.rbf_cka]


def test_keyword_arguments_leave_autocast_too():
    z = torch.randn(8, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(F.correlation_frobenius(z=z), F.correlation_frobenius(z))


@pytest.mark.parametrize("loss", [*OF_ONE_TENSOR, F.singular_value_variance])
@pytest.mark.parametrize("batch", [0, 1])
def test_a_batch_too_small_gives_a_zero_in_the_graph(loss, batch):
    z = torch.full((batch, 4), torch.inf, requires_grad=True)
    value = loss(z)
    value.backward()
    assert value.item() == 0
    assert torch.equal(z.grad, torch.zeros_like(z))


@pytest.mark.parametrize("cka", OF_TWO_TENSORS)
@pytest.mark.parametrize("batch", [0, 1])
def test_too_few_examples_give_a_zero_in_the_graph_of_both(cka, batch):
    x, y = torch.randn(batch, 4, requires_grad=True), torch.randn(batch, 2, 3, requires_grad=True)
    value = cka(x, y)
    value.backward()
    assert value.item() == 0
    assert torch.equal(x.grad, torch.zeros_like(x)) and torch.equal(y.grad, torch.zeros_like(y))


@pytest.mark.parametrize("loss", OF_ONE_TENSOR)
@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e-3, 1e3, 1e15])
@pytest.mark.parametrize("shape", [(9, 5), (4, 30)])
def test_value_and_gradient_are_finite_at_any_scale(loss, scale, shape):
    z = (torch.randn(shape) * scale).requires_grad_()
    value = loss(z)
    value.backward()
    assert torch.isfinite(value) and torch.isfinite(z.grad).all()


def test_linked_zero_of_infinities_is_0():
    x = torch.tensor([torch.inf, torch.nan], requires_grad=True)
    zero = linked_zero(x, torch.ones(3))
    zero.backward()
    assert zero.item() == 0
    assert torch.equal(x.grad, torch.zeros(2))


def test_centered_rows_that_are_equal_are_exactly_0():
    rows = torch.full((7, 3), 1000.1)
    assert (rows - rows.mean(0)).any()  # plain centering leaves rounding errors
    assert not centered(rows).any()
    x = torch.randn(7, 3, dtype=torch.float64)
    torch.testing.assert_close(centered(x), x - x.mean(0))
    assert torch.autograd.gradcheck(lambda x: (x - x.mean(0)).sin() - centered(x).sin(), x.requires_grad_())
