"""Restores everything outside the state dict before each visit: a snapshot of attributes, written back in place."""

from __future__ import annotations

import copy
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

from fl_lightning.core.method import Method, ServerValue
from fl_lightning.core.state import tensors
from fl_lightning.core.weighted import Weighted
from fl_lightning.data.client_loaders import leaves_of
from fl_lightning.utilities import lightning_compat
from fl_lightning.utilities.errors import ClientError, UsageError

PLAIN = (str, bytes, int, float, complex, bool, type(None))
CONTAINERS = (list, dict, set, deque)
MISSING = object()
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# attributes that the engine manages: Lightning's, hooks, and functions that a run sets in the module
ENGINE = {name for name in vars(nn.Module()) if "hook" in name} | {"log", "log_dict", "forward"}
ENGINE |= vars(LightningModule()).keys() - vars(nn.Module()).keys()
OWN = {*vars(LightningModule()), *ENGINE}
# objects that are always searched
WITH_PARTS = (nn.Module, SimpleNamespace, Optimizer, LRScheduler, Method, Weighted)
# objects that are never searched: inputs and outputs, which may be large or open
SKIPPED = (Dataset, DataLoader, Sampler, Logger, lightning_compat.LightningDataModule, type)
# packages whose classes are not the user's
LIBRARIES = {
    *sys.stdlib_module_names,
    *("torch", "numpy", "lightning", "lightning_fabric", "pytorch_lightning", "fl_lightning"),
}


class Snapshot:
    """The current contents of objects: attributes, containers, tensors, arrays and random generators.

    :meth:`restore` keeps the identity of each attribute, since closures and other objects may refer to it. ``skipped``
    objects are ignored; for ``state`` tensors, only ``requires_grad`` is restored.
    """

    def __init__(self, roots: Iterable[Any], skipped: Iterable[Any] = (), state: Iterable[Tensor] = ()) -> None:
        values, visited_ids = set(map(id, state)), set(map(id, skipped))
        self._flags: list[tuple[Tensor, bool]] = []
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._containers: list[tuple[Any, Any]] = []
        self._others: list[Callable[[], object]] = []
        for _, part in (pair for root in roots for pair in walk(root, visited_ids)):
            contents = held_by(part)
            if id(part) in values:
                self._flags += [(part, part.requires_grad)] if isinstance(part, nn.Parameter) else []
            elif isinstance(part, nn.Module):
                saved = {name: contents[name] for name in contents.keys() - ENGINE}
                self._attributes.append((contents, saved))
            elif isinstance(contents, CONTAINERS):
                self._containers.append((contents, copy.copy(contents)))
            elif (restore := restore_of(part)) is not None:
                self._others.append(restore)

    def restore(self) -> None:
        """Write the contents back in place, and remove new attributes."""
        # one function, without calls of others: a visit restores hundreds of objects
        for tensor, trained in self._flags:
            if tensor.requires_grad is not trained:
                tensor.requires_grad_(trained)
        for contents, saved in self._attributes:
            for name in contents.keys() - saved.keys() - ENGINE:
                del contents[name]
            contents.update(saved)
        for contents, saved in self._containers:
            is_same = len(contents) == len(saved) and all(map(is_, contents, saved))
            if not is_same or (isinstance(contents, dict) and not all(map(is_, contents.values(), saved.values()))):
                contents.clear()
                (contents.extend if isinstance(contents, (list, deque)) else contents.update)(saved)
        for restore in self._others:
            restore()

    def changed(self, owners: Iterable[dict[str, Any]]) -> bool:
        """Return whether containers, or these attributes of modules, hold other objects, or dense arrays other numbers.

        Two values nan are equal.
        """
        ids = set(map(id, owners))
        attributes = [pair for pair in self._attributes if id(pair[0]) in ids]
        for contents, saved in (*attributes, *self._containers):
            if ids_in(contents) != ids_in(saved):
                return True
        for restore in self._others:
            if isinstance(restore, partial) and restore.func in (refill_tensor, np.copyto):
                now, saved = restore.args[:2]
                dense = getattr(now, "layout", torch.strided) is torch.strided
                if dense and (now.shape != saved.shape or differ(now, saved)):
                    return True
        return False


class ModuleSnapshot(Snapshot):
    """A module without the values of its state: modes, gradient flags, attributes and non-persistent buffers."""

    def __init__(self, module: nn.Module, skipped: Iterable[Any] = ()) -> None:
        super().__init__([module], skipped, tensors(module).values())


