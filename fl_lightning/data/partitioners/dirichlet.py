"""Label skew by Dirichlet draws."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from fl_lightning.data.partitioners.base import Partitioner, Parts, by_owner, check_min_size, deal, round_shares
from fl_lightning.errors import UsageError, require

Rng = np.random.Generator | np.random.RandomState


class Dirichlet(Partitioner):
    r"""Label skew: each class is divided over the clients in proportions drawn from :math:`\mathrm{Dir}(\alpha)`.

    A client that already holds its equal share N/K or more gets nothing of the classes that follow, as in the code of
    MOON, NIID-Bench, FedDecorr and FedUV. That code draws everything again until every client holds ``min_size``
    samples, which may never end and changes the distribution. Here, by default, one draw is repaired: clients that are
    too small get samples of the largest client's most frequent class.

    ``redraw`` is the procedure of that code to the letter: given ``np.random.RandomState(seed)``, each client gets the
    samples that the code gives it after ``np.random.seed(seed)``, in the same order. Cut points are rounded down, so
    that a few samples of a class can go to the last client although it holds its equal share.

    Args:
        alpha: concentration, above 0; small is skewed, and the larger, the closer to equal proportions.
        min_size: the least number of samples of a client.
        repair: how ``min_size`` is reached: ``move`` samples as above, or ``redraw`` everything as the papers' code
            does, at most ``max_draws`` times. A class of which all open clients drew 0, where that code divides by 0,
            is drawn again by itself.
        cap: whether a client that holds its equal share gets no more; without it, the proportions are those drawn.
        max_draws: number of draws after which ``redraw`` gives up.

    Raises:
        UsageError: there are fewer than ``min_size`` samples for each client, or no draw gave them to all.
    """

    def __init__(
        self,
        alpha: float = 0.5,
        min_size: int = 10,
        repair: Literal["move", "redraw"] = "move",
        cap: bool = True,
        max_draws: int = 1000,
    ) -> None:
        require(0 < alpha < math.inf, "Dirichlet.alpha", alpha, "give a number above 0; small is skewed")
        require(min_size >= 0, "Dirichlet.min_size", min_size, "give 0 or more")
        require(max_draws >= 1, "Dirichlet.max_draws", max_draws, "give 1 or more")
        self.alpha, self.min_size, self.repair = alpha, min_size, repair
        self.cap, self.max_draws = cap, max_draws

    def __call__(self, labels: np.ndarray, num_clients: int, rng: Rng) -> Parts:
        check_min_size("Dirichlet", self.min_size, num_clients, len(labels))
        if self.repair == "redraw":
            self.moved = 0
            return self._redrawn(labels, num_clients, rng)
        owner = self._draw_owners(labels, num_clients, rng)
        self.moved = repair(owner, labels, num_clients, self.min_size)
        return by_owner(owner, num_clients)

    def _redrawn(self, labels: np.ndarray, num_clients: int, rng: Rng) -> Parts:
        """The parts of the first draw that gives every client ``min_size`` samples, as the papers' code draws them."""
        for _ in range(self.max_draws):
            parts = self._draw_parts(labels, num_clients, rng)
            if min(map(len, parts)) >= self.min_size:
                for part in parts:
                    rng.shuffle(part)
                return parts
        raise UsageError(
            f"Dirichlet.repair='redraw': none of {self.max_draws} draws gave each of {num_clients} clients "
            f"Dirichlet.min_size={self.min_size} samples; give repair=move, a larger alpha or a smaller min_size"
        )

    def _draw_parts(self, labels: np.ndarray, num_clients: int, rng: Rng) -> Parts:
        pieces: list[Parts] = [[] for _ in range(num_clients)]
        held = np.zeros(num_clients, np.int64)
        for label in range(int(labels.max(initial=0)) + 1):  # that code also draws for a class without samples
            members = np.flatnonzero(labels == label)
            rng.shuffle(members)
            shares = self._draw_shares(held < len(labels) / num_clients, rng)
            cuts = (np.cumsum(shares) * len(members)).astype(np.int64)[:-1]
            for own, piece in zip(pieces, np.split(members, cuts), strict=True):
                own.append(piece)
            held = np.array([sum(map(len, own)) for own in pieces])
        return [np.concatenate(own) for own in pieces]

    def _draw_shares(self, open_: np.ndarray, rng: Rng) -> np.ndarray:
        """Shares of a class ``(K,)``, 0 for clients that are not open; they add up to 1."""
        for _ in range(self.max_draws):
            shares = rng.dirichlet(np.full(len(open_), self.alpha)) * (open_ if self.cap else 1)
            if shares.sum() > 0:
                return shares / shares.sum()
        hint = "all clients that may get samples drew 0 each time; give repair=move or a larger alpha"
        raise UsageError(f"Dirichlet.alpha={self.alpha!r}: {hint}")

    def _draw_owners(self, labels: np.ndarray, num_clients: int, rng: Rng) -> np.ndarray:
        owner, held = np.empty(len(labels), np.int64), np.zeros(num_clients, np.int64)
        for label in np.unique(labels):
            members = rng.permutation(np.flatnonzero(labels == label))
            open_ = held < len(labels) / num_clients if self.cap else np.ones(num_clients, bool)
            shares = rng.dirichlet(np.full(num_clients, self.alpha)) * open_
            # with a tiny alpha, all clients that may get samples can have drawn exactly 0: they then share equally
            weights = shares if shares.sum() > 0 else open_.astype(float) if open_.any() else np.ones(num_clients)
            counts = round_shares(weights, len(members))
            owner[members] = np.repeat(np.arange(num_clients), counts)
            held += counts
        return owner


