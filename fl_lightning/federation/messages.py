"""Tensors and plain values as a message, and back. Nothing but these is made of what comes, whoever has sent it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.federation.wire import LARGEST, Array, BadMessageError, Packet, checked

# containers within each other, and values in all of them together
DEEPEST, MOST_VALUES = 24, 2**20
PLAIN = (str, int, float, bool, type(None))
# NumPy has no bfloat16: its bits travel as integers
AS_INTEGERS = {("bfloat16", "uint16"): torch.bfloat16}


def encoded(value: Any) -> Packet:
    """Nested dictionaries, lists and tuples of tensors and plain values as a message.

    Raises:
        TypeError: there is something else in them; names it.
    """
    arrays: dict[str, Array] = {}
    text = json.dumps(_encode(value, "", arrays), separators=(",", ":"))
    return Packet(text, arrays)


def _encode(value: Any, path: str, arrays: dict[str, Array]) -> Any:
    if isinstance(value, Tensor):
        name = path
        while name in arrays:  # two paths may read the same
            name += "'"
        kind, array = _array(value)
        arrays[name] = array
        return {"tensor": name, "dtype": kind}
    if isinstance(value, dict):
        items = [
            [_plain_value(key, path), _encode(part, f"{path}/{key}" if path else str(key), arrays)]
            for key, part in value.items()
        ]
        return {"dict": items}
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_encode(part, f"{path}/{place}", arrays) for place, part in enumerate(value)]}
    return _plain_value(value, path)


def _plain_value(value: Any, path: str) -> Any:
    for kind in PLAIN:
        if type(value) is kind:
            return value
    if isinstance(value, (int, float, str)) and not isinstance(value, bool):  # of a subclass, as NumPy's float64
        return next(kind(value) for kind in (int, float, str) if isinstance(value, kind))
    raise TypeError(f"{path} is a {type(value).__name__}: messages hold tensors and plain values alone")


def _array(tensor: Tensor) -> tuple[str, Array]:
    """The type of a tensor, and its numbers."""
    tensor = tensor.detach().cpu().contiguous()
    kind = str(tensor.dtype).removeprefix("torch.")
    shape = tuple(tensor.shape)
    for (name, stored), dtype in AS_INTEGERS.items():
        if tensor.dtype == dtype:
            return name, Array(stored, shape, tensor.view(torch.int16).numpy().tobytes())
    return kind, Array(kind, shape, tensor.numpy().tobytes())


def decoded(packet: Packet, limit: int = LARGEST) -> Any:
    """What :func:`encoded` was given.

    Raises:
        BadMessageError: the message is of another form, too large or too deep, or has arrays that it does not name.
    """
    checked(packet, limit)
    try:
        tree = json.loads(packet.text)
    except (ValueError, RecursionError) as error:
        raise BadMessageError("the text of a message is not JSON") from error
    reader = _Reader(packet.arrays)
    value = reader.decode(tree, 0)
    if reader.left:
        raise BadMessageError(f"the message holds the undeclared array {next(iter(reader.left))!r}")
    return value


class _Reader:
    """Makes values of the parts of a message, of which there are not too many."""

    def __init__(self, arrays: dict[str, Array]) -> None:
        self.left = dict(arrays)
        self._values = 0

    def decode(self, part: Any, depth: int) -> Any:
        self._values += 1
        if depth > DEEPEST or self._values > MOST_VALUES:
            raise BadMessageError(f"a message of more than {MOST_VALUES:,} values, or more than {DEEPEST} deep")
        if type(part) in PLAIN:
            return part
        if not isinstance(part, dict):
            raise BadMessageError("a message has a list where a value is")
        if {"tensor", "dtype"} == part.keys():
            return self._tensor(part["tensor"], part["dtype"])
        if len(part) != 1:
            raise BadMessageError("a message has a part of no known kind")
        ((kind, inner),) = part.items()
        if kind == "dict" and isinstance(inner, list):
            pairs = [item for item in inner if isinstance(item, list) and len(item) == 2 and type(item[0]) in PLAIN]
            if len(pairs) == len(inner):
                return {key: self.decode(value, depth + 1) for key, value in pairs}
        if kind in ("list", "tuple") and isinstance(inner, list):
            values = [self.decode(value, depth + 1) for value in inner]
            return values if kind == "list" else tuple(values)
        raise BadMessageError("a message has a part of no known kind")

    def _tensor(self, name: Any, kind: Any) -> Tensor:
        array = self.left.pop(name, None) if isinstance(name, str) else None
        if array is None:
            raise BadMessageError(f"the message lacks the array {name!r}")
        numbers = np.ndarray(array.shape, np.dtype(array.dtype), array.data).copy()
        if (kind, array.dtype) in AS_INTEGERS:
            return torch.from_numpy(numbers.view(np.int16)).view(AS_INTEGERS[kind, array.dtype])
        if kind != array.dtype:
            raise BadMessageError(f"the array {name!r} is {array.dtype}, and not {kind}")
        return torch.from_numpy(numbers)
