"""FedUV's uniformity: equal rows, extreme scales, and the gradient through the median."""

import math

import make_reference_values as reference
import pytest
import torch
from cases import draw

from fl_lightning.functional import rbf_uniformity


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_two_rows_give_exactly_exp_of_minus_one_over_the_factor(dtype, factor):
    value = rbf_uniformity(draw(2, 5).to(dtype), factor)
    assert torch.equal(value, torch.tensor(-1 / factor, dtype=dtype).exp())
    assert value.item() == pytest.approx(math.exp(-1 / factor))


@pytest.mark.parametrize("equal", [2, 5])
def test_equal_rows_far_from_the_origin(equal):
    z = 1e6 + draw(6, 4)
    z[:equal] = z[0]
    x = z.float().requires_grad_()
    value = rbf_uniformity(x)
    value.backward()
    assert value.item() == pytest.approx(reference.uniformity(x.detach().double().numpy()), rel=1e-5)
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


def value_and_gradient(z, factor, detach):
    z = z.detach().clone().requires_grad_()
    value = rbf_uniformity(z, factor, detach_bandwidth=detach)
    return value.item(), torch.autograd.grad(2 * value, z)[0].double()


def clustered(rows, d, spread):
    """Rows in four clusters."""
    return draw(4, d)[torch.arange(rows) % 4] + spread * draw(rows, d, seed=1)


INPUTS = {
    "random": draw(64, 40),
    "nonnegative": draw(128, 84).relu(),
    "far from the origin": 1e3 + draw(64, 256),
    "clusters": clustered(64, 40, 0.1),
    "tight clusters": clustered(64, 40, 1e-2),
    "two nearly equal rows": torch.cat([draw(15, 8), draw(15, 8)[:1] + 1e-4]),
    "one far row": torch.cat([1e3 * draw(1, 40), draw(63, 40, seed=1)]),
    "one row out of reach": torch.cat([1e8 * draw(1, 40), draw(63, 40, seed=1)]),
    "few rows": draw(3, 500),
    "small": 1e-12 * draw(64, 40),
    "smallest": 1e-21 * draw(6, 4),
    "largest": 1e18 * draw(6, 4),
}


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize(("factor", "detach"), [(1.0, False), (2.0, True)])
def test_products_of_matrices_are_as_exact_as_float32(name, factor, detach):
    """Against distances one by one in float64. Measured: values 2e-7, gradients 2e-7, 3e-6 with one far row."""
    z = INPUTS[name].float()
    (value, gradient), (exact, wanted) = (value_and_gradient(rows, factor, detach) for rows in (z, z.double()))
    assert value == pytest.approx(exact, rel=1e-6)
    assert (gradient - wanted).norm() < 1e-5 * wanted.norm()
