"""The uniformity of representations: FedUV, Son et al., CVPR 2024, Eq. 4."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fl_lightning.errors import require
from fl_lightning.functional._precision import in_full_precision, linked_zero, unit_scale


@in_full_precision
def rbf_uniformity(z: Tensor, bandwidth_factor: float = 1.0, detach_bandwidth: bool = False) -> Tensor:
    r"""Mean of :math:`e^{-q_{ij} / (f \sigma)}` over the pairs i < j, q the squared distance of two rows.

    :math:`\sigma` is the (lower) median of the non-zero q. It carries gradient unless detached; with it,
    the gradient has no part along z, since the value does not change with the scale of z. Pairs of equal rows
    count as 1 in the mean and not in the median.

    Args:
        z: representations ``(B, d)``.
        bandwidth_factor: f > 0; 1 is the authors' code, 2 the text.
        detach_bandwidth: whether the median is a constant to the gradient.

    Returns:
        A scalar in (0, 1), :math:`e^{-1/f}` for two different rows; 0, with gradient 0, for fewer than two
        rows or when all are equal.

    Raises:
        UsageError: ``bandwidth_factor`` is not above 0.

    Source: FedUV, Eq. 4 and the authors' code, which gives nan where this gives 0.
    """
    require(bandwidth_factor > 0, "bandwidth_factor", bandwidth_factor, "give a number above 0")
    if len(z) < 2:
        return linked_zero(z)
    # pdist's distance of equal rows is exactly 0, with gradient 0; the squares have the squared median
    distances, _ = unit_scale(torch.pdist(z.flatten(1)))
    distinct = distances[distances > math.sqrt(torch.finfo(z.dtype).tiny)]
    if len(distinct) == 0:
        return linked_zero(z)
    width = distinct.median()
    ratios = distances / (width.detach() if detach_bandwidth else width)
    return torch.exp(-ratios.square() / bandwidth_factor).mean()