class MethodSnapshot(Snapshot):
    """The attributes of methods as a server hook has left them, without the ``skipped`` objects of the module.

    ``server`` has the tensors of server values with names for errors. They are not copied: :meth:`Visit.written` finds
    the hook that writes to one. A client's payload or memory may refer to data that is restored ``in_place``.
    """

    def __init__(self, methods: Sequence[Method], skipped: Iterable[Any]) -> None:
        self.server = server_tensors(methods)
        skipped_ids = set(map(id, skipped := [*skipped, *(tensor for _, tensor in self.server)]))
        kinds: dict[type, None] = {}
        for _, part in (pair for method in methods for pair in walk(method, skipped_ids)):
            if isinstance(part, Method):
                kinds |= dict.fromkeys(filter(is_own_class, type(part).__mro__))
        # containers that a class shares with its instances
        shared: list[Any] = []
        for kind in kinds:
            shared += [value for value in vars(kind).values() if isinstance(value, CONTAINERS)]
        super().__init__([*methods, *shared], skipped)
        containers = len(methods)
        for _, value in server_values(methods):
            containers += sum(isinstance(held_by(part), CONTAINERS) for _, part in walk(value, set()))
        self.in_place = bool(self._others) or len(self._containers) > containers


def server_values(methods: Iterable[Method]) -> Iterator[tuple[str, Any]]:
    """The server values of methods, each with a name for errors."""
    for method in methods:
        for name, value in vars(method).items():
            if isinstance(getattr(type(method), name, None), ServerValue):
                yield f"{type(method).__name__}.{name}", value


def server_tensors(methods: Iterable[Method]) -> list[tuple[str, Tensor]]:
    """The tensors of server values, each with a name for errors."""
    named = list[tuple[str, Tensor]]()
    for name, value in server_values(methods):
        named += [(name, leaf) for leaf in leaves_of(value) if isinstance(leaf, Tensor)]
    return named


def walk(value: Any, known: set[int], name: str = "") -> Iterator[tuple[str, Any]]:
    """A value and all objects in it, each once and with a name, without those whose ids are ``known``."""
    if not isinstance(value, PLAIN) and id(value) not in known:
        known.add(id(value))
        yield name, value
        for key, part in entries_of(value):
            yield from walk(part, known, f"{name}.{key}")


def entries_of(value: Any) -> Iterable[tuple[Any, Any]]:
    """The parts of a value with their names or places, without the engine's attributes of a module."""
    container = held_by(value)
    if not isinstance(container, dict):
        return enumerate(container or ())
    ignored = ENGINE if isinstance(value, nn.Module) else ()
    return [(key, part) for key, part in container.items() if key not in ignored]


def held_by(value: Any) -> Any:
    """The container of a value's parts: itself, or its attributes; None where it is not searched."""
    if isinstance(value, (tuple, *CONTAINERS)):
        return value
    is_searched = hasattr(value, "__dict__") and not isinstance(value, SKIPPED) and is_own_class(type(value))
    return vars(value) if is_searched or isinstance(value, WITH_PARTS) else None


def ids_in(container: Any) -> Any:
    """The ids of the objects in a container, or of the attributes of a module without its mode."""
    if not isinstance(container, dict):
        return [*map(id, container)]
    return {key: id(container[key]) for key in container.keys() - ENGINE - {"training"}}


def differ(now: Any, saved: Any) -> bool:
    """Whether two arrays have different numbers; two values nan are equal."""
    return bool(((now != saved) & ((now == now) | (saved == saved))).any())


def is_own_class(kind: type) -> bool:
    """Whether a class is the user's own."""
    return kind.__module__.partition(".")[0] not in LIBRARIES


def restore_of(part: Any) -> Callable[[], object] | None:
    """A function that gives a tensor, an array or a generator its present contents back; None for other objects."""
    if isinstance(part, Tensor):
        # a tensor with a graph, or with several elements in one place, is never changed in place
        spread = part.layout is torch.strided and 0 in part.stride() and part.numel() > 1
        if not part.is_leaf or spread or part.is_inference():
            return None
        gradient = None if part.grad is None else part.grad.detach().clone()
        return partial(refill_tensor, part, part.detach().clone(), part.requires_grad, gradient)
    if isinstance(part, np.ndarray):
        return partial(np.copyto, part, part.copy()) if part.flags.writeable else None
    if isinstance(part, np.random.Generator):
        return partial(setattr, part.bit_generator, "state", copy.deepcopy(part.bit_generator.state))
    if isinstance(part, (torch.Generator, np.random.RandomState)):
        return partial(part.set_state, part.get_state())  # type: ignore[arg-type]
    return partial(part.setstate, part.getstate()) if isinstance(part, random.Random) else None


