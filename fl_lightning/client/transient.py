"""What a module has outside of its state dict begins each visit and each evaluation as it was when the run began."""

from __future__ import annotations

import copy
import random
import sys
from collections import deque
from collections.abc import Mapping
from operator import is_
from typing import Any

import numpy as np
import torch
from lightning.fabric.loggers import Logger
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Dataset, Sampler

from fl_lightning.errors import ClientError, UsageError
from fl_lightning.namespaces import LightningDataModule
from fl_lightning.state import tensors

# attributes that torch and Lightning keep themselves, and the functions which a run puts into the module
OWN = {*vars(nn.Module()), *vars(LightningModule()), "log", "log_dict", "forward"}
# objects that are never looked into: what is read and what is written, which may be large or open
APART = (Dataset, DataLoader, Sampler, Logger, LightningDataModule, Tensor, type)
CONTAINERS = (list, tuple, dict, set, deque)
OTHERS_CODE = {*sys.stdlib_module_names, "torch", "numpy", "lightning", "lightning_fabric", "pytorch_lightning"}
COPIED = (torch.Generator, np.ndarray, np.random.Generator, np.random.RandomState, random.Random)


class Transient:
    """Restores a module's modes, gradient flags, attributes and non-persistent buffers.

    Attributes are those of every submodule, and of the modules and objects which :func:`held` finds in them: tensors,
    numbers, containers, random generators and torchmetrics objects get their values back, any other object is the same
    object again. Attributes that are new are removed. Parameters that the state dict leaves out get their values back,
    too.

    Args:
        module: the module, as each visit shall find it.
    """

    def __init__(self, module: nn.Module) -> None:
        state = {id(value) for value in tensors(module).values()}
        parts, objects = held(module)
        parameters = {id(value): value for part in parts for value in part.parameters()}
        registered = state | parameters.keys()
        self._left_out = [(value, value.detach().clone()) for key, value in parameters.items() if key not in state]
        self._modes = [(part, part.training) for part in parts]
        self._trained = [(parameter, parameter.requires_grad) for parameter in parameters.values()]
        self._saved = [
            saved
            for part in parts
            for saved in (
                Saved(vars(part), registered, OWN),
                Saved(part._buffers, registered, in_state(part, state)),
            )
        ]
        self._saved += [Saved(vars(one), registered, set()) for one in objects]

    def restore(self) -> None:
        """Bring back what was there when this object was made."""
        self.restore_modes()
        for parameter, trained in self._trained:
            if parameter.requires_grad is not trained:
                parameter.requires_grad_(trained)
        for saved in self._saved:
            saved.restore()
        for parameter, value in self._left_out:
            parameter.detach().copy_(value)

    def restore_modes(self) -> None:
        """Put every submodule in the mode, training or evaluation, in which it was."""
        for part, mode in self._modes:
            part.training = mode


def held(module: nn.Module) -> tuple[list[nn.Module], list[Any]]:
    """A module's submodules, with the modules and objects which only attributes of them refer to.

    Such are a teacher in a list, which keeps it out of the state dict, and an object with averaged weights. The objects
    are those of other classes than Python's, torch's and Lightning's, without data sets, loaders and loggers.
    """
    parts, objects = list(module.modules()), []
    seen = {id(part) for part in parts}
    found = [value for part in parts for name, value in vars(part).items() if name not in OWN]
    while found:
        value = found.pop()
        if id(value) in seen or not has_parts(value):
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            new = [part for part in value.modules() if part is value or id(part) not in seen]
            seen.update(map(id, new))
            parts += new
            found += [one for part in new for name, one in vars(part).items() if name not in OWN]
        elif isinstance(value, CONTAINERS):
            found += value.values() if isinstance(value, dict) else value
        else:
            objects.append(value)
            found += vars(value).values()
    return parts, objects


def has_parts(value: Any) -> bool:
    """Whether :func:`held` looks into a value."""
    if isinstance(value, (nn.Module, *CONTAINERS)):
        return True
    if isinstance(value, APART) or not hasattr(value, "__dict__"):
        return False
    return type(value).__module__.partition(".")[0] not in OTHERS_CODE


class Saved:
    """The entries of one dictionary of attributes or buffers.

    Args:
        entries: the live dictionary.
        registered: ids of tensors that belong to the state, which are never copied.
        ignored: names that are left alone.
    """

    def __init__(self, entries: dict[str, Any], registered: set[int], ignored: set[str]) -> None:
        self._entries, self._registered, self._ignored = entries, registered, ignored
        kept = {name: value for name, value in entries.items() if name not in ignored}
        self._copies = {name: copied(v, registered) for name, v in kept.items() if is_mutable(v, registered)}
        self._same = {name: value for name, value in kept.items() if name not in self._copies}
        self._known = {*kept, *ignored}

    def restore(self) -> None:
        """Bring the entries back."""
        entries = self._entries
        for name in entries.keys() - self._known:
            del entries[name]
        entries.update(self._same)
        for name, value in self._copies.items():
            present = entries.get(name)
            if isinstance(present, Tensor) and is_same_kind(value, present):
                with torch.no_grad():
                    present.detach().copy_(value.detach())  # in place, since others may refer to it
            else:
                entries[name] = copied(value, self._registered)


def is_same_kind(saved: Any, present: Tensor) -> bool:
    """Whether the values of a saved tensor can be copied into the present one."""
    if not isinstance(saved, Tensor):
        return False
    same = saved.shape == present.shape and saved.dtype == present.dtype and saved.device == present.device
    return same and present.is_leaf and not present.is_inference() and saved.requires_grad == present.requires_grad


