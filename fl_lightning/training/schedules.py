"""The learning-rate schedulers that a user's module returns, stepped as in one fit."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from fl_lightning.client import Client
from fl_lightning.client.lightning.fit_progress import FitProgress
from fl_lightning.client.lightning.module_snapshot import ModuleSnapshot
from fl_lightning.core.seeding import rng_scope
from fl_lightning.training.optimizers import (
    OptimizerFactory,
    Schedulers,
    configure_optimizer,
    group_options,
    set_group_options,
)
from fl_lightning.training.patching import patched
from fl_lightning.utilities.errors import UsageError, require
from fl_lightning.utilities.lightning_compat import is_overridden

Mode = Literal["continue", "restart"]

# hooks of a module that clients can train
REQUIRED_TO_TRAIN = ("training_step", "configure_optimizers")


def can_train(module: Any) -> bool:
    """Return whether a module supports local training, which evaluation does not require."""
    return all(is_overridden(name, module) for name in REQUIRED_TO_TRAIN) and module.automatic_optimization


class Schedules:
    """Steps a visit's schedulers, and sets their position at the start of the visit.

    With ``continue``, the position is as if this client had trained in every earlier round. It is recomputed from the
    last position in the cache, and never saved. With ``restart``, each visit begins at the start of the schedule.
    """

    def __init__(self, client: Client, mode: Mode = "continue") -> None:
        self.client, self.mode = client, mode
        # a cache by the number of batches in a client's epoch, which alone determines a schedule: a number of rounds,
        # and the states of schedulers and optimizer after them
        self._positions: dict[int, tuple[int, list[Any], list[dict[str, Any]]]] = {}

    @property
    def _fit_progress(self) -> FitProgress:
        return self.client.worker_module.trainer_shim.fit_progress

    def begin_visit(self, optimizer: Optimizer, configs: Schedulers) -> None:
        """Set new schedulers, and the optimizer's learning rates, to their position at the start of this visit."""
        # schedulers that watch a metric belong to the server, and take no steps here
        idle = all(config.reduce_on_plateau for config in configs)
        if self.mode == "restart" or idle or self._fit_progress.round == 0:
            return
        now, batches = self._fit_progress.round, self._fit_progress.batches
        rounds_done, states, options = self._positions.get(batches, (0, [], []))
        rounds_done = rounds_done if rounds_done <= now else 0
        if rounds_done:
            for config, state in zip(configs, states, strict=True):
                config.scheduler.load_state_dict(copy.deepcopy(state))
            set_group_options(optimizer, options)
        with self._unseen(optimizer, *(config.scheduler for config in configs)):
            for round_ in range(rounds_done, now):
                self._pass_round(configs, round_)
        self._fit_progress.round, self._fit_progress.epoch, self._fit_progress.step = now, 0, 0
        states = [copy.deepcopy(config.scheduler.state_dict()) for config in configs]
        self._positions[batches] = now, states, group_options(optimizer)

    def after_batch(self, configs: Schedulers, index: int, stepped: bool, last: bool) -> None:
        """Step the schedulers that are due after a batch, as Lightning does."""
        epoch = self._fit_progress.current_epoch if last else 0
        for interval, is_due, count in (("step", stepped, index), ("epoch", last, epoch)):
            for config in configs if is_due else ():
                matches = config.interval == interval and not config.reduce_on_plateau
                if matches and (count + 1) % config.frequency == 0:
                    self.step(config, None)

    def after_epoch(self, configs: Schedulers) -> None:
        """Step the schedulers that watch a metric of this visit, in a run whose schedulers restart."""
        for config in configs:
            if config.reduce_on_plateau and (self._fit_progress.current_epoch + 1) % config.frequency == 0:
                metric = watched(config, self.client.worker_module.trainer_shim.callback_metrics, evaluated=True)
                if metric is not None:
                    self.step(config, metric)

    def step(self, config: LRSchedulerConfig, metric: Any) -> None:
        """Step a scheduler by the module's own hook."""
        if "lr_scheduler_step" in self.client.worker_module.hooks:
            self.client.worker_module.call("lr_scheduler_step", config.scheduler, metric)
        else:
            self.client.module.lr_scheduler_step(config.scheduler, metric)

    @contextmanager
    def _unseen(self, *stepped: Any) -> Iterator[None]:
        """Return a context in which the module's hook changes only ``stepped``: caches decide how often it runs."""
        if "lr_scheduler_step" not in self.client.worker_module.hooks:
            yield
            return
        before = ModuleSnapshot(self.client.module, stepped)
        with rng_scope(self.client.seed, "schedules"):
            yield
        before.restore()

    def _pass_round(self, configs: Schedulers, round_: int) -> None:
        """Step the schedulers through one round, with the progress set to it, since the module's hook may read it."""
        fit_progress = self._fit_progress
        fit_progress.round, fit_progress.step = round_, 0
        for epoch, length in enumerate(fit_progress.passes):
            fit_progress.epoch = epoch
            steps = fit_progress.steps_in(length)
            for index in range(length):
                stepped = index in steps
                if stepped:
                    fit_progress.step += 1
                self.after_batch(configs, index, stepped, index + 1 == length)


