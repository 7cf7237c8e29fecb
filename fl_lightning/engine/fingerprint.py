"""Describes a run as plain values. Checkpoints hold the description, so that a changed run is not resumed by mistake.

An object is described by its ``class``, the constructor arguments that it stores under their names, and its public
plain attributes, since a class may store an argument under another name. The parsed config is compared as well.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime, timezone
from enum import Enum
from functools import cache, partial
from gc import get_referents
from inspect import getclosurevars, signature
from itertools import repeat
from operator import eq
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fl_lightning.callbacks.base import Callback, named
from fl_lightning.callbacks.early_stopping import EarlyStopping
from fl_lightning.client.lightning.trainer_shim import TrainerShim
from fl_lightning.core.method import ServerValue
from fl_lightning.data.client_loaders import num_batches
from fl_lightning.engine.run import Run
from fl_lightning.engine.run_arguments import RunArguments
from fl_lightning.storage.hyperparameters import PLAIN
from fl_lightning.training.optimizers import group_options
from fl_lightning.utilities.code_fingerprint import Code, code_of, file_digest
from fl_lightning.utilities.errors import ChangedCodeError, UsageError, count, require, truncate
from fl_lightning.utilities.numerics import tf32_settings

Change = tuple[Any, Any]
# arguments of the trainer that do not affect the model, or that another key describes
FREE_OF_TRAINER = (
    *("max_rounds", "max_seconds", "eval_every_n_rounds", "eval_every_seconds", "checkpoint_every_n_rounds"),
    *("devices", "workers_per_device", "num_nodes", "timeout", "strategy", "client_memory", "cache_references"),
    *("callbacks", "logger", "default_root_dir", "name", "on_client_error", "min_clients", "fast_dev_run"),
    "enable_progress_bar",
)
# arguments of the data that do not affect the model, or that the plan's hash describes; Hugging Face's fingerprint may
# differ in each process
FREE_OF_DATA = (
    *("partitioner", "num_clients", "download", "pin_memory", "persistent_workers", "prefetch_factor", "verbose"),
    *("root", "data_dir", "fingerprint"),
)
FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodDescriptorType, MethodType, type)
# torch's own attributes of a module, such as hooks, which refer to the whole run
KEPT_BY_TORCH = vars(nn.Module()).keys() - {"_modules"}
CONTAINERS = (Mapping, list, tuple, set, frozenset)
WITHOUT_CODE = (*PLAIN, bytes, Tensor, np.ndarray, np.generic, TrainerShim, ModuleType)
# limits: nested objects, items of a container, numbers of an array
DEPTH, MOST_ITEMS, MOST_NUMBERS = 8, 1000, 2**14
# maximal characters of a message, of a value and of a path
LONGEST, VALUE, PATH = 290, 36, 60


def description_of(run: Run) -> dict[str, Any]:
    """Return the description of a run, which the first call makes before the first round."""
    if run.description:
        return run.description
    module, config = run.client.module, run.trainer.config or {}
    optimizer, schedulers = run.local_training.optimizers.first
    submodules = {}
    for name, part in module.named_modules():
        if name:
            submodules[name] = {**describe_object(part), "training": part.training}
    parameters = module.named_parameters()
    trained = [f"{name} {value.dtype}" for name, value in parameters if value.requires_grad]
    methods, callbacks = named(run.methods.methods), named(run.callbacks)
    sections = ("model", "method", "data")
    run.description.update(
        trainer=describe_trainer(run),
        model={
            **describe_object(module),
            "modules": submodules,
            "trained": f"{len(trained)} tensors, {digest(trained)}",
            "optimizer": describe_optimizer(optimizer),
            "lr_scheduler": [describe_scheduler(scheduler) for scheduler in schedulers],
        },
        method={name: describe_object(method) for name, method in methods.items()},
        data=describe_data(run.data),
        config={key: to_plain(config.get(key), in_data=key == "data") for key in sections},
        callbacks={name: describe_callback(callback) for name, callback in callbacks.items()},
        code=code_of_run(run.trainer, module, run.data, run.methods.methods),
    )
    return run.description


def describe_trainer(run: Run) -> dict[str, Any]:
    """Describe the arguments of the trainer as they take effect."""
    trainer, local = run.trainer, run.local_training
    description = {
        **to_plain(described_arguments(trainer)),
        "max_rounds": trainer.max_rounds,
        "fast_dev_run": trainer.limit_batches or False,
        "server_optimizer": None if run.server.optimizer is None else describe_optimizer(run.server.optimizer),
        "client_lr_scheduler": None if trainer.client_lr_scheduler is None else local.lr_factors,
        "gradient_clip_algorithm": trainer.gradient_clip_algorithm or "norm",
        "accelerator": run.fabric.device.type,
        "precision": str(run.fabric.strategy.precision.precision),
        "threads_per_worker": torch.get_num_threads(),
        "channels_last": run.loaders.channels_last,
        "deterministic": bool(trainer.deterministic) or None,
        "tf32": tf32_settings() if run.fabric.device.type == "cuda" else None,
        **run.runner.settings(),
    }
    stops_early = any(isinstance(callback, EarlyStopping) for callback in run.callbacks)
    if local.monitored.config is not None or stops_early:  # the result depends on the evaluated rounds
        for name in ("eval_every_n_rounds", "eval_every_seconds"):
            description[name] = getattr(trainer, name)
    return description


def described_arguments(trainer: RunArguments) -> dict[str, Any]:
    """Return the arguments of the trainer that may affect the model."""
    arguments = stored_arguments(trainer)
    return {name: arguments[name] for name in arguments if name not in FREE_OF_TRAINER}


def describe_callback(callback: Callback) -> dict[str, Any]:
    """Describe a callback by its arguments, since a run may change its other attributes."""
    return {"class": path_of(type(callback)), **to_plain(stored_arguments(callback))}


def describe_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    """Describe an optimizer by the options of its groups."""
    groups = [to_plain(options) for options in group_options(optimizer)]
    options = groups[0] if len(groups) == 1 else {"groups": groups}
    numbers = [len(group["params"]) for group in optimizer.param_groups]
    return {"class": path_of(type(optimizer)), **options, "tensors": numbers}


def describe_scheduler(config: Any) -> dict[str, Any]:
    """Describe a new scheduler by its state, its functions, and its step interval."""
    scheduler, functions = config.scheduler, list[Any]()
    for part in (scheduler, *getattr(scheduler, "_schedulers", ())):
        functions += getattr(part, "lr_lambdas", ())
    when = {name: getattr(config, name) for name in ("interval", "frequency", "monitor", "strict")}
    state = to_plain({**scheduler.state_dict(), "functions": functions})
    return {"class": path_of(type(scheduler)), **state, **when}


def describe_data(data: Any) -> dict[str, Any]:
    """Describe the data module, its labels, and the training loader of the first client with batches."""
    k = next((k for k in range(data.num_clients) if num_batches(data, k)), None)
    labels, description = data.plan.labels, describe_object(data, in_data=True)
    loader = {} if k is None else describe_object(data.train_dataloader(k), in_data=True)
    # a DataLoader with a batch size creates its batch sampler
    repeated = {"class", *description, *(["batch_sampler"] if loader.get("batch_size") else [])}
    return {
        **description,
        "labels": None if labels is None else hashlib.sha256(np.asarray(labels, np.int64).tobytes()).hexdigest()[:8],
        "train_dataloader": {name: loader[name] for name in loader if name not in repeated},
    }


def code_of_run(trainer: RunArguments, model: Any, data: Any, methods: Any) -> Code:
    """Return a digest of each of the user's source files that define the objects of a run, and of their imports.

    Loggers and the commands' callbacks are ignored.
    """
    of_commands = "fl_lightning.cli."
    callbacks = [part for part in trainer.callbacks if not type(part).__module__.startswith(of_commands)]
    return code_of(modules_of([model, data, methods, described_arguments(trainer), callbacks]))


def modules_of(objects: Iterable[Any]) -> dict[str, set[str]]:
    """Return the modules that define the classes and functions of objects and, recursively, of their attributes.

    Returns:
        The outermost names of these classes and functions, by module.
    """
    modules: dict[str, set[str]] = {}
    visited: dict[int, Any] = {}  # keeps the objects alive, so that their ids stay unique
    waiting = list(objects)
    while waiting:
        value = waiting.pop()
        if id(value) in visited or isinstance(value, WITHOUT_CODE):
            continue
        visited[id(value)] = value
        kind = value if isinstance(value, type) else type(value)
        for definition in [value] if isinstance(value, FunctionType) else kind.__mro__:
            module, name = getattr(definition, "__module__", None), getattr(definition, "__qualname__", "")
            if isinstance(module, str):
                modules.setdefault(module, set()).add(name.split(".")[0])
        if isinstance(value, FunctionType):  # its globals are in the source
            waiting += [value.__defaults__, value.__kwdefaults__, value.__closure__, vars(value)]
        elif isinstance(value, nn.Module):
            waiting += [part for name, part in vars(value).items() if name not in KEPT_BY_TORCH]
        elif not isinstance(value, type):
            waiting += get_referents(value)[: 2 * MOST_ITEMS]
    return modules


# ------------------------------------------------------------------ plain values
def to_plain(value: Any, depth: int = 0, in_data: bool = False) -> Any:
    """Return a value as plain values that are equal in every process, with files replaced by their digests.

    Args:
        value: the value.
        depth: number of enclosing objects; from :data:`DEPTH` on, only classes and lengths count.
        in_data: whether the value belongs to the data, whose files, paths and options of loading do not count.
    """
    inner = partial(to_plain, depth=depth + 1, in_data=in_data)
    match value:
        case torch.dtype() | torch.device() | Enum() | np.dtype():
            return str(value)
        case str() | os.PathLike():
            text = os.fsdecode(value)
            contents = None if in_data else file_digest(text)
            return text if contents is None else f"sha256 {contents}"
        case bool() | None:
            return value
        case int() | float():
            return value if type(value) in PLAIN else float(value)
        case Tensor() | np.ndarray() | np.generic():
            size, kind = math.prod(value.shape), f"{value.dtype} {tuple(value.shape)}"
            if size > MOST_NUMBERS or value.dtype == object:
                return kind
            return value.tolist() if size <= 16 else f"{kind} {digest(value.tolist())}"
        case partial():
            return {"class": path_of(value.func), "args": inner(value.args), "keywords": inner(value.keywords)}
        case FunctionType():
            enclosed = getclosurevars(value).nonlocals
            constants = {name: enclosed[name] for name in enclosed if type(enclosed[name]) in PLAIN}
            return {"class": path_of(value), **constants}
        case _ if isinstance(value, FUNCTIONS):
            return path_of(value)
        case _ if isinstance(value, CONTAINERS) and (len(value) > MOST_ITEMS or depth >= DEPTH):
            return f"{len(value)} items"
        case Mapping():
            entries, dropped = {}, (nn.Module, torch.Generator, *((os.PathLike,) if in_data else ()))
            for name, part in value.items():
                if not (isinstance(part, dropped) or (in_data and name in FREE_OF_DATA)):
                    entries[str(name)] = inner(part)
            return entries
        case list() | tuple():
            return [inner(part) for part in value]
        case set() | frozenset():
            return sorted(map(inner, value), key=repr)
    return describe_object(value, depth, in_data)


def describe_object(value: Any, depth: int = 0, in_data: bool = False) -> dict[str, Any]:
    """Describe an object by its class, arguments and, outside the data, public plain attributes."""
    kind, description = type(value), {"class": path_of(type(value))}
    if depth >= DEPTH:
        return description
    holds_examples = hasattr(kind, "__getitem__") and hasattr(kind, "__len__")  # a data set, in its containers
    parts = stored_arguments(value, attributes=not (in_data or holds_examples))
    for name, part in [*parts.items()] if holds_examples else ():
        if isinstance(part, CONTAINERS) and not all(map(callable, part)):
            del parts[name]
    return description | to_plain(parts, depth, in_data)


def stored_arguments(value: Any, attributes: bool = False) -> dict[str, Any]:
    """Return the constructor arguments that an object stores under their names, and Lightning's ``hparams``.

    With ``attributes`` also its other public attributes that are plain values or functions.
    """
    kind: Any = type(value)
    parts, names = dict(getattr(value, "_hparams", {})), argument_names(kind)
    for attribute, part in getattr(value, "__dict__", {}).items():
        name, is_plain = attribute.removeprefix("_"), type(part) in PLAIN or isinstance(part, (*FUNCTIONS, partial))
        hidden = attribute != name or name in KEPT_BY_TORCH or isinstance(getattr(kind, name, None), ServerValue)
        if name in names or (attributes and is_plain and not hidden):
            parts[name] = part
    return parts


@cache
def argument_names(kind: Any) -> list[str]:
    """Return the argument names of a class's constructor and of the parents' constructors."""
    names: dict[str, None] = {}
    for base in kind.__mro__[:-1]:
        with suppress(KeyError, TypeError, ValueError):  # its constructor is inherited, or not written in Python
            names |= dict.fromkeys([*signature(vars(base)["__init__"]).parameters][1:])
    return [*names]


def path_of(kind: Any) -> str:
    """Return the qualified name of a class or function; without the module if it is in this package, as in a config."""
    module, name = getattr(kind, "__module__", None), getattr(kind, "__qualname__", type(kind).__qualname__)
    return name if not module or str(module).split(".")[0] == "fl_lightning" else f"{module}.{name}"


def digest(values: list[Any]) -> str:
    """Return eight hexadecimal digits as a digest of plain values."""
    return hashlib.sha256(repr(values).encode()).hexdigest()[:8]


# ------------------------------------------------------------------ comparing
def identity(run: Run) -> dict[str, Any]:
    """Return the identity of a run, which its checkpoints contain."""
    keys = {"seed_everything": run.seed, "method": run.methods.names, "plan_hash": run.data.plan.hash}
    return {**keys, "description": description_of(run)}


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Change]:
    """Return, by key, the different values of two identities, theirs first."""
    keys = [key for key in ours if key != "description" and theirs.get(key) != ours[key]]
    changes = {key: (theirs.get(key), ours[key]) for key in keys}
    before, now = theirs["description"], ours["description"]
    for section in ("trainer", "model", "method", "data"):
        if section in now and section not in changes:  # of another list of methods, only the names are compared
            # a config shows differences that no object stores; a run from Python has no config
            configs = [part.get("config", {}).get(section) for part in (before, now)]
            of_config = differing(configs[0], configs[1], section) if all(configs) else {}
            changes |= differing(before[section], now[section], section) or of_config
    code = now.get("code", {})
    common = {name: digest for name, digest in before["code"].items() if name in code}
    changes |= differing(common, {name: code[name] for name in common}, "code")
    changes.pop("trainer.max_rounds", None)
    factors: Any = changes.get("trainer.client_lr_scheduler")
    # the rounds common to both runs; None is 1 in each
    if factors and all(map(eq, *(part or repeat(1.0) for part in factors))):
        del changes["trainer.client_lr_scheduler"]
    return changes


def differing(theirs: Any, ours: Any, key: str) -> dict[str, Change]:
    """Return, by key, the different values of two descriptions, theirs first."""
    if isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        theirs, ours = dict(enumerate(theirs)), dict(enumerate(ours))
    if not (isinstance(theirs, dict) and isinstance(ours, dict)):
        return {} if theirs == ours or repr(theirs) == repr(ours) else {key: (theirs, ours)}  # nan equals nan
    if theirs.get("class") != ours.get("class"):
        return {key: (theirs.get("class"), ours.get("class"))}
    changes = dict[str, Change]()
    for name in ours | theirs:
        changes |= differing(theirs.get(name), ours.get(name), f"{key}.{name}")
    return changes


def changes_of(
    ours: Mapping[str, Any], run: Run, path: Path, checkpoint: Mapping[str, Any], allowed: bool
) -> dict[str, Change]:
    """Return the differences between this run, with the identity ``ours``, and the run of a checkpoint.

    Returns:
        By key, the values of the checkpoint and of this run.

    Raises:
        UsageError: there are differences that are not ``allowed``; a ChangedCodeError if the user's code differs. The
            partition must always agree, and ``max_rounds`` must cover the completed rounds.
    """
    if "server" not in checkpoint:
        hint = "pass RUN/checkpoints/last.ckpt, or begin a new run with --weights"
        raise UsageError(f"ckpt_path={str(path)!r}: not a checkpoint of a run, it has no server; {hint}")
    changes = differences(ours, checkpoint)
    if "plan_hash" in changes:
        begins = ("seed_everything", "data.")
        causes = {key: changes[key] for key in changes if key.startswith(begins)}
        hint = "the partition differs; restore the data, num_clients and seed, or begin a new run with --weights"
        raise UsageError(message(path, causes or {"plan_hash": changes["plan_hash"]}, hint))
    rounds_done, rounds = checkpoint["round"], run.trainer.max_rounds
    hint = f"the checkpoint has {count(rounds_done, 'round')} done; pass {rounds_done} or more"
    require(rounds >= rounds_done, f"ckpt_path={str(path)!r}: trainer.max_rounds", rounds, hint)
    if changes and not allowed:
        hint = "restore the old values, or continue in a new version with --allow_changes true"
        raise (ChangedCodeError if touches(changes, "code") else UsageError)(message(path, changes, hint))
    return changes


def touches(changes: Mapping[str, Change], *keys: str) -> bool:
    """Return whether one of these keys, a part of it, or a parent of it changed."""
    pairs = [(f"{changed}.", f"{key}.") for changed in changes for key in keys]
    return any(changed.startswith(key) or key.startswith(changed) for changed, key in pairs)


def record(path: Path, checkpoint: Mapping[str, Any], changes: Mapping[str, Change]) -> list[dict[str, Any]]:
    """Return earlier and present changes of a run, for ``changes.yaml`` and the next checkpoints."""
    if not changes:
        return checkpoint["changes"]
    entry = {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "ckpt_path": str(path.absolute()),
        "rounds_done": checkpoint["round"],
        "changes": {key: {"before": before, "now": now} for key, (before, now) in changes.items()},
    }
    return [*checkpoint["changes"], entry]


def message(path: Path, changes: Mapping[str, Change], hint: str) -> str:
    """Return one line that lists the first changes from the run of a checkpoint, and counts the rest."""
    texts = []
    for key, (before, now) in changes.items():
        texts.append(f"{key} was edited" if key.startswith("code.") else f"{key}={shown(now)} (was {shown(before)})")
    for number in range(len(texts), 0, -1):
        remainder = f" and {len(texts) - number} more" if number < len(texts) else ""
        line = f"ckpt_path={truncate(str(path), PATH)!r}: {', '.join(texts[:number])}{remainder}; {hint}"
        if len(line) <= LONGEST:
            break
    return line


def shown(value: Any) -> str:
    """Return a value as shown in messages."""
    return truncate(repr(value.get("class", value) if isinstance(value, dict) else value), VALUE)
