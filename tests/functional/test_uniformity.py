"""FedUV's uniformity: gradients, equal rows, and its law of scale."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from fl_lightning.errors import UsageError
from fl_lightning.functional import rbf_uniformity


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def reference(z):
    rows, columns = np.triu_indices(len(z), 1)
    q = ((z[rows] - z[columns]) ** 2).sum(1)
    return np.exp(-q / np.quantile(q[q > 0], 0.5, method="lower")).mean()


@pytest.mark.parametrize("shape", [(2, 3), (6, 3), (5, 12)])
@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_gradient(shape, factor):
    assert gradcheck(lambda z: rbf_uniformity(z, factor), draw(*shape).requires_grad_())


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
    assert value.item() == pytest.approx(reference(x.detach().double().numpy()), rel=1e-5)
    assert torch.isfinite(x.grad).all()
    # equal rows feel the same force
    torch.testing.assert_close(x.grad[0], x.grad[1])


def test_one_row_apart_from_equal_ones_moves_nothing():
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
def test_the_value_holds_to_the_ends_of_float32(scale):
    z = draw(6, 4)
    assert rbf_uniformity((scale * z).float()).item() == pytest.approx(reference(z.numpy()), rel=1e-3)


def test_detaching_changes_the_gradient_and_not_the_value():
    z = draw(6, 4).requires_grad_()
    flowing, detached = rbf_uniformity(z), rbf_uniformity(z, detach_bandwidth=True)
    assert torch.equal(flowing, detached)
    with_median, without = (torch.autograd.grad(value, z)[0] for value in (flowing, detached))
    assert abs((with_median * z).sum()) < 1e-12
    assert (without * z).sum() < -1e-2


def test_bf16_autocast_changes_nothing():
    z = torch.randn(8, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = rbf_uniformity(z)
    assert torch.equal(inside, rbf_uniformity(z))


@settings(max_examples=25, deadline=None)
@given(batch=st.integers(0, 9), d=st.integers(1, 12), log=st.integers(-12, 12), seed=st.integers(0, 99))
def test_in_range_and_free_of_scale(batch, d, log, seed):
    z = draw(batch, d, seed=seed)
    scaled = (z.float() * 10.0**log).requires_grad_()
    value = rbf_uniformity(scaled)
    value.backward()
    assert 0 <= value.item() < 1
    assert value.item() == pytest.approx(reference(z.numpy()) if batch > 1 else 0, rel=1e-4)
    assert torch.isfinite(scaled.grad).all()


def test_a_factor_of_0_is_refused():
    with pytest.raises(UsageError, match="bandwidth_factor=0"):
        rbf_uniformity(torch.randn(3, 2), 0)
