r"""FedLC: Zhang et al., Federated Learning with Label Distribution Skew via Logits Calibration, ICML 2022, Eq. 4 to 7.

Paper: https://arxiv.org/abs/2209.00189

.. math:: \tilde o_c = o_c - \tau n_c^{-1/4}, \qquad \ell = -\tilde o_y + \log \sum_i e^{\tilde o_i}

The margin :math:`\tau n_c^{-1/4}` comes with Eq. 6. Eq. 4 and 5, from which the paper sets out, have the negative log
of the class prior in its place. Eq. 5 and 7 as printed sum over :math:`i \ne y`, which has no lower bound. The paper's
Theorem 3 and every implementation sum over all classes.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fl_lightning.core.client_context import ClientContext
from fl_lightning.core.method import Method, Step
from fl_lightning.data.transfer import transferred
from fl_lightning.functional import calibrated_logits
from fl_lightning.utilities.errors import require


class FedLC(Method):
    r"""Subtracts a margin from each logit o according to the client's label counts, larger for rarer classes.

    :math:`n_c` is the client's number of training examples of class c, and y the label. Only the module's
    ``training_step`` sees these logits, so that its ``train/accuracy`` also uses calibrated logits; evaluation uses raw
    logits. The paper does not print :math:`\tau`.

    Args:
        tau: :math:`\tau \ge 0`; 0 gives FedAvg, unless ``missing="mask"`` and the client lacks a class.
        missing: treatment of classes without examples at the client: count 1e-8 examples (``floor``), which
            subtracts :math:`100 \tau` from their logits, or with ``log_prior`` :math:`\tau (18.4 + \log n)`, where n is
            the client's number of examples; exclude them from the softmax (``mask``); or count one example (``clamp``).
        denominator: sum over ``all`` classes, or over :math:`i \ne y` as printed in Eq. 5 and 7 (``exclude_true``),
            which requires a cross-entropy loss; with ``mask``, a client of one class fails.
        margin: :math:`\tau n_c^{-1/4}` (``fourth_root``), or :math:`-\tau \log \gamma_c` (``log_prior``), where
            :math:`\gamma_c = n_c / n`, which for :math:`\tau = 1` is Eq. 5. Its margins differ far more between common
            and rare classes: by 4.6 between 10 and 1,000 examples, against 0.4 with ``fourth_root``.

    Raises:
        UsageError: ``tau`` is below 0, or clients have no label counts.
    """

    requires = ("logits",)
    needs_label_counts = True

    def __init__(
        self,
        tau: float = 1.0,
        missing: Literal["floor", "mask", "clamp"] = "floor",
        denominator: Literal["all", "exclude_true"] = "all",
        margin: Literal["fourth_root", "log_prior"] = "fourth_root",
    ) -> None:
        require(tau >= 0, "FedLC.tau", tau, "give 0 or more")
        self.tau, self.missing, self.denominator, self.margin = tau, missing, denominator, margin

    def transform_logits(self, client: ClientContext, logits: Tensor) -> Tensor:
        return calibrated_logits(logits, counts_on(client, logits), self.tau, self.missing, self.margin)

    def penalty(self, client: ClientContext, step: Step) -> Tensor | None:
        """Log(1 - p_y), which turns the cross-entropy over all classes into the equation as printed."""
        if self.denominator == "all" or step.targets is None:
            return None
        logits = self.transform_logits(client, step.taps["logits"])
        true = torch.nn.functional.one_hot(step.targets, logits.shape[1]).bool()
        return (logits.masked_fill(true, -torch.inf).logsumexp(1) - logits.logsumexp(1)).mean()


def counts_on(client: ClientContext, logits: Tensor) -> Tensor:
    """The client's label counts, on the device of the logits."""
    counts: Tensor = client.info.label_counts  # type: ignore[assignment]
    return transferred(counts, logits.device)
