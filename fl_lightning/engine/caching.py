"""How much memory the cached taps of reference models may take: what ``cache_references`` means in a run."""

from __future__ import annotations

import math
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fl_lightning.engine.loaders import TRANSFER_HOOKS, transfer_hook

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

    from fl_lightning.engine.processes.workers import Workers
    from fl_lightning.trainer import FederatedTrainer

# of the memory that is available when a run begins, for all workers that share it
SHARE = 0.25
# packages whose modules give, in eval mode, the same outputs for the same examples
KNOWN = ("fl_lightning.", "torch.nn.")


def cache_limit(
    trainer: FederatedTrainer, model: LightningModule, data: Any, workers: Workers, device: torch.device
) -> float:
    """Bytes of taps that a worker may cache in a visit, the same number on all workers, which all call this.

    Whether an example may differ from pass to pass, each client's loader says; see ``Loaders.batches``.
    """
    if trainer.cache_references != "auto":
        return math.inf if trainer.cache_references else 0.0
    free = available_memory(device) if gives_same_taps(model, data, device) else 0.0
    places = workers.gather((platform.node(), str(device), free))
    sharing = [place[:2] for place in places]
    free = min(free / sharing.count((node, where)) for node, where, free in places)
    return min(SHARE * free, trainer.client_memory * 2**30)


def gives_same_taps(model: LightningModule, data: Any, device: torch.device) -> bool:
    """Whether it is known that the model, frozen, gives the same taps for the same examples in every pass.

    User code on the way, as a transfer hook, a module's step or a part of its network, could change them. So could
    several threads of a CPU: they share the rows of a small batch such that rounding depends on the place of a row.
    """
    if device.type == "cpu" and torch.get_num_threads() > 1:
        return False
    known = all(type(part).__module__.startswith(KNOWN) for part in model.modules())
    return known and all(transfer_hook(name, model, data) is None for name in TRANSFER_HOOKS)


def available_memory(device: torch.device) -> float:
    """Bytes of memory that are available on a device; 0 where that is not known."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    path = Path("/proc/meminfo")
    lines = path.read_text().splitlines() if device.type == "cpu" and path.exists() else []
    return next((1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), 0.0)
