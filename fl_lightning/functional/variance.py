"""The variance of predictions over a batch: FedUV.

Son et al., FedUV: Uniformity and Variance for Heterogeneous Federated Learning, CVPR 2024.
https://arxiv.org/abs/2402.18372, https://github.com/sonhamin/FedUV
"""

from __future__ import annotations

import math
from typing import Literal

from torch import Tensor

from fl_lightning.errors import require
from fl_lightning.functional._precision import centered, in_full_precision, linked_zero, unit_scale

Hinge = Literal["linear", "none", "square", "clamped_square"]


@in_full_precision
def probability_variance_hinge(logits: Tensor, hinge: Hinge = "linear") -> Tensor:
    r"""FedUV's :math:`L_V`: the lack of variation of the predictions over the batch, against balanced one-hot labels.

    :math:`s_j` is the unbiased standard deviation of column j of softmax(logits), and :math:`c = 1/\sqrt C` the
    standard deviation of a column of the identity. The value is the mean over j of :math:`\max(0, c - s_j)`
    (``linear``), :math:`c - s_j` (``none``), :math:`(c - s_j)^2` (``square``) or :math:`\max(0, c - s_j)^2`
    (``clamped_square``).

    Args:
        logits: raw logits ``(B, C)``.
        hinge: one of the four forms above.

    Returns:
        A scalar: in [0, c] for ``linear``, at most c for ``none``, at least 0 for the squares. It is 0, with gradient
        0, for fewer than two rows. If all predictions are equal, it is c (its square for the squares), also with
        gradient 0.

    Raises:
        UsageError: ``hinge`` has another value.

    Source: FedUV, Eq. 2 and 3 and supplement Table 6, after the authors' code, which takes probabilities where the
    pseudo-code takes one-hot predictions.

    Example:
        >>> import torch
        >>> certain_and_balanced, all_equal = 100 * torch.eye(4), torch.zeros(8, 4)
        >>> probability_variance_hinge(certain_and_balanced), probability_variance_hinge(all_equal)
        (tensor(0.), tensor(0.5000))
    """
    known = ("linear", "none", "square", "clamped_square")
    require(hinge in known, "hinge", hinge, f"choose one of {', '.join(known)}")
    if len(logits) < 2:
        return linked_zero(logits)
    # the gradient of torch's own standard deviation is infinite where squares underflow
    rows, scale = unit_scale(centered(logits.softmax(1)), dim=0)
    gap = 1 / math.sqrt(logits.shape[1]) - scale * rows.norm(dim=0) / math.sqrt(len(logits) - 1)
    if hinge in ("linear", "clamped_square"):
        gap = gap.relu()
    return (gap.square() if "square" in hinge else gap).mean()
