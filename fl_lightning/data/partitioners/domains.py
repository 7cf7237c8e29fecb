"""Feature skew: clients hold samples of different domains."""

from __future__ import annotations

from typing import Any

import numpy as np

from fl_lightning.data.partitioners.base import IID, Partitioner, Parts
from fl_lightning.data.partitioners.dirichlet import Dirichlet
from fl_lightning.errors import require


class _Within(Partitioner):
    """Every domain has the same number of clients, and another partitioner divides it among them."""

    needs_domains = True
    inner: Partitioner

    def __call__(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator, domains: Any = None) -> Parts:
        number = int(domains.max()) + 1
        hint = f"there are {number} domains, give a multiple of {number}"
        require(num_clients % number == 0, "data.num_clients", num_clients, hint)
        parts: Parts = []
        self.moved = 0
        for domain in range(number):
            members = np.flatnonzero(domains == domain)
            each = num_clients // number
            hint = f"domain {domain} has {len(members)} samples for {each} clients, give fewer"
            require(each <= len(members), "data.num_clients", num_clients, hint)
            parts += [members[part] for part in self.inner(labels[members], each, rng)]
            self.moved += self.inner.moved
        return parts


class ByDomain(_Within):
    """One client for each domain, or several, among which the domain is divided at random.

    Raises:
        UsageError: the number of clients is not a multiple of the number of domains.
    """

    needs_labels = False

    def __init__(self) -> None:
        self.inner = IID()


class DomainDirichlet(_Within):
    """Feature and label skew: each domain is divided among its own clients by :class:`Dirichlet`.

    Args:
        alpha: concentration, above 0; small is skewed.
        min_size: the least number of samples of a client.

    Raises:
        UsageError: the number of clients is not a multiple of the number of domains, or a domain has fewer than
            ``min_size`` samples for each client.
    """

    def __init__(self, alpha: float = 0.5, min_size: int = 10) -> None:
        self.inner = Dirichlet(alpha, min_size)


class Natural(Partitioner):
    """The data's own clients, such as the writers of FEMNIST; with fewer clients, each gets several of them at random.

    Raises:
        UsageError: there are more clients than the data has of its own.
    """

    needs_labels = False
    needs_domains = True

    def __call__(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator, domains: Any = None) -> Parts:
        number = int(domains.max()) + 1
        hint = f"the data has {number} clients of its own, give at most that number"
        require(num_clients <= number, "data.num_clients with the partitioner Natural", num_clients, hint)
        order = np.arange(number) if num_clients == number else rng.permutation(number)
        members = np.split(np.argsort(domains, kind="stable"), np.cumsum(np.bincount(domains))[:-1])
        return [np.concatenate([members[own] for own in some]) for some in np.array_split(order, num_clients)]
