"""Local training of a client, from the state that it receives to the update that it sends.

Private names of torch, as of torch 2.6 and 2.15: the hooks and ``profile_hook_step`` of ``torch.optim.Optimizer``, and
``torch.autograd._profiler_enabled``.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.enums import GradClipAlgorithmType
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from fl_lightning.client import Client
from fl_lightning.client.lightning.fit_progress import FitProgress
from fl_lightning.client.reference_models import tensor_versions
from fl_lightning.client.visit import TrainingBatch, Visit
from fl_lightning.core.method import MethodList
from fl_lightning.core.seeding import generator_states, rng_scope
from fl_lightning.core.state import State
from fl_lightning.core.update import Update
from fl_lightning.data.client_loaders import ClientLoader, num_batches, without_singles
from fl_lightning.distributed.workers import Workers
from fl_lightning.training.device_loaders import Loaders
from fl_lightning.training.extra_passes import ExtraPasses
from fl_lightning.training.optimizers import (
    OptimizerFactory,
    Schedulers,
    clear_gradients,
    needs_closure,
    set_mode,
)
from fl_lightning.training.patching import patched
from fl_lightning.training.schedules import Mode, PlateauScheduler, Schedules
from fl_lightning.utilities.errors import (
    LONGEST_LIST,
    ClientError,
    LostWorkerError,
    Stopped,
    UsageError,
    truncate,
    with_location,
)

# torch's wrapper around the ``step`` of every optimizer, which calls hooks and opens a span for its profiler
WRAPPER = Optimizer.profile_hook_step(Optimizer.step).__code__
# phases that the stopwatch of a GPU counts as ``step``
PARTS_OF_STEP = ("forward_backward", "correct")


class LocalTraining:
    """Trains one client after another in this worker's :class:`Client`, in the order of Lightning's training loop.

    Attributes:
        num_batches: gives the number of batches in a pass over the data of a client.
        monitored: the scheduler that watches a metric, on the server.
        scaling: with 16-mixed, the server's gradient scale and the steps since it changed; visits begin with it.
    """

    def __init__(
        self,
        fabric: Fabric,
        client: Client,
        loaders: Loaders,
        workers: Workers,
        stopwatch: Stopwatch,
        optimizers: OptimizerFactory,
        client_schedulers: Mode = "continue",
        lr_factors: list[float] | None = None,
    ) -> None:
        self.fabric, self.client, self.loaders, self.workers = fabric, client, loaders, workers
        self.lr_factors, self.stopwatch = lr_factors or [], stopwatch
        self.optimizers = optimizers
        self.schedules = Schedules(client, client_schedulers)
        client.extra_passes = ExtraPasses(fabric, client, loaders)
        self.monitored = PlateauScheduler(self.schedules, optimizers)
        self._precision: Any = fabric.strategy.precision
        self._scaler = self._unused_scaler = getattr(self._precision, "scaler", None)
        self.scaling = next(iter(scalings_of(self._scaler)), None)
        self.num_batches = cache(partial(num_batches, loaders.data))
        self._has_gradients = self._skips = self._closes = self._prepares = self._overflows = self._warned = False
        # the first round in which a visit changed requires_grad, by parameter
        self._first_rounds: dict[str, int] = {}
        strategy = client.worker_module.trainer_shim.strategy
        strategy.do_step, strategy.do_backward = self._closure_step, fabric.backward

    def visit(self, k: int, round_: int, received: State, work: int | None = None) -> Update:
        """Train client ``k`` in round ``round_`` from the global state ``received``, and return its update.

        All clients of a worker train in one module, with one optimizer. What isolates a visit from the next:

        - :func:`.rng_scope` seeds the generators of Python, NumPy and torch, and restores them at the end.
        - :meth:`.WorkerModule.training` removes hooks that the module registers in the visit.
        - :meth:`.Loaders.train` seeds the client's loader, and closes it.
        - :meth:`.ClientLifecycle.visiting` makes a new :class:`.Visit`, with the received state, the methods' scratch,
          counters and the log; and at its end restores the attributes of the methods.
        - :meth:`.WorkerModule.load_and_reset` frees the gradients, copies the received state and the client's own
          entries into the module, and restores its attributes, modes and other buffers to the start of the run.
        - :meth:`begin_optimizer` resets the optimizer, the schedulers and the gradient scaler.
        - :meth:`.Client.memory` is a copy: :meth:`.ClientStateStore.commit_visit` stores it once the server has the
          update, and ``drop`` discards it if the visit fails.
        - :meth:`.Visit.written` refuses a hook that writes to a tensor that all clients share.
        - :meth:`.ClientLifecycle.finish` sends copies, and releases records of taps and reference models.

        Class attributes, global hooks and settings of the process are not isolated. Clients side by side have a row of
        stacked tensors each, in place of the module's (``vectorized/group.py``).

        Args:
            k: the client.
            round_: the round, from 0.
            received: the global state.
            work: its epochs, or steps where the run counts them, if they are fewer than in a whole visit.
        """
        client, datamodule, seed = self.client, self.loaders.data, self.loaders.seed
        self.stopwatch.start()
        try:
            with (
                rng_scope(seed, "train", round_, k),
                client.worker_module.training(),
                self.loaders.train(k, round_) as loader,
            ):
                fit_progress = client.worker_module.fit_progress.at(round_, len(loader), work)
                with client.lifecycle.visiting(datamodule.info(k), received, fit_progress) as visit:
                    self._train(visit, loader, self.lr_factors[round_])
                    return client.lifecycle.finish()
        except (UsageError, LostWorkerError, Stopped):
            raise
        except (Exception, SystemExit) as error:
            hint = f"; {without_singles(datamodule)}" if "1 value per channel" in str(error) else ""
            raise ClientError(f"client {k}, round {round_}: {with_location(error)}{hint}") from error
        finally:
            self.stopwatch.lap("collect")

    def steps(self, k: int, work: int | None = None) -> int:
        """Expected local steps of client ``k``."""
        return self.client.worker_module.fit_progress.at(0, self.num_batches(k), work).steps_now

    def fine_tune(self, k: int, round_: int, state: State, steps: int) -> State:
        """Train ``state`` on the data of client ``k`` by the module's own loss, without the methods, as a dry run."""
        with self._apart("fine_tune", k, round_) as loader:
            self.client.worker_module.load(state)
            self._take_steps(self.client.visit, loader, steps)
            return self.client.state()

    def rehearse(self, k: int, round_: int, received: State, methods: MethodList) -> int:
        """Take the first local step of client ``k`` as a dry run; returns how often it runs a reference model."""
        client = self.client
        with self._apart("rehearse", k, round_, methods) as loader:
            runs = client.references.num_runs
            with client.lifecycle.visiting(self.loaders.data.info(k), received, client.visit.fit_progress) as visit:
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
            client.lifecycle.visiting(self.loaders.data.info(k), received, client.visit.fit_progress),
        ):
            return client.methods.transform_logits(client, logits)

    @contextmanager
    def _apart(self, purpose: str, k: int, round_: int, methods: MethodList | None = None) -> Iterator[ClientLoader]:
        """A dry run: nothing lasts, nothing is timed, and the random numbers differ from a visit's."""
        client = self.client
        with (
            patched(self, stopwatch=Stopwatch()),
            rng_scope(self.loaders.seed, purpose, round_, k),
            client.lifecycle.rehearsing(methods),
            self.loaders.train(k, round_, purpose) as loader,
        ):
            client.visit.fit_progress = client.worker_module.trainer_shim.fit_progress = (
                client.worker_module.fit_progress.at(round_, len(loader))
            )
            yield loader

    def _take_steps(self, visit: Visit, loader: ClientLoader, steps: int) -> None:
        """Take ``steps`` local steps, without the module's hooks around epochs and batches."""
        fit_progress = visit.fit_progress
        optimizer, _ = self.begin_optimizer(1.0, loader)
        fit_progress.local_steps = steps
        for epoch, length in enumerate(fit_progress.passes):
            fit_progress.epoch = epoch
            for batch in self._pass(loader, length, fit_progress):
                visit.logged.begin_batch(batch.batch)
                self._take_step(batch, optimizer)
                if batch.ends_step:
                    fit_progress.step += 1
        set_mode(optimizer, "eval")

    def begin_optimizer(self, factor: float, loader: ClientLoader | None) -> tuple[Optimizer, Schedulers]:
        """The optimizer and the schedulers of a visit in their initial state."""
        optimizer, schedulers = self.optimizers.fresh()
        worker_module = self.client.worker_module
        self._closes = "optimizer_step" in worker_module.hooks or needs_closure(type(optimizer).step)
        self._prepares = self.prepares()
        for group in optimizer.param_groups if factor != 1.0 else ():
            group["lr"] = group["lr"] * factor
        self.schedules.begin_visit(optimizer, schedulers)
        schedulers = self.monitored.apply(optimizer, schedulers)
        if self.scaling is not None and self._unused_scaler is not None:
            # another object, since a visit that fails leaves its last step in it
            self._scaler = self._precision.scaler = copy.deepcopy(self._unused_scaler)
            state = zip(("scale", "_growth_tracker"), self.scaling, strict=True)
            self._scaler.load_state_dict({**self._scaler.state_dict(), **dict(state)})
        worker_module.trainer_shim.begin_visit(optimizer, schedulers, loader)
        set_mode(optimizer, "train")
        return optimizer, schedulers

    def _train(self, visit: Visit, loader: ClientLoader, lr_factor: float) -> None:
        """All epochs and batches of a visit, with the hooks of Lightning's training loop in its order."""
        client, fit_progress, logged, watch = self.client, visit.fit_progress, visit.logged, self.stopwatch
        call, hooks, schedules = client.worker_module.call, client.worker_module.hooks, self.schedules
        passes = fit_progress.passes_now
        if not passes:  # a client without batches has no fit, and calls no hook
            return
        optimizer, schedulers = self.begin_optimizer(lr_factor, loader)
        if "on_train_start" in hooks:
            call("on_train_start")
        watch.lap("load")
        for epoch, length in enumerate(passes):
            fit_progress.epoch = epoch
            if "on_train_epoch_start" in hooks:
                call("on_train_epoch_start")
            for batch in self._pass(loader, length, fit_progress):
                self.workers.check()
                logged.begin_batch(batch.batch)
                watch.lap("data")
                index = batch.index
                if "on_train_batch_start" in hooks and call("on_train_batch_start", batch.batch, index) == -1:
                    if schedulers:
                        schedules.after_batch(schedulers, index, stepped=True, last=True)
                    watch.lap("step")
                    break
                self._take_step(batch, optimizer)
                if self._skips:
                    visit.num_skipped += 1
                if batch.ends_step:
                    fit_progress.step += 1
                if schedulers:
                    schedules.after_batch(schedulers, index, batch.ends_step, index + 1 == length)
                if "on_train_batch_end" in hooks:
                    call("on_train_batch_end", visit.outputs, batch.batch, index)
                watch.lap("step")
            if "on_train_epoch_end" in hooks:
                call("on_train_epoch_end")
            visit.epochs.append(logged.end_epoch())
            if schedulers and schedules.mode == "restart":
                schedules.after_epoch(schedulers)
        visit.scalings = scalings_of(self._scaler)
        fit_progress.epoch += 1  # Lightning counts the last epoch before this hook, too
        set_mode(optimizer, "eval")
        if "on_train_end" in hooks:
            call("on_train_end")
        if fit_progress.rounds > 1:
            self.optimizers.check(optimizer)
        self._warn_of_reverted(fit_progress.round)
        if not client.module.automatic_optimization:
            raise ClientError("automatic_optimization was set to False in the visit; return a loss from training_step")

    def _warn_of_reverted(self, round_: int) -> None:
        """Warn once of a ``requires_grad`` that a visit of an earlier round has changed, and this one has not."""
        trained, live, first_rounds = {*self.client.trainable}, self.client.live, self._first_rounds
        changed = [name for name in live if live[name].requires_grad != (name in trained)]
        earlier = [name for name in first_rounds if first_rounds[name] < round_]
        reverted = [name for name in earlier if name not in changed]
        if reverted and not self._warned:
            kind, names = type(self.client.module).__name__, ", ".join(reverted)
            before = first_rounds[reverted[0]]
            text = f"changes in round {before}, and not in round {round_}, as a visit begins with its first value; "
            text += "change it in each visit, as by current_epoch >= 3 in place of == 3"
            rank_zero_warn(f"model={kind}: requires_grad of {truncate(names, LONGEST_LIST)} {text}")
        self._warned |= bool(reverted)
        self._first_rounds = dict.fromkeys(changed, round_) | first_rounds

    def _pass(self, loader: ClientLoader, length: int, fit_progress: FitProgress) -> Iterator[TrainingBatch]:
        """A pass over the batches, of ``length`` at most."""
        ends, number = fit_progress.steps_in(length), 0
        for rows, batch in itertools.islice(self.loaders.batches(loader), length):
            yield TrainingBatch(batch, number, rows, number in ends)
            number += 1
        if number < length:
            hint = "return the number of batches of every pass; an exhausted iterator has none in the next pass"
            raise ClientError(f"its train_dataloader gave {number} of the {length} batches of a pass; {hint}")

    def _take_step(self, batch: TrainingBatch, optimizer: Optimizer) -> None:
        """Add the gradients of a batch, and where it ends one, take the local step of the batches since the last."""
        if batch.ends_step and self._closes:
            self._step_by_closure(batch, optimizer)
            return
        self._compute_gradients(batch, optimizer)
        if batch.ends_step and self._has_gradients:
            if self._prepares:
                self._prepare(optimizer)
            if self._scaler is None:
                take_step(optimizer)
            else:
                self.fabric.strategy.optimizer_step(optimizer)
            end_step(self.client, optimizer, self._overflows)

    def _step_by_closure(self, batch: TrainingBatch, optimizer: Optimizer) -> None:
        """Let the module, or the optimizer, decide when loss and gradients are computed."""
        client, worker_module = self.client, self.client.worker_module
        ran = False

        @torch.enable_grad()
        def closure() -> torch.Tensor | None:
            nonlocal ran
            ran = True
            loss = self._compute_gradients(batch, optimizer)
            return None if loss is None else loss.detach()

        wrapper = worker_module.trainer_shim.strategy._lightning_optimizers[0]
        steps_before, versions = client.num_steps, self._versions()
        if "optimizer_step" in worker_module.hooks:
            worker_module.call("optimizer_step", client.visit.fit_progress.current_epoch, batch.index, wrapper, closure)
        else:
            wrapper.step(closure=closure)
        if not ran:
            raise ClientError("optimizer_step has not run its closure; call optimizer.step(closure=optimizer_closure)")
        if client.num_steps == steps_before and self._versions() != versions:
            if any(method.corrects_gradients for method in client.methods.methods):
                hint = "which skips the methods' corrections; call optimizer.step(closure=optimizer_closure)"
                raise ClientError(f"optimizer_step calls optimizer.optimizer.step, {hint}")
            end_step(client, optimizer)

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
            end_step(self.client, optimizer, self._overflows)
        return result

    def _compute_gradients(self, batch: TrainingBatch, optimizer: Optimizer) -> torch.Tensor | None:
        """Loss and gradients of a batch; None where the module skips the batch."""
        client, worker_module, fit_progress = self.client, self.client.worker_module, self.client.visit.fit_progress
        call, hooks = worker_module.call, worker_module.hooks
        if client.methods.needs_gradients:
            versions = tensor_versions(batch.batch)
            client.visit.present = batch._replace(states=generator_states(), versions=versions)
        with self.fabric.autocast():
            loss = client.training_step(batch.batch, batch.index, batch.rows)
        self._skips = loss is None
        if batch.index % fit_progress.accumulate == 0:
            self._has_gradients = False
            if "on_before_zero_grad" in hooks:
                call("on_before_zero_grad", optimizer)
            if "optimizer_zero_grad" in hooks:
                call("optimizer_zero_grad", fit_progress.current_epoch, batch.index, optimizer)
            else:
                clear_gradients(optimizer)
        if loss is not None:
            share = loss if fit_progress.accumulate == 1 else loss / fit_progress.accumulate
            self._has_gradients = True
            if "on_before_backward" in hooks:
                call("on_before_backward", share)
            if "backward" in hooks:
                call("backward", share if self._scaler is None else self._scaler.scale(share))
            else:
                self._precision.backward(share, None)
            if "on_after_backward" in hooks:
                call("on_after_backward")
        self.stopwatch.lap("forward_backward")
        return loss

    def prepares(self) -> bool:
        """Whether anything sees or changes the gradients between the backward pass and the optimizer's step."""
        methods, worker_module = self.client.methods.overriding, self.client.worker_module
        of_module = worker_module.hooks & {"on_before_optimizer_step", "configure_gradient_clipping"}
        clips = worker_module.trainer_shim.setting.gradient_clip_val is not None
        corrects = methods("on_before_optimizer_step") or methods("on_after_clipping")
        return bool(corrects or of_module or clips or self._scaler is not None)

    def _prepare(self, optimizer: Optimizer) -> None:
        """Unscale, correct and clip the gradients; methods do not see the gradients of a lost step."""
        client, worker_module, self._overflows = self.client, self.client.worker_module, False
        methods, hooks = client.methods, worker_module.hooks
        if self._has_gradients:
            self._precision.unscale_gradients(optimizer)
            if self._scaler is not None:
                # private, as of torch 2.6 and 2.15: by this the scaler itself decides whether to leave out the step
                self._overflows = any(map(bool, self._scaler._found_inf_per_device(optimizer).values()))
        if "on_before_optimizer_step" in hooks:
            worker_module.call("on_before_optimizer_step", optimizer)
        if methods.overriding("on_before_optimizer_step") and not self._overflows:
            methods.call("on_before_optimizer_step", client, optimizer)
        setting = worker_module.trainer_shim.setting
        if "configure_gradient_clipping" in hooks:
            how = {
                name: getattr(worker_module.trainer_shim, name)
                for name in ("gradient_clip_val", "gradient_clip_algorithm")
            }
            worker_module.call("configure_gradient_clipping", optimizer, **how)
        elif setting.gradient_clip_val is not None:
            algorithm = worker_module.trainer_shim.gradient_clip_algorithm or GradClipAlgorithmType.NORM
            worker_module.trainer_shim.precision_plugin.clip_gradients(optimizer, setting.gradient_clip_val, algorithm)
        if methods.overriding("on_after_clipping") and not self._overflows:
            methods.call("on_after_clipping", client, optimizer)
        self.stopwatch.lap("correct")


