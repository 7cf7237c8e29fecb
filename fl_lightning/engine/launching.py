"""Starts the workers, and builds a run in each of them, by one function."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from torch.optim.lr_scheduler import LRScheduler

from fl_lightning.client import Client, ClientStateStore
from fl_lightning.client.lightning.fit_progress import FitProgress
from fl_lightning.client.lightning.reductions import LogSpec
from fl_lightning.client.lightning.trainer_shim import ShimConfig, TrainerShim
from fl_lightning.client.run_context import BatchIndex
from fl_lightning.client.taps import resolve_taps, submodule
from fl_lightning.core.method import MethodList
from fl_lightning.core.reduced import Reduced
from fl_lightning.core.seeding import base_seed, rng_scope
from fl_lightning.core.server import Server
from fl_lightning.core.state import select
from fl_lightning.core.weighted import Weighted
from fl_lightning.data.client_loaders import num_batches
from fl_lightning.data.datamodule import FederatedDataModule
from fl_lightning.data.partition_adapter import own_module_of
from fl_lightning.distributed.launcher import (
    build_fabric,
    devices_and_nodes,
    refuse_default_group,
    threads,
    tune_malloc,
    uses_fork,
)
from fl_lightning.distributed.workers import Workers
from fl_lightning.engine import validation
from fl_lightning.engine.argument_checks import check_precision
from fl_lightning.engine.evaluation.evaluator import Evaluator, Representations
from fl_lightning.engine.evaluation.metric_states import Note
from fl_lightning.engine.recalibration import Recalibration
from fl_lightning.engine.run import ClientBackend, Run, VisitRunner
from fl_lightning.engine.run_arguments import RunArguments
from fl_lightning.engine.versions import Versions
from fl_lightning.storage.metrics import Metrics
from fl_lightning.storage.run_folder import RunFolder
from fl_lightning.training.compiled import replace_forward
from fl_lightning.training.device_loaders import TRANSFER_HOOKS, Loaders, transfer_hook
from fl_lightning.training.local_training import LocalTraining, Stopwatch
from fl_lightning.training.optimizers import OptimizerFactory, configure_optimizer, needs_closure
from fl_lightning.training.schedules import can_train, check_length
from fl_lightning.utilities.errors import ClientError, Stopped, check_all, require, with_location

Result = TypeVar("Result")
# types that workers exchange, in addition to tensors, arrays and plain values
MESSAGES = (BatchIndex, LogSpec, Note, Reduced, Weighted)


@contextmanager
def exit_is_failure() -> Iterator[None]:
    """In this block a ``sys.exit()`` in user code makes the run fail: its status could be the one of a success."""
    try:
        yield
    except Stopped:
        raise
    except SystemExit as error:
        raise ClientError(with_location(error)) from error


@exit_is_failure()
def launch(
    trainer: RunArguments,
    model: LightningModule,
    data: Any,
    methods: MethodList,
    command: Callable[[Run], Result],
    backend: ClientBackend,
    runner: VisitRunner,
    stage: str = "fit",
) -> Result:
    """Start the workers, and run a command on the run that each of them builds."""
    length = (trainer.local_epochs, trainer.local_steps, trainer.accumulate_grad_batches, trainer.limit_batches)
    # while the data are prepared, before there are workers and a folder
    setting = ShimConfig(
        precision=str(trainer.fabric.strategy.precision.precision),
        device=trainer.fabric.device,
        datamodule=own_module_of(data),
        default_root_dir=str(trainer.default_root_dir),
        is_global_zero=trainer.fabric.is_global_zero,
        fast_dev_run=trainer.fast_dev_run,
    )
    trainer_shim, prepared = TrainerShim(FitProgress(trainer.max_rounds, *length), setting), uses_fork(trainer)
    trainer_shim.attach(model)
    data.trainer = trainer_shim
    if prepared:
        # before the workers are forked, so that they share the data
        prepare(data, model)
    forked = uses_fork(trainer)  # not where the data module has used a GPU

    def _work(fabric: Fabric) -> Result:
        """Build the run in one worker, and run the command on it."""
        tune_malloc()
        with Workers(fabric, trainer.timeout, MESSAGES) as workers, exit_is_failure(), ExitStack() as cleanup:
            if not prepared:
                prepare(data, model, workers)
            elif not forked:
                workers.barrier()  # at which the others wait for the data
            validation.check_data_fits(trainer, model, data, methods)
            cleanup.callback(trainer_shim.detach, model)
            cleanup.push(partial(notify_failure, data))
            run = build(trainer, backend, runner, trainer_shim, fabric, workers, model, data, methods, stage, cleanup)
            return command(run)

    fabric = build_fabric(trainer, *devices_and_nodes(trainer, data))
    refuse_default_group(fabric.world_size)
    with threads(trainer.threads_per_worker or (1 if fabric.world_size > 1 else None)):
        return fabric.launch(_work)


def folder_of_versions(trainer: RunArguments, methods: MethodList) -> Path:
    """The folder of all versions of a run, named after its methods, unless the trainer has a name."""
    return trainer.default_root_dir / (trainer.name or "+".join(methods.names) or "fedavg")


def build(
    trainer: RunArguments,
    backend: ClientBackend,
    runner: VisitRunner,
    trainer_shim: TrainerShim,
    fabric: Fabric,
    workers: Workers,
    model: LightningModule,
    data: FederatedDataModule,
    methods: MethodList,
    stage: str,
    cleanup: ExitStack,
) -> Run:
    """Make all parts of a run, each from those before it; ``cleanup`` restores the module."""
    check_precision(fabric.device, trainer.precision)
    seed, stopwatch = base_seed(), Stopwatch(events=fabric.device.type == "cuda")
    writes = fabric.is_global_zero and not trainer.fast_dev_run
    folder = RunFolder(folder_of_versions(trainer, methods), trainer.logger, writes)
    trainer_shim.configure(
        replace(
            trainer_shim.setting,
            gradient_clip_val=trainer.gradient_clip_val,
            gradient_clip_algorithm=trainer.gradient_clip_algorithm,
            device=fabric.device,
            loggers=lambda: folder.loggers,
            logs=bool(trainer.logger),
            log_dir=lambda: folder.path,
            is_global_zero=fabric.is_global_zero,
        )
    )
    sizes = (num_batches(data, k) for k in range(data.num_clients))
    trainer_shim.fit_progress.batches = next(filter(None, sizes), 0)  # of the first client that has any
    hint = "no client has a training batch; use a smaller batch_size, or drop_last=false"
    require(stage != "fit" or trainer_shim.fit_progress.batches > 0, "data", type(data).__name__, hint)
    channels_last = build_module(trainer, fabric, model, stage, trainer_shim)
    taps = bind_taps(trainer, model, data, methods)
    with rng_scope(seed, "modules"):
        paths = {name: submodule(binding) for name, binding in taps.items()}
        for name, part in methods.add_modules(model, paths).items():
            cleanup.callback(delattr, model, name)
            fabric.strategy.precision.convert_module(fabric.to_device(part))
    client = Client(
        model,
        methods,
        taps,
        memories=ClientStateStore(trainer.client_memory * 2**30, fabric.device),
        seed=seed,
        weighting=trainer.weighting,
        buffers=trainer.buffers,
        cache_limit=cache_limit(trainer, model, data, workers, fabric.device),
        info=data.info(0),
        trainer_shim=trainer_shim,
    )
    cleanup.callback(client.lifecycle.release)
    cleanup.callback(data.teardown, "fit")  # set up as in every command, since each partitions the data
    cleanup.callback(model.teardown, stage)
    optimizers = OptimizerFactory(model)
    trains = stage == "fit" or can_train(model)
    if trains:
        check_optimizer(trainer, client, data, optimizers)
    if stage == "fit":
        validation.check_buffers(trainer, client)  # once the methods know their memories
    server = build_server(trainer, client, data)
    if trains:  # and the methods know which entries they keep
        server.travelling = client.travelling
    # with the methods of the visit, which a dry run may replace
    client.lifecycle.sent_to = lambda k: client.methods.sent_to(server, k, client.travelling)
    on_cpu = fabric.device.type == "cpu"
    resident = 0.0 if on_cpu else memory_share(workers, fabric.device, available_memory(fabric.device))
    loaders = Loaders(fabric, data, seed, model, channels_last, trainer.limit_batches, resident)
    # without a round, trial steps still have a rate
    factors = validation.lr_factors(trainer.client_lr_scheduler, max(trainer.max_rounds, 1))
    training = LocalTraining(
        fabric, client, loaders, workers, stopwatch, optimizers, trainer.client_schedulers, factors
    )
    evaluator = Evaluator(client, loaders, workers, partial(fabric.call, trainer=trainer))
    evaluator.check()
    return Run(
        trainer=trainer,
        backend=backend,
        runner=runner,
        seed=seed,
        fabric=fabric,
        workers=workers,
        data=data,
        methods=methods,
        client=client,
        server=server,
        versions=Versions(server, methods, client.worker_module),
        loaders=loaders,
        local_training=training,
        evaluator=evaluator,
        representations=Representations(client, loaders, workers, trainer.taps),
        recalibration=Recalibration(client, loaders, workers),
        metrics=Metrics(),
        stopwatch=stopwatch,
        folder=folder,
    )


def build_module(
    trainer: RunArguments, fabric: Fabric, model: LightningModule, stage: str, trainer_shim: TrainerShim
) -> bool:
    """Let the module build itself, and bring it to the worker's device; return whether it is in channels_last."""
    trainer_shim.attach(model)
    with rng_scope(base_seed(), "setup"):  # the same random numbers on all workers
        model.setup(stage)
        with fabric.init_module():
            model.configure_model()
    trainer_shim.attach(model)  # undo partial construction too
    validation.check_module(model, stage)  # again, since its hooks may have changed it
    fabric.to_device(model)
    fabric.strategy.precision.convert_module(model)
    channels_last = trainer.channels_last
    if channels_last is None:
        channels_last = bool(getattr(model, "channels_last", False))
    if channels_last:
        model.to(memory_format=torch.channels_last)
    if trainer.compile:
        replace_forward(model, trainer.compile, trainer.warn)
    return channels_last


