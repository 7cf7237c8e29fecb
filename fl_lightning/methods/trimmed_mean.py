r"""TrimmedMean: Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, ICML 2018.

Paper: https://arxiv.org/abs/1803.01498

.. math:: \Delta_j = \frac{1}{m - 2 f} \sum_{k = f + 1}^{m - f} x_{(k) j}, \qquad x_{(1) j} \le \dots \le x_{(m) j}
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

from torch import Tensor

from fl_lightning.core.server import Server
from fl_lightning.core.updates import Updates
from fl_lightning.functional import trimmed_mean
from fl_lightning.methods.aggregation_rule import RobustRule
from fl_lightning.utilities.errors import require


class TrimmedMean(RobustRule):
    r"""Averages each coordinate j of the m changes without its f smallest and f largest values.

    Clients have equal weights, and so have their values of floating-point buffers. A round with too few clients for f
    trims fewer.

    Args:
        f: number of values that are cut on each side, 0 or more; null for a share of the round's clients.
        share: share that is cut on each side, in [0, 0.5): :math:`f = \lfloor share \cdot m + 10^{-9} \rfloor`. With f
            or ``share`` 0, this is FedAvg with ``trainer.weighting=uniform``.

    Raises:
        UsageError: an argument is out of range, the cohort has at most 2 f clients, or so few that ``share`` cuts none,
            or another method's sums would pass by the rule.
    """

    name = "trimmedmean"

    def __init__(self, f: int | None = None, share: float = 0.1) -> None:
        require(f is None or f >= 0, "TrimmedMean.f", f, "give 0 or more, or null")
        require(0 <= share < 0.5, "TrimmedMean.share", share, "use a share in [0, 0.5)")
        self.share, self.f = (share if f is None else None), f or 0

    def on_fit_start(self, server: Server) -> None:
        super().on_fit_start(server)
        m, key = server.cohort_size, f"TrimmedMean in cohorts of {server.cohort_size}: share"
        cuts = not self.share or self.cut(m) > 0 or server.num_clients == 1
        require(cuts, key, self.share, f"it cuts no client; use 1/{m} or more, or f, or share=0 for the mean")

    def cut(self, m: int) -> int:
        """The number of values to cut on each side of m."""
        return self.tolerated(m) if self.share is None else math.floor(self.share * m + 1e-9)

    def aggregate(self, server: Server, updates: Updates) -> Mapping[str, Tensor]:
        cut = self.cut(len(updates))
        if not cut:
            return updates.combined([1.0] * len(updates), mean=True)
        rule = partial(trimmed_mean, cut=cut)
        return {name: updates.by_coordinate(name, rule) for name in updates.entries}
