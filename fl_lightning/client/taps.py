"""Taps: names bound to outputs of submodules, which a forward hook records.

A penalty on a representation then needs neither a second forward nor a base class for models. A tap is bound to a
``path`` whose output is a tensor, or to ``path:field`` of another output: a field of a mapping or of an object
(``bert:pooler_output`` of a Hugging Face ``ModelOutput``), or an index of a sequence (``encoder.layer.0:0``).
``bert:hidden_states:3`` is the fourth tensor of a field.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.core.state import uncompiled_name
from fl_lightning.utilities.errors import UsageError, choices, require


class StopForward(BaseException):
    """Leaves the forward once the last tap is recorded. A BaseException, so that no model's ``except`` catches it."""


class TapValues(dict[str, Tensor]):
    """The recorded taps; one that was not recorded is an error that says why."""

    def __init__(self, paths: Mapping[str, str]) -> None:
        super().__init__()
        self._paths = paths
        self.calls: dict[str, int] = {}
        self.places: dict[str, int] = {}

    def __missing__(self, name: str) -> Tensor:
        if name not in self._paths:
            raise UsageError(f"step.taps: {name!r} is not recorded; add it to the attribute requires of the method")
        self.check_called(name)
        raise UsageError(
            f"trainer.taps: {name}={self._paths[name]!r}: the forward of this batch calls this submodule without "
            "gradient, so a penalty on it would do nothing; call it outside of torch.no_grad, and "
            "torch.utils.checkpoint with use_reentrant=False"
        )

    def check_called(self, name: str) -> None:
        """Refuse a tap whose submodule was not called."""
        hint = "the forward of this batch does not call this submodule; bind the tap to one that it calls"
        require(name in self.calls, f"trainer.taps: {name}", self._paths[name], hint)


