"""Validates arguments, callbacks, module, data, optimizers, device and folders before the first round."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LRSchedulerCallable

from fl_lightning.client import Client
from fl_lightning.client.batch_norm import statistics_of
from fl_lightning.client.client import RECALIBRATES
from fl_lightning.core.method import MethodList, overrides
from fl_lightning.core.sampling import UniformSampler
from fl_lightning.core.seeding import base_seed
from fl_lightning.data.client_loaders import as_client_loader, num_batches
from fl_lightning.data.datamodule import FederatedDataModule
from fl_lightning.engine.argument_checks import as_list
from fl_lightning.engine.run_arguments import RunArguments
from fl_lightning.training.device_loaders import TRANSFER_HOOKS, transfer_hook
from fl_lightning.training.schedules import REQUIRED_TO_TRAIN
from fl_lightning.utilities import lightning_compat
from fl_lightning.utilities.errors import UsageError, check_all, count, few, require, text_of, truncate, writing_into
from fl_lightning.utilities.lightning_compat import is_callback, is_overridden
from fl_lightning.utilities.lightning_replacements import replacement_of_callback

# hooks that Lightning 2 removed and refuses, with their replacements
REMOVED = {
    "configure_sharded_model": "configure_model",
    "training_epoch_end": "on_train_epoch_end",
    "validation_epoch_end": "on_validation_epoch_end",
    "test_epoch_end": "on_test_epoch_end",
}

# total variation of the clients' labels above which averaged statistics cause a warning
STRONG_SKEW = 0.5
# clients listed in a warning
CLIENTS_SHOWN = 10


def check_data_fits(trainer: RunArguments, model: LightningModule, data: Any, methods: MethodList) -> None:
    """Refuse arguments that do not fit the data after its setup; warn of clients without a batch."""
    hint = "its setup does not set a plan; end it with self.plan = self.partition(labels, C)"
    require(hasattr(data, "plan") or not isinstance(data, FederatedDataModule), "data", type(data).__name__, hint)
    size, number = trainer.cohort_size, data.num_clients
    if isinstance(data, FederatedDataModule):
        hint = f"its plan has {len(data.plan.parts)} parts; pass a part for each client"
        require(len(data.plan.parts) == number, "data.num_clients", number, hint)
    num_batches(data, 0)
    hint = f"the data has {count(number, 'client')}; pass at most {number}"
    require(size is None or size <= number, "trainer.cohort_size", size, hint)
    largest = trainer.nominal_cohort(number)
    if type(trainer.sampler) is not UniformSampler:
        trainer.sampler(base_seed(), 0, number, largest)  # refuses an invalid cohort
    hint = f"a cohort has {count(largest, 'client')}; pass at most {largest}"
    require(trainer.min_clients <= largest, "trainer.min_clients", trainer.min_clients, hint)
    if trainer.systems is not None:
        trainer.systems.check(number, trainer.max_rounds, trainer.local_steps or trainer.local_epochs)
    for name in ("max_seconds", "eval_every_seconds") if trainer.clock is None else ():
        seconds = getattr(trainer, name)
        require(seconds is None, f"trainer.{name}", seconds, "simulated seconds need a clock; set trainer.clock")
    if trainer.clock is not None:
        trainer.clock.check(number)
    check_asynchronous(trainer, methods, number)
    if getattr(data, "is_remote", False):  # each site checks its data
        return
    idle = [k for k in range(number) if not num_batches(data, k)]
    if idle:
        text = "no training batch, and their weight is 0; set min_size of the partitioner, fewer "
        text += "data.num_clients, or drop_last=false"
        trainer.warn(f"data: {len(idle)} of {number} clients ({few(idle, CLIENTS_SHOWN)}) have {text}")
    if trainer.cache_references is True:
        for name in TRANSFER_HOOKS:
            hook = transfer_hook(name, model, data)
            owner = type(getattr(hook, "__self__", model)).__name__
            hint = f"{name} of {owner} may change an example from epoch to epoch; set auto or false"
            require(hook is None, "trainer.cache_references", True, hint)
        deterministic = as_client_loader(data.train_dataloader(0)).deterministic
        hint = "the training examples are augmented, or may differ between epochs; set auto or false"
        require(deterministic, "trainer.cache_references", True, hint)


def check_asynchronous(trainer: RunArguments, methods: MethodList, num_clients: int) -> None:
    """Refuse what an asynchronous server cannot do."""
    key, clock, server = "trainer.asynchronous", trainer.clock, trainer.asynchronous
    if server is None:
        return
    size, concurrency = server.size, server.concurrency
    require(clock is not None, "trainer.clock", clock, f"{key} needs the durations of visits; set a Clock")
    deadline = clock.deadline if clock is not None else None
    require(deadline is None, "trainer.clock.deadline", deadline, f"{key} has no rounds to end; set null")
    hint = f"{key} uses {count(size, 'client')} in a step, by its size; omit it"
    require(trainer.participation == 1, "trainer.participation", trainer.participation, hint)
    require(trainer.cohort_size is None, "trainer.cohort_size", trainer.cohort_size, hint)
    hint = f"the data has {count(num_clients, 'client')}; use at most so many"
    require(size <= num_clients, f"{key}.size", size, hint)
    require(concurrency <= num_clients, f"{key}.concurrency", concurrency, hint)
    fresh, single = list[str](), list[str]()
    for method in methods.methods:
        fresh += [type(method).__name__] * method.assumes_fresh
        single += [type(method).__name__] * (overrides(method, "sent_state") or overrides(method, "sent_extras"))
    require(not fresh, f"{key} with method", fresh, "all their clients begin with one state; take them out")
    require(not single, f"{key} with method", single, "each of their clients is sent a state of its own; take them out")


def check_model_fits(model: LightningModule, data: Any, methods: MethodList) -> None:
    """Refuse a model that does not fit the data, and methods that fit neither."""
    model_classes, data_classes = getattr(model, "num_classes", None), getattr(data, "num_classes", None)

    def check_classes() -> None:
        if isinstance(model_classes, int) and isinstance(data_classes, int):
            names = getattr(data, "class_names", ())
            which = f" ({few(names, CLIENTS_SHOWN)})" if names else ""
            hint = f"the data has {data_classes} classes{which}; set {data_classes}"
            require(model_classes >= data_classes, "model.num_classes", model_classes, hint)

    def check_batches() -> None:
        least = getattr(model, "min_batch_size", 1)
        if isinstance(least, int) and least >= 2:
            hint = f"{type(model).__name__} normalises over a batch, and skips batches below {least} examples"
            size = getattr(data.train_dataloader(0), "batch_size", None)
            require(size is None or size >= least, "data.batch_size", size, f"{hint}; set {least} or more")
            small = [k for k in range(data.num_clients) if 0 < data.info(k).num_examples < least]
            hint += "; raise min_size of the partitioner, or lower data.num_clients"
            require(not small, "data.partitioner: clients with fewer examples", few(small, CLIENTS_SHOWN), hint)

    def check_label_counts() -> None:
        names = [type(method).__name__ for method in methods.methods if method.needs_label_counts]
        needing = ", ".join(names)
        if needing:
            counts = data.info(0).label_counts
            hint = "the clients' label counts are unknown; pass a training set with integer labels"
            require(counts is not None, "method", needing, hint)
            hint = f"{needing} counts the labels of {len(counts)} classes; set {len(counts)}"
            fits = not isinstance(model_classes, int) or model_classes == len(counts)
            require(fits, "model.num_classes", model_classes, hint)

    check_all((check_classes, check_batches, check_label_counts))


def check_module(model: LightningModule, stage: str = "fit") -> None:
    """Refuse a module that the command does not support."""
    kind = type(model).__name__
    require(not isinstance(model, type), "model", truncate(repr(model)), "pass an object, such as Net()")
    hint = "it is data, and the model comes first, as in fit(model, data)"
    require(not isinstance(model, LightningDataModule), "model", kind, hint)
    hint = "pass a LightningModule; to compile it, set trainer.compile"
    require(isinstance(model, lightning_compat.LightningModule), "model", kind, hint)
    for name, replacement in REMOVED.items():
        hint = f"Lightning has replaced it by {replacement}; override {replacement}"
        of_lightning = hasattr(LightningModule, name) and not is_overridden(name, model)
        require(of_lightning or not callable(getattr(model, name, None)), "model", f"{kind}.{name}", hint)
    callbacks = as_list(model.configure_callbacks()) if is_overridden("configure_callbacks", model) else []
    kinds = dict.fromkeys(type(part) for part in callbacks if is_callback(part))
    remedies = [f"{part.__name__}: {replacement_of_callback(part)}" for part in kinds]
    hint = "; ".join(remedies) or "pass them as trainer.callbacks"
    names = [type(part).__name__ for part in callbacks]
    require(not callbacks, f"model: {kind}.configure_callbacks()", names, hint)
    for name in REQUIRED_TO_TRAIN if stage == "fit" else ():
        require(is_overridden(name, model), "model", kind, f"it has no {name}; define one")
    takes = "dataloader_iter" not in signature(model.training_step).parameters
    require(
        takes or stage != "fit",
        "model",
        kind,
        "training_step(dataloader_iter) is not supported; use training_step(batch)",
    )
    automatic = stage != "fit" or model.automatic_optimization
    require(automatic, "model", kind, "manual optimization is not supported; return a loss")


def check_data(datamodule: Any) -> None:
    """Refuse a data module without clients."""
    federated = hasattr(datamodule, "num_clients") and hasattr(datamodule, "info")
    hint = "it has no clients; wrap a LightningDataModule in Partitioned, which takes datamodule and num_clients"
    require(federated, "data", type(datamodule).__name__, hint)


def lr_factors(scheduler: LRSchedulerCallable | None, rounds: int) -> list[float]:
    """Return the factor on the clients' learning rates in each round: the rates of ``scheduler`` with base rate 1."""
    if scheduler is None:
        return [1.0] * rounds
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    factors: list[float] = []
    with as_usage_error("trainer.client_lr_scheduler", "pass another schedule, or other arguments"):
        stepped: Any = scheduler(optimizer)
        for _ in range(rounds):
            factors.append(float(optimizer.param_groups[0]["lr"]))
            optimizer.step()
            stepped.step()
    for round_, factor in enumerate(factors):
        hint = "rates must be finite and at least 0; pass another schedule"
        fits = math.isfinite(factor) and factor >= 0
        require(fits, f"trainer.client_lr_scheduler: the factor of round {round_}", factor, hint)
    return factors


