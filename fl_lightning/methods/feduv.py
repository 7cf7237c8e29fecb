r"""FedUV: Son et al., FedUV: Uniformity and Variance for Heterogeneous Federated Learning, CVPR 2024, Eq. 1 to 4.

Paper: https://arxiv.org/abs/2402.18372
Code: https://github.com/sonhamin/FedUV

.. math:: \ell = \mu L_U(z) + \lambda L_V(\mathrm{softmax}(o))
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from fl_lightning.client import Client
from fl_lightning.errors import require
from fl_lightning.functional import probability_variance_hinge, rbf_uniformity
from fl_lightning.method import Method, Step


class FedUV(Method):
    r"""Spreads the representations z (:math:`L_U`) and the predictions (:math:`L_V`) over the batch, as IID data would.

    :math:`L_U` is the mean of a Gaussian kernel over the pairs of representations, :math:`L_V` the amount by which the
    predicted probabilities of a class vary less than :math:`1/\sqrt C`, the standard deviation under C balanced
    classes. The authors' code is followed where it differs from the text: the kernel's denominator is the median
    squared distance itself, gradients flow through the median, and :math:`L_V` takes the softmax of the raw logits o.

    Args:
        mu: coefficient of :math:`L_U`, at least 0.
        lambda_: coefficient of :math:`L_V`, at least 0; None means C/4. If both coefficients are 0, this is FedAvg.
        hinge: how :math:`L_V` counts the gap c - s between :math:`c = 1/\sqrt C` and the standard deviation s of a
            class: max(0, c - s) (``linear``), c - s (``none``), its ``square``, or the square of the first
            (``clamped_square``); these are the variants of the supplement's Table 6.
        bandwidth_factor: f > 0 in the kernel exp(-q / (f * median)), where q is the squared distance; 1 in the authors'
            code, 2 in the text.
        detach_bandwidth: treat the median as a constant in the gradient.

    Raises:
        UsageError: a coefficient is below 0, or ``bandwidth_factor`` is not above 0.
    """

    requires = ("representation", "logits")

    def __init__(
        self,
        mu: float = 0.5,
        lambda_: float | None = None,
        hinge: Literal["linear", "none", "square", "clamped_square"] = "linear",
        bandwidth_factor: float = 1.0,
        detach_bandwidth: bool = False,
    ) -> None:
        require(mu >= 0, "FedUV.mu", mu, "give 0 or more")
        require(lambda_ is None or lambda_ >= 0, "FedUV.lambda_", lambda_, "give 0 or more, or null for C/4")
        require(bandwidth_factor > 0, "FedUV.bandwidth_factor", bandwidth_factor, "give a factor above 0")
        self.mu, self.lambda_, self.hinge = mu, lambda_, hinge
        self.bandwidth_factor, self.detach_bandwidth = bandwidth_factor, detach_bandwidth

    def penalty(self, client: Client, step: Step) -> Tensor | None:
        z, logits = step.taps["representation"], step.taps["logits"]
        lambda_ = logits.shape[1] / 4 if self.lambda_ is None else self.lambda_
        terms = []  # a term whose coefficient is 0 is not computed
        if self.mu:
            terms.append(self.mu * rbf_uniformity(z, self.bandwidth_factor, self.detach_bandwidth))
        if lambda_:
            terms.append(lambda_ * probability_variance_hinge(logits, self.hinge))
        return sum(terms[1:], terms[0]) if terms else None
