"""What a module and methods hold in their attributes, to find what a step of several clients changes there."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning.client.lightning.module_snapshot import MISSING, OWN, PLAIN, entries_of, held_by, server_tensors, walk
from fl_lightning.core.method import Method
from fl_lightning.functional.rows import is_mapped


def values_held(module: nn.Module, methods: Sequence[Method], known: Iterable[Any]) -> dict[tuple[int, str], Any]:
    """Return the contents of a module's and its methods' attributes by name, for :func:`changed_value`.

    Tensors and arrays are copied; server values and ``known`` objects are omitted.
    """
    contents = dict[tuple[int, str], Any]()
    visited_ids = {*map(id, known), *(id(tensor) for _, tensor in server_tensors(methods))}
    for place, root in enumerate((module, *methods)):
        for name, part in walk(root, visited_ids, type(root).__name__ if place else "self"):
            if isinstance(part, Tensor):
                # a tensor that a mapped step left behind can neither be read nor compared
                contents[place, name] = object() if is_mapped(part) else part.detach().clone()
            elif isinstance(part, np.ndarray):
                contents[place, name] = (part.dtype.str, part.tobytes())
            elif held_by(part) is None:
                contents[place, name] = part
            ignored = OWN if isinstance(part, nn.Module) else ()
            for key, value in entries_of(part):
                if isinstance(value, PLAIN) and key not in ignored:
                    contents[place, f"{name}.{key}"] = value
    return contents


def changed_value(before: Mapping[tuple[int, str], Any], after: Mapping[tuple[int, str], Any]) -> str | None:
    """The name of the first attribute that is new, missing, or holds another value; None where all are equal."""
    for key in {**before, **after}:
        earlier, later = before.get(key, MISSING), after.get(key, MISSING)
        if isinstance(earlier, Tensor) and isinstance(later, Tensor):
            is_same = earlier.dtype == later.dtype and torch.equal(earlier, later)
        else:
            is_same = earlier is later or (
                isinstance(earlier, (*PLAIN, tuple)) and type(earlier) is type(later) and earlier == later
            )
        if not is_same:
            return re.sub(r"\._(modules|buffers|parameters)\b", "", key[1])
    return None
