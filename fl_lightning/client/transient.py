"""What is in no state dict begins each visit as it was: what a module has outside of its own, and what methods hold."""

from __future__ import annotations

import copy
import itertools
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import is_
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from lightning.fabric.loggers import Logger
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.hooks import RemovableHandle

from fl_lightning import namespaces
from fl_lightning.data.loaders import leaves_of
from fl_lightning.errors import ClientError, UsageError
from fl_lightning.method import Method, ServerValue
from fl_lightning.state import Weighted, tensors

# attributes that torch and Lightning keep themselves, and the functions which a run puts into the module
OWN = {*vars(nn.Module()), *vars(LightningModule()), "log", "log_dict", "forward"}
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
HOOKS_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")
# settings of the process that change results: what reads each, and what sets it
PROCESS_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.get_num_threads, torch.set_num_threads),
)
CONTAINERS = (list, dict, set, deque)
NESTED = (tuple, *CONTAINERS)
VALUES = (str, int, float, bool, type(None))
# objects that are looked into, whoever wrote their classes
WITH_PARTS = (nn.Module, SimpleNamespace, Optimizer, LRScheduler, Method, Weighted)
# objects that are never looked into: what is read and what is written, which may be large or open
APART = (Dataset, DataLoader, Sampler, Logger, namespaces.LightningDataModule, type)
# where classes are not the user's
OTHERS_CODE = {
    *sys.stdlib_module_names,
    *("torch", "numpy", "lightning", "lightning_fabric", "pytorch_lightning", "fl_lightning"),
}


class Transient:
    """Restores a module's modes, gradient flags, attributes and non-persistent buffers.

    Attributes are those of every submodule. Each is the same object again, since others may refer to it: a closure,
    or another submodule. Data get their contents back in place: tensors, arrays, containers, random generators,
    torchmetrics objects, modules outside of the state dict, optimizers and schedulers that the module keeps, and
    objects of the user's own classes. Attributes that are new are removed. Parameters that the state dict leaves out
    get their values back, too.

    Args:
        module: the module, as each visit shall find it.
        apart: objects in its attributes that are left alone.
    """

    def __init__(self, module: nn.Module, apart: Iterable[Any] = ()) -> None:
        state = {id(value) for value in tensors(module).values()}
        parts, parameters = list(module.modules()), list(module.parameters())
        self._modes = [(vars(part), part.training) for part in parts]
        self._trained = [(parameter, parameter.requires_grad) for parameter in parameters]
        saved = [(vars(part), OWN) for part in parts] + [(part._buffers, in_state(part, state)) for part in parts]
        # each dictionary of attributes or buffers, with what was in it, and the names that are left alone
        self._entries = [
            (entries, {name: value for name, value in entries.items() if name not in ignored}, {*entries, *ignored})
            for entries, ignored in saved
        ]
        known = {*state, *map(id, parts), *map(id, apart)}
        values = [*parameters, *(value for _, before, _ in self._entries for value in before.values())]
        self._contents = [restore for value in values for restore in contents(value, known)]

    def restore(self) -> None:
        """Bring back what was there when this object was made."""
        self.restore_modes()
        for parameter, trained in self._trained:
            if parameter.requires_grad is not trained:
                parameter.requires_grad_(trained)
        for entries, before, names in self._entries:
            for name in entries.keys() - names:
                del entries[name]
            entries.update(before)
        for restore in self._contents:
            restore()

    def restore_modes(self) -> None:
        """Put every submodule in the mode, training or evaluation, in which it was."""
        for attributes, mode in self._modes:
            attributes["training"] = mode


class Attributes:
    """The attributes of methods and of their classes, with all that is in them, as a server hook has left them.

    Tensors of server values are not copied: :meth:`Visit.written` says which hook of a client writes to one.

    Args:
        methods: the methods of a run.
        known: ids of the objects that are left alone: those of the module.

    Attributes:
        server: the tensors of server values, each with a name for errors.
        in_place: whether data are restored in place, to which something that a client sends or remembers may refer.
    """

    def __init__(self, methods: Sequence[Method], known: set[int]) -> None:
        own: list[Any] = [value for m in methods for kind in kinds_of(m) for value in vars(kind).values()]
        self.server: list[tuple[str, Tensor]] = []
        for method in methods:
            for name, value in vars(method).items():
                if isinstance(getattr(type(method), name, None), ServerValue):
                    tensors = [leaf for leaf in leaves_of(value) if isinstance(leaf, Tensor)]
                    self.server += [(f"{type(method).__name__}.{name}", tensor) for tensor in tensors]
                else:
                    own.append(value)
        seen = known | {id(tensor) for _, tensor in self.server}
        self._contents = [restore for value in own for restore in contents(value, seen)]
        self.in_place = bool(self._contents)
        self._contents += [restore for method in methods for restore in contents(method, seen)]

    def restore(self) -> None:
        """Bring it back."""
        for restore in self._contents:
            restore()