@contextmanager
def as_usage_error(key: str, hint: str) -> Iterator[None]:
    """Convert an error of a library about its arguments into a UsageError."""
    try:
        yield
    except UsageError:
        raise
    except (ValueError, TypeError, RuntimeError, ArithmeticError, AttributeError, AssertionError) as error:
        raise UsageError(f"{key}: {truncate(text_of(error), 160)}; {hint}") from error


def check_folder(key: str, folder: Path) -> None:
    """Refuse a folder that cannot be written; it need not exist yet."""
    existing_folder = next(filter(os.path.exists, (folder, *folder.absolute().parents)), Path("/"))
    where = f"{existing_folder} " if existing_folder != folder else "it "
    require(existing_folder.is_dir(), key, str(folder), f"{where}is a file; pass a folder")
    hint = f"{where}is read-only; pass a writable folder"
    require(os.access(existing_folder, os.W_OK | os.X_OK), key, str(folder), hint)
    with writing_into(key, folder), suppress(FileNotFoundError):
        os.lstat(folder)  # fails for a name that is too long
    hint = "the disk is full; free some space, or pass a folder on another disk"
    disk = shutil.disk_usage(existing_folder)
    # a file system without a size, such as one of a FUSE driver, reports 0 bytes in total
    require(disk.total == 0 or disk.free > 2**20, key, str(folder), hint)


