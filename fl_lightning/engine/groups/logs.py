"""The log of a group: values of several clients, reduced over their visits with a row for each client."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from fl_lightning.client.columns import Rows, numbers_of
from fl_lightning.client.logged_value import LoggedValue, LogSpec
from fl_lightning.client.mapped import not_mappable
from fl_lightning.client.metric_log import MetricLog
from fl_lightning.sums import Weighted
from fl_lightning.sums.reduced import EMPTY, Kind, Reduced

EXTREMES = {"max": torch.amax, "min": torch.amin}


class Record(NamedTuple):
    """A value that was logged in a mapped step.

    Args:
        key: the hook, the name and no data loader; of a term of the loss the name alone.
        spec: how it is reduced and written.
        weight: its weight in a mean.
        value: the value of each client ``(m,)``, or a number.
    """

    key: tuple[Any, ...]
    spec: LogSpec
    weight: Any
    value: Any


def filled(records: Iterable[tuple[Any, ...]], tensors: Iterator[Tensor]) -> list[Record]:
    """The records with tensors in the place of ``...``."""
    return [Record._make(next(tensors) if part is ... else part for part in record) for record in records]


class GroupLog(MetricLog):
    """Collects what a module logs for several clients at once.

    A mapped step adds to :attr:`records`; their tensors are results of the step, and return by :meth:`add_records`.

    Args:
        module: the user's module.
        size: number of clients.
        device: where the values lie.
        examples: as of :class:`MetricLog`: None is an evaluation.

    Attributes:
        records: values that the present step has logged.
        epochs: of each pass, the means of the loss's terms ``(G,)`` by name, with which clients have one.
    """

    _entries: dict[Any, Any]
    _terms: dict[Any, Any]

    def __init__(self, module: LightningModule, size: int, device: torch.device, examples: float | None = 1.0) -> None:
        super().__init__(module, None, examples)
        self.size, self.device = size, device
        self.records: list[Record] = []
        self.epochs: list[dict[str, tuple[Tensor, Tensor]]] = []

    def add_records(self, rows: Rows, records: Iterable[Record]) -> None:
        """Add the values of a step of these clients."""
        for key, spec, weight, value in records:
            entries = self._terms if len(key) == 1 else self._entries
            name = key[0] if len(key) == 1 else key
            if name not in entries:
                entries[name] = self._new(key, spec)
            entries[name].pending.append((rows, value, weight))

    def end_epoch(self) -> dict[str, float]:
        """Reduce a pass of all clients over their data."""
        ended = {name: term.end_pass() for name, term in self._terms.items()}
        self.epochs.append({name: means for name, means in ended.items() if means is not None})
        for entry in self._entries.values():
            entry.end_pass()
        return {}

    def callback_metrics(self) -> dict[str, Tensor]:
        """Refused: what was logged in the visit so far differs by client."""
        why = "it differs by client, and a step is of several side by side"
        raise not_mappable("self.trainer.callback_metrics", why)

    @property
    def bad(self) -> Tensor:
        """Which clients have a term of the loss that is nan or infinite ``(G,)``."""
        bad = [term.first_bad_of >= 0 for term in self._terms.values()]
        return torch.stack(bad).any(0) if bad else torch.zeros(self.size, dtype=torch.bool, device=self.device)

    def means(self, row: int, number: int) -> list[dict[str, float]]:
        """The terms of the loss of a client by name, as means over each of its first ``number`` passes."""
        return [
            {name: float(means[row]) for name, (means, seen) in terms.items() if bool(seen[row])}
            for terms in self.epochs[:number]
        ]

    def fill(self, logged: MetricLog, row: int) -> None:
        """Put the values of one client into the log of its visit."""
        logged._terms |= {name: one.of_row(row) for name, one in self._terms.items() if one.counts[row]}
        logged._entries |= {key: one.of_row(row) for key, one in self._entries.items() if one.counts[row]}

    def weighted(self, rows: Tensor) -> tuple[dict[str, dict[str, Weighted]], dict[str, Reduced]]:
        """The values of the clients at ``rows``, for sums over the cohort.

        Returns:
            The means and sums by kind and name, with a row for each client; and the extremes over these clients.
        """
        record: dict[str, tuple[Kind, Tensor, Tensor]] = {}
        logged = [entry for entry in self._entries.values() if entry.spec.logger]
        for value in (*self._terms.values(), *logged):
            spec, kind = value.spec, value.spec.kind
            record[spec.epoch_name] = (kind, value.totals[rows], value.weights[rows])
            if spec.step_name != spec.epoch_name:
                last, weight = value.lasts[rows], value.last_weights[rows]
                record[spec.step_name] = (kind, last * weight if kind == "mean" else last, weight)
        ones = torch.ones(len(rows), dtype=torch.float64, device=self.device)
        added: dict[str, dict[str, Weighted]] = {"mean": {}, "sum": {}}
        extremes: dict[str, Reduced] = {}
        for name, (kind, total, weight) in record.items():
            if kind in EXTREMES:
                extremes[name] = Reduced(kind, float(EXTREMES[kind](total, 0)))
            else:
                added[kind][name] = Weighted(total, weight if kind == "mean" else ones)
        return added, extremes

    def _new(self, key: tuple[Any, ...], spec: LogSpec, once: bool = False) -> GroupValue:
        return GroupValue(self, key, spec)


class GroupValue(LoggedValue):
    """The values of one name of several clients.

    Args:
        log: collects the values of a step.
        key: where they are found again.
        spec: how they are reduced and written.
    """

    is_group = True

    def __init__(self, log: GroupLog, key: tuple[Any, ...], spec: LogSpec) -> None:
        super().__init__(spec)
        self.log, self.key, self.size = log, key, log.size
        # of the present pass: rows, values and weights of each step
        self.pending: list[tuple[Rows, Any, Any]] = []
        self.totals = self._full(EMPTY[spec.kind])
        self.weights, self.counts, self.lasts, self.last_weights = (self._full(0.0) for _ in range(4))
        self.first_bad_of = self._full(-1.0)

    def add(self, value: Any, weight: Any) -> None:
        """Add the value of one client, which stands for those of all."""
        self.log.records.append(Record(self.key, self.spec, weight, value))

    def add_metric(self, metric: Metric, weight: Any) -> None:
        """Refused: the state of a torchmetrics object is of one client."""
        why = "a torchmetrics object keeps what it has seen of one client"
        raise not_mappable(f"self.log({self.spec.name!r}, ...)", why)

    def end_pass(self) -> tuple[Tensor, Tensor] | None:
        """Reduce the pass, as :meth:`LoggedValue.end_epoch`.

        Returns:
            The means of the clients ``(G,)``, with which clients have one; None where nothing was logged.
        """
        steps, device = len(self.pending), self.log.device
        if not steps:
            return None
        chosen = [numbers_of(rows, self.size) for rows, _, _ in self.pending]
        lengths = [len(rows) for rows in chosen]
        begins = np.repeat(np.arange(steps) * self.size, lengths)
        places = torch.from_numpy(begins + np.concatenate(chosen)).to(device)

        def spread(parts: Sequence[Any]) -> Tensor:
            """The numbers of the clients in each step ``(steps, G)``, and 0 for those that are not in it."""
            whole = torch.zeros(steps * self.size, dtype=torch.float64, device=device)
            whole[places] = one_after_another(parts, lengths).to(device)
            return whole.view(steps, self.size)

        _, of_values, of_weights = zip(*self.pending, strict=True)
        values, weights, there = spread(of_values), spread(of_weights), spread([1.0] * steps)
        self.pending.clear()
        kind, seen = self.spec.kind, there.bool()
        total = (values * weights).sum(0) if kind == "mean" else values.sum(0)
        if kind in EXTREMES:
            total = EXTREMES[kind](torch.where(seen, values, EMPTY[kind]), 0) + 0.0
        weight, any_ = weights.sum(0), seen.any(0)
        finite = values.isfinite()
        if not bool(finite.all()):
            first = torch.where(finite, torch.inf, torch.cumsum(there, 0) - 1 + self.counts).amin(0)
            first = torch.where(first.isinf(), -1.0, first)
            self.first_bad_of = torch.where(self.first_bad_of >= 0, self.first_bad_of, first)
        self.counts += there.sum(0)
        self.totals = self.totals + total if kind == "mean" else torch.where(any_, total, self.totals)
        self.weights = self.weights + weight if kind == "mean" else torch.where(any_, weight, self.weights)
        if self.spec.on_step:
            place = (there * torch.arange(1, steps + 1, device=device)[:, None]).argmax(0)
            columns = torch.arange(self.size, device=device)
            self.lasts = torch.where(any_, values[place, columns], self.lasts)
            self.last_weights = torch.where(any_, weights[place, columns], self.last_weights)
        return torch.where(any_, total / torch.where(weight == 0, 1.0, weight), torch.nan), any_

    def of_row(self, row: int) -> LoggedValue:
        """The values of one client."""
        one = LoggedValue(self.spec)
        one.assign(Reduced(self.spec.kind, float(self.totals[row]), float(self.weights[row])))
        one.first_bad = int(self.first_bad_of[row]) if self.first_bad_of[row] >= 0 else None
        one.last, one.last_weight = float(self.lasts[row]), float(self.last_weights[row])
        return one

    def _full(self, value: float) -> Tensor:
        return torch.full((self.size,), value, dtype=torch.float64, device=self.log.device)


def one_after_another(parts: Sequence[Any], lengths: Sequence[int]) -> Tensor:
    """Tensors ``(m,)`` in one of float64; a number stands for as many as the length at its place."""
    device = next((part.device for part in parts if isinstance(part, Tensor)), None)
    if device is None:
        return torch.from_numpy(np.repeat(np.array(parts, dtype=np.float64), lengths))
    tensors = [
        part.to(device) if isinstance(part, Tensor) else torch.full((length,), part, dtype=torch.float64, device=device)
        for part, length in zip(parts, lengths, strict=True)
    ]
    same = len({tensor.dtype for tensor in tensors}) == 1
    return torch.cat(tensors if same else [tensor.double() for tensor in tensors]).double()
