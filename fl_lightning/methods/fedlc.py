r"""FedLC: Zhang et al., Federated Learning with Label Distribution Skew via Logits Calibration, ICML 2022, Eq. 5 to 7.

.. math:: \tilde o_c = o_c - \tau n_c^{-1/4}, \qquad \ell = -\tilde o_y + \log \sum_i e^{\tilde o_i}

The printed Eq. 7 sums over :math:`i \ne y`, which is unbounded below; Theorem 3 and every implementation sum over all.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fl_lightning.client import Client
from fl_lightning.errors import require
from fl_lightning.functional import calibrated_logits
from fl_lightning.method import Method, Step


class FedLC(Method):
    r"""Calibrates the logits by the client's own label counts: rare classes get the larger margin.

    Only the loss in training sees calibrated logits. The paper does not give :math:`\tau`.

    Args:
        tau: :math:`\tau \ge 0`; 0 gives FedAvg (but for ``missing="mask"``, which leaves out missing classes).
        missing: classes the client has no example of: ``floor`` takes 1e-8 for their count (a shift of
            :math:`-100 \tau`), ``mask`` leaves them out of the softmax, ``clamp`` takes 1.
        denominator: ``all`` classes, or the printed Eq. 7 literally (``exclude_true``), which needs the tap ``logits``
            and a cross-entropy loss.
    """

    requires = ("logits",)
    needs_label_counts = True

    def __init__(
        self,
        tau: float = 1.0,
        missing: Literal["floor", "mask", "clamp"] = "floor",
        denominator: Literal["all", "exclude_true"] = "all",
    ) -> None:
        require(tau >= 0, "FedLC.tau", tau, "give 0 or more")
        self.tau, self.missing, self.denominator = tau, missing, denominator

    def transform_logits(self, client: Client, logits: Tensor) -> Tensor:
        counts: Tensor = client.info.label_counts  # type: ignore[assignment]
        return calibrated_logits(logits, counts.to(logits.device), self.tau, self.missing)

    def penalty(self, client: Client, step: Step) -> Tensor | None:
        """What turns the cross-entropy over all classes into the printed equation: log(1 - p_y)."""
        if self.denominator == "all" or step.targets is None:
            return None
        logits = self.transform_logits(client, step.taps["logits"])
        true = torch.nn.functional.one_hot(step.targets, logits.shape[1]).bool()
        return (logits.masked_fill(true, -torch.inf).logsumexp(1) - logits.logsumexp(1)).mean()
