"""Penalties on the correlation or covariance of a representation's dimensions: FedDecorr and DeCov.

FedDecorr: Shi et al., Towards Understanding and Mitigating Dimensional Collapse in Heterogeneous Federated Learning,
ICLR 2023. https://arxiv.org/abs/2210.00226, https://github.com/bytedance/FedDecorr

DeCov: Cogswell et al., Reducing Overfitting in Deep Networks by Decorrelating Representations, ICLR 2016.
https://arxiv.org/abs/1511.06068

Structured DeCov: Xiong et al., Regularizing Deep Convolutional Neural Networks with a Structured Decorrelation
Constraint, ICDM 2016. https://doi.org/10.1109/ICDM.2016.0063
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fl_lightning.functional.rows import as_rows, centered, in_full_precision, linked_zero
from fl_lightning.utilities.errors import require

LEAST_VARIANCE = 1e-8


@in_full_precision
def correlation_frobenius(z: Tensor, form: Literal["official", "paper"] = "official") -> Tensor:
    r"""The squared Frobenius norm of the correlation matrix K of the columns of z, scaled.

    The columns of z are centered and divided by :math:`\sqrt{10^{-8} + \text{variance}}` (unbiased variance), which
    gives Z, and :math:`K = Z^T Z / B`. The form ``paper`` is :math:`\lVert K \rVert_F^2 / d^2`. The form ``official``,
    the authors' code, is :math:`B` times the mean of the squared off-diagonal entries of K. It grows with the batch
    size, and the published coefficients were chosen for it. The diagonal of K, which only ``paper`` counts, is constant
    up to the 1e-8, so that its gradient is negligible.

    Args:
        z: representations ``(B, ...)``, flattened to ``(B, d)``.
        form: ``official`` or ``paper``.

    Returns:
        A scalar, at least 0. The form ``official`` is 0.5 for B = 2 and 0 for d = 1. Both are 0, with gradient 0, for
        B < 2. A constant column adds 0 and has gradient 0.

    Raises:
        UsageError: ``form`` has another value.

    Source: FedDecorr, Eq. 8 (``paper``) and ``loss.py`` of the authors' code (``official``).

    Example:
        >>> import torch
        >>> correlated = torch.tensor([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]])
        >>> correlation_frobenius(correlated), correlation_frobenius(correlated, form="paper")
        (tensor(1.3333), tensor(0.4444))
        >>> correlation_frobenius(torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])).round(decimals=4)
        tensor(0.)
    """
    require(form in ("official", "paper"), "form", form, "choose official or paper")
    rows = as_rows(z)
    batch, d = rows.shape
    if batch < 2:
        return linked_zero(z)
    normal = centered(rows)
    normal = normal / torch.sqrt(LEAST_VARIANCE + normal.square().sum(0) / (batch - 1))
    if form == "paper":
        return _products(normal).square().sum() / (batch * d) ** 2
    products = _products(normal)
    if d <= batch:
        off_diagonal = (products - torch.diag(products.diagonal())).square().sum()
    else:  # columns that outnumber the rows are always correlated, so that no digits cancel in this difference
        off_diagonal = products.square().sum() - normal.square().sum(0).square().sum()
    return off_diagonal / (batch * max(d * (d - 1), 1))


def _products(normal: Tensor) -> Tensor:
    """Inner products of columns ``(d, d)`` or of rows ``(B, B)``, the smaller of the two: their norms are equal."""
    batch, d = normal.shape
    return normal.T @ normal if d <= batch else normal @ normal.T


@in_full_precision
def singular_value_variance(z: Tensor) -> Tensor:
    r"""The variance of the singular values of the covariance C of z, :math:`\frac1d \sum_k (\sigma_k - \bar\sigma)^2`.

    C is the covariance of the columns of z over the batch, ``(d, d)``, divided by B. No singular value is computed: C
    is positive semi-definite, so that the sum is :math:`\lVert C - \bar\sigma I \rVert_F^2`, where the mean is that
    of its diagonal. For columns of variance 1, so that C is the correlation matrix K, it is
    :math:`\lVert K \rVert_F^2 / d - 1`, which is FedDecorr's Proposition 1: d times the form ``paper`` of
    :func:`correlation_frobenius`, minus 1.

    Args:
        z: representations ``(B, ...)``, flattened to ``(B, d)``.

    Returns:
        A scalar, at least 0. It is 0 for d = 1, and, with gradient 0, for B < 2. It grows with the fourth power of the
        scale of z.

    Source: FedDecorr, Eq. 6 and Proposition 1.

    Example:
        >>> import torch
        >>> even, uneven = torch.eye(4) - 0.25, torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 2.0], [0.0, -2.0]])
        >>> singular_value_variance(even[:, :3]) < singular_value_variance(uneven)
        tensor(True)
        >>> singular_value_variance(uneven)  # singular values 2 and 0.5
        tensor(0.5625)
    """
    rows = as_rows(z)
    batch, d = rows.shape
    if batch < 2:
        return linked_zero(z)
    # of columns or of rows: the singular values are equal except zeros
    products = _products(centered(rows)) / batch
    mean, size = products.diagonal().sum() / d, len(products)
    gaps = products - mean * torch.eye(size, dtype=products.dtype, device=products.device)
    return (gaps.square().sum() + (d - size) * mean.square()) / d


def covariance_decorrelation(z: Tensor) -> Tensor:
    r"""DeCov's term, :math:`\frac12 (\lVert C \rVert_F^2 - \lVert \mathrm{diag}\, C \rVert^2)`.

    C is the covariance of the columns of z over the batch, ``(d, d)``, divided by B.

    Args:
        z: representations ``(B, ...)``, flattened to ``(B, d)``.

    Returns:
        A scalar, at least 0; 0 for B = 1 and for d = 1. It grows with the fourth power of the scale of z.

    Source: DeCov, Eq. 3.

    Example:
        >>> import torch
        >>> z = torch.tensor([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]])
        >>> covariance_decorrelation(z), covariance_decorrelation(2 * z)
        (tensor(0.4444), tensor(7.1111))
    """
    return structured_covariance_decorrelation(z, groups=as_rows(z).shape[1])


@in_full_precision
def structured_covariance_decorrelation(z: Tensor, groups: int = 8, gamma: float = 0.0) -> Tensor:
    r"""DeCov's term between groups of dimensions, minus :math:`\gamma` times the same term inside the groups.

    :math:`\frac12 \sum_{g(i) \ne g(j)} C_{ij}^2 - \frac\gamma2 \sum_{g(i) = g(j), i \ne j} C_{ij}^2`, where C is the
    covariance over the batch and g(i) the group of dimension i. Groups are contiguous, and their sizes differ by at
    most one.

    Args:
        z: representations ``(B, ...)``, flattened to ``(B, d)``.
        groups: number of groups, from 1 to d; d gives DeCov.
        gamma: reward of covariance inside a group, at least 0; 0 ignores it. Above 0 the value has no lower bound.

    Returns:
        A scalar, at least 0 for ``gamma=0``.

    Raises:
        UsageError: ``groups`` is outside [1, d], or ``gamma`` is below 0.

    Source: after Xiong et al. 2016, whose constants are not public. This definition is ours.

    Example:
        >>> import torch
        >>> z = torch.tensor([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]])
        >>> structured_covariance_decorrelation(z, groups=1), structured_covariance_decorrelation(z, groups=2)
        (tensor(0.), tensor(0.4444))
    """
    rows = as_rows(z)
    batch, d = rows.shape
    require(1 <= groups <= d, "groups", groups, f"the representation has {d} dimensions, give 1 to {d}")
    require(gamma >= 0, "gamma", gamma, "give 0 or more")
    rows = centered(rows)
    squares = (rows.T @ rows / batch).square()
    group = torch.arange(d, device=z.device) * groups // d
    between = group[:, None] != group[None, :]
    inside = ~between & ~torch.eye(d, dtype=torch.bool, device=z.device)
    return 0.5 * squares.masked_fill(~between, 0).sum() - 0.5 * gamma * squares.masked_fill(~inside, 0).sum()
