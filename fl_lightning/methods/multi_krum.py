r"""MultiKrum: Blanchard et al., Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent, NeurIPS 2017.

Paper: https://arxiv.org/abs/1703.02757

.. math:: s_k = \sum_{j \in N_k} \lVert x_k - x_j \rVert^2, \qquad
    \Delta = \frac{1}{c} \sum_{s_k \text{ among the c least}} x_k
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.core.server import Server
from fl_lightning.core.updates import Updates
from fl_lightning.functional import chosen_by_score, krum_scores
from fl_lightning.methods.aggregation_rule import RobustRule
from fl_lightning.utilities.errors import require


class MultiKrum(RobustRule):
    r"""Averages the c changes that are nearest to their neighbours.

    :math:`N_k` are the m - f - 2 clients whose changes are nearest to :math:`x_k`. Of equal scores the smaller ids are
    chosen. Floating-point buffers are those of the chosen clients. With f 0 and all clients chosen, this is FedAvg with
    ``trainer.weighting=uniform``. A round with too few clients for f has a smaller one.

    Args:
        f: number of clients that may lie, 0 or more; the cohort has at least 2 f + 3 clients.
        chosen: c, at least 1; null is m - f, and 1 is Krum.
        weighting: ``uniform``, as in the paper, or ``examples``, by the clients' weights in FedAvg.

    Raises:
        UsageError: an argument is out of range, the cohort is too small, or another method's sums would pass by
            the rule.
    """

    name = "multikrum"

    def __init__(
        self, f: int = 1, chosen: int | None = None, weighting: Literal["uniform", "examples"] = "uniform"
    ) -> None:
        require(f >= 0, "MultiKrum.f", f, "give 0 or more")
        require(chosen is None or chosen >= 1, "MultiKrum.chosen", chosen, "give 1 or more, or null")
        self.f, self.chosen, self.reads_weights = f, chosen, weighting == "examples"

    def on_fit_start(self, server: Server) -> None:
        super().on_fit_start(server)
        hint = f"a round has {server.cohort_size} clients; give at most so many"
        fits = (self.chosen or 1) <= server.cohort_size or server.num_clients == 1  # one client, or one site
        require(fits, "MultiKrum.chosen", self.chosen, hint)

    def least_cohort(self, f: int) -> int:
        return 2 * f + 3 if f else 1

    def aggregate(self, server: Server, updates: Updates) -> Mapping[str, Tensor]:
        m = len(updates)
        f = self.tolerated(m)
        number = min(self.chosen or m - f, m)
        weights = torch.ones(m, dtype=torch.float64)
        if number < m:  # otherwise no distance is needed
            weights = chosen_by_score(krum_scores(updates.squared_distances(), f), number).cpu()
        if self.reads_weights:
            weights = weights * updates.weights
        return updates.combined(weights, mean=True)
