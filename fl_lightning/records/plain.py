"""What a file may hold that is read with ``weights_only=True``: tensors and plain values."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.errors import require

VALUES = (str, bytes, int, float, complex, bool, type(None), torch.Size, torch.dtype, torch.device)
CONTAINERS = (list, tuple, set)


def is_storable(value: Any) -> bool:
    """Whether a value is a tensor or plain, or a container of such; subclasses of these types are not."""
    if type(value) in (dict, OrderedDict):
        return all(map(is_storable, value.keys())) and all(map(is_storable, value.values()))
    if type(value) in CONTAINERS:
        return all(map(is_storable, value))
    return type(value) in (Tensor, nn.Parameter, *VALUES)


def require_storable(values: Mapping[str, Any], hook: str) -> None:
    """Refuse what a hook of the user's gives for a file, where the file could not be read again.

    Raises:
        UsageError: a value holds something else; names its key.
    """
    for key, value in values.items():
        hint = (
            f"a {type(value).__name__} is not of tensors and plain values; give these alone, such as its state_dict()"
        )
        require(is_storable(value), hook, key, hint)


def on_cpu(value: Any) -> Any:
    """Copies of the tensors of nested containers on the CPU, and everything else as it is."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        copied = copy.copy(value)  # a state dict's attributes too
        copied.update({key: on_cpu(one) for key, one in value.items()})
        return copied
    if type(value) in (list, tuple):
        return type(value)(map(on_cpu, value))
    return value
