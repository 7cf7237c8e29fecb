"""A run: all its parts, built by one function, in each worker."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule

from fl_lightning.callbacks.base import Callback
from fl_lightning.client import Client, Memories
from fl_lightning.client.taps import resolve_taps
from fl_lightning.data.datamodule import FederatedDataModule
from fl_lightning.engine import checks
from fl_lightning.engine.compiled import replace_forward
from fl_lightning.engine.evaluation import Evaluator, Representations
from fl_lightning.engine.launch import (
    build_fabric,
    devices_and_nodes,
    forks,
    keep_freed_memory,
    refuse_default_group,
    threads,
)
from fl_lightning.engine.loaders import Loaders
from fl_lightning.engine.local_training import LocalTraining, Stopwatch
from fl_lightning.engine.optimizers import configure_optimizer
from fl_lightning.engine.workers import Workers
from fl_lightning.method import MethodList
from fl_lightning.records.folder import RunFolder
from fl_lightning.records.metrics import Metrics
from fl_lightning.seeding import base_seed
from fl_lightning.server import Server

if TYPE_CHECKING:
    from fl_lightning.trainer import FederatedTrainer

Result = TypeVar("Result")


@dataclass(frozen=True)
class Run:
    """The parts of a run, as one worker has them.

    Args:
        trainer: the arguments of the run, and what the hooks of the callbacks receive.
        seed: base seed of all addressed streams.
        fabric: device and precision; it calls the hooks of the callbacks.
        workers: the worker processes and their collectives.
        data: the clients' data.
        methods: what acts on clients and server.
        client: the resident module, in which the clients of this worker train.
        server: the global state and its optimizer.
        loaders: the data as batches on the device.
        local_training: one client's epochs and steps.
        evaluator: metrics of a model.
        representations: taps of a model.
        metrics: what is measured, a row for each round.
        stopwatch: seconds of the visits in this round, by phase.
        folder: the files of the run.
    """

    trainer: FederatedTrainer
    seed: int
    fabric: Fabric
    workers: Workers
    data: FederatedDataModule
    methods: MethodList
    client: Client
    server: Server
    loaders: Loaders
    local_training: LocalTraining
    evaluator: Evaluator
    representations: Representations
    metrics: Metrics
    stopwatch: Stopwatch
    folder: RunFolder

    @property
    def callbacks(self) -> list[Callback]:
        """The observers of the run."""
        return self.trainer.callbacks

    def call(self, hook: str, **kwargs: Any) -> None:
        """Call a hook of all callbacks."""
        self.fabric.call(hook, trainer=self.trainer, **kwargs)


def launch(
    trainer: FederatedTrainer,
    model: LightningModule,
    data: Any,
    methods: MethodList,
    command: Callable[[Run], Result],
) -> Result:
    """Check what can be checked, start the workers, and run a command on the run that each of them builds."""
    checks.check_module(model)
    checks.check_data(data)
    taps = resolve_taps(model, trainer.taps, wanted_taps(trainer, methods))
    prepared = forks(trainer)
    if prepared:
        # before the workers are forked, so that they share the data
        prepare(data)
    fabric = build_fabric(trainer, *devices_and_nodes(trainer, data))
    refuse_default_group(fabric.world_size)
    work = partial(_work, trainer, model, data, methods, taps, prepared, command)
    with threads(trainer.threads_per_worker or (1 if fabric.world_size > 1 else None)):
        return fabric.launch(work)


def _work(
    trainer: FederatedTrainer,
    model: LightningModule,
    data: Any,
    methods: MethodList,
    taps: dict[str, str],
    prepared: bool,
    command: Callable[[Run], Result],
    fabric: Fabric,
) -> Result:
    """Build the run in one worker, and run the command on it."""
    keep_freed_memory()
    with Workers(fabric) as workers, ExitStack() as cleanup:
        if not prepared:
            prepare(data, workers)
        checks.check_data_fits(trainer, model, data, methods)
        return command(build(trainer, fabric, model, data, methods, taps, cleanup))


def build(
    trainer: FederatedTrainer,
    fabric: Fabric,
    model: LightningModule,
    data: FederatedDataModule,
    methods: MethodList,
    taps: dict[str, str],
    cleanup: ExitStack,
) -> Run:
    """Make all parts of a run, each from those before it; ``cleanup`` gives the module back as it came."""
    seed, number = base_seed(), data.num_clients
    workers, stopwatch = Workers(fabric), Stopwatch()
    channels_last = place_module(model, fabric, trainer)
    memories = Memories(trainer.client_memory * 2**30, fabric.device)
    rules = (trainer.weighting, trainer.buffers, trainer.cache_references)
    client = Client(model, methods, taps, memories, seed, *rules, info=data.info(0))
    cleanup.callback(client.release)
    methods.setup(client, configure_optimizer(model)[0])
    examples = sum(data.info(k).num_examples for k in range(number))
    scope = trainer.server_optimizer_scope
    server = Server(client.live, client.trainable, trainer.server_optimizer, number, examples, scope, seed)
    loaders = Loaders(fabric, data, seed, channels_last, trainer.limit_batches)
    lr_factors = checks.lr_factors(trainer.client_lr_scheduler, trainer.max_rounds)
    length = (trainer.local_epochs, trainer.local_steps)
    how = (*length, trainer.gradient_clip_val, lr_factors)
    local_training = LocalTraining(fabric, client, loaders, workers, stopwatch, *how)
    evaluator = Evaluator(client, loaders, workers, partial(fabric.call, trainer=trainer))
    representations = Representations(client, loaders, workers, trainer.taps)
    name = trainer.name or "+".join(methods.names) or "fedavg"
    writes = fabric.is_global_zero and not trainer.fast_dev_run
    folder = RunFolder(trainer.default_root_dir / name, trainer.logger, writes)
    return Run(
        trainer=trainer,
        seed=seed,
        fabric=fabric,
        workers=workers,
        data=data,
        methods=methods,
        client=client,
        server=server,
        loaders=loaders,
        local_training=local_training,
        evaluator=evaluator,
        representations=representations,
        metrics=Metrics(),
        stopwatch=stopwatch,
        folder=folder,
    )


def place_module(model: LightningModule, fabric: Fabric, trainer: FederatedTrainer) -> bool:
    """Move the module to the device, in the precision's type; returns whether it is in the channels_last format."""
    fabric.to_device(model)
    fabric.strategy.precision.convert_module(model)
    asked = trainer.channels_last
    channels_last = bool(getattr(model, "channels_last", False) if asked is None else asked)
    if channels_last:
        model.to(memory_format=torch.channels_last)
    model.fabric = fabric
    if trainer.compile:
        replace_forward(model, trainer.compile, trainer.warn)
    return channels_last


def prepare(data: Any, workers: Workers | None = None) -> None:
    """Fetch the data and deal it out to the clients; the first worker of each machine fetches while the others wait.

    None stands for a process that has not started its workers yet.
    """
    if workers is None or workers.local_rank == 0:
        data.prepare_data()
    if workers is not None:
        workers.barrier()
    data.setup("fit")


def wanted_taps(trainer: FederatedTrainer, methods: MethodList) -> dict[str, str]:
    """The taps that methods and callbacks ask for, each with the name of the class that asks."""
    wanted = methods.wanted_taps()
    for callback in trainer.callbacks:
        wanted |= {tap: type(callback).__name__ for tap in callback.requires}
    return wanted
