"""Checks of a trainer's arguments, before there are a model and data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from inspect import Parameter, signature
from itertools import chain
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import torch
from joblib import cpu_count

from fl_lightning.callbacks.base import Callback
from fl_lightning.callbacks.measurement import Measurement
from fl_lightning.core.sampling import Sampler
from fl_lightning.training.compiled import MODES
from fl_lightning.utilities.errors import check_all, count, require
from fl_lightning.utilities.lightning_compat import Logger, is_callback
from fl_lightning.utilities.lightning_replacements import replacement_of_callback

# *args and **kwargs
COLLECTING = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
# types that values may have in place of those of the signature, and the words for the values of some types
WIDER: dict[Any, Any] = {int: Integral, float: Real, list: (list, tuple), dict: Mapping, Sampler: Callable}
WORDS = {bool: ["true", "false"], NoneType: ["null"]}
# maximal rounds, epochs or steps; longer schedules would not fit into memory
MOST = 1_000_000
# condition on each argument of the trainer that has a range, and the hint if it is violated
RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "max_rounds": (lambda n: 0 <= n <= MOST, "pass 0 or more rounds, up to a million"),
    "max_seconds": (lambda seconds: seconds is None or seconds > 0, "pass seconds above 0, or omit it"),
    "local_epochs": (lambda n: 1 <= n <= MOST, "pass 1 or more local epochs, up to a million"),
    "local_steps": (lambda n: n is None or 1 <= n <= MOST, "pass a whole number from 1, up to a million, or omit it"),
    "participation": (lambda share: 0 < share <= 1, "pass a share in (0, 1]"),
    "cohort_size": (lambda n: n is None or n >= 1, "pass a whole number from 1, or omit it"),
    "eval_every_n_rounds": (lambda n: n >= 1, "pass a whole number from 1"),
    "eval_every_seconds": (lambda seconds: seconds is None or seconds > 0, "pass seconds above 0, or omit it"),
    "checkpoint_every_n_rounds": (lambda n: n >= 1, "pass a whole number from 1"),
    "devices": (lambda devices: are_devices(devices), "pass a number from 1, a list of GPUs, or -1 or auto for all"),
    "workers_per_device": (lambda n: 1 <= n <= 1000, "pass 1 or more, up to a thousand"),
    "num_nodes": (lambda n: 1 <= n <= 1000, "pass 1 or more, up to a thousand"),
    "strategy": (
        lambda name: name == "auto",
        "it wraps the model, and would average the gradients of different clients; set auto",
    ),
    "name": (
        lambda name: name is None or is_folder_name(name),
        "pass the name of one folder: at most 255 printable bytes, without / and without a dot or space at its ends",
    ),
    "client_memory": (lambda size: size >= 0, "pass 0 or more GiB"),
    "gradient_clip_val": (lambda norm: norm is None or norm > 0, "pass a norm above 0, or omit it"),
    "accumulate_grad_batches": (lambda n: n >= 1, "pass a whole number from 1"),
    "clients_per_step": (
        lambda n: n == "auto" or (isinstance(n, int) and not isinstance(n, bool) and 1 <= n <= 4096),
        "pass auto, or a number from 1 to 4096",
    ),
    "threads_per_worker": (
        lambda n: n is None or 1 <= n <= max(64, 8 * cpu_count()),
        "pass 1 or more, up to 8 for each core, or omit it",
    ),
    "timeout": (lambda seconds: seconds is None or 1 <= seconds <= 10**6, "pass 1 to a million seconds, or omit it"),
    "compile": (
        lambda mode: isinstance(mode, bool) or mode in MODES,
        f"pass true, false or one of {', '.join(MODES)}",
    ),
    "min_clients": (lambda n: n >= 0, "pass a whole number from 0"),
    "taps": (
        lambda taps: all(isinstance(part, str) for pair in (taps or {}).items() for part in pair),
        "pass paths of submodules by name, such as {representation: encoder}",
    ),
    "sampler": (lambda sampler: not isinstance(sampler, type), "pass an object, such as UniformSampler()"),
    "fast_dev_run": (lambda n: 0 <= n <= MOST, "pass true, false or a number of batches from 0"),
}


def check_arguments(arguments: dict[str, Any], types: dict[str, Any]) -> None:
    """Refuse arguments of the trainer that are not of their ``types``, or out of their range."""

    def check(name: str) -> None:
        parts = get_args(types[name]) if get_origin(types[name]) in (Union, UnionType) else (types[name],)
        texts = [*chain(*(get_args(part) for part in parts if get_origin(part) is Literal))]
        kinds = [get_origin(part) or part for part in parts if get_origin(part) is not Literal]
        words = [word for kind in kinds for word in WORDS.get(kind, [kind.__name__])]
        in_range, hint = RANGES.get(name, (lambda value: True, f"pass one of {', '.join([*texts, *words])}"))
        value = arguments[name]
        fits = value in texts or any(isinstance(value, WIDER.get(kind, kind)) for kind in kinds)
        require(fits and in_range(value), f"trainer.{name}", value, hint)

    unchecked = ("callbacks", "logger", "return")  # see check_observers
    check_all(partial(check, name) for name in types if name not in unchecked)


def is_folder_name(name: Any) -> bool:
    """Return whether a text is a valid name of one visible folder on every system."""
    is_visible = isinstance(name, str) and name.isprintable() and name == name.strip(" .")
    return is_visible and not {"/", "\\"} & {*name} and 0 < len(name.encode()) <= 255


def are_devices(devices: Any) -> bool:
    """Return whether the argument is a number from 1, a list of devices, or ``auto``."""
    if isinstance(devices, int) or str(devices).isdigit():
        return int(devices) >= 1
    return devices == "auto" or (isinstance(devices, list) and devices != [])


def check_observers(callbacks: list[Any], logger: Any) -> None:
    """Refuse objects that are not loggers, and callbacks whose hooks cannot be called as declared."""
    for part in () if isinstance(logger, bool) else as_list(logger):
        require(isinstance(part, Logger), "trainer.logger", part, "pass true, false, or loggers of Fabric or Lightning")
    functions = {name: value for name, value in vars(Callback).items() if callable(value)}
    hooks = {name: function for name, function in functions.items() if not name.startswith("_")}
    files: dict[str, str] = {}
    for callback in callbacks:
        kind = type(callback).__name__
        hint = f"this is a callback of Lightning's trainer; {replacement_of_callback(type(callback))}"
        require(not is_callback(callback), "trainer.callbacks", kind, hint)
        hint = "pass objects of subclasses of callbacks.Callback"
        require(isinstance(callback, Callback), "trainer.callbacks", getattr(callback, "__name__", kind), hint)
        for name in (name for name in dir(callback) if name.startswith("on_")):
            require(
                name in hooks, "trainer.callbacks", f"{kind}.{name}", f"unknown hook; available: {', '.join(hooks)}"
            )
            available = list(signature(hooks[name]).parameters)[1:]
            parameters = signature(getattr(callback, name)).parameters.values()
            required = [p for p in parameters if p.default is p.empty and p.kind not in COLLECTING]
            wrong = [parameter.name for parameter in required if parameter.name not in available]
            hint = f"arguments are passed by name; available: {', '.join(available)}"
            require(not wrong, "trainer.callbacks", f"{kind}.{name}({', '.join(wrong)})", hint)
        file = getattr(callback, "file", None)
        base = isinstance(callback, Measurement) and not hasattr(callback, "file")
        require(not base, "trainer.callbacks", kind, "a base class, which measures nothing; pass a subclass")
        if isinstance(file, str):
            hint = f"{files.get(file)} already writes {file}; remove one of them"
            require(file not in files, "trainer.callbacks", kind, hint)
            files[file] = kind


def as_list(value: Any) -> list:
    """Return a list from a list, a single object or None."""
    return list(value) if isinstance(value, (list, tuple)) else [] if value is None else [value]


def check_device(device: torch.device, precision: Any = None, devices: Any = 1, workers_per_device: int = 1) -> None:
    """Refuse a device that cannot add updates, an unsupported precision, and too many workers.

    This must not initialise CUDA, since forked processes could not use it then.
    """
    hint = "it lacks float64, in which updates are added; set cpu"
    require(device.type != "mps", "trainer.accelerator", "mps", hint)
    on_cpu = device.type == "cpu"
    half = on_cpu and str(precision) in ("16-mixed", "16", "16-true")
    require(not half, "trainer.precision", precision, "a CPU trains in bf16-mixed or 32-true; pass one of these")
    most_workers = 8 * cpu_count()
    hint = f"this process may use {count(cpu_count(), 'core')}; set auto, or at most {most_workers} workers"
    require(not (on_cpu and str(devices).isdigit() and int(devices) > most_workers), "trainer.devices", devices, hint)
    hint = "on a CPU, trainer.devices is the number of workers; set it, and leave 1 here"
    require(workers_per_device == 1 or not on_cpu, "trainer.workers_per_device", workers_per_device, hint)


def check_precision(device: torch.device, precision: Any) -> None:
    """Refuse a precision that the worker's GPU lacks, and that torch would silently replace."""
    asks = device.type == "cuda" and str(precision).startswith("bf16")
    lacks = asks and not torch.cuda.is_bf16_supported(including_emulation=False)
    require(not lacks, "trainer.precision", precision, "this GPU has no bfloat16; set 16-mixed or 32-true")
