"""What a run is, as plain values made of its built objects: a checkpoint holds it, so that no run resumes as another.

Keys are those of a config, in nested dictionaries. An object is a dictionary with its ``class`` and those arguments of
its constructors that it keeps under their names. A key that one of two descriptions of an object lacks is not compared.
Paths are left out where the data are described, and only there; elsewhere a file is known by what it holds.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from functools import cache, partial
from inspect import Parameter, signature
from types import BuiltinFunctionType, CodeType, FunctionType, MethodDescriptorType, MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.callbacks.base import Callback, named
from fl_lightning.callbacks.early_stopping import EarlyStopping
from fl_lightning.data.loaders import num_batches
from fl_lightning.engine.identity.origins import KEPT_BY_TORCH, contents_of, modules_of
from fl_lightning.engine.optimizers import Schedulers, group_options
from fl_lightning.records.hyperparameters import PLAIN
from fl_lightning.sources import Code, code_of, content_of

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

    from fl_lightning.engine.run import Run
    from fl_lightning.trainer import FederatedTrainer

# arguments of the trainer that change no bit of the model, or that another key below describes
FREE_OF_TRAINER = (
    "max_rounds",
    "eval_every_n_rounds",
    "devices",
    "workers_per_device",
    "num_nodes",
    "strategy",
    "client_memory",
    "cache_references",
    "checkpoint_every_n_rounds",
    "callbacks",
    "logger",
    "default_root_dir",
    "name",
    "on_client_error",
    "min_clients",
    "fast_dev_run",
    "enable_progress_bar",
)
# arguments of the data that change no bit, or that the hash of the plan describes
FREE = ("download", "partitioner", "num_clients", "pin_memory", "persistent_workers", "prefetch_factor")
# a name with one of these words may be that of a path
PATHS = {"root", "path", "paths", "dir", "dirs", "folder", "file", "files", "filename", "cache"}
# objects within objects, counted from the outermost
DEPTH = 8
# items that are listed; more of them, up to MANY, are represented by a digest, and beyond that by their number
SHOWN, MANY = 16, 2**14
# between the name of a file and the digest of what it holds
HOLDS = ", sha256 "
# at which steps the function of a schedule is compared
POINTS = (*range(100), *(int(100 * 1.05**i) for i in range(190)))


class Place(NamedTuple):
    """Where a value lies.

    Args:
        depth: number of objects that it lies in.
        in_data: whether the data are among them.
    """

    depth: int = 0
    in_data: bool = False

    @property
    def deeper(self) -> Place:
        """That of a value in this one."""
        return self._replace(depth=self.depth + 1)


ANYWHERE, IN_DATA = Place(), Place(in_data=True)


def description(run: Run) -> dict[str, Any]:
    """The description of a run, before its first round."""
    return {
        "trainer": of_trainer(run),
        "model": of_module(run.client.module, *run.local_training.optimizers.first),
        "method": {name: canonical(one) for name, one in named(run.methods.methods).items()},
        "data": of_data(run.data),
        "callbacks": {name: canonical(one) for name, one in named(run.callbacks).items() if has_state(one)},
        "code": code_of_run(run.trainer, run.client.module, run.data, run.methods.methods),
    }


def of_trainer(run: Run) -> dict[str, Any]:
    """The arguments of the trainer as they take effect."""
    trainer, factors = run.trainer, run.local_training.lr_factors
    given = {name: value for name, value in kept(trainer).items() if name not in FREE_OF_TRAINER}
    return {
        **{name: canonical(value) for name, value in given.items()},
        "max_rounds": trainer.max_rounds,
        "fast_dev_run": trainer.limit_batches or False,
        "server_optimizer": None if run.server.optimizer is None else of_optimizer(run.server.optimizer),
        "client_lr_scheduler": None if trainer.client_lr_scheduler is None else factors,
        "gradient_clip_algorithm": trainer.gradient_clip_algorithm or "norm",
        "accelerator": run.fabric.device.type,
        "precision": str(run.fabric.strategy.precision.precision),
        "threads_per_worker": torch.get_num_threads(),
        "channels_last": run.loaders.channels_last,
        **of_evaluation(run),
    }


def of_evaluation(run: Run) -> dict[str, Any]:
    """What decides which rounds are evaluated, where something is decided by the metrics."""
    stops = any(isinstance(one, EarlyStopping) for one in run.callbacks)
    if not stops and run.local_training.monitored.config is None:
        return {}
    asking = [one for one in run.callbacks if type(one).wants_evaluation is not Callback.wants_evaluation]
    return {"eval_every_n_rounds": run.trainer.eval_every_n_rounds, "callbacks": [canonical(one) for one in asking]}


def of_module(module: LightningModule, optimizer: Optimizer, schedulers: Schedulers) -> dict[str, Any]:
    """The user's module: its arguments, its parts, and what its ``configure_optimizers`` returns."""
    trained = [f"{name} {value.dtype}" for name, value in module.named_parameters() if value.requires_grad]
    return {
        **canonical(module),
        "modules": {name: of_part(part) for name, part in module.named_modules() if name},
        "trained": f"{len(trained)} tensors, {digest(trained)}",
        "optimizer": of_optimizer(optimizer),
        "lr_scheduler": [of_scheduler(config) for config in schedulers],
        "attributes": {key: value for name, part in module.named_modules() for key, value in attributes_of(name, part)},
    }


