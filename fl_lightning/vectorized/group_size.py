"""Choose the number of clients that train side by side, by model, batch and device, with a reason.

The rule is not timed, so that results are reproducible. Steps that vmap cannot map over clients are found before round
0: by known properties of the module and its optimizer, and by a trial in which two clients take a step sequentially and
side by side.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.flop_counter import FlopCounterMode

from fl_lightning.core.seeding import rng_scope, torch_generators
from fl_lightning.core.state import norm
from fl_lightning.data.client_loaders import DataLoaderAdapter, IndexedLoader
from fl_lightning.training.patching import patched
from fl_lightning.utilities.errors import ClientError, UsageError, count, require, truncate, with_location
from fl_lightning.vectorized.group import Group, GroupMember
from fl_lightning.vectorized.op_trace import numbers_drawn
from fl_lightning.vectorized.stacked_state import ELEMENTWISE
from fl_lightning.vectorized.values_held import changed_value, values_held
from fl_lightning.vectorized.vmap_views import VmapUnsupported

if TYPE_CHECKING:
    from fl_lightning.engine.run import Run

# of auto: clients that share a program, at least and at most, and numbers of their states together
LEAST_CLIENTS, MOST_CLIENTS, MOST_NUMBERS = 8, 128, 2**24
# operations of a forward pass on a batch, of matrix products and convolutions, from which more clients in a program
# save nothing, by the kind of device; see docs/side_by_side.md for the measurements
WORK = {"cpu": 2e7, "cuda": 2e9}
# hooks around a visit, its batches and its steps, which a program of several clients could call for none of them
VISIT_HOOKS = {
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_before_zero_grad",
    "optimizer_zero_grad",
    "on_before_backward",
    "backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "optimizer_step",
    "lr_scheduler_step",
}
# largest relative difference of the change of a client in the trial, by the precision; networks with BatchNorm amplify
# the rounding of float32 to a hundredth
NEAR = {"64-true": 1e-6, "": 0.05}
AUTO = "auto"


class GroupSize(NamedTuple):
    """Groups of ``least`` to ``size`` clients train side by side, with a reason; size 1 is sequential training."""

    size: int
    reason: str
    least: int = 2


def choice_for(run: Run) -> GroupSize:
    """The size of groups, with its reason, once the methods have their server values; all workers call this.

    Raises:
        UsageError: a size is requested, but this run cannot be mapped over clients.
    """
    bounds, trainer = group_bounds(run), run.trainer
    requested, least = trainer.clients_per_step, bounds.least
    if requested == 1:
        return bounds
    cohort = trainer.nominal_cohort(run.data.num_clients)
    if cohort < least:
        return GroupSize(1, f"a round has {count(cohort, 'client')}; from {least} on, they may share a program")
    if bounds.size < least:
        return bounds
    obstacle = next(obstacles(run), None)
    if obstacle is None:
        try:
            try_two(run)
        except UsageError as error:
            obstacle = str(error)
    # all workers get the same result, unless the machine of one of them fails
    obstacle = run.workers.gather(obstacle, "obstacle to groups")[0]
    if obstacle is None:
        return bounds
    require(requested == AUTO, "trainer.clients_per_step", requested, f"{obstacle}; give 1 or auto")
    return GroupSize(1, obstacle)


def group_bounds(run: Run) -> GroupSize:
    """The number of models that share a program, if nothing speaks against it."""
    requested, numbers = run.trainer.clients_per_step, run.worker_module.numel
    if requested == 1:
        return GroupSize(1, "trainer.clients_per_step is 1")
    least = LEAST_CLIENTS if requested == AUTO else 2
    size = min(MOST_CLIENTS, MOST_NUMBERS // max(numbers, 1)) if requested == AUTO else int(requested)
    if size < least:
        return GroupSize(1, f"the model has {numbers:,} numbers")
    return GroupSize(size, f"{least} to {size} clients of {numbers:,} numbers share a program", least)


def obstacles(run: Run) -> Iterator[str]:
    """Known reasons why clients cannot train side by side."""
    worker_module, trainer, module = run.worker_module, run.trainer, run.client.module
    optimizer, schedulers = run.local_training.optimizers.first
    name = type(module).__name__
    for hook in sorted(VISIT_HOOKS & worker_module.hooks):
        yield f"{name} overrides {hook}, which is called for each client"
    if (
        type(optimizer) not in ELEMENTWISE
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
    ):
        names = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        yield f"its optimizer is {type(optimizer).__name__}; known to treat each number by itself are {names}"
    options = {(key, isinstance(group[key], Tensor)) for group in optimizer.param_groups for key in group}
    for key in [key for key, is_tensor in options if is_tensor]:
        yield f"{key} of its optimizer {type(optimizer).__name__} is a tensor; pass a number"
    precision = str(run.fabric.strategy.precision.precision)
    if not precision.endswith("true"):
        yield f"trainer.precision={precision}: torch's autocast does not convert all that is mapped"
    if trainer.compile:
        yield "trainer.compile needs clients that train sequentially"
    if trainer.cache_references is True:
        yield "trainer.cache_references keeps what reference models give of one client"
    if worker_module.fit_progress.accumulate > 1:
        yield "trainer.accumulate_grad_batches adds up the gradients of several batches"
    if any(config.interval == "step" and not config.reduce_on_plateau for config in schedulers):
        yield "its scheduler steps within an epoch"
    if any(config.reduce_on_plateau for config in schedulers) and trainer.client_schedulers == "restart":
        yield "its scheduler watches a metric of each visit"
    for path, part in module.named_modules():
        if isinstance(part, nn.RNNBase):
            yield f"{path or name} is a {type(part).__name__}, which stores its weights elsewhere"
        if getattr(part, "sparse", False) is True:
            yield f"the gradients of {path or name} are sparse"


def try_two(run: Run) -> None:
    """Try the first step of two clients sequentially and side by side, and restore everything.

    Raises:
        VmapUnsupported: the step side by side fails, or has another result.
    """
    training, state, auto = run.local_training, run.server.state, run.trainer.clients_per_step == AUTO
    clients = list(itertools.islice(filter(training.num_batches, range(run.data.num_clients)), 2))
    if len(clients) < 2:
        raise VmapUnsupported("only one client has batches")
    for k in clients:
        with run.loaders.train(k, 0, "work") as loader:
            # a pass over an iterable might change the next one
            inner: Any = loader.loader if isinstance(loader, DataLoaderAdapter) else None
            indexed = isinstance(inner, DataLoader) and not isinstance(inner.dataset, IterableDataset)
            repeats = isinstance(inner, (list, tuple)) or (indexed and not inner.num_workers)
            if not (repeats or isinstance(loader, IndexedLoader)):
                raise VmapUnsupported("its batches cannot be read before the run")
    operations, draws = profile_step(run, clients[0])
    if auto and operations > WORK.get(run.fabric.device.type, 0.0):
        raise VmapUnsupported(
            f"a step takes {operations / 1e6:,.0f} million operations, which fill a core by themselves"
        )
    if auto and draws:
        raise VmapUnsupported("its step draws random numbers, which each visit takes from its own stream")
    module, methods = run.client.module, run.methods.methods
    with (
        rng_scope(run.seed, "side_by_side"),
        run.client.lifecycle.rehearsing(run.methods),
        patched(run.worker_module.fit_progress, limit=1),
    ):
        try:
            sequential = [dict(training.visit(k, 0, state).delta) for k in clients]
        except Exception as error:  # the run says it
            raise VmapUnsupported("a step of one client fails") from error
        for k in clients:
            run.client.memories().drop(k)
        members = sorted((GroupMember(k) for k in clients), key=lambda member: -training.num_batches(member.id))
        group = Group(training, members, 0, state)
        run.worker_module.load_and_reset(state)
        attributes = vars(module).values()
        optimizers = [value for value in attributes if isinstance(value, torch.optim.Optimizer)]
        skipped = [*module.parameters(), *module.buffers(), *optimizers]
        before = values_held(module, methods, skipped)
        try:
            with group.training_all():
                changed = changed_value(before, values_held(module, methods, skipped))
                updates = {}
                for row, member in enumerate(members):
                    updates[member.id] = dict(group.update(row).delta)
        except ClientError as error:
            raise VmapUnsupported(truncate(with_location(error.__cause__ or error), 300)) from error
    if changed is not None:
        raise VmapUnsupported(
            f"a step changes {changed}, which is not the client's; use client.scratch(self) or a buffer"
        )
    near = NEAR.get(str(run.fabric.strategy.precision.precision), NEAR[""])
    # groups draw other random numbers
    for k, delta in zip(clients, sequential, strict=True) if not draws else ():
        gap = float(norm({name: value - updates[k][name] for name, value in delta.items()}))
        size = float(norm(delta))
        if gap > near * size:
            why = "it reads a value of one client, or keeps one outside of the state"
            by = f"by {gap / size:.2%}"
            raise VmapUnsupported(f"a step side by side moves the parameters otherwise than alone, {by}; {why}")


def profile_step(run: Run, k: int) -> tuple[int, bool]:
    """Operations of the forward pass in the first step of client ``k``, and whether it draws random numbers.

    Raises:
        VmapUnsupported: it fails.
    """
    client, worker_module, counter = run.client, run.worker_module, FlopCounterMode(display=False)
    with (
        rng_scope(run.seed, "work"),
        client.lifecycle.rehearsing(),
        run.loaders.train(k, 0, "work") as loader,
    ):
        before = random_states()
        try:
            _, batch = next(iter(run.loaders.batches(loader)))
            client.visit.logged.begin_batch(batch)
            worker_module.trainer_shim.begin_visit(*run.local_training.optimizers.first, loader)
            with torch.no_grad(), run.fabric.autocast(), counter, worker_module.taps.recorded(False):
                client.training_step(batch, 0)
        except Exception as error:  # the run says it in the user's words
            raise VmapUnsupported("its step fails without gradients") from error
        return counter.get_total_flops(), random_states() != before


def random_states() -> list[Any]:
    """The states of the generators that user code may draw from."""
    of_torch = [generator.get_state().numpy().tobytes() for generator in torch_generators()]
    return [*numbers_drawn(), of_torch]
