"""The correlation and covariance of a representation's dimensions: FedDecorr, Shi et al., ICLR 2023, Eq. 8; DeCov."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fl_lightning.errors import require
from fl_lightning.functional._precision import centered, in_full_precision, linked_zero

EPS = 1e-8


@in_full_precision
def correlation_frobenius(z: Tensor, form: Literal["official", "paper"] = "official") -> Tensor:
    r"""The squared Frobenius norm of the correlation matrix K of the columns of z.

    Columns are centered and divided by :math:`\sqrt{10^{-8} + \text{variance}}` (unbiased), and
    :math:`K = Z^T Z / B`. ``paper`` is :math:`\lVert K \rVert_F^2 / d^2`. ``official``, the authors' code, is
    :math:`B` times the mean of the squared off-diagonal entries: it grows with the batch, and the published
    coefficients belong to it. The diagonal is constant up to the 1e-8 and has no part in the gradient.

    Args:
        z: representations ``(B, d)``.
        form: ``official`` or ``paper``.

    Returns:
        A scalar, at least 0; when ``official``, 0.5 for B = 2 and 0 for d = 1; 0, with gradient 0, for B < 2.
        A constant column adds 0 and has gradient 0.

    Raises:
        UsageError: another ``form``.

    Source: FedDecorr, Eq. 8 (``paper``) and the authors' code (``official``).
    """
    require(form in ("official", "paper"), "form", form, "choose official or paper")
    batch, d = z.shape
    if batch < 2:
        return linked_zero(z)
    normal = centered(z)
    normal = normal / torch.sqrt(EPS + normal.square().sum(0) / (batch - 1))
    if form == "paper":
        return _products(normal).square().sum() / (batch * d) ** 2
    return _off_diagonal(normal) / (batch * max(d * (d - 1), 1))


def _products(normal: Tensor) -> Tensor:
    """The smaller of the two matrices of inner products, of columns or of rows: their norms are equal."""
    batch, d = normal.shape
    return normal.T @ normal if d <= batch else normal @ normal.T


def _off_diagonal(normal: Tensor) -> Tensor:
    """Sum of the squared inner products of different columns."""
    batch, d = normal.shape
    products = _products(normal)
    if d <= batch:
        return (products - torch.diag(products.diagonal())).square().sum()
    # more columns than rows are never uncorrelated, so that this difference keeps its digits
    return products.square().sum() - normal.square().sum(0).square().sum()


def covariance_decorrelation(z: Tensor) -> Tensor:
    r"""DeCov, half of :math:`\lVert C \rVert_F^2 - \lVert \mathrm{diag}\, C \rVert^2`, C the covariance over the batch.

    Args:
        z: representations ``(B, d)``; the covariance is divided by B.

    Returns:
        A scalar, at least 0; 0 for B = 1 and d = 1. It grows with the fourth power of the scale of z.

    Source: Cogswell et al., ICLR 2016, Eq. 3.
    """
    return structured_covariance_decorrelation(z, groups=z.shape[1])


@in_full_precision
def structured_covariance_decorrelation(z: Tensor, groups: int = 8, gamma: float = 0.0) -> Tensor:
    r"""DeCov between groups of dimensions, less :math:`\gamma` times that inside them.

    :math:`\frac12 \sum_{g(i) \ne g(j)} C_{ij}^2 - \frac\gamma2 \sum_{g(i) = g(j), i \ne j} C_{ij}^2`. Groups are
    contiguous and of equal size, up to one where they do not divide d.

    Args:
        z: representations ``(B, d)``.
        groups: from 1 to d; d gives DeCov.
        gamma: at least 0; above 0 the value has no lower bound.

    Returns:
        A scalar, at least 0 for ``gamma=0``.

    Raises:
        UsageError: ``groups`` outside [1, d], or ``gamma`` below 0.

    Source: after Xiong et al., 2016, whose constants are not public; this definition is ours.
    """
    batch, d = z.shape
    require(1 <= groups <= d, "groups", groups, f"the representation has {d} dimensions, give 1 to {d}")
    require(gamma >= 0, "gamma", gamma, "give 0 or more")
    rows = centered(z)
    squares = (rows.T @ rows / batch).square()
    group = torch.arange(d, device=z.device) * groups // d
    between = group[:, None] != group[None, :]
    inside = ~between & ~torch.eye(d, dtype=torch.bool, device=z.device)
    return 0.5 * squares[between].sum() - 0.5 * gamma * squares[inside].sum()