class Taps:
    """Records outputs of submodules.

    For a submodule with several calls in a forward, the last output is recorded; in training, the last output with a
    gradient.

    Args:
        module: the model.
        paths: binding in ``module`` by tap name: ``path`` or ``path:field``.
        transform: applied to the tap ``logits`` only; its result replaces the output for the rest of the forward, while
            the raw output is recorded.

    Raises:
        UsageError: ``transform`` would change a part of an output.

    Attributes:
        values: last recorded output ``(B, ...)`` by tap name.
        recording: whether outputs are recorded and replaced.
        trains: whether to skip calls without gradient, which penalties could not use.
        shapes: shape ``(...)`` of one example in the last recorded output, by tap name.
    """

    def __init__(
        self, module: nn.Module, paths: Mapping[str, str], transform: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self.paths = dict(paths)
        self.values = TapValues(self.paths)
        self.shapes: dict[str, torch.Size] = {}
        self.recording = True
        self.trains = False
        self._until: Mapping[str, int] = {}
        self._module, self._transform = module, transform
        if transform is not None:
            is_whole, binding = ":" not in self.paths["logits"], self.paths["logits"]
            hint = "a method changes the logits, which must be a whole output; bind the tap to the classifier inside it"
            require(is_whole, "trainer.taps: logits", binding, hint)
        self.install()

    def install(self) -> None:
        """Hook the model."""
        # the tap whose output is replaced comes last: others of the same submodule record the raw one
        names = sorted(self.paths, key="logits".__eq__)
        self._handles = []
        for name in names:
            part = self._module.get_submodule(submodule(self.paths[name]))
            self._handles.append(part.register_forward_hook(self._hook(name)))

    def _hook(self, name: str) -> Callable[[nn.Module, tuple, Any], Any]:
        binding = self.paths[name]
        is_whole = ":" not in binding

        @torch.compiler.disable  # a compiler would keep the values of the forward pass that it traced
        def record(module: nn.Module, args: tuple, output: Any) -> Any:
            if not self.recording:
                return None
            is_tensor, values = is_whole and isinstance(output, Tensor), self.values
            value = output if is_tensor else tensor_of(name, binding, output)
            call = values.calls[name] = values.calls.get(name, 0) + 1
            if (torch.is_grad_enabled() or not self.trains) and call <= self._until.get(name, call):
                values[name], values.places[name], self.shapes[name] = value, call, value.shape[1:]
            until = self._until
            if until and all(values.calls.get(tap, 0) >= until[tap] for tap in until):
                raise StopForward
            if self._transform is None or name != "logits":
                return None
            changed = self._transform(value)
            return None if changed is value else changed

        record.of_tap = True  # such a hook stays from visit to visit
        return record

    def clear(self) -> None:
        """Clear the records, so that outputs of one batch are not mistaken for another's."""
        if self.values.calls:
            self.values = TapValues(self.paths)

    def run_until(self, places: Mapping[str, int], forward: Callable[[], object]) -> TapValues:
        """Run ``forward``, and stop it as soon as the taps in ``places`` are recorded, each at its numbered call.

        A forward with fewer calls, or without ``places``, runs to its end.
        """
        self.clear()
        self._until = places
        try:
            forward()
        except StopForward:
            pass
        finally:
            self._until = {}
        for name in places:
            self.values[name]  # raises if it is missing
        return self.values

    @contextmanager
    def recorded(self, records: bool = True) -> Iterator[None]:
        """In this block outputs are recorded, or nothing is where ``records`` is false, and no output is replaced."""
        before = self.recording, self._transform
        self.recording, self._transform = records, None
        try:
            yield
        finally:
            self.recording, self._transform = before
            self.clear()

    def remove(self) -> None:
        """Remove the hooks from the model."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def tensor_of(tap: str, binding: str, output: Any) -> Tensor:
    """The tensor of a tap: the output of its submodule, or the field that the binding has after the colon."""
    key, value = f"trainer.taps: {tap}={binding!r}", output
    for field in binding.split(":")[1:]:
        try:
            if isinstance(value, Mapping):
                value = value[key_of(value, field)]
            elif isinstance(value, Sequence) and field.lstrip("-").isdigit():
                value = value[int(field)]
            else:
                value = getattr(value, field)
        except (KeyError, IndexError, AttributeError, ValueError) as error:
            names = ", ".join(fields_of(value)) or "no fields"
            raise UsageError(f"{key}: a {type(value).__name__} has no {field}; it has {names}") from error
    if not isinstance(value, Tensor):
        names = ", ".join(f"{binding}:{name}" for name in fields_of(value))
        alternatives = f"one of {names}" if names else "another output"
        raise UsageError(
            f"{key}: it is a {type(value).__name__}, and a tap must be a tensor; bind the tap to {alternatives}"
        )
    return value


def submodule(binding: str) -> str:
    """The path of the submodule that a tap is bound to, without the field of its output."""
    return binding.split(":")[0]


def key_of(value: Mapping, field: str) -> Any:
    """Return the key for ``field``: the text itself, its number, or the key of a ``ModelOutput`` at this index."""
    if field in value or not field.isdigit():
        return field
    return list(value)[int(field)] if hasattr(value, "to_tuple") else int(field)


def fields_of(value: Any) -> list[str]:
    """Return the names of the entries, elements or attributes of ``value``, as written after the colon of a binding."""
    if isinstance(value, Mapping):
        return [str(name) for name in value]
    if isinstance(value, (tuple, list)):
        return [*getattr(value, "_fields", map(str, range(len(value))))]
    return [name for name in getattr(value, "__dict__", {}) if not name.startswith("_")]


def resolve_taps(module: nn.Module, extra: Mapping[str, str], wanted: Mapping[str, str]) -> dict[str, str]:
    """Return the bindings of the taps in ``wanted`` (user of each tap by its name).

    A module declares its taps in an attribute ``taps``; ``extra`` (``trainer.taps``) adds or replaces taps.

    Raises:
        UsageError: unbound taps, all in one message; a path without a submodule; a colon without a field.
    """
    bindings = {**getattr(module, "taps", {}), **extra}
    paths = paths_of(module)
    submodules = [path for path in paths if uncompiled_name(path) == path]
    for name, binding in extra.items():
        hint = f"no submodule of {type(module).__name__} has this path; available: "
        near = choices(submodules, submodule(binding))
        require(submodule(binding) in paths or name in wanted, f"trainer.taps: {name}", binding, hint + near)
    missing = [name for name in wanted if submodule(bindings.get(name, "")) not in paths]
    if missing:
        names_by_user: dict[str, list[str]] = {}
        for name in missing:
            bound = f" (bound to {bindings[name]!r})" if name in bindings else ""
            names_by_user.setdefault(wanted[name], []).append(f"{name!r}{bound}")
        needs = [f"{user} needs {', '.join(names)}" for user, names in names_by_user.items()]
        requests, example = " and ".join(needs), missing[0]
        raise UsageError(
            f"trainer.taps: {requests}, of which {type(module).__name__} has none; "
            f"set trainer.taps to {dict.fromkeys(missing, 'SUBMODULE')}, SUBMODULE being one of "
            f"{choices(submodules, submodule(bindings.get(example, example)))}"
        )
    for name in wanted:
        require(all(bindings[name].split(":")), f"trainer.taps: {name}", bindings[name], "name a field after the colon")
    resolved: dict[str, str] = {}
    for name in wanted:
        path, *fields = bindings[name].split(":")
        resolved[name] = ":".join([paths[path], *fields])
    return resolved


def paths_of(module: nn.Module) -> dict[str, str]:
    """Return the paths of the submodules by themselves and by their paths without ``torch.compile``."""
    paths: dict[str, str] = {}
    for path, _ in module.named_modules():
        paths.setdefault(uncompiled_name(path), path)
        paths[path] = path
    return {path: actual for path, actual in paths.items() if path}


def with_paths(module: nn.Module, extra: Mapping[str, str], names: Collection[str]) -> dict[str, str]:
    """Return ``extra`` and the ``names`` that are paths of submodules instead of taps, bound to them."""
    bindings, paths = {**getattr(module, "taps", {}), **extra}, paths_of(module)
    unbound = [name for name in names if name not in bindings and submodule(name) in paths]
    return {**extra, **dict(zip(unbound, unbound, strict=True))}
