"""Arithmetic on ``{name: tensor}`` and on what travels: a state goes down to a client, sums come up.

Everything that a client sends is a total and a weight. The server only adds, exactly, and divides once: so one
process and several compute the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fl_lightning.exact import ExactSum

State = dict[str, Tensor]
Value = TypeVar("Value")


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
        """The sum over one element: ``value`` with weight ``weight``, held in float64."""
        total = torch.as_tensor(value).detach().double()
        scale = torch.as_tensor(weight, device=total.device).detach().double()
        return cls(total * scale, scale)

    @classmethod
    def summed(cls, total: Tensor | float, weight: float) -> Weighted:
        """A total of which ``weight`` is known beside it."""
        value = torch.as_tensor(total, dtype=torch.float64)
        return cls(value, torch.tensor(float(weight), dtype=torch.float64, device=value.device))

    def __add__(self, other: Weighted) -> Weighted:
        return Weighted(self.total + other.total, self.weight + other.weight)

    def mean(self) -> Tensor:
        """``total / weight``; 0 where nothing was added."""
        empty = self.weight == 0
        return torch.where(empty, 0.0, self.total / torch.where(empty, 1.0, self.weight))


class Sums:
    """Running :class:`Weighted` totals by name, exact: the same bits in any order and over any number of processes.

    All numbers lie in one flat vector; memory does not grow with the number of additions.

    Args:
        device: where the vector lies.

    Attributes:
        layout: the shapes of total and weight by name, in the order of the vector.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.layout: Layout = {}
        self.exact = ExactSum(0, device)
        self._totals: dict[str, Weighted] | None = None

    def add(self, values: Mapping[str, Weighted]) -> None:
        """Add what one client (or one batch) sends.

        Raises:
            ArithmeticError: a number is nan or infinite, or a name comes with another shape than before.
        """
        if not values:
            return
        self._totals = None
        found = {name: (value.total.shape, value.weight.shape) for name, value in values.items()}
        if found != self.layout:
            self.arrange(merged(self.layout, found))
        self.exact.add(torch.cat([part for name in self.layout for part in self._flat(name, values)]))

    def arrange(self, layout: Layout) -> None:
        """Take on a layout that holds all of the present names, with zeros for the new ones."""
        if layout == self.layout:
            return
        begins, size = offsets(layout)
        places = [torch.arange(begins[name], begins[name] + length(self.layout[name])) for name in self.layout]
        if self.layout:
            self.exact = self.exact.rearranged(torch.cat(places).to(self.exact.device), size)
        else:
            self.exact = ExactSum(size, self.exact.device)
        self.layout, self._totals = layout, None

    def load(self, exponents: list[int], buffer: Tensor) -> None:
        """Take over the numbers of a buffer in the present layout."""
        self.exact.load(exponents, buffer.to(self.exact.device))
        self._totals = None

    @property
    def totals(self) -> dict[str, Weighted]:
        """What was added up, by name."""
        if self._totals is None:
            flat = self.exact.value().split([s.numel() for shapes in self.layout.values() for s in shapes])
            shapes = [shape for pair in self.layout.values() for shape in pair]
            parts = iter([part.view(shape) for part, shape in zip(flat, shapes, strict=True)])
            self._totals = {name: Weighted(next(parts), next(parts)) for name in self.layout}
        return self._totals

    def means(self) -> dict[str, Tensor]:
        """The mean by name."""
        return means(self.totals)

    def under(self, prefix: str) -> dict[str, Weighted]:
        """The totals whose names begin with ``prefix/``, under the rest of the name."""
        return under(prefix, self.totals)

    def _flat(self, name: str, values: Mapping[str, Weighted]) -> list[Tensor]:
        like: dict[str, Any] = {"dtype": torch.float64, "device": self.exact.device}
        if name not in values:
            return [torch.zeros(length(self.layout[name]), **like)]
        return [part.detach().to(**like).reshape(-1) for part in (values[name].total, values[name].weight)]


Shapes = tuple[torch.Size, torch.Size]
Layout = dict[str, Shapes]


def merged(first: Layout, second: Layout) -> Layout:
    """Both layouts in one, by ascending names.

    Raises:
        ArithmeticError: a name has another shape in the second.
    """
    for name in first.keys() & second.keys():
        if first[name] != second[name]:
            one, other = (tuple(map(tuple, layout[name])) for layout in (first, second))
            raise ArithmeticError(f"{name} has the shape {other}, and {one} before")
    return dict(sorted((first | second).items()))


def length(shapes: Shapes) -> int:
    """The numbers of a total and its weight."""
    return sum(shape.numel() for shape in shapes)


def offsets(layout: Layout) -> tuple[dict[str, int], int]:
    """Where each name's numbers begin in the flat vector, and its length."""
    begins, size = {}, 0
    for name, shapes in layout.items():
        begins[name] = size
        size += length(shapes)
    return begins, size


def under(prefix: str, values: Mapping[str, Value]) -> dict[str, Value]:
    """The entries whose names begin with ``prefix/``, under the rest of the name."""
    return {name.removeprefix(f"{prefix}/"): v for name, v in values.items() if name.startswith(f"{prefix}/")}


def means(values: Mapping[str, Weighted]) -> dict[str, Tensor]:
    """The mean by name."""
    return {name: value.mean() for name, value in values.items()}


def tensors(module: nn.Module) -> State:
    """The live tensors of a module's state dict by name, in its order; a tied tensor is named once."""
    found: State = {}
    seen: set[int] = set()
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and id(value) not in seen:
            seen.add(id(value))
            found[name] = value
    return found


@torch.no_grad()
def copy_into(live: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Copy ``state`` into the tensors of ``live`` in place; names that ``state`` lacks stay as they are."""
    names = [name for name in live if name in state]
    if names:
        torch._foreach_copy_([live[name] for name in names], [state[name] for name in names])


def clone(state: Mapping[str, Tensor]) -> State:
    """A detached copy."""
    return {name: value.detach().clone() for name, value in state.items()}


def select(state: Mapping[str, Tensor], names: Iterable[str]) -> State:
    """The entries of ``state`` called ``names``, in that order."""
    return {name: state[name] for name in names}


def difference(new: Mapping[str, Tensor], old: Mapping[str, Tensor]) -> State:
    """``new - old`` in float64, where the difference of two float32 numbers is practically exact."""
    wide_new = [new[name].detach().double() for name in new]
    wide_old = [old[name].detach().double() for name in new]
    return dict(zip(new, torch._foreach_sub(wide_new, wide_old), strict=True)) if new else {}


@torch.no_grad()
def weigh(values: list[Tensor], weight: float) -> list[Tensor]:
    """``weight`` times each of the tensors, in float64."""
    return list(torch._foreach_mul([value.detach().double() for value in values], float(weight))) if values else []


def norm(state: Mapping[str, Tensor]) -> Tensor:
    """Euclidean norm over all entries; 0 for none."""
    norms = torch._foreach_norm(list(state.values())) if state else [torch.zeros(1)]
    return torch.linalg.vector_norm(torch.stack(list(norms)))


def num_bytes(found: Any) -> int:
    """Bytes of the tensors of a state, or of nested dictionaries and lists."""
    if isinstance(found, Tensor):
        return found.numel() * found.element_size()
    parts = found.values() if isinstance(found, Mapping) else found if isinstance(found, (list, tuple)) else ()
    return sum(num_bytes(part) for part in parts)
