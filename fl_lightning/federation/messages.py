"""Tensors and plain values as a message, and back. Nothing else is made of a message, whoever has sent it."""

from __future__ import annotations

import json
import math
from typing import Any

import torch
from torch import Tensor

from fl_lightning.federation.wire import LARGEST, BadMessageError, Packet, check_size

# containers within each other, and values in all of them together
DEEPEST, MOST_VALUES = 24, 2**20
PLAIN = (str, int, float, bool, type(None))
DTYPES = {
    name: getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "uint16", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    )
}


def encoded(value: Any) -> Packet:
    """Nested dictionaries, lists and tuples of tensors and plain values as a message.

    Raises:
        TypeError: there is something else in them; names it.
    """
    data: list[bytes] = []
    text = json.dumps(_encode(value, "", data), separators=(",", ":"))
    return Packet(text, b"".join(data))


def _encode(value: Any, path: str, data: list[bytes]) -> Any:
    """A value as JSON; the bytes of its tensors are appended to ``data``."""
    if isinstance(value, Tensor) and (kind := str(value.dtype).removeprefix("torch.")) in DTYPES:
        flat = value.detach().cpu().contiguous().reshape(-1)
        data.append(flat.view(torch.uint8).numpy().tobytes())
        return {"tensor": [kind, *value.shape]}
    if isinstance(value, dict):
        pairs = [(key, part, f"{path}/{key}" if path else str(key)) for key, part in value.items()]
        return {"dict": [[_plain_value(key, path), _encode(part, name, data)] for key, part, name in pairs]}
    if isinstance(value, (list, tuple)):
        parts = [_encode(part, f"{path}/{place}", data) for place, part in enumerate(value)]
        return parts if isinstance(value, list) else {"tuple": parts}
    return _plain_value(value, path)


def _plain_value(value: Any, path: str) -> Any:
    for kind in PLAIN:
        if type(value) is kind:
            return value
    if isinstance(value, (int, float, str)):  # of a subclass, as NumPy's float64
        return next(kind(value) for kind in (int, float, str) if isinstance(value, kind))
    raise TypeError(f"{path} is a {type(value).__name__}: messages hold tensors and plain values alone")


def decoded(packet: Packet, limit: int = LARGEST) -> Any:
    """The value that :func:`encoded` was given.

    Raises:
        BadMessageError: the message is of another form, too large or too deep, or has more or fewer numbers than it
            says.
    """
    check_size(packet.num_bytes, limit)
    try:
        tree = json.loads(packet.text)
    except (ValueError, RecursionError) as error:
        raise BadMessageError("the text of a message is not JSON") from error
    decoder = _Decoder(packet.data)
    value = decoder.decode(tree, 0)
    if len(decoder.rest):
        raise BadMessageError(f"the message holds {len(decoder.rest):,} undeclared bytes")
    return value


class _Decoder:
    """Makes a limited number of values of a message.

    Attributes:
        rest: the bytes that belong to no tensor so far.
    """

    def __init__(self, data: bytes) -> None:
        self.rest = memoryview(data)
        self._values = 0

    def decode(self, part: Any, depth: int) -> Any:
        self._values += 1
        if depth > DEEPEST or self._values > MOST_VALUES:
            raise BadMessageError(f"a message of more than {MOST_VALUES:,} values, or more than {DEEPEST} deep")
        if type(part) in PLAIN:
            return part
        if isinstance(part, list):
            return [self.decode(value, depth + 1) for value in part]
        (kind, inner), *others = part.items() or [("", None)]
        if isinstance(inner, list) and not others:
            if kind == "tensor":
                return self._tensor(next(iter(inner), None), inner[1:])
            if kind == "tuple":
                return tuple(self.decode(inner, depth))
            pairs = [pair for pair in inner if isinstance(pair, list) and len(pair) == 2 and type(pair[0]) in PLAIN]
            if kind == "dict" and len(pairs) == len(inner):
                return {key: self.decode(value, depth + 1) for key, value in pairs}
        raise BadMessageError("a message has a part of no known kind")

    def _tensor(self, kind: Any, shape: list[Any]) -> Tensor:
        dtype = DTYPES.get(kind) if isinstance(kind, str) else None
        if dtype is None or any(type(size) is not int or not 0 <= size <= LARGEST for size in shape):
            raise BadMessageError(f"a message has a tensor of the type {kind!r} and the shape {shape}")
        size = math.prod(shape) * dtype.itemsize
        if size > len(self.rest):
            raise BadMessageError(f"a message ends within a tensor of the type {kind!r} and the shape {shape}")
        numbers, self.rest = bytearray(self.rest[:size]), self.rest[size:]
        try:
            return torch.frombuffer(numbers, dtype=dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)
        except RuntimeError as error:  # an empty tensor of an impossible size
            raise BadMessageError(f"a message has a tensor of the shape {shape}") from error
