"""Choosing the cohort, the clients of a round.

The cohort is a pure function of the seed and the round, so that a resumed run needs no saved generator.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import numpy as np

from fl_lightning.core.seeding import numpy_rng
from fl_lightning.utilities.errors import require


class Sampler(ABC):
    """Chooses the cohort of a round. Subclasses implement :meth:`choose`."""

    def __call__(self, seed: int, round_: int, num_clients: int, cohort_size: int) -> list[int]:
        """The cohort of round ``round_``: ids of clients, ascending, without repeats.

        Args:
            seed: base seed of the run.
            round_: number of the round, from 0.
            num_clients: number of all clients.
            cohort_size: number of clients to choose, from 1 to ``num_clients``.
        """
        drawn = self.choose(numpy_rng(seed, "cohort", round_), round_, num_clients, cohort_size)
        cohort = sorted(int(k) for k in drawn)
        key, hint = f"trainer.sampler={type(self).__name__}: the cohort of round {round_}", "give different ids from"
        within = bool(cohort) and cohort[0] >= 0 and cohort[-1] < num_clients
        require(within and len(set(cohort)) == len(cohort), key, cohort, f"{hint} 0 to {num_clients - 1}, at least one")
        return cohort

    @abstractmethod
    def choose(self, rng: np.random.Generator, round_: int, num_clients: int, cohort_size: int) -> np.ndarray:
        """``cohort_size`` different ids from ``range(num_clients)``; all randomness comes from ``rng``."""


class UniformSampler(Sampler):
    """Every cohort of the requested size is equally likely."""

    def choose(self, rng: np.random.Generator, round_: int, num_clients: int, cohort_size: int) -> np.ndarray:
        return rng.choice(num_clients, cohort_size, replace=False)


def size_of_cohort(num_clients: int, participation: float, cohort_size: int | None) -> int:
    """The number of clients in a round: ``cohort_size``, or else the share of all, rounded down, but at least 1."""
    if cohort_size is not None:
        return cohort_size
    # 0.29 * 100 is 28.999999999999996 in floating point, and should give 29
    return max(1, math.floor(participation * num_clients + 1e-9))
