"""Weighted totals: every value that a client sends can be added.

The server adds exactly and divides once, so that any number of processes computes the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from fl_lightning import foreach
from fl_lightning.aggregation.exact import ExactSum
from fl_lightning.collectives import Collectives
from fl_lightning.errors import UsageError

# most rows that are added at once, so that their sum stays exact
MOST_ROWS = 256
# most numbers in the vectors that wait to be added together
MOST_WAITING = 16384
# the keys of a value in nested dictionaries
Path = tuple[str, ...]
# shapes of a total and of its weight
Shapes = tuple[torch.Size, torch.Size]
Layout = dict[Path, Shapes]


@dataclass
class Weighted:
    r"""A value that can only be added: ``mean = total / weight``.

    Args:
        total: :math:`\sum_k p_k v_k`, any shape.
        weight: :math:`\sum_k p_k`, a number or a tensor that broadcasts against ``total`` (per-class prototypes:
            total ``(C, d)``, weight ``(C, 1)``).
    """

    total: Tensor
    weight: Tensor

    @classmethod
    def of(cls, value: Tensor | float, weight: Tensor | float = 1.0) -> Weighted:
        """Return the sum over a single value with weight ``weight``, in float64."""
        if isinstance(value, (int, float)) and isinstance(weight, (int, float)):
            return cls.summed(float(value) * weight, weight)
        # plain numbers are not rounded to float32
        total = torch.as_tensor(value, dtype=torch.float64).detach()
        scale = torch.as_tensor(weight, dtype=torch.float64, device=total.device).detach()
        return cls(total * scale, scale)

    @classmethod
    def summed(cls, total: Tensor | float, weight: float) -> Weighted:
        """Return a total that is already a sum of values, whose weights add up to ``weight``."""
        if isinstance(total, (int, float)):
            return cls(*torch.tensor((float(total), float(weight)), dtype=torch.float64).unbind())
        value = torch.as_tensor(total, dtype=torch.float64)
        return cls(value, torch.tensor(float(weight), dtype=torch.float64, device=value.device))

    def __add__(self, other: Weighted) -> Weighted:
        return Weighted(self.total + other.total, self.weight + other.weight)

    def mean(self) -> Tensor:
        """Return ``total / weight``; 0 where the weight is 0."""
        empty = self.weight == 0
        return torch.where(empty, 0.0, self.total / torch.where(empty, 1.0, self.weight))


class Sums:
    """Running sums of :class:`Weighted` values by name, in dictionaries that may be nested.

    The sums are exact: the same bits in any order and over any number of workers. All numbers lie in one flat vector,
    so memory does not grow with the number of additions.

    Args:
        device: device of the vector.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._layout: Layout = {}
        self._exact = ExactSum(0, device)
        # vectors yet to be added: for a small model, adding many takes hardly longer than adding one
        self._waiting: list[Tensor] = []
        self._totals: dict[str, Any] | None = None

    @torch.no_grad()
    def add(self, values: Mapping[str, Any]) -> None:
        """Add the contribution of one client or batch: ``Weighted`` values by name, in dictionaries that may be nested.

        A contribution may lack names that others have.

        Raises:
            ArithmeticError: the shape of a value differs from earlier contributions.
        """
        entries = flatten(values)
        if not entries:
            return
        self._totals = None
        layout = {path: (value.total.shape, value.weight.shape) for path, value in entries.items()}
        if layout != self._layout:
            self._extend(merged(self._layout, layout))
        self._waiting.append(torch.cat([part for path in self._layout for part in self._flat(path, entries)]))
        if len(self._waiting) == MOST_ROWS or len(self._waiting) * self._exact.size >= MOST_WAITING:
            self._add_waiting()

    @torch.no_grad()
    def add_rows(self, values: Mapping[str, Any]) -> None:
        """Add m contributions, as :meth:`add` with totals and weights ``(m, ...)``.

        Raises:
            ArithmeticError: the shape of a value differs from earlier contributions.
        """
        entries = flatten(values)
        self._totals = None
        layout = {path: (value.total.shape[1:], value.weight.shape[1:]) for path, value in entries.items()}
        if layout != self._layout:
            self._extend(merged(self._layout, layout))
        number, device = len(next(iter(entries.values())).total), self._exact.device
        flat = torch.zeros(number, self._exact.size, dtype=torch.float64, device=device)
        begin = 0
        for path, shapes in self._layout.items():
            end = begin + length(shapes)
            if path in entries:
                middle = begin + shapes[0].numel()
                flat[:, begin:middle] = entries[path].total.reshape(number, -1)
                flat[:, middle:end] = entries[path].weight.reshape(number, -1)
            begin = end
        for some in flat.split(MOST_ROWS):
            self._exact.add(some)

    def all_reduce(self, workers: Collectives, note: Any = None) -> list[Any]:
        """Add up the sums of all workers, which must all call this; return the small ``note`` of each, by rank."""
        if workers.size == 1:
            return [note]
        self._add_waiting()
        layout: Layout = {}
        exponents: set[int] = set()
        gathered = workers.gather((self._layout, self._exact.exponents, note))
        for theirs, used, _ in gathered:
            layout, exponents = merged(layout, theirs), exponents | set(used)
        self._extend(layout)
        self._exact.all_reduce(workers, exponents)
        self._totals = None
        return [theirs for *_, theirs in gathered]

    @property
    def totals(self) -> dict[str, Any]:
        """The sums, in dictionaries nested as the contributions."""
        if self._totals is None:
            self._add_waiting()
            shapes = [shape for pair in self._layout.values() for shape in pair]
            flat = self._exact.value().split([shape.numel() for shape in shapes])
            parts = iter([part.view(shape) for part, shape in zip(flat, shapes, strict=True)])
            self._totals = nested({path: Weighted(next(parts), next(parts)) for path in self._layout})
        return self._totals

    def means(self) -> dict[str, Tensor]:
        """Return the mean by name, for sums without nested dictionaries."""
        return {name: total.mean() for name, total in self.totals.items()}

    def _extend(self, layout: Layout) -> None:
        """Extend the vector to a superset of the current layout, with zeros for the new values."""
        if layout == self._layout:
            return
        self._add_waiting()
        ends = dict(zip(layout, accumulate(map(length, layout.values())), strict=True))
        places = [torch.arange(ends[path] - length(shapes), ends[path]) for path, shapes in self._layout.items()]
        places.append(torch.zeros(0, dtype=torch.int64))  # cat takes no empty list
        self._exact.spread(torch.cat(places), max(ends.values()))
        self._layout, self._totals = layout, None

    def _add_waiting(self) -> None:
        if self._waiting:
            first, *others = self._waiting
            self._exact.add(torch.stack(self._waiting) if others else first)
            self._waiting = []

    def _flat(self, path: Path, entries: Mapping[Path, Weighted]) -> tuple[Tensor, ...]:
        device, value = self._exact.device, entries.get(path)
        if value is None:
            return (torch.zeros(length(self._layout[path]), dtype=torch.float64, device=device),)
        total, weight = value.total.to(device, torch.float64), value.weight.to(device, torch.float64)
        return total.reshape(-1), weight.reshape(-1)


