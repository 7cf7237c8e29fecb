r"""FedRS: Li and Zhan, Federated Learning with Restricted Softmax for Label Distribution Non-IID Data, KDD 2021.

Paper: https://doi.org/10.1145/3447548.3467254
Code: https://github.com/lxcnju/FedRepo

.. math:: \ell = -\log \frac{e^{a_y o_y}}{\sum_c e^{a_c o_c}}, \qquad a_c = 1 \text{ for } n_c > 0 \text{ else } \alpha
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.client import Client
from fl_lightning.errors import require
from fl_lightning.functional import restricted_logits
from fl_lightning.method import Method


class FedRS(Method):
    r"""Scales down the logits o of classes that a client lacks, so that it does not unlearn them.

    :math:`n_c` is the client's number of training examples of class c, and y the label. Only the training loss uses the
    restricted logits; evaluation uses the raw ones.

    Args:
        alpha: :math:`\alpha \in [0, 1]`; 1 gives FedAvg if ``use_bias``. The authors choose among 0.1, 0.5 and 0.9.
        mode: ``binary``, as in the paper, or ``frequency``, :math:`a_c = \alpha + (1 - \alpha) n_c / \max_j n_j`, as in
            the first author's code.
        use_bias: scale the whole logit. If not, the training loss leaves out the classifier's bias, as that code does.

    Raises:
        UsageError: ``alpha`` is outside [0, 1], or the clients' label counts are not known.
    """

    requires = ("logits",)
    needs_label_counts = True

    def __init__(
        self, alpha: float = 0.5, mode: Literal["binary", "frequency"] = "binary", use_bias: bool = True
    ) -> None:
        require(0 <= alpha <= 1, "FedRS.alpha", alpha, "give a number in [0, 1]")
        self.alpha, self.mode, self.use_bias = alpha, mode, use_bias

    def setup(self, client: Client, optimizer: Optimizer) -> None:
        head = client.module.get_submodule(client.tap_paths["logits"])
        self._bias: Tensor | None = None if self.use_bias else getattr(head, "bias", None)

    def transform_logits(self, client: Client, logits: Tensor) -> Tensor:
        counts: Tensor = client.info.label_counts  # type: ignore[assignment]
        logits = logits if self._bias is None else logits - self._bias
        return restricted_logits(logits, counts.to(logits.device), self.alpha, self.mode)
