"""FedUV's uniformity: equal rows, extreme scales, and the gradient through the median."""

import math

import formulas
import pytest
import torch
from formulas import draw

from fl_lightning.functional import rbf_uniformity


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_two_rows_give_exactly_exp_of_minus_one_over_the_factor(dtype, factor):
    value = rbf_uniformity(draw(2, 5).to(dtype), factor)
    assert torch.equal(value, torch.tensor(-1 / factor, dtype=dtype).exp())
    assert value.item() == pytest.approx(math.exp(-1 / factor))


@pytest.mark.parametrize("equal", [2, 3, 5])
def test_equal_rows_far_from_the_origin(equal):
    z = 1e6 + draw(6, 4)
    z[:equal] = z[0]
    x = z.float().requires_grad_()
    value = rbf_uniformity(x)
    value.backward()
    assert value.item() == pytest.approx(formulas.uniformity(x.detach().double().numpy()), rel=1e-5)
    assert torch.isfinite(x.grad).all()
    # equal rows have equal gradients
    torch.testing.assert_close(x.grad[0], x.grad[1])


def test_one_row_apart_from_equal_ones_has_no_gradient():
    z = torch.zeros(4, 3)
    z[0] = 1
    z.requires_grad_()
    value = rbf_uniformity(z)
    value.backward()
    # three equal pairs count 1, three pairs at the median e^-1, whatever the distance
    assert value.item() == pytest.approx((3 + 3 * math.exp(-1)) / 6)
    assert z.grad.abs().max() < 1e-7


@pytest.mark.parametrize("rows", [torch.full((7, 4), 0.1), torch.zeros(3, 2)])
@pytest.mark.parametrize("detach", [False, True])
def test_all_rows_equal(rows, detach):
    z = rows.clone().requires_grad_()
    value = rbf_uniformity(z, detach_bandwidth=detach)
    value.backward()
    assert value.item() == 0 and not z.grad.any()


@pytest.mark.parametrize("near", [1e-24, 1e-21, 1e-18, 1e-15, 1e-10])
def test_one_far_row_among_nearly_equal_ones_stays_finite(near):
    z = near * torch.randn(6, 3)
    z[0] = 1
    z.requires_grad_()
    value = rbf_uniformity(z)
    value.backward()
    assert torch.isfinite(value) and torch.isfinite(z.grad).all()


@pytest.mark.parametrize("scale", [1e-21, 1e-12, 1e12, 1e18])
def test_the_value_is_the_same_at_any_scale_of_float32(scale):
    z = draw(6, 4)
    assert rbf_uniformity((scale * z).float()).item() == pytest.approx(formulas.uniformity(z.numpy()), rel=1e-3)


def test_detaching_changes_the_gradient_and_not_the_value():
    z = draw(6, 4).requires_grad_()
    flowing, detached = rbf_uniformity(z), rbf_uniformity(z, detach_bandwidth=True)
    assert torch.equal(flowing, detached)
    with_median, without = (torch.autograd.grad(value, z)[0] for value in (flowing, detached))
    assert abs((with_median * z).sum()) < 1e-12
    assert (without * z).sum() < -1e-2