def flatten(values: Mapping[str, Any], path: Path = ()) -> dict[Path, Weighted]:
    """Return the values of nested dictionaries by path.

    Raises:
        UsageError: a value is neither ``Weighted`` nor a dictionary.
    """
    entries: dict[Path, Weighted] = {}
    for name, value in values.items():
        if isinstance(value, Weighted):
            entries[(*path, name)] = value
        elif isinstance(value, Mapping):
            entries |= flatten(value, (*path, name))
        else:
            what = "/".join((*path, name))
            raise UsageError(f"{what} is a {type(value).__name__}; use Weighted.of(value, weight)")
    return entries


def cloned(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of ``Weighted`` values in nested dictionaries."""
    return nested({path: Weighted(v.total.clone(), v.weight.clone()) for path, v in flatten(values).items()})


def nested(entries: Mapping[Path, Weighted]) -> dict[str, Any]:
    """Return nested dictionaries with the given values by path."""
    tree: dict[str, Any] = {}
    for (*folders, name), value in entries.items():
        branch = tree
        for folder in folders:
            branch = branch.setdefault(folder, {})
        branch[name] = value
    return tree


def merged(first: Layout, second: Layout) -> Layout:
    """Return the union of two layouts, in ascending order of the paths.

    Raises:
        ArithmeticError: the shapes of a value differ.
    """
    for path in first.keys() & second.keys():
        if first[path] != second[path]:
            one, other = (" and ".join(str(tuple(shape)) for shape in layout[path]) for layout in (first, second))
            text = f"total and weight of {'/'.join(path)} have the shapes {other}, and had {one} earlier"
            raise ArithmeticError(f"{text}; use the same shapes in all contributions")
    return dict(sorted((first | second).items()))


def length(shapes: Shapes) -> int:
    """Return the number of elements of a total and its weight."""
    return sum(shape.numel() for shape in shapes)


def weigh_rows(values: Tensor, weights: Tensor) -> Weighted:
    """Multiply rows ``(m, ...)`` by their weights ``(m,)`` in float64."""
    return Weighted(values.double() * weights.view(-1, *[1] * (values.ndim - 1)), weights)


@torch.no_grad()
def weigh(values: Mapping[str, Tensor], weight: float) -> dict[str, Weighted]:
    """Multiply each tensor by its ``weight`` in float64."""
    if not values:
        return {}
    scaled = foreach.multiply([value.detach().double() for value in values.values()], float(weight))
    scale = torch.tensor(float(weight), dtype=torch.float64)
    return {name: Weighted(total, scale) for name, total in zip(values, scaled, strict=True)}
