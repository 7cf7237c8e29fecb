"""What is refused before the first round."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.loggers import Logger
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable

from fl_lightning.callbacks.base import Callback
from fl_lightning.callbacks.refused import replacement
from fl_lightning.data.datamodule import FederatedDataModule
from fl_lightning.data.loaders import as_client_loader
from fl_lightning.engine.compiled import check_compile
from fl_lightning.engine.loaders import TRANSFER_HOOKS, transfer_hook
from fl_lightning.errors import require
from fl_lightning.method import MethodList
from fl_lightning.namespaces import is_callback, is_overridden
from fl_lightning.sampling import size_of_cohort

if TYPE_CHECKING:
    from fl_lightning.trainer import FederatedTrainer

TRAINS = ("training_step", "configure_optimizers")
# the condition on each argument of the trainer that has a range, and the hint where it does not hold
RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "max_rounds": (lambda n: n >= 0, "give 0 or more rounds"),
    "local_epochs": (lambda n: n >= 1, "give 1 or more local epochs"),
    "local_steps": (lambda n: n is None or n >= 1, "give 1 or more, or null"),
    "participation": (lambda share: 0 < share <= 1, "give a share in (0, 1]"),
    "cohort_size": (lambda n: n is None or n >= 1, "give 1 or more, or null"),
    "eval_every_n_rounds": (lambda n: n >= 1, "give 1 or more"),
    "checkpoint_every_n_rounds": (lambda n: n >= 1, "give 1 or more"),
    "strategy": (
        lambda name: name == "auto",
        "it wraps the model, which would average the gradients of different clients; give auto",
    ),
    "client_memory": (lambda size: size >= 0, "give 0 or more GiB"),
    "gradient_clip_val": (lambda norm: norm is None or norm > 0, "give a norm above 0, or null"),
    "gradient_clip_algorithm": (lambda name: name in ("norm", "value", None), "give norm or value"),
    "accumulate_grad_batches": (lambda n: n >= 1, "give 1 or more"),
    "client_schedulers": (lambda name: name in ("continue", "restart"), "give continue or restart"),
    "threads_per_worker": (lambda n: n is None or n >= 1, "give 1 or more, or null"),
    "min_clients": (lambda n: n >= 1, "give 1 or more"),
}

# what Lightning 2 no longer calls, and refuses, with what took its place
REMOVED = {
    "configure_sharded_model": "configure_model",
    "training_epoch_end": "on_train_epoch_end",
    "validation_epoch_end": "on_validation_epoch_end",
    "test_epoch_end": "on_test_epoch_end",
}

# clients that a warning lists
SHOWN = 10


def check_arguments(arguments: dict[str, Any]) -> None:
    """Refuse arguments of the trainer that are out of their range.

    Raises:
        UsageError: an argument is; the error names it.
    """
    for name, (fits, hint) in RANGES.items():
        require(holds(fits, arguments[name]), f"trainer.{name}", arguments[name], hint)
    check_devices(*(arguments[name] for name in ("devices", "workers_per_device", "num_nodes")))
    check_compile(arguments["compile"])


def holds(fits: Callable[[Any], bool], value: Any) -> bool:
    """Whether a value fits; one that cannot be compared with a number does not."""
    try:
        return bool(fits(value))
    except TypeError:
        return False


def check_loggers(logger: Any) -> None:
    """Refuse what is neither a logger nor a list of loggers nor a bool.

    Raises:
        UsageError: it is something else.
    """
    for one in () if isinstance(logger, bool) else as_list(logger):
        hint = "give true, false, or loggers of Fabric or Lightning"
        require(isinstance(one, Logger), "trainer.logger", one, hint)


def check_callbacks(callbacks: list[Any]) -> None:
    """Refuse callbacks whose hooks would not be called as their author means it.

    Raises:
        UsageError: no callback, one of Lightning's own trainer, a hook that does not exist, or a hook with an argument
            that it is not given.
    """
    hooks = {name: function for name, function in vars(Callback).items() if callable(function) and name[0] != "_"}
    for callback in callbacks:
        kind = type(callback).__name__
        hint = f"it is a callback of Lightning's own trainer; {replacement(type(callback))}"
        require(not is_callback(callback), "trainer.callbacks", kind, hint)
        require(isinstance(callback, Callback), "trainer.callbacks", kind, "give subclasses of callbacks.Callback")
        for name in (name for name in dir(callback) if name.startswith("on_")):
            require(name in hooks, "trainer.callbacks", f"{kind}.{name}", f"no such hook; there are {', '.join(hooks)}")
            known = list(signature(hooks[name]).parameters)[1:]
            needed = [p.name for p in signature(getattr(callback, name)).parameters.values() if is_needed(p)]
            wrong = [argument for argument in needed if argument not in known]
            hint = f"its arguments are given by name: {', '.join(known)}"
            require(not wrong, "trainer.callbacks", f"{kind}.{name}({', '.join(wrong)})", hint)


def is_needed(parameter: Parameter) -> bool:
    """Whether a call must give this parameter."""
    collects = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and not collects


def check_data_fits(trainer: FederatedTrainer, model: LightningModule, data: Any, methods: MethodList) -> None:
    """Refuse what does not fit the data, once they are set up.

    Raises:
        UsageError: a cohort of more clients than there are; a model of fewer classes; a method that counts labels where
            there are none; cached references where examples change.
    """
    size, number = trainer.cohort_size, data.num_clients
    hint = f"there are {number} clients, give at most that"
    require(size is None or size <= number, "trainer.cohort_size", size, hint)
    largest = size_of_cohort(number, trainer.participation, size)
    hint = f"a cohort has {largest} clients, give at most that"
    require(trainer.min_clients <= largest, "trainer.min_clients", trainer.min_clients, hint)
    if trainer.systems is not None:
        trainer.systems.check(number, trainer.max_rounds, trainer.local_steps or trainer.local_epochs)
    check_classes(model, data)
    check_batch_sizes(model, data)
    check_label_counts(methods, data)
    methods.check_data(data)
    warn_of_idle_clients(trainer, data)
    if trainer.cache_references:
        check_transfer_hooks(model, data)
    same = not trainer.cache_references or as_client_loader(data.train_dataloader(0)).deterministic
    hint = "the training examples are augmented, or not known to be the same in every epoch; set it to false"
    require(same, "trainer.cache_references", trainer.cache_references, hint)


def as_list(given: Any) -> list:
    """A list, from a list, a single object or None."""
    return list(given) if isinstance(given, (list, tuple)) else [] if given is None else [given]


def can_train(model: LightningModule) -> bool:
    """Whether a module has what local training needs; it can be evaluated without."""
    return all(is_overridden(name, model) for name in TRAINS) and model.automatic_optimization


def check_module(model: LightningModule, stage: str = "fit") -> None:
    """Refuse a module that the command cannot run.

    Raises:
        UsageError: a hook that Lightning no longer calls; callbacks of its own; to fit, no ``training_step`` or
            ``configure_optimizers``, or manual optimization.
    """
    kind = type(model).__name__
    for name, present in REMOVED.items():
        hint = f"Lightning has replaced it by {present}; override that"
        require(not defines(name, model), "model", f"{kind}.{name}", hint)
    check_own_callbacks(model)
    for name in TRAINS if stage == "fit" else ():
        require(is_overridden(name, model), "model", kind, f"it has no {name}; define one")
    takes = "dataloader_iter" not in signature(model.training_step).parameters
    hint = "training_step(dataloader_iter) is not supported, take a batch"
    require(takes or stage != "fit", "model", kind, hint)
    automatic = stage != "fit" or model.automatic_optimization
    require(automatic, "model", kind, "manual optimization is not supported, return a loss")


def defines(name: str, model: LightningModule) -> bool:
    """Whether a module has this method from another class than Lightning's."""
    return callable(getattr(model, name, None)) and (not hasattr(LightningModule, name) or is_overridden(name, model))


