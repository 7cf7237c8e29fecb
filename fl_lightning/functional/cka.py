r"""Similarities of two layers' activations on the same examples.

Centered kernel alignment: Kornblith et al., Similarity of Neural Network Representations Revisited, ICML 2019. The
other two are the alternatives of FedCKA (Son et al., 2021), Table 3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning.errors import require
from fl_lightning.functional._precision import in_full_precision

EPS = 1e-12


@in_full_precision
def linear_cka(x: Tensor, y: Tensor, debiased: bool = False) -> Tensor:
    r"""Linear CKA, the cosine :math:`\langle K, L \rangle / (\lVert K \rVert \lVert L \rVert)` of two Gram matrices.

    :math:`K = X X^T` and :math:`L = Y Y^T`, of x and y with centered columns.

    Invariant to rotation, isotropic scaling and shift of either argument. With few examples in many dimensions the
    plain form lies near 1 for unrelated activations; the debiased one, an unbiased estimate of its parts, does not.

    Args:
        x: ``(n, ...)``, flattened to ``(n, p)``.
        y: ``(n, ...)``, flattened to ``(n, q)``.
        debiased: use the U-statistic, which may be negative and needs n > 3.

    Returns:
        A scalar in [0, 1] (at most 1 when debiased); 0, without gradient, for too few examples.

    Source: Kornblith et al. 2019, Eq. 1 to 3; debiased as in Song et al. 2012.
    """
    return _alignment(_gram(x), _gram(y), debiased)


@in_full_precision
def rbf_cka(x: Tensor, y: Tensor, bandwidth: float = 0.5) -> Tensor:
    r"""CKA with the kernel :math:`e^{-q / (2 t^2 m)}`, q the squared distance, m the median of all n^2 of them.

    Args:
        x: ``(n, ...)``, flattened.
        y: ``(n, ...)``, flattened.
        bandwidth: t > 0; the median is a constant to the gradient.

    Returns:
        A scalar in [0, 1]; 0 for fewer than 2 examples.

    Source: Kornblith et al. 2019, section 3.
    """
    require(bandwidth > 0, "bandwidth", bandwidth, "give a number above 0")
    return _alignment(_rbf(x, bandwidth), _rbf(y, bandwidth), False)


@in_full_precision
def frobenius_similarity(x: Tensor, y: Tensor) -> Tensor:
    r"""Minus the mean squared difference, :math:`-\lVert x - y \rVert_F^2 / \text{numel}`: at most 0, 0 for equal ones.

    Args:
        x: any shape.
        y: the same shape.

    Source: FedCKA, Table 3. The paper's squared norm is a distance; negated and per element it is a similarity that
    does not overflow.
    """
    return -(x - y).square().mean()


@in_full_precision
def cosine_similarity(x: Tensor, y: Tensor) -> Tensor:
    """Cosine of the angle between two whole tensors as vectors, in [-1, 1].

    Args:
        x: any shape.
        y: the same shape.

    Source: FedCKA, Table 3.
    """
    return torch.nn.functional.cosine_similarity(x.flatten(), y.flatten(), dim=0)


def _gram(x: Tensor) -> Tensor:
    """Inner products ``(n, n)`` of centered rows; centering first keeps the digits of activations far from 0."""
    rows = x.flatten(1)
    rows = rows - rows.mean(0)
    return rows @ rows.T


def _rbf(x: Tensor, bandwidth: float) -> Tensor:
    products = _gram(x)
    squares = products.diagonal()
    distances = (squares[:, None] + squares[None, :] - 2 * products).clamp_min(0)
    width = 2 * bandwidth**2 * distances.detach().median()
    return torch.exp(-distances / width.clamp_min(torch.finfo(width.dtype).tiny))


def _alignment(k: Tensor, l: Tensor, debiased: bool) -> Tensor:  # noqa: E741
    if len(k) < (4 if debiased else 2):
        return k.new_zeros(())
    k, l = (_center_debiased(k), _center_debiased(l)) if debiased else (_center(k), _center(l))  # noqa: E741
    # each divided by its own norm, so that no product of four activations can overflow
    return (k / k.norm().clamp_min(EPS) * (l / l.norm().clamp_min(EPS))).sum()


def _center(k: Tensor) -> Tensor:
    return k - k.mean(0, keepdim=True) - k.mean(1, keepdim=True) + k.mean()


def _center_debiased(k: Tensor) -> Tensor:
    """U-centering: with a zero diagonal, every row and column sums to 0."""
    n = len(k)
    k = k - torch.diag(k.diagonal())
    means = k.sum(0) / (n - 2)
    means = means - means.sum() / (2 * (n - 1))
    k = k - means[:, None] - means[None, :]
    return k - torch.diag(k.diagonal())
