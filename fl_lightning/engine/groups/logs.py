"""What the clients of a group log, reduced over their visits: a row for each client."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.client.columns import Rows, numbers_of
from fl_lightning.client.entry import Arguments, Entry, Form
from fl_lightning.client.logged import Logged
from fl_lightning.client.mapped import Record
from fl_lightning.errors import require
from fl_lightning.sums import Weighted
from fl_lightning.sums.reduced import EMPTY, Kind, Reduced

REDUCTIONS = {"max": torch.amax, "min": torch.amin}


@dataclass
class Series:
    """The values of one name.

    Args:
        form: how they are reduced and written.
        size: number of clients.
        device: where they lie.
    """

    form: Form
    size: int
    device: torch.device
    # of the present pass: rows, values and weights of each step
    pending: list[tuple[Rows, Any, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.total = self._full(EMPTY[self.form.kind])
        self.weight, self.count, self.last, self.last_weight = (self._full(0.0) for _ in range(4))
        # by the number of the pass: means, and which clients have one
        self.passes: dict[int, tuple[Tensor, Tensor]] = {}
        self.first_bad = self._full(-1.0)

    def end_pass(self, number: int) -> None:
        """Reduce the pass: a mean goes on over passes, of everything else the last pass's value is kept."""
        steps = len(self.pending)
        if not steps:
            return
        chosen = [numbers_of(rows, self.size) for rows, _, _ in self.pending]
        lengths = [len(rows) for rows in chosen]
        begins = np.repeat(np.arange(steps) * self.size, lengths)
        places = torch.from_numpy(begins + np.concatenate(chosen)).to(self.device)

        def spread(parts: Sequence[Any]) -> Tensor:
            """The numbers of the clients in each step ``(steps, G)``, and 0 for those that are not in it."""
            whole = torch.zeros(steps * self.size, dtype=torch.float64, device=self.device)
            whole[places] = one_after_another(parts, lengths).to(self.device)
            return whole.view(steps, self.size)

        _, of_values, of_weights = zip(*self.pending, strict=True)
        values, weights, there = spread(of_values), spread(of_weights), spread([1.0] * steps)
        self.pending.clear()
        kind, seen = self.form.kind, there.bool()
        total = (values * weights).sum(0) if kind == "mean" else values.sum(0)
        if kind in REDUCTIONS:
            total = REDUCTIONS[kind](torch.where(seen, values, EMPTY[kind]), 0) + 0.0
        weight, any_ = weights.sum(0), seen.any(0)
        self._note_bad(values, seen)
        self.count += there.sum(0)
        self.passes[number] = torch.where(any_, total / torch.where(weight == 0, 1.0, weight), torch.nan), any_
        self.total = self.total + total if kind == "mean" else torch.where(any_, total, self.total)
        self.weight = self.weight + weight if kind == "mean" else torch.where(any_, weight, self.weight)
        if self.form.on_step:
            place = (there * torch.arange(1, steps + 1, device=self.device)[:, None]).argmax(0)
            columns = torch.arange(self.size, device=self.device)
            self.last = torch.where(any_, values[place, columns], self.last)
            self.last_weight = torch.where(any_, weights[place, columns], self.last_weight)

    def reduced(self, row: int) -> Reduced | None:
        """The value of a client; None where it has logged none."""
        if not float(self.count[row]):
            return None
        return Reduced(self.form.kind, float(self.total[row]), float(self.weight[row]))

    def _note_bad(self, values: Tensor, seen: Tensor) -> None:
        finite = values.isfinite()
        if not bool(finite.all()):
            before = torch.cumsum(seen.double(), 0) - 1 + self.count
            first = torch.where(finite, torch.inf, before).amin(0)
            new = torch.where(first.isinf(), -1.0, first)
            self.first_bad = torch.where(self.first_bad >= 0, self.first_bad, new)

    def _full(self, value: float) -> Tensor:
        return torch.full((self.size,), value, dtype=torch.float64, device=self.device)


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


