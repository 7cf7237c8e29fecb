"""The base class of partitioners, and the simple ones. Each finishes in bounded time, for any skew."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import numpy as np

from fl_lightning.data.plan import Plan
from fl_lightning.errors import require

Parts = list[np.ndarray]


class Partitioner(ABC):
    """Assigns samples to clients. Subclasses implement ``__call__``.

    Attributes:
        moved: number of samples that the last call moved to another client to reach a ``min_size``.
        needs_labels: whether the partition depends on the labels; without labels, ``__call__`` gets zeros.
        needs_domains: whether ``__call__`` takes the domain of each sample ``(N,)``, from 0, as a fourth argument.
    """

    moved = 0
    needs_labels = True
    needs_domains = False

    @abstractmethod
    def __call__(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> Parts:
        """Assign every sample to one client; all randomness comes from ``rng``.

        Args:
            labels: label of each sample ``(N,)``.
            num_clients: K, at most N.
            rng: the random generator to draw from.

        Returns:
            Sample indices of each client: K arrays that together hold every sample exactly once.
        """


class IID(Partitioner):
    """Every client gets an equal number of samples, drawn at random."""

    needs_labels = False

    def __call__(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> Parts:
        return np.array_split(rng.permutation(len(labels)), num_clients)


class Pooled(Partitioner):
    """All samples at one client: central training, with which federated methods are compared.

    Raises:
        UsageError: there are several clients.
    """

    needs_labels = False

    def __call__(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> Parts:
        require(num_clients == 1, "data.num_clients with the partitioner Pooled", num_clients, "give 1")
        return [np.arange(len(labels))]


class QuantityDirichlet(Partitioner):
    r"""Quantity skew: the clients' sizes are drawn from :math:`\mathrm{Dir}(\beta)`, their samples at random.

    NIID-Bench draws the sizes again until every client has ``min_size`` samples. Here they are drawn once, and the
    largest clients give samples to the smallest.

    Args:
        beta: concentration, above 0; small is skewed.
        min_size: the least number of samples of a client.

    Raises:
        UsageError: there are fewer than ``min_size`` samples for each client.
    """

    needs_labels = False

    def __init__(self, beta: float = 0.5, min_size: int = 10) -> None:
        require(0 < beta < math.inf, "QuantityDirichlet.beta", beta, "give a number above 0; small is skewed")
        require(min_size >= 0, "QuantityDirichlet.min_size", min_size, "give 0 or more")
        self.beta, self.min_size = beta, min_size

    def __call__(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> Parts:
        check_min_size("QuantityDirichlet", self.min_size, num_clients, len(labels))
        sizes = round_shares(rng.dirichlet(np.full(num_clients, self.beta)), len(labels))
        drawn = sizes.copy()
        while sizes.min() < self.min_size:
            smallest, largest = sizes.argmin(), sizes.argmax()
            number = min(self.min_size - sizes[smallest], max(1, (sizes[largest] - self.min_size) // 2))
            sizes[smallest] += number
            sizes[largest] -= number
        self.moved = int((sizes - drawn).clip(0).sum())
        return np.split(rng.permutation(len(labels)), np.cumsum(sizes)[:-1])


class Shards(Partitioner):
    r"""Sorts the samples by label, cuts them into equal shards, and gives every client some of them at random.

    This is :math:`Q(\alpha)` of FedLC (Zhang et al., ICML 2022), and the shards of FedBABU.

    Args:
        per_client: :math:`\alpha`, number of shards of a client, at least 1; about its number of classes.

    Raises:
        UsageError: there are fewer samples than shards.
    """

    def __init__(self, per_client: int = 2) -> None:
        require(per_client >= 1, "Shards.per_client", per_client, "give 1 or more")
        self.per_client = per_client

    def __call__(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> Parts:
        number = num_clients * self.per_client
        hint = f"{num_clients} clients need {number} shards of {len(labels)} samples; give fewer"
        require(number <= len(labels), "Shards.per_client", self.per_client, hint)
        order = rng.permutation(len(labels))
        shards = np.array_split(order[np.argsort(labels[order], kind="stable")], number)
        chosen = rng.permutation(number).reshape(num_clients, self.per_client)
        return [np.concatenate([shards[shard] for shard in mine]) for mine in chosen]


class ClassesPerClient(Partitioner):
    """Every client holds ``n`` classes; each class is divided equally among the clients that hold it.

    This is ``#label`` of NIID-Bench. Client k holds class k modulo C, and others at random; classes that no client
    would hold otherwise are given out first.

    Args:
        n: number of classes of a client, at least 1.

    Raises:
        UsageError: there are fewer than ``n`` classes, or too few clients to hold them all.
    """

    def __init__(self, n: int = 2) -> None:
        require(n >= 1, "ClassesPerClient.n", n, "give 1 or more")
        self.n = n

    def __call__(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> Parts:
        classes, codes = np.unique(labels, return_inverse=True)
        number = len(classes)
        require(self.n <= number, "ClassesPerClient.n", self.n, f"there are {number} classes, give at most that number")
        hint = f"{num_clients} clients cannot hold {number} classes; give {-(-number // num_clients)} or more"
        require(self.n * num_clients >= number, "ClassesPerClient.n", self.n, hint)
        owned = self._owners(number, num_clients, rng)
        table = np.zeros((num_clients, number), np.int64)
        for code in range(number):
            owners = rng.permutation(np.flatnonzero(owned[:, code]))
            sizes = [len(part) for part in np.array_split(np.flatnonzero(codes == code), len(owners))]
            table[owners, code] = sizes
        return deal(codes, table, rng)

    def _owners(self, number: int, num_clients: int, rng: np.random.Generator) -> np.ndarray:
        """Draw which client holds which class ``(K, C)``."""
        owned = np.zeros((num_clients, number), bool)
        owned[np.arange(num_clients), np.arange(num_clients) % number] = True
        spare = list(rng.permutation(np.flatnonzero(~owned.any(0))))
        for mine in owned:
            more = self.n - 1
            first, spare = spare[:more], spare[more:]
            mine[first] = True
            mine[rng.permutation(np.flatnonzero(~mine))[: more - len(first)]] = True
        return owned


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
        parts = Plan.load(self.path).parts
        hint = f"the plan has {len(parts)} clients, give that number"
        require(len(parts) == num_clients, "data.num_clients", num_clients, hint)
        number = sum(map(len, parts))
        hint = f"the plan has {number} samples, the data has {len(labels)}; give a plan of this data"
        require(number == len(labels), "FromPlan.path", self.path, hint)
        return parts


def check_min_size(kind: str, min_size: int, num_clients: int, number: int) -> None:
    """Check that there are enough samples for every client to hold ``min_size``.

    Raises:
        UsageError: there are fewer than ``min_size`` samples for each client.
    """
    hint = (
        f"{num_clients} clients cannot hold that many of {number} samples each; "
        f"give at most {number // num_clients}, or fewer clients"
    )
    require(min_size * num_clients <= number, f"{kind}.min_size", min_size, hint)


def round_shares(shares: np.ndarray, number: int) -> np.ndarray:
    """Integers ``(K,)`` that add up to ``number``, in proportion to ``shares`` ``(K,)``."""
    cuts = np.floor(np.cumsum(shares) / shares.sum() * number).astype(np.int64)
    cuts[np.flatnonzero(shares)[-1] :] = number
    return np.diff(cuts, prepend=0)


def deal(codes: np.ndarray, table: np.ndarray, rng: np.random.Generator) -> Parts:
    """Give ``table[k, c]`` random samples of class c to client k.

    Args:
        codes: class of each sample ``(N,)``, from 0.
        table: numbers of samples ``(K, C)``; its columns add up to the sizes of the classes.
        rng: the random generator to draw from.
    """
    owner = np.empty(len(codes), np.int64)
    for code in range(table.shape[1]):
        members = rng.permutation(np.flatnonzero(codes == code))
        owner[members] = np.repeat(np.arange(len(table)), table[:, code])
    return by_owner(owner, len(table))


def by_owner(owner: np.ndarray, num_clients: int) -> Parts:
    """The samples of each client, given the client of each sample ``(N,)``."""
    order = np.argsort(owner, kind="stable")
    return np.split(order, np.searchsorted(owner[order], np.arange(1, num_clients)))
