"""The uniformity of representations: FedUV, Son et al., CVPR 2024, Eq. 4."""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning.functional._precision import in_full_precision


@in_full_precision
def rbf_uniformity(z: Tensor, bandwidth_factor: float = 1.0, detach_bandwidth: bool = False) -> Tensor:
    r"""Mean of :math:`e^{-q_{ij} / (f \sigma)}` over the pairs i < j, q the squared distance of two rows.

    :math:`\sigma` is the (lower) median of the non-zero q. It carries gradient unless detached, which makes the value
    invariant to the scale of z. Pairs of equal rows count as 1 in the mean and not in the median.

    Args:
        z: representations ``(B, d)``.
        bandwidth_factor: f > 0; 1 is the authors' code, 2 the text.
        detach_bandwidth: whether the median is a constant to the gradient.

    Returns:
        A scalar in (0, 1], :math:`e^{-1/f}` for two different rows; 0, without gradient, for fewer than two rows or
        when all are equal.

    Source: FedUV, Eq. 4 and the authors' code.
    """
    # the distance of equal rows is exactly 0, with gradient 0
    squares = torch.pdist(z.flatten(1)).square()
    distinct = squares[squares > 0]
    if len(distinct) == 0:
        return (z * 0).sum()
    width = distinct.median()
    return torch.exp(-squares / (bandwidth_factor * (width.detach() if detach_bandwidth else width))).mean()
