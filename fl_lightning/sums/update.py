"""A client's update, and the totals of the updates of a cohort."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fl_lightning.collectives import Collectives
from fl_lightning.sums.reduced import Extremes, Reduced, addable, reduced
from fl_lightning.sums.weighted import Sums, Weighted, weigh


@dataclass
class Update:
    """What a client sends.

    Args:
        delta: change of the parameters that travel, or what the methods made of it, by name.
        others: values of the buffers that travel, by name.
        weight: p_k, before it is normalised over the cohort.
        payload: what each method sends beside the weights, by the method's name.
        logged: the values logged in this visit, by name, each with its reduction.
        drift: Euclidean norm of the change of the trained parameters.
        frozen: change of the frozen parameters that travel and that this client has changed, by name.
        num_bytes: bytes of all that, in the types in which a client has it.
    """

    delta: dict[str, Tensor]
    others: dict[str, Tensor]
    weight: float
    payload: dict[str, dict[str, Weighted]]
    logged: dict[str, Reduced]
    drift: float
    frozen: dict[str, Tensor] = field(default_factory=dict)
    num_bytes: int = 0

    def weighted(self) -> dict[str, Any]:
        """The update as ``Weighted`` values, which can be added, by field; logged extremes are left out."""
        return {
            "clients": Weighted.of(1.0),
            "drift": Weighted.of(self.drift, float(self.weight)),
            "delta": weigh(self.delta, self.weight),
            "others": weigh(self.others, self.weight),
            "frozen": weigh(self.frozen, self.weight),
            "bytes": Weighted.summed(self.num_bytes, 1.0),
            "payload": self.payload,
            "logged": addable(self.logged),
        }


class Totals:
    """The sums over the updates of a cohort; memory does not grow with the cohort.

    Args:
        device: where they are added.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._sums = Sums(device)
        self._extremes = Extremes()
        # values of torchmetrics objects over all clients, in place of the means
        self.merged: dict[str, float] = {}

    def add(self, update: Update) -> None:
        """Add a client's update."""
        self._sums.add(update.weighted())
        self._extremes.add(update.logged)

    def add_rows(self, updates: Mapping[str, Any], extremes: Mapping[str, Reduced]) -> None:
        """Add the updates of several clients.

        Args:
            updates: as :meth:`Update.weighted`, with a row for each client.
            extremes: the largest and smallest of their logged values, by name.
        """
        self._sums.add_rows(updates)
        self._extremes.add(extremes)

    def all_reduce(self, workers: Collectives) -> None:
        """Add up the totals of all workers, in one collective over one flat vector."""
        self._extremes.merge(self._sums.all_reduce(workers, self._extremes.values))

    @property
    def num_clients(self) -> int:
        """How many clients have sent an update."""
        return int(self._field("clients").total) if self._sums.totals else 0

    @property
    def drift(self) -> float:
        """Mean norm of the clients' changes."""
        return float(self._field("drift").mean()) if self._sums.totals else 0.0

    @property
    def delta(self) -> dict[str, Tensor]:
        """Mean change of the parameters by name; none where all weights are 0."""
        return self._present_means("delta")

    @property
    def others(self) -> dict[str, Tensor]:
        """Mean of the buffers by name; none where all weights are 0."""
        return self._present_means("others")

    @property
    def frozen(self) -> dict[str, Tensor]:
        """Mean change of the frozen parameters that any client has changed; it counts as 0 for the others."""
        changes, weight = self._field("frozen"), self._field("drift").weight if self._sums.totals else 0.0
        return {name: value.total / weight for name, value in changes.items() if bool(value.weight)}

    @property
    def num_bytes(self) -> int:
        """Bytes that all clients have sent."""
        return int(self._field("bytes").total) if self._sums.totals else 0

    @property
    def payload(self) -> dict[str, dict[str, Weighted]]:
        """The sums of what the clients sent for each method, by the method's name."""
        return self._field("payload")

    @property
    def logged(self) -> dict[str, float]:
        """The logged values by name: means over examples, sums, maxima and minima over the clients."""
        values = {**reduced(self._field("logged"), self._extremes), **self.merged}
        return {name: value for name, value in values.items() if name not in {f"{one}/clients" for one in self.merged}}

    def _present_means(self, field: str) -> dict[str, Tensor]:
        return {name: value.mean() for name, value in self._field(field).items() if bool(value.weight)}

    def _field(self, name: str) -> Any:
        return self._sums.totals.get(name, {})
