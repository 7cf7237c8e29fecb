"""FedDecorr: gradients on either side of d = B, dead units, whitened features."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from fl_lightning.errors import UsageError
from fl_lightning.functional import correlation_frobenius

FORMS = ["official", "paper"]


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def reference(z, form):
    batch, d = z.shape
    normal = (z - z.mean(0)) / np.sqrt(1e-8 + z.var(0, ddof=1))
    gram = normal.T @ normal
    if form == "paper":
        return ((gram / batch) ** 2).mean()
    return (gram[~np.eye(d, dtype=bool)] ** 2).sum() / (batch * max(d * (d - 1), 1))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(8, 3), (8, 8), (4, 12), (2, 5), (5, 1), (2, 1)])
def test_value_and_gradient(form, shape):
    z = draw(*shape)
    expected = reference(z.numpy(), form)
    assert correlation_frobenius(z, form).item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert gradcheck(lambda z: correlation_frobenius(z, form), z.requires_grad_())


@pytest.mark.parametrize("shape", [(64, 40), (16, 512), (128, 128)])
def test_float32_keeps_its_digits_on_either_side(shape):
    z = draw(*shape).relu()
    found = correlation_frobenius(z.float()).item()
    assert found == pytest.approx(reference(z.numpy(), "official"), rel=1e-5)


def test_few_uncorrelated_units_of_a_large_batch_are_at_0_in_float32():
    z = draw(1000, 2)
    white = torch.linalg.qr(z - z.mean(0))[0]
    assert 0 <= correlation_frobenius(white.float()).item() < 1e-8


@pytest.mark.parametrize("form", FORMS)
def test_whitened_features_rest_in_float32(form):
    z = draw(64, 16)
    white = torch.linalg.qr(z - z.mean(0))[0].float() * 8
    white.requires_grad_()
    value = correlation_frobenius(white, form)
    value.backward()
    assert 0 <= value.item() - (0 if form == "official" else (63 / 64) ** 2 / 16) < 1e-9
    assert white.grad.abs().max() < 1e-6
    moved = (white.detach() + 0.5 * white.detach()[:, :1]).requires_grad_()
    correlation_frobenius(moved, form).backward()
    assert moved.grad.abs().max() > 1e-5  # the law can fail


@pytest.mark.parametrize("shape", [(7, 4), (3, 40)])
@pytest.mark.parametrize("dead", [0.0, 0.1, 1000.1])
def test_a_constant_column_adds_nothing_and_is_not_moved(shape, dead):
    z = draw(*shape).float()
    z[:, 1] = dead
    z.requires_grad_()
    value = correlation_frobenius(z)
    value.backward()
    d = shape[1]
    alive = correlation_frobenius(torch.cat([z[:, :1], z[:, 2:]], 1).detach()).item()
    assert value.item() == pytest.approx(alive * (d - 1) * (d - 2) / (d * (d - 1)), rel=1e-5)
    assert not z.grad[:, 1].any() and torch.isfinite(z.grad).all()


def test_all_units_dead():
    z = torch.zeros(8, 5, requires_grad=True)
    value = correlation_frobenius(z)
    value.backward()
    assert value.item() == 0 and not z.grad.any()


def test_bf16_autocast_changes_nothing():
    z = torch.randn(8, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = correlation_frobenius(z)
    assert torch.equal(inside, correlation_frobenius(z))


@settings(max_examples=25, deadline=None)
@given(
    batch=st.integers(2, 9),
    d=st.integers(1, 20),
    log=st.integers(-9, 9),
    form=st.sampled_from(FORMS),
    seed=st.integers(0, 99),
)
def test_in_range_for_any_shape_and_scale(batch, d, log, form, seed):
    z = (draw(batch, d, seed=seed).float() * 10.0**log).requires_grad_()
    value = correlation_frobenius(z, form)
    value.backward()
    largest = (batch - 1) ** 2 / batch ** (1 if form == "official" else 2)
    assert 0 <= value.item() <= largest * (1 + 1e-5)
    assert torch.isfinite(z.grad).all()


def test_another_form_is_refused_by_name():
    with pytest.raises(UsageError, match=r"form='other'.*official or paper"):
        correlation_frobenius(torch.zeros(2, 2), form="other")