def take_step(optimizer: Optimizer) -> None:
    """``optimizer.step()``, without what torch wraps around it where nobody looks: hooks, and a profiler's span.

    For a small model the wrapper takes as long as the step.
    """
    step: Any = type(optimizer).step
    wrapped = getattr(step, "__code__", None) is WRAPPER and "step" not in vars(optimizer)
    observed = wrapped and (
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
        or torch.autograd._profiler_enabled()
    )
    if wrapped and not observed:
        step.__wrapped__(optimizer)
    else:
        optimizer.step()


def end_step(client: Client, optimizer: Optimizer, lost: bool = False) -> None:
    """The optimizer has stepped: call the methods, and count the step; one that it has left out is only counted."""
    visit = client.visit
    if lost:
        visit.num_lost += 1
        return
    counts = visit.counts
    counts.lr = float(optimizer.param_groups[0]["lr"])  # a tensor may change later
    counts.lr_total += counts.lr
    if client.methods.overriding("on_after_optimizer_step"):
        client.methods.call("on_after_optimizer_step", client, optimizer)
    counts.num_steps += 1


def scalings_of(scaler: Any) -> list[tuple[float, int]]:
    """The scale of a gradient scaler, with the steps since it changed; nothing without one, or where it is not used."""
    state = {} if scaler is None else scaler.state_dict()
    return [(float(state["scale"]), int(state["_growth_tracker"]))] if state else []


