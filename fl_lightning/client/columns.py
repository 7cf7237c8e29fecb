"""What each of several clients keeps, side by side: one column of values for all that stands at the same place.

A client's values come as a tree: dictionaries, lists and tuples of tensors, numbers and anything else. Trees of one
shape share a table. Its columns are tensors with a row for each client, or lists of numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

# rows of a group: a range of them, of which a tensor gives a view, or their numbers
Rows = slice | list[int]


class Leaf(NamedTuple):
    """Stands in the shape of a tree for a tensor or a number."""

    place: int


def take_apart(tree: Any, leaves: list[Any]) -> Any:
    """The shape of a tree, whose tensors and numbers are added to ``leaves``."""
    if isinstance(tree, Tensor) or type(tree) in (int, float):
        leaves.append(tree)
        return Leaf(len(leaves) - 1)
    if isinstance(tree, Mapping):
        return {key: take_apart(value, leaves) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(take_apart(value, leaves) for value in tree)
    return tree


def put_together(shape: Any, leaves: Sequence[Any]) -> Any:
    """The tree of this shape."""
    if isinstance(shape, Leaf):
        return leaves[shape.place]
    if isinstance(shape, dict):
        return {key: put_together(value, leaves) for key, value in shape.items()}
    if type(shape) in (list, tuple):
        return type(shape)(put_together(value, leaves) for value in shape)
    return shape


def describe(leaf: Any) -> str:
    """The kind of a leaf."""
    return f"{tuple(leaf.shape)} {leaf.dtype}" if isinstance(leaf, Tensor) else type(leaf).__name__


def kind_of(shape: Any, leaves: Sequence[Any]) -> str:
    """Equal for trees that can share a table."""
    return f"{shape} {[*map(describe, leaves)]}"


def numbers_of(rows: Rows, of: int) -> Sequence[int]:
    """The numbers of these rows, of a group of so many clients."""
    return range(of)[rows] if isinstance(rows, slice) else rows


class Same:
    """A tensor that is the same object for all clients; it may be read."""

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def take(self, rows: Rows) -> tuple[Any, bool]:
        """The values of these rows, and whether they are stacked."""
        return self.value, False

    def row(self, row: int) -> Any:
        """The value of one row."""
        return self.value


class Stacked:
    """A tensor of each client ``(G, ...)``."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def take(self, rows: Rows) -> tuple[Any, bool]:
        """The values of these rows, and that they are stacked."""
        return self.values[rows], True

    def row(self, row: int) -> Any:
        """The value of one row."""
        return self.values[row]

    def part(self, rows: list[int]) -> Stacked:
        """A column of these rows alone."""
        return Stacked(self.values[rows])

    def put(self, rows: Rows, values: Tensor) -> None:
        """Replace the values of these rows, unless they were written in place."""
        if not isinstance(rows, slice) or self.values[rows].data_ptr() != values.data_ptr():
            self.values[rows] = values


class Numbers:
    """A number of each client: as a tensor where they differ, since a mapped function sees one client."""

    def __init__(self, values: Sequence[float] | np.ndarray, device: torch.device) -> None:
        self.values, self.device = np.array(values), device

    def take(self, rows: Rows) -> tuple[Any, bool]:
        """The number where it is the same in these rows, else a tensor; and whether it is stacked."""
        chosen = self.values[rows]
        if (chosen == chosen[0]).all():
            return chosen[0].item(), False
        return torch.from_numpy(chosen.copy()).to(self.device), True

    def row(self, row: int) -> Any:
        """The number of one row."""
        return self.values[row].item()

    def part(self, rows: list[int]) -> Numbers:
        """A column of these rows alone."""
        return Numbers(self.values[rows], self.device)

    def put(self, rows: Rows, value: Any) -> None:
        """Replace the values of these rows: by one number, or by a tensor of theirs."""
        self.values[rows] = value.cpu().numpy() if isinstance(value, Tensor) else value


Column = Same | Stacked | Numbers


class Table:
    """The trees of the clients of a group that have one shape.

    Args:
        shape: the shape of all of them.
        columns: a column for each leaf.
    """

    def __init__(self, shape: Any, columns: list[Column]) -> None:
        self.shape, self.columns = shape, columns

    @classmethod
    def of(cls, shape: Any, rows: Mapping[int, Sequence[Any]], size: int, device: torch.device) -> Table:
        """A table for a group of ``size`` clients, of which ``rows`` have this shape, each with its leaves."""
        columns = zip(*rows.values(), strict=True)
        return cls(shape, [column_of(dict(zip(rows, values, strict=True)), size, device) for values in columns])

    def put(self, place: int, rows: Rows, value: Any, size: int) -> None:
        """Replace a leaf of the clients at these rows, of a group of ``size`` clients."""
        column = self.columns[place]
        if isinstance(column, Same):
            column = self.columns[place] = Stacked(column.value.expand(size, *column.value.shape).clone())
        column.put(rows, value)

    def tree(self, row: int) -> Any:
        """The tree of one client."""
        return put_together(self.shape, [column.row(row) for column in self.columns])


def column_of(values: dict[int, Any], size: int, device: torch.device) -> Column:
    """The column of a leaf, by row."""
    first = next(iter(values.values()))
    if not isinstance(first, Tensor):
        return Numbers([values.get(row, first) for row in range(size)], device)
    if len(values) > 1 and all(value is first for value in values.values()):
        return Same(first)
    return Stacked(torch.stack([values.get(row, first).detach() for row in range(size)]))