def check_own_callbacks(model: LightningModule) -> None:
    """Refuse the callbacks that a module brings: those of a run are arguments of its trainer.

    Raises:
        UsageError: ``configure_callbacks`` returns any.
    """
    given = as_list(model.configure_callbacks()) if is_overridden("configure_callbacks", model) else []
    theirs = {type(one).__name__: replacement(type(one)) for one in given if is_callback(one)}
    hint = "; ".join(f"{name}: {what}" for name, what in theirs.items()) or "give them as trainer.callbacks"
    names = [type(one).__name__ for one in given]
    require(not given, f"model: {type(model).__name__}.configure_callbacks()", names, hint)


def check_data(datamodule: Any) -> None:
    """Refuse a data module that has no clients.

    Raises:
        UsageError: ``datamodule`` is not federated.
    """
    federated = hasattr(datamodule, "num_clients") and hasattr(datamodule, "info")
    hint = "it has no clients; wrap it: class_path: Partitioned, init_args: {datamodule: ..., num_clients: 10}"
    require(federated, "data", type(datamodule).__name__, hint)


def check_classes(model: LightningModule, datamodule: Any) -> None:
    """Refuse a model with fewer classes than the data has.

    Raises:
        UsageError: both declare ``num_classes``, and the model's is smaller.
    """
    ours, theirs = getattr(model, "num_classes", None), getattr(datamodule, "num_classes", None)
    if isinstance(ours, int) and isinstance(theirs, int):
        require(ours >= theirs, "model.num_classes", ours, f"the data has {theirs} classes, give {theirs}")


