"""How methods read a tensor: as rows, flattened but never pooled, in full precision, and mapped or not.

Rows are as ``torch.flatten`` makes them: https://docs.pytorch.org/docs/stable/generated/torch.flatten.html
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch._C import _functorch

Function = TypeVar("Function", bound=Callable[..., Tensor])
HALF = (torch.float16, torch.bfloat16)


def as_rows(z: Tensor) -> Tensor:
    """A row for each example: all dimensions but the first are flattened.

    So are the tokens ``(B, T, d)`` of a sequence and the maps ``(B, C, H, W)`` of a convolution. Nothing is pooled, as
    no rule could tell which dimension holds the features. To pool, bind the tap to a submodule that does, or to an
    output that is pooled already.

    Args:
        z: ``(B, ...)``.

    Returns:
        ``(B, d)``; ``(B, 1)`` for a vector ``(B,)``.

    Example:
        >>> import torch
        >>> as_rows(torch.zeros(8, 16, 4, 4)).shape, as_rows(torch.zeros(8)).shape
        (torch.Size([8, 256]), torch.Size([8, 1]))
    """
    return z.flatten(1) if z.ndim > 1 else z[:, None]


def in_full_precision(function: Function) -> Function:
    """Run ``function`` outside autocast, with half-precision arguments converted to float32.

    Arguments in float32 and float64 keep their precision.
    """

    @wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Tensor:
        values = [*args, *kwargs.values()]
        tensors = [value for value in values if isinstance(value, Tensor)]
        device = tensors[0].device.type
        # mostly all tensors are in float32 or float64, and none is in a list
        has_half = any(tensor.dtype in HALF for tensor in tensors)
        if has_half or any(isinstance(value, (list, tuple)) for value in values):
            args = tuple(map(_widen, args))
            kwargs = {name: _widen(value) for name, value in kwargs.items()}
        if not torch.is_autocast_enabled(device):
            return function(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            return function(*args, **kwargs)

    return cast(Function, wrapped)


def linked_zero(*tensors: Tensor) -> Tensor:
    """A scalar 0 with gradient 0 in every argument, whatever their values.

    Multiplying by 0 would not do: 0 times infinity is nan.
    """
    return torch.stack([tensor.flatten()[:0].sum() for tensor in tensors]).sum()


def centered(x: Tensor) -> Tensor:
    """Rows ``(n, d)`` minus their mean.

    The first row is subtracted before the mean, so that equal rows give exactly 0.
    """
    shifted = x - x[:1].detach()
    return shifted - shifted.mean(0)


def unit_scale(rows: Tensor, dim: int | None = None) -> tuple[Tensor, Tensor]:
    """Rows divided by their largest magnitude (along ``dim``), so that squares stay in range, and that magnitude.

    The magnitude is a constant to the gradient.
    """
    magnitude = rows.detach().abs()
    scale = (magnitude.amax() if dim is None else magnitude.amax(dim)).clamp_min(torch.finfo(rows.dtype).tiny)
    return rows / scale, scale


def _widen(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_widen(part) for part in value]
    narrow = isinstance(value, Tensor) and value.dtype in HALF
    return value.float() if narrow else value


# Inside ``torch.vmap`` a function sees one client, and the tensor holds all of them: no branch and no shape may depend
# on values, and ``requires_grad`` is always False, as gradients are taken outside. Only these functions use a private
# part of PyTorch. The public ways are a ``vmap`` method of an ``autograd.Function``, which costs time at each call, and
# ``torch.func.debug_unwrap``, which 2.6 does not have.
def is_transformed(x: Tensor) -> bool:
    """Whether ``x`` belongs to a function transform, such as ``torch.vmap`` or ``torch.func.grad``."""
    return _functorch.is_functorch_wrapped_tensor(x)


def is_mapped(x: Tensor) -> bool:
    """Whether ``x`` is mapped by ``torch.vmap``."""
    return _functorch.is_batchedtensor(x)


def needs_gradient(x: Tensor) -> bool:
    """Return whether ``x``, mapped or not, requires a gradient."""
    while is_mapped(x):
        x = _functorch.get_unwrapped(x)
    return x.requires_grad