def check_buffers(trainer: RunArguments, client: Client) -> None:
    """Refuse recalibration if the model lacks or does not share statistics; warn of statistics never updated."""
    rule, scope, kind = trainer.buffers, trainer.server_optimizer_scope, type(client.module).__name__
    stale = [path for path in client.batch_norms if {*statistics_of(path)}.isdisjoint(client.kept)]
    if stale and rule == "keep":
        text = f"the running statistics of {len(stale)} BatchNorm layers keep their values from the start of the run"
        trainer.warn(f"trainer.buffers=keep: {text}, and the global model is evaluated with them; set recalibrate")
    if rule not in RECALIBRATES:
        return
    hint = f"{kind} has no BatchNorm layer that updates running statistics; set average"
    require(bool(client.batch_norms), "trainer.buffers", rule, hint)
    methods = client.methods.methods
    keeping = [type(method).__name__ for method in methods if not all(map(method.exchanges, client.live))]
    hint = f"method={', '.join(keeping)} keeps entries of the state with each client"
    hint += ", so the run lacks a global model; set average"
    require(client.has_global_model, "trainer.buffers", rule, hint)
    hint = f"trainer.buffers={rule} recomputes statistics that the server optimizer would change; set parameters"
    require(scope == "parameters", "trainer.server_optimizer_scope", scope, hint)


