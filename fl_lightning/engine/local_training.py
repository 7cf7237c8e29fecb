"""Local training: what a client does between the state it receives and the update it sends."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.pytorch.utilities.enums import GradClipAlgorithmType
from torch.optim import Optimizer

from fl_lightning.client import Client
from fl_lightning.data.loaders import ClientLoader, Rows, num_batches
from fl_lightning.engine.loaders import Loaders
from fl_lightning.engine.optimizers import OptimizerSource, Schedulers, needs_closure, scale_learning_rates
from fl_lightning.engine.schedules import Mode, MonitoredSchedule, Schedules
from fl_lightning.engine.workers import Workers
from fl_lightning.errors import ClientError, LostWorkerError, Stopped, UsageError, located
from fl_lightning.method import MethodList
from fl_lightning.seeding import ambient
from fl_lightning.state import State
from fl_lightning.sums import Update

Batch = tuple[Rows | None, Any]


class LocalTraining:
    """Trains one client after another on the resident :class:`Client`, in the order of Lightning's training loop.

    Args:
        fabric: device and precision.
        client: the resident module.
        loaders: the clients' batches.
        workers: the workers; local training ends where one of them is lost.
        stopwatch: takes the seconds of each phase.
        client_schedulers: whether the module's schedulers ``continue`` from visit to visit or ``restart``.
        lr_factors: factor on the clients' learning rates, by round.
    """

    def __init__(
        self,
        fabric: Fabric,
        client: Client,
        loaders: Loaders,
        workers: Workers,
        stopwatch: Stopwatch,
        client_schedulers: Mode = "continue",
        lr_factors: list[float] | None = None,
    ) -> None:
        self.fabric, self.client, self.loaders, self.workers = fabric, client, loaders, workers
        self.lr_factors, self.stopwatch = lr_factors or [], stopwatch
        self.schedules = Schedules(client, client_schedulers)
        self.monitored = MonitoredSchedule(self.schedules)
        self._clock = client.stand_in.clock
        self._optimizers = OptimizerSource(client.module)
        self._precision = fabric.strategy.precision
        self._scaler = getattr(self._precision, "scaler", None)
        self._scaler_state = None if self._scaler is None else self._scaler.state_dict()
        self._own_step = "optimizer_step" in client.hooks
        self._batches: dict[int, int] = {}
        self._has_gradients = self._skips = False
        client.stand_in.strategy.do_step, client.stand_in.strategy.do_backward = self._closure_step, fabric.backward

    def visit(self, k: int, round_: int, received: State, work: int | None = None) -> Update:
        """Train client ``k`` in round ``round_`` from ``received``, and return what it sends.

        What it remembers is changed by ``Memories.settle``, once the server has its update.

        Args:
            k: its id.
            round_: number of the round.
            received: the global state.
            work: epochs, or steps where the run counts them, if they are fewer than in a whole visit; None for all.

        Raises:
            ClientError: something failed; names the client, the round and, where known, the loss term and the step.
            UsageError: something does not fit together.
            LostWorkerError: a worker was lost.
        """
        self.stopwatch.start()
        try:
            with ambient(self.loaders.seed, "train", round_, k), self.client.local_training():
                with self.loaders.train(k, round_) as loader:
                    self._set_clock(round_, len(loader), work)
                    self.client.start(self.loaders.data.info(k), received)
                    if self._clock.passes_now:  # without batches there is no fit, and no hook is called
                        self._train(loader, self.lr_factors[round_])
                return self.client.finish()
        except (UsageError, LostWorkerError, Stopped):
            raise
        except (Exception, SystemExit) as error:
            raise ClientError(f"client {k}, round {round_}: {located(error)}") from error
        finally:
            self.stopwatch.lap("collect")

    def batches(self, k: int) -> int:
        """Batches in a pass over the data of client ``k``."""
        if k not in self._batches:
            self._batches[k] = num_batches(self.loaders.data, k)
        return self._batches[k]

    def steps(self, k: int, work: int | None = None) -> int:
        """Expected local steps of client ``k``, which may do less ``work`` than a whole visit."""
        if self._clock.local_steps is not None:
            return work or self._clock.local_steps
        return self.batches(k) * (work or self._clock.local_epochs)

    def fine_tune(self, k: int, round_: int, state: State, steps: int) -> State:
        """Train ``state`` on the data of client ``k`` by the module's own loss, without the methods.

        What the client remembers and what is loaded in the resident module stay as they are.
        """
        client, before, watch = self.client, self.client.state(), self.stopwatch
        self.stopwatch = Stopwatch()
        try:
            with ambient(self.loaders.seed, "fine_tune", round_, k), client.apart():
                client.load(state)
                with self.loaders.train(k, round_, "fine_tune") as loader:
                    self._set_clock(round_, len(loader))
                    optimizer, _ = self._optimizer(1.0, loader)
                    self._clock.local_steps = steps
                    self._take_steps(loader, optimizer)
                return client.state()
        finally:
            self.stopwatch = watch
            client.load(before)

    def rehearse(self, k: int, round_: int, received: State, methods: MethodList) -> int:
        """Take the first local step of the visit of client ``k``, of which nothing is left.

        Returns:
            How many times it runs a reference model.
        """
        client, before, watch = self.client, self.client.state(), self.stopwatch
        memories, runs = client.memories(), client.references.num_runs
        self.stopwatch = Stopwatch()
        try:
            apart = ambient(self.loaders.seed, "rehearse", round_, k), client.apart(methods)
            with apart[0], apart[1], self.loaders.train(k, round_, "rehearse") as loader:
                self._set_clock(round_, len(loader))
                client.start(self.loaders.data.info(k), received)
                optimizer, _ = self._optimizer(1.0, loader)
                self._clock.local_steps = 1
                self._take_steps(loader, optimizer)
            return client.references.num_runs - runs
        finally:
            client.references.num_runs = runs
            client.references.end()
            memories.drop(k)
            self.stopwatch = watch
            client.load(before)

    def _set_clock(self, round_: int, batches: int, work: int | None = None) -> None:
        clock = self._clock
        clock.round, clock.epoch, clock.step, clock.batches, clock.work = round_, 0, 0, batches, work

    def _take_steps(self, loader: ClientLoader, optimizer: Optimizer) -> None:
        """The steps that the clock has for a visit, without the module's hooks around epochs and batches."""
        clock = self._clock
        for epoch, length in enumerate(clock.passes):
            clock.epoch = epoch
            for index, (rows, batch) in enumerate(self._pass(loader, length)):
                self.client.logged.begin_batch(batch)
                steps = clock.is_step(index, length)
                (self._step if steps else self._gradients)(batch, index, rows, optimizer)
                clock.step += steps

    def _optimizer(self, factor: float, loader: ClientLoader) -> tuple[Optimizer, Schedulers]:
        """The optimizer and the schedulers of a visit, as they are when it begins."""
        optimizer, schedulers = self._optimizers.fresh()
        scale_learning_rates(optimizer, factor)
        self.schedules.begin_visit(optimizer, schedulers)
        schedulers = self.monitored.apply(optimizer, schedulers)
        if self._scaler is not None:
            self._scaler.load_state_dict(self._scaler_state)
        self._closes = self._own_step or needs_closure(optimizer)
        self.client.stand_in.begin_visit(optimizer, schedulers, loader)
        return optimizer, schedulers

    def _train(self, loader: ClientLoader, lr_factor: float) -> None:
        client, clock = self.client, self._clock
        optimizer, schedulers = self._optimizer(lr_factor, loader)
        client.call("on_train_start")
        self.stopwatch.lap("load")
        for epoch, length in enumerate(clock.passes_now):
            client.begin_epoch(epoch)
            client.call("on_train_epoch_start")
            for index, (rows, batch) in enumerate(self._pass(loader, length)):
                if not self._batch(batch, index, rows, length, optimizer, schedulers):
                    break
            client.call("on_train_epoch_end")
            client.end_epoch()
            if self.schedules.mode == "restart":
                self.schedules.after_epoch(schedulers)
        clock.epoch += 1  # Lightning counts the last epoch before this hook, too
        client.call("on_train_end")
        if clock.rounds > 1:
            self._optimizers.check(optimizer)
        if not client.module.automatic_optimization:
            raise ClientError("automatic_optimization was set to False in the visit; return a loss from training_step")

    def _pass(self, loader: ClientLoader, length: int) -> Iterator[Batch]:
        left = length
        for batch in itertools.islice(self.loaders.batches(loader), length):
            left -= 1
            yield batch
        if left:
            hint = "let its length be that of each pass; an iterator that is used up gives none in the next"
            raise ClientError(f"its train_dataloader gave {length - left} of the {length} batches of a pass; {hint}")

    def _batch(
        self, batch: Any, index: int, rows: Rows | None, length: int, optimizer: Optimizer, schedulers: Schedulers
    ) -> bool:
        """One batch; False where the module ends the epoch."""
        client, clock = self.client, self._clock
        self.workers.check()
        self.stopwatch.lap("data")
        client.logged.begin_batch(batch)
        goes_on = client.call("on_train_batch_start", batch, index) != -1
        steps = clock.is_step(index, length) or not goes_on
        if goes_on:
            step = self._step if steps else self._gradients
            step(batch, index, rows, optimizer)
            client.num_skipped += self._skips
            clock.step += steps
        self.schedules.after_batch(schedulers, index, steps, index + 1 == length or not goes_on)
        if goes_on:
            client.call("on_train_batch_end", client.outputs, batch, index)
        self.stopwatch.lap("step")
        return goes_on

    def _step(self, batch: Any, index: int, rows: Rows | None, optimizer: Optimizer) -> None:
        """One local step, on this batch and those since the last one."""
        if self._closes:
            self._call_step(Closure(partial(self._gradients, batch, index, rows, optimizer)), index, optimizer)
            return
        self._gradients(batch, index, rows, optimizer)
        if self._has_gradients:
            self._prepare(optimizer)
            self.fabric.strategy.optimizer_step(optimizer)
            self.client.end_step(optimizer)

    def _call_step(self, closure: Closure, index: int, optimizer: Optimizer) -> None:
        """Let the module, or the optimizer, decide when the closure runs.

        Raises:
            ClientError: it never runs, or the module goes round the methods' corrections.
        """
        client, wrapper = self.client, self.client.stand_in.strategy._lightning_optimizers[0]
        done, versions = client.num_steps, self._versions()
        if self._own_step:
            client.call("optimizer_step", self._clock.current_epoch, index, wrapper, closure)
        else:
            wrapper.step(closure=closure)
        if not closure.ran:
            raise ClientError("optimizer_step has not run its closure; call optimizer.step(closure=optimizer_closure)")
        if client.num_steps == done and self._versions() != versions:
            if any(method.corrects_gradients for method in client.methods.methods):
                hint = "which leaves out what the methods do; call optimizer.step(closure=optimizer_closure)"
                raise ClientError(f"optimizer_step calls optimizer.optimizer.step, {hint}")
            client.end_step(optimizer)

    def _versions(self) -> list[int]:
        """Changes whenever a trained parameter does."""
        return [self.client.live[name]._version for name in self.client.trainable]

    def _closure_step(self, optimizer: Optimizer, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """What ``optimizer.step(closure)`` does where the module steps by itself, or the optimizer needs a closure."""

        def prepared() -> Any:
            loss = closure()
            self._prepare(optimizer)
            return loss

        if self._scaler is None:
            result = optimizer.step(closure=prepared, **kwargs)
        else:
            result = prepared()
            if self._has_gradients:
                self.fabric.strategy.optimizer_step(optimizer, **kwargs)
        if self._has_gradients:
            self.client.end_step(optimizer)
        return result

    def _gradients(self, batch: Any, index: int, rows: Rows | None, optimizer: Optimizer) -> torch.Tensor | None:
        """Loss and gradients of a batch; None where the module skips the batch."""
        client, accumulate = self.client, self._clock.accumulate
        with self.fabric.autocast():
            loss = client.training_step(batch, index, rows)
        self._skips = loss is None
        if index % accumulate == 0:
            self._zero_grad(optimizer, index)
        if loss is not None:
            self._backward(loss if accumulate == 1 else loss / accumulate)
        self.stopwatch.lap("forward_backward")
        return loss

    def _zero_grad(self, optimizer: Optimizer, index: int) -> None:
        self._has_gradients = False
        self.client.call("on_before_zero_grad", optimizer)
        if "optimizer_zero_grad" in self.client.hooks:
            self.client.call("optimizer_zero_grad", self._clock.current_epoch, index, optimizer)
        else:
            optimizer.zero_grad()

    def _backward(self, loss: torch.Tensor) -> None:
        call, self._has_gradients = self.client.call, True
        call("on_before_backward", loss)
        if "backward" in self.client.hooks:
            call("backward", loss if self._scaler is None else self._scaler.scale(loss))
        else:
            self.fabric.backward(loss)
        call("on_after_backward")

    def _prepare(self, optimizer: Optimizer) -> None:
        """Unscale, correct and clip the gradients."""
        client = self.client
        if self._has_gradients:
            self._precision.unscale_gradients(optimizer)
        client.call("on_before_optimizer_step", optimizer)
        client.begin_step(optimizer)
        self._clip(optimizer)
        client.methods.on_after_clipping(client, optimizer)
        self.stopwatch.lap("correct")

    def _clip(self, optimizer: Optimizer) -> None:
        stand_in = self.client.stand_in
        value, algorithm = stand_in.gradient_clip_val, stand_in.gradient_clip_algorithm
        if "configure_gradient_clipping" in self.client.hooks:
            how = {"gradient_clip_val": value, "gradient_clip_algorithm": algorithm}
            self.client.call("configure_gradient_clipping", optimizer, **how)
        elif value is not None:
            stand_in.precision_plugin.clip_gradients(optimizer, value, algorithm or GradClipAlgorithmType.NORM)


class Closure:
    """Computes the loss and the gradients of a batch, and returns the detached loss.

    Args:
        compute: does it, and gives None for a batch that the module skips.
    """

    def __init__(self, compute: Callable[[], torch.Tensor | None]) -> None:
        self._compute, self.ran = compute, False

    @torch.enable_grad()
    def __call__(self) -> torch.Tensor | None:
        """Compute them."""
        self.ran = True
        loss = self._compute()
        return None if loss is None else loss.detach()


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
