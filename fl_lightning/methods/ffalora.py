"""FFA-LoRA: Sun et al., Improving LoRA in Privacy-preserving Federated Learning, ICLR 2024.

Paper: https://arxiv.org/abs/2403.12313

All clients have the same random A, which is never trained. Their B are averaged.
"""

from __future__ import annotations

from torch.optim import Optimizer

from fl_lightning.core.client_context import ClientContext
from fl_lightning.methods.fedit import FedIT


class FFALoRA(FedIT):
    r"""Keeps the factor A of LoRA adapters at its initial values, the same on all clients, and averages B.

    The product of the means is the mean of the products, as A is the same everywhere. The gradients of A are dropped
    before each step, so that neither momentum nor weight decay changes it. A travels nevertheless, unless the model
    freezes it, as ``with_lora(train_a=False)`` does.

    All clients are evaluated with the global model (evaluation point G), with which a new client starts.

    Raises:
        UsageError: the model has no adapter whose B is trained, or the list has another method for adapters.
    """

    name = "ffalora"
    trains_a = False

    def setup(self, client: ClientContext, optimizer: Optimizer) -> None:
        super().setup(client, optimizer)
        factors = [adapter.a for adapter in self.adapters]
        self.fixed_factors = [factor for factor in factors if factor in client.trainable]

    def on_before_optimizer_step(self, client: ClientContext, optimizer: Optimizer) -> None:
        for name in self.fixed_factors:
            client.live[name].grad = None
