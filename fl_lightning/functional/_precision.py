"""Losses are computed in float32 at least, also inside autocast, and stay in the graph where they vanish."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from itertools import chain
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Tensor])


def in_full_precision(function: Function) -> Function:
    """Leave autocast for the call, and widen its half-precision arguments to float32; float64 stays."""

    @wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Tensor:
        device = next(arg.device.type for arg in chain(args, kwargs.values()) if isinstance(arg, Tensor))
        with torch.autocast(device, enabled=False):
            return function(*map(_widen, args), **{name: _widen(value) for name, value in kwargs.items()})

    return cast(Function, wrapped)


def linked_zero(*tensors: Tensor) -> Tensor:
    """A scalar 0 with gradient 0 in every argument, whatever the values: 0 times infinity would be nan."""
    return torch.stack([tensor.flatten()[:0].sum() for tensor in tensors]).sum()


def centered(x: Tensor) -> Tensor:
    """Rows ``(n, d)`` minus their mean; taking off the first row before makes equal rows exactly 0."""
    shifted = x - x[:1].detach()
    return shifted - shifted.mean(0)


def unit_scale(rows: Tensor, dim: int | None = None) -> tuple[Tensor, Tensor]:
    """Rows divided by their largest magnitude (along ``dim``), and that constant: squares stay in range."""
    magnitude = rows.detach().abs()
    scale = (magnitude.amax() if dim is None else magnitude.amax(dim)).clamp_min(torch.finfo(rows.dtype).tiny)
    return rows / scale, scale


def _widen(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_widen(part) for part in value]
    narrow = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if narrow else value
