"""Weighted totals: every value that a client sends can be added.

The server adds exactly and divides once, so that any number of processes computes the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from fl_lightning.core import foreach
from fl_lightning.core.collectives import Collectives
from fl_lightning.core.exact_sum import ExactSum
from fl_lightning.utilities.errors import UsageError

# most rows that are added at once, so that their sum stays exact
MOST_ROWS = 256
# most numbers in the vectors that wait to be added together
MOST_WAITING = 16384
# totals of at least this many numbers have an exact sum each, to which they are added one after another
LARGE = 65536
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
        bound: a number that no magnitude in ``total`` exceeds, if one is known: the sum then need not search for it.
    """

    total: Tensor
    weight: Tensor
    bound: float = field(default=math.inf, kw_only=True)

    @property
    def shape(self) -> torch.Size:
        """Shape of the total."""
        return self.total.shape

    @classmethod
    def of(cls, value: Tensor | float, weight: Tensor | float = 1.0) -> Weighted:
        """Return the sum over a single value with weight ``weight``, in float64."""
        if isinstance(value, (int, float)) and isinstance(weight, (int, float)):
            return cls.summed(float(value) * weight, weight)
        # plain numbers are not rounded to float32
        total = torch.as_tensor(value, dtype=torch.float64).detach()
        scale = filled(weight, total.device)
        return cls(total * scale, scale)

    @classmethod
    def summed(cls, total: Tensor | float, weight: float) -> Weighted:
        """Return a total that is already a sum of values, whose weights add up to ``weight``."""
        if isinstance(total, (int, float)):
            return cls(*torch.tensor((float(total), float(weight)), dtype=torch.float64).unbind())
        value = torch.as_tensor(total, dtype=torch.float64)
        return cls(value, filled(weight, value.device))

    def __add__(self, other: Weighted) -> Weighted:
        return Weighted(self.total + other.total, self.weight + other.weight)

    def mean(self) -> Tensor:
        """Return ``total / weight``; 0 where the weight is 0."""
        if self.weight.ndim == 0 and self.weight.device.type == "cpu":
            return self.total / self.weight if self.weight else torch.zeros_like(self.total)
        empty = self.weight == 0
        return torch.where(empty, 0.0, self.total / torch.where(empty, 1.0, self.weight))


class LazyWeighted(Weighted):
    """A total that is computed whenever it is read, so that it takes no memory until it is added.

    Args:
        compute: returns the total as a new tensor, in float64.
        shape: shape of the total.
        weight: weight of the total, as for :class:`Weighted`.
        bound: a number that no magnitude in the total exceeds, if one is known.
    """

    def __init__(
        self, compute: Callable[[], Tensor], shape: torch.Size, weight: Tensor | float = 1.0, bound: float = math.inf
    ) -> None:
        self.compute, self._shape, self.bound = compute, shape, bound
        self.weight = torch.as_tensor(weight, dtype=torch.float64)

    @property
    def total(self) -> Tensor:  # type: ignore[override]
        """The total, in float64."""
        return self.compute()

    @property
    def shape(self) -> torch.Size:
        """Shape of the total."""
        return self._shape


