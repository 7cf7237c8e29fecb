"""The checked arguments of a run, which the engine reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_type_hints

from lightning.fabric import Fabric
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable

from fl_lightning.callbacks import BestCheckpoint, Callback, DomainMetrics, EarlyStopping, ProgressBar, RunRecord
from fl_lightning.client.client import Buffers, Weighting
from fl_lightning.client.run_context import RunContext
from fl_lightning.core.clock import Buffered, Clock
from fl_lightning.core.sampling import Sampler, UniformSampler, size_of_cohort
from fl_lightning.core.server import Scope
from fl_lightning.core.systems import SystemsHeterogeneity
from fl_lightning.distributed.launcher import build_fabric
from fl_lightning.engine.argument_checks import as_list, check_arguments, check_device, check_observers
from fl_lightning.storage.hyperparameters import only_plain
from fl_lightning.utilities.lightning_compat import Logger
from fl_lightning.utilities.lightning_replacements import names_replacements


class RunArguments(RunContext):
    """The part of a trainer without commands: keeps its arguments, which ``FederatedTrainer`` explains.

    Raises:
        UsageError: an argument out of its range.
    """

    @names_replacements
    def __init__(
        self,
        max_rounds: int = 10,
        max_seconds: float | None = None,
        local_epochs: int = 1,
        local_steps: int | None = None,
        participation: float = 1.0,
        cohort_size: int | None = None,
        sampler: Sampler | None = None,
        server_optimizer: OptimizerCallable | None = None,
        server_optimizer_scope: Scope = "parameters",
        weighting: Weighting = "examples",
        buffers: Buffers = "average",
        eval_every_n_rounds: int = 1,
        eval_every_seconds: float | None = None,
        taps: dict[str, str] | None = None,
        client_lr_scheduler: LRSchedulerCallable | None = None,
        client_schedulers: Literal["continue", "restart"] = "continue",
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: Literal["norm", "value"] | None = None,
        accumulate_grad_batches: int = 1,
        clients_per_step: int | Literal["auto"] = "auto",
        accelerator: str = "auto",
        devices: int | str | list[int] = 1,
        workers_per_device: int = 1,
        strategy: str = "auto",
        num_nodes: int = 1,
        precision: str | int | None = None,
        threads_per_worker: int | None = 1,
        deterministic: bool | Literal["warn"] | None = None,
        timeout: float | None = None,
        client_memory: float = 4.0,
        checkpoint_every_n_rounds: int = 1,
        channels_last: bool | None = None,
        cache_references: bool | Literal["auto"] = "auto",
        compile: bool | str = False,
        callbacks: list[Callback] | Callback | None = None,
        logger: Logger | list[Logger] | bool = True,
        default_root_dir: str | Path | None = None,
        name: str | None = None,
        on_client_error: Literal["raise", "skip"] = "raise",
        min_clients: int = 1,
        systems: SystemsHeterogeneity | None = None,
        clock: Clock | None = None,
        asynchronous: Buffered | None = None,
        fast_dev_run: bool | int = False,
        enable_progress_bar: bool = True,
    ) -> None:
        devices = "auto" if str(devices) == "-1" else devices
        check_arguments(locals(), get_type_hints(RunArguments.__init__))
        self.arguments: dict[str, Any] = only_plain(locals())
        self.config: dict[str, Any] | None = None
        self.weights: Path | None = None
        self.max_rounds, self.max_seconds = int(fast_dev_run) or max_rounds, max_seconds
        self.limit_batches = int(fast_dev_run) or None
        self.fast_dev_run = bool(fast_dev_run)
        self.local_epochs, self.local_steps = local_epochs, local_steps
        self.participation, self.cohort_size = participation, cohort_size
        self.sampler = sampler or UniformSampler()
        self.server_optimizer, self.server_optimizer_scope = server_optimizer, server_optimizer_scope
        self.client_lr_scheduler, self.client_schedulers = client_lr_scheduler, client_schedulers
        self.gradient_clip_val, self.gradient_clip_algorithm = gradient_clip_val, gradient_clip_algorithm
        self.accumulate_grad_batches, self.clients_per_step = accumulate_grad_batches, clients_per_step
        self.weighting, self.buffers, self.taps = weighting, buffers, taps or {}
        self.eval_every_n_rounds, self.eval_every_seconds = eval_every_n_rounds, eval_every_seconds
        self.checkpoint_every_n_rounds = checkpoint_every_n_rounds
        self.accelerator, self.devices, self.num_nodes, self.precision = accelerator, devices, num_nodes, precision
        self.workers_per_device, self.threads_per_worker = workers_per_device, threads_per_worker
        self.timeout, self.client_memory, self.cache_references = timeout, client_memory, cache_references
        self.channels_last, self.compile = channels_last, compile
        self.logger = logger if not fast_dev_run else False
        self.default_root_dir, self.name = Path(default_root_dir or "runs"), name
        self.on_client_error, self.min_clients = on_client_error, min_clients
        self.systems, self.clock, self.asynchronous = systems, clock, asynchronous
        progress = [ProgressBar()] if enable_progress_bar else []
        # these come last, so that they can monitor values that the others log
        observers = sorted(as_list(callbacks), key=lambda part: isinstance(part, (BestCheckpoint, EarlyStopping)))
        check_observers(observers, logger)
        if not any(isinstance(part, DomainMetrics) for part in observers):
            observers.append(DomainMetrics())
        self.callbacks: list[Callback] = [*observers, RunRecord(), *progress]
        super().__init__()
        self.fabric: Fabric = build_fabric(self)
        check_device(self.fabric.device, precision, devices, workers_per_device)
        by_default = True if self.fabric.device.type == "cuda" else None
        self.deterministic = by_default if deterministic is None else deterministic

    def nominal_cohort(self, num_clients: int) -> int:
        """Return the number of clients in a round of this many clients, as far as the arguments say."""
        if self.asynchronous is not None:
            return self.asynchronous.size
        return size_of_cohort(num_clients, self.participation, self.cohort_size)

    def __getstate__(self) -> dict[str, Any]:
        """A pickled trainer has its arguments, and no run, whose workers and files belong to this process."""
        return {**vars(self), "_run": None, "_fitted": None, "fabric": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.fabric = build_fabric(self)
