"""What a run is, as plain values made of its built objects: a checkpoint holds it, so that no run resumes as another.

Keys are those of a config, in nested dictionaries. An object is a dictionary with its ``class`` and those arguments of
its constructors that it keeps under their names. A key that one of two descriptions of an object lacks is not compared.
Paths are left out where the data are described, and only there; elsewhere a file is known by what it holds.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from functools import cache, partial
from inspect import signature
from types import BuiltinFunctionType, CodeType, FunctionType, MethodDescriptorType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor, nn
from torch.optim import Optimizer

from fl_lightning.callbacks.base import Callback, named
from fl_lightning.callbacks.early_stopping import EarlyStopping
from fl_lightning.client.stand_in import StandIn
from fl_lightning.data.loaders import num_batches
from fl_lightning.engine.arguments import RunArguments
from fl_lightning.engine.optimizers import Schedulers, group_options
from fl_lightning.engine.validation import COLLECTING
from fl_lightning.records.hyperparameters import PLAIN
from fl_lightning.sources import Code, code_of, content_of

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

    from fl_lightning.engine.run import Run

# arguments of the trainer that change no bit of the model, or that another key below describes
FREE_OF_TRAINER = (
    "max_rounds",
    "eval_every_n_rounds",
    "devices",
    "workers_per_device",
    "num_nodes",
    "timeout",
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


class Nesting(NamedTuple):
    """Within what a value lies.

    Args:
        depth: number of objects that it lies in.
        in_data: whether the data are among them.
    """

    depth: int = 0
    in_data: bool = False

    @property
    def deeper(self) -> Nesting:
        """That of a value in this one."""
        return self._replace(depth=self.depth + 1)


ANYWHERE, IN_DATA = Nesting(), Nesting(in_data=True)


def description(run: Run) -> dict[str, Any]:
    """The description of a run, before its first round."""
    return {
        "trainer": of_trainer(run),
        "model": of_module(run.client.module, *run.local_training.optimizers.first),
        "method": {name: canonical(method) for name, method in named(run.methods.methods).items()},
        "data": of_data(run.data),
        # those that have a state of their own in a checkpoint
        "callbacks": {
            name: canonical(callback)
            for name, callback in named(run.callbacks).items()
            if type(callback).state_dict is not Callback.state_dict
        },
        "code": code_of_run(run.trainer, run.client.module, run.data, run.methods.methods),
    }


def of_trainer(run: Run) -> dict[str, Any]:
    """The arguments of the trainer as they take effect."""
    trainer, factors = run.trainer, run.local_training.lr_factors
    evaluated, watched = {}, run.local_training.monitored.config
    # what decides which rounds are evaluated, where something is decided by the metrics
    if any(isinstance(callback, EarlyStopping) for callback in run.callbacks) or watched is not None:
        asking = [part for part in run.callbacks if type(part).wants_evaluation is not Callback.wants_evaluation]
        evaluated = {
            "eval_every_n_rounds": trainer.eval_every_n_rounds,
            "callbacks": [canonical(part) for part in asking],
        }
    return {
        **{name: canonical(value) for name, value in kept(trainer).items() if name not in FREE_OF_TRAINER},
        "max_rounds": trainer.max_rounds,
        "fast_dev_run": trainer.limit_batches or False,
        "server_optimizer": None if run.server.optimizer is None else of_optimizer(run.server.optimizer),
        "client_lr_scheduler": None if trainer.client_lr_scheduler is None else factors,
        "gradient_clip_algorithm": trainer.gradient_clip_algorithm or "norm",
        "accelerator": run.fabric.device.type,
        "precision": str(run.fabric.strategy.precision.precision),
        "threads_per_worker": torch.get_num_threads(),
        "channels_last": run.loaders.channels_last,
        "clients_per_step": run.local_training.choice.size,
        # auto forms other groups of the same size
        "clients_per_step=auto": run.local_training.choice.least > 2,
        **evaluated,
    }


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
    for key, value in vars(part).items():
        if key in KEPT_BY_TORCH:
            continue
        several = value.items() if isinstance(value, dict) else enumerate(value) if type(value) in (list, tuple) else ()
        for label, item in ((key, value), *((f"{key}.{place}", item) for place, item in several)):
            if is_function(item) and (name or not isinstance(item, partial)):
                alone = not isinstance(item, FunctionType) or "<" not in item.__qualname__  # no other has its name
                yield f"{name}.{label}".lstrip("."), canonical(item) if alone else of_code(item)
    for key, value in kept(part).items() if name else ():
        plain = isinstance(value, (*PLAIN, list, tuple, os.PathLike))
        if plain and (was_free(key) or canonical(value) != canonical(value, IN_DATA)):
            yield f"{name}.{key}", canonical(value)


def of_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer and the options of its groups; a list where they differ from group to group."""
    groups = [canonical(options) for options in group_options(optimizer)]
    keys = dict.fromkeys(key for options in groups for key in options)
    options = {key: [group.get(key) for group in groups] for key in keys}
    same = {
        key: values[0] if all(value == values[0] for value in values) else values for key, values in options.items()
    }
    own = {name: value for name, value in canonical(optimizer).items() if name not in ("params", "defaults")}
    return {**own, **same, "groups": [len(group["params"]) for group in optimizer.param_groups]}


