"""The update of a client, and the totals over the updates of a cohort."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fl_lightning.core.collectives import Collectives
from fl_lightning.core.reduced import Reduced, addable, reduced, update_extremes
from fl_lightning.core.updates import Updates
from fl_lightning.core.weighted import Sums, Weighted, weigh


# A new field is also written in `Update.weighted` and `Totals` below, `ClientLifecycle.finish` (client/client.py),
# `Group.updates` (vectorized/group.py), and `PARTS`, `encode_update` and `decode_update` (engine/update_codec.py).
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
        steps: local steps of each visit.
        rates: its last learning rate.
        skipped: its batches without a loss.
    """

    clients: list[int]
    updates: Mapping[str, Any]
    extremes: Mapping[str, Reduced]
    steps: list[int]
    rates: list[float]
    skipped: list[int]


class Totals:
    """The sums over the updates of a cohort, in memory that does not grow with the cohort.

    They are read once the last update has been added; the memory of the sums is then free.

    Args:
        device: device of the sums.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._sums = Sums(device)
        self._extremes: dict[str, Reduced] = {}
        # values of torchmetrics objects over all clients, which replace the means
        self.merged: dict[str, float] = {}
        # the updates one by one, where a method's server hooks see them
        self.updates: Updates | None = None

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

    @property
    def num_clients(self) -> int:
        """Number of clients that have sent an update."""
        return int(self._fields["clients"].total) if self._fields else 0

    @property
    def drift(self) -> float:
        """Mean norm of the clients' changes."""
        return float(self._fields["drift"].mean()) if self._fields else 0.0

    @cached_property
    def delta(self) -> dict[str, Tensor]:
        """Mean change of the parameters by name; empty if all weights are 0."""
        return self._present_means("delta")

    @cached_property
    def others(self) -> dict[str, Tensor]:
        """Mean of the buffers by name; empty if all weights are 0."""
        return self._present_means("others")

    @property
    def frozen_changes(self) -> dict[str, Tensor]:
        """Mean change of the frozen parameters that any client has changed; 0 for clients that have not."""
        changes = self._fields.get("frozen", {})
        names = [name for name, change in changes.items() if bool(change.weight)]
        return {name: changes[name].total / self._fields["drift"].weight for name in names}

    @property
    def num_bytes(self) -> int:
        """Bytes that all clients have sent."""
        return int(self._fields["bytes"].total) if self._fields else 0

    @property
    def payload(self) -> dict[str, dict[str, Any]]:
        """Sums of the clients' payloads, by the method's name, nested as the payloads."""
        return self._fields.get("payload", {})

    @property
    def logged(self) -> dict[str, float]:
        """Logged values by name: means over examples, and sums, maxima and minima over the clients."""
        values = {**reduced(self._fields.get("logged", {}), self._extremes), **self.merged}
        numbers = {f"{name}/clients" for name in self.merged}
        return {name: value for name, value in values.items() if name not in numbers}

    def _present_means(self, field: str) -> dict[str, Tensor]:
        # each total is dropped for its mean
        totals = self._fields.pop(field, {})
        means = {}
        for name in list(totals):
            total = totals.pop(name)
            if bool(total.weight):
                means[name] = total.mean()
        return means

    @cached_property
    def _fields(self) -> dict[str, Any]:
        fields = self._sums.take()
        del self._sums  # to which nothing can be added any more
        return fields
