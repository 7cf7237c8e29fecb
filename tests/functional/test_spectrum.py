"""Spectra and ranks against NumPy, and for degenerate input."""

import numpy as np
import pytest
import torch
from cases import draw

from fl_lightning.functional import (
    condition_number,
    covariance_spectrum,
    effective_rank,
    eigenvalues,
    numerical_rank,
    singular_values,
    stable_rank,
)


@pytest.mark.parametrize("shape", [(30, 6), (4, 9), (2, 5), (3, 1), (7, 7)])
def test_spectra_are_those_of_numpy(shape):
    z = draw(*shape) + 50
    spectrum = covariance_spectrum(z).numpy()
    covariance = np.cov(z.numpy().T, bias=True).reshape(shape[1], shape[1])
    np.testing.assert_allclose(spectrum, np.linalg.svd(covariance, compute_uv=False), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(eigenvalues(torch.from_numpy(covariance)).numpy(), spectrum, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(
        singular_values(z - 50).numpy(), np.linalg.svd((z - 50).numpy(), compute_uv=False), rtol=1e-9
    )
    assert np.count_nonzero(spectrum > 1e-9) == min(shape[0] - 1, shape[1])


def test_eigenvalues_that_rounding_made_negative_are_0():
    assert eigenvalues(torch.diag(torch.tensor([-1e-9, 2.0, 1.0]))).tolist() == [2, 1, 0]


@pytest.mark.parametrize("rows", [torch.empty(0, 3), torch.randn(1, 3), torch.full((7, 3), 0.1)])
def test_fewer_than_two_different_rows_have_a_spectrum_of_exact_zeros(rows):
    spectrum = covariance_spectrum(rows)
    assert spectrum.shape == (3,) and not spectrum.any()
    assert effective_rank(spectrum).item() == stable_rank(spectrum).item() == 0
    assert numerical_rank(spectrum).item() == condition_number(spectrum).item() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_spectra_are_computed_in_float64_without_gradient(dtype):
    z = torch.randn(20, 5).to(dtype).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        spectrum, values = covariance_spectrum(z), singular_values(z)
    assert spectrum.dtype == values.dtype == torch.float64
    assert not spectrum.requires_grad and not values.requires_grad
    assert torch.equal(spectrum, covariance_spectrum(z.double()))
    assert torch.equal(values, singular_values(z.double()))


def perplexity(s):
    p = s[s > 0] / s.sum()
    return torch.prod(p**-p)


def quotient_of_norms(s):
    return s.square().sum() / s.max().square()


@pytest.mark.parametrize(("rank", "formula"), [(effective_rank, perplexity), (stable_rank, quotient_of_norms)])
def test_ranks_and_their_gradients(rank, formula):
    for number in (1, 2, 7):
        s = draw(number).abs().requires_grad_()
        value, expected = rank(s), formula(s)
        assert value.item() == pytest.approx(expected.item(), rel=1e-9)
        torch.testing.assert_close(*(torch.autograd.grad(each, s)[0] for each in (value, expected)))
    narrow = draw(6).abs().bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for values in (narrow, narrow.float()):
            assert rank(values).dtype == torch.float32
            assert rank(values).item() == pytest.approx(formula(narrow.double()).item(), rel=1e-6)


def test_numerical_rank_and_condition_number_leave_out_rounding_errors():
    left, right = (torch.linalg.qr(torch.randn(20, 20).double())[0] for _ in range(2))
    values = torch.tensor([8.0, 4, 2, 1] + [0] * 16).double()
    s = singular_values((left @ torch.diag(values) @ right).float())
    assert (s > 0).all()  # rounding errors
    assert numerical_rank(s).item() == 4
    assert condition_number(s).item() == pytest.approx(8, rel=1e-5)
    assert condition_number(s, tolerance=0.2).item() == pytest.approx(4, rel=1e-5)
    assert condition_number(1000 * s).item() == pytest.approx(condition_number(s).item())
