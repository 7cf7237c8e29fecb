"""Spectra and ranks."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_lightning.functional import covariance_spectrum, effective_rank, singular_values, stable_rank


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(30, 6), (4, 9)])
def test_covariance_spectrum_descends_and_is_that_of_numpy(shape):
    z = draw(*shape) + 50
    found = covariance_spectrum(z).numpy()
    reference = np.linalg.svd(np.cov(z.numpy().T, bias=True), compute_uv=False)
    np.testing.assert_allclose(found, reference, rtol=1e-9, atol=1e-12)
    assert (np.diff(found) <= 0).all() and (found >= 0).all()
    assert np.count_nonzero(found > 1e-9) == min(shape[0] - 1, shape[1])


@pytest.mark.parametrize("rows", [torch.empty(0, 3), torch.randn(1, 3), torch.full((7, 3), 0.1)])
def test_fewer_than_two_different_rows_have_a_spectrum_of_exact_zeros(rows):
    spectrum = covariance_spectrum(rows)
    assert spectrum.shape == (3,) and not spectrum.any()
    assert effective_rank(spectrum).item() == stable_rank(spectrum).item() == 0


def test_float32_and_autocast_are_computed_in_float64():
    z = torch.randn(20, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        spectrum, values = covariance_spectrum(z), singular_values(z)
    assert spectrum.dtype == values.dtype == torch.float64
    assert torch.equal(spectrum, covariance_spectrum(z.double()))
    assert torch.equal(values, singular_values(z.double()))


def test_collapsed_dimensions_are_seen():
    z = draw(100, 2) @ draw(2, 8, seed=1)
    spectrum = covariance_spectrum(z)
    assert (spectrum[2:] < 1e-12 * spectrum[0]).all()
    assert 1 <= effective_rank(spectrum).item() <= 2 + 1e-6


@settings(max_examples=25, deadline=None)
@given(
    r=st.integers(1, 12),
    log=st.integers(-12, 12),
    seed=st.integers(0, 99),
    dtype=st.sampled_from(["32", "64"]),
)
def test_ranks_lie_between_1_and_the_number_of_values_at_any_scale(r, log, seed, dtype):
    s = draw(r, seed=seed).abs().to(getattr(torch, f"float{dtype}"))
    for rank in (effective_rank, stable_rank):
        value = rank(s * 10.0**log).item()
        assert 1 - 1e-5 <= value <= r + 1e-4
        assert value == pytest.approx(rank(s).item(), rel=1e-4)
    assert effective_rank(torch.ones(r)).item() == pytest.approx(r, rel=1e-5)
    assert stable_rank(torch.ones(r)).item() == pytest.approx(r)


def test_effective_rank_is_the_perplexity_of_the_values():
    p = np.array([0.5, 0.25, 0.125, 0.125])
    assert effective_rank(torch.tensor(3 * p)).item() == pytest.approx(2 ** (-np.sum(p * np.log2(p))))


def test_stable_rank_is_the_quotient_of_norms():
    w = draw(6, 9)
    reference = np.linalg.norm(w.numpy()) ** 2 / np.linalg.norm(w.numpy(), 2) ** 2
    assert stable_rank(singular_values(w)).item() == pytest.approx(reference)
