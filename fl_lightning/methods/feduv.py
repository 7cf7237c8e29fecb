r"""FedUV: Son et al., FedUV: Uniformity and Variance for Heterogeneous Federated Learning, CVPR 2024, Eq. 1 to 4.

Paper: https://arxiv.org/abs/2402.18372
Code: https://github.com/sonhamin/FedUV

.. math:: \ell = \mu L_U(z) + \lambda L_V(\mathrm{softmax}(o))
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.core.client_context import ClientContext
from fl_lightning.core.method import Method, Penalty, Step
from fl_lightning.functional import probability_variance_hinge, rbf_uniformity
from fl_lightning.utilities.errors import require


class FedUV(Method):
    r"""Spreads the representations z (:math:`L_U`) and the predictions (:math:`L_V`) over the batch, as IID data would.

    :math:`L_U` is the mean of a Gaussian kernel over the pairs of representations, :math:`L_V` the amount by which the
    predicted probabilities of a class vary less than :math:`1/\sqrt C`, the standard deviation under C balanced
    classes. The authors' code is followed where it differs from the text: the kernel's denominator is the median
    squared distance itself, gradients flow through the median, and :math:`L_V` takes the softmax of the raw logits o.

    Each term is logged with its coefficient: ``train/feduv/uniformity`` and ``train/feduv/variance`` add up to
    ``train/feduv``. A term whose coefficient is 0 is neither computed nor logged.

    Section 5.1 names an alternative that acts on the classifier's weight W instead of the outputs, and that the authors
    did not use: to maximise its spectral norm, the largest singular value :math:`\sigma_1(W)`. Here it is the term
    ``train/feduv/spectral``, minus ``spectral`` times the norm, which has no lower bound. The section's other
    alternative, a small Frobenius norm, is what weight decay of the classifier gives.

    Args:
        mu: coefficient of :math:`L_U`, at least 0.
        lambda_: coefficient of :math:`L_V`, at least 0; None means C/4. If all coefficients are 0, this is FedAvg.
        hinge: how :math:`L_V` counts the gap c - s between :math:`c = 1/\sqrt C` and the standard deviation s of a
            class: max(0, c - s) (``linear``), c - s (``none``), its ``square``, or the square of the first
            (``clamped_square``); these are the variants of the supplement's Table 6.
        bandwidth_factor: f > 0 in the kernel exp(-q / (f * median)), where q is the squared distance; 1 in the authors'
            code, 2 in the text.
        detach_bandwidth: treat the median as a constant in the gradient.
        spectral: coefficient of the spectral norm of the classifier's weight, at least 0; a larger one raises the norm.

    Raises:
        UsageError: a coefficient is below 0, ``bandwidth_factor`` is not above 0, or ``spectral`` is above 0 and the
            tap ``logits`` is bound to a module without a weight matrix.
    """

    requires = ("representation", "logits")

    def __init__(
        self,
        mu: float = 0.5,
        lambda_: float | None = None,
        hinge: Literal["linear", "none", "square", "clamped_square"] = "linear",
        bandwidth_factor: float = 1.0,
        detach_bandwidth: bool = False,
        spectral: float = 0.0,
    ) -> None:
        require(mu >= 0, "FedUV.mu", mu, "give 0 or more")
        require(spectral >= 0, "FedUV.spectral", spectral, "give 0 or more")
        require(lambda_ is None or lambda_ >= 0, "FedUV.lambda_", lambda_, "give 0 or more, or null for C/4")
        require(bandwidth_factor > 0, "FedUV.bandwidth_factor", bandwidth_factor, "use a factor above 0")
        self.mu, self.lambda_, self.hinge = mu, lambda_, hinge
        self.bandwidth_factor, self.detach_bandwidth, self.spectral = bandwidth_factor, detach_bandwidth, spectral

    def setup(self, client: ClientContext, optimizer: Optimizer) -> None:
        path = client.tap_paths["logits"]
        weight = getattr(client.module.get_submodule(path), "weight", None)
        hint = f"the tap logits is bound to {path!r}, which has no weight matrix; bind it to the classifier, or give 0"
        matrix = isinstance(weight, Tensor) and weight.ndim == 2
        require(not self.spectral or matrix, "FedUV.spectral", self.spectral, hint)

    def penalty(self, client: ClientContext, step: Step) -> Penalty:
        z, logits = step.taps["representation"], step.taps["logits"]
        lambda_ = logits.shape[1] / 4 if self.lambda_ is None else self.lambda_
        terms: dict[str, Tensor] = {}  # a term whose coefficient is 0 is not computed
        if self.mu:
            terms["uniformity"] = self.mu * rbf_uniformity(z, self.bandwidth_factor, self.detach_bandwidth)
        if lambda_:
            terms["variance"] = lambda_ * probability_variance_hinge(logits, self.hinge)
        if self.spectral:
            weight: Any = client.module.get_submodule(client.tap_paths["logits"]).weight
            terms["spectral"] = -self.spectral * torch.linalg.matrix_norm(weight.float(), 2)
        return (functools.reduce(torch.add, terms.values()), terms) if terms else None