def bind_taps(trainer: RunArguments, model: LightningModule, data: Any, methods: MethodList) -> dict[str, str]:
    """Return the binding of each tap that methods and callbacks read; refuse a model without them."""
    # each with the name of the class that asks for it
    required = methods.wanted_taps()
    for callback in trainer.callbacks:
        required |= dict.fromkeys(callback.requires, type(callback).__name__)
    taps: dict[str, str] = {}
    # each site checks its own
    of_data = [] if getattr(data, "is_remote", False) else [partial(validation.check_model_fits, model, data, methods)]
    check_all([*of_data, lambda: taps.update(resolve_taps(model, trainer.taps, required))])
    return taps


def build_server(trainer: RunArguments, client: Client, data: FederatedDataModule) -> Server:
    """Make the server, whose global state is that of the module."""
    validation.check_server_optimizer(trainer, select(client.live, client.trainable))
    clients = [data.info(k) for k in range(data.num_clients)]
    counts = [info.label_counts for info in clients]
    server = Server(
        client.live,
        client.trainable,
        trainer.server_optimizer,
        data.num_clients,
        sum(info.num_examples for info in clients),
        trainer.server_optimizer_scope,
        client.seed,
        torch.stack([*filter(torch.is_tensor, counts)]) if all(map(torch.is_tensor, counts)) else None,
    )
    server.cohort_size = trainer.nominal_cohort(data.num_clients)
    server.at_sites = getattr(data, "is_remote", False)
    return server


