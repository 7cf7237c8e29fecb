"""The variance of predictions over a batch: FedUV, Son et al., CVPR 2024, Eq. 2 and supplement Table 6."""

from __future__ import annotations

import math
from typing import Literal

from torch import Tensor

from fl_lightning.errors import require
from fl_lightning.functional._precision import centered, in_full_precision, linked_zero, unit_scale

Hinge = Literal["linear", "none", "square", "clamped_square"]


@in_full_precision
def probability_variance_hinge(logits: Tensor, hinge: Hinge = "linear") -> Tensor:
    r"""How far each class's probability deviates over the batch less than balanced one-hot labels would.

    With :math:`s_j` the unbiased standard deviation of column j of softmax(logits) and :math:`c = 1/\sqrt C`,
    which is that of a column of the identity, the mean over j of :math:`\max(0, c - s_j)` (``linear``),
    :math:`c - s_j` (``none``), :math:`(c - s_j)^2` (``square``) or :math:`\max(0, c - s_j)^2`
    (``clamped_square``).

    Args:
        logits: raw logits ``(B, C)``.
        hinge: the form above.

    Returns:
        A scalar in [0, c] (``linear``), at most c (``none``) or at least 0; 0, with gradient 0, for fewer
        than two rows. Predictions that are all the same receive the value c but no gradient.

    Raises:
        UsageError: another ``hinge``.

    Source: FedUV, Eq. 2, after the authors' code, which reads probabilities and not one-hot predictions.
    """
    known = ("linear", "none", "square", "clamped_square")
    require(hinge in known, "hinge", hinge, f"choose one of {', '.join(known)}")
    if len(logits) < 2:
        return linked_zero(logits)
    gap = 1 / math.sqrt(logits.shape[1]) - _deviation(logits.softmax(1))
    if hinge in ("linear", "clamped_square"):
        gap = gap.relu()
    return (gap.square() if "square" in hinge else gap).mean()


def _deviation(columns: Tensor) -> Tensor:
    """Unbiased standard deviation ``(C,)``: torch's has infinite gradients near underflow."""
    rows, scale = unit_scale(centered(columns), dim=0)
    return scale * rows.norm(dim=0) / math.sqrt(len(columns) - 1)
