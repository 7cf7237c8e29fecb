r"""SignFlip: Li et al., RSA: Byzantine-Robust Stochastic Aggregation Methods for Distributed Learning, AAAI 2019.

Paper: https://arxiv.org/abs/1811.03761
Code: https://github.com/epfml/byzantine-robust-noniid-optimizer

.. math:: x_k \leftarrow -s x_k
"""

from __future__ import annotations

from typing import Literal

import torch
from torch.optim import Optimizer

from fl_lightning.core.client_context import ClientContext
from fl_lightning.core.state import State
from fl_lightning.methods.attack import Attack, Clients
from fl_lightning.utilities.errors import require


class SignFlip(Attack):
    """Attackers send their change turned around, or climb their loss.

    Args:
        clients: ids of the attackers; null draws a ``share`` of all clients.
        share: in [0, 1]; 0 changes nothing.
        start: the round from which they attack.
        scale: factor s of what they send, above 0.
        where: ``update``, or ``steps``: each gradient is turned around. For one step of plain SGD both are the same.

    Raises:
        UsageError: an argument is out of range, clients are real sites, or a method before it mixes updates.
    """

    name = "signflip"

    def __init__(
        self,
        clients: Clients = None,
        share: float = 0.2,
        start: int = 0,
        scale: float = 1.0,
        where: Literal["update", "steps"] = "update",
    ) -> None:
        super().__init__(clients, share, start)
        require(scale > 0, "SignFlip.scale", scale, "use a number above 0")
        self.scale, self.where = scale, where
        if where == "steps":
            self.on_client_start = self._start  # type: ignore[method-assign]
            self.on_before_optimizer_step = self._ascend  # type: ignore[method-assign]
        else:
            self.transform_client_update = self._turned  # type: ignore[method-assign]

    def _turned(self, client: ClientContext, delta: State) -> State:
        if not self.attacks(client.info.id):
            return delta
        return {name: -self.scale * value for name, value in delta.items()}

    def _start(self, client: ClientContext) -> None:
        client.scratch(self).factor = torch.tensor(-self.scale if self.attacks(client.info.id) else 1.0)

    def _ascend(self, client: ClientContext, optimizer: Optimizer) -> None:
        factor = client.scratch(self).factor
        for name in client.trainable:
            gradient = client.live[name].grad
            if gradient is not None:
                gradient.mul_(factor.to(gradient))
