"""Spectra and ranks, which show dimensional collapse.

FedDecorr: Shi et al., Towards Understanding and Mitigating Dimensional Collapse in Heterogeneous Federated Learning,
ICLR 2023, section 3. https://arxiv.org/abs/2210.00226, https://github.com/bytedance/FedDecorr
"""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning.functional._precision import centered, in_full_precision
from fl_lightning.functional.rows import as_rows


def singular_values(matrix: Tensor) -> Tensor:
    """Singular values of a matrix, descending.

    Args:
        matrix: ``(m, n)``.

    Returns:
        ``(min(m, n),)``, at least 0, in float64, without gradient.

    Example:
        >>> import torch
        >>> singular_values(torch.tensor([[0.0, 2.0], [1.0, 0.0], [0.0, 0.0]])).round(decimals=4).tolist()
        [2.0, 1.0]
    """
    return torch.linalg.svdvals(matrix.detach().double())


def covariance_spectrum(z: Tensor) -> Tensor:
    """Singular values of the covariance matrix of the columns of z over its n rows, descending.

    The covariance is divided by n. Its singular values are its eigenvalues, which are cheaper to compute; those that
    rounding makes negative are set to 0.

    Args:
        z: representations ``(n, ...)``, flattened to ``(n, d)``.

    Returns:
        ``(d,)``, at least 0, in float64, without gradient; zeros for fewer than two rows.

    Source: FedDecorr, section 3, which divides the covariance by n, not n - 1.

    Example:
        >>> import torch
        >>> z = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 2.0], [0.0, -2.0]])
        >>> covariance_spectrum(z).round(decimals=4).tolist()
        [2.0, 0.5]
    """
    rows = centered(as_rows(z.detach()).double())
    return eigenvalues(rows.T @ rows / max(len(rows), 1))


def eigenvalues(covariance: Tensor) -> Tensor:
    """Eigenvalues of a covariance matrix, descending; those that rounding makes negative are set to 0.

    Args:
        covariance: symmetric and positive semidefinite, ``(d, d)``.

    Returns:
        ``(d,)``, at least 0, in the precision of ``covariance``.

    Example:
        >>> import torch
        >>> eigenvalues(torch.diag(torch.tensor([1.0, 3.0, 0.0]))).round(decimals=4).tolist()
        [3.0, 1.0, 0.0]
    """
    return torch.linalg.eigvalsh(covariance).flip(0).clamp_min(0)


@in_full_precision
def effective_rank(s: Tensor) -> Tensor:
    r"""Exponential of the entropy of the normalised spectrum p, :math:`e^{-\sum p_i \log p_i}, p = s / \sum s`.

    Args:
        s: singular values ``(r,)``, at least 0.

    Returns:
        A scalar in [1, r], which is r for equal values; 0 if all values are 0.

    Source: Roy and Vetterli, The Effective Rank: A Measure of Effective Dimensionality, EUSIPCO 2007.
    https://infoscience.epfl.ch/record/110188/files/RoyV07.pdf

    Example:
        >>> import torch
        >>> equal, unequal = torch.ones(4), torch.tensor([2.0, 1.0, 1.0])
        >>> round(effective_rank(equal).item(), 4), round(effective_rank(unequal).item(), 4)
        (4.0, 2.8284)
    """
    if not s.any():
        return s.new_zeros(())
    p = s / s.sum()
    return torch.exp(-torch.xlogy(p, p).sum())


@in_full_precision
def stable_rank(s: Tensor) -> Tensor:
    r"""Squared Frobenius norm divided by the squared spectral norm, :math:`\sum s_i^2 / \max s_i^2`.

    Args:
        s: singular values ``(r,)``, at least 0.

    Returns:
        A scalar in [1, r], which is r for equal values; 0 if all values are 0.

    Source: Rudelson and Vershynin, Sampling from Large Matrices: An Approach through Geometric Functional Analysis,
    Journal of the ACM, 2007. https://arxiv.org/abs/math/0503442

    Example:
        >>> import torch
        >>> stable_rank(torch.ones(4)).item(), stable_rank(torch.tensor([2.0, 1.0, 1.0])).item()
        (4.0, 1.5)
    """
    if not s.any():
        return s.new_zeros(())
    return (s / s.max()).square().sum()