@torch.no_grad()
def refill_tensor(value: Tensor, saved: Tensor, trained: bool, gradient: Tensor | None) -> None:
    """Restore a tensor's values, ``requires_grad`` and gradient."""
    if (value.shape, value.dtype, value.device) == (saved.shape, saved.dtype, saved.device):
        value.detach().copy_(saved)
    else:
        value.data = saved.clone()
    if value.is_leaf:
        value.requires_grad_(trained)
    value.grad = None if gradient is None else gradient.clone()


def uncopyable(module: nn.Module, shared: object) -> dict[int, Any]:
    """The parts of a module that ``copy.deepcopy`` refuses, by id, with their counterparts in a copy of the module.

    A random generator is copied with its state, and a tensor without its graph. Other objects, such as locks and open
    files, are shared with the copy, as is ``shared``.
    """
    counterparts: dict[int, Any] = {id(shared): shared}
    parts = {id(part): part for _, part in walk(module, {id(shared)})}
    for part in parts.values():
        if isinstance(part, torch.Generator):
            counterparts[id(part)] = part.clone_state()
        elif isinstance(part, Tensor) and not part.is_leaf:
            counterparts[id(part)] = part.detach().clone()
        elif held_by(part) is None and not isinstance(part, (Tensor, np.ndarray)):
            # the other parts have separate copies, to which bound methods and closures then refer
            copies = parts | counterparts
            copies = {number: copies[number] for number in copies if copies[number] is not part}
            try:
                copy.deepcopy(part, copies)
            except Exception:  # any, since it is the part's own code
                counterparts[id(part)] = part
    return counterparts


@contextmanager
def temporary_hooks(module: nn.Module) -> Iterator[None]:
    """Return a context that removes the hooks registered in it on the module or its parts, except hooks of taps."""
    first_id = RemovableHandle.next_id  # hooks are numbered in the order in which they are registered
    try:
        yield
    finally:
        if RemovableHandle.next_id > first_id:
            for hooks in (vars(part)[name] for part in module.modules() for name in HOOKS):
                for key, hook in [*hooks.items()]:
                    if key >= first_id and not hasattr(hook, "of_tap"):
                        del hooks[key]


