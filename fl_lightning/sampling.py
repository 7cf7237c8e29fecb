"""The cohort of a round is a pure function of the seed and the round, so resuming needs no generator's state."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import numpy as np

from fl_lightning.seeding import numpy_rng


class Sampler(ABC):
    """Chooses the clients of a round. Subclasses implement :meth:`choose`."""

    def __call__(self, seed: int, round_: int, num_clients: int, cohort_size: int) -> list[int]:
        """The clients of round ``round_``, ascending, without repeats."""
        chosen = self.choose(numpy_rng(seed, "cohort", round_), round_, num_clients, cohort_size)
        return sorted(int(k) for k in chosen)

    @abstractmethod
    def choose(self, rng: np.random.Generator, round_: int, num_clients: int, cohort_size: int) -> np.ndarray:
        """``cohort_size`` different clients of ``range(num_clients)``, drawn from ``rng`` only."""


class UniformSampler(Sampler):
    """Every cohort of the size asked for is equally likely."""

    def choose(self, rng: np.random.Generator, round_: int, num_clients: int, cohort_size: int) -> np.ndarray:
        return rng.choice(num_clients, cohort_size, replace=False)


def size_of_cohort(num_clients: int, participation: float, cohort_size: int | None) -> int:
    """``cohort_size`` where given, else the whole part of ``participation * num_clients``, at least 1."""
    if cohort_size is not None:
        return cohort_size
    # 0.29 * 100 is 28.999999999999996 in floating point: it means 29
    return max(1, math.floor(participation * num_clients + 1e-9))
