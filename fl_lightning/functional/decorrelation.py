"""The correlation of a representation's dimensions: FedDecorr, Shi et al., ICLR 2023, Eq. 8."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fl_lightning.errors import require
from fl_lightning.functional._precision import in_full_precision

EPS = 1e-8


@in_full_precision
def correlation_frobenius(z: Tensor, form: Literal["official", "paper"] = "official") -> Tensor:
    r"""The squared Frobenius norm of the correlation matrix K of the columns of z.

    Columns are centered and divided by :math:`\sqrt{10^{-8} + \text{variance}}` (unbiased), and :math:`K = Z^T Z / B`.
    ``paper`` is :math:`\lVert K \rVert_F^2 / d^2`. ``official``, the authors' code, is :math:`B` times the mean of the
    squared off-diagonal entries: it grows with the batch, and the published coefficients belong to it.

    Args:
        z: representations ``(B, d)``.
        form: ``official`` or ``paper``.

    Returns:
        A scalar, at least 0; 0.5 for B = 2 when ``official``; 0, without gradient, for B = 1. A constant column adds 0.

    Raises:
        UsageError: another ``form``.

    Source: FedDecorr, Eq. 8 (``paper``) and the authors' code (``official``).
    """
    require(form in ("official", "paper"), "form", form, "choose official or paper")
    batch, d = z.shape
    if batch < 2:
        return (z * 0).sum()
    normal = (z - z.mean(0)) / torch.sqrt(EPS + z.var(0))
    # the smaller of the two Gram matrices has the same Frobenius norm
    gram = normal.T @ normal if d <= batch else normal @ normal.T
    total = gram.square().sum()
    if form == "paper":
        return total / (batch * d) ** 2
    diagonal = normal.square().sum(0).square().sum()
    return (total - diagonal) / (batch * max(d * (d - 1), 1))
