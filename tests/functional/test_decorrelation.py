"""FedDecorr and DeCov on any shape, constant columns and groups, and the spectra and ranks in which they show."""

import math

import make_reference_values as reference
import numpy as np
import pytest
import torch
from cases import draw

from fl_lightning.functional import (
    condition_number,
    correlation_frobenius,
    covariance_spectrum,
    effective_rank,
    eigenvalues,
    numerical_rank,
    singular_value_variance,
    singular_values,
    stable_rank,
    structured_covariance_decorrelation,
)

FORMS = ["official", "paper"]


@pytest.mark.parametrize("shape", [(64, 40), (16, 512), (128, 128)])
def test_float32_is_precise_for_more_rows_and_for_more_columns(shape):
    z = draw(*shape).relu()
    batch, d = shape
    # the formula's double loop as matrix operations
    k = np.corrcoef(z.numpy().T) * (batch - 1) / batch
    expected = batch * (k[~np.eye(d, dtype=bool)] ** 2).mean()
    assert correlation_frobenius(z.float()).item() == pytest.approx(expected, rel=1e-5)


def test_faint_correlations_in_a_large_batch_are_precise_in_float32():
    z = draw(1000, 2)
    white = torch.linalg.qr(z - z.mean(0))[0]
    assert 0 <= correlation_frobenius(white.float()).item() < 1e-8
    # the squared correlation is a millionth of the diagonal, which a difference of sums would have to cancel
    white[:, 1] += 1e-3 * white[:, 0]
    expected = reference.decorrelation(white.numpy())
    assert correlation_frobenius(white.float()).item() == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("shape", [(7, 4), (3, 40)])
@pytest.mark.parametrize("dead", [0.0, 0.1, 1000.1])
def test_a_constant_column_adds_nothing_and_has_no_gradient(shape, dead):
    z = draw(*shape).float()
    z[:, 1] = dead
    z.requires_grad_()
    value = correlation_frobenius(z)
    value.backward()
    d = shape[1]
    alive = correlation_frobenius(torch.cat([z[:, :1], z[:, 2:]], 1).detach()).item()
    assert value.item() == pytest.approx(alive * (d - 1) * (d - 2) / (d * (d - 1)), rel=1e-5)
    assert not z.grad[:, 1].any() and torch.isfinite(z.grad).all()


@pytest.mark.parametrize("shape", [(64, 5), (6, 40), (9, 9)])
def test_the_variance_of_singular_values_is_the_paper_form_of_standardised_columns(shape):
    """FedDecorr's Proposition 1: minimising one is minimising the other, whose value and gradient are d times it."""
    batch, d = shape
    z = draw(*shape).requires_grad_()
    standard = (z - z.mean(0)) / torch.sqrt(1e-8 + z.var(0))
    variance, paper = singular_value_variance(standard), correlation_frobenius(z, "paper")
    # 1 in the paper, which divides by the biased deviation
    constant = ((batch - 1) / batch) ** 2
    assert variance.item() == pytest.approx(d * paper.item() - constant, rel=1e-6)
    gradients = [torch.autograd.grad(value, z)[0] for value in (variance, d * paper)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("shape", [(300, 12), (5, 64)])
def test_the_variance_of_singular_values_is_that_of_the_spectrum(shape):
    z = draw(*shape).relu() @ draw(shape[1], shape[1], seed=1)
    spectrum = covariance_spectrum(z).numpy()
    assert singular_value_variance(z).item() == pytest.approx(spectrum.var(), rel=1e-9)
    assert singular_value_variance(z.float()).item() == pytest.approx(spectrum.var(), rel=1e-4)
    rotated = z @ torch.linalg.qr(draw(shape[1], shape[1], seed=2))[0]
    assert singular_value_variance(rotated).item() == pytest.approx(spectrum.var(), rel=1e-9)


def test_groups_are_contiguous_and_of_equal_size():
    # units of one of these pairs have covariance 1, all others 0
    def between(i, j):
        z = torch.zeros(2, 6, dtype=torch.float64)
        z[:, [i, j]] = torch.tensor([[1.0], [-1.0]]).double()
        return structured_covariance_decorrelation(z, groups=3).item()

    together = {(i, j) for i in range(6) for j in range(i + 1, 6) if between(i, j) == 0}
    assert together == {(0, 1), (2, 3), (4, 5)}
    assert between(0, 2) == 1  # half of the two entries of a symmetric matrix


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


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("spectrum", [covariance_spectrum, singular_values, lambda z: eigenvalues(z @ z.T)])
def test_a_diverged_model_has_no_spectrum_and_no_ranks(spectrum, value):
    z = torch.ones(3, 3)
    z[0, 1] = value
    s = spectrum(z)
    assert s.shape == (3,) and s.isnan().all()
    assert all(rank(s).isnan() for rank in (effective_rank, stable_rank, numerical_rank, condition_number))


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