class PlateauScheduler:
    """A scheduler that watches a metric lives on the server: it steps once a round, and clients train at its rates."""

    def __init__(self, schedules: Schedules, optimizers: OptimizerFactory) -> None:
        self._schedules, module = schedules, schedules.client.module
        configs: Schedulers = []
        if can_train(module):  # one that is only evaluated may have no optimizer
            self._optimizer, configs = optimizers.first
        monitored = [config for config in configs if config.reduce_on_plateau]
        together = f"model={type(module).__name__}: configure_optimizers returns a scheduler that watches a metric"
        if monitored and len(configs) > 1:
            raise UsageError(f"{together} and another scheduler; return one of them")
        self.config = monitored[0] if monitored and schedules.mode == "continue" else None

    def after_round(self, round_: int, metrics: Mapping[str, Any], evaluated: bool) -> None:
        """Step on the metrics of a round, if it was evaluated."""
        if self.config is not None and (round_ + 1) % self.config.frequency == 0:
            metric = watched(self.config, metrics, evaluated)
            if metric is not None:
                self._schedules.step(self.config, metric)

    def apply(self, optimizer: Optimizer, configs: Schedulers) -> Schedulers:
        """Set the rates of a client's optimizer, and return this scheduler in the place of the client's."""
        if self.config is None:
            return configs
        for group, server_group in zip(optimizer.param_groups, self._optimizer.param_groups, strict=True):
            group["lr"] = server_group["lr"]
        return [self.config]

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's state and the rates."""
        if self.config is None:
            return {}
        rates = [group["lr"] for group in self._optimizer.param_groups]
        return {"scheduler": self.config.scheduler.state_dict(), "lr": rates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""
        if self.config is not None and state:
            self.config.scheduler.load_state_dict(state["scheduler"])
            for group, rate in zip(self._optimizer.param_groups, state["lr"], strict=True):
                group["lr"] = rate


def watched(config: LRSchedulerConfig, metrics: Mapping[str, Any], evaluated: bool) -> Any:
    """The metric that a scheduler watches, under its name or with the name of its phase; None before it has a value.

    As with Lightning, ``loss`` stands for ``loss_epoch`` where both steps and epochs are logged, and a metric without a
    value after an evaluation is a warning unless the schedule is ``strict``.
    """
    name = str(config.monitor)
    phases, measurements = ("", "val/", "test/", "train/"), ("time/", "memory/", "placed/", "bytes/")
    names = [f"{phase}{tag}" for tag in (name, f"{name}_epoch") for phase in phases]
    tags = [tag for tag in names if tag in metrics]
    logged = sorted(tag for tag in metrics if not tag.startswith(measurements))
    hint = f"no such metric is logged; choose one of {', '.join(logged)}"
    require(bool(tags) or not (evaluated and config.strict), "monitor", name, hint)
    if evaluated and not tags:
        rank_zero_warn(f"monitor={name!r}: {hint}, or the learning rate stays, as strict is False")
    return metrics[tags[0]] if tags else None


def check_length(client: Client, configs: Schedulers, batches: Iterator[int]) -> None:
    """Refuse a OneCycleLR that ends before the run, for any number of batches that a client has."""
    if not any(isinstance(config.scheduler, OneCycleLR) for config in configs):
        return
    for number in sorted({*batches} - {0}):  # a client without batches has no schedule
        with patched(client.worker_module.fit_progress, batches=number):  # the shim's progress is still this one
            for config in configure_optimizer(client.module)[1]:
                num_steps = steps_of(config, client)
                total = getattr(config.scheduler, "total_steps", num_steps)
                hint = f"a client of {number} batches takes {num_steps}; give total_steps={num_steps}"
                hint += ", or self.trainer.estimated_stepping_batches"
                require(
                    num_steps <= total, f"model={type(client.module).__name__}: OneCycleLR.total_steps", total, hint
                )


def steps_of(config: LRSchedulerConfig, client: Client) -> int:
    """How often a scheduler steps in the whole run."""
    fit_progress = client.worker_module.fit_progress
    if config.interval == "epoch":
        return fit_progress.rounds * len(fit_progress.passes) // config.frequency
    steps = (index + 1 for length in fit_progress.passes for index in fit_progress.steps_in(length))
    return fit_progress.rounds * sum(step % config.frequency == 0 for step in steps)
