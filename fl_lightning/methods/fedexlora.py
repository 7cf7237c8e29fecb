r"""FedEx-LoRA: Singhal et al., Exact Aggregation for Federated and Efficient Fine-Tuning of Foundation Models, 2024.

Paper: https://arxiv.org/abs/2410.09432
Code: https://github.com/RaghavSinghal10/fedex-lora

.. math::
    A = \sum_k p_k A_k, \quad B = \sum_k p_k B_k, \quad W \leftarrow W + s \Bigl( \sum_k p_k B_k A_k - B A \Bigr)
"""

from __future__ import annotations

import math

from torch.optim import Optimizer

from fl_lightning.core.client_context import ClientContext
from fl_lightning.core.server import Server
from fl_lightning.core.weighted import Weighted
from fl_lightning.methods.fedit import FedIT
from fl_lightning.methods.lora_product import LoRAProduct
from fl_lightning.utilities.errors import require


class FedExLoRA(FedIT):
    r"""Averages the factors of LoRA adapters apart and adds the error of their product to the frozen weight.

    The model then has the clients' mean weight, W + s D. The error is computed after the server optimizer from the
    stored factors, so that it includes their rounding. In addition to A and B, a client sends its
    product, of the size of the adapted weight, and the changed weight travels to each client of the next round.

    All clients are evaluated with the global model (evaluation point G), with which a new client starts.

    Raises:
        UsageError: the model has no adapter whose factors are trained, the list has another method for adapters,
            ``trainer.buffers`` keeps frozen parameters with the clients, or an adapted weight is quantized, not in the
            state, or of a layer without ``scaling``.
    """

    name = "fedexlora"
    assumes_fresh = True
    on_client_end = LoRAProduct.on_client_end

    def setup(self, client: ClientContext, optimizer: Optimizer) -> None:
        super().setup(client, optimizer)
        hint = "it changes frozen weights for all clients; set trainer.buffers=average"
        require(client.shares_buffers, "FedExLoRA with client.shares_buffers", False, hint)
        for adapter in self.adapters:
            size, base = len(client.live[adapter.b]) * client.live[adapter.a][0].numel(), client.live.get(adapter.base)
            fits = base is not None and base.is_floating_point() and base.numel() == size
            hint = "its layer needs a weight in floating point and its factor, `scaling`; use LoRAProduct"
            require(fits and math.isfinite(adapter.scaling), "FedExLoRA with the adapter", adapter.path, hint)

    def on_round_end(self, server: Server, payload: dict[str, Weighted]) -> None:
        for adapter in self.adapters:
            mean = payload.get(adapter.path)
            if mean is None or not mean.weight:
                continue
            base, error = server.state[adapter.base], mean.mean() - adapter.product(server.state)
            change = adapter.scaling * (error.T if adapter.transposed else error)
            server.assign({adapter.base: base.double() + change.reshape(base.shape)})
