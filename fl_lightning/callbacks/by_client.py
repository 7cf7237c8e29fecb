"""What callbacks share that measure clients one by one: which clients, and their numbers from all workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, TypeVar

import numpy as np
from torch import Tensor, nn

from fl_lightning.callbacks.access import RunAccess
from fl_lightning.callbacks.measurement import Measurement
from fl_lightning.client import Client
from fl_lightning.errors import UsageError, require
from fl_lightning.seeding import numpy_rng

ClientValues = dict[str, Any]
By = TypeVar("By", int, tuple[int, int])
Noted = TypeVar("Noted")


class ClientMeasurement(Measurement):
    """A measurement of the clients of a cohort, each by itself, in a round that is due.

    A subclass appends tables by :meth:`append`, one row a client, whose ids are in ``clients`` (R, m), where m is the
    smaller of ``max_clients`` and the number of clients. Rows without a client have the id -1 and are nan.

    Args:
        every_n_rounds: rounds from one measurement to the next, at least 1; the last round has one too.
        max_clients: most clients that a round measures, at least 1. Of a larger cohort as many are drawn at random,
            by an address of their own, the same for any number of workers.
    """

    def __init__(self, every_n_rounds: int = 10, max_clients: int = 20) -> None:
        super().__init__(every_n_rounds)
        require(max_clients >= 1, f"{type(self).__name__}.max_clients", max_clients, "give 1 or more")
        self.max_clients = max_clients

    def on_round_start(self, trainer: RunAccess) -> None:
        where = (trainer.seed, type(self).__name__, trainer.server.round)
        self.chosen = drawn_clients(trainer.server.cohort, self.max_clients, *where)
        self.mine: dict[int, ClientValues] = {}

    def measures(self, trainer: RunAccess, client: Client) -> bool:
        """Whether this client, whose visit ends, is measured: it is due and chosen, and has taken a local step."""
        return self.due(trainer.server.round) and client.info.id in self.chosen and client.num_steps > 0

    def on_round_end(self, trainer: RunAccess) -> None:
        if not self.due(trainer.server.round):
            return
        clients = in_order(trainer.gather(self.mine))
        if clients:
            self.append(trainer, "clients", {k: np.array(k) for k in clients}, fill=-1)
            self.record(trainer, clients)
            self.keep(trainer)

    def record(self, trainer: RunAccess, clients: dict[int, ClientValues]) -> None:
        """Append and log the numbers of a round; all workers call this.

        Args:
            trainer: the trainer.
            clients: what all workers noted in :attr:`mine`, by client in ascending order; at least one.
        """
        raise NotImplementedError

    def rows(self, trainer: RunAccess) -> int:
        """The number m of rows of a table."""
        return min(self.max_clients, trainer.data.num_clients)

    def append(self, trainer: RunAccess, name: str, values: dict[int, Any], fill: Any = np.nan) -> None:
        """Append a table to the series: a row for each client of ``values``, in its order, then rows of ``fill``."""
        rows = list(map(np.asarray, values.values()))
        table = np.full((self.rows(trainer), *rows[0].shape), fill)
        table[: len(rows)] = rows
        self.series.append(name, table)


def drawn_clients(clients: Sequence[int], number: int, seed: int, purpose: str, *where: int) -> list[int]:
    """At most ``number`` of ``clients``, drawn at random at an address, in ascending order."""
    if len(clients) <= number:
        return sorted(clients)
    return sorted(numpy_rng(seed, purpose, *where).choice(sorted(clients), number, replace=False).tolist())


def clients_of_worker(trainer: RunAccess, clients: Sequence[int]) -> list[int]:
    """Those of ``clients`` that this worker measures: the clients it owns, and its share of those nobody owns."""
    owners, size = trainer.client.memories().owners, trainer.world_size
    return [k for place, k in enumerate(clients) if owners.get(k, place % size) == trainer.global_rank]


def in_order(parts: Iterable[Mapping[By, Noted]]) -> dict[By, Noted]:
    """What several workers have noted, in ascending order of the clients, or of the batches."""
    return dict(sorted((item for part in parts for item in part.items()), key=itemgetter(0)))


def finite_mean(values: Any) -> float:
    """The mean of the numbers that are not nan; nan without any."""
    array = np.asarray(values, dtype=np.float64)
    return float(np.nanmean(array)) if np.isfinite(array).any() else float("nan")


def quotient(numerator: Any, denominator: Any) -> np.ndarray:
    """Their quotient; nan where the denominator is not above 0."""
    numerator, denominator = np.asarray(numerator), np.asarray(denominator)
    return np.divide(numerator, np.where(denominator > 0, denominator, np.nan))


def log_finite(trainer: RunAccess, values: dict[str, float]) -> None:
    """Log those values that are numbers: what is undefined in a round, as for classes that nobody lacks, has none."""
    for name, value in values.items():
        if np.isfinite(value):
            trainer.log(name, value)


# ---------------------------------------------------------------------- what a callback may lack
def need_label_counts(who: str, trainer: RunAccess, remedy: str = "take the callback out") -> None:
    """Refuse clients whose label counts are not known.

    Raises:
        UsageError: the data have no labels.
    """
    known, hint = trainer.data.info(0).label_counts is not None, f"its clients have no label counts; {remedy}"
    require(known, f"{who} with the data", type(trainer.data).__name__, hint)


def need_global_model(who: str, trainer: RunAccess, remedy: str = "take the callback out") -> None:
    """Refuse entries of the state that stay with the clients.

    Raises:
        UsageError: there are such entries.
    """
    kept, hint = (
        len(trainer.client.kept),
        f"the state does not travel as a whole, so there is no global model; {remedy}",
    )
    require(not kept, f"{who} with entries that stay with the clients", kept, hint)


def classifier_of(who: str, trainer: RunAccess, remedy: str = "bind it to the last linear layer") -> nn.Module:
    """The layer that the tap ``logits`` is bound to, whose weight ``(C, d)`` has a row for each class.

    Raises:
        UsageError: it has no weight matrix, or other classes than the labels.
    """
    path = trainer.client.tap_paths["logits"]
    layer = trainer.client.module.get_submodule(path)
    weight = getattr(layer, "weight", None)
    if not (isinstance(weight, Tensor) and weight.ndim == 2):
        raise UsageError(f"{who}: the tap logits={path!r} has no weight matrix; {remedy}")
    counts = trainer.data.info(0).label_counts
    classes = len(weight) if counts is None else len(counts)
    require(len(weight) == classes, f"{who}: rows of {path}", len(weight), f"the labels have {classes} classes")
    return layer


# ---------------------------------------------------------------------- majority, minority and missing classes


def groups_of(counts: np.ndarray, threshold: float = 1.0) -> dict[str, np.ndarray]:
    r"""A client's majority, minority and missing classes, each as a boolean ``(C,)`` (FedLC, Definition 2).

    The paper has :math:`n_j \gg n_r > 0` and :math:`n_s = 0`, without a threshold. Here class c is a majority class
    where :math:`n_c \ge a \, n / C` with the threshold a.

    Args:
        counts: :math:`n_c`, the number of the client's training examples of each class, ``(C,)``.
        threshold: a > 0; 1 compares with an even division over all classes.
    """
    limit = threshold * counts.sum() / len(counts)
    missing = counts == 0
    majority = ~missing & (counts >= limit)
    return {"majority": majority, "minority": ~missing & ~majority, "missing": missing}
