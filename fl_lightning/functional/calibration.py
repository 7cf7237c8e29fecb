"""Logits calibrated by label counts: FedLC, Zhang et al., ICML 2022, Eq. 5."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fl_lightning.errors import require
from fl_lightning.functional._precision import in_full_precision

FLOOR = 1e-8
Missing = Literal["floor", "mask", "clamp"]


@in_full_precision
def calibrated_logits(
    logits: Tensor,
    class_counts: Tensor,
    tau: float = 1.0,
    missing: Missing = "floor",
) -> Tensor:
    r"""Lower every logit by the margin of its class, :math:`o_c - \tau n_c^{-1/4}`: the rarer, the more.

    Args:
        logits: ``(B, C)``.
        class_counts: :math:`n_c`, the client's number of training examples of each class, ``(C,)``.
        tau: :math:`\tau \ge 0`; 0 leaves the logits of present classes as they are.
        missing: a class with :math:`n_c = 0` is lowered by :math:`100 \tau` (``floor``: 1e-8 in place of 0),
            becomes minus infinity (``mask``), or is lowered as if it had one example (``clamp``).

    Returns:
        Logits ``(B, C)`` in float32 (float64 for float64). With ``mask``, their cross-entropy is finite where
        no label is of a missing class, without label smoothing.

    Raises:
        UsageError: another ``missing``.

    Source: FedLC, Eq. 5; the paper does not treat missing classes, and public implementations differ.
    """
    require(missing in ("floor", "mask", "clamp"), "missing", missing, "choose floor, mask or clamp")
    counts = class_counts.to(logits.dtype)
    margin = tau * counts.clamp_min(FLOOR if missing == "floor" else 1).pow(-0.25)
    lowered = logits - margin
    return lowered.masked_fill(counts == 0, -torch.inf) if missing == "mask" else lowered
