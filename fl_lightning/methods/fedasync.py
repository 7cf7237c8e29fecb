r"""FedAsync: Xie, Koyejo and Gupta, Asynchronous Federated Optimization, OPT 2020, Algorithm 1.

Paper: https://arxiv.org/abs/1903.03934

.. math:: w \leftarrow (1 - \alpha_t) w + \alpha_t y_k, \qquad \alpha_t = \alpha \, s(\tau)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.core.client_context import ClientContext
from fl_lightning.core.server import Server
from fl_lightning.core.updates import Updates
from fl_lightning.methods.aggregation_rule import AggregationRule
from fl_lightning.utilities.errors import require


class FedAsync(AggregationRule):
    r"""Moves the global model towards the model of each arriving client, by less if its update is stale.

    :math:`\tau` is the number of server steps since the state with which client k began, and :math:`y_k` its model
    after training: that state and its change. The server steps after each update: ``trainer.asynchronous`` is
    ``Buffered(concurrency)``, or a round has one client. The proximal term of the paper is FedProx beside it.
    Floating-point buffers move likewise.

    Args:
        alpha: :math:`\alpha` in (0, 1]; 1 with ``decay=constant`` takes the client's model.
        decay: s is 1 (``constant``), :math:`(1 + \tau)^{-p}` (``polynomial``), or ``hinge``: 1 up to
            :math:`\tau = b`, then :math:`1 / (p (\tau - b) + 1)`.
        power: p, at least 0; 0 is ``constant``.
        after: b, at least 0.

    Raises:
        UsageError: an argument is out of its range, a step has several clients, the list has FedBuff, or another
            method's sums would pass by the rule.
    """

    name = "fedasync"
    reads_weights = True

    def __init__(
        self,
        alpha: float = 0.6,
        decay: Literal["constant", "polynomial", "hinge"] = "polynomial",
        power: float = 0.5,
        after: int = 4,
    ) -> None:
        require(0 < alpha <= 1, "FedAsync.alpha", alpha, "use a number in (0, 1]")
        require(0 <= power < math.inf, "FedAsync.power", power, "use a finite number from 0")
        require(after >= 0, "FedAsync.after", after, "use 0 or more")
        self.alpha, self.decay, self.power, self.after = alpha, decay, power, after

    def setup(self, client: ClientContext, optimizer: Optimizer) -> None:
        super().setup(client, optimizer)
        hint = "both scale stale updates; keep one of them"
        require("fedbuff" not in client.methods.names, "FedAsync beside method", "FedBuff", hint)

    def on_fit_start(self, server: Server) -> None:
        hint = "each step takes one update; use trainer.asynchronous.size=1, or FedBuff"
        require(server.cohort_size == 1, "FedAsync with clients in a step", server.cohort_size, hint)

    def mixing(self, staleness: int) -> float:
        r"""Return :math:`\alpha_t` of an update."""
        if self.decay == "polynomial":
            return self.alpha * (1 + staleness) ** -self.power
        late = max(0, staleness - self.after) if self.decay == "hinge" else 0
        return self.alpha / (self.power * late + 1)

    def aggregate(self, server: Server, updates: Updates) -> Mapping[str, Tensor]:
        (update,) = updates.values()
        mixing, moved = self.mixing(update.staleness), {}
        server.metrics["fedasync/alpha"] = mixing
        for name, change in update.change.items():
            if name in update.received:  # with the steps of others since then, which the client did not see
                change = change + (update.received[name].double() - server.state[name].double())
            moved[name] = mixing * change
        for name in updates.float_buffers:
            moved[name] = (1 - mixing) * server.state[name].double() + mixing * update.buffers[name].double()
        return moved
