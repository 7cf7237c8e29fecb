"""What is refused before the first round."""

from __future__ import annotations

import math
import os
from typing import Any

import torch
import torch._inductor
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable
from lightning.pytorch.utilities.model_helpers import is_overridden

from fl_lightning.errors import require
from fl_lightning.method import MethodList


def as_list(given: Any) -> list:
    """A list of what may be a list, one thing or None."""
    return list(given) if isinstance(given, (list, tuple)) else [] if given is None else [given]


def check_module(model: LightningModule) -> None:
    """Refuse what the loop cannot drive.

    Raises:
        UsageError: no ``training_step`` or ``configure_optimizers``, or manual optimization.
    """
    kind = type(model).__name__
    for name in ("training_step", "configure_optimizers"):
        require(is_overridden(name, model), "model", kind, f"it has no {name}; define one")
    require(model.automatic_optimization, "model", kind, "manual optimization is not supported, return a loss")


def check_data(datamodule: Any) -> None:
    """Refuse a data module that has no clients.

    Raises:
        UsageError: ``datamodule`` is not federated.
    """
    federated = hasattr(datamodule, "num_clients") and hasattr(datamodule, "info")
    mend = "it has no clients; wrap it: class_path: Partitioned, init_args: {datamodule: ..., num_clients: 10}"
    require(federated, "data", type(datamodule).__name__, mend)


def check_classes(model: LightningModule, datamodule: Any) -> None:
    """Refuse a model with fewer classes than the data has.

    Raises:
        UsageError: both declare ``num_classes``, and the model's is smaller.
    """
    ours, theirs = getattr(model, "num_classes", None), getattr(datamodule, "num_classes", None)
    if isinstance(ours, int) and isinstance(theirs, int):
        require(ours >= theirs, "model.num_classes", ours, f"the data has {theirs} classes, give {theirs}")


def check_label_counts(methods: MethodList, datamodule: Any) -> None:
    """Refuse a method that counts labels where there are none.

    Raises:
        UsageError: the clients' label counts are not known.
    """
    needing = [type(method).__name__ for method in methods.methods if method.needs_label_counts]
    known = not needing or datamodule.info(0).label_counts is not None
    mend = "the clients' label counts are not known; give a training set with integer labels"
    require(known, "method", ", ".join(needing), mend)


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
    """Refuse what is no number or list of devices.

    Raises:
        UsageError: an argument out of its range.
    """
    number = devices if isinstance(devices, int) else int(devices) if str(devices).isdigit() else 1
    counted = isinstance(devices, (int, list)) or str(devices).isdigit() or devices == "auto"
    require(counted and number >= 1, "trainer.devices", devices, "give a number from 1, a list of GPUs, or auto")
    require(workers_per_device >= 1, "trainer.workers_per_device", workers_per_device, "give 1 or more")
    require(num_nodes >= 1, "trainer.num_nodes", num_nodes, "give 1 or more")


def check_precision(precision: Any, device: torch.device) -> None:
    """Refuse a precision that the device lacks, for which another would be taken silently.

    Raises:
        UsageError: float16 on a CPU, or bfloat16 on a GPU that has none.
    """
    half = device.type == "cpu" and str(precision) in ("16-mixed", "16", "16-true")
    require(not half, "trainer.precision", precision, "a CPU trains in bf16-mixed or 32-true, give one of them")
    lacks = device.type == "cuda" and str(precision).startswith("bf16") and not torch.cuda.is_bf16_supported()
    require(not lacks, "trainer.precision", precision, "this GPU has no bfloat16, give 16-mixed or 32-true")


def check_compile(mode: bool | str) -> None:
    """Refuse a mode that ``torch.compile`` does not have.

    Raises:
        UsageError: it is none of them.
    """
    modes = list(torch._inductor.list_mode_options()) if isinstance(mode, str) else []
    require(not modes or mode in modes, "trainer.compile", mode, f"give true, false or one of {', '.join(modes)}")


def check_cores(devices: Any, device: torch.device) -> None:
    """Refuse many more workers than this machine has cores.

    Raises:
        UsageError: more than 8 workers a core.
    """
    asked = int(devices) if str(devices).isdigit() and device.type == "cpu" else 1
    most = 8 * cores()
    mend = f"there are {cores()} cores, give auto, or at most {most} workers"
    require(asked <= most, "trainer.devices", devices, mend)


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
