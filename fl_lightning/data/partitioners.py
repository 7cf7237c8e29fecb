"""Partitioners: who holds which sample. Each ends in bounded time, for any skew."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from fl_lightning.errors import UsageError, require

Parts = list[np.ndarray]


class Partitioner(ABC):
    """Deals samples out to clients. Subclasses implement the call.

    Attributes:
        moved: samples that the repair gave to another client in the last call.
    """

    moved = 0

    @abstractmethod
    def __call__(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> Parts:
        """Sample indices of each client; all randomness comes from ``rng``.

        Args:
            labels: label of each sample ``(N,)``.
            num_clients: K, at most N.
            rng: the stream to draw from.

        Returns:
            K index arrays, which hold every sample exactly once.
        """


class IID(Partitioner):
    """Every client gets an equal share, drawn at random."""

    def __call__(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> Parts:
        return np.array_split(rng.permutation(len(labels)), num_clients)


class Pooled(Partitioner):
    """All samples on one client: central training, the reference row above every federated method.

    Raises:
        UsageError: there are several clients.
    """

    def __call__(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> Parts:
        require(num_clients == 1, "data.num_clients with the partitioner Pooled", num_clients, "give 1")
        return [np.arange(len(labels))]


class Dirichlet(Partitioner):
    r"""Label skew: each class is dealt out by a draw from :math:`\mathrm{Dir}(\alpha)` over the clients.

    A client that already holds its equal share N/K or more gets nothing of the classes that follow, as in the reference
    partitions of MOON, NIID-Bench, FedDecorr and FedUV. Those draw everything again until every client holds
    ``min_size`` samples, which may never end and changes the law; here one draw is repaired: clients that are too
    small get samples of the largest client's most frequent class.

    Args:
        alpha: concentration, above 0; small is skewed, infinity would be IID by class.
        min_size: samples that every client holds at least.

    Raises:
        UsageError: ``alpha`` is not above 0, or there are fewer than ``min_size`` samples a client.
    """

    def __init__(self, alpha: float = 0.5, min_size: int = 10) -> None:
        require(alpha > 0, "Dirichlet.alpha", alpha, "give a number above 0; small is skewed")
        require(min_size >= 0, "Dirichlet.min_size", min_size, "give 0 or more")
        self.alpha, self.min_size = alpha, min_size

    def __call__(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> Parts:
        if self.min_size * num_clients > len(labels):
            raise UsageError(
                f"Dirichlet.min_size={self.min_size}: {num_clients} clients cannot hold that many of {len(labels)} "
                f"samples each; give at most {len(labels) // num_clients}, or fewer clients"
            )
        owner = self._draw_owners(labels, num_clients, rng)
        self.moved = repair(owner, labels, num_clients, self.min_size)
        order = np.argsort(owner, kind="stable")
        return np.split(order, np.searchsorted(owner[order], np.arange(1, num_clients)))

    def _draw_owners(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> np.ndarray:
        owner, held = np.empty(len(labels), np.int64), np.zeros(num_clients, np.int64)
        for label in np.unique(labels):
            members = rng.permutation(np.flatnonzero(labels == label))
            shares = rng.dirichlet(np.full(num_clients, self.alpha)) * (held < len(labels) / num_clients)
            counts = _deal(shares, held < len(labels) / num_clients, len(members))
            owner[members] = np.repeat(np.arange(num_clients), counts)
            held += counts
        return owner


def _deal(shares: np.ndarray, open_: np.ndarray, number: int) -> np.ndarray:
    """How many of ``number`` samples each client gets, in proportion to ``shares``."""
    # a tiny alpha can leave every open client with exactly 0: they then share equally
    weights = shares if shares.sum() > 0 else open_.astype(float) if open_.any() else np.ones(len(shares))
    cuts = np.floor(np.cumsum(weights) / weights.sum() * number).astype(np.int64)
    cuts[np.flatnonzero(weights)[-1] :] = number
    return np.diff(cuts, prepend=0)


def repair(owner: np.ndarray, labels: np.ndarray, num_clients: int, min_size: int) -> int:
    """Fill every client up to ``min_size``, in place, from the largest client's most frequent class.

    Args:
        owner: client of each sample ``(N,)``; changed.
        labels: label of each sample ``(N,)``.
        num_clients: K, with ``K * min_size <= N``.
        min_size: samples every client is to hold.

    Returns:
        Number of samples that were moved.
    """
    _, codes = np.unique(labels, return_inverse=True)
    counts = np.zeros((num_clients, codes.max() + 1), np.int64)
    np.add.at(counts, (owner, codes), 1)
    sizes = counts.sum(1)
    stock = _Stock(owner, codes, counts.shape[1])
    moved = 0
    for client in np.flatnonzero(sizes < min_size):
        while sizes[client] < min_size:
            donor = int(sizes.argmax())
            code = int(counts[donor].argmax())
            # half of what the donor can spare at once: the next largest then gives as well
            spare = max(1, (sizes[donor] - min_size) // 2)
            number = int(min(min_size - sizes[client], counts[donor, code], spare))
            owner[stock.take(donor, code, number)] = client
            counts[donor, code] -= number
            counts[client, code] += number
            sizes[donor] -= number
            sizes[client] += number
            moved += number
    return moved


class _Stock:
    """The samples of each client and class before the repair, taken from the end."""

    def __init__(self, owner: np.ndarray, codes: np.ndarray, num_classes: int) -> None:
        self.num_classes = num_classes
        cells = owner * num_classes + codes
        self.order = np.argsort(cells, kind="stable")
        edges = np.arange(cells.max() + 2)
        self.ends = np.searchsorted(cells[self.order], edges, side="left")[1:]

    def take(self, client: int, code: int, number: int) -> np.ndarray:
        cell = client * self.num_classes + code
        end = self.ends[cell]
        self.ends[cell] = end - number
        return self.order[end - number : end]
