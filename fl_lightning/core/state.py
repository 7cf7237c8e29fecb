"""Arithmetic on states: ``{name: tensor}``, as they go down to clients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.core import foreach
from fl_lightning.core.lazy_copies import lazy_copy, lazy_entries, written_entries
from fl_lightning.core.weighted import LazyDifference

State = dict[str, Tensor]


class Gradients(State):
    """The gradient of a loss by name of the parameter, with the ``loss``, a scalar; see :meth:`.Client.gradients`."""

    loss: Tensor


# integers by their bytes
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tensors(module: nn.Module) -> State:
    """The live tensors of a module's state dict by name, in its order; a tied tensor is named once."""
    live: State = {}
    ids: set[int] = set()
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and id(value) not in ids:
            ids.add(id(value))
            live[name] = value
    return live


def uncompiled_names(state: Any) -> Any:
    """A state dict by the names that its entries have without ``torch.compile``, which wraps submodules."""
    if not any("_orig_mod." in f"{name}." for name in state):
        return state
    renamed = type(state)((uncompiled_name(name), value) for name, value in state.items())
    if hasattr(state, "_metadata"):
        renamed._metadata = uncompiled_names(state._metadata)
    return renamed


def uncompiled_name(name: str) -> str:
    """The name of an entry, or the path of a submodule, without the part that ``torch.compile`` adds."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


@torch.no_grad()
def copy_into(live: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Copy ``state`` into the tensors of ``live`` in place; other entries do not change."""
    names = written_entries(live, state, [name for name in live if name in state])
    foreach.copy_([live[name] for name in names], [state[name] for name in names])


def clone(state: Mapping[str, Tensor]) -> State:
    """A detached copy of a state, in which lazy copies stay lazy."""
    lazy = lazy_entries(state)
    return {name: lazy_copy(value) if name in lazy else value.detach().clone() for name, value in state.items()}


def changed_entries(state: Mapping[str, Tensor], before: Mapping[str, Tensor], names: Iterable[str]) -> list[str]:
    """Return the ``names`` of entries that differ between two states; lazy copies of each other are not compared.

    A GPU is waited for once.
    """
    names = written_entries(state, before, names)
    differ = [(state[name] != before[name]).any() for name in names]
    answers = torch.stack(differ).tolist() if names else []
    return [name for name, differs in zip(names, answers, strict=True) if differs]


def is_frozen(value: Tensor) -> bool:
    """Whether an entry of a module's state is a frozen parameter."""
    return isinstance(value, nn.Parameter) and not value.requires_grad


def select(state: Mapping[str, Tensor], names: Iterable[str]) -> State:
    """Return the entries ``names`` of ``state``, in this order."""
    return {name: state[name] for name in names}


def norm(state: Mapping[str, Tensor]) -> Tensor:
    """Euclidean norm over all entries; 0 for none."""
    return torch.linalg.vector_norm(torch.stack(entry_norms(state) or [torch.zeros(())]))


def entry_norms(state: Mapping[str, Tensor], order: float = 2.0) -> list[Tensor]:
    """The norm of each entry; those of a lazy :class:`LazyDifference` are computed in blocks."""
    if isinstance(state, LazyDifference):
        return [size for block in state.blocks() for size in foreach.norms(block, order)]
    return foreach.norms(list(state.values()), order)


def as_floats(scalars: Sequence[Tensor]) -> list[float]:
    """Return the numbers in scalar tensors, for which a GPU is waited for once."""
    if not scalars:
        return []
    device = scalars[0].device
    return torch.stack([scalar.double().to(device) for scalar in scalars]).tolist()


def first_not_finite(state: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> str | None:
    """Return the first entry with a nan or infinite number that was finite ``before``; None if all are finite.

    An unchanged mask of infinities is allowed.
    """
    floats = {name: value for name, value in state.items() if value.is_floating_point()}
    values = {name: value for name, value in floats.items() if value.numel()}
    if all(map(math.isfinite, as_floats(entry_norms(values, math.inf)))):
        return None
    for name, value in values.items():
        if bool((~value.isfinite() & before[name].isfinite()).any()):
            return name
    return None


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same shape, type and bits, on any devices."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    kind = _INTEGERS[a.element_size()]
    return torch.equal(a.detach().cpu().view(kind), b.detach().cpu().view(kind))


def checksums(state: Mapping[str, Tensor]) -> dict[str, int]:
    """For each entry, the sum of its numbers as integers, which one changed bit changes."""
    integers = [value.detach().view(_INTEGERS[value.element_size()]) for value in state.values()]
    # 32 bits wrap around: adding them up in 64 is slower
    sums = []
    for value in integers:
        kind = value.dtype if value.element_size() > 2 else None
        sums.append(value.sum(dtype=kind).long())
    return dict(zip(state, torch.stack(sums).tolist() if sums else [], strict=True))


def num_bytes(values: Any) -> int:
    """Bytes of the tensors of a state, or of nested dictionaries and lists."""
    if isinstance(values, Tensor):
        return values.numel() * values.element_size()
    parts = values.values() if isinstance(values, Mapping) else values if isinstance(values, (list, tuple)) else ()
    return sum(num_bytes(part) for part in parts)


def tensors_by_path(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in nested dictionaries, each by its path."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield from tensors_by_path(part, f"{path}/{name}" if path else str(name))
