"""Local training: what a client does between the state it receives and the update it sends."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from lightning.fabric import Fabric
from torch.optim import Optimizer

from fl_lightning.client import Client
from fl_lightning.data.loaders import ClientLoader, Rows
from fl_lightning.engine.loaders import Loaders
from fl_lightning.engine.optimizers import OptimizerSource, Schedulers
from fl_lightning.engine.workers import Workers
from fl_lightning.errors import ClientError, LostWorkerError, UsageError
from fl_lightning.seeding import ambient
from fl_lightning.state import State
from fl_lightning.sums import Update

Batch = tuple[Rows | None, Any]


class LocalTraining:
    """Trains one client after another on the resident :class:`Client`.

    Args:
        fabric: device and precision.
        client: the resident module.
        loaders: the clients' batches.
        workers: the workers; local training ends where one of them is lost.
        stopwatch: takes the seconds of each phase.
        local_epochs: passes over the client's data in a visit.
        local_steps: local steps in a visit; takes the place of ``local_epochs``.
        gradient_clip_val: largest gradient norm, None for none.
        lr_factors: factor on the clients' learning rates, by round.
    """

    def __init__(
        self,
        fabric: Fabric,
        client: Client,
        loaders: Loaders,
        workers: Workers,
        stopwatch: Stopwatch,
        local_epochs: int = 1,
        local_steps: int | None = None,
        gradient_clip_val: float | None = None,
        lr_factors: list[float] | None = None,
    ) -> None:
        self.fabric, self.client, self.loaders, self.workers = fabric, client, loaders, workers
        self.local_epochs, self.local_steps = local_epochs, local_steps
        self.gradient_clip_val, self.lr_factors = gradient_clip_val, lr_factors or []
        self.stopwatch = stopwatch
        self._optimizers = OptimizerSource(client.module)
        self._precision = fabric.strategy.precision
        self._batches: dict[int, int] = {}

    def visit(self, k: int, round_: int, received: State) -> Update:
        """Train client ``k`` in round ``round_`` from ``received``, and return what it sends.

        Raises:
            ClientError: something failed; names the client, the round and, where known, the loss term and the step.
            UsageError: something does not fit together.
            LostWorkerError: a worker was lost.
        """
        self.stopwatch.start()
        try:
            with ambient(self.loaders.seed, "train", round_, k):
                self.client.start(self.loaders.data.info(k), received)
                self._train(self.loaders.train(k, round_), self.lr_factors[round_])
                return self.client.finish()
        except (UsageError, LostWorkerError):
            raise
        except Exception as error:
            raise ClientError(f"client {k}, round {round_}: {error}") from error
        finally:
            self.client.memories().settle(k)
            self.stopwatch.lap("collect")

    def steps(self, k: int) -> int:
        """Expected local steps of client ``k``."""
        if self.local_steps is not None:
            return self.local_steps
        if k not in self._batches:
            self._batches[k] = len(self.loaders.data.train_dataloader(k))
        return self._batches[k] * self.local_epochs

    def fine_tune(self, k: int, round_: int, state: State, steps: int) -> State:
        """Train ``state`` on the data of client ``k`` by the module's own loss, without the methods.

        What the client remembers and what is loaded in the resident module stay as they are.
        """
        client, before = self.client, self.client.state()
        with ambient(self.loaders.seed, "fine_tune", round_, k), client.taps.paused():
            client.load(state)
            client.module.train()
            optimizer, _ = self._optimizers.fresh(1.0)
            passes = self._passes(self.loaders.train(k, round_, "fine_tune"), steps)
            for index, (_, batch) in itertools.chain.from_iterable(map(enumerate, passes)):
                with self.fabric.autocast():
                    loss = client.own_loss(batch, index)
                if loss is not None:
                    self._backward(loss, optimizer)
                    self._clip()
                    self.fabric.strategy.optimizer_step(optimizer)
            tuned = client.state()
        client.load(before)
        client.logged.clear()
        return tuned

    def _passes(self, loader: ClientLoader, steps: int) -> Iterator[Iterator[Batch]]:
        """As many passes over the client's data as ``steps`` batches take; the last one may be cut short."""
        batches = len(loader)
        while steps > 0 and batches > 0:
            yield itertools.islice(self.loaders.batches(loader), steps)
            steps -= batches

    def _train(self, loader: ClientLoader, lr_factor: float) -> None:
        module = self.client.module
        optimizer, schedulers = self._optimizers.fresh(lr_factor)
        module.on_train_start()
        self.stopwatch.lap("load")
        for epoch, batches in enumerate(self._passes(loader, self._visit_length(loader))):
            self.client.begin_epoch(epoch)
            module.on_train_epoch_start()
            for index, (rows, batch) in enumerate(batches):
                if self._step(batch, index, rows, optimizer):
                    self._step_schedulers(schedulers, "step", self.client.num_steps)
            module.on_train_epoch_end()
            self.client.end_epoch()
            self._step_schedulers(schedulers, "epoch", epoch + 1)
        module.on_train_end()

    def _visit_length(self, loader: ClientLoader) -> int:
        """How many batches a visit takes."""
        steps = len(loader) * self.local_epochs if self.local_steps is None else self.local_steps
        return steps if self.loaders.limit is None else min(steps, self.loaders.limit)

    def _step(self, batch: Any, index: int, rows: Rows | None, optimizer: Optimizer) -> bool:
        """One local step; False where the module skipped the batch."""
        client, module = self.client, self.client.module
        self.workers.check()
        self.stopwatch.lap("data")
        module.on_train_batch_start(batch, index)
        with self.fabric.autocast():
            loss = client.training_step(batch, index, rows)
        if loss is None:
            return False
        self._backward(loss, optimizer)
        self.stopwatch.lap("forward_backward")
        client.begin_step(optimizer)
        self._clip()
        module.on_before_optimizer_step(optimizer)
        self.stopwatch.lap("correct")
        self.fabric.strategy.optimizer_step(optimizer)
        client.end_step(optimizer)
        module.on_train_batch_end({"loss": loss.detach()}, batch, index)
        self.stopwatch.lap("step")
        return True

    def _backward(self, loss: torch.Tensor, optimizer: Optimizer) -> None:
        """Compute the gradients of the loss, and undo the precision's scaling of them."""
        module = self.client.module
        module.on_before_zero_grad(optimizer)
        optimizer.zero_grad()
        module.on_before_backward(loss)
        self.fabric.backward(loss)
        module.on_after_backward()
        self._precision.unscale_gradients(optimizer)

    def _clip(self) -> None:
        if self.gradient_clip_val is not None:
            parameters = [self.client.live[name] for name in self.client.trainable]
            torch.nn.utils.clip_grad_norm_(parameters, self.gradient_clip_val)

    def _step_schedulers(self, schedulers: Schedulers, interval: str, done: int) -> None:
        """Step the module's own schedulers as Lightning does within a fit: after local epochs or local steps."""
        for config in schedulers:
            if config.interval == interval and done % config.frequency == 0:
                metric = self.client.logged.current(config.monitor) if config.reduce_on_plateau else None
                self.client.module.lr_scheduler_step(config.scheduler, metric)


class Stopwatch:
    """Seconds by phase: a lap is the time since the last one."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._last = time.perf_counter()

    def reset(self) -> None:
        """Begin a round."""
        self.seconds.clear()
        self.start()

    def start(self) -> None:
        """Begin a lap; the time since the last one counts for no phase."""
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Add the time since the last lap to ``phase``."""
        now = time.perf_counter()
        self.seconds[phase] += now - self._last
        self._last = now