def contents(value: Any, known: set[int]) -> Iterator[Callable[[], object]]:
    """For each piece of data in a value, a function that gives it its present contents back.

    Args:
        value: any object.
        known: ids of the objects that are left alone; those that were met are added.
    """
    for part in objects_in(value, known):
        if isinstance(part, Tensor):
            # one with a graph, or with several elements in one place, is never changed in place
            spread = part.layout is torch.strided and 0 in part.stride() and part.numel() > 1
            if part.is_leaf and not spread:
                gradient = None if part.grad is None else part.grad.detach().clone()
                yield partial(refill_tensor, part, part.detach().clone(), part.requires_grad, gradient)
        elif isinstance(part, np.ndarray):
            yield from [partial(np.copyto, part, part.copy())] * part.flags.writeable
        elif isinstance(part, np.random.Generator):
            yield partial(setattr, part.bit_generator, "state", copy.deepcopy(part.bit_generator.state))
        elif isinstance(part, (torch.Generator, np.random.RandomState)):
            yield partial(part.set_state, part.get_state())  # type: ignore[arg-type]
        elif isinstance(part, random.Random):
            yield partial(part.setstate, part.getstate())
        else:
            held = held_by(part)
            if isinstance(held, CONTAINERS):
                yield partial(refill, held, copy.copy(held))
        for kind in kinds_of(part) if isinstance(part, Method) else ():
            yield from contents_of_class(kind, known)


def kinds_of(value: Any) -> list[type]:
    """The classes of an object, its own and those it inherits from, that are the user's."""
    return [kind for kind in type(value).__mro__ if is_own_class(kind)]


def contents_of_class(kind: type, known: set[int]) -> Iterator[Callable[[], object]]:
    """As :func:`contents`, for the attributes of a class."""
    if id(kind) in known:
        return
    known.add(id(kind))
    saved = dict(vars(kind))
    yield partial(reset_class, kind, saved)
    for value in saved.values():
        yield from contents(value, known)


def reset_class(kind: type, saved: Mapping[str, Any]) -> None:
    """Give a class its attributes back."""
    for name in changed(vars(kind), saved):
        if name in saved:
            setattr(kind, name, saved[name])
        elif not name.startswith("__"):  # Python adds such as __annotations__ when they are asked for
            delattr(kind, name)


def held_by(value: Any) -> Any:
    """The container of what a value holds, and what is restored: itself, or its attributes; else none.

    Attributes are those of modules, optimizers, and objects of the user's own classes.
    """
    if isinstance(value, NESTED):
        return value
    own = hasattr(value, "__dict__") and not isinstance(value, APART) and is_own_class(type(value))
    return vars(value) if own or isinstance(value, WITH_PARTS) else ()


def objects_in(value: Any, known: set[int]) -> Iterator[Any]:
    """A value and all that it holds, each once, but for the objects whose ids are ``known``."""
    if not isinstance(value, VALUES) and id(value) not in known:
        known.add(id(value))
        yield value
        held = held_by(value)
        for part in held.values() if isinstance(held, dict) else held:
            yield from objects_in(part, known)


def values_held(module: nn.Module, methods: Iterable[Method], known: Iterable[Tensor]) -> list[Any]:
    """What the attributes of a module, its parts and methods hold, to be compared by :func:`are_equal`.

    Tensors and arrays are copied; those of server values, and ``known`` ones, are left out.
    """
    methods, found, seen = list(methods), list[Any](), set(map(id, known))
    seen |= {id(tensor) for _, tensor in Attributes(methods, set(seen)).server}
    owners = [({k: v for k, v in vars(part).items() if k not in OWN}) for part in module.modules()]
    for value in (*owners, *map(vars, methods)):
        for part in objects_in(value, seen):
            if isinstance(part, Tensor):
                found.append(part.detach().clone())
            elif isinstance(part, np.ndarray):
                found.append(part.copy())
            elif (held := held_by(part)) or isinstance(part, NESTED):
                named = held.items() if isinstance(held, dict) else enumerate(held)
                found.append([(key, inner) for key, inner in named if isinstance(inner, VALUES)])
            else:
                found.append(part)
    return found


def are_equal(one: list[Any], other: list[Any]) -> bool:
    """Whether attributes hold the same values, and the same of other objects."""

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return a.dtype == b.dtype and torch.equal(a, b)
        if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
            return a.dtype == b.dtype and np.array_equal(a, b)
        return a is b or (type(a) is type(b) is list and repr(a) == repr(b))

    return len(one) == len(other) and all(map(same, one, other))


