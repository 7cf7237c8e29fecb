"""Fragments of configs as plain values: read, merged, looked up, and identified by a digest."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fl_lightning.utilities.bundled_configs import names_near, packaged_config
from fl_lightning.utilities.code_fingerprint import file_digest
from fl_lightning.utilities.errors import UsageError, require
from fl_lightning.utilities.yaml_files import read_yaml

Fragment = dict[str, Any]
# no bit of a result depends on these: arguments of the data that say where files are, ...
PLACES_OF_DATA = ("root", "cache_dir", "download")
# ... and keys of the trainer about files and the execution of a run
WAYS_OF_TRAINER = (
    *("default_root_dir", "name", "logger", "devices", "workers_per_device", "num_nodes", "client_memory"),
    *("timeout", "cache_references", "checkpoint_every_n_rounds", "enable_progress_bar"),
)
# keys that belong to the method of a run
OF_METHOD = ("method", "trainer.server_optimizer")
IN_CLASSES = re.compile(r"(?:(\d+(?:\.\d+)?)\*)?C(?:/(\d+(?:\.\d+)?))?")


def write_text(path: Path, text: str) -> Path:
    """Write a text file atomically, create its folder, and return the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    # labels and titles are the user's, who may have given half a surrogate pair
    try:
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")
        return partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def fragments_of(value: Any, path: Path, where: str = "", within: tuple[Path, ...] = ()) -> Iterator[Fragment]:
    """Return the fragments of a mapping, the name of a file, or a list of these; none for null.

    Names are relative to the file at ``path``, or names of packaged configs; the files ``within`` name that file.
    """
    where = where or f"{path}: config"
    for part in value if isinstance(value, list) else [] if value is None else [value]:
        if isinstance(part, str):
            beside = path.parent / part
            inner = beside if beside.exists() else packaged_config(part)
            if inner is None:
                hint = f"no such file next to {path.name}; use another one, or a config of the package: "
                raise UsageError(f"{where}={part!r}: {hint}{names_near(part)}")
            itself = inner.resolve() in (file.resolve() for file in (*within, path))
            require(not itself, where, part, "the file names itself; name another")
            yield from fragments_of(read_yaml(inner), inner, within=(*within, path))
        else:
            require(isinstance(part, Mapping), where, part, "use a mapping, or the name of a file")
            for key in part:
                require(isinstance(key, str), where, key, "is not a key of a config; use such a key")
            yield dict(part)


def nested_config(key: str, value: Any) -> Fragment:
    """``a.b.c`` and a value as nested mappings."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def merged_config(fragments: Iterable[Fragment]) -> Fragment:
    """Merge fragments: later values replace earlier ones, mappings are merged, ``key+`` appends to a list.

    A parser does the same, but it drops arguments of a replaced class that the new class does not have.
    """
    result: Fragment = {}
    for fragment in fragments:
        for key, value in fragment.items():
            if isinstance(key, str) and key.endswith("+"):
                added = value if isinstance(value, list) else [value]
                result[key[:-1]] = [*(result.get(key[:-1]) or []), *added]
            elif isinstance(value, Mapping) and isinstance(result.get(key), Mapping):
                result[key] = merged_config([result[key], dict(value)])
            else:
                result[key] = value
    return result


def look_up(config: Fragment, key: str, default: Any = None) -> Any:
    """The value of a dotted key."""
    value: Any = config
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return default
        value = value[part]
    return value


def is_of_method(key: str) -> bool:
    """Whether a key belongs to the method."""
    return any(key == prefix or key.startswith(f"{prefix}.") for prefix in OF_METHOD)


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """The values of nested mappings as JSON, by dotted key."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from leaves(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, json.dumps(value, default=str)


def in_classes(fragment: Fragment, classes: int | None) -> Fragment:
    """Return the fragment with numbers in place of coefficients in units of classes C, such as ``C/8`` or ``2*C``."""

    def resolve(value: Any) -> Any:
        factors = IN_CLASSES.fullmatch(value) if isinstance(value, str) else None
        if not factors:
            return mapped(resolve, value)
        if classes is None:
            raise UsageError(f"method: {value!r}: give model.init_args.num_classes, which C stands for")
        return classes * float(factors[1] or 1) / float(factors[2] or 1)

    return {**fragment, **{key: resolve(fragment[key]) for key in ("method", "method+") if key in fragment}}


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a mapping or list with a function applied to each value; other values unchanged."""
    if isinstance(value, Mapping):
        return {str(key): function(inner) for key, inner in value.items()}
    return [function(inner) for inner in value] if isinstance(value, list) else value


def config_digest(config: Fragment) -> str:
    """Return eight hexadecimal digits of a config, without keys that cannot change a result."""
    return hashlib.sha256(json.dumps(of_result(config), sort_keys=True, default=str).encode()).hexdigest()[:8]


def of_result(config: Fragment) -> Fragment:
    """A config without the keys that change no bit of a result, and with digests of files instead of their names."""

    def without_paths(value: Any) -> Any:
        if isinstance(value, Mapping):
            # numbers of these keys are not paths
            paths = [key for key in PLACES_OF_DATA if isinstance(value.get(key), str | bool | None)]
            value = {key: inner for key, inner in value.items() if key not in paths}
        return mapped(without_paths, value)

    def with_contents(value: Any) -> Any:
        digest = file_digest(value) if isinstance(value, str) else None
        return mapped(with_contents, value) if digest is None else f"sha256 {digest}"

    parts: Fragment = {}
    for key, value in config.items():
        if key == "trainer" and isinstance(value, Mapping):
            value = {name: argument for name, argument in value.items() if name not in WAYS_OF_TRAINER}
        parts[str(key)] = without_paths(value) if key == "data" else with_contents(value)
    return parts
