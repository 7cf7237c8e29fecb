r"""FedNTD: Lee et al., Preservation of the Global Knowledge by Not-True Distillation in FL, NeurIPS 2022.

Paper: https://arxiv.org/abs/2106.03097
Code: https://github.com/Lee-Gihun/FedNTD

.. math::
    \ell = \beta \tau^2 \frac{1}{B} \sum_b KL(q_b \Vert p_b), \qquad
    q_b = softmax_{c \ne y_b}(o^w_c / \tau), \quad p_b = softmax_{c \ne y_b}(o_c / \tau)
"""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.core.client_context import ClientContext
from fl_lightning.core.method import Method, Step
from fl_lightning.functional import not_true_distillation
from fl_lightning.utilities.errors import require


class FedNTD(Method):
    r"""Distils the received model's predictions of the classes except the label, so that they are not forgotten.

    :math:`o^w` are the logits of the received model, which is frozen and in eval mode; y is the label, whose logit gets
    no gradient. The term reads raw logits, even if another method changes the logits in the loss.

    Args:
        beta: coefficient :math:`\beta \ge 0`; 0 gives FedAvg.
        temperature: :math:`\tau > 0`; 1 in the authors' configs, 3 where their class sets it by default.

    Raises:
        UsageError: ``beta`` is below 0, ``temperature`` is not above 0, the data have no labels, or the model cannot be
            copied.
    """

    requires = ("logits",)
    needs_label_counts = True  # refuses data without labels

    def __init__(self, beta: float = 1.0, temperature: float = 1.0) -> None:
        require(beta >= 0, "FedNTD.beta", beta, "give 0 or more")
        require(temperature > 0, "FedNTD.temperature", temperature, "use a number above 0")
        self.beta, self.temperature = beta, temperature

    def setup(self, client: ClientContext, optimizer: Optimizer) -> None:
        client.reference_copy()  # refuses a model that cannot be copied

    def on_client_start(self, client: ClientContext) -> None:
        client.load_reference("global", client.received, self.requires)

    def penalty(self, client: ClientContext, step: Step) -> Tensor | None:
        if step.targets is None:
            return None
        reference = client.observe("global")["logits"]
        return self.beta * not_true_distillation(step.taps["logits"], reference, step.targets, self.temperature)
