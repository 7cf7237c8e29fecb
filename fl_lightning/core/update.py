"""The update of a client, and the totals over the updates of a cohort."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fl_lightning.core.collectives import Collectives
from fl_lightning.core.reduced import Reduced, addable, reduced, update_extremes
from fl_lightning.core.updates import Updates
from fl_lightning.core.weighted import Sums, Weighted, weigh


@dataclass(frozen=True)
class VisitFacts:
    """What the engine notes of a visit, beside the update.

    Args:
        steps: local steps taken.
        rate: learning rate of the first parameter group in the last step.
        skipped: batches without a loss, which the module skips.
        lost: steps that 16-mixed skipped because of overflowing gradients.
        scalings: with 16-mixed, the gradient scale at the end, and the steps since it changed.
    """

    steps: int = 0
    rate: float = 0.0
    skipped: int = 0
    lost: int = 0
    scalings: Sequence[tuple[float, int]] = ()


# A new field is also written in `Update.weighted`, `Totals.close`, `ClientLifecycle._update` (client/client.py),
# `Group.updates` (vectorized/group.py), and `encode_update` and `decode_update` (engine/update_codec.py).
@dataclass
class Update:
    """The update that a client sends after a visit.

    Args:
        delta: change of the shared parameters by name, possibly transformed by methods.
        others: values of the shared buffers, by name.
        weight: p_k, before normalisation over the cohort.
        payload: additional values of each method, by the method's name: ``Weighted`` by name, in nested dictionaries if
            the method returns them.
        logged: the values logged in this visit, by name, each with its reduction.
        drift: Euclidean norm of the change of the trained parameters.
        frozen_changes: change of the shared frozen parameters that this client has changed, by name.
        num_bytes: bytes of all these values, in the client's types.
        bound: a number that no magnitude in ``delta`` exceeds, if one is known.
        facts: what the engine notes of the visit.
        metric_states: place in the module and states of each logged torchmetrics object, by name.
    """

    delta: Mapping[str, Tensor]
    others: dict[str, Tensor]
    weight: float
    payload: dict[str, dict[str, Any]]
    logged: dict[str, Reduced]
    drift: float
    frozen_changes: dict[str, Tensor] = field(default_factory=dict)
    num_bytes: int = 0
    bound: float = math.inf
    facts: VisitFacts = VisitFacts()
    metric_states: Mapping[str, tuple[str, Mapping[str, Any]]] = field(default_factory=dict)

    def weighted(self) -> dict[str, Any]:
        """Return the update as ``Weighted`` values by field, without logged extremes, which cannot be added."""
        return {
            "clients": Weighted.of(1.0),
            "drift": Weighted.of(self.drift, float(self.weight)),
            "delta": weigh(self.delta, self.weight, self.bound * self.weight),
            "others": weigh(self.others, self.weight),
            "frozen": weigh(self.frozen_changes, self.weight),
            "bytes": Weighted.summed(self.num_bytes, 1.0),
            "payload": self.payload,
            "logged": addable(self.logged),
        }


@dataclass
class UpdateRows:
    """The updates of several clients that nothing observes one by one.

    Args:
        clients: their ids.
        updates: values as in :meth:`Update.weighted`, with a row for each client.
        extremes: the largest and smallest of their logged values, by name.
        facts: what the engine notes of each visit.
    """

    clients: list[int]
    updates: Mapping[str, Any]
    extremes: Mapping[str, Reduced]
    facts: list[VisitFacts]


@dataclass
class CohortMeans:
    """The updates of a cohort: their means, by weight, and sums.

    Args:
        num_clients: number of clients that have sent an update.
        num_bytes: bytes that all clients have sent.
        drift: mean norm of the clients' changes.
        delta: mean change of the parameters by name; empty if all weights are 0.
        others: mean of the buffers by name; empty if all weights are 0.
        frozen_changes: mean change of the frozen parameters that any client has changed; 0 for clients that have not.
        payload: sums of the clients' payloads, by the method's name, nested as the payloads.
        logged: logged values by name: means over examples, and sums, maxima and minima over the clients.
        updates: the updates one by one, where a method's server hooks see them.
    """

    num_clients: int
    num_bytes: int
    drift: float
    delta: dict[str, Tensor]
    others: dict[str, Tensor]
    frozen_changes: dict[str, Tensor]
    payload: dict[str, dict[str, Any]]
    logged: dict[str, float]
    updates: Updates | None = None


class Totals:
    """The sums over the updates of a cohort, in memory that does not grow with the cohort.

    Args:
        device: device of the sums.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._sums = Sums(device)
        self._extremes: dict[str, Reduced] = {}

    def add(self, update: Update) -> None:
        """Add a client's update."""
        self._sums.add(update.weighted())
        update_extremes(self._extremes, update.logged)

    def add_rows(self, rows: UpdateRows) -> None:
        """Add the updates of several clients."""
        self._sums.add_rows(rows.updates)
        update_extremes(self._extremes, rows.extremes)

    def all_reduce(self, workers: Collectives) -> None:
        """Add up the totals of all workers, in one collective over one flat vector."""
        for extremes in self._sums.all_reduce(workers, self._extremes):
            update_extremes(self._extremes, extremes)

    def close(self) -> CohortMeans:
        """Divide the sums, and free their memory: nothing can be added any more."""
        fields = self._sums.take()
        del self._sums
        none, frozen = Weighted.summed(0.0, 0.0), fields.get("frozen", {})
        drift = fields.get("drift", none)
        changed = [name for name, change in frozen.items() if bool(change.weight)]
        return CohortMeans(
            num_clients=int(fields.get("clients", none).total),
            num_bytes=int(fields.get("bytes", none).total),
            drift=float(drift.mean()),
            delta=means_of_present(fields.get("delta", {})),
            others=means_of_present(fields.get("others", {})),
            frozen_changes={name: frozen[name].total / drift.weight for name in changed},
            payload=fields.get("payload", {}),
            logged=reduced(fields.get("logged", {}), self._extremes),
        )


def means_of_present(totals: dict[str, Weighted]) -> dict[str, Tensor]:
    """Return the means of the totals whose weight is not 0; each total is dropped for its mean."""
    means = {}
    for name in list(totals):
        total = totals.pop(name)
        if bool(total.weight):
            means[name] = total.mean()
    return means
