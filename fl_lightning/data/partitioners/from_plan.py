"""The partition of another run."""

from __future__ import annotations

import numpy as np

from fl_lightning.data.partitioners.base import Partitioner, Parts
from fl_lightning.errors import require


class FromPlan(Partitioner):
    """Who held what in another run, from its ``plan.npz``.

    Args:
        path: the file.

    Raises:
        UsageError: no such file, not a plan, or of other numbers of clients or samples.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> Parts:
        from fl_lightning.data.plan import Plan

        parts = Plan.load(self.path).parts
        clients = f"the plan has {len(parts)} clients, give that"
        require(len(parts) == num_clients, "data.num_clients", num_clients, clients)
        number = sum(map(len, parts))
        mend = f"the plan deals out {number} samples, the data has {len(labels)}; give a plan of this data"
        require(number == len(labels), "FromPlan.path", self.path, mend)
        return parts
