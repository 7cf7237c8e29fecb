"""Whether a tensor is mapped: inside ``torch.vmap``, where a function sees one client and the tensor holds all of them.

There, nothing may depend on values, as they differ from client to client: neither a branch nor a shape. And
``requires_grad`` is always False, as gradients are taken outside.

This is the one place that uses a private part of PyTorch. The public ways are a ``vmap`` method of an
``autograd.Function``, which costs time at each call, and ``torch.func.debug_unwrap``, which 2.6 does not have.
"""

from __future__ import annotations

from torch import Tensor
from torch._C import _functorch


def is_mapped(x: Tensor) -> bool:
    """Whether ``x`` is mapped by ``torch.vmap``."""
    return _functorch.is_batchedtensor(x)


def needs_gradient(x: Tensor) -> bool:
    """Whether a gradient is asked of ``x``, mapped or not."""
    while is_mapped(x):
        x = _functorch.get_unwrapped(x)
    return x.requires_grad
