r"""HetLoRA: Cho et al., Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation Models, EMNLP 2024.

Paper: https://arxiv.org/abs/2401.06432

.. math::
    A = \sum_k p_k A_k, \quad B = \sum_k p_k B_k, \qquad
    p_k = \frac{\lVert B_k A_k \rVert}{\sum_j \lVert B_j A_j \rVert}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.core.client_context import ClientContext
from fl_lightning.core.server import Server
from fl_lightning.core.state import State
from fl_lightning.core.updates import Updates
from fl_lightning.methods.aggregation_rule import AggregationRule
from fl_lightning.methods.fedit import FedIT
from fl_lightning.utilities.errors import require


class HetLoRA(FedIT, AggregationRule):
    r"""Averages LoRA adapters of clients whose ranks differ, each padded with zeros.

    The model has adapters of the largest rank R, and all clients have its scale s. Client k receives the first
    :math:`r_k` components: rows of A and columns of B, and zeros for the others. Their gradients are 0, so that they
    stay 0 in its visit. Other trained parameters are averaged as in FedAvg. ``bytes/down`` and ``bytes/up`` count
    the first :math:`r_k` components alone.

    The global model has all components. A client is evaluated with its first :math:`r_k` (evaluation point R).

    Args:
        ranks: rank of each client, from 1 to R, or a few ranks that the clients take in turn: client k has the one with
            the index k modulo their number.
        weights: :math:`p_k`: ``norm``, the norm of the product, over all adapters, as above; or ``examples``, as in
            FedAvg. ``component`` averages each component by examples over the clients that have it; one that no client
            of the cohort has keeps its value.

    Raises:
        UsageError: a rank is out of range, the optimizer has weight decay, as in :class:`FedIT`, another method's sums
            would pass by the padding, or with ``norm``, another method weights clients.
    """

    name = "hetlora"
    has_personal_models = False

    def __init__(
        self, ranks: Sequence[int] = (1, 2, 4), weights: Literal["norm", "examples", "component"] = "norm"
    ) -> None:
        require(bool(ranks) and min(ranks) >= 1, "HetLoRA.ranks", ranks, "give ranks of 1 or more")
        self.ranks, self.weights, self.reads_weights = ranks, weights, weights != "norm"

    def setup(self, client: ClientContext, optimizer: Optimizer) -> None:
        super().setup(client, optimizer)
        self.shapes: dict[str, torch.Size] = {}
        for adapter in self.adapters:
            rank = len(client.live[adapter.a])
            hint = f"{adapter.path} has rank {rank}; use at most {rank}, or adapters of a larger rank"
            require(max(self.ranks) <= rank, "HetLoRA.ranks", self.ranks, hint)
            self.shapes |= {name: client.live[name].shape for name in (adapter.a, adapter.b)}
        decay = max(group.get("weight_decay", 0) for group in optimizer.param_groups)
        require(not decay, "HetLoRA with the client optimizer's weight_decay", decay, "use 0")

    def rank(self, k: int) -> int:
        """The rank of client k."""
        return self.ranks[k % len(self.ranks)]

    def mask(self, name: str, k: int) -> Tensor:
        """Ones for the components of a factor that client k has, zeros for the others, in a shape that broadcasts."""
        shape, dim = self.shapes[name], self.component(name)
        mask = torch.arange(shape[dim]) < self.rank(k)
        return mask.view([-1 if place == dim else 1 for place in range(len(shape))]).double()

    def component(self, name: str) -> int:
        """The dimension of a factor that counts its components."""
        return 0 if name in {adapter.a for adapter in self.adapters} else 1

    def sent_state(self, server: Server, k: int) -> State | None:
        state = server.state
        if all(self.rank(k) >= shape[self.component(name)] for name, shape in self.shapes.items()):
            return None
        return {name: state[name] * self.mask(name, k).to(state[name]) for name in self.shapes}

    def sent_numbers(self, k: int) -> dict[str, int]:
        shares = {name: shape.numel() // shape[self.component(name)] for name, shape in self.shapes.items()}
        return {name: self.rank(k) * share for name, share in shares.items()}

    def aggregate(self, server: Server, updates: Updates) -> Mapping[str, Tensor]:
        p = self.norms(server, updates) if self.weights == "norm" else updates.weights
        p = p if p.any() else updates.weights
        # of A and B by p, and of other parameters by the clients' weights
        rows = updates.combined(torch.stack([updates.weights, p]), mean=True)
        result, total = {}, float(p.sum())
        for name, means in rows.items():
            if name not in self.shapes:
                result[name] = means[0]
                continue
            masks = torch.stack([self.mask(name, k) for k in updates]).to(means)
            missing = torch.tensordot(p.to(means) / total, 1 - masks, 1)
            if self.weights == "component":
                result[name] = means[1] / (1 - missing).where(masks[p > 0].any(0), 1.0)
            else:  # clients without a component count as zeros
                result[name] = means[1] - missing * server.state[name].double()
        return result

    def norms(self, server: Server, updates: Updates) -> Tensor:
        """Return the norm ``(m,)`` of the clients' products, all adapters together."""
        squares = torch.zeros(len(updates), dtype=torch.float64)
        for adapter in self.adapters:
            factors = []
            for name in (adapter.a, adapter.b):
                masks = torch.stack([self.mask(name, k) for k in updates])
                rows = updates.entry(name)
                factors.append(rows + masks.to(rows) * server.state[name].double())
            a, b = factors[0].flatten(2), factors[1].flatten(2)
            # ||B A||^2 = tr(B^T B A A^T)
            squares += ((b.mT @ b) * (a @ a.mT)).sum((1, 2)).cpu()
        return squares.clamp_min(0).sqrt()
