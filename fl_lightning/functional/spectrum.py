"""Spectra and ranks, the diagnostics of dimensional collapse: FedDecorr, Shi et al., ICLR 2023, section 3."""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning.functional._precision import centered, in_full_precision


def singular_values(matrix: Tensor) -> Tensor:
    """Singular values of a matrix ``(m, n)``, descending, ``(min(m, n),)``, in float64, without gradient."""
    return torch.linalg.svdvals(matrix.detach().double())


def covariance_spectrum(z: Tensor) -> Tensor:
    """Singular values of the covariance of the rows, the sum of products divided by n, descending.

    They are the eigenvalues of a symmetric ``(d, d)`` matrix, which are cheaper, and 0 where rounding makes
    them negative.

    Args:
        z: ``(n, d)``.

    Returns:
        ``(d,)``, at least 0, in float64, without gradient; zeros for fewer than two rows.

    Source: FedDecorr, section 3, whose covariance is divided by n and not n - 1.
    """
    rows = centered(z.detach().flatten(1).double())
    return eigenvalues(rows.T @ rows / max(len(rows), 1))


def eigenvalues(covariance: Tensor) -> Tensor:
    """Eigenvalues of a covariance ``(d, d)``, descending, at least 0, ``(d,)``."""
    return torch.linalg.eigvalsh(covariance).flip(0).clamp_min(0)


@in_full_precision
def effective_rank(s: Tensor) -> Tensor:
    r"""Exponential of the entropy of the normalised spectrum, :math:`e^{-\sum p_i \log p_i}, p = s / \sum s`.

    Args:
        s: singular values ``(r,)``, at least 0.

    Returns:
        A scalar in [1, r]; 0 if all are 0.

    Source: Roy and Vetterli, The effective rank, EUSIPCO 2007.
    """
    if not s.any():
        return s.new_zeros(())
    p = s / s.sum()
    return torch.exp(-torch.xlogy(p, p).sum())


@in_full_precision
def stable_rank(s: Tensor) -> Tensor:
    r"""Squared Frobenius over squared spectral norm, :math:`\sum s_i^2 / \max s_i^2`.

    Args:
        s: singular values ``(r,)``, at least 0.

    Returns:
        A scalar in [1, r]; 0 if all are 0.

    Source: Rudelson and Vershynin, Sampling from large matrices, JACM 2007.
    """
    if not s.any():
        return s.new_zeros(())
    return (s / s.max()).square().sum()
