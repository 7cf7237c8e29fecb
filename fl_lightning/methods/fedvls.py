r"""FedVLS: Guo et al., Exploring Vacant Classes in Label-Skewed Federated Learning, arXiv 2024.

Paper: https://arxiv.org/abs/2401.02329
Code: https://github.com/krumpguo/FedVLS

.. math::
    \ell = -\log \frac{\pi_y e^{o_y}}{\sum_c \pi_c e^{o_c}}
    + \beta \sum_c \pi_c \log \frac{1}{B} \sum_b e^{[y_b \ne c] (o_{bc} - \log C \pi_c)}
    + \lambda \frac{1}{B} \sum_b KL(q_b \Vert p_b), \qquad
    q_b = softmax_{\pi_c = 0}(o^w_c), \quad p_b = softmax_{\pi_c = 0}(o_c)
"""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.core.client_context import ClientContext
from fl_lightning.core.method import Method, Penalty, Step
from fl_lightning.functional import adjusted_logits, logit_suppression, vacant_class_distillation
from fl_lightning.methods.fedlc import counts_on
from fl_lightning.utilities.errors import require


class FedVLS(Method):
    r"""Keeps what the received model predicts of vacant classes, of which a client has no examples.

    :math:`\pi` are the shares of the classes at the client. The module's loss sees :math:`o_c + \log \pi_c`, without
    the vacant classes, as ``LogitAdjustment(prior="local")`` does. To it are added a term that suppresses the logits of
    classes which are not the label, and the distillation of the received model, with logits :math:`o^w` in eval mode,
    over the vacant classes; both read raw logits. A client with fewer than two vacant classes distils nothing.

    Args:
        beta: coefficient :math:`\beta \ge 0` of the suppression.
        lam: coefficient :math:`\lambda \ge 0` of the distillation. With ``beta`` and ``lam`` 0, this is
            ``LogitAdjustment(prior="local")``.

    Raises:
        UsageError: ``beta`` or ``lam`` is below 0, the clients' label counts are not known, another method changes
            logits by label counts, too, or the model cannot be copied.
    """

    requires = ("logits",)
    needs_label_counts = True

    def __init__(self, beta: float = 0.005, lam: float = 0.1) -> None:
        require(beta >= 0, "FedVLS.beta", beta, "give 0 or more")
        require(lam >= 0, "FedVLS.lam", lam, "give 0 or more")
        self.beta, self.lam = beta, lam

    def setup(self, client: ClientContext, optimizer: Optimizer) -> None:
        client.reference_copy()  # refuses a model that cannot be copied

    def on_client_start(self, client: ClientContext) -> None:
        client.load_reference("global", client.received, self.requires)

    def transform_logits(self, client: ClientContext, logits: Tensor) -> Tensor:
        return adjusted_logits(logits, counts_on(client, logits))

    def penalty(self, client: ClientContext, step: Step) -> Penalty:
        if step.targets is None:
            return None
        logits, reference = step.taps["logits"], client.observe("global")["logits"]
        counts = counts_on(client, logits)
        suppression = self.beta * logit_suppression(logits, step.targets, counts)
        distillation = self.lam * vacant_class_distillation(logits, reference, counts)
        return suppression + distillation, {"suppression": suppression, "distillation": distillation}