def check_batch_sizes(model: LightningModule, data: Any) -> None:
    """Refuse clients whose every batch is smaller than those the module trains on, its ``min_batch_size``.

    Raises:
        UsageError: a client would train nothing.
    """
    least = getattr(model, "min_batch_size", 1)
    if not isinstance(least, int) or least < 2:
        return
    hint = f"{type(model).__name__} normalises over a batch, and skips one of less than {least} examples"
    size = getattr(data.train_dataloader(0), "batch_size", None)
    require(size is None or size >= least, "data.batch_size", size, f"{hint}; give {least} or more")
    small = [k for k in range(data.num_clients) if 0 < data.info(k).num_examples < least]
    some = ", ".join(map(str, small[:SHOWN])) + (f" and {len(small) - SHOWN} more" if len(small) > SHOWN else "")
    more = f"give each client {least} or more, by the partitioner's min_size or by fewer data.num_clients"
    require(not small, "data.partitioner: clients with fewer examples", some, f"{hint}; {more}")


def check_label_counts(methods: MethodList, datamodule: Any) -> None:
    """Refuse a method that counts labels where there are none.

    Raises:
        UsageError: the clients' label counts are not known.
    """
    needing = [type(method).__name__ for method in methods.methods if method.needs_label_counts]
    known = not needing or datamodule.info(0).label_counts is not None
    hint = "the clients' label counts are not known; give a training set with integer labels"
    require(known, "method", ", ".join(needing), hint)


def warn_of_idle_clients(trainer: FederatedTrainer, data: Any) -> None:
    """Warn of clients that train nothing because they have no full batch."""
    idle = data.idle_clients() if isinstance(data, FederatedDataModule) else []
    if idle:
        some = ", ".join(map(str, idle[:SHOWN])) + (f" and {len(idle) - SHOWN} more" if len(idle) > SHOWN else "")
        text = "no full batch, and drop_last is set: they train nothing and count with their weight; set it to false"
        trainer.warn(f"data: {len(idle)} of {data.num_clients} clients ({some}) have {text}")


def check_transfer_hooks(model: LightningModule, data: Any) -> None:
    """Refuse hooks that may change a batch on its way to the device where references are cached.

    Raises:
        UsageError: the module or the data module overrides such a hook; the error names it.
    """
    for name in TRANSFER_HOOKS:
        hook = transfer_hook(name, model, data)
        owner = type(getattr(hook, "__self__", model)).__name__
        hint = f"{name} of {owner} may change an example from epoch to epoch; set it to false"
        require(hook is None, "trainer.cache_references", True, hint)


def lr_factors(scheduler: LRSchedulerCallable | None, rounds: int) -> list[float]:
    """The factor on the clients' learning rates in each round: what ``scheduler`` makes of a rate of 1."""
    if scheduler is None:
        return [1.0] * rounds
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    stepped: Any = scheduler(optimizer)
    factors = []
    for _ in range(rounds):
        factors.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        stepped.step()
    require(all(math.isfinite(f) for f in factors), "trainer.client_lr_scheduler", factors, "give a finite schedule")
    return factors


def check_devices(devices: Any, workers_per_device: int, num_nodes: int) -> None:
    """Refuse anything but a number, a list or ``auto`` for the devices, and numbers below 1.

    Raises:
        UsageError: an argument out of its range.
    """
    number = devices if isinstance(devices, int) else int(devices) if str(devices).isdigit() else 1
    counted = isinstance(devices, (int, list)) or str(devices).isdigit() or devices == "auto"
    require(counted and number >= 1, "trainer.devices", devices, "give a number from 1, a list of GPUs, or auto")
    require(workers_per_device >= 1, "trainer.workers_per_device", workers_per_device, "give 1 or more")
    require(num_nodes >= 1, "trainer.num_nodes", num_nodes, "give 1 or more")


def check_precision(precision: Any, device: torch.device) -> None:
    """Refuse a precision that the device lacks; torch would silently use another.

    Raises:
        UsageError: float16 on a CPU, or bfloat16 on a GPU that has none.
    """
    half = device.type == "cpu" and str(precision) in ("16-mixed", "16", "16-true")
    require(not half, "trainer.precision", precision, "a CPU trains in bf16-mixed or 32-true, give one of them")
    lacks = device.type == "cuda" and str(precision).startswith("bf16") and not torch.cuda.is_bf16_supported()
    require(not lacks, "trainer.precision", precision, "this GPU has no bfloat16, give 16-mixed or 32-true")


def check_cores(devices: Any, device: torch.device) -> None:
    """Refuse many more workers than this machine has cores.

    Raises:
        UsageError: more than 8 workers a core.
    """
    asked = int(devices) if str(devices).isdigit() and device.type == "cpu" else 1
    most = 8 * cores()
    hint = f"there are {cores()} cores, give auto, or at most {most} workers"
    require(asked <= most, "trainer.devices", devices, hint)


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