def is_mutable(value: Any, registered: set[int]) -> bool:
    """Whether a value is data that code can change in place."""
    if isinstance(value, tuple):
        return any(is_mutable(part, registered) for part in value)
    if isinstance(value, Tensor):
        return not isinstance(value, nn.Parameter) and id(value) not in registered
    return isinstance(value, (list, dict, set, deque, *COPIED))


def copied(value: Any, registered: set[int]) -> Any:
    """A copy of data: tensors, random generators and containers of anything; other objects are not copied."""
    if not is_mutable(value, registered):
        return value
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, torch.Generator):
        return torch.Generator(value.device).set_state(value.get_state())
    if isinstance(value, COPIED):
        return copy.deepcopy(value)
    return copied_container(value, registered)


def copied_container(value: Any, registered: set[int]) -> Any:
    """A container of the same type with copies of its data."""
    if isinstance(value, tuple):
        parts = [copied(part, registered) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    new = copy.copy(value)
    if isinstance(value, (list, deque, dict)):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            new[key] = copied(part, registered)
    return new


def persistent(part: nn.Module) -> set[str]:
    """Names of the buffers of a submodule that belong to its state dict."""
    return part._buffers.keys() - part._non_persistent_buffers_set


def in_state(part: nn.Module, state: set[int]) -> set[str]:
    """Names of a submodule's buffers that :class:`Places` looks after; ``state`` has the ids of the state."""
    named = part._buffers.items()
    return {name for name, value in named if id(value) in state or (value is None and name in persistent(part))}


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
        self._entries = [(path, one, dict(one)) for path, part in parts for one in (part._parameters, part._modules)]
        self._named = [(path, part, {k for k, v in part._buffers.items() if v is not None}) for path, part in parts]

    def bind(self) -> None:
        """Put the run's own tensors back in their places; the values of those that replaced them are dropped."""
        for buffers, key, _, tensor in self._buffers:
            buffers[key] = tensor
        for _, entries, saved in self._entries:
            if changed(entries, saved):
                entries.clear()
                entries.update(saved)
        for _, part, named in self._named:
            for key in persistent(part) - named:
                part._buffers[key] = None

    @torch.no_grad()
    def settle(self) -> None:
        """Put the run's own tensors back in their places, with the values of those that replaced them.

        Raises:
            ClientError: a buffer has another shape or type than at the start of the run, a parameter was replaced, or
                an entry is new.
        """
        for buffers, key, name, tensor in self._buffers:
            present = buffers.get(key)
            if present is not tensor:
                tensor.copy_(checked(name, present, tensor))
                buffers[key] = tensor
        self._refuse_new()

    def _refuse_new(self) -> None:
        new = [f"{path}.{key}" for path, entries, saved in self._entries for key in changed(entries, saved)]
        for path, part, named in self._named:
            new += [f"{path}.{key}" for key in persistent(part) - named if part._buffers[key] is not None]
        if new:
            names = ", ".join(name.removeprefix(".") for name in new)
            hint = "make it in the constructor or in configure_model, and change its values in place"
            raise ClientError(f"{names} is new since the start of the run, and would not be averaged; {hint}")


def changed(entries: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """The names whose objects are others than the saved ones."""
    if len(entries) == len(saved) and all(map(is_, entries.values(), saved.values())):
        return []
    return [name for name in {**saved, **entries} if entries.get(name) is not saved.get(name)]


def checked(name: str, present: Tensor | None, tensor: Tensor) -> Tensor:
    """The tensor that replaced a buffer, if it can be averaged with those of other clients."""
    if present is None or present.shape != tensor.shape or present.dtype != tensor.dtype:
        now = "None" if present is None else f"{tuple(present.shape)} {present.dtype}"
        raise ClientError(
            f"the buffer {name} became {now}, and was {tuple(tensor.shape)} {tensor.dtype} at the start of the run; "
            "keep its shape and type, or register it with persistent=False"
        )
    return present


def check_state(module: nn.Module, live: Mapping[str, Tensor]) -> None:
    """Refuse a module whose state dict cannot be averaged.

    Raises:
        UsageError: the module has a part of ``torch.jit``; the state dict leaves out a trained parameter, or holds
            something that is no tensor, is complex or has no shape yet.
    """
    scripted = [name or "it" for name, part in module.named_modules() if isinstance(part, torch.jit.ScriptModule)]
    if scripted:
        raise UsageError(
            f"model={type(module).__name__}: {', '.join(scripted[:5])} is of torch.jit, whose buffers a run cannot put "
            "back; give the layer that was scripted"
        )
    lazy = [name for name, value in live.items() if is_lazy(value)]
    if lazy:
        raise UsageError(
            f"model={type(module).__name__}: {', '.join(lazy[:5])} has no shape before the first batch; give the layer "
            "its number of inputs"
        )
    complex_ = [name for name, value in live.items() if value.is_complex()]
    if complex_:
        raise UsageError(
            f"model={type(module).__name__}: {', '.join(complex_[:5])} is complex, and averages are real; keep real "
            "numbers, and use torch.view_as_complex"
        )
    known = {id(value) for value in live.values()}
    left_out = [name for name, value in module.named_parameters() if value.requires_grad and id(value) not in known]
    if left_out:
        raise UsageError(
            f"model={type(module).__name__}: its state_dict leaves out {', '.join(left_out[:5])}, which would be "
            "trained and never averaged; leave them in, or set requires_grad to false"
        )
    odd = [name for name, value in module.state_dict().items() if not isinstance(value, Tensor)]
    if odd:
        raise UsageError(
            f"model={type(module).__name__}: {', '.join(odd[:5])} of its state_dict is no tensor, which cannot be "
            "averaged; leave it out of the state_dict"
        )
