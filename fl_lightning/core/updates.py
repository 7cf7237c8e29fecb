"""The updates of a cohort one by one, for methods whose server sees more of them than sums."""

from __future__ import annotations

import copy
import math
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor

from fl_lightning.core.collectives import Collectives
from fl_lightning.core.exact_sum import ExactSum
from fl_lightning.core.state import State
from fl_lightning.core.weighted import MOST_ROWS, LazyDifference, LazyEntries
from fl_lightning.utilities.errors import require

# numbers of each client that are gathered at a time
BLOCK = 2**18


@dataclass(frozen=True)
class ClientUpdate:
    """What the server sees of one client; do not change it.

    Args:
        id: the client.
        weight: its weight in the mean, before normalisation over the cohort.
        num_examples: its number of training examples.
        num_steps: its local steps.
        staleness: server steps since the state with which it began; 0 in synchronous runs.
        change: change of the shared parameters by name, after ``transform_client_update`` of all methods, in float64.
        buffers: values of the shared buffers by name.
        received: the entries in which the state that it began with differed from the global one.
        payload: what ``on_client_end`` of the method that asks returned on this client.
    """

    id: int
    weight: float
    num_examples: int = 0
    num_steps: int = 0
    staleness: int = 0
    change: Mapping[str, Tensor] = field(default_factory=dict)
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    received: Mapping[str, Tensor] = field(default_factory=dict)
    payload: Mapping[str, Any] = field(default_factory=dict)


