"""Tensors and plain values as a message, and back: the codec of workers, with bounds on what a stranger may send."""

from __future__ import annotations

import io
import json
import zipfile
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.federation.wire import LARGEST, BadMessageError, check_size
from fl_lightning.records.plain import packed, unpacked, with_tensors

# containers within each other, and values in all of them together
DEEPEST, MOST_VALUES = 24, 2**20
PLAIN = (str, bytes, int, float, complex, type(None), torch.Size, np.generic, np.ndarray)


def encoded(value: Any) -> bytes:
    """Nested dictionaries, lists and tuples of tensors and plain values as a message.

    Raises:
        BadMessageError: there is something else in them; names it.
    """
    # copies, since torch saves with a part of a tensor the whole
    value = with_tensors(value, lambda tensor: tensor.detach().cpu().clone())
    check_contents(value, LARGEST)
    return packed(value).numpy().tobytes()


def decoded(message: bytes, limit: int = LARGEST) -> Any:
    """The value that :func:`encoded` was given; also reads the JSON of a relay, which has no torch.

    Raises:
        BadMessageError: the message is too large, too deep or holds anything but tensors and plain values.
    """
    check_size(len(message), limit)
    try:
        if message[:1] == b"{":
            value = json.loads(message)
        else:
            with zipfile.ZipFile(io.BytesIO(message)) as archive:  # torch.save compresses nothing
                check_size(sum(record.file_size for record in archive.infolist()), len(message))
            value = unpacked(message)
    except BadMessageError:
        raise
    except Exception as error:  # zipfile and torch raise errors of many types
        raise BadMessageError("a message is not of tensors and plain values") from error
    check_contents(value, len(message))
    return value


def check_contents(value: Any, room: int) -> None:
    """Refuse other than dense tensors and plain values, tensors of over ``room`` bytes in all, and deep or many values.

    A message may name one tensor or list many times, or expand a number to a huge tensor.
    """
    number, todo = 0, [(value, 0)]
    while todo:
        part, depth = todo.pop()
        number += 1
        if isinstance(part, Tensor) and part.layout == torch.strided and part.device.type == "cpu":
            room -= part.numel() * part.element_size()
        elif isinstance(part, dict):
            todo += [(inner, depth + 1) for pair in part.items() for inner in pair]
        elif isinstance(part, (list, tuple, set)):
            todo += [(inner, depth + 1) for inner in part]
        elif not isinstance(part, PLAIN):
            raise BadMessageError(f"a message of tensors and plain values cannot hold a {type(part).__name__}")
        if depth > DEEPEST or number > MOST_VALUES or room < 0:
            hint = f"more than {MOST_VALUES:,} values, more than {DEEPEST} deep, or larger tensors than its bytes"
            raise BadMessageError(f"a message holds {hint}")