def warn_of_averaged_statistics(trainer: RunArguments, client: Client, data: Any) -> None:
    """Warn of averaged running statistics if the clients' labels differ strongly.

    The measure is the total variation of a client's label distribution from the pooled one, averaged over examples.
    """
    number, layers = data.num_clients, len(client.batch_norms)
    if trainer.buffers != "average" or not (client.has_global_model and layers) or data.info(0).label_counts is None:
        return
    counts = torch.stack([data.info(k).label_counts.double() for k in range(number)])
    shares = counts / counts.sum(1, keepdim=True).clamp_min(1.0)
    weights = counts.sum(1) / counts.sum()
    distance = float(weights @ (shares - weights @ shares).abs().sum(1)) / 2
    if distance > STRONG_SKEW:
        where = f"clients whose labels differ strongly (total variation {distance:.2f})"
        text = f"the running statistics of {layers} BatchNorm layers are averaged over {where}, and do not fit the "
        text += "global model; set recalibrate, or convert the network to GroupNorm by with_group_norm"
        trainer.warn(f"trainer.buffers=average: {text}")


def name_large_batches(data: Any) -> None:
    """Print a line about batches that no client can fill: a local epoch is then one step."""
    if getattr(data, "is_remote", False):
        return
    largest = max(range(data.num_clients), key=lambda k: data.info(k).num_examples)
    size, number = getattr(data.train_dataloader(largest), "batch_size", None), data.info(largest).num_examples
    if isinstance(size, int) and size > number and num_batches(data, largest):
        text = f"the largest client has {number} examples, so a local epoch is one step"
        rank_zero_info(f"data.batch_size={size}: {text}; set at most {number}")


def check_server_optimizer(trainer: RunArguments, parameters: Mapping[str, torch.Tensor]) -> None:
    """Refuse a server optimizer that cannot be built, or fails in a step on zeros of the same shapes."""
    if trainer.server_optimizer is None or not parameters:
        return
    zeros = [torch.nn.Parameter(torch.zeros_like(value.data)) for value in parameters.values()]
    key = "trainer.server_optimizer"
    with as_usage_error(key, "pass another optimizer, or other arguments"):
        optimizer = trainer.server_optimizer(zeros)
        check_options(optimizer, key)
        zeros[0].grad = torch.ones_like(zeros[0])
        optimizer.step()


def check_options(optimizer: torch.optim.Optimizer, key: str) -> None:
    """Refuse an optimizer with an option that is nan or infinite."""
    numbers = {k: v for group in optimizer.param_groups for k, v in group.items() if isinstance(v, float)}
    for name, number in numbers.items():
        require(math.isfinite(number), f"{key}: {type(optimizer).__name__}.{name}", number, "pass a finite number")
