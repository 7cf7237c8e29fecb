"""Copies of tensors that share their memory until one of them is written to, whoever writes and however.

These are private functions of torch, as of torch 2.6 and 2.15, which copy the memory of a tensor at the first access
that may write to it. Only this module uses them. Where they are missing, or cannot share, all copies are ordinary ones.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

_copy: Any = getattr(torch, "_lazy_clone", None)
# of the storage, wherever the tensor begins in it
_address: Any = getattr(torch._C, "_data_address", None)
_is_lazy: Any = getattr(torch._C, "_is_cow_tensor", None)
SUPPORTED = None not in (_copy, _address, _is_lazy)


def lazy_copy(value: Tensor) -> Tensor:
    """A detached copy of a tensor, in the same memory if the tensor has all of it, on a CPU or a GPU of CUDA."""
    value = value.detach()
    if SUPPORTED and value.device.type in ("cpu", "cuda") and 0 < value.nbytes == value.untyped_storage().nbytes():
        try:
            return _copy(value)
        except RuntimeError:  # memory of NumPy or of a file
            pass
    return value.clone()


def is_lazy(value: Tensor) -> bool:
    """Whether a tensor is or was a lazy copy, or has one, and has not been written to since."""
    return SUPPORTED and _is_lazy(value)


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Whether one of two tensors is a lazy copy of the other, and neither has been written to: they are equal."""
    return (
        is_lazy(one)
        and is_lazy(other)
        and _address(one) == _address(other)
        and (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        and one.storage_offset() == other.storage_offset()
    )


def readable(value: Tensor, known: dict[int, Tensor]) -> Tensor:
    """The tensor, or in the place of a lazy copy another one in its memory, for code that only reads.

    ``torch.save`` and NumPy ask for an address that they could write to, which would make an ordinary copy. ``known``
    has the memory by address, so that tensors that share it do so in the result.
    """
    if not is_lazy(value) or value.device.type != "cpu":
        return value
    start = _address(value)
    if start not in known:
        memory = (ctypes.c_byte * value.untyped_storage().nbytes()).from_address(start)
        known[start] = torch.frombuffer(memory, dtype=torch.uint8)
    return known[start].view(value.dtype).as_strided(value.shape, value.stride(), value.storage_offset())
