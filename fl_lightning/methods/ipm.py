r"""IPM: Xie et al., Fall of Empires: Breaking Byzantine-Tolerant SGD by Inner Product Manipulation, UAI 2019.

Paper: https://arxiv.org/abs/1903.03936

.. math:: x_k \leftarrow -\epsilon \mu
"""

from __future__ import annotations

from torch import Tensor

from fl_lightning.methods.attack import Clients, ColludingAttack
from fl_lightning.utilities.errors import require


class IPM(ColludingAttack):
    r"""Attackers send the mean change :math:`\mu` of the honest clients, turned around.

    With a attackers among m clients, the mean of all turns around for :math:`\epsilon > (m - a) / a`.

    Args:
        clients: ids of the attackers; null draws a ``share`` of all clients.
        share: in [0, 1]; 0 changes nothing.
        start: the round from which they attack.
        epsilon: :math:`\epsilon \ge 0`.

    Raises:
        UsageError: an argument is out of range, clients are real sites, or a method before it mixes updates.
    """

    name = "ipm"

    def __init__(self, clients: Clients = None, share: float = 0.2, start: int = 0, epsilon: float = 0.1) -> None:
        super().__init__(clients, share, start)
        require(epsilon >= 0, "IPM.epsilon", epsilon, "give 0 or more")
        self.epsilon = epsilon

    def sent(self, honest: Tensor, m: int) -> Tensor:
        return -self.epsilon * honest.mean(0)
