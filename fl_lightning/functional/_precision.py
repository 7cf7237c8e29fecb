"""Losses are computed in float32 at least, also inside autocast."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor


def in_full_precision(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Leave autocast for the call, and widen its half-precision arguments to float32; float64 stays."""

    @wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Tensor:
        device = next(arg.device.type for arg in args if isinstance(arg, Tensor))
        with torch.autocast(device, enabled=False):
            return function(*map(_widen, args), **{name: _widen(value) for name, value in kwargs.items()})

    return wrapped


def _widen(value: Any) -> Any:
    narrow = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if narrow else value
