"""From which modules a run's objects come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn

from fl_lightning.client.stand_in import StandIn
from fl_lightning.records.hyperparameters import PLAIN

# what holds no object of the user's, or leads to all objects of the process
LEAVES = (*PLAIN, bytes, Tensor, np.ndarray, np.generic, StandIn)
# what torch keeps in a module beside its parts, such as hooks that lead to the whole run
KEPT_BY_TORCH = vars(nn.Module()).keys() - {"_modules"}
# of a longer container, the first items tell of which classes the others are
LOOKED_AT = 100


def modules_of(objects: Iterable[Any]) -> dict[str, set[str]]:
    """The modules that define the classes and functions of some objects and of all that these keep.

    Returns:
        By module, the outermost names of these classes and functions.
    """
    modules: dict[str, set[str]] = {}
    seen: dict[int, Any] = {}  # they are kept, since the number of one that is gone may be that of another
    waiting = list(objects)
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, LEAVES):
            continue
        seen[id(value)] = value
        for one in definitions_of(value):
            module, name = getattr(one, "__module__", None), getattr(one, "__qualname__", "")
            if isinstance(module, str):
                modules.setdefault(module, set()).add(name.split(".")[0])
        waiting += parts_of(value)
    return modules


def definitions_of(value: Any) -> Iterable[Any]:
    """The classes and functions that say what an object does."""
    if isinstance(value, FunctionType):
        return [value]
    return value.__mro__ if isinstance(value, type) else type(value).__mro__


def parts_of(value: Any) -> Iterator[Any]:
    """What an object keeps."""
    if isinstance(value, (type, ModuleType)):
        return
    if isinstance(value, dict):
        yield from list(value.values())[:LOOKED_AT]
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from list(value)[:LOOKED_AT]
    elif isinstance(value, MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, FunctionType):
        yield from (value.__defaults__, value.__kwdefaults__, *contents_of(value))
    yield from (one for name, one in getattr(value, "__dict__", {}).items() if name not in KEPT_BY_TORCH)


def contents_of(function: FunctionType) -> Iterator[Any]:
    """The values of the variables around a function that it uses."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # it has none yet
            yield cell.cell_contents
