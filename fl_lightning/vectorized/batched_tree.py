"""Batched trees: values of several clients, with one column for each place in the tree.

A client's values form a tree: dictionaries, lists and tuples of tensors, numbers and other objects. Trees of one
structure share a table, whose columns are tensors with a row for each client, or lists of numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

# rows of a group: a slice, for which indexing gives a view, or their numbers
RowIndex = slice | list[int]


class LeafSpec(NamedTuple):
    """Stands in the shape of a tree for a tensor or a number."""

    place: int


def take_apart(tree: Any, leaves: list[Any]) -> Any:
    """The shape of a tree, whose tensors and numbers are added to ``leaves``."""
    if isinstance(tree, Tensor) or type(tree) in (int, float):
        leaves.append(tree)
        return LeafSpec(len(leaves) - 1)
    if isinstance(tree, Mapping):
        return {key: take_apart(value, leaves) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(take_apart(value, leaves) for value in tree)
    return tree


def put_together(shape: Any, leaves: Sequence[Any]) -> Any:
    """The tree of this shape."""
    if isinstance(shape, LeafSpec):
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


def numbers_of(rows: RowIndex, of: int) -> Sequence[int]:
    """Return the numbers of these rows in a group of ``size`` clients."""
    return range(of)[rows] if isinstance(rows, slice) else rows


class Column:
    """The values of a group's clients at one place of a tree.

    They are a tensor with a row for each ``(G, ...)``, an array of a number for each ``(G,)``, or a tensor that is
    ``shared``, and that may be read. Numbers that differ become a tensor, since a mapped function sees one client.
    """

    def __init__(self, values: Any, device: torch.device, shared: bool = False) -> None:
        self.values, self.device, self.shared = values, device, shared

    def take(self, rows: RowIndex) -> tuple[Any, bool]:
        """The value of these rows, and whether it is stacked; a number where they have the same."""
        if self.shared:
            return self.values, False
        values = self.values[rows]
        if isinstance(values, Tensor):
            return values, True
        if (values == values[0]).all():
            return values[0].item(), False
        return torch.from_numpy(values.copy()).to(self.device), True

    def row(self, row: int) -> Any:
        """The value of one client."""
        value = self.values if self.shared else self.values[row]
        return value if isinstance(value, Tensor) else value.item()

    def part(self, rows: list[int]) -> Column:
        """A column of these rows alone."""
        return self if self.shared else Column(self.values[rows], self.device)

    def put(self, rows: RowIndex, value: Any, size: int) -> None:
        """Replace the values of these rows, of a group of ``size`` clients, unless they were written in place."""
        if self.shared:
            self.values, self.shared = self.values.expand(size, *self.values.shape).clone(), False
        if isinstance(self.values, np.ndarray):
            self.values[rows] = value.cpu().numpy() if isinstance(value, Tensor) else value
        elif not isinstance(rows, slice) or self.values[rows].data_ptr() != value.data_ptr():
            self.values[rows] = value


class BatchedTree(NamedTuple):
    """The trees of clients that have one shape, with a column for each leaf."""

    shape: Any
    columns: list[Column]


def table_of(shape: Any, rows: Mapping[int, Sequence[Any]], size: int, device: torch.device) -> BatchedTree:
    """Return a table for a group of ``size`` clients, from the leaves of the ``rows`` with this structure."""
    columns = []
    for values in zip(*rows.values(), strict=True):
        example, by_row = values[0], dict(zip(rows, values, strict=True))
        shared = isinstance(example, Tensor) and len(values) > 1 and len({*map(id, values)}) == 1
        column = example if shared else [by_row.get(row, example) for row in range(size)]
        if isinstance(column, list):
            tensors = isinstance(example, Tensor)
            column = torch.stack([value.detach() for value in column]) if tensors else np.array(column)
        columns.append(Column(column, device, shared))
    return BatchedTree(shape, columns)
