r"""FedDisco: Ye et al., FedDisco: Federated Learning with Discrepancy-Aware Collaboration, ICML 2023.

Paper: https://arxiv.org/abs/2305.19229
Code: https://github.com/MediaBrain-SJTU/FedDisco

.. math:: p_k \propto \max\left(0, \frac{n_k}{\sum_{j \in S} n_j} - a\, d_k + b\right)
"""

from __future__ import annotations

from typing import Literal

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.nn.functional import cosine_similarity
from torch.optim import Optimizer

from fl_lightning.core.client_context import ClientContext
from fl_lightning.core.method import Method
from fl_lightning.core.server import Server
from fl_lightning.utilities.errors import require

# a smaller weight is 0, since sums over the cohort would round
LEAST = 1e-12


class FedDisco(Method):
    r"""Weights clients in the mean by their examples, less the distance of their labels from equal class shares.

    :math:`n_k` is the number of training examples of client k in the cohort S, and :math:`d_k` the distance between its
    class shares and 1 / C. If no client of a cohort has a positive weight, all have :math:`n_k`, with a warning. The
    server must know the label counts of all clients, which stay at real sites.

    Args:
        a: coefficient of the distance, at least 0; 0 with ``b=0`` gives FedAvg.
        b: added to each weight; a larger one makes the weights more equal.
        distance: ``kl`` divergence from equal shares, norm ``l2`` or ``l1`` of the difference, or 1 minus ``cosine``.
        normalise: divide the ``kl`` divergences by their sum over the cohort, as in the authors' code.

    Raises:
        UsageError: ``a`` is below 0, the clients' label counts are not known, the run sends no weights, or another
            method weights clients.
    """

    needs_label_counts = True
    needs_exchange = True

    def __init__(
        self,
        a: float = 0.5,
        b: float = 0.1,
        distance: Literal["kl", "l2", "l1", "cosine"] = "kl",
        normalise: bool = True,
    ) -> None:
        require(a >= 0, "FedDisco.a", a, "give 0 or more")
        self.a, self.b, self.distance, self.normalise = a, b, distance, normalise
        self._weights: dict[int, float] = {}

    def setup(self, client: ClientContext, optimizer: Optimizer) -> None:
        for method in client.methods.methods:
            weights = method is not self and method.client_weight(client) is not None
            hint = "both weight the clients; take one of them out"
            require(not weights, "FedDisco beside method", type(method).__name__, hint)

    def on_fit_start(self, server: Server) -> None:
        hint = "the label counts of the clients stay at their sites; take FedDisco out"
        require(server.label_counts is not None, "method", "FedDisco", hint)

    def on_round_start(self, server: Server) -> None:
        counts: Tensor = server.label_counts[server.cohort].double()  # type: ignore[index]
        examples = counts.sum(1)
        # times the examples of the cohort: without a and b it is the number of examples, to the bit
        scores = examples - examples.sum() * (self.a * self._distances(counts) - self.b)
        weights = scores.where(scores >= LEAST, 0.0)
        if not weights.any():
            rank_zero_warn(f"round {server.round}: FedDisco has no positive weight; clients count by their examples")
            weights = examples
        self._weights = dict(zip(server.cohort, weights.tolist(), strict=True))

    def client_weight(self, client: ClientContext) -> float | None:
        return self._weights.get(client.info.id)

    def _distances(self, counts: Tensor) -> Tensor:
        """The distance of each row of counts ``(m, C)`` from equal shares."""
        shares = counts / counts.sum(1, keepdim=True).clamp_min(1)
        equal = torch.full_like(shares, 1 / shares.shape[1])
        if self.distance == "cosine":
            return 1 - cosine_similarity(shares, equal, dim=1)
        if self.distance == "kl":
            divergences = torch.xlogy(shares, shares / equal).sum(1)
            return divergences / (divergences.sum() or 1) if self.normalise else divergences
        return torch.linalg.vector_norm(shares - equal, ord=2 if self.distance == "l2" else 1, dim=1)
