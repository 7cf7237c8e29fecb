r"""CenteredClipping: Karimireddy, He and Jaggi, Learning from History for Byzantine Robust Optimization, ICML 2021.

Paper: https://arxiv.org/abs/2012.10333
Code: https://github.com/epfml/byzantine-robust-noniid-optimizer

.. math:: v \leftarrow v + \frac{1}{m} \sum_k (x_k - v) \min\Bigl(1, \frac{\tau}{\lVert x_k - v \rVert}\Bigr)
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fl_lightning.core.method import ServerValue
from fl_lightning.core.server import Server
from fl_lightning.core.updates import Updates
from fl_lightning.methods.aggregation_rule import RobustRule
from fl_lightning.utilities.errors import require


class CenteredClipping(RobustRule):
    r"""Averages the changes, each pulled to a distance of at most :math:`\tau` from the last round's result v.

    v is 0 before the first round. Clients have equal weights; the momentum that the paper gives them is their
    optimizer's. Floating-point buffers take their usual mean. The mean factor is logged as ``train/centeredclipping``:
    :math:`\tau` is in the unit of a change.

    Args:
        tau: radius :math:`\tau > 0`; infinity gives FedAvg with ``trainer.weighting=uniform``.
        iterations: how often v moves in a round, at least 1; 3 in a config of the authors.

    Raises:
        UsageError: an argument is out of range, or another method's sums would pass by the rule.
    """

    name = "centeredclipping"
    center = ServerValue(Server.zeros, travels=False)

    def __init__(self, tau: float = 10.0, iterations: int = 1) -> None:
        require(tau > 0, "CenteredClipping.tau", tau, "use a number above 0")
        require(iterations >= 1, "CenteredClipping.iterations", iterations, "give 1 or more")
        self.tau, self.iterations = tau, iterations

    def aggregate(self, server: Server, updates: Updates) -> Mapping[str, Tensor]:
        center = {name: self.center[name] for name in updates.names}
        for _ in range(self.iterations):
            factors = (self.tau / updates.squared_distances(to=center).sqrt()).clamp_max(1.0).cpu()
            sums, remainder = updates.combined(factors), 1 - float(factors.mean())
            for name, value in center.items():
                center[name] = value * remainder + sums[name] / len(updates)
        server.metrics["train/centeredclipping"] = float(factors.mean())
        self.center = {**self.center, **center}
        return center
