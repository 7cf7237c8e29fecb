"""The batches of a group: batches of equal shape are stacked, to run as few programs as possible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fl_lightning.data.client_loaders import ClientLoader, IndexedLoader
from fl_lightning.training.device_loaders import Loaders
from fl_lightning.utilities.errors import ClientError
from fl_lightning.vectorized.batched_tree import BatchedTree, Column, RowIndex, kind_of, table_of, take_apart

# of the examples that are gathered at once: small batches for several steps, which then stay in a processor's cache
MOST_BYTES = 2**20


class GroupBatch(NamedTuple):
    """Batches of several clients, with their indices in the pass."""

    rows: RowIndex
    indices: Sequence[int]
    table: BatchedTree

    def part(self, places: Sequence[int], of: Sequence[int]) -> GroupBatch:
        """The batches at these places, of clients whose rows are ``of``."""
        selection = list(places)
        columns = [column.part(selection) for column in self.table.columns]
        indices = [self.indices[place] for place in selection] if len(self.indices) > 1 else self.indices
        rows = range_or_list([of[place] for place in selection])
        return GroupBatch(rows, indices, BatchedTree(self.table.shape, columns))


def range_or_list(rows: list[int]) -> RowIndex:
    """Return a range of rows as a slice, for which indexing gives a view."""
    start = rows[0]
    return slice(start, start + len(rows)) if rows == [*range(start, start + len(rows))] else rows


class GroupLoader:
    """Gives the batches of a group, pass by pass.

    Each client gets its own batches in their order. Since clients do not depend on each other, a batch that ends a pass
    and has another shape than those before it may wait for such batches of the other clients.
    """

    def __init__(self, loaders: Loaders, of_clients: Sequence[ClientLoader], device: torch.device) -> None:
        self.loaders, self.of_clients, self.device = loaders, of_clients, device
        example = of_clients[0]
        # errors by row
        self.failed: dict[int, Exception] = {}
        self._gathers = loaders.plain and isinstance(example, IndexedLoader) and all(map(example.is_like, of_clients))

    def of_pass(self, lengths: Sequence[int]) -> Iterator[GroupBatch]:
        """Yield the batches of a pass with the given numbers of batches."""
        return self._gathered(lengths) if self._gathers else self._loaded(lengths)

    def _gathered(self, lengths: Sequence[int]) -> Iterator[GroupBatch]:
        """Each batch of the group is one gather from the array that all clients have a part of."""
        loaders: Any = self.of_clients
        size, gather = loaders[0].batch_size, loaders[0].gather
        pairs = [*zip(loaders, lengths, strict=True)]
        orders = [loader.order() if length else torch.empty(0) for loader, length in pairs]
        full = [min(length, len(order) // size) for length, order in zip(lengths, orders, strict=True)]
        places = torch.zeros(max(full), len(full), size, dtype=torch.int64)
        for row, (order, number) in enumerate(zip(orders, full, strict=True)):
            places[:number, row] = order[: number * size].view(number, size)
        batches: list[tuple[RowIndex, list[int], Tensor]] = []
        ends = {0, *full}
        rows: RowIndex = slice(0)
        for step in range(max(full)):
            if step in ends:
                rows = range_or_list([row for row, number in enumerate(full) if number > step])
            batches.append((rows, [step], places[step, rows]))
        ragged: dict[int, list[int]] = {}
        for row, (order, number, length) in enumerate(zip(orders, full, lengths, strict=True)):
            if number < length:
                ragged.setdefault(len(order) - number * size, []).append(row)
        for remainder in sorted(ragged, reverse=True):
            ends_ = torch.stack([orders[row][-remainder:] for row in ragged[remainder]])
            indices = [full[row] for row in ragged[remainder]]
            batches.append((range_or_list(ragged[remainder]), indices, ends_))
        leaves = list[Any]()
        take_apart(gather(batches[0][2].reshape(-1)[:1]), leaves)
        limit = MOST_BYTES // max(1, sum(leaf.nbytes for leaf in leaves))
        start, number = 0, 0
        for end, (*_, examples) in enumerate(batches):
            number += examples.numel()
            if number > limit and end > start:
                yield from self._together(gather, batches[start:end])
                start, number = end, examples.numel()
        yield from self._together(gather, batches[start:])

    def _together(
        self, gather: Callable[[Tensor], Any], block: list[tuple[RowIndex, list[int], Tensor]]
    ) -> Iterator[GroupBatch]:
        """Batches of any clients, from one gather: their rows, indices, and the places ``(m, B)`` of their examples."""
        examples = torch.cat([places.reshape(-1) for *_, places in block])
        joined = self.loaders.to_device(gather(examples))
        leaves: list[Any] = []
        shape = take_apart(joined, leaves)
        columns = [leaf.split([places.numel() for *_, places in block]) for leaf in leaves]
        for (rows, indices, places), *parts in zip(block, *columns, strict=True):
            values = [part.view(*places.shape, *part.shape[1:]) for part in parts]
            tree = BatchedTree(shape, [Column(value, self.device) for value in values])
            yield GroupBatch(rows, indices, tree)

    def _loaded(self, lengths: Sequence[int]) -> Iterator[GroupBatch]:
        """Yield batches from the clients' loaders."""
        passes = [self.loaders.batches(loader) for loader in self.of_clients]
        waiting: list[tuple[int, int, Any, list[Any]]] = []
        for index in range(max(lengths)):
            came: list[tuple[int, int, Any, list[Any]]] = []
            for row, length in enumerate(lengths):
                if index < length and row not in self.failed:
                    try:
                        came.append((row, index, *self._next(passes[row], index, length)))
                    except Exception as error:
                        self.failed[row] = error
            if not came:
                break
            kinds = Counter(kind_of(shape, leaves) for _, _, shape, leaves in came)
            usual = kinds.most_common(1)[0][0]
            usual_batches: list[tuple[int, int, Any, list[Any]]] = []
            for row, _, *tree in came:
                waits = lengths[row] == index + 1 and kind_of(*tree) != usual
                (waiting if waits else usual_batches).append((row, index, *tree))
            yield from self._by_kind(usual_batches)
        yield from self._by_kind(waiting)

    def _next(self, batches: Iterator[Any], index: int, length: int) -> tuple[Any, list[Any]]:
        pair = next(batches, None)
        if pair is None:
            hint = "return the number of batches of every pass; an exhausted iterator has none in the next pass"
            raise ClientError(f"its train_dataloader gave {index} of the {length} batches of a pass; {hint}")
        leaves: list[Any] = []
        return take_apart(pair[1], leaves), leaves

    def _by_kind(self, batches: list[tuple[int, int, Any, list[Any]]]) -> Iterator[GroupBatch]:
        kinds: dict[str, list[tuple[int, int, Any, list[Any]]]] = {}
        for batch in batches:
            kinds.setdefault(kind_of(*batch[2:]), []).append(batch)
        for alike in kinds.values():
            columns = {place: leaves for place, (*_, leaves) in enumerate(alike)}
            table = table_of(alike[0][2], columns, len(alike), self.device)
            rows = [row for row, *_ in alike]
            yield GroupBatch(range_or_list(rows), [index for _, index, *_ in alike], table)
