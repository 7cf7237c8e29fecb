r"""ALIE: Baruch et al., A Little Is Enough: Circumventing Defenses for Distributed Learning, NeurIPS 2019.

Paper: https://arxiv.org/abs/1902.06156
Code: https://github.com/moranant/attacking_distributed_learning

.. math:: x_k \leftarrow \mu + z \sigma, \qquad
    z = \Phi^{-1}\Bigl(\frac{m - a - s}{m - a}\Bigr), \quad s = \lfloor m / 2 \rfloor + 1 - a
"""

from __future__ import annotations

from statistics import NormalDist

from torch import Tensor

from fl_lightning.methods.attack import Clients, ColludingAttack


class ALIE(ColludingAttack):
    r"""Attackers send a change just so far from the honest mean that rules take it for an honest one.

    :math:`\mu` and :math:`\sigma` are mean and standard deviation of each coordinate over the honest clients, the
    latter with their number less 1; the paper takes those of what the attackers would honestly send. The a attackers
    among m clients need s honest ones farther away than they are.

    Args:
        clients: ids of the attackers; null draws a ``share`` of all clients.
        share: in [0, 1]; 0 changes nothing.
        start: the round from which they attack.
        z: distance in standard deviations; null computes it from m and a, with s at least 1.

    Raises:
        UsageError: an argument is out of range, clients are real sites, or a method before it mixes updates.
    """

    name = "alie"

    def __init__(self, clients: Clients = None, share: float = 0.2, start: int = 0, z: float | None = None) -> None:
        super().__init__(clients, share, start)
        self.z = z

    def distance(self, m: int, a: int) -> float:
        """The number of standard deviations for a attackers among m clients, of whom at least two are honest."""
        supporters = max(m // 2 + 1 - a, 1)
        return NormalDist().inv_cdf((m - a - supporters) / (m - a)) if self.z is None else self.z

    def sent(self, honest: Tensor, m: int) -> Tensor:
        if len(honest) == 1:  # which has no deviation
            return honest[0]
        return honest.mean(0) + self.distance(m, m - len(honest)) * honest.std(0)
