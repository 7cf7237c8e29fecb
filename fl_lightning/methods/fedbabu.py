"""FedBABU: Oh et al., Towards Enhanced Image Classification for Federated Learning, ICLR 2022, Algorithm 1.

The body is trained and averaged; the head, the last linear layer, keeps its common random initial weights.
"""

from __future__ import annotations

from torch.optim import Optimizer

from fl_lightning.client import Client
from fl_lightning.method import Method


class FedBABU(Method):
    """Trains the body only: the head has the same initial weights on all clients, for ever.

    The head is the module that the tap ``logits`` is bound to. Its gradients are dropped before the step, so that
    neither momentum nor weight decay moves it by a bit. Personalisation by fine-tuning afterwards is not part of it.
    """

    requires = ("logits",)

    def setup(self, client: Client, optimizer: Optimizer) -> None:
        self.head = client.parameters_under("logits")

    def on_before_optimizer_step(self, client: Client, optimizer: Optimizer) -> None:
        for name in self.head:
            client.live[name].grad = None
