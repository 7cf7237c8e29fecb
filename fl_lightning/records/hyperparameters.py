"""The hyper-parameters of a run as loggers get them: nested dictionaries of plain values."""

from __future__ import annotations

import inspect
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

PLAIN = (str, int, float, bool, type(None))


def of_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The resolved config, in which a list of classes is a dictionary by class name, so that each value has a key."""
    return {key: _of_value(value) for key, value in config.items()}


def hyperparameters_of_class(entry: Mapping[str, Any], namespace: str) -> dict[str, Any]:
    """The entry of a class in a config, in the form from which ``load_from_checkpoint`` builds an object.

    It is that of LightningCLI: with the class path, and the function that resolves the classes of the arguments, in the
    distribution of Lightning that is called ``namespace``.
    """
    built = {"_class_path": entry["class_path"], "_instantiator": f"{namespace}.cli.instantiate_module"}
    return {**(entry.get("init_args") or {}), **(entry.get("dict_kwargs") or {}), **built}


def of_objects(model: Any, trainer: Mapping[str, Any], methods: Mapping[str, Any]) -> dict[str, Any]:
    """What is known of a run without a config.

    Args:
        model: the module, whose ``hparams`` are taken.
        trainer: the arguments of the trainer.
        methods: the methods of the run, by class name.
    """
    of_methods = {name: plain_arguments(method) for name, method in methods.items()}
    return {"model": only_plain(dict(model.hparams)), "method": of_methods, "trainer": only_plain(trainer)}


def plain_arguments(owner: Any) -> dict[str, Any]:
    """The plain arguments of an object's constructor, as far as it keeps them under their names."""
    names = inspect.signature(type(owner).__init__).parameters
    return only_plain({name: getattr(owner, name) for name in names if name != "self" and hasattr(owner, name)})


def only_plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that are plain values, or lists and dictionaries of them; a path as its text."""
    texts = {key: os.fspath(value) if isinstance(value, os.PathLike) else value for key, value in values.items()}
    return {str(key): _plain(value) for key, value in texts.items() if is_plain(value)}


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text, a truth value or None, or a list or dictionary of such."""
    if isinstance(value, Mapping):
        return all(isinstance(key, PLAIN) and is_plain(inner) for key, inner in value.items())
    return all(map(is_plain, value)) if isinstance(value, (list, tuple)) else type(value) in PLAIN


def _plain(value: Any) -> Any:
    """A plain value in dictionaries and lists of their plain types."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return type(value)(map(_plain, value)) if type(value) in (list, tuple) else value


def _of_value(value: Any) -> Any:
    """A value of a config; of a list of classes the arguments by name, with a number from the second of a name on."""
    if isinstance(value, Mapping):
        return of_config(value)
    if not value or not isinstance(value, list):
        return value
    if not all(isinstance(entry, Mapping) and "class_path" in entry for entry in value):
        return value
    names = numbered(entry["class_path"].rsplit(".", 1)[-1] for entry in value)
    return {name: of_config(entry.get("init_args") or {}) for name, entry in zip(names, value, strict=True)}


def numbered(names: Iterable[str]) -> list[str]:
    """Names that tell things apart: with a number from the second of a name on."""
    seen = Counter[str]()
    apart = []
    for name in names:
        apart.append(f"{name}.{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return apart
