"""Arithmetic on ``{name: tensor}`` and on what travels: a state goes down to a client, sums come up.

Everything that a client sends is a total and a weight. The server only adds and divides once, in float64
and in the order of the names, so one process and several compute the same thing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

State = dict[str, Tensor]


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

    def __add__(self, other: Weighted) -> Weighted:
        return Weighted(self.total + other.total, self.weight + other.weight)

    def mean(self) -> Tensor:
        """``total / weight``; 0 where nothing was added."""
        empty = self.weight == 0
        return torch.where(empty, 0.0, self.total / torch.where(empty, 1.0, self.weight))


class Sums:
    """Running :class:`Weighted` totals by name; memory does not grow with the number of clients."""

    def __init__(self) -> None:
        self.totals: dict[str, Weighted] = {}

    def add(self, name: str, value: Weighted) -> None:
        held = self.totals.get(name)
        self.totals[name] = value if held is None else held + value

    def merge(self, other: Sums, prefix: str = "") -> None:
        for name, value in other.totals.items():
            self.add(prefix + name, value)

    def means(self) -> dict[str, Tensor]:
        return {name: value.mean() for name, value in self.totals.items()}


class StateSum:
    """The running weighted sum of states with equal keys, in float64."""

    def __init__(self) -> None:
        self.total: State = {}
        self.weight = 0.0

    def add(self, state: State, weight: float) -> None:
        if not self.total:
            self.total = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in state.items()}
        if state:
            torch._foreach_add_(list(self.total.values()), list(state.values()), alpha=weight)
        self.weight += weight

    def mean(self) -> State:
        if not self.total or not self.weight:
            return {}
        return dict(zip(self.total, torch._foreach_div(list(self.total.values()), self.weight), strict=True))


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


def norm(state: Mapping[str, Tensor]) -> Tensor:
    """Euclidean norm over all entries; 0 for none."""
    norms = torch._foreach_norm(list(state.values())) if state else [torch.zeros(1)]
    return torch.linalg.vector_norm(torch.stack(list(norms)))


def num_bytes(state: Mapping[str, Tensor]) -> int:
    """Bytes of the entries of a state."""
    return sum(value.numel() * value.element_size() for value in state.values())
