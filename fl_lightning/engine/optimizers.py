"""The client optimizers that a user's module configures.

Lightning's and torch's private names that this needs are used here alone, as of lightning 2.6 and torch 2.15:
``lightning.pytorch.core.optimizer._configure_optimizers`` and ``_configure_schedulers_automatic_opt``, which read what
``configure_optimizers`` may return, and the hooks of ``torch.optim.Optimizer``.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import _configure_optimizers, _configure_schedulers_automatic_opt
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer

from fl_lightning.errors import UsageError

Schedulers = list[LRSchedulerConfig]


def configure_optimizer(module: LightningModule) -> tuple[Optimizer, Schedulers]:
    """A new optimizer (and schedulers) of the user's module.

    Raises:
        UsageError: the module returns no optimizer, or several of them.
    """
    returned: Any = module.configure_optimizers()
    optimizers, schedulers, monitor = _configure_optimizers(returned or [])
    if len(optimizers) != 1:
        raise UsageError(
            f"model={type(module).__name__}: configure_optimizers gives {len(optimizers)} optimizers; "
            "a client is trained with one, return one"
        )
    return optimizers[0], _configure_schedulers_automatic_opt(schedulers, monitor)


class OptimizerSource:
    """Gives each visit an optimizer in its initial state: the one of the last visit after a reset, or a new one.

    Args:
        module: the user's module.
    """

    def __init__(self, module: LightningModule) -> None:
        self.module = module
        self._optimizer: Optimizer | None = None
        self._options: list[dict[str, Any]] = []

    def fresh(self, factor: float) -> tuple[Optimizer, Schedulers]:
        """An optimizer in its initial state, its learning rates multiplied by ``factor``; and its schedulers."""
        schedulers: Schedulers = []
        if self._optimizer is not None and can_reset(self._optimizer):
            optimizer = self._optimizer
            self._reset(optimizer)
        else:
            optimizer, schedulers = configure_optimizer(self.module)
            self._options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            self._optimizer = None if schedulers else optimizer
        scale_learning_rates(optimizer, schedulers, factor)
        return optimizer, schedulers

    def _reset(self, optimizer: Optimizer) -> None:
        optimizer.state.clear()
        for group, options in zip(optimizer.param_groups, self._options, strict=True):
            group.update(options)


def can_reset(optimizer: Optimizer) -> bool:
    """Whether clearing an optimizer's state brings back its initial one: true of torch's own without hooks."""
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    return type(optimizer).__module__.startswith("torch.optim.") and not any(hooks)


def scale_learning_rates(optimizer: Optimizer, schedulers: Schedulers, factor: float) -> None:
    """Multiply the learning rates of an optimizer, and the base rates of its schedulers, by ``factor``."""
    if factor == 1.0:
        return
    for group in optimizer.param_groups:
        for key in ("lr", "initial_lr"):
            if key in group:
                group[key] = group[key] * factor
    for config in schedulers:
        if hasattr(config.scheduler, "base_lrs"):
            config.scheduler.base_lrs = [rate * factor for rate in config.scheduler.base_lrs]
