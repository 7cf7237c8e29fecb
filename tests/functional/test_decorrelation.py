"""FedDecorr and DeCov: more and fewer columns than rows, constant columns, whitened features, groups."""

import make_reference_values as reference
import numpy as np
import pytest
import torch
from cases import draw

from fl_lightning.functional import (
    correlation_frobenius,
    covariance_spectrum,
    singular_value_variance,
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
