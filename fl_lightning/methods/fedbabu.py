"""FedBABU: Oh et al., Towards Enhanced Representation for Federated Image Classification, ICLR 2022, Algorithm 1.

Paper: https://arxiv.org/abs/2106.06042
Code: https://github.com/jhoon-oh/FedBABU

The body is trained and averaged. The head, the last linear layer, keeps the random initial weights that all clients
share.
"""

from __future__ import annotations

from torch.optim import Optimizer

from fl_lightning.core.client_context import ClientContext
from fl_lightning.core.method import Method
from fl_lightning.utilities.errors import require


class FedBABU(Method):
    """Trains the body only: the head keeps its initial weights, the same on all clients.

    The head is the module that the tap ``logits`` is bound to. Its gradients are dropped before each step, so that
    neither momentum nor weight decay changes it. The paper's fine-tuning of the head after training is not included.
    """

    requires = ("logits",)
    has_personal_models = True  # once it is fine-tuned

    def setup(self, client: ClientContext, optimizer: Optimizer) -> None:
        self.head = client.parameters_under("logits")
        hint = "the tap logits is bound to a module without trained parameters; take FedBABU out"
        require(bool(self.head), "FedBABU with the head", client.tap_paths["logits"], hint)

    def on_before_optimizer_step(self, client: ClientContext, optimizer: Optimizer) -> None:
        for name in self.head:
            client.live[name].grad = None