def refill_tensor(value: Tensor, saved: Tensor, trained: bool, gradient: Tensor | None) -> None:
    """Give a tensor its values, its ``requires_grad`` and its gradient back."""
    with torch.inference_mode(value.is_inference()), torch.no_grad():
        if value.shape == saved.shape and value.dtype == saved.dtype and value.device == saved.device:
            value.detach().copy_(saved)
        else:
            value.data = saved.clone()
    if value.requires_grad is not trained:
        value.requires_grad_(trained)
    value.grad = None if gradient is None else gradient.clone()


def refill(container: Any, saved: Any) -> None:
    """Give a container the same objects again, in their order."""
    now, then = ([*part, *(part.values() if isinstance(part, dict) else ())] for part in (container, saved))
    if len(now) == len(then) and all(map(is_, now, then)):
        return
    container.clear()
    (container.extend if isinstance(container, (list, deque)) else container.update)(saved)


def is_own_class(kind: type) -> bool:
    """Whether a class is the user's own, and not of a library."""
    return kind.__module__.partition(".")[0] not in OTHERS_CODE


@contextmanager
def hooks_undone(module: nn.Module) -> Iterator[None]:
    """Hooks registered in this block are removed at its end, but for those of taps.

    They may be those of a submodule, of a parameter, or of all modules.
    """
    first = RemovableHandle.next_id  # hooks are numbered in the order in which they are registered
    try:
        yield
    finally:
        if RemovableHandle.next_id > first:
            own = [vars(part)[name] for part in module.modules() for name in HOOKS]
            own += [getattr(value, name) or {} for value in module.parameters() for name in HOOKS_OF_PARAMETERS]
            for hooks in [*own, *(getattr(nn.modules.module, f"_global{name}") for name in HOOKS)]:
                for key in [key for key, hook in hooks.items() if key >= first and not hasattr(hook, "of_tap")]:
                    del hooks[key]


@contextmanager
def settings_undone() -> Iterator[None]:
    """:data:`PROCESS_SETTINGS` that are changed in this block are put back at its end."""
    before = [read() for read, _ in PROCESS_SETTINGS]
    try:
        yield
    finally:
        for (read, write), value in zip(PROCESS_SETTINGS, before, strict=True):
            if read() != value:
                write(value)


def in_state(part: nn.Module, state: set[int]) -> set[str]:
    """Names of a submodule's buffers that :class:`Places` looks after; ``state`` has the ids of the state."""
    apart = part._non_persistent_buffers_set
    return {
        name for name, value in part._buffers.items() if id(value) in state or (value is None and name not in apart)
    }


class Places:
    """Where the tensors of a state are: by owner and name, since code may rebind them.

    ``self.mean = 0.9 * self.mean + ...`` puts another tensor in the place of a buffer; its values are those of the
    state. A parameter that is replaced, and an entry that is new, would be left out of the averages: they are errors.

    Args:
        module: the module.
        live: the tensors of its state by name, which stay the same objects for the whole run.
    """

    def __init__(self, module: nn.Module, live: Mapping[str, Tensor]) -> None:
        names = {id(value): name for name, value in live.items()}
        self._buffers = [
            (part._buffers, key, names[id(value)], value)
            for part in module.modules()
            for key, value in part._buffers.items()
            if value is not None and id(value) in names
        ]
        parts = list(module.named_modules())
        self._entries = [(path, held, dict(held)) for path, part in parts for held in (part._parameters, part._modules)]
        self._named = [(path, part, {k for k, v in part._buffers.items() if v is not None}) for path, part in parts]
        self._kinds = [(name, value, value.shape, value.dtype) for name, value in live.items()]

    def bind(self) -> None:
        """Put the run's own tensors back in their places; the values of those that replaced them are dropped.

        A tensor that was given another shape or type has its own again, and no values.
        """
        for buffers, key, _, tensor in self._buffers:
            buffers[key] = tensor
        for _, tensor, shape, dtype in self._kinds:
            if tensor.shape != shape or tensor.dtype != dtype:
                tensor.data = torch.zeros(shape, dtype=dtype, device=tensor.device)
        for _, entries, saved in self._entries:
            if len(entries) != len(saved) or not all(map(is_, entries.values(), saved.values())):
                entries.clear()
                entries.update(saved)
        for _, part, named in self._named:
            for key in part._buffers.keys() - part._non_persistent_buffers_set - named if part._buffers else ():
                part._buffers[key] = None

    @torch.no_grad()
    def settle(self) -> None:
        """Put the run's own tensors back in their places, with the values of those that replaced them.

        Raises:
            ClientError: a buffer or parameter has another shape or type than at the start of the run, a parameter was
                replaced, or an entry is new or was removed.
        """
        for name, tensor, shape, dtype in self._kinds:
            if tensor.shape != shape or tensor.dtype != dtype:
                raise ClientError(another_kind(name, tensor, shape, dtype))
        rebound = [place for place in self._buffers if place[0].get(place[1]) is not place[3]]
        # all are read before one is written: two buffers may have changed places
        values = [checked(name, buffers.get(key), tensor).clone() for buffers, key, name, tensor in rebound]
        for (buffers, key, _, tensor), value in zip(rebound, values, strict=True):
            tensor.copy_(value)
            buffers[key] = tensor
        self._refuse_new()

    def _refuse_new(self) -> None:
        others = [
            (f"{path}.{key}", key in entries)
            for path, entries, saved in self._entries
            if len(entries) != len(saved) or not all(map(is_, entries.values(), saved.values()))
            for key in changed(entries, saved)
        ]
        removed = next((name.removeprefix(".") for name, present in others if not present), None)
        if removed is not None:
            raise ClientError(f"{removed} was removed since the start of the run, and other clients have it; keep it")
        new = [name for name, _ in others]
        for path, part, named in self._named:
            present = part._buffers.keys() - part._non_persistent_buffers_set - named if part._buffers else ()
            new += [f"{path}.{key}" for key in present if part._buffers[key] is not None]
        if new:
            names = ", ".join(name.removeprefix(".") for name in new)
            hint = "make it in the constructor or in configure_model, and change its values in place"
            raise ClientError(f"{names} is new since the start of the run, and would not be averaged; {hint}")


