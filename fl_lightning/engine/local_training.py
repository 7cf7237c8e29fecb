"""Local training of a client, from the state that it receives to the update that it sends."""

from __future__ import annotations

import copy
import dis
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from lightning.fabric import Fabric
from lightning.pytorch.utilities.enums import GradClipAlgorithmType
from torch.optim import Optimizer

from fl_lightning.client import Client
from fl_lightning.client.visit import Visit
from fl_lightning.data.loaders import ClientLoader, Rows, num_batches, without_singles
from fl_lightning.distributed.workers import Workers
from fl_lightning.engine.loaders import Loaders
from fl_lightning.engine.optimizers import OptimizerSource, Schedulers, clear_gradients, needs_closure, take_step
from fl_lightning.engine.recording import Recordings
from fl_lightning.engine.replaced import replaced
from fl_lightning.engine.schedules import Mode, MonitoredSchedule, Schedules
from fl_lightning.errors import ClientError, LostWorkerError, Stopped, UsageError, located
from fl_lightning.method import MethodList
from fl_lightning.seeding import ambient
from fl_lightning.state import State
from fl_lightning.sums import Update

Batch = tuple[Rows | None, Any]


class Choice(NamedTuple):
    """Groups of ``least`` to ``size`` clients train side by side, with a reason; size 1 is sequential training."""

    size: int
    reason: str
    least: int = 2


