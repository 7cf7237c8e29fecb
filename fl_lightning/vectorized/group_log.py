"""The log of clients side by side: a row for each client."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from fl_lightning.client.lightning.metric_log import MAX_PENDING, TERM, LoggedValue, MetricLog
from fl_lightning.client.lightning.reductions import FOLDS, LogKey, LogSpec
from fl_lightning.core.reduced import EMPTY, Reduced
from fl_lightning.core.weighted import Weighted, joined_on
from fl_lightning.vectorized.batched_tree import RowIndex, numbers_of
from fl_lightning.vectorized.vmap_views import DIFFERS, not_mappable


class Record(NamedTuple):
    """A value that was logged in a mapped step: of each client ``(m,)``, or a number; ``...`` stands for a tensor."""

    key: LogKey
    spec: LogSpec
    weight: Any
    value: Any


class GroupLog(MetricLog):
    """Collects the values of ``size`` clients side by side.

    A mapped step appends to :attr:`records`, whose tensors are results of the step and return through
    :meth:`add_records`.
    """

    def __init__(self, module: LightningModule, size: int, examples: float | None = 1.0) -> None:
        super().__init__(module, None, examples)
        self.size = size
        self.records: list[Record] = []

    def muted(self) -> GroupLog:
        return GroupLog(self.module, self.size)

    def read_pending(self) -> None:
        """Do nothing: a batch begins within a mapped step, and :meth:`GroupValue.add_rows` limits what waits."""

    def callback_metrics(self) -> dict[str, Tensor]:
        raise not_mappable("self.trainer.callback_metrics", DIFFERS)

    def take_records(self) -> tuple[list[Record], list[Tensor]]:
        """Return the records of a mapped step, with ``...`` in place of tensors, and these tensors."""
        tensors = [part for record in self.records for part in record if isinstance(part, Tensor)]
        shapes = []
        for record in self.records:
            shapes.append(Record._make(... if isinstance(part, Tensor) else part for part in record))
        self.records.clear()
        return shapes, tensors

    def add_records(self, rows: RowIndex, records: Iterable[Record], tensors: Iterator[Tensor]) -> None:
        """Add the values of a step of these clients; ``tensors`` take the places of ``...``."""
        for key, spec, *parts in records:
            weight, value = (next(tensors) if part is ... else part for part in parts)
            table: Any = self.terms if key[0] == TERM else self.entries
            if key not in table:
                table[key] = self.new_value(key, spec)
            table[key].add_rows(rows, value, weight)

    def fill(self, logged: MetricLog, row: int) -> None:
        """Put the values of one client into the log of its visit."""
        tables: Any = ((self.terms, logged.terms), (self.entries, logged.entries))
        for table, table_of_row in tables:
            values = {key: table[key].of_row(row) for key in table}
            table_of_row |= {key: value for key, value in values.items() if value is not None}

    def without_bad_terms(self) -> np.ndarray | bool:
        """Which clients have finite terms of the loss alone ``(G,)``."""
        return np.all([np.asarray(term.first_bad) < 0 for term in self.terms.values()], 0)

    def weighted(self, rows: Sequence[int]) -> tuple[dict[str, dict[str, Weighted]], dict[str, Reduced]]:
        """The values of the clients at ``rows``, for sums over the cohort.

        Returns:
            The means and sums by kind and name, with a row for each client; and the extremes over these clients.
        """
        added: dict[str, dict[str, Weighted]] = {"mean": {}, "sum": {}}
        extremes: dict[str, Reduced] = {}
        for name, reduced in self.sums().items():
            total, weight = (np.asarray(part)[rows] for part in (reduced.total, reduced.weight))
            if reduced.kind in added:
                weight = weight if reduced.kind == "mean" else np.ones_like(total)
                added[reduced.kind][name] = Weighted(torch.from_numpy(total), torch.from_numpy(weight))
            elif rows:
                extremes[name] = Reduced(reduced.kind, float(FOLDS[reduced.kind].reduce(total)))
        return added, extremes

    def new_value(self, key: LogKey, spec: LogSpec, once: bool = False) -> LoggedValue:
        return GroupValue(spec, once, self.size, key, self.records)


class GroupValue(LoggedValue):
    """The values of one name: all numbers are arrays ``(G,)``; those of a mapped step go to ``records`` first."""

    def __init__(self, spec: LogSpec, once: bool, size: int, key: LogKey, records: list[Record]) -> None:
        super().__init__(spec, once)
        self.size, self.key, self._records = size, key, records
        self._rows: list[RowIndex] = []
        self.append = self.note

    def note(self, pair: tuple[Any, Any]) -> None:
        """Note a value and its weight within a mapped step."""
        value, weight = pair
        self._records.append(Record(self.key, self.spec, weight, value))

    def add_metric(self, metric: Metric, weight: float) -> None:
        why = "a torchmetrics object has the state of one client"
        raise not_mappable(f"self.log({self.spec.name!r}, ...)", why)

    def add_rows(self, rows: RowIndex, value: Any, weight: Any) -> None:
        """Add a number, or a tensor ``(m,)`` with the values of these clients."""
        self._rows.append(rows)
        self.pending.append((value, weight))
        self.count += 1
        if len(self.pending) >= MAX_PENDING:
            self.read()

    def read(self) -> None:
        """Reduce the pending values, as matrices ``(steps, G)`` and in the order of one client."""
        if self._rows:
            self._read_rows(len(self._rows), self.size)
        self.pending.clear()
        self._rows = []

    def _read_rows(self, steps: int, size: int) -> None:
        kind = self.spec.kind
        row_numbers = [numbers_of(rows, size) for rows in self._rows]
        lengths = [*map(len, row_numbers)]
        places = np.repeat(np.arange(steps) * size, lengths) + np.concatenate(row_numbers)

        def spread(parts: Sequence[Any], empty: float) -> np.ndarray:
            matrix = np.full(steps * size, empty)
            matrix[places] = one_after_another(parts, lengths)
            return matrix.reshape(steps, size)

        values = spread([value for value, _ in self.pending], EMPTY[kind])
        weights = spread([weight for _, weight in self.pending], 0.0)
        is_present = spread([1.0] * steps, 0.0).astype(bool)
        parts, fold = values * weights if kind == "mean" else values, FOLDS[kind]
        self.running = fold(self.running, fold.accumulate(parts)[-1]) + 0.0
        self.running_weight = self.running_weight + weights.sum(0)
        bad = is_present & ~np.isfinite(parts)
        if bad.any():
            index = self.num_read + np.take_along_axis(np.cumsum(is_present, 0), bad.argmax(0)[None], 0)[0] - 1
            self.first_bad = np.where(bad.any(0) & (np.asarray(self.first_bad) < 0), index, self.first_bad)
        self.num_read = self.num_read + is_present.sum(0)
        latest = steps - 1 - is_present[::-1].argmax(0)[None]
        before = (0.0, 0.0) if self.last is None else (self.last, self.last_weight)
        self.last, self.last_weight = (
            np.where(is_present.any(0), np.take_along_axis(now, latest, 0)[0], earlier)
            for now, earlier in zip((values, weights), before, strict=True)
        )

    def continued(self, before: Reduced, epoch: Reduced) -> Reduced:
        if epoch.kind == "mean":
            return super().continued(before, epoch)
        # a client without a value in this epoch keeps its last one
        has_value = np.asarray(epoch.weight) != 0
        total: Any = np.where(has_value, epoch.total, before.total)
        weight: Any = np.where(has_value, epoch.weight, before.weight)
        return Reduced(epoch.kind, total, weight)

    def of_row(self, row: int) -> LoggedValue | None:
        """The values of one of several clients, after the last epoch; None if it has none."""
        if self.total is None or not self.num_read[row]:
            return None
        value = LoggedValue(self.spec)
        value.assign(row_of(self.total, row))
        value.last, value.last_weight = float(self.last[row]), float(self.last_weight[row])
        value.first_bad = int(np.broadcast_to(self.first_bad, self.num_read.shape)[row])
        return value


def row_of(value: Reduced, row: int) -> Reduced:
    """The reduction of one of several clients."""
    total, weight = (np.asarray(part)[row].item() for part in (value.total, value.weight))
    return Reduced(value.kind, total, weight)


def one_after_another(parts: Sequence[Any], lengths: Sequence[int]) -> np.ndarray:
    """Tensors ``(m,)`` in one array of float64, with one transfer; a number stands for the length at its place."""
    device = next((part.device for part in parts if isinstance(part, Tensor)), None)
    if device is None:
        return np.repeat(np.array(parts, dtype=np.float64), lengths)
    tensors = [
        part if isinstance(part, Tensor) else torch.full((length,), part, dtype=torch.float64, device=device)
        for part, length in zip(parts, lengths, strict=True)
    ]
    is_uniform = len({tensor.dtype for tensor in tensors}) == 1
    if not is_uniform:
        tensors = [tensor.double() for tensor in tensors]
    return joined_on(tensors, device).double().cpu().numpy()
