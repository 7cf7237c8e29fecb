"""Logits changed by label counts: FedLC, Zhang et al., ICML 2022, Eq. 5; FedRS, Li and Zhan, KDD 2021."""

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


@in_full_precision
def restricted_logits(
    logits: Tensor, class_counts: Tensor, alpha: float = 0.5, mode: Literal["binary", "frequency"] = "binary"
) -> Tensor:
    r"""Scale the logits of classes that the client lacks: :math:`a_c o_c`.

    ``binary``: :math:`a_c = \alpha` for :math:`n_c = 0`, else 1. ``frequency``:
    :math:`a_c = \alpha + (1 - \alpha) n_c / \max_j n_j`, which also restricts rare classes.

    Args:
        logits: raw logits ``(B, C)``.
        class_counts: :math:`n_c`, the client's number of training examples of each class, ``(C,)``.
        alpha: in [0, 1]; 1 leaves the logits as they are.
        mode: ``binary``, the paper's, or ``frequency``, of the first author's code.

    Returns:
        Logits ``(B, C)`` in float32 (float64 for float64).

    Raises:
        UsageError: ``alpha`` outside [0, 1], or another ``mode``.

    Source: FedRS, section 4.
    """
    require(0 <= alpha <= 1, "alpha", alpha, "give a number in [0, 1]")
    require(mode in ("binary", "frequency"), "mode", mode, "choose binary or frequency")
    counts = class_counts.to(logits.dtype)
    share = (counts > 0).to(logits.dtype) if mode == "binary" else counts / counts.max().clamp_min(1)
    return logits * (alpha + (1 - alpha) * share)