class StateBinding:
    """The entries of a module's parameters and buffers with its state, which user code may rebind.

    ``self.mean = 0.9 * self.mean + ...`` replaces a buffer by another tensor, whose values become the state. A replaced
    parameter or layer, or a new entry, would not be averaged and is an error. The ``live`` tensors of the state are the
    same objects for the whole run.
    """

    def __init__(self, module: nn.Module, live: Mapping[str, Tensor]) -> None:
        names = {id(value): name for name, value in live.items()}
        parts = list(module.named_modules())
        self._entries: list[tuple[dict[str, Any], str, str, Tensor]] = [
            (entries, key, names[id(value)], value)
            for _, part in parts
            for entries in (part._parameters, part._buffers)
            for key, value in entries.items()
            if value is not None and id(value) in names
        ]
        self._kinds = [(name, value, value.shape, value.dtype) for name, value in live.items()]
        self._fixed: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
        for path, part in parts:
            self._fixed += [(path, registry, dict(registry)) for registry in (part._parameters, part._modules)]
        self._buffers: list[tuple[str, nn.Module, set[str]]] = []
        for path, part in parts:
            buffers = {name for name, value in part._buffers.items() if value is not None}
            self._buffers.append((path, part, buffers - part._non_persistent_buffers_set))

    @contextmanager
    def swapped(self, values: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """In this block the module has these tensors; yields those that took their places, at its end."""
        rebound: dict[str, Tensor] = {}
        before = [entries[key] for entries, key, *_ in self._entries]
        try:
            for entries, key, name, _ in self._entries:
                entries[key] = values[name]
            yield rebound
            for entries, key, name, _ in self._entries:
                if entries[key] is not values[name]:
                    rebound[name] = entries[key]
        finally:
            for (entries, key, *_), tensor in zip(self._entries, before, strict=True):
                entries[key] = tensor

    def held(self) -> dict[str, Tensor]:
        """The tensors that the module has now, by name."""
        return {name: entries[key] for entries, key, name, _ in self._entries}

    def rebind(self) -> None:
        """Put the run's own tensors back in their places; the values of those that replaced them are dropped.

        A tensor that was given another shape or type has its own again, and no values.
        """
        for entries, key, _, tensor in self._entries:
            entries[key] = tensor
        for _, tensor, shape, dtype in self._kinds:
            if tensor.shape != shape or tensor.dtype != dtype:
                tensor.data = torch.zeros(shape, dtype=dtype, device=tensor.device)

    @torch.no_grad()
    def commit(self) -> None:
        """Put the run's own tensors back in their places, with the values of those that replaced them.

        Raises:
            ClientError: an entry of the state is new, was removed or replaced, or has another shape or type.
        """
        for path, registry, saved in self._fixed:
            if registry.keys() == saved.keys() and all(map(is_, registry.values(), saved.values())):
                continue
            for key in {**saved, **registry}:
                if registry.get(key) is not saved.get(key):
                    change = "new" if key not in saved else "another object" if key in registry else "missing"
                    raise self._error(f"{path}.{key} is {change}")
        for path, part, persistent in self._buffers:
            for name, value in part._buffers.items():
                if value is not None and name not in persistent and name not in part._non_persistent_buffers_set:
                    raise self._error(f"{path}.{name} is new")
        rebound = [entry for entry in self._entries if entry[0].get(entry[1]) is not entry[3]]
        now: dict[str, Any] = {name: tensor for name, tensor, *_ in self._kinds}
        now |= {name: entries.get(key) for entries, key, name, _ in rebound}
        for name, _, shape, dtype in self._kinds:
            value = now[name]
            if value is None or value.shape != shape or value.dtype != dtype:
                kind = "None" if value is None else f"{tuple(value.shape)} {value.dtype}"
                raise self._error(f"{name} is {kind}, and was {tuple(shape)} {dtype}")
        # all are read before one is written: two buffers may have changed places
        values = [now[name].clone() for _, _, name, _ in rebound]
        for (entries, key, _, tensor), value in zip(rebound, values, strict=True):
            tensor.copy_(value)
            entries[key] = tensor

    def _error(self, change: str) -> ClientError:
        hint = "build it in the constructor, change its values in place, or register a buffer with persistent=False"
        return ClientError(f"{change.removeprefix('.')}, but the state must stay as the run began with it; {hint}")


def check_state(module: nn.Module, live: Mapping[str, Tensor]) -> None:
    """Refuse a module whose state dict cannot be averaged.

    Raises:
        UsageError: the module has a part of ``torch.jit``; the state dict lacks a trained parameter, or has a value
            that is not a tensor, is created by each call, is sparse or complex, or has no shape yet.
    """
    state_ids, again = set(map(id, live.values())), module.state_dict(keep_vars=True)
    parts, parameters = dict(module.named_modules()), dict(module.named_parameters())
    unstable = [name for name, value in live.items() if value is not again.get(name)]
    not_dense = [name for name, value in live.items() if value.layout is not torch.strided or value.is_complex()]
    wrong = {
        "is of torch.jit, whose buffers a run cannot restore; use the layer before scripting": [
            path or "it" for path in parts if isinstance(parts[path], torch.jit.ScriptModule)
        ],
        "has no shape before the first batch; set the layer's number of inputs": [
            name for name, value in live.items() if is_lazy(value)
        ],
        "of its state_dict is not a dense real tensor that is the same in each call, so it cannot be averaged; "
        "register a plain buffer, use persistent=False, or remove it from the state_dict": [
            *(name for name, value in again.items() if not isinstance(value, Tensor)),
            *unstable,
            *not_dense,
        ],
        "is trained, but its state_dict leaves it out, so that nobody averages it; keep it in, or set requires_grad to "
        "false": [
            name for name in parameters if parameters[name].requires_grad and id(parameters[name]) not in state_ids
        ],
    }
    for hint, names in wrong.items():
        if names:
            raise UsageError(f"model={type(module).__name__}: {', '.join(names[:5])} {hint}")