def of_scheduler(config: LRSchedulerConfig) -> dict[str, Any]:
    """A scheduler as it is built: its state, the functions in it by their values, and when it steps."""
    parts = [config.scheduler, *getattr(config.scheduler, "_schedulers", ())]
    functions = [part for scheduler in parts for part in getattr(scheduler, "lr_lambdas", ()) if is_function(part)]
    steps = {name: getattr(config, name) for name in ("interval", "frequency", "monitor", "strict")}
    state = {name: canonical(value) for name, value in config.scheduler.state_dict().items()}
    return {**canonical(config.scheduler), **state, **steps, "functions": [course(function) for function in functions]}


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


def code_of_run(trainer: RunArguments, model: Any, data: Any, methods: Any) -> Code:
    """The user's source files that the objects of a run come from, and what they import, each with a digest.

    What a command adds to the callbacks says how a run is carried out, and counts as little as its loggers.
    """
    arguments = [value for name, value in kept(trainer).items() if name not in FREE_OF_TRAINER]
    callbacks = [part for part in trainer.callbacks if not type(part).__module__.startswith("fl_lightning.cli.")]
    return code_of(modules_of([model, data, methods, arguments, callbacks]))


# ------------------------------------------------------------------ plain values
def canonical(value: Any, place: Nesting = ANYWHERE) -> Any:
    """A value as plain values that are the same in every process: no addresses; of a file, what it holds.

    Where the numbers of an array or the items of a container are many, or lie too deep, something shorter stands for
    them.
    """
    if isinstance(value, (str, os.PathLike)) and not isinstance(value, Enum):
        text = os.fsdecode(value)
        held = None if place.in_data else content_of(text)  # of the file that it names, unless that is one of the data
        return text if held is None else f"{text}{HOLDS}{held}"
    if type(value) in PLAIN:
        return value
    if isinstance(value, (torch.dtype, torch.device, Enum, np.dtype)):
        return str(value)
    if isinstance(value, (int, float)):  # of a subclass
        return next(kind(value) for kind in (int, float) if isinstance(value, kind))
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        array = value.detach().cpu().numpy() if isinstance(value, Tensor) and value.dtype != torch.bfloat16 else value
        array = array.float().cpu().numpy() if isinstance(array, Tensor) else np.asarray(array)
        text = f"{array.dtype} {array.shape}"
        if array.size > MANY or array.dtype == object:
            return text
        return array.tolist() if array.size <= SHOWN else f"{text}, {digest(array.tolist())}"
    if is_function(value) or isinstance(value, type):
        return of_function(value, place)
    if isinstance(value, (Mapping, list, tuple, set, frozenset)):
        if len(value) > MANY or place.depth >= DEPTH:
            return f"{len(value)} items"
        if isinstance(value, Mapping):
            items: Any = {str(key): canonical(part, place.deeper) for key, part in value.items()}
        else:
            items = [canonical(part, place.deeper) for part in value]
        items = sorted(items, key=repr) if isinstance(value, (set, frozenset)) else items
        return items if len(items) <= SHOWN else f"{len(items)} items, {digest(items)}"
    return of_object(value, place)


def of_object(value: Any, place: Nesting) -> dict[str, Any]:
    """An object: its class, and the arguments of its constructors as far as it keeps them."""
    known = kept(value, place.in_data) if place.depth < DEPTH else {}
    return {"class": path_of(type(value)), **{name: canonical(part, place.deeper) for name, part in known.items()}}


def of_function(value: Any, place: Nesting) -> Any:
    """A function or a class by its qualified name; what it is called with, where that is bound to it."""
    if not isinstance(value, partial):
        return path_of(value)
    bound = [canonical(argument, place.deeper) for argument in value.args]
    keywords = {name: canonical(argument, place.deeper) for name, argument in value.keywords.items()}
    return {"class": of_function(value.func, place), **({"args": bound} if bound else {}), **keywords}


