"""Spectra and ranks, which show dimensional collapse.

FedDecorr: Shi et al., Towards Understanding and Mitigating Dimensional Collapse in Heterogeneous Federated Learning,
ICLR 2023, section 3. https://arxiv.org/abs/2210.00226, https://github.com/bytedance/FedDecorr
"""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning.functional.rows import as_rows, centered, in_full_precision
from fl_lightning.utilities.errors import require


def singular_values(matrix: Tensor) -> Tensor:
    """Singular values of a matrix, descending.

    Args:
        matrix: ``(m, n)``.

    Returns:
        ``(min(m, n),)``, at least 0, in float64, without gradient; nan if an entry is infinite or nan.

    Example:
        >>> import torch
        >>> singular_values(torch.tensor([[0.0, 2.0], [1.0, 0.0], [0.0, 0.0]])).round(decimals=4).tolist()
        [2.0, 1.0]
    """
    matrix = matrix.detach().double()
    if not matrix.isfinite().all():
        return matrix.new_full((min(matrix.shape),), torch.nan)
    return torch.linalg.svdvals(matrix)


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
        ``(d,)``, at least 0, in the precision of ``covariance``; nan if an entry is infinite or nan.

    Example:
        >>> import torch
        >>> eigenvalues(torch.diag(torch.tensor([1.0, 3.0, 0.0]))).round(decimals=4).tolist()
        [3.0, 1.0, 0.0]
    """
    if not covariance.isfinite().all():
        return covariance.new_full((len(covariance),), torch.nan)
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


@in_full_precision
def numerical_rank(s: Tensor, tolerance: float | None = None) -> Tensor:
    """Return the number of singular values above ``tolerance`` times the largest.

    Args:
        s: singular values ``(r,)``, at least 0.
        tolerance: relative to the largest, at least 0; None is r times the relative precision of float32, 1.2e-7.

    Returns:
        A scalar in [1, r]; 0 if all values are 0.

    Raises:
        UsageError: ``tolerance`` is below 0.

    Source: the default of ``numpy.linalg.matrix_rank`` for a square matrix in float32, the precision in which models
    are trained, https://numpy.org/doc/stable/reference/generated/numpy.linalg.matrix_rank.html

    Example:
        >>> import torch
        >>> s = torch.tensor([2.0, 1.0, 0.01, 1e-9])
        >>> numerical_rank(s).item(), numerical_rank(s, tolerance=0.1).item()
        (3.0, 2.0)
    """
    require(tolerance is None or tolerance >= 0, "tolerance", tolerance, "use a number of at least 0, or None")
    relative = len(s) * torch.finfo(torch.float32).eps if tolerance is None else tolerance
    return torch.where(s.isnan().any(), torch.nan, (s > relative * s.max()).sum()).to(s.dtype)


@in_full_precision
def condition_number(s: Tensor, tolerance: float | None = None) -> Tensor:
    """Return the largest singular value divided by the smallest that counts for the :func:`numerical_rank`.

    Values below the tolerance are rounding errors and excluded: a collapsed spectrum shows in the rank.

    Args:
        s: singular values ``(r,)``, at least 0.
        tolerance: as in :func:`numerical_rank`.

    Returns:
        A scalar of at least 1, and 1 for equal values; 0 if all values are 0.

    Raises:
        UsageError: ``tolerance`` is below 0.

    Example:
        >>> import torch
        >>> condition_number(torch.tensor([2.0, 1.0, 0.5, 0.0])).item()
        4.0
    """
    rank = numerical_rank(s, tolerance)
    return s.max() / s.sort(descending=True).values[int(rank) - 1] if rank > 0 else rank


def singular_alignment(first: Tensor, second: Tensor, number: int) -> Tensor:
    r"""Return the alignment of the singular vectors of two consecutive linear layers, :math:`\lvert V_2^T U_1 \rvert`.

    Entry (i, j) is the absolute cosine of the i-th right singular vector of the second layer's weight and the j-th left
    singular vector of the first layer's weight. It is the identity for aligned layers, as FedDecorr's Theorem 1
    assumes; unrelated directions in d dimensions have :math:`\sqrt{2 / (\pi d)}` on average, for large d.

    Args:
        first: weight of the layer closer to the input, ``(m, n)``.
        second: weight of the next layer, ``(p, m)``.
        number: number k of compared singular vectors of each layer, with the largest values; at least 1.

    Returns:
        ``(k, k)``, in [0, 1], in float64, without gradient; smaller if a matrix has fewer than k singular values.
        Vectors of equal singular values, and so their alignments, are not unique.

    Raises:
        UsageError: the first layer's outputs do not fit the second layer's inputs, or ``number`` is below 1.

    Source: FedDecorr, Assumption 2 in Appendix A.3, and Figure 6.

    Example:
        >>> import torch
        >>> first = torch.diag(torch.tensor([3.0, 2.0, 1.0]))
        >>> singular_alignment(first, 5 * first, 2).round().tolist()
        [[1.0, 0.0], [0.0, 1.0]]
        >>> singular_alignment(first, first.flip(1), 2).round().tolist()
        [[0.0, 0.0], [0.0, 1.0]]
    """
    sizes = (tuple(first.shape), tuple(second.shape))
    require(first.shape[0] == second.shape[1], "shapes", sizes, "use the weights of consecutive layers")
    require(number >= 1, "number", number, "give 1 or more")
    left_vectors = torch.linalg.svd(first.detach().double(), full_matrices=False).U
    right_vectors = torch.linalg.svd(second.detach().double(), full_matrices=False).Vh
    return (right_vectors[:number] @ left_vectors[:, :number]).abs().clamp(max=1)