def of_part(part: torch.nn.Module) -> str:
    """The class of a submodule with its plain arguments, and whether it stays in evaluation mode."""
    known = {name: value for name, value in kept(part).items() if isinstance(value, (*PLAIN, list, tuple))}
    plain = {name: canonical(value, IN_DATA) for name, value in known.items() if not was_free(name)}
    arguments = ", ".join(f"{name}={value}" for name, value in plain.items())
    return f"{type(part).__name__}({arguments}){'' if part.training else ' in evaluation mode'}"


def attributes_of(name: str, part: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """What :func:`of_part` does not say of a submodule: its functions, such as an activation, and files.

    Of the whole module, whose arguments are described anyway, the functions without arguments: others often make an
    optimizer, which is described as it is made.
    """
    given = {key: value for key, value in vars(part).items() if key not in KEPT_BY_TORCH}
    for key, value in given.items():
        several = value.items() if isinstance(value, dict) else enumerate(value) if type(value) in (list, tuple) else ()
        for label, one in ((key, value), *((f"{key}.{item}", one) for item, one in several)):
            if is_function(one) and (name or not isinstance(one, partial)):
                yield f"{name}.{label}".lstrip("."), canonical(one) if is_named(one) else of_code(one)
    for key, value in kept(part).items() if name else ():
        plain = isinstance(value, (*PLAIN, list, tuple, os.PathLike))
        if plain and (was_free(key) or canonical(value) != canonical(value, IN_DATA)):
            yield f"{name}.{key}", canonical(value)


def of_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer and the options of its groups; a list where they differ from group to group."""
    groups = [canonical(options) for options in group_options(optimizer)]
    keys = dict.fromkeys(key for options in groups for key in options)
    options = {key: [group.get(key) for group in groups] for key in keys}
    same = {key: values[0] if all(one == values[0] for one in values) else values for key, values in options.items()}
    own = {name: value for name, value in canonical(optimizer).items() if name not in ("params", "defaults")}
    return {**own, **same, "groups": [len(group["params"]) for group in optimizer.param_groups]}


def of_scheduler(config: LRSchedulerConfig) -> dict[str, Any]:
    """A scheduler as it is built: its state, the functions in it by their values, and when it steps."""
    parts = [config.scheduler, *getattr(config.scheduler, "_schedulers", ())]
    functions = [one for part in parts for one in getattr(part, "lr_lambdas", ()) if is_function(one)]
    steps = {name: getattr(config, name) for name in ("interval", "frequency", "monitor", "strict")}
    state = {name: canonical(value) for name, value in config.scheduler.state_dict().items()}
    return {**canonical(config.scheduler), **state, **steps, "functions": [course(one) for one in functions]}


def of_data(data: Any) -> dict[str, Any]:
    """The data module, and the training loader of the first client that has any batches: its sampler, its transforms.

    The hash of the plan, which a checkpoint holds as well, says who holds what.
    """
    k = next((k for k in range(data.num_clients) if num_batches(data, k)), None)
    # as an object: of a list of batches, its class
    own, loader = canonical(data, IN_DATA), {} if k is None else of_object(data.train_dataloader(k), IN_DATA)
    # a DataLoader of a batch size has made the sampler of batches itself
    again = {*own, *(["batch_sampler"] if loader.get("batch_size") else [])} - {"class"}
    more = {name: value for name, value in loader.items() if name not in again}
    return {**own, "train_dataloader": more}


def code_of_run(trainer: FederatedTrainer, model: Any, data: Any, methods: Any) -> Code:
    """The user's source files that the objects of a run come from, and what they import, each with a digest.

    What a command adds to the callbacks says how a run is carried out, and counts as little as its loggers.
    """
    arguments = [value for name, value in kept(trainer).items() if name not in FREE_OF_TRAINER]
    callbacks = [one for one in trainer.callbacks if not type(one).__module__.startswith("fl_lightning.cli.")]
    return code_of(modules_of([model, data, methods, arguments, callbacks]))


def has_state(callback: Any) -> bool:
    """Whether a callback has a state of its own in a checkpoint."""
    return type(callback).state_dict is not Callback.state_dict


# ------------------------------------------------------------------ plain values
def canonical(value: Any, place: Place = ANYWHERE) -> Any:
    """A value as plain values that are the same in every process: no addresses; of a file, what it holds."""
    if isinstance(value, (str, os.PathLike)) and not isinstance(value, Enum):
        return of_text(os.fsdecode(value), place)
    if type(value) in PLAIN:
        return value
    if isinstance(value, (torch.dtype, torch.device, Enum, np.dtype)):
        return str(value)
    if isinstance(value, (int, float)):  # of a subclass
        return next(kind(value) for kind in (int, float) if isinstance(value, kind))
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        return of_array(value)
    if is_function(value) or isinstance(value, type):
        return of_function(value, place)
    if isinstance(value, (Mapping, list, tuple, set, frozenset)):
        return of_items(value, place)
    return of_object(value, place)


def of_text(text: str, place: Place) -> str:
    """A text; with a digest of what the file holds that it names, unless it is one of the data."""
    held = None if place.in_data else content_of(text)
    return text if held is None else f"{text}{HOLDS}{held}"


def of_items(values: Any, place: Place) -> Any:
    """A container: its items, or what stands for them where they are many or lie too deep."""
    if len(values) > MANY or place.depth >= DEPTH:
        return f"{len(values)} items"
    if isinstance(values, Mapping):
        items: Any = {str(key): canonical(one, place.deeper) for key, one in values.items()}
    else:
        items = [canonical(one, place.deeper) for one in values]
    items = items if isinstance(values, (Mapping, list, tuple)) else sorted(items, key=repr)
    return items if len(items) <= SHOWN else f"{len(items)} items, {digest(items)}"


def of_object(value: Any, place: Place) -> dict[str, Any]:
    """An object: its class, and the arguments of its constructors as far as it keeps them."""
    known = kept(value, place.in_data) if place.depth < DEPTH else {}
    return {"class": path_of(type(value)), **{name: canonical(one, place.deeper) for name, one in known.items()}}


def of_array(value: Any) -> Any:
    """An array: its numbers, or what stands for them where they are many."""
    array = value.detach().cpu().numpy() if isinstance(value, Tensor) and value.dtype != torch.bfloat16 else value
    array = array.float().cpu().numpy() if isinstance(array, Tensor) else np.asarray(array)
    text = f"{array.dtype} {array.shape}"
    if array.size > MANY or array.dtype == object:
        return text
    return array.tolist() if array.size <= SHOWN else f"{text}, {digest(array.tolist())}"


def of_function(value: Any, place: Place) -> Any:
    """A function or a class by its qualified name; what it is called with, where that is bound to it."""
    if not isinstance(value, partial):
        return path_of(value)
    bound = [canonical(one, place.deeper) for one in value.args]
    keywords = {name: canonical(one, place.deeper) for name, one in value.keywords.items()}
    return {"class": of_function(value.func, place), **({"args": bound} if bound else {}), **keywords}


def of_code(function: FunctionType) -> str:
    """A function that shares its name with others, with a digest of its code and of the values that it keeps."""
    bound = [canonical(one) for one in (function.__defaults__, function.__kwdefaults__, *contents_of(function))]
    return f"{path_of(function)} {digest([plain_code(function.__code__), bound])}"


def plain_code(code: CodeType) -> list[Any]:
    """Compiled code as plain values, without where it was written; it depends on the minor version of Python."""
    constants = [plain_code(one) if isinstance(one, CodeType) else repr(one) for one in code.co_consts]
    return [code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants]


def is_function(value: Any) -> bool:
    """Whether a value is a function, which has a qualified name, or one with bound arguments."""
    return isinstance(value, (FunctionType, BuiltinFunctionType, MethodDescriptorType, MethodType, partial))


def is_named(function: Any) -> bool:
    """Whether no other function has the same qualified name."""
    return not isinstance(function, FunctionType) or "<" not in function.__qualname__


def path_of(kind: Any) -> str:
    """The qualified name of a class or a function; those of this package without their module, as in a config."""
    module, name = getattr(kind, "__module__", None), getattr(kind, "__qualname__", type(kind).__qualname__)
    return name if not module or str(module).split(".")[0] == "fl_lightning" else f"{module}.{name}"


def kept(value: Any, in_data: bool = False) -> dict[str, Any]:
    """What an object keeps of the arguments of its constructors, and of Lightning's ``hparams``; no paths of data."""
    own, hparams = getattr(value, "__dict__", {}), getattr(value, "_hparams", {})
    given = {str(name): one for name, one in hparams.items()} if isinstance(hparams, Mapping) else {}
    kind: Any = type(value)
    for name in arguments_of(kind):
        for attribute in (f"_{name}", name):
            given |= {name: own[attribute]} if attribute in own else {}
    known = {name: one for name, one in given.items() if counts(name, one, in_data)}
    return {name: one for name, one in known.items() if not holds_examples(value) or is_setting(name, one)}


def counts(name: str, value: Any, in_data: bool) -> bool:
    """Whether an argument may change a result: no random generator, no part of a module, no path of data."""
    free = name == "verbose" or isinstance(value, (torch.Generator, torch.nn.Module))
    path = isinstance(value, os.PathLike) or (was_free(name) and is_texts(value))
    return not free and not (in_data and (path or name in FREE))


def was_free(name: str) -> bool:
    """Whether former versions described no argument of this name, wherever it was."""
    return name in FREE or not PATHS.isdisjoint(name.split("_"))


def is_texts(value: Any) -> bool:
    """Whether a value consists of texts, or only says whether there is one, as a path or several do."""
    if isinstance(value, (Mapping, list, tuple)):
        return all(map(is_texts, value.values() if isinstance(value, Mapping) else value))
    return value is None or isinstance(value, (str, bool, os.PathLike))


def holds_examples(value: Any) -> bool:
    """Whether an object is a data set: what it holds is not described."""
    return all(hasattr(type(value), name) for name in ("__getitem__", "__len__"))


def is_setting(name: str, value: Any) -> bool:
    """Whether an argument of a data set says how examples are given: a plain one, a transform, a data set inside."""
    plain = type(value) in PLAIN and name != "fingerprint"  # of a data set of Hugging Face; it may be random
    return plain or isinstance(value, (Tensor, np.ndarray)) or any(part in name for part in ("transform", "dataset"))


@cache
def arguments_of(kind: Any) -> tuple[str, ...]:
    """Names of the arguments of a class's constructor, and of those of its parents."""
    names: dict[str, None] = {}
    for base in kind.__mro__:
        if "__init__" in vars(base) and base is not object:
            names |= dict.fromkeys(arguments_of_constructor(base.__init__))
    return tuple(names)


def arguments_of_constructor(constructor: Any) -> list[str]:
    """Names of the arguments of a constructor, without collected ones."""
    try:
        parameters = list(signature(constructor).parameters.values())[1:]
    except (TypeError, ValueError):  # it is not written in Python
        return []
    return [one.name for one in parameters if one.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)]


def course(function: Callable[[int], Any]) -> str:
    """What stands for the values of a schedule's function; it may be defined up to some step only."""
    values = []
    for step in POINTS:
        try:
            values.append(float(function(step)))
        except Exception:
            break
    return f"{path_of(function)} {digest(values)}"


def digest(values: list[Any]) -> str:
    """Eight hexadecimal digits that stand for a list of plain values."""
    return hashlib.sha256(repr(values).encode()).hexdigest()[:8]