def of_code(function: FunctionType) -> str:
    """A function that shares its name with others, with a digest of its code and of the values that it keeps."""
    bound = [canonical(part) for part in (function.__defaults__, function.__kwdefaults__, *contents_of(function))]
    return f"{path_of(function)} {digest([plain_code(function.__code__), bound])}"


def plain_code(code: CodeType) -> list[Any]:
    """Compiled code as plain values, without where it was written; it depends on the minor version of Python."""
    constants = [plain_code(part) if isinstance(part, CodeType) else repr(part) for part in code.co_consts]
    return [code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants]


def is_function(value: Any) -> bool:
    """Whether a value is a function, which has a qualified name, or one with bound arguments."""
    return isinstance(value, (FunctionType, BuiltinFunctionType, MethodDescriptorType, MethodType, partial))


def path_of(kind: Any) -> str:
    """The qualified name of a class or a function; those of this package without their module, as in a config."""
    module, name = getattr(kind, "__module__", None), getattr(kind, "__qualname__", type(kind).__qualname__)
    return name if not module or str(module).split(".")[0] == "fl_lightning" else f"{module}.{name}"


def kept(value: Any, in_data: bool = False) -> dict[str, Any]:
    """What an object keeps of the arguments of its constructors, and of Lightning's ``hparams``; no paths of data."""
    own, hparams = getattr(value, "__dict__", {}), getattr(value, "_hparams", {})
    values = {str(name): value for name, value in hparams.items()} if isinstance(hparams, Mapping) else {}
    kind: Any = type(value)
    for name in arguments_of(kind):
        if name in own or f"_{name}" in own:
            values[name] = own.get(name, own.get(f"_{name}"))
    known = {name: part for name, part in values.items() if counts(name, part, in_data)}
    # of a data set, what says how its examples look
    holds_examples = hasattr(kind, "__getitem__") and hasattr(kind, "__len__")
    return {name: part for name, part in known.items() if not holds_examples or is_setting(name, part)}


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
            with suppress(TypeError, ValueError):  # its constructor is not written in Python
                parameters = list(signature(base.__init__).parameters.values())[1:]
                names |= dict.fromkeys(p.name for p in parameters if p.kind not in COLLECTING)
    return tuple(names)


def course(function: Callable[[int], Any]) -> str:
    """What stands for the values of a schedule's function; it may be defined up to some step only."""
    values: list[float] = []
    with suppress(Exception):
        for step in POINTS:
            values.append(float(function(step)))
    return f"{path_of(function)} {digest(values)}"


def digest(values: list[Any]) -> str:
    """Eight hexadecimal digits that stand for a list of plain values."""
    return hashlib.sha256(repr(values).encode()).hexdigest()[:8]


# what holds no object of the user's, or leads to all objects of the process
LEAVES = (*PLAIN, bytes, Tensor, np.ndarray, np.generic, StandIn)
# what torch keeps in a module beside its parts, such as hooks that lead to the whole run
KEPT_BY_TORCH = vars(nn.Module()).keys() - {"_modules"}
# of a longer container, the first items tell of which classes the others are
LOOKED_AT = 100


def modules_of(objects: Iterable[Any]) -> dict[str, set[str]]:
    """The modules that define the classes and functions of some objects and of all that these keep.

    Returns:
        By module, the outermost names of these classes and functions.
    """
    modules: dict[str, set[str]] = {}
    seen: dict[int, Any] = {}  # they are kept, since the number of one that is gone may be that of another
    waiting = list(objects)
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, LEAVES):
            continue
        seen[id(value)] = value
        # the classes and functions that say what it does
        kind = value if isinstance(value, type) else type(value)
        for definition in [value] if isinstance(value, FunctionType) else kind.__mro__:
            module, name = getattr(definition, "__module__", None), getattr(definition, "__qualname__", "")
            if isinstance(module, str):
                modules.setdefault(module, set()).add(name.split(".")[0])
        waiting += parts_of(value)
    return modules


def parts_of(value: Any) -> Iterator[Any]:
    """What an object keeps."""
    if isinstance(value, (type, ModuleType)):
        return
    if isinstance(value, dict):
        yield from list(value.values())[:LOOKED_AT]
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from list(value)[:LOOKED_AT]
    elif isinstance(value, MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, FunctionType):
        yield from (value.__defaults__, value.__kwdefaults__, *contents_of(value))
    yield from (part for name, part in getattr(value, "__dict__", {}).items() if name not in KEPT_BY_TORCH)


def contents_of(function: FunctionType) -> Iterator[Any]:
    """The values of the variables around a function that it uses."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # it has none yet
            yield cell.cell_contents