class ClientDirichlet(Partitioner):
    r"""Label skew by client: each draws its own class proportions from :math:`\mathrm{Dir}(\alpha)` (FedDyn's code).

    A client draws its samples by its proportions, among the classes of which samples are left. If clients ask for more
    samples of a class than there are, these are divided among them at random. The samples given out last are
    therefore less skewed than the proportions.

    Args:
        alpha: concentration, above 0; small is skewed.
        sigma: standard deviation of the logarithm of the clients' sizes; 0 makes them equal.
    """

    def __init__(self, alpha: float = 0.5, sigma: float = 0.0) -> None:
        require(0 < alpha < math.inf, "ClientDirichlet.alpha", alpha, "give a number above 0; small is skewed")
        require(0 <= sigma < math.inf, "ClientDirichlet.sigma", sigma, "give 0 or more")
        self.alpha, self.sigma = alpha, sigma

    def __call__(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> Parts:
        _, codes = np.unique(labels, return_inverse=True)
        left = np.bincount(codes)
        proportions = rng.dirichlet(np.full(len(left), self.alpha), size=num_clients)
        # every client gets one sample, and its share of the others
        rest = round_shares(rng.lognormal(0, self.sigma, num_clients), len(labels) - num_clients)
        need = rest + 1
        table = np.zeros((num_clients, len(left)), np.int64)
        # each pass either satisfies all clients or exhausts a class
        while need.any():
            got = ration(rng.multinomial(need, among(proportions, left)), left, rng)
            table, need, left = table + got, need - got.sum(1), left - got.sum(0)
        return deal(codes, table, rng)


def among(proportions: np.ndarray, left: np.ndarray) -> np.ndarray:
    """Proportions ``(K, C)`` restricted to the classes of which samples are left ``(C,)``.

    A client whose proportions of these classes are all 0 gets them in proportion to what is left.
    """
    weights = proportions * (left > 0)
    weights[weights.sum(1) == 0] = left
    return weights / weights.sum(1, keepdims=True)


def ration(wanted: np.ndarray, left: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """What clients get ``(K, C)`` of what they want; a class that has fewer samples is divided at random."""
    got = wanted.copy()
    for code in np.flatnonzero(wanted.sum(0) > left):
        got[:, code] = rng.multivariate_hypergeometric(wanted[:, code], left[code], method="marginals")
    return got


def repair(owner: np.ndarray, labels: np.ndarray, num_clients: int, min_size: int) -> int:
    """Fill every client up to ``min_size``, in place, with samples of the largest client's most frequent class.

    Args:
        owner: client of each sample ``(N,)``; overwritten.
        labels: label of each sample ``(N,)``.
        num_clients: K, with ``K * min_size <= N``.
        min_size: the number of samples that every client must hold.

    Returns:
        The number of samples that were moved.
    """
    _, codes = np.unique(labels, return_inverse=True)
    counts = np.zeros((num_clients, codes.max() + 1), np.int64)
    np.add.at(counts, (owner, codes), 1)
    sizes, moved = counts.sum(1), 0
    # the samples in the order of client and class, as they are before the repair; they are taken from the end of each
    order = np.lexsort((codes, owner))
    ends = counts.cumsum().reshape(counts.shape)
    for client in np.flatnonzero(sizes < min_size):
        while sizes[client] < min_size:
            donor = int(sizes.argmax())
            code = int(counts[donor].argmax())
            # take half of what the donor can spare, so that the next largest client gives as well
            spare = max(1, (sizes[donor] - min_size) // 2)
            number = int(min(min_size - sizes[client], counts[donor, code], spare))
            ends[donor, code] -= number
            owner[order[ends[donor, code] :][:number]] = client
            counts[donor, code] -= number
            counts[client, code] += number
            sizes[donor] -= number
            sizes[client] += number
            moved += number
    return moved