class GroupLog:
    """What the clients of a group have logged.

    Args:
        size: number of clients.
        device: where the values lie.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.size, self.device = size, device
        self._passes = 0
        self._series: dict[tuple[Any, ...], Series] = {}
        # the arguments of a name in a hook, and the key under which it is
        self._resolved: dict[tuple[str, str], tuple[Arguments, tuple[Any, ...]]] = {}

    def add(self, rows: Rows, records: Iterable[Record]) -> None:
        """Add the values of a step of these clients."""
        for key, weight, value in records:
            series = self._series.get(key) or self._new(key)
            series.pending.append((rows, value, weight))

    def end_pass(self) -> None:
        """Reduce a pass of all clients over their data."""
        for series in self._series.values():
            series.end_pass(self._passes)
        self._passes += 1

    @property
    def bad(self) -> Tensor:
        """Which clients have a term of the loss that is nan or infinite ``(G,)``."""
        bad = [series.first_bad >= 0 for key, series in self._series.items() if len(key) == 1]
        return torch.stack(bad).any(0) if bad else torch.zeros(self.size, dtype=torch.bool, device=self.device)

    def means(self, row: int, number: int) -> list[dict[str, float]]:
        """The terms of the loss of a client by name, as means over each of its passes: so many."""
        terms = {key[0]: series.passes for key, series in self._series.items() if len(key) == 1}
        return [
            {
                name: float(passes[i][0][row])
                for name, passes in terms.items()
                if i in passes and bool(passes[i][1][row])
            }
            for i in range(number)
        ]

    def fill(self, logged: Logged, row: int) -> None:
        """Put what one client has logged into the log of its visit."""
        for key, series in self._series.items():
            value = series.reduced(row)
            if value is not None:
                entry = Entry(series.form)
                entry.assign(value)
                entry.first_bad = int(series.first_bad[row]) if series.first_bad[row] >= 0 else None
                entry.last, entry.last_weight = float(series.last[row]), float(series.last_weight[row])
                logged.take_over(key, entry)

    def weighted(self, rows: Tensor) -> tuple[dict[str, dict[str, Weighted]], dict[str, Reduced]]:
        """What the clients at ``rows`` have logged, for sums over the cohort.

        Returns:
            The means and sums by kind and name, with a row for each client; and the extremes over these clients.
        """
        record: dict[str, tuple[Kind, Tensor, Tensor]] = {}
        for key, series in self._series.items():
            form = series.form
            if len(key) == 1 or form.logger:
                record[form.epoch_name] = (form.kind, series.total[rows], series.weight[rows])
                if form.step_name != form.epoch_name:
                    last, weight = series.last[rows], series.last_weight[rows]
                    record[form.step_name] = (form.kind, last * weight if form.kind == "mean" else last, weight)
        ones = torch.ones(len(rows), dtype=torch.float64, device=self.device)
        added: dict[str, dict[str, Weighted]] = {"mean": {}, "sum": {}}
        extremes: dict[str, Reduced] = {}
        for name, (kind, total, weight) in record.items():
            if kind in ("mean", "sum"):
                added[kind][name] = Weighted(total, weight if kind == "mean" else ones)
            else:
                extremes[name] = Reduced(kind, float(REDUCTIONS[kind](total, 0)))
        return added, extremes

    def _new(self, key: tuple[Any, ...]) -> Series:
        """The series of a name that is new, or that was logged with its arguments in other words."""
        if len(key) == 1:
            form = Form(key[0])
        else:
            hook, name, arguments = key
            resolved = arguments.resolved(hook, name)
            known = self._resolved.setdefault((hook, name), (resolved, key))
            require(known[0] == resolved, f"self.log({name!r}, ...)", hook, "the hook logs it with different arguments")
            if known[1] != key:
                return self._series[known[1]]
            levels = (bool(resolved.on_step), bool(resolved.on_epoch), bool(resolved.logger))
            form = Form(name, "", resolved.reduce_fx, *levels)
        return self._series.setdefault(key, Series(form, self.size, self.device))
