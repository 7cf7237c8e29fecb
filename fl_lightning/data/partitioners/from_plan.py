"""The partition of another run."""

from __future__ import annotations

import numpy as np

from fl_lightning.data.partitioners.base import Partitioner, Parts
from fl_lightning.errors import require


class FromPlan(Partitioner):
    """The partition of another run, read from its ``plan.npz``.

    Args:
        path: the file.

    Raises:
        UsageError: there is no such file, it is not a plan, or its number of clients or samples differs.
    """

    needs_labels = False

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> Parts:
        from fl_lightning.data.plan import Plan

        parts = Plan.load(self.path).parts
        hint = f"the plan has {len(parts)} clients, give that number"
        require(len(parts) == num_clients, "data.num_clients", num_clients, hint)
        number = sum(map(len, parts))
        hint = f"the plan has {number} samples, the data has {len(labels)}; give a plan of this data"
        require(number == len(labels), "FromPlan.path", self.path, hint)
        return parts