def check_optimizer(trainer: RunArguments, client: Client, data: Any, optimizers: OptimizerFactory) -> None:
    """Refuse an optimizer or a scheduler that does not fit the run."""
    optimizer, schedulers = optimizers.first
    kind = f"model={type(client.module).__name__}: configure_optimizers"
    validation.check_options(optimizer, kind)
    scheduled_twice = bool(schedulers) and trainer.client_lr_scheduler is not None
    hint = "the module returns a scheduler; remove one of them"
    require(not scheduled_twice, "trainer.client_lr_scheduler", "given", hint)
    within = [c for c in schedulers if c.reduce_on_plateau and c.interval == "step"]
    hint = "a schedule that watches a metric is stepped after a round or an epoch; give epoch"
    require(not within, f"{kind}: lr_scheduler.interval", "step", hint)
    for scheduler in (config.scheduler for config in schedulers):
        has_both = all(hasattr(scheduler, name) for name in ("state_dict", "load_state_dict"))
        hint = "a visit continues from its state; define load_state_dict, and state_dict, which returns a dictionary"
        stateful = has_both and isinstance(scheduler.state_dict(), dict)
        require(stateful, f"{kind}: lr_scheduler", type(scheduler).__name__, hint)
    again, of_again = configure_optimizer(client.module)
    hint = "it returns the same optimizer again, and each visit begins with a new one; build it in this function"
    require(again is not optimizer, kind, type(optimizer).__name__, hint)
    if trainer.max_rounds > 1 and trainer.client_schedulers == "continue":
        returned = [config.scheduler for config in of_again]
        returned += [part for scheduler in returned for part in getattr(scheduler, "_schedulers", ())]
        for name, value in vars(client.module).items():
            is_returned = not isinstance(value, LRScheduler) or any(value is part for part in returned)
            hint = "configure_optimizers does not return it, so every visit would restart it; return it with its "
            hint += "interval, or give trainer.client_schedulers=restart"
            require(is_returned, f"model={type(client.module).__name__}.{name}", type(value).__name__, hint)
    state_ids = set(map(id, client.live.values()))
    parameters = [value for group in optimizer.param_groups for value in group["params"]]
    trainable = [name for name in client.of_methods if name in client.trainable]
    optimized_ids = set(map(id, parameters))
    omitted_names = [name for name in trainable if id(client.live[name]) not in optimized_ids]
    hint = "parameters of a method, which it leaves out; build the optimizer from self.parameters()"
    require(not omitted_names, kind, ", ".join(omitted_names), hint)
    foreign = sum(value.requires_grad and id(value) not in state_ids for value in parameters)
    hint = "not in the state_dict, so they are not averaged; use the parameters that the module has after "
    hint += "configure_model, and build the optimizer in this function"
    require(not foreign, kind, f"{foreign} tensors", hint)
    methods = client.methods.methods
    correcting = [type(method).__name__ for method in methods if method.corrects_gradients]
    sparse = isinstance(optimizer, torch.optim.SparseAdam)
    hint = "the corrected gradients are dense, and SparseAdam takes sparse ones alone; use Adam"
    require(not (sparse and correcting), "method", correcting, hint)
    if needs_closure(type(optimizer).step):
        hint = f"{type(optimizer).__name__} computes several gradients a step; use another optimizer"
        require(not correcting, "method", correcting, hint)
        mixed = str(trainer.precision) in ("16-mixed", "16")
        require(not mixed, "trainer.precision", trainer.precision, hint)
    needing = [type(method).__name__ for method in client.methods.methods if client.methods.needs_gradients]
    hint = f"{', '.join(needing)} computes the gradient of a step again, on its one batch; give 1"
    batches = trainer.accumulate_grad_batches
    require(not needing or batches == 1, "trainer.accumulate_grad_batches", batches, hint)
    hooks = sorted({"backward", "on_after_backward", "on_before_optimizer_step"} & client.worker_module.hooks)
    hint = f"the gradient that {', '.join(needing)} computes again would lack the effect of these hooks; remove them"
    require(not (needing and hooks), f"model={type(client.module).__name__}: hooks", hooks, hint)
    client.methods.setup(client, optimizer)
    check_length(client, schedulers, (num_batches(data, k) for k in range(data.num_clients)))


