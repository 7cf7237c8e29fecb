"""Arithmetic on lists of tensors, with one call for each operation.

These are the private functions ``torch._foreach_*`` on which torch's own optimizers build, as of torch 2.6 and 2.15.
Only this module uses them. All functions accept empty lists.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fl_lightning.functional.rows import is_transformed

Tensors = list[Tensor]


def add_(tensors: Tensors, addends: Tensors, scale: Any = 1.0) -> None:
    """Add ``scale`` times the addends, in place."""
    differs = isinstance(scale, Tensor)
    if differs or any(map(is_transformed, (*tensors, *addends))):  # torch.vmap does not support operations on lists
        for tensor, addend in zip(tensors, addends, strict=True):
            tensor.add_(addend * scale if differs else addend, alpha=1 if differs else scale)
    elif tensors:
        torch._foreach_add_(tensors, addends, alpha=scale)


def copy_(tensors: Tensors, values: Tensors) -> None:
    """Copy the values into the tensors, in place."""
    if tensors:
        torch._foreach_copy_(tensors, values)


def subtract(tensors: Tensors, subtrahends: Tensors) -> list[Tensor]:
    """The differences."""
    if any(map(is_transformed, (*tensors, *subtrahends))):
        pairs = zip(tensors, subtrahends, strict=True)
        return [tensor - subtrahend for tensor, subtrahend in pairs]
    return list(torch._foreach_sub(tensors, subtrahends)) if tensors else []


def multiply(tensors: Tensors, factor: float) -> list[Tensor]:
    """``factor`` times each tensor."""
    return list(torch._foreach_mul(tensors, factor)) if tensors else []


def norms(tensors: Tensors, order: float = 2.0) -> list[Tensor]:
    """The norm of each tensor, a scalar, 0 of an empty one; an infinite ``order`` gives the largest magnitude."""
    filled = [tensor if tensor.numel() else tensor.new_zeros(1) for tensor in tensors]
    return list(torch._foreach_norm(filled, ord=order)) if tensors else []