class Stopwatch:
    """Seconds by phase: a lap is the time since the last one.

    With ``events``, laps end with events in the stream of the GPU, which is waited for only when the seconds are read.
    They include the time in which the GPU has nothing to do. A local step then has two laps, ``data`` and ``step``.
    """

    def __init__(self, events: bool = False) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._laps: deque[tuple[str, Any, Any]] = deque()
        self.events = events
        self._now: Callable[[], Any] = recorded_event if events else time.perf_counter
        self._last: Any = self._now()

    def reset(self) -> None:
        """Begin a round."""
        self._seconds.clear()
        self._laps.clear()
        self.start()

    def start(self) -> None:
        """Begin a lap; the time since the last one counts for no phase."""
        if self._laps:
            self._add_ended()
        self._last = self._now()

    def lap(self, phase: str) -> None:
        """Add the time since the last lap to ``phase``."""
        if self.events and phase in PARTS_OF_STEP:
            return
        now = self._now()
        if self.events:
            self._laps.append((phase, self._last, now))
        else:
            self._seconds[phase] += now - self._last
        self._last = now

    def read(self) -> dict[str, float]:
        """The seconds by phase since the round began."""
        if self._laps:
            self._last.synchronize()
        self._add_ended()
        return dict(self._seconds)

    def _add_ended(self) -> None:
        """Add the laps whose events the GPU has passed, and release these events."""
        while self._laps and self._laps[0][2].query():
            phase, start, end = self._laps.popleft()
            self._seconds[phase] += start.elapsed_time(end) / 1000  # of milliseconds


def recorded_event() -> torch.cuda.Event:
    """An event in the stream of the GPU, now."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
