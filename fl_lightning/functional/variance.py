"""The variance of predictions over a batch: FedUV, Son et al., CVPR 2024, Eq. 2 and supplement Table 6."""

from __future__ import annotations

import math
from typing import Literal

from torch import Tensor

from fl_lightning.errors import require
from fl_lightning.functional._precision import in_full_precision

Hinge = Literal["linear", "none", "square", "clamped_square"]


@in_full_precision
def probability_variance_hinge(logits: Tensor, hinge: Hinge = "linear") -> Tensor:
    r"""How far the deviation of each class's probability over the batch lies below that of balanced one-hot labels.

    With :math:`s_j` the unbiased standard deviation of column j of softmax(logits) and :math:`c = 1/\sqrt C`, which is
    that of a column of the identity, the mean over j of :math:`\max(0, c - s_j)` (``linear``), :math:`c - s_j`
    (``none``), :math:`(c - s_j)^2` (``square``) or :math:`\max(0, c - s_j)^2` (``clamped_square``).

    Args:
        logits: raw logits ``(B, C)``.
        hinge: the form above.

    Returns:
        A scalar, at most :math:`c` when ``linear``; 0, without gradient, for fewer than two rows. Predictions that are
        all the same receive the value c but no gradient.

    Raises:
        UsageError: another ``hinge``.

    Source: FedUV, Eq. 2, after the authors' code, which reads probabilities and not one-hot predictions.
    """
    known = ("linear", "none", "square", "clamped_square")
    require(hinge in known, "hinge", hinge, f"choose one of {', '.join(known)}")
    if len(logits) < 2:
        return (logits * 0).sum()
    gap = 1 / math.sqrt(logits.shape[1]) - logits.softmax(1).std(0)
    if hinge in ("linear", "clamped_square"):
        gap = gap.clamp_min(0)
    return (gap.square() if "square" in hinge else gap).mean()
