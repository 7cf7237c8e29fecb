"""Logits adjusted by label counts: FedLC, FedRS, logit adjustment and FedVLS.

FedLC: Zhang et al., Federated Learning with Label Distribution Skew via Logits Calibration, ICML 2022.
https://arxiv.org/abs/2209.00189

FedRS: Li and Zhan, Federated Learning with Restricted Softmax for Label Distribution Non-IID Data, KDD 2021.
https://doi.org/10.1145/3447548.3467254, https://github.com/lxcnju/FedRepo

Logit adjustment: Menon et al., Long-Tail Learning via Logit Adjustment, ICLR 2021. https://arxiv.org/abs/2007.07314

FedVLS: Guo et al., Exploring Vacant Classes in Label-Skewed Federated Learning, arXiv 2024.
https://arxiv.org/abs/2401.02329, https://github.com/krumpguo/FedVLS
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.functional.rows import in_full_precision
from fl_lightning.utilities.errors import require

FLOOR = 1e-8
Missing = Literal["floor", "mask", "clamp"]
Margin = Literal["fourth_root", "log_prior"]


@in_full_precision
def calibrated_logits(
    logits: Tensor,
    class_counts: Tensor,
    tau: float = 1.0,
    missing: Missing = "floor",
    margin: Margin = "fourth_root",
) -> Tensor:
    r"""Subtract from every logit the margin of its class, :math:`o_c - \tau \Delta_c`; rare classes lose most.

    The margin :math:`\Delta_c` is :math:`n_c^{-1/4}` (``fourth_root``), or :math:`-\log \gamma_c`, where
    :math:`\gamma_c = n_c / \sum_i n_i` estimates the class prior (``log_prior``). With ``log_prior`` and
    :math:`\tau = 1`, the cross-entropy of the result is least where softmax(o) is the posterior under equal class
    priors, whatever the counts are.

    Args:
        logits: raw logits ``(B, C)``.
        class_counts: :math:`n_c`, the client's number of training examples of each class, ``(C,)``.
        tau: :math:`\tau \ge 0`; 0 does not change the logits, except missing classes under ``mask``.
        missing: treatment of classes without examples at the client: count 1e-8 examples, which for
            ``fourth_root`` subtracts :math:`100 \tau` (``floor``); set its logit to minus infinity (``mask``); or count
            one example (``clamp``).
        margin: ``fourth_root`` or ``log_prior``.

    Returns:
        Logits ``(B, C)`` in float32 (float64 for float64). With ``mask`` their cross-entropy is finite only
        if no label belongs to a missing class and labels are not smoothed.

    Raises:
        UsageError: ``missing`` or ``margin`` has another value.

    Source: FedLC, Eq. 6 and 7 (``fourth_root``), Eq. 4 and 5 (``log_prior``). The paper does not treat missing classes,
    and public implementations differ.

    Example:
        >>> import torch
        >>> calibrated_logits(torch.zeros(1, 3), torch.tensor([1, 16, 0]))
        tensor([[  -1.0000,   -0.5000, -100.0000]])
        >>> calibrated_logits(torch.zeros(1, 3), torch.tensor([1, 16, 0]), missing="mask")
        tensor([[-1.0000, -0.5000,    -inf]])
        >>> calibrated_logits(torch.zeros(1, 2), torch.tensor([25, 75]), margin="log_prior").exp()
        tensor([[0.2500, 0.7500]])
    """
    require(missing in ("floor", "mask", "clamp"), "missing", missing, "choose floor, mask or clamp")
    require(margin in ("fourth_root", "log_prior"), "margin", margin, "choose fourth_root or log_prior")
    counts = class_counts.to(logits.dtype)
    counted = counts.clamp_min(FLOOR if missing == "floor" else 1)
    margins = counted.pow(-0.25) if margin == "fourth_root" else counts.sum().clamp_min(1).log() - counted.log()
    lowered = logits - tau * margins
    return lowered.masked_fill(counts == 0, -torch.inf) if missing == "mask" else lowered


@in_full_precision
def restricted_logits(
    logits: Tensor, class_counts: Tensor, alpha: float = 0.5, mode: Literal["binary", "frequency"] = "binary"
) -> Tensor:
    r"""Scale down the logits of classes without examples at the client: :math:`a_c o_c`.

    In mode ``binary`` :math:`a_c = \alpha` for missing classes (:math:`n_c = 0`) and 1 for the others. In mode
    ``frequency`` :math:`a_c = \alpha + (1 - \alpha) n_c / \max_j n_j`, which scales down rare classes too.

    Args:
        logits: raw logits ``(B, C)``.
        class_counts: :math:`n_c`, the client's number of training examples of each class, ``(C,)``.
        alpha: :math:`\alpha \in [0, 1]`; 1 does not change the logits.
        mode: ``binary``, as in the paper, or ``frequency``, as in the first author's code.

    Returns:
        Logits ``(B, C)`` in float32 (float64 for float64).

    Raises:
        UsageError: ``alpha`` is outside [0, 1], or ``mode`` has another value.

    Source: FedRS, section 4.

    Example:
        >>> import torch
        >>> restricted_logits(torch.full((1, 3), 2.0), torch.tensor([10, 5, 0]))
        tensor([[2., 2., 1.]])
        >>> restricted_logits(torch.full((1, 3), 2.0), torch.tensor([10, 5, 0]), mode="frequency")
        tensor([[2.0000, 1.5000, 1.0000]])
    """
    require(0 <= alpha <= 1, "alpha", alpha, "use a number in [0, 1]")
    require(mode in ("binary", "frequency"), "mode", mode, "choose binary or frequency")
    counts = class_counts.to(logits.dtype)
    share = (counts > 0).to(logits.dtype) if mode == "binary" else counts / counts.max().clamp_min(1)
    return logits * (alpha + (1 - alpha) * share)


@in_full_precision
def adjusted_logits(logits: Tensor, class_counts: Tensor, tau: float = 1.0, floor: float = 0.0) -> Tensor:
    r"""Add the log of the class prior to the logits, :math:`o_c + \log(\pi_c^\tau + f)` with :math:`\pi_c = n_c / n`.

    For :math:`\tau = 1` and f = 0, the cross-entropy of the result is least where softmax(o) is the posterior under
    equal class priors, whatever the counts are: the balanced softmax. A common factor on the counts changes nothing.

    Args:
        logits: raw logits ``(B, C)``.
        class_counts: :math:`n_c`, the number of training examples of each class, ``(C,)``; n is their sum.
        tau: :math:`\tau \ge 0`; 0 does not change the logits.
        floor: f >= 0; 0 gives classes without examples the logit minus infinity.

    Returns:
        Logits ``(B, C)`` in float32 (float64 for float64).

    Raises:
        UsageError: ``tau`` or ``floor`` is below 0.

    Source: logit adjustment, the loss of its section 4, for f = 0.

    Example:
        >>> import torch
        >>> adjusted_logits(torch.zeros(1, 3), torch.tensor([30, 10, 0])).exp()
        tensor([[0.7500, 0.2500, 0.0000]])
    """
    require(tau >= 0, "tau", tau, "give 0 or more")
    require(floor >= 0, "floor", floor, "give 0 or more")
    counts = class_counts.to(logits.dtype)
    shares = counts / counts.sum().clamp_min(1)
    least = torch.full_like(shares, math.log(floor) if floor else -math.inf)
    return logits + torch.logaddexp(torch.xlogy(tau, shares), least)  # 0 log 0 is 0


@in_full_precision
def logit_suppression(logits: Tensor, targets: Tensor, class_counts: Tensor) -> Tensor:
    r"""Size of the logits of classes other than the label, weighted by the class prior.

    .. math::
        \sum_c \pi_c \log \frac{1}{B} \sum_b
        \exp\Bigl([y_b \ne c] \bigl(o_{bc} - \log \tfrac{\pi_c + \epsilon}{1 / C + \epsilon}\bigr)\Bigr)

    An example of class c counts :math:`\exp(0) = 1` in the term of c. Classes without examples have weight
    0. :math:`\epsilon` is 1e-9.

    Args:
        logits: o, ``(B, C)``.
        targets: labels y ``(B,)``, below C.
        class_counts: :math:`n_c`, the number of training examples of each class, ``(C,)``; :math:`\pi_c = n_c / n`.

    Returns:
        A scalar, without a lower bound. Its gradient with respect to the logits of labels is 0.

    Source: FedVLS, and system/flcore/clients/clientvls.py of the authors' code.

    Example:
        >>> import torch
        >>> logit_suppression(torch.zeros(2, 2), torch.tensor([0, 1]), torch.tensor([1, 1]))
        tensor(0.)
    """
    shares = class_counts.to(logits.dtype) / class_counts.sum().clamp_min(1)
    is_no_label = targets[:, None] != torch.arange(logits.shape[1], device=logits.device)
    exponents = is_no_label * (logits - ((shares + 1e-9) / (1 / logits.shape[1] + 1e-9)).log())
    return shares @ (exponents.logsumexp(0) - math.log(len(logits)))
