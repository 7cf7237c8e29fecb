r"""Similarities of two layers' activations on the same examples.

Centered kernel alignment: Kornblith et al., Similarity of Neural Network Representations Revisited, ICML
2019. The other two are the alternatives of FedCKA (Son et al., 2021), Table 3.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fl_lightning.errors import require
from fl_lightning.functional._precision import centered, in_full_precision, linked_zero, unit_scale

EPS = 1e-12


def linear_cka(x: Tensor, y: Tensor, debiased: bool = False) -> Tensor:
    r"""Linear CKA, :math:`\langle K, L \rangle / (\lVert K \rVert \lVert L \rVert)`.

    :math:`K = XX^T, L = YY^T` with centered X and Y. Invariant to rotation, isotropic scaling and shift of
    either argument. With few examples in many dimensions the plain form lies near 1 for unrelated
    activations; the debiased one, whose parts are estimated without bias, does not.

    Args:
        x: ``(n, ...)``, flattened to ``(n, p)``.
        y: ``(n, ...)``, flattened to ``(n, q)``.
        debiased: use the U-statistic.

    Returns:
        A scalar in [0, 1], 1 for n = 2, or in [-1, 1] when debiased; 0, with gradient 0, for n < 2 (n < 4
        when debiased) and where all rows are equal.

    Raises:
        UsageError: x and y have different numbers of rows.

    Source: Kornblith et al. 2019, Eq. 1 to 3; debiased as in Song et al., JMLR 2012. Ours is the 1e-12 in the
    denominator.
    """
    return linear_ckas(x, y, debiased=debiased)[0]


@in_full_precision
def linear_ckas(x: Tensor, *ys: Tensor, debiased: bool = False) -> Tensor:
    """:func:`linear_cka` of x with each of several y, ``(number of ys,)``; what belongs to x is computed once."""
    for y in ys:
        _require_same_rows(x, y)
    if len(x) < (4 if debiased else 2):
        return torch.stack([linked_zero(x, y) for y in ys])
    if not debiased and len(x) > max(math.prod(a.shape[1:]) for a in (x, *ys)):
        return torch.stack([_by_columns(_standard(x), _standard(y)) for y in ys])
    k, *ls = (_u_center(gram) if debiased else gram for gram in map(_centered_gram, (x, *ys)))
    return torch.stack([_alignment(k, other) for other in ls])


@in_full_precision
def rbf_cka(x: Tensor, y: Tensor, bandwidth: float = 0.5) -> Tensor:
    r"""CKA with the kernel :math:`e^{-q / (2 t^2 m)}`, q the squared distance of rows.

    m is the median of all n^2 distances, the n zeros from a row to itself among them.

    Args:
        x: ``(n, ...)``, flattened.
        y: ``(n, ...)``, flattened.
        bandwidth: t > 0; the median is a constant to the gradient.

    Returns:
        A scalar in [0, 1], 1 for n = 2; 0, with gradient 0, for n < 2 and where all rows are equal.

    Raises:
        UsageError: ``bandwidth`` is not above 0, or x and y have different numbers of rows.

    Source: Kornblith et al. 2019, section 3, and the authors' notebook. Where most rows are equal, so that m
    is 0, the mean stands in for it.
    """
    require(bandwidth > 0, "bandwidth", bandwidth, "give a number above 0")
    _require_same_rows(x, y)
    if len(x) < 2:
        return linked_zero(x, y)
    return _alignment(_center(_rbf(_standard(x), bandwidth)), _center(_rbf(_standard(y), bandwidth)))


@in_full_precision
def frobenius_similarity(x: Tensor, y: Tensor) -> Tensor:
    r"""Minus the mean squared difference, :math:`-\lVert x - y \rVert_F^2 / \text{numel}`: at most 0.

    Args:
        x: any shape.
        y: the same shape.

    Source: FedCKA, Table 3. The paper's squared norm is a distance; negated and per element it is a
    similarity that does not overflow.
    """
    return -(x - y).square().mean()


@in_full_precision
def cosine_similarity(x: Tensor, y: Tensor) -> Tensor:
    """Cosine of the angle between two whole tensors as vectors, in [-1, 1]; 0 if one of them is 0.

    Args:
        x: any shape.
        y: the same shape.

    Source: FedCKA, Table 3.
    """
    return torch.nn.functional.cosine_similarity(x.flatten(), y.flatten(), dim=0)


class _Gram(torch.autograd.Function):
    """Inner products ``(n, n)`` of centered rows ``(n, p)``, for p far above n.

    The wide matrix is read as often as must be: its products are centered instead of its rows, and autograd would
    multiply it twice.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        # without the first row, equal rows give exactly 0 and far ones keep their digits
        rows = rows - rows[0]
        ctx.save_for_backward(rows)
        return _twice_centered(rows @ rows.T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (rows,) = ctx.saved_tensors
        return _twice_centered(gradient + gradient.T) @ rows


def _twice_centered(gram: Tensor) -> Tensor:
    """H G H with H = I - 1/n."""
    half = gram - gram.mean(0)
    return half - half.mean(1, keepdim=True)


def _centered_gram(x: Tensor) -> Tensor:
    """``(n, n)`` with largest entry 1: alignment has no scale, products of norms overflow."""
    # the order of columns has no part in it, and this one costs no copy
    last = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)
    gram: Tensor = _Gram.apply((x.permute(0, 2, 3, 1) if last else x).flatten(1))
    largest = gram.detach().abs().amax()
    return gram / torch.where(largest > torch.finfo(gram.dtype).tiny, largest, 1)


def _by_columns(x: Tensor, y: Tensor) -> Tensor:
    """The same number from matrices of columns, smaller where there are many rows."""
    return (x.T @ y).square().sum() / ((x.T @ x).norm() * (y.T @ y).norm() + EPS)


def _require_same_rows(x: Tensor, y: Tensor) -> None:
    require(len(x) == len(y), "rows", (len(x), len(y)), "give x and y on the same examples")


def _standard(x: Tensor) -> Tensor:
    """Centered rows ``(n, p)`` with largest entry 1: alignment has no scale, products overflow."""
    return unit_scale(centered(x.flatten(1)))[0]


def _rbf(rows: Tensor, bandwidth: float) -> Tensor:
    # by products of matrices, the distance of equal rows would not be 0
    distances = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").square()
    return torch.exp(-distances / (2 * bandwidth**2 * _typical(distances.detach())))


def _typical(distances: Tensor) -> Tensor:
    median = (distances.median() - (-distances).median()) / 2
    median = torch.where(median > 0, median, distances.mean())
    return torch.where(median > 0, median, 1)


def _alignment(k: Tensor, l: Tensor) -> Tensor:  # noqa: E741 - K and L, as in the paper
    return (k * l).sum() / (k.norm() * l.norm() + EPS)


def _center(k: Tensor) -> Tensor:
    return k - k.mean(0, keepdim=True) - k.mean(1, keepdim=True) + k.mean()


def _u_center(k: Tensor) -> Tensor:
    """With a zero diagonal, every row and column sums to 0."""
    n = len(k)
    k = k - torch.diag(k.diagonal())
    means = k.sum(0) / (n - 2)
    means = means - means.sum() / (2 * (n - 1))
    k = k - means[:, None] - means[None, :]
    return k - torch.diag(k.diagonal())
