"""The client optimizers that a user's module configures.

Private names of torch, as of torch 2.6 and 2.15: the hooks and the flag ``_opt_called`` of ``torch.optim.Optimizer``,
and ``torch.autograd._profiler_enabled``.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import cache, cached_property
from inspect import Parameter, signature
from operator import is_
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer

from fl_lightning.client.lightning.private import configure_optimizers, configure_schedulers
from fl_lightning.storage.serializable import with_tensors
from fl_lightning.training.patching import patched
from fl_lightning.utilities.errors import ClientError, UsageError, require, text_of

Schedulers = list[LRSchedulerConfig]


def configure_optimizer(module: LightningModule) -> tuple[Optimizer, Schedulers]:
    """A new optimizer (and schedulers) of the user's module."""
    kind = f"model={type(module).__name__}: configure_optimizers"
    trainer: Any = module.trainer
    start = patched(trainer.fit_progress, round=0, epoch=0, step=0)  # where Lightning calls it
    try:
        with start, patched(module, _current_fx_name="configure_optimizers"):  # for self.log
            returned: Any = module.configure_optimizers()
    except (ValueError, TypeError) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        # an error in the user's own code keeps its traceback
        if not frame.filename.startswith(torch.__path__[0]):
            raise
        raise UsageError(f"{kind}: {error}; change the arguments of the optimizer") from error
    try:
        optimizers, schedulers, monitor = configure_optimizers(returned or [])
        configs = configure_schedulers(schedulers, monitor)
    except (MisconfigurationException, KeyError) as error:  # a dictionary without an optimizer
        raise UsageError(f"{kind}: {' '.join(text_of(error).split())}") from error
    if len(optimizers) != 1:
        raise UsageError(f"{kind} gives {len(optimizers)} optimizers; a client is trained with one, return one")
    schedulers_of_run = [config.scheduler for config in configs]
    strays = [type(s).__name__ for s in schedulers_of_run if getattr(s, "optimizer", None) is not optimizers[0]]
    hint = "is not a scheduler of the returned optimizer; create it with that optimizer, or remove it"
    require(not strays, f"{kind}: lr_scheduler", ", ".join(strays), hint)
    optimizers[0]._opt_called = True  # else a scheduler that is brought forward warns
    return optimizers[0], configs


class OptimizerFactory:
    """Gives each visit an optimizer in its initial state: the one of the last visit after a reset, or a new one."""

    def __init__(self, module: LightningModule) -> None:
        self.module = module
        self._optimizer: Optimizer | None = None
        self._options: list[dict[str, Any]] = []

    @cached_property
    def first(self) -> tuple[Optimizer, Schedulers]:
        """An optimizer with its schedulers, to be inspected before the first visit."""
        return configure_optimizer(self.module)

    @cached_property
    def depends_on_batches(self) -> bool:
        """Whether the options, such as a rate, depend on the client's number of batches."""
        trainer: Any = self.module.trainer
        fit_progress, options = trainer.fit_progress, list[str]()
        for batches in (1, 2):
            with patched(fit_progress, batches=batches):
                options.append(repr(group_options(configure_optimizer(self.module)[0])))
        return options[0] != options[1]

    def fresh(self) -> tuple[Optimizer, Schedulers]:
        """An optimizer in its initial state, and new schedulers of it, without those that watch a metric."""
        is_unchanged = self._optimizer is not None and len(self._optimizer.param_groups) == len(self._options)
        if self._optimizer is not None and is_unchanged:
            optimizer = self._optimizer
            hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
            # torch's own optimizers without hooks have no other state
            if type(optimizer).__module__.startswith("torch.optim.") and not hooks:
                optimizer.state.clear()
                set_group_options(optimizer, self._options)
                return optimizer, []
        attributes = dict(vars(self.module))
        optimizer, schedulers = configure_optimizer(self.module)
        self._options = group_options(optimizer)
        set_group_options(optimizer, self._options)  # calls may share a tensor
        # an attribute that configure_optimizers sets may refer to this optimizer
        now = vars(self.module)
        is_unchanged = now.keys() == attributes.keys() and all(map(is_, now.values(), attributes.values()))
        again = schedulers or optimizer.state or not is_unchanged or self.depends_on_batches
        self._optimizer = None if again else optimizer
        return optimizer, schedulers

    def check(self, optimizer: Optimizer) -> None:
        """Refuse parameter groups that a visit has added, since the next one begins without them."""
        if len(optimizer.param_groups) != len(self._options):
            hint = "return all groups from configure_optimizers, and set requires_grad to False until they are trained"
            raise ClientError(f"add_param_group: the next visit begins without the groups that this one adds; {hint}")


def group_options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """A copy of the options of each parameter group."""
    groups: list[dict[str, Any]] = [dict(group) for group in optimizer.param_groups]
    for group in groups:
        del group["params"]
    return with_tensors(groups, lambda tensor: tensor.detach().clone())


def set_group_options(optimizer: Optimizer, options: list[dict[str, Any]]) -> None:
    """Set the options of each parameter group to copies: a tensor, such as a rate, may change in place."""
    for group, values in zip(optimizer.param_groups, options, strict=True):
        group.update(with_tensors(values, torch.clone))


def set_mode(optimizer: Optimizer, mode: Literal["train", "eval"]) -> None:
    """Call ``train()`` or ``eval()`` of an optimizer that has it: schedule-free ones change the parameters then."""
    switch = getattr(optimizer, mode, None)
    if callable(switch):
        switch()


def clear_gradients(optimizer: Optimizer) -> None:
    """``optimizer.zero_grad()``, without a profiler's span where no profiler runs."""
    is_custom = type(optimizer).zero_grad is not Optimizer.zero_grad or "zero_grad" in vars(optimizer)
    if is_custom or torch.autograd._profiler_enabled():
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


@cache
def needs_closure(step: Callable[..., Any]) -> bool:
    """Whether the ``step`` of a class of optimizers requires a closure, as that of LBFGS does."""
    closure = signature(step).parameters.get("closure")
    return closure is not None and closure.default is Parameter.empty