class Updates(Mapping[int, ClientUpdate]):
    """The updates of a cohort by client, ids ascending; read-only.

    Each worker holds the updates of its own clients, and reads blocks of an entry of those of the others. So all
    workers must read the same entries in the same order, as server hooks do.

    Args:
        own: the updates of this worker's clients.
        state: the global state.
        names: entries of a change, in the state's order.
        float_buffers: shared floating-point buffers, in the state's order.
        workers: the workers, which all call this.
        device: device of the results.
    """

    def __init__(
        self,
        own: Mapping[int, ClientUpdate],
        state: State,
        names: Iterable[str],
        float_buffers: Iterable[str],
        workers: Collectives,
        device: torch.device | str = "cpu",
    ) -> None:
        self._own, self._state, self._workers, self._device = dict(sorted(own.items())), state, workers, device
        self.names, self.float_buffers, self._method = list(names), list(float_buffers), ""
        self.entries = [*self.names, *self.float_buffers]
        facts = {}
        for k, single in self._own.items():
            facts[k] = replace(single, change={}, buffers={}, received={}), [*single.buffers], [*single.received]
        of_workers = workers.gather(facts, "updates of a cohort")
        self._placed = [[*part] for part in of_workers]
        self._facts = dict(sorted((k, fact) for part in of_workers for k, fact in part.items()))
        # each worker gathers as many rows as the one with the most clients
        self._most = max(map(len, self._placed))
        places: dict[int, int] = {}
        for rank, ids in enumerate(self._placed):
            places.update(zip(ids, count(rank * self._most), strict=False))
        self._places = [places[k] for k in self]

    def __iter__(self) -> Iterator[int]:
        return iter(self._facts)

    def __len__(self) -> int:
        return len(self._facts)

    def __getitem__(self, k: int) -> ClientUpdate:
        facts, buffers, received = self._facts[k]
        return replace(
            facts,
            payload=facts.payload.get(self._method, {}),
            change=LazyEntries(self.names, partial(self._row, k, "change")),
            buffers=LazyEntries(buffers, partial(self._row, k, "buffers")),
            received=LazyEntries(received, partial(self._row, k, "received")),
        )

    def as_seen_by(self, method: str) -> Updates:
        """The same updates with the payloads of this method."""
        view = copy.copy(self)
        view._method = method
        return view

    @property
    def weights(self) -> Tensor:
        """The clients' weights ``(m,)``."""
        weights = [facts.weight for facts, *_ in self._facts.values()]
        return torch.tensor(weights, dtype=torch.float64)

    @torch.no_grad()
    def entry(self, name: str) -> Tensor:
        """Return the changes of a parameter, or the values of a floating-point buffer, ``(m, *shape)`` in float64."""
        return self.by_coordinate(name, lambda rows: rows)

    @torch.no_grad()
    def by_coordinate(self, name: str, rule: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply a rule for single coordinates to an entry, to a block of its numbers at a time.

        Args:
            name: a parameter or a floating-point buffer.
            rule: takes numbers of all clients ``(m, n)`` in float64, and returns ``(..., n)``.

        Returns:
            The results, ``(..., *shape)``.
        """
        shape = self._state[name].shape
        results = torch.empty(0)
        for block, rows in self._blocks(name):
            values = rule(rows)
            if not block.start:
                results = values.new_empty(*values.shape[:-1], shape.numel())
            results[..., block] = values
        return results.view((*results.shape[:-1], *shape))

    @torch.no_grad()
    def squared_distances(self, to: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return the squared distances of the changes: ``(m, m)`` of each pair, or ``(m,)`` to a change ``to``.

        They are sums of squared differences, parameter by parameter in the state's order.
        """
        m = len(self)
        total = torch.zeros((m, m) if to is None else (m,), dtype=torch.float64, device=self._device)
        for name in self.names:
            for block, rows in self._blocks(name):
                if to is not None:
                    total += (rows - to[name].reshape(-1)[block].to(rows)).square_().sum(1)
                    continue
                for k in range(m - 1):
                    total[k, k + 1 :] += (rows[k + 1 :] - rows[k]).square_().sum(1)
        return total if to is not None else total + total.T

    def combined(self, weights: Tensor | Iterable[float], mean: bool = False) -> Mapping[str, Tensor]:
        r"""Return :math:`\sum_k w_k x_k` of all parameters and floating-point buffers, by exact sums.

        Args:
            weights: a weight for each client ``(m,)``, or for several combinations ``(c, m)``.
            mean: divide each sum by the sum of its weights, if that is not 0.

        Returns:
            The sums by name: of one combination in the shapes of the state; of several, ``(c, *shape)``, which are
            computed whenever they are read.
        """
        numbers = weights if isinstance(weights, Tensor) else torch.tensor([*weights], dtype=torch.float64)
        table = numbers.to("cpu", torch.float64)
        fits = table.ndim in (1, 2) and table.shape[-1] == len(self)
        require(fits, "updates.combined: weights", tuple(table.shape), f"pass (m,) or (c, m) with m={len(self)}")
        rows = table if table.ndim > 1 else table[None]
        rule = partial(weighted_sums, weights=rows, mean=mean)
        sums = LazyEntries(self.entries, lambda name: self.by_coordinate(name, rule))
        return sums if table.ndim > 1 else {name: value[0] for name, value in sums.items()}

    @torch.no_grad()
    def replaced(self, rows: Mapping[str, Tensor]) -> Updates:
        """Return the updates with other ``rows`` ``(c, *shape)`` by name, for parameters and floating-point buffers.

        With c = m the clients stay, and so do entries without rows. Otherwise all entries have rows, and the updates
        are of the new ids 0 to c - 1 with weight 1. Rows are read one entry after another.
        """
        ids, local = list(self), dict(self._own)
        entries: dict[int, State] = {}
        for number, (name, values) in enumerate(rows.items()):
            if not number and len(values) != len(self):
                ids = [*range(len(values))]
                local_ids = ids[self._workers.rank :: self._workers.size]
                local = {k: ClientUpdate(k, 1.0) for k in local_ids}
            fits = name in self.entries and values.shape == (len(ids), *self._state[name].shape)
            require(fits, f"updates.replaced: {name}", tuple(values.shape), "pass (c, *shape) for an entry of updates")
            for place, k in enumerate(ids):
                if k in local:
                    entries.setdefault(k, {})[name] = values[place].to(self._device, torch.float64, copy=True)
        missing = {*self.entries} - {*rows} if ids != list(self) else {}
        require(not missing, "updates.replaced", sorted(missing), "give rows of all entries, for other clients")
        for k, client_rows in entries.items():
            changes = {name: client_rows.pop(name) for name in self.names if name in client_rows}
            # a chain reads the first of its parts that has an entry
            change: Mapping[str, Tensor] = ChainMap(changes, local[k].change)  # type: ignore[arg-type]
            local[k] = replace(local[k], change=change, buffers={**local[k].buffers, **client_rows})
        updates = Updates(local, self._state, self.names, self.float_buffers, self._workers, self._device)
        return updates.as_seen_by(self._method)

    @torch.no_grad()
    def _blocks(self, name: str) -> Iterator[tuple[slice, Tensor]]:
        """Gather the numbers of an entry of all clients, ``(m, n)``, a block after another."""
        part, size = "change" if name in self.names else "buffers", self._state[name].numel()
        sources: list[LazyDifference | Tensor] = []
        for update in self._own.values():
            entries = getattr(update, part)
            sources.append(entries if isinstance(entries, LazyDifference) else entries[name].reshape(-1))
        for start in range(0, max(size, 1), BLOCK):
            block = slice(start, min(start + BLOCK, size))
            padded = torch.zeros(self._most, block.stop - start, dtype=torch.float64, device=self._device)
            for row, source in zip(padded, sources, strict=False):
                row.copy_(source.numbers(name, block) if isinstance(source, LazyDifference) else source[block])
            parts = self._workers.all_gather(padded.cpu()) if self._workers.size > 1 else [padded]
            yield block, torch.cat(parts)[self._places].to(self._device)

    def _row(self, k: int, part: str, name: str) -> Tensor:
        like = self._state[name].double() if part == "change" else self._state[name]
        value = getattr(self._own[k], part)[name].to(like.dtype) if k in self._own else torch.zeros_like(like)
        if self._workers.size == 1:
            return value
        (rank,) = (rank for rank, ids in enumerate(self._placed) if k in ids)
        return self._workers.all_gather(value.detach().cpu())[rank].to(self._device)


def weighted_sums(rows: Tensor, weights: Tensor, mean: bool) -> Tensor:
    """Return the exact sums of rows ``(m, n)`` with weights ``(c, m)``, or their means: ``(c, n)``."""
    sums = []
    for row_weights in weights:
        total, weight = ExactSum(rows.shape[1], rows.device), math.fsum(row_weights.tolist())
        for part in (rows * row_weights.to(rows)[:, None]).split(MOST_ROWS):
            total.add(part)
        value = total.value(free=True)
        sums.append(value / weight if mean and weight else value)
    return torch.stack(sums)
