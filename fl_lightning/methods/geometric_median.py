r"""GeometricMedian: Pillutla, Kakade and Harchaoui, Robust Aggregation for Federated Learning, IEEE TSP 2022.

Paper: https://arxiv.org/abs/1912.13445
Code: https://github.com/krishnap25/RFA

.. math:: z \leftarrow \frac{\sum_k b_k x_k}{\sum_k b_k}, \qquad b_k = \frac{p_k}{\max(\nu, \lVert x_k - z \rVert)}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.core.server import Server
from fl_lightning.core.updates import Updates
from fl_lightning.methods.aggregation_rule import RobustRule
from fl_lightning.utilities.errors import require


class GeometricMedian(RobustRule):
    r"""Moves to the point with the least sum of distances to the changes, by the smoothed Weiszfeld algorithm.

    Floating-point buffers are averaged with the weights of the last iteration.

    Args:
        iterations: at most so many, at least 1.
        nu: distance :math:`\nu > 0` below which a client's weight stays the same; infinity gives FedAvg.
        start: z at the beginning: ``zero``, no change, or ``mean``, as in the authors' code. One client that sends a
            huge change moves the mean so far that a few iterations do not return.
        weighting: :math:`p_k`: ``examples``, the clients' weights in FedAvg, or ``uniform``.
        tolerance: stop when the sum of distances changes by less than this share of it, 0 or more.

    Raises:
        UsageError: an argument is out of range, or another method's sums would pass by the rule.
    """

    name = "geometricmedian"

    def __init__(
        self,
        iterations: int = 4,
        nu: float = 1e-6,
        start: Literal["zero", "mean"] = "zero",
        weighting: Literal["examples", "uniform"] = "examples",
        tolerance: float = 1e-6,
    ) -> None:
        require(iterations >= 1, "GeometricMedian.iterations", iterations, "give 1 or more")
        require(nu > 0, "GeometricMedian.nu", nu, "use a number above 0")
        require(tolerance >= 0, "GeometricMedian.tolerance", tolerance, "give 0 or more")
        self.iterations, self.nu, self.start, self.tolerance = iterations, nu, start, tolerance
        self.reads_weights = weighting == "examples"

    def aggregate(self, server: Server, updates: Updates) -> Mapping[str, Tensor]:
        p = updates.weights if self.reads_weights else torch.ones(len(updates), dtype=torch.float64)
        z = updates.combined(p, mean=True) if self.start == "mean" or self.nu == torch.inf else server.zeros()
        if self.nu == torch.inf:
            return z
        squares = updates.squared_distances(to=z).cpu()
        for iteration in range(1, self.iterations + 1):
            z = updates.combined(p / squares.sqrt().clamp_min(self.nu), mean=True)
            if iteration < self.iterations:
                before, squares = p @ squares.sqrt(), updates.squared_distances(to=z).cpu()
                if abs(before - p @ squares.sqrt()) < self.tolerance * before:
                    break
        return z
