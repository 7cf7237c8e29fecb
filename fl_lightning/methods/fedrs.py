r"""FedRS: Li and Zhan, Federated Learning with Restricted Softmax for Label Distribution Non-IID Data, KDD 2021.

Paper: https://doi.org/10.1145/3447548.3467254
Code: https://github.com/lxcnju/FedRepo

.. math:: \ell = -\log \frac{e^{a_y o_y}}{\sum_c e^{a_c o_c}}, \qquad a_c = 1 \text{ for } n_c > 0 \text{ else } \alpha
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.core.client_context import ClientContext
from fl_lightning.core.method import Method
from fl_lightning.functional import restricted_logits
from fl_lightning.methods.fedlc import counts_on
from fl_lightning.utilities.errors import require


class FedRS(Method):
    r"""Scales down the logits o of classes that a client lacks, so that it does not unlearn them.

    :math:`n_c` is the client's number of training examples of class c, and y the label. Only the module's
    ``training_step`` sees the restricted logits, so that its ``train/accuracy`` is of them too; evaluation uses the raw
    ones.

    Args:
        alpha: :math:`\alpha \in [0, 1]`; 1 gives FedAvg if ``use_bias``. The authors choose among 0.1, 0.5 and 0.9.
        mode: ``binary``, as in the paper, or ``frequency``, :math:`a_c = \alpha + (1 - \alpha) n_c / \max_j n_j`, as in
            the first author's code.
        use_bias: scale the whole logit. If not, training leaves out the classifier's bias, as that code does: it is
            subtracted from the logits and gets no gradient, so that weight decay does not change it either.

    Raises:
        UsageError: ``alpha`` is outside [0, 1], the clients' label counts are not known, or ``use_bias`` is false and
            the tap ``logits`` is bound to a module that has no attribute ``bias``.
    """

    requires = ("logits",)
    needs_label_counts = True

    def __init__(
        self, alpha: float = 0.5, mode: Literal["binary", "frequency"] = "binary", use_bias: bool = True
    ) -> None:
        require(0 <= alpha <= 1, "FedRS.alpha", alpha, "use a number in [0, 1]")
        self.alpha, self.mode, self.use_bias = alpha, mode, use_bias

    @property
    def corrects_gradients(self) -> bool:
        return not self.use_bias

    def setup(self, client: ClientContext, optimizer: Optimizer) -> None:
        path = client.tap_paths["logits"]
        head = client.module.get_submodule(path)
        hint = f"the tap logits is bound to {path!r}, which has no bias; bind it to the classifier, or set it to true"
        require(self.use_bias or hasattr(head, "bias"), "FedRS.use_bias", self.use_bias, hint)
        bias = getattr(head, "bias", None)
        biases = [name for name, value in client.live.items() if value is bias]
        self._bias = None if self.use_bias or not biases else biases[0]

    def transform_logits(self, client: ClientContext, logits: Tensor) -> Tensor:
        logits = logits if self._bias is None else logits - client.live[self._bias]
        return restricted_logits(logits, counts_on(client, logits), self.alpha, self.mode)

    def on_before_optimizer_step(self, client: ClientContext, optimizer: Optimizer) -> None:
        # subtracting the bias leaves a gradient of 0, with which weight decay and momentum would still move it
        if self._bias is not None:
            client.live[self._bias].grad = None
