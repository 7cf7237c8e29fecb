"""The uniformity of representations: FedUV.

Son et al., FedUV: Uniformity and Variance for Heterogeneous Federated Learning, CVPR 2024.
https://arxiv.org/abs/2402.18372, https://github.com/sonhamin/FedUV
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fl_lightning.errors import require
from fl_lightning.functional._precision import in_full_precision, linked_zero, unit_scale
from fl_lightning.functional.rows import as_rows


@in_full_precision
def rbf_uniformity(z: Tensor, bandwidth_factor: float = 1.0, detach_bandwidth: bool = False) -> Tensor:
    r"""FedUV's :math:`L_U`: the mean of :math:`e^{-q_{ij} / (f \sigma)}` over all pairs of rows.

    :math:`q_{ij}` is the squared distance of rows i and j, with i < j, and :math:`\sigma` the lower median of those
    that are not 0. The value does not depend on the scale of z, so that gradients that flow through the median too are
    orthogonal to z. A pair of equal rows counts as 1 in the mean and is left out of the median.

    Args:
        z: representations ``(B, ...)``, flattened to ``(B, d)``.
        bandwidth_factor: f > 0; 1 in the authors' code, 2 in the paper's text.
        detach_bandwidth: treat the median as a constant in the gradient.

    Returns:
        A scalar in (0, 1), which is :math:`e^{-1/f}` for two different rows. It is 0, with gradient 0, for fewer than
        two rows and if all rows are equal.

    Raises:
        UsageError: ``bandwidth_factor`` is not above 0.

    Source: FedUV, Eq. 4, after the authors' code, which returns nan where this function returns 0.

    Example:
        >>> import torch
        >>> rbf_uniformity(torch.tensor([[0.0, 0.0], [3.0, 4.0]]))
        tensor(0.3679)
        >>> spread, clustered = torch.eye(3), torch.tensor([[0.0], [0.1], [5.0]])
        >>> rbf_uniformity(spread) < rbf_uniformity(clustered)
        tensor(True)
    """
    require(bandwidth_factor > 0, "bandwidth_factor", bandwidth_factor, "give a number above 0")
    if len(z) < 2:
        return linked_zero(z)
    # pdist gives equal rows distance 0 with gradient 0; the median of the squares is the square of the median
    distances, _ = unit_scale(torch.pdist(as_rows(z)))
    distinct = distances[distances > math.sqrt(torch.finfo(z.dtype).tiny)]
    if len(distinct) == 0:
        return linked_zero(z)
    width = distinct.median()
    ratios = distances / (width.detach() if detach_bandwidth else width)
    return torch.exp(-ratios.square() / bandwidth_factor).mean()
