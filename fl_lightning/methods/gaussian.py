r"""Gaussian: Blanchard et al., Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent, NeurIPS 2017.

Paper: https://arxiv.org/abs/1703.02757

.. math:: x_k \leftarrow \mathcal{N}(\mu, \sigma^2 I)
"""

from __future__ import annotations

import torch

from fl_lightning.core.client_context import ClientContext
from fl_lightning.core.seeding import torch_rng
from fl_lightning.core.state import State
from fl_lightning.methods.attack import Attack, Clients
from fl_lightning.utilities.errors import require


class Gaussian(Attack):
    r"""Attackers send normal noise.

    Args:
        clients: ids of the attackers; null draws a ``share`` of all clients.
        share: in [0, 1]; 0 changes nothing.
        start: the round from which they attack.
        std: standard deviation :math:`\sigma \ge 0` of each number.
        mean: its mean :math:`\mu`.
        add: add the noise to the change instead.

    Raises:
        UsageError: an argument is out of range, clients are real sites, or a method before it mixes updates.
    """

    name = "gaussian"

    def __init__(
        self,
        clients: Clients = None,
        share: float = 0.2,
        start: int = 0,
        std: float = 1.0,
        mean: float = 0.0,
        add: bool = False,
    ) -> None:
        super().__init__(clients, share, start)
        require(std >= 0, "Gaussian.std", std, "give 0 or more")
        self.std, self.mean, self.add = std, mean, add

    def transform_client_update(self, client: ClientContext, delta: State) -> State:
        k = client.info.id
        if not self.attacks(k):
            return delta
        rng = torch_rng(client.seed, "gaussian", self.round, k)
        sent = {}
        for name, value in delta.items():
            noise = torch.randn(value.shape, generator=rng, dtype=torch.float64) * self.std + self.mean
            sent[name] = noise.to(value.device) + (value if self.add else 0)
        return sent
