"""A run: all its parts, built by one function, in each worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule

from fl_lightning.client import Client, Memories
from fl_lightning.client.taps import resolve_taps
from fl_lightning.data.datamodule import FederatedDataModule
from fl_lightning.engine import checks
from fl_lightning.engine.compiled import replace_forward
from fl_lightning.engine.evaluation import Evaluator, Representations
from fl_lightning.engine.launch import build_fabric, devices_and_nodes, forks, keep_freed_memory, threads
from fl_lightning.engine.loaders import Loaders
from fl_lightning.engine.local_training import LocalTraining
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
    """The parts of a run.

    Args:
        trainer: its arguments, and what callbacks are given.
        seed: base seed of all addressed streams.
        fabric: device, precision and calls of the callbacks.
        workers: the processes that train clients.
        data: the clients' data.
        methods: what acts on clients and server.
        client: the resident module.
        server: the global state.
        loaders: batches on the device.
        local_training: one client's epochs and steps.
        evaluator: metrics of a model.
        representations: taps of a model.
        metrics: what is measured.
        folder: where it is written.
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
    folder: RunFolder

    @property
    def callbacks(self) -> list[Any]:
        """The observers."""
        return self.trainer.callbacks

    def call(self, hook: str, **kwargs: Any) -> None:
        """Call a hook of the callbacks."""
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
        # before the others are forked, so that they share it
        prepare(data, trainer.fabric)
    fabric = build_fabric(trainer, *devices_and_nodes(trainer, data))
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
    """What each worker does."""
    keep_freed_memory()
    if not prepared:
        prepare(data, fabric)
    checks.check_data_fits(trainer, model, data, methods)
    run = build(trainer, fabric, model, data, methods, taps)
    try:
        return command(run)
    finally:
        run.client.memories().close()
        run.client.release()


def build(
    trainer: FederatedTrainer,
    fabric: Fabric,
    model: LightningModule,
    data: FederatedDataModule,
    methods: MethodList,
    taps: dict[str, str],
) -> Run:
    """All parts of a run, each from those before it."""
    seed, number = base_seed(), data.num_clients
    workers = Workers(fabric)
    last = place_module(model, fabric, trainer)
    memories = Memories(trainer.client_memory * 2**30, fabric.device)
    client = Client(model, methods, taps, memories, seed, trainer.weighting, trainer.buffers, trainer.cache_references)
    client.info = data.info(0)
    methods.setup(client, configure_optimizer(model)[0])
    examples = sum(data.info(k).num_examples for k in range(number))
    scope = trainer.server_optimizer_scope
    server = Server(client.live, client.trainable, trainer.server_optimizer, number, examples, scope, seed)
    loaders = Loaders(fabric, data, seed, last, trainer.limit_batches)
    lr_factors = checks.lr_factors(trainer.client_lr_scheduler, trainer.max_rounds)
    how = (trainer.local_epochs, trainer.local_steps, trainer.gradient_clip_val, lr_factors)
    local_training = LocalTraining(fabric, client, loaders, workers, *how)
    evaluator = Evaluator(client, loaders, workers, partial(fabric.call, trainer=trainer))
    representations = Representations(client, loaders, workers, trainer.taps)
    name = trainer.name or "+".join(methods.names) or "fedavg"
    writes = fabric.is_global_zero and not trainer.fast_dev_run
    folder = RunFolder(trainer.default_root_dir / name, trainer.logger, writes)
    parts = (methods, client, server, loaders, local_training, evaluator, representations, Metrics(), folder)
    return Run(trainer, seed, fabric, workers, data, *parts)


def place_module(model: LightningModule, fabric: Fabric, trainer: FederatedTrainer) -> bool:
    """Bring the module to the device, in the precision's type; gives whether it is in the channels_last format."""
    fabric.to_device(model)
    fabric.strategy.precision.convert_module(model)
    asked = trainer.channels_last
    last = bool(getattr(model, "channels_last", False) if asked is None else asked)
    if last:
        model.to(memory_format=torch.channels_last)
    model.fabric = fabric
    if trainer.compile:
        replace_forward(model, trainer.compile, trainer.warn)
    return last


def prepare(data: Any, fabric: Fabric) -> None:
    """Fetch the data and deal it out to the clients; the first worker of each machine fetches, and the others wait."""
    if fabric.local_rank == 0:
        data.prepare_data()
    fabric.barrier()
    data.setup("fit")


def wanted_taps(trainer: FederatedTrainer, methods: MethodList) -> dict[str, str]:
    """The taps that methods and callbacks ask for, with the class that asks."""
    wanted = methods.wanted_taps()
    for callback in trainer.callbacks:
        wanted |= {tap: type(callback).__name__ for tap in getattr(callback, "requires", ())}
    return wanted