class LazyEntries(Mapping[str, Tensor]):
    """Tensors by name that are computed whenever they are read, one at a time.

    Args:
        names: the names, in order.
        compute: returns the tensor of a name.
    """

    def __init__(self, names: Iterable[str], compute: Callable[[str], Tensor]) -> None:
        self.names, self.compute = dict.fromkeys(names), compute

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.names:
            raise KeyError(name)
        return self.compute(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


class LazyDifference(LazyEntries):
    """``new - old`` in float64, where the difference of two float32 numbers is practically exact.

    An entry is computed whenever it is read, so that a change takes no memory beside the state.
    """

    def __init__(self, new: Mapping[str, Tensor], old: Mapping[str, Tensor], names: Iterable[str]) -> None:
        self.new, self.old, self.names = new, old, dict.fromkeys(names)

    @torch.no_grad()
    def __getitem__(self, name: str) -> Tensor:
        return self.new[name].detach().to(torch.float64, copy=True).sub_(self.old[name])

    @torch.no_grad()
    def blocks(self) -> Iterator[list[Tensor]]:
        """The entries in lists of one entry, or of several with at most :data:`LARGE` numbers."""
        block, size = list[Tensor](), 0
        for name in self.names:
            value = self.new[name].detach()
            if block and size + value.numel() > LARGE:
                yield block
                block, size = [], 0
            block.append(value.to(torch.float64, copy=True).sub_(self.old[name]))
            size += value.numel()
        if block:
            yield block

    @torch.no_grad()
    def numbers(self, name: str, block: slice) -> Tensor:
        """Return a block of the numbers of an entry."""
        numbers = self.new[name].detach().reshape(-1)[block].to(torch.float64, copy=True)
        return numbers.sub_(self.old[name].reshape(-1)[block])

    def times(self, name: str, factor: float) -> Tensor:
        """Return an entry, multiplied by ``factor``."""
        return self[name].mul_(factor)


class Sums:
    """Running sums of :class:`Weighted` values by name, in dictionaries that may be nested.

    The sums are exact: the same bits in any order and over any number of workers. A total of many numbers has a sum of
    its own, to which one contribution is added at a time; all other numbers lie in one flat vector. Memory does not
    grow with the number of additions.

    Args:
        device: device of the sums.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._layout: Layout = {}
        self._exact = ExactSum(0, device)
        self._large: dict[Path, ExactSum] = {}
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
        if entries := flatten(values):
            numbers = self._take(entries)  # which may add all that waits
            self._waiting.append(numbers)
            if len(self._waiting) == MOST_ROWS or len(self._waiting) * self._exact.size >= MOST_WAITING:
                self._add_waiting()

    @torch.no_grad()
    def add_rows(self, values: Mapping[str, Any]) -> None:
        """Add m contributions, as :meth:`add` with totals and weights ``(m, ...)``.

        Raises:
            ArithmeticError: the shape of a value differs from earlier contributions.
        """
        entries = flatten(values)
        for rows in self._take(entries, len(next(iter(entries.values())).weight)).split(MOST_ROWS):
            self._exact.add(rows)

    def _take(self, entries: dict[Path, Weighted], *number: int) -> Tensor:
        """Add large totals, and return the numbers for the flat vector ``(n,)``; of m contributions ``(m, n)``."""
        device, of_rows = self._exact.device, len(number)
        self._totals = None
        layout = {}
        for path, value in entries.items():
            layout[path] = (value.shape[of_rows:], value.weight.shape[of_rows:])
        self._extend(layout)
        for path in self._large.keys() & entries.keys():
            value = entries[path]
            for total in value.total if number else [value.total]:
                # the exact sum overwrites its argument, and the total of a lazy value is a new tensor
                numbers = total.to(device, torch.float64, copy=not isinstance(value, LazyWeighted))
                self._large[path].add(numbers.reshape(-1), value.bound)
            del total, numbers
        parts: list[Tensor] = []
        for path, shapes in self._layout.items():
            if path in entries:
                value = entries[path]
                small = (value.weight,) if is_large(shapes[0]) else (value.total, value.weight)
                parts += (part.to(torch.float64).reshape(*number, -1) for part in small)
            else:
                parts.append(torch.zeros(*number, length(shapes), dtype=torch.float64, device=device))
        return joined_on(parts, torch.device(device))

    def all_reduce(self, workers: Collectives, note: Any = None) -> list[Any]:
        """Add up the sums of all workers, which must all call this; return the small ``note`` of each, by rank."""
        if workers.size == 1:
            return [note]
        self._add_waiting()
        worker_exponents = {path: sum_.exponents for path, sum_ in self._large.items()}
        worker_exponents[()] = self._exact.exponents
        gathered = workers.gather((self._layout, worker_exponents, note), "sums")
        exponents: dict[Path, set[int]] = {}
        for layout, exponents_used, _ in gathered:
            self._extend(layout)
            for path, path_exponents in exponents_used.items():
                exponents.setdefault(path, set()).update(path_exponents)
        for path in sorted(exponents):
            (self._large[path] if path else self._exact).all_reduce(workers, exponents[path])
        self._totals = None
        return [note for *_, note in gathered]

    @property
    def totals(self) -> dict[str, Any]:
        """The sums, in dictionaries nested as the contributions; single numbers are on the CPU."""
        if self._totals is None:
            self._totals = self._read(free=False)
        return self._totals

    def take(self) -> dict[str, Any]:
        """Return :attr:`totals`, and free the memory of the sums, to which nothing can be added any more."""
        return self._read(free=True)

    def means(self) -> dict[str, Tensor]:
        """Return the mean by name, for sums without nested dictionaries."""
        return {name: total.mean() for name, total in self.totals.items()}

    def _read(self, free: bool) -> dict[str, Any]:
        self._add_waiting()
        flat = self._exact.value(free)
        numbers, start, entries = flat.cpu(), 0, {}
        for path, shapes in self._layout.items():
            parts = []
            if path in self._large:
                parts.append((self._large.pop(path) if free else self._large[path]).value(free).view(shapes[0]))
            for shape in shapes[len(parts) :]:
                end = start + shape.numel()
                parts.append((flat if shape else numbers)[start:end].view(shape))
                start = end
            entries[path] = Weighted(*parts)
        return nested(entries)

    def _extend(self, layout: Layout) -> None:
        """Extend the sums by the values of a layout that they do not have yet, which are 0."""
        if layout == self._layout:
            return
        layout, before = merged(self._layout, layout), self._layout
        self._totals = None
        if layout == before:
            return
        self._add_waiting()
        ends = dict(zip(layout, accumulate(map(length, layout.values())), strict=True))
        places = []
        for path, shapes in before.items():
            places.append(torch.arange(ends[path] - length(shapes), ends[path]))
        places.append(torch.zeros(0, dtype=torch.int64))  # cat takes no empty list
        self._exact.spread(torch.cat(places), max(ends.values()))
        for path, (shape, _) in layout.items():
            if is_large(shape) and path not in self._large:
                self._large[path] = ExactSum(shape.numel(), self._exact.device)
        self._layout = layout

    def _add_waiting(self) -> None:
        if self._waiting:
            rows = self._waiting
            self._exact.add(torch.stack(rows) if len(rows) > 1 else rows[0])
            self._waiting = []


def joined_on(parts: list[Tensor], device: torch.device) -> Tensor:
    """Concatenate rows ``(..., n)`` on a device; those that lie elsewhere, such as weights, are copied together."""
    places = [place for place, part in enumerate(parts) if part.device.type != device.type]
    if places:
        copied = torch.cat([parts[place].cpu() for place in places], -1)
        if device.type == "cuda":  # the host does not wait for a copy from pinned memory
            copied = copied.pin_memory().to(device, non_blocking=True)
        copied = copied.to(device)
        sizes = [parts[place].shape[-1] for place in places]
        for place, part in zip(places, copied.split(sizes, -1), strict=True):
            parts[place] = part
    return torch.cat(parts, -1)


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
            key = "/".join((*path, name))
            raise UsageError(f"{key} is a {type(value).__name__}; use Weighted.of(value, weight)")
    return entries


def cloned(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of ``Weighted`` values in nested dictionaries."""
    copies = {}
    for path, value in flatten(values).items():
        copies[path] = Weighted(value.total.clone(), value.weight.clone())
    return nested(copies)


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
            shapes, earlier = map(tuple, second[path]), map(tuple, first[path])
            text = f"total and weight of {'/'.join(path)} have the shapes {' and '.join(map(str, shapes))}, "
            text += f"and had {' and '.join(map(str, earlier))} earlier"
            raise ArithmeticError(f"{text}; use the same shapes in all contributions")
    return dict(sorted((first | second).items()))


def is_large(shape: torch.Size) -> bool:
    """Whether totals of this shape have an exact sum of their own."""
    return shape.numel() >= LARGE


def length(shapes: Shapes) -> int:
    """Return the number of elements that a value has in the flat vector."""
    return sum(shape.numel() for shape in shapes) - is_large(shapes[0]) * shapes[0].numel()


def filled(weight: Tensor | float, device: torch.device) -> Tensor:
    """Return a weight on a device, which for a number needs no copy from main memory."""
    if isinstance(weight, Tensor):
        return weight.detach().to(device, torch.float64)
    return torch.full((), float(weight), dtype=torch.float64, device=device)


def weigh_rows(values: Tensor, weights: Tensor) -> Weighted:
    """Multiply rows ``(m, ...)`` by their weights ``(m,)`` in float64."""
    return Weighted(values.double() * weights.view(-1, *[1] * (values.ndim - 1)), weights)


@torch.no_grad()
def weigh(values: Mapping[str, Tensor], weight: float, bound: float = math.inf) -> dict[str, Weighted]:
    """Multiply each tensor by its ``weight`` in float64; no magnitude in the products exceeds ``bound``."""
    scale = torch.tensor(float(weight), dtype=torch.float64)
    if isinstance(values, LazyDifference):
        shapes = {name: values.new[name].shape for name in values}
        products = {name: partial(values.times, name, weight) for name in values}
        return {name: LazyWeighted(products[name], shapes[name], scale, bound) for name in values}
    doubles = [value.detach().double() for value in values.values()]
    totals = dict(zip(values, foreach.multiply(doubles, float(weight)), strict=True))
    return {name: Weighted(total, scale, bound=bound) for name, total in totals.items()}
