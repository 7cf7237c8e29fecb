"""Tensors and plain values: the contents of files and messages, which are read with ``weights_only=True``."""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

STORABLE_VALUES = (str, bytes, int, float, complex, bool, type(None), torch.Size, torch.dtype, torch.device)


def is_storable(value: Any) -> bool:
    """Return whether a value is a tensor, a plain value, or a container of these; subclasses do not count."""
    if type(value) in (dict, OrderedDict):
        return is_storable([*value.keys(), *value.values()])
    if type(value) in (list, tuple, set):
        return all(map(is_storable, value))
    return type(value) in (Tensor, nn.Parameter, *STORABLE_VALUES)


class _Pickler(pickle.Pickler):
    """Pickles NumPy arrays and numbers as tensors, since NumPy's own pickles are unsafe to read."""

    def reducer_override(self, value: Any) -> Any:
        number = isinstance(value, np.generic)
        if (number or type(value) is np.ndarray) and value.dtype.kind in "biufc":
            return as_numpy, (torch.from_numpy(np.array(value)), number)
        return NotImplemented


def as_numpy(tensor: Tensor, number: bool) -> Any:
    """Convert a tensor back to the NumPy array or number that :func:`packed` received."""
    return tensor.numpy()[()] if number else tensor.numpy()


def packed(value: Any) -> Tensor:
    """Serialize tensors, arrays and plain values to bytes ``(n,)`` for :func:`unpacked`."""
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_module=SimpleNamespace(__name__="pickle", Pickler=_Pickler))
    return torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8)


def unpacked(contents: bytes, messages: Iterable[type] = ()) -> Any:
    """Deserialize the bytes of :func:`packed`.

    Args:
        contents: the bytes.
        messages: further types that the bytes may contain.

    Raises:
        pickle.UnpicklingError: the bytes contain another type.
    """
    with torch.serialization.safe_globals([as_numpy, *messages]):
        return torch.load(io.BytesIO(contents), weights_only=True)


def on_cpu(value: Any) -> Any:
    """Return nested containers with their tensors copied to the CPU, and all other values unchanged."""
    return with_tensors(value, lambda tensor: tensor.detach().cpu())


def with_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of nested containers, with ``change`` applied to each tensor."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        copied = copy.copy(value)  # a state dict's attributes too
        copied.update({key: with_tensors(part, change) for key, part in value.items()})
        return copied
    if type(value) in (list, tuple):
        return type(value)(with_tensors(part, change) for part in value)
    return copy.copy(value) if type(value) is set else value
