r"""FedUV: Son et al., FedUV: Uniformity and Variance for Heterogeneous Federated Learning, CVPR 2024, Eq. 2 to 5.

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
    r"""Spreads the representations (:math:`L_U`) and the predictions over the batch (:math:`L_V`), as IID data would.

    Follows the authors' code where the text differs: the kernel's width is the median itself and carries gradient, and
    :math:`L_V` reads the softmax of the raw logits.

    Args:
        mu: coefficient of :math:`L_U`, at least 0.
        lambda_: coefficient of :math:`L_V`, at least 0; None is C/4. Both 0 give FedAvg.
        hinge: how far below :math:`1/\sqrt C` a class's deviation counts: ``linear``, ``none`` (above it counts too),
            ``square`` or ``clamped_square``; the variants of supplement Table 6.
        bandwidth_factor: the kernel is exp(-q / (factor * median)); 1 is the code's, 2 the text's.
        detach_bandwidth: whether the median is a constant to the gradient.
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
        terms = []  # with one coefficient 0, the term of the other alone is computed
        if self.mu:
            terms.append(self.mu * rbf_uniformity(z, self.bandwidth_factor, self.detach_bandwidth))
        if lambda_:
            terms.append(lambda_ * probability_variance_hinge(logits, self.hinge))
        return sum(terms[1:], terms[0]) if terms else None