def changed(entries: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """The names whose objects are others than the saved ones."""
    return [name for name in {**saved, **entries} if entries.get(name) is not saved.get(name)]


def checked(name: str, present: Tensor | None, tensor: Tensor) -> Tensor:
    """The tensor that replaced a buffer, if it can be averaged with those of other clients."""
    if present is None or present.shape != tensor.shape or present.dtype != tensor.dtype:
        raise ClientError(another_kind(name, present, tensor.shape, tensor.dtype))
    return present


def another_kind(name: str, present: Tensor | None, shape: torch.Size, dtype: torch.dtype) -> str:
    """What is wrong with an entry of the state that had another shape or type when the run began."""
    now = "None" if present is None else f"{tuple(present.shape)} {present.dtype}"
    kind, other = "buffer", ", or register it with persistent=False"
    if isinstance(present, nn.Parameter):
        kind, other = "parameter", ""
    was = f"{tuple(shape)} {dtype} at the start of the run"
    return f"the {kind} {name} became {now}, and was {was}; keep its shape and type{other}"


def check_state(module: nn.Module, live: Mapping[str, Tensor]) -> None:
    """Refuse a module whose state dict cannot be averaged.

    Raises:
        UsageError: the module has a part of ``torch.jit``; the state dict leaves out a trained parameter, or holds
            something that is no tensor, is made anew by each call, is sparse or complex, or has no shape yet.
    """
    known = {id(value) for value in live.values()}
    parts, parameters, entries = module.named_modules(), module.named_parameters(), module.state_dict(keep_vars=True)
    wrong = {
        "is of torch.jit, whose buffers a run cannot put back; give the layer that was scripted": (
            name or "it" for name, part in parts if isinstance(part, torch.jit.ScriptModule)
        ),
        "has no shape before the first batch; give the layer its number of inputs": (
            name for name, value in live.items() if is_lazy(value)
        ),
        "of its state_dict is another tensor each time, so that nobody averages it; register it as a buffer": (
            name
            for name, value in module.state_dict(keep_vars=True).items()
            if isinstance(value, Tensor) and value is not entries.get(name)
        ),
        "is sparse, and sums over clients are dense; keep a dense one, or a buffer with persistent=False": (
            name for name, value in live.items() if value.layout is not torch.strided
        ),
        "is complex, and averages are real; keep real numbers, and use torch.view_as_complex": (
            name for name, value in live.items() if value.is_complex()
        ),
        "is trained, but its state_dict leaves it out, so that nobody averages it; keep it in, or set requires_grad to "
        "false": (name for name, value in parameters if value.requires_grad and id(value) not in known),
        "of its state_dict is no tensor, which cannot be averaged; leave it out of the state_dict": (
            name for name, value in entries.items() if not isinstance(value, Tensor)
        ),
    }
    for hint, names in wrong.items():
        first = list(itertools.islice(names, 5))
        if first:
            raise UsageError(f"model={type(module).__name__}: {', '.join(first)} {hint}")