class LocalTraining:
    """Trains one client after another on the resident :class:`Client`, in the order of Lightning's training loop.

    Attributes:
        batches: gives the number of batches in a pass over the data of a client.
        monitored: the scheduler that watches a metric, on the server.
        scaling: with 16-mixed, the server's gradient scale and the steps since it changed; visits begin with it.
        looks_at_index: whether the module's ``training_step`` reads the index of the batch.
    """

    def __init__(
        self,
        fabric: Fabric,
        client: Client,
        loaders: Loaders,
        workers: Workers,
        stopwatch: Stopwatch,
        optimizers: OptimizerSource,
        client_schedulers: Mode = "continue",
        lr_factors: list[float] | None = None,
    ) -> None:
        self.fabric, self.client, self.loaders, self.workers = fabric, client, loaders, workers
        self.lr_factors, self.stopwatch = lr_factors or [], stopwatch
        self.optimizers = optimizers
        self.schedules = Schedules(client, client_schedulers)
        self.monitored = MonitoredSchedule(self.schedules, optimizers)
        self._precision: Any = fabric.strategy.precision
        self._scaler = self._unused_scaler = getattr(self._precision, "scaler", None)
        self.scaling = next(iter(scalings_of(self._scaler)), None)
        self.batches = cache(partial(num_batches, loaders.data))
        self.choice = Choice(1, "no round has begun")
        self.recordings = Recordings()
        self.looks_at_index = client.resident.takes_index and looks_at(client.module.training_step, 1)
        self._has_gradients = self._skips = self._closes = self._overflows = False
        strategy = client.resident.stand_in.strategy
        strategy.do_step, strategy.do_backward = self._closure_step, fabric.backward

    def visit(self, k: int, round_: int, received: State, work: int | None = None) -> Update:
        """Train client ``k`` in round ``round_`` from the global state ``received``, and return its update.

        Its memory is changed by ``Memories.settle``, once the server has its update. ``work`` is the number of epochs,
        or of steps where the run counts them, if they are fewer than in a whole visit.
        """
        client, data, seed = self.client, self.loaders.data, self.loaders.seed
        self.stopwatch.start()
        try:
            with (
                ambient(seed, "train", round_, k),
                client.resident.training(),
                self.loaders.train(k, round_) as loader,
                client.visiting(data.info(k), received, client.resident.clock.at(round_, len(loader), work)) as visit,
            ):
                if visit.clock.passes_now:  # a client without batches has no fit, and calls no hook
                    self._train(visit, loader, self.lr_factors[round_])
                return client.finish()
        except (UsageError, LostWorkerError, Stopped):
            raise
        except (Exception, SystemExit) as error:
            hint = f"; {without_singles(data)}" if "1 value per channel" in str(error) else ""
            raise ClientError(f"client {k}, round {round_}: {located(error)}{hint}") from error
        finally:
            self.stopwatch.lap("collect")

    def steps(self, k: int, work: int | None = None) -> int:
        """Expected local steps of client ``k``."""
        clock = self.client.resident.clock
        if clock.local_steps:
            return work or clock.local_steps
        return self.batches(k) * (work or clock.local_epochs)

    def kind(self, k: int) -> object:
        """Equal for clients that have the same schedule of rates, and may train side by side."""
        _, schedulers = self.optimizers.first
        return self.batches(k) if schedulers else None

    def fine_tune(self, k: int, round_: int, state: State, steps: int) -> State:
        """Train ``state`` on the data of client ``k`` by the module's own loss, without the methods, as a dry run."""
        with self._apart("fine_tune", k, round_) as loader:
            self.client.resident.load(state)
            self._take_steps(self.client.visit, loader, steps)
            return self.client.state()

    def rehearse(self, k: int, round_: int, received: State, methods: MethodList) -> int:
        """Take the first local step of client ``k`` as a dry run; returns how often it runs a reference model."""
        client = self.client
        with self._apart("rehearse", k, round_, methods) as loader:
            runs = client.references.num_runs
            with client.visiting(self.loaders.data.info(k), received, client.visit.clock) as visit:
                self._take_steps(visit, loader, 1)
            return client.references.num_runs - runs

    @torch.no_grad()
    def transformed(
        self, k: int, round_: int, received: State, methods: MethodList, logits: torch.Tensor
    ) -> torch.Tensor:
        """Logits ``(B, C)`` as these methods change them in a visit of client ``k``, as a dry run."""
        client = self.client
        with (
            self._apart("transformed", k, round_, methods),
            client.visiting(self.loaders.data.info(k), received, client.visit.clock),
        ):
            return client.methods.transform_logits(client, logits)

    @contextmanager
    def _apart(self, purpose: str, k: int, round_: int, methods: MethodList | None = None) -> Iterator[ClientLoader]:
        """A dry run: nothing lasts, nothing is timed, and the random numbers differ from a visit's."""
        client = self.client
        with (
            replaced(self, stopwatch=Stopwatch()),
            ambient(self.loaders.seed, purpose, round_, k),
            client.rehearsing(methods),
            self.loaders.train(k, round_, purpose) as loader,
        ):
            client.visit.clock = client.resident.stand_in.clock = client.resident.clock.at(round_, len(loader))
            yield loader

    def _take_steps(self, visit: Visit, loader: ClientLoader, steps: int) -> None:
        """Take ``steps`` local steps, without the module's hooks around epochs and batches."""
        clock = visit.clock
        optimizer, _ = self.begin_optimizer(1.0, loader)
        clock.local_steps = steps
        for epoch, length in enumerate(clock.passes):
            clock.epoch = epoch
            for index, (rows, batch) in enumerate(self._pass(loader, length)):
                visit.logged.begin_batch(batch)
                steps_now = clock.is_step(index, length)
                (self._step if steps_now else self._gradients)(batch, index, rows, optimizer)
                clock.step += steps_now

    def begin_optimizer(self, factor: float, loader: ClientLoader | None) -> tuple[Optimizer, Schedulers]:
        """The optimizer and the schedulers of a visit in their initial state."""
        optimizer, schedulers = self.optimizers.fresh()
        for group in optimizer.param_groups if factor != 1.0 else ():
            group["lr"] = group["lr"] * factor
        self.schedules.begin_visit(optimizer, schedulers)
        schedulers = self.monitored.apply(optimizer, schedulers)
        if self.scaling is not None and self._unused_scaler is not None:
            # another object, since a visit that fails leaves its last step in it
            self._scaler = self._precision.scaler = copy.deepcopy(self._unused_scaler)
            state = zip(("scale", "_growth_tracker"), self.scaling, strict=True)
            self._scaler.load_state_dict({**self._scaler.state_dict(), **dict(state)})
        resident = self.client.resident
        self._closes = "optimizer_step" in resident.hooks or needs_closure(optimizer)
        resident.stand_in.begin_visit(optimizer, schedulers, loader)
        return optimizer, schedulers

    def _train(self, visit: Visit, loader: ClientLoader, lr_factor: float) -> None:
        """All epochs and batches of a visit, with the hooks of Lightning's training loop in its order."""
        client, clock, logged, watch = self.client, visit.clock, visit.logged, self.stopwatch
        call, schedules = client.resident.call, self.schedules
        optimizer, schedulers = self.begin_optimizer(lr_factor, loader)
        call("on_train_start")
        watch.lap("load")
        for epoch, length in enumerate(clock.passes_now):
            clock.epoch = epoch
            call("on_train_epoch_start")
            for index, (rows, batch) in enumerate(self._pass(loader, length)):
                self.workers.check()
                watch.lap("data")
                logged.begin_batch(batch)
                goes_on = call("on_train_batch_start", batch, index) != -1
                steps = clock.is_step(index, length) or not goes_on
                if goes_on:
                    (self._step if steps else self._gradients)(batch, index, rows, optimizer)
                    visit.num_skipped += self._skips
                    clock.step += steps
                if schedulers:
                    schedules.after_batch(schedulers, index, steps, index + 1 == length or not goes_on)
                if goes_on:
                    call("on_train_batch_end", visit.outputs, batch, index)
                watch.lap("step")
                if not goes_on:
                    break
            call("on_train_epoch_end")
            visit.epochs.append(logged.end_epoch())
            if schedulers and schedules.mode == "restart":
                schedules.after_epoch(schedulers)
        visit.scalings = scalings_of(self._scaler)
        clock.epoch += 1  # Lightning counts the last epoch before this hook, too
        call("on_train_end")
        if clock.rounds > 1:
            self.optimizers.check(optimizer)
        if not client.module.automatic_optimization:
            raise ClientError("automatic_optimization was set to False in the visit; return a loss from training_step")

    def _pass(self, loader: ClientLoader, length: int) -> Iterator[Batch]:
        """A pass over the batches, of ``length`` at most."""
        left = length
        for batch in itertools.islice(self.loaders.batches(loader), length):
            left -= 1
            yield batch
        if left:
            hint = "return the number of batches of every pass; an exhausted iterator has none in the next pass"
            raise ClientError(f"its train_dataloader gave {length - left} of the {length} batches of a pass; {hint}")

    def _step(self, batch: Any, index: int, rows: Rows | None, optimizer: Optimizer) -> None:
        """One local step, on this batch and those since the last one."""
        if self._closes:
            self._step_by_closure(batch, index, rows, optimizer)
            return
        self._gradients(batch, index, rows, optimizer)
        if self._has_gradients:
            self._prepare(optimizer)
            if self._scaler is None:
                take_step(optimizer)
            else:
                self.fabric.strategy.optimizer_step(optimizer)
            self.client.end_step(optimizer, self._overflows)

    def _step_by_closure(self, batch: Any, index: int, rows: Rows | None, optimizer: Optimizer) -> None:
        """Let the module, or the optimizer, decide when loss and gradients are computed."""
        client, resident = self.client, self.client.resident
        ran = False

        @torch.enable_grad()
        def closure() -> torch.Tensor | None:
            nonlocal ran
            ran = True
            loss = self._gradients(batch, index, rows, optimizer)
            return None if loss is None else loss.detach()

        wrapper = resident.stand_in.strategy._lightning_optimizers[0]
        done, versions = client.num_steps, self._versions()
        if "optimizer_step" in resident.hooks:
            resident.call("optimizer_step", client.visit.clock.current_epoch, index, wrapper, closure)
        else:
            wrapper.step(closure=closure)
        if not ran:
            raise ClientError("optimizer_step has not run its closure; call optimizer.step(closure=optimizer_closure)")
        if client.num_steps == done and self._versions() != versions:
            if any(method.corrects_gradients for method in client.methods.methods):
                hint = "which skips the methods' corrections; call optimizer.step(closure=optimizer_closure)"
                raise ClientError(f"optimizer_step calls optimizer.optimizer.step, {hint}")
            client.end_step(optimizer)

    def _versions(self) -> list[int]:
        """Changes whenever a trained parameter does."""
        return [self.client.live[name]._version for name in self.client.trainable]

    def _closure_step(self, optimizer: Optimizer, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Do ``optimizer.step(closure)`` where the module steps by itself, or the optimizer needs a closure."""

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
            self.client.end_step(optimizer, self._overflows)
        return result

    def _gradients(self, batch: Any, index: int, rows: Rows | None, optimizer: Optimizer) -> torch.Tensor | None:
        """Loss and gradients of a batch; None where the module skips the batch."""
        client, resident, clock = self.client, self.client.resident, self.client.visit.clock
        with self.fabric.autocast():
            loss = client.training_step(batch, index, rows)
        self._skips = loss is None
        if index % clock.accumulate == 0:
            self._has_gradients = False
            resident.call("on_before_zero_grad", optimizer)
            if "optimizer_zero_grad" in resident.hooks:
                resident.call("optimizer_zero_grad", clock.current_epoch, index, optimizer)
            else:
                clear_gradients(optimizer)
        if loss is not None:
            share = loss if clock.accumulate == 1 else loss / clock.accumulate
            self._has_gradients = True
            resident.call("on_before_backward", share)
            if "backward" in resident.hooks:
                resident.call("backward", share if self._scaler is None else self._scaler.scale(share))
            else:
                self._precision.backward(share, None)
            resident.call("on_after_backward")
        self.stopwatch.lap("forward_backward")
        return loss

    def _prepare(self, optimizer: Optimizer) -> None:
        """Unscale, correct and clip the gradients; methods do not see the gradients of a lost step."""
        client, resident, self._overflows = self.client, self.client.resident, False
        if self._has_gradients:
            self._precision.unscale_gradients(optimizer)
            if self._scaler is not None:
                # private, as of torch 2.6 and 2.15: by this the scaler itself decides whether to leave out the step
                self._overflows = any(map(bool, self._scaler._found_inf_per_device(optimizer).values()))
        resident.call("on_before_optimizer_step", optimizer)
        if not self._overflows:
            client.methods.call("on_before_optimizer_step", client, optimizer)
        setting = resident.stand_in.setting
        if "configure_gradient_clipping" in resident.hooks:
            how = {name: getattr(resident.stand_in, name) for name in ("gradient_clip_val", "gradient_clip_algorithm")}
            resident.call("configure_gradient_clipping", optimizer, **how)
        elif setting.gradient_clip_val is not None:
            algorithm = resident.stand_in.gradient_clip_algorithm or GradClipAlgorithmType.NORM
            resident.stand_in.precision_plugin.clip_gradients(optimizer, setting.gradient_clip_val, algorithm)
        if not self._overflows:
            client.methods.call("on_after_clipping", client, optimizer)
        self.stopwatch.lap("correct")


def scalings_of(scaler: Any) -> list[tuple[float, int]]:
    """The scale of a gradient scaler, with the steps since it changed; nothing without one, or where it is not used."""
    state = {} if scaler is None else scaler.state_dict()
    return [(float(state["scale"]), int(state["_growth_tracker"]))] if state else []


def looks_at(function: Callable[..., Any], place: int) -> bool:
    """Whether the code of a method may read its argument at this place."""
    code = getattr(getattr(function, "__func__", None), "__code__", None)
    if code is None or code.co_argcount <= place + 1:
        return True
    read = (one.argval if isinstance(one.argval, tuple) else (one.argval,) for one in dis.get_instructions(code))
    return any(code.co_varnames[place + 1] in names for names in read)


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
