r"""LoRAProduct: Bai et al., Federated Fine-tuning of Large Language Models under Heterogeneous Tasks, NeurIPS 2024.

Paper: https://arxiv.org/abs/2402.11505

.. math::
    D = \sum_k p_k B_k A_k = U \Sigma V^T, \qquad B = U_r \Sigma_r^{1/2}, \qquad A = \Sigma_r^{1/2} V_r^T
"""

from __future__ import annotations

from torch.optim import Optimizer

from fl_lightning.core.client_context import ClientContext
from fl_lightning.core.server import Server
from fl_lightning.core.state import State
from fl_lightning.core.weighted import Weighted
from fl_lightning.functional import low_rank_factors
from fl_lightning.methods.fedit import FedIT
from fl_lightning.utilities.errors import require


class LoRAProduct(FedIT):
    r"""Averages the products of the factors of LoRA adapters and factors the mean by a truncated SVD.

    The new B A is the best approximation of the clients' mean product D by rank r, and equals it if D has at most rank
    r. Signs and vanishing singular values are treated as by :func:`.low_rank_factors`, so that A keeps its initial
    values while all B are 0. The mean changes of A and B are replaced before the server optimizer. In addition to A and
    B, a client sends its product, of the size of the adapted weight.

    All clients are evaluated with the global model (evaluation point G), with which a new client starts.

    Args:
        rank: number of singular values that are kept, at least 1 and at most r; None is r, the rank of the adapters.

    Raises:
        UsageError: ``rank`` is out of its range, the model has no adapter whose factors are trained, or the list has
            another method for adapters.
    """

    name = "loraproduct"
    assumes_fresh = True

    def __init__(self, rank: int | None = None) -> None:
        require(rank is None or rank >= 1, "LoRAProduct.rank", rank, "use 1 or more, or null for the adapters' own")
        self.rank = rank

    def setup(self, client: ClientContext, optimizer: Optimizer) -> None:
        super().setup(client, optimizer)
        least = min(len(client.live[adapter.a]) for adapter in self.adapters)
        hint = f"the adapters have rank {least}; use at most that"
        require((self.rank or 1) <= least, "LoRAProduct.rank", self.rank, hint)

    def on_client_end(self, client: ClientContext) -> dict[str, Weighted]:
        payload, sent = {}, {*client.sent}
        for adapter in self.adapters:
            if {adapter.a, adapter.b} <= sent:
                payload[adapter.path] = Weighted.of(adapter.product(client.live), client.weight)
        return payload

    def transform_update(self, server: Server, delta: State, payload: dict[str, Weighted]) -> State:
        transformed = dict(delta)
        for adapter in self.adapters:
            if adapter.path not in payload or adapter.a not in delta:
                continue
            factors_before = {name: server.state[name].double() for name in (adapter.a, adapter.b)}
            factors = low_rank_factors(payload[adapter.path].mean(), factors_before[adapter.a].flatten(1), self.rank)
            for name, factor in zip((adapter.b, adapter.a), factors, strict=True):
                transformed[name] = factor.view_as(factors_before[name]) - factors_before[name]
        return transformed
