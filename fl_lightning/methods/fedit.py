"""FedIT: Zhang et al., Towards Building the Federated GPT: Federated Instruction Tuning, 2023.

Paper: https://arxiv.org/abs/2305.05644
Code: https://github.com/JayZhang42/FederatedGPT-Shepherd

The factors A and B of LoRA adapters are averaged apart.
"""

from __future__ import annotations

from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch.optim import SGD, Optimizer

from fl_lightning.client.lora import lora_adapters
from fl_lightning.core.client_context import ClientContext
from fl_lightning.core.method import Method
from fl_lightning.core.server import Server
from fl_lightning.utilities.errors import require


class FedIT(Method):
    r"""Averages the factors of LoRA adapters apart, which is FedAvg on a model with a frozen base.

    An adapter adds s B A to a frozen weight. The mean product of the clients is :math:`D = \sum_k p_k B_k A_k`, but the
    product of the means differs from it by :math:`\sum_k p_k (B_k - \bar B)(A_k - \bar A)`. The adapters of peft,
    loralib and :func:`fl_lightning.models.with_lora` are found by their names, ``lora_A`` and ``lora_B``.

    All clients are evaluated with the global model (evaluation point G), with which a new client starts.

    Raises:
        UsageError: the model has no adapter whose factors are trained, or the list has another method for adapters.
    """

    needs_exchange = True
    # whether A is trained
    trains_a = True

    def setup(self, client: ClientContext, optimizer: Optimizer) -> None:
        super().setup(client, optimizer)
        who, trained = type(self).__name__, {*client.trainable}
        methods = client.methods.methods
        alike = [type(method).__name__ for method in methods if isinstance(method, FedIT)]
        require(len(alike) == 1, "method", alike, "each aggregates LoRA adapters; keep one of them")
        self.adapters = []
        for adapter in lora_adapters(client.module):
            if adapter.b in trained and (adapter.a in trained or not self.trains_a):
                self.adapters.append(adapter)
        hint = "it has no LoRA adapter whose factors are trained; add adapters by peft or with_lora"
        require(bool(self.adapters), f"{who} with the model", type(client.module).__name__, hint)
        names = ("scaffold", "feddyn", "fedexp")
        nonlinear = [type(method).__name__ for method in methods if method.name in names]
        if self.trains_a and nonlinear:
            rank_zero_warn(f"method={[who, *nonlinear]}: {', '.join(nonlinear)} acts on A and B, not on their product")

    def on_fit_start(self, server: Server) -> None:
        group = server.optimizer.param_groups[0] if server.optimizer else {}
        averages = isinstance(server.optimizer, SGD) and group["lr"] == 1 and not group["momentum"]
        if self.trains_a and not averages:
            who = f"{type(self).__name__} with trainer.server_optimizer {type(server.optimizer).__name__}"
            rank_zero_warn(f"{who}: it acts on A and B, not on their product; leave it out for SGD with lr 1")
