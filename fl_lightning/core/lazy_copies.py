"""Copies of tensors on the CPU that share their memory until one of them is written to, whoever writes and however.

These are private functions of torch, as of torch 2.6 and 2.15, which copy the memory of a tensor at the first access
that may write to it. Only this module uses them. Where they are missing, or cannot share, all copies are ordinary ones.

On CUDA all copies are ordinary ones: in-place operations on lists of tensors, such as those of SGD and Adam, would
write to the shared memory (``const_data_ptr`` in ``MultiTensorApply.cuh`` of torch 2.11 and 2.14).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

_C: Any = torch._C
_is_lazy: Any = getattr(_C, "_is_cow_tensor", lambda value: False)


def lazy_copy(value: Tensor) -> Tensor:
    """Return a detached copy of a tensor, in the same memory if it is on the CPU and the tensor has all of it."""
    value = value.detach()
    if type(value) is Tensor and value.device.type == "cpu":
        with suppress(AttributeError, RuntimeError):  # refused for memory of NumPy or of a file
            if 0 < value.nbytes == value.untyped_storage().nbytes():
                return torch._lazy_clone(value)
    return value.clone()


def is_lazy(value: Tensor) -> bool:
    """Whether a tensor is a lazy copy, or has one, and has not been written to since."""
    return type(value) in (Tensor, nn.Parameter) and _is_lazy(value)


def share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether one of two tensors is a lazy copy of the other, and neither has been written to: they are equal."""
    if not (is_lazy(a) and is_lazy(b)):
        return False
    # the address is that of the storage
    if _C._data_address(a) != _C._data_address(b) or a.storage_offset() != b.storage_offset():
        return False
    return (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())


def lazy_entries(state: Mapping[str, Tensor]) -> set[str]:
    """The names of the lazy copies in a state, as :func:`is_lazy` tells of each."""
    return {name for name, value in state.items() if type(value) in (Tensor, nn.Parameter) and _is_lazy(value)}


def written_entries(state: Mapping[str, Tensor], before: Mapping[str, Tensor], names: Iterable[str]) -> list[str]:
    """The ``names`` of entries that may differ between two states: all but those that :func:`share_memory`."""
    lazy = lazy_entries(state)
    return [name for name in names if name not in lazy or not share_memory(state[name], before[name])]


def readable(value: Tensor, memories: dict[int, Tensor]) -> Tensor:
    """The tensor, or in the place of a lazy copy another one in its memory, for code that only reads.

    ``torch.save`` and NumPy ask for an address that they could write to, which would make an ordinary copy.
    ``memories`` has the memory by address, so that tensors that share it do so in the result.
    """
    if not is_lazy(value):
        return value
    start, size = _C._data_address(value), value.untyped_storage().nbytes()  # of the storage
    if start not in memories:
        memories[start] = torch.frombuffer((ctypes.c_byte * size).from_address(start), dtype=torch.uint8)
    return memories[start].view(value.dtype).as_strided(value.shape, value.stride(), value.storage_offset())
