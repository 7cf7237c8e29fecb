"""Spectra and ranks against NumPy, and for degenerate input."""

import formulas
import numpy as np
import pytest
import torch
from formulas import draw
from helpers.errors import refused

from fl_lightning.functional import (
    condition_number,
    covariance_spectrum,
    effective_rank,
    eigenvalues,
    numerical_rank,
    singular_values,
    stable_rank,
)

SHAPES = [(30, 6), (4, 9), (2, 5), (3, 1), (7, 7)]


@pytest.mark.parametrize("shape", SHAPES)
def test_covariance_spectrum_descends_and_is_that_of_numpy(shape):
    z = draw(*shape) + 50
    spectrum = covariance_spectrum(z).numpy()
    covariance = np.cov(z.numpy().T, bias=True).reshape(shape[1], shape[1])
    np.testing.assert_allclose(spectrum, np.linalg.svd(covariance, compute_uv=False), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(eigenvalues(torch.from_numpy(covariance)).numpy(), spectrum, rtol=1e-9, atol=1e-12)
    assert (np.diff(spectrum) <= 0).all() and (spectrum >= 0).all()
    assert np.count_nonzero(spectrum > 1e-9) == min(shape[0] - 1, shape[1])


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_are_those_of_numpy(shape):
    m = draw(*shape)
    np.testing.assert_allclose(singular_values(m).numpy(), np.linalg.svd(m.numpy(), compute_uv=False), rtol=1e-9)


def test_eigenvalues_that_rounding_made_negative_are_0():
    assert eigenvalues(torch.diag(torch.tensor([-1e-9, 2.0, 1.0]))).tolist() == [2, 1, 0]


@pytest.mark.parametrize("rows", [torch.empty(0, 3), torch.randn(1, 3), torch.full((7, 3), 0.1)])
def test_fewer_than_two_different_rows_have_a_spectrum_of_exact_zeros(rows):
    spectrum = covariance_spectrum(rows)
    assert spectrum.shape == (3,) and not spectrum.any()
    assert effective_rank(spectrum).item() == stable_rank(spectrum).item() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_spectra_are_computed_in_float64_without_gradient(dtype):
    z = torch.randn(20, 5).to(dtype).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        spectrum, values = covariance_spectrum(z), singular_values(z)
    assert spectrum.dtype == values.dtype == torch.float64
    assert not spectrum.requires_grad and not values.requires_grad
    assert torch.equal(spectrum, covariance_spectrum(z.double()))
    assert torch.equal(values, singular_values(z.double()))


def test_collapsed_dimensions_lower_the_spectrum_and_the_rank():
    z = draw(100, 2) @ draw(2, 8, seed=1)
    spectrum = covariance_spectrum(z)
    assert (spectrum[2:] < 1e-12 * spectrum[0]).all()
    assert 1 <= effective_rank(spectrum).item() <= 2 + 1e-6


RANKS = [(effective_rank, formulas.effective_rank), (stable_rank, formulas.stable_rank)]


@pytest.mark.parametrize(("ours", "theirs"), RANKS)
@pytest.mark.parametrize("r", [1, 2, 7])
def test_ranks_and_their_gradients(ours, theirs, r):
    s = draw(r).abs().requires_grad_()
    value = ours(s)
    value.backward()
    assert value.item() == pytest.approx(theirs(s.detach().numpy()), rel=1e-9)
    np.testing.assert_allclose(s.grad.numpy(), formulas.differences(theirs, s.detach().numpy()), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(("ours", "theirs"), RANKS)
def test_ranks_leave_autocast_and_convert_bf16(ours, theirs):
    s = draw(6).abs().bfloat16()
    expected = theirs(s.double().numpy())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for values in (s, s.float()):
            assert ours(values).dtype == torch.float32
            assert ours(values).item() == pytest.approx(expected, rel=1e-6)


def test_effective_rank_is_the_perplexity_of_the_values():
    p = np.array([0.5, 0.25, 0.125, 0.125, 0])
    assert effective_rank(torch.tensor(3 * p)).item() == pytest.approx(2 ** (0.5 + 0.5 + 0.375 + 0.375))


def test_stable_rank_is_the_quotient_of_norms():
    w = draw(6, 9)
    expected = np.linalg.norm(w.numpy()) ** 2 / np.linalg.norm(w.numpy(), 2) ** 2
    assert stable_rank(singular_values(w)).item() == pytest.approx(expected)


def test_numerical_rank_and_condition_number_leave_out_rounding_errors():
    left, right = (torch.linalg.qr(torch.randn(20, 20).double())[0] for _ in range(2))
    values = torch.tensor([8.0, 4, 2, 1] + [0] * 16).double()
    s = singular_values((left @ torch.diag(values) @ right).float())
    assert (s > 0).all()  # rounding errors
    assert numerical_rank(s).item() == 4
    assert condition_number(s).item() == pytest.approx(8, rel=1e-5)
    assert condition_number(s, tolerance=0.2).item() == pytest.approx(4, rel=1e-5)
    assert condition_number(1000 * s).item() == pytest.approx(condition_number(s).item())


def test_a_spectrum_of_zeros_has_rank_and_condition_number_0():
    assert numerical_rank(torch.zeros(3)).item() == condition_number(torch.zeros(3)).item() == 0
    with refused("tolerance=-1"):
        numerical_rank(torch.ones(3), -1)
