"""The hyper-parameters of a run for loggers, as nested dictionaries of plain values."""

from __future__ import annotations

import inspect
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

PLAIN = (str, int, float, bool, type(None))


def of_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the resolved config, with each list of classes as a dictionary by (numbered) class name."""
    flat = {}
    for key, value in config.items():
        entries = value if isinstance(value, list) else []
        if entries and all(isinstance(entry, Mapping) and "class_path" in entry for entry in entries):
            names = numbered(entry["class_path"].rsplit(".", 1)[-1] for entry in entries)
            arguments = [entry.get("init_args") or {} for entry in entries]
            value = dict(zip(names, arguments, strict=True))
        flat[key] = of_config(value) if isinstance(value, Mapping) else value
    return flat


def plain_arguments(owner: Any) -> dict[str, Any]:
    """Return the plain constructor arguments that an object stores under their names."""
    names = [name for name in inspect.signature(type(owner).__init__).parameters if name != "self"]
    return only_plain({name: getattr(owner, name) for name in names if hasattr(owner, name)})


def only_plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that are plain values, or lists and dictionaries of these; paths become texts."""
    entries = {}
    for key, value in values.items():
        with suppress(TypeError, ValueError):  # of another type
            entries[str(key)] = json.loads(json.dumps(value, default=os.fspath))
    return entries


def numbered(names: Iterable[str]) -> list[str]:
    """Make names unique by a number, starting with the second occurrence."""
    counts = Counter[str]()
    unique_names = []
    for name in names:
        unique_names.append(f"{name}.{counts[name]}" if counts[name] else name)
        counts[name] += 1
    return unique_names