def notify_failure(data: Any, kind: Any, error: BaseException | None, traceback: Any) -> None:
    """Call the data module's hook, where the run ends with an error."""
    if error is not None and hasattr(data, "on_exception"):
        data.on_exception(error)


def prepare(data: Any, model: LightningModule, workers: Workers | None = None) -> None:
    """Fetch the data and deal it out to the clients; the first worker of each machine fetches while the others wait.

    None stands for a process that has not started its workers yet.
    """
    per_node = getattr(data, "prepare_data_per_node", True)
    rank = 0 if workers is None else workers.local_rank if per_node else workers.rank
    if rank == 0:
        data.prepare_data()
        model.prepare_data()
    if workers is not None:
        workers.barrier()
    data.setup("fit")


# of the memory that is available when a run begins, for all workers that share it: for cached taps, and on a GPU the
# same again for images
SHARE = 0.25
# packages whose modules give, in eval mode, the same outputs for the same examples
KNOWN = ("fl_lightning.", "torch.nn.")


def cache_limit(
    trainer: RunArguments, model: LightningModule, data: Any, workers: Workers, device: torch.device
) -> float:
    """Bytes of taps that a worker may cache in a visit, the same number on all workers, which all call this.

    Whether an example may differ from pass to pass, each client's loader says; see ``Loaders.batches``.
    """
    if trainer.cache_references != "auto":
        return math.inf if trainer.cache_references else 0.0
    free = available_memory(device) if gives_same_taps(model, data, device) else 0.0
    return min(memory_share(workers, device, free), trainer.client_memory * 2**30)


def memory_share(workers: Workers, device: torch.device, free: float) -> float:
    """The bytes for each worker where a device has ``free`` ones, the same on all workers, which all call this."""
    places = workers.gather((platform.node(), str(device), free), "memory of devices")
    sharing = [place[:2] for place in places]
    return SHARE * min(free / sharing.count((node, where)) for node, where, free in places)


def gives_same_taps(model: LightningModule, data: Any, device: torch.device) -> bool:
    """Whether it is known that the model, frozen, gives the same taps for the same examples in every pass.

    User code on the way, as a transfer hook, a module's step or a part of its network, could change them.
    """
    # threads share the rows of a small batch such that rounding depends on the place of a row; so may a GPU
    if device.type != "cpu" or torch.get_num_threads() > 1:
        return False
    is_deterministic = all(type(part).__module__.startswith(KNOWN) for part in model.modules())
    return is_deterministic and all(transfer_hook(name, model, data) is None for name in TRANSFER_HOOKS)


def available_memory(device: torch.device) -> float:
    """Bytes of memory that are available on a device; 0 where that is not known."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    path = Path("/proc/meminfo")
    lines = path.read_text().splitlines() if device.type == "cpu" and path.exists() else []
    kibibytes = [float(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return 1024.0 * kibibytes[0] if kibibytes else 0.0
