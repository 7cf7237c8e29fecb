"""Partitioners assign samples to clients. Each finishes in bounded time, for any skew."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, Literal

import numpy as np

from fl_lightning.data.plan import Plan
from fl_lightning.utilities.errors import UsageError, count, require

Parts = list[np.ndarray]
Rng = np.random.Generator | np.random.RandomState


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
        min_size: number of samples of a client at least.

    Raises:
        UsageError: there are fewer than ``min_size`` samples for each client.
    """

    needs_labels = False

    def __init__(self, beta: float = 0.5, min_size: int = 10) -> None:
        require(0 < beta < math.inf, "QuantityDirichlet.beta", beta, "use a number above 0; small values are skewed")
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
        hint = f"{count(num_clients, 'client')} cannot have {number} shards of {len(labels)} samples; give fewer"
        require(number <= len(labels), "Shards.per_client", self.per_client, hint)
        order = rng.permutation(len(labels))
        shards = np.array_split(order[np.argsort(labels[order], kind="stable")], number)
        drawn = rng.permutation(number).reshape(num_clients, self.per_client)
        return [np.concatenate([shards[shard] for shard in numbers]) for numbers in drawn]


class ClassesPerClient(Partitioner):
    """Every client holds ``n`` classes; each class is divided equally among the clients that hold it.

    This is ``#label`` of NIID-Bench. Client k holds class k modulo C and further random classes, first the classes that
    no client would hold otherwise.

    Args:
        n: number of classes of a client, at least 1.

    Raises:
        UsageError: fewer than ``n`` classes, or too few clients to hold all classes.
    """

    def __init__(self, n: int = 2) -> None:
        require(n >= 1, "ClassesPerClient.n", n, "give 1 or more")
        self.n = n

    def __call__(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> Parts:
        classes, codes = np.unique(labels, return_inverse=True)
        number = len(classes)
        require(self.n <= number, "ClassesPerClient.n", self.n, f"there are {number} classes, give at most that number")
        hint = f"{count(num_clients, 'client')} cannot hold {number} classes; give {-(-number // num_clients)} or more"
        require(self.n * num_clients >= number, "ClassesPerClient.n", self.n, hint)
        owned = self._owners(number, num_clients, rng)
        table = np.zeros((num_clients, number), np.int64)
        for code in range(number):
            owners = rng.permutation(np.flatnonzero(owned[:, code]))
            members = np.flatnonzero(codes == code)
            table[owners, code] = [len(part) for part in np.array_split(members, len(owners))]
        return deal(codes, table, rng)

    def _owners(self, number: int, num_clients: int, rng: np.random.Generator) -> np.ndarray:
        """Draw which client holds which class ``(K, C)``."""
        owned = np.zeros((num_clients, number), bool)
        owned[np.arange(num_clients), np.arange(num_clients) % number] = True
        spare = list(rng.permutation(np.flatnonzero(~owned.any(0))))
        for classes in owned:
            num_more = self.n - 1
            unowned, spare = spare[:num_more], spare[num_more:]
            classes[unowned] = True
            classes[rng.permutation(np.flatnonzero(~classes))[: num_more - len(unowned)]] = True
        return owned


class FromPlan(Partitioner):
    """The partition of another run, read from its ``plan.npz``.

    Args:
        path: the file.

    Raises:
        UsageError: the file does not exist, is not a plan, or has another number of clients or samples.
    """

    needs_labels = False

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> Parts:
        parts = Plan.load(self.path).parts
        hint = f"the plan has {count(len(parts), 'client')}; use this number"
        require(len(parts) == num_clients, "data.num_clients", num_clients, hint)
        number = sum(map(len, parts))
        hint = f"the plan has {number} samples, the data has {len(labels)}; use a plan of this data"
        require(number == len(labels), "FromPlan.path", self.path, hint)
        return parts


class Dirichlet(Partitioner):
    r"""Label skew: each class is divided over the clients in proportions drawn from :math:`\mathrm{Dir}(\alpha)`.

    A client with its equal share N/K or more gets no samples of later classes, as in the code of MOON, NIID-Bench,
    FedDecorr and FedUV. That code repeats all draws until every client holds ``min_size`` samples, which may never end
    and changes the distribution. Here, by default, one draw is repaired: clients that are too small get samples of the
    largest client's most frequent class.

    ``redraw`` reproduces that code exactly: with ``np.random.RandomState(seed)``, each client gets the same samples as
    after ``np.random.seed(seed)``, in the same order. Cut points are rounded down, so that a few samples of a class can
    go to the last client although it holds its equal share.

    Args:
        alpha: concentration, above 0; small values are skewed, large values close to equal proportions.
        min_size: number of samples of a client at least.
        repair: way to reach ``min_size``: ``move`` samples as above, or ``redraw`` everything as in the papers' code,
            at most ``max_draws`` times. Only a class for which all open clients drew 0, where that code divides by 0,
            is drawn again alone.
        cap: whether a client with its equal share gets no more samples; otherwise the drawn proportions apply.
        max_draws: number of draws after which ``redraw`` gives up.

    Raises:
        UsageError: fewer than ``min_size`` samples for each client, or no draw reached ``min_size``.
    """

    def __init__(
        self,
        alpha: float = 0.5,
        min_size: int = 10,
        repair: Literal["move", "redraw"] = "move",
        cap: bool = True,
        max_draws: int = 1000,
    ) -> None:
        require(0 < alpha < math.inf, "Dirichlet.alpha", alpha, "use a number above 0; small values are skewed")
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
        sizes = np.zeros(num_clients, np.int64)
        for label in range(int(labels.max(initial=0)) + 1):  # that code also draws for a class without samples
            members = np.flatnonzero(labels == label)
            rng.shuffle(members)
            shares = self._draw_shares(sizes < len(labels) / num_clients, rng)
            cuts = (np.cumsum(shares) * len(members)).astype(np.int64)[:-1]
            for client_pieces, piece in zip(pieces, np.split(members, cuts), strict=True):
                client_pieces.append(piece)
            sizes = np.array([sum(map(len, client_pieces)) for client_pieces in pieces])
        return [np.concatenate(client_pieces) for client_pieces in pieces]

    def _draw_shares(self, open_: np.ndarray, rng: Rng) -> np.ndarray:
        """Shares of a class ``(K,)``, 0 for clients that are not open; they add up to 1."""
        for _ in range(self.max_draws):
            shares = rng.dirichlet(np.full(len(open_), self.alpha)) * (open_ if self.cap else 1)
            if shares.sum() > 0:
                return shares / shares.sum()
        hint = "all clients that may get samples drew 0 each time; give repair=move or a larger alpha"
        raise UsageError(f"Dirichlet.alpha={self.alpha!r}: {hint}")

    def _draw_owners(self, labels: np.ndarray, num_clients: int, rng: Rng) -> np.ndarray:
        owner, sizes = np.empty(len(labels), np.int64), np.zeros(num_clients, np.int64)
        for label in np.unique(labels):
            members = rng.permutation(np.flatnonzero(labels == label))
            open_ = sizes < len(labels) / num_clients if self.cap else np.ones(num_clients, bool)
            shares = rng.dirichlet(np.full(num_clients, self.alpha)) * open_
            # with a tiny alpha, all clients that may get samples can have drawn exactly 0: they then share equally
            weights = shares if shares.sum() > 0 else open_.astype(float) if open_.any() else np.ones(num_clients)
            counts = round_shares(weights, len(members))
            owner[members] = np.repeat(np.arange(num_clients), counts)
            sizes += counts
        return owner


class ClientDirichlet(Partitioner):
    r"""Label skew by client: each draws its class proportions from :math:`\mathrm{Dir}(\alpha)` (FedDyn's code).

    A client draws its samples by its proportions, among the classes with remaining samples. If clients demand more
    samples of a class than exist, these are divided among them at random. The samples assigned last are therefore less
    skewed than the proportions.

    Args:
        alpha: concentration, above 0; small values are skewed.
        sigma: standard deviation of the logarithm of the clients' sizes; 0 makes them equal.
    """

    def __init__(self, alpha: float = 0.5, sigma: float = 0.0) -> None:
        require(0 < alpha < math.inf, "ClientDirichlet.alpha", alpha, "use a number above 0; small values are skewed")
        require(0 <= sigma < math.inf, "ClientDirichlet.sigma", sigma, "give 0 or more")
        self.alpha, self.sigma = alpha, sigma

    def __call__(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> Parts:
        _, codes = np.unique(labels, return_inverse=True)
        remaining = np.bincount(codes)
        proportions = rng.dirichlet(np.full(len(remaining), self.alpha), size=num_clients)
        # every client gets one sample, and its share of the others
        need = round_shares(rng.lognormal(0, self.sigma, num_clients), len(labels) - num_clients) + 1
        table = np.zeros((num_clients, len(remaining)), np.int64)
        # each pass either satisfies all clients or exhausts a class
        while need.any():
            weights = proportions * (remaining > 0)
            # a client whose classes are exhausted takes other classes in proportion to their remaining samples
            weights[weights.sum(1) == 0] = remaining
            drawn = rng.multinomial(need, weights / weights.sum(1, keepdims=True))
            for code in np.flatnonzero(drawn.sum(0) > remaining):
                drawn[:, code] = rng.multivariate_hypergeometric(drawn[:, code], remaining[code], method="marginals")
            table, need, remaining = table + drawn, need - drawn.sum(1), remaining - drawn.sum(0)
        return deal(codes, table, rng)


class _WithinDomain(Partitioner):
    """Every domain has the same number of clients, and another partitioner divides it among them."""

    needs_domains = True
    inner: Partitioner

    def __call__(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator, domains: Any = None) -> Parts:
        number = int(domains.max()) + 1
        hint = f"there are {number} domains; use a multiple of {number}"
        require(num_clients % number == 0, "data.num_clients", num_clients, hint)
        parts: Parts = []
        self.moved = 0
        for domain in range(number):
            members = np.flatnonzero(domains == domain)
            per_domain = num_clients // number
            hint = f"domain {domain} has {len(members)} samples for {count(per_domain, 'client')}, give fewer"
            require(per_domain <= len(members), "data.num_clients", num_clients, hint)
            parts += [members[part] for part in self.inner(labels[members], per_domain, rng)]
            self.moved += self.inner.moved
        return parts


class ByDomain(_WithinDomain):
    """One client for each domain, or several, among which the domain is divided at random.

    Raises:
        UsageError: the number of clients is not a multiple of the number of domains.
    """

    needs_labels = False

    def __init__(self) -> None:
        self.inner = IID()


class DomainDirichlet(_WithinDomain):
    """Feature and label skew: each domain is divided among its own clients by :class:`Dirichlet`.

    Args:
        alpha: concentration, above 0; small values are skewed.
        min_size: number of samples of a client at least.

    Raises:
        UsageError: the number of clients is not a multiple of the number of domains, or a domain has fewer than
            ``min_size`` samples for each client.
    """

    def __init__(self, alpha: float = 0.5, min_size: int = 10) -> None:
        self.inner = Dirichlet(alpha, min_size)


class Natural(Partitioner):
    """The natural clients of the data, such as the writers of FEMNIST; with fewer clients, each gets several at random.

    Raises:
        UsageError: more clients than natural clients.
    """

    needs_labels = False
    needs_domains = True

    def __call__(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator, domains: Any = None) -> Parts:
        number = int(domains.max()) + 1
        hint = f"the data have {number} natural clients; use at most this number"
        require(num_clients <= number, "data.num_clients with the partitioner Natural", num_clients, hint)
        order = np.arange(number) if num_clients == number else rng.permutation(number)
        members = np.split(np.argsort(domains, kind="stable"), np.cumsum(np.bincount(domains))[:-1])
        groups = np.array_split(order, num_clients)
        return [np.concatenate([members[domain] for domain in group]) for group in groups]


def check_min_size(kind: str, min_size: int, num_clients: int, number: int) -> None:
    """Refuse a ``min_size`` that ``number`` samples cannot give to every client."""
    hint = (
        f"{count(num_clients, 'client')} cannot hold that many of {number} samples each; "
        f"give at most {number // num_clients}, or fewer clients"
    )
    require(min_size * num_clients <= number, f"{kind}.min_size", min_size, hint)


def round_shares(shares: np.ndarray, number: int) -> np.ndarray:
    """Integers ``(K,)`` that add up to ``number``, in proportion to ``shares`` ``(K,)``."""
    cuts = np.floor(np.cumsum(shares) / shares.sum() * number).astype(np.int64)
    cuts[np.flatnonzero(shares)[-1] :] = number
    return np.diff(cuts, prepend=0)


def deal(codes: np.ndarray, table: np.ndarray, rng: np.random.Generator) -> Parts:
    """Give ``table[k, c]`` random samples of class c to client k."""
    owner = np.empty(len(codes), np.int64)
    for code in range(table.shape[1]):
        members = rng.permutation(np.flatnonzero(codes == code))
        owner[members] = np.repeat(np.arange(len(table)), table[:, code])
    return by_owner(owner, len(table))


def by_owner(owner: np.ndarray, num_clients: int) -> Parts:
    """Samples of each client, from the client of each sample ``(N,)``."""
    order = np.argsort(owner, kind="stable")
    return np.split(order, np.searchsorted(owner[order], np.arange(1, num_clients)))


def repair(owner: np.ndarray, labels: np.ndarray, num_clients: int, min_size: int) -> int:
    """Fill clients up to ``min_size``, in place, from the largest client's commonest class; returns the moves."""
    _, codes = np.unique(labels, return_inverse=True)
    counts = np.zeros((num_clients, codes.max() + 1), np.int64)
    np.add.at(counts, (owner, codes), 1)
    sizes, moved = counts.sum(1), 0
    # samples ordered by client and class before the repair, taken from the end of each
    order = np.lexsort((codes, owner))
    ends = counts.cumsum().reshape(counts.shape)
    for client in np.flatnonzero(sizes < min_size):
        while sizes[client] < min_size:
            donor = int(sizes.argmax())
            code = int(counts[donor].argmax())
            # take half of the donor's surplus, so that the next largest client also donates
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
