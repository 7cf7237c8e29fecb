"""The one loop: broadcast, local training, aggregate, server step, evaluate, log."""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from fl_lightning.callbacks.base import Callback
from fl_lightning.callbacks.progress import ProgressBar
from fl_lightning.callbacks.record import RunRecord
from fl_lightning.checkpoint import load_checkpoint
from fl_lightning.client import Client, count_examples
from fl_lightning.engine import Totals, Worker, configure_optimizer
from fl_lightning.errors import ClientError, UsageError, require
from fl_lightning.logged import tagged
from fl_lightning.method import Method, MethodList
from fl_lightning.report.partition import save_partition
from fl_lightning.sampling import Sampler, UniformSampler, size_of_cohort
from fl_lightning.seeding import ambient, base_seed
from fl_lightning.server import Scope, Server
from fl_lightning.state import State, Sums, Weighted, clone, norm, num_bytes, select
from fl_lightning.taps import resolve_taps


class FederatedTrainer:
    """Trains a LightningModule over the clients of a data module, round by round, on Lightning Fabric.

    Arguments which Lightning's ``Trainer`` has keep their names and meaning.

    Args:
        max_rounds: rounds to train, at least 0.
        local_epochs: passes over its data that a client makes in a round, at least 1.
        local_steps: local steps a client makes in a round, at least 1; takes the place of ``local_epochs``.
        participation: share of the clients in a round, in (0, 1].
        cohort_size: number of clients in a round; takes the place of ``participation``.
        sampler: chooses the cohort; None draws it uniformly.
        server_optimizer: optimizer of the pseudo-gradient; None is SGD with lr 1, which is FedAvg. SGD with momentum is
            FedAvgM.
        server_optimizer_scope: what the server optimizer moves: the ``parameters``, or ``all_float`` entries of the
            state, BatchNorm's statistics among them, as some reference codes do.
        weighting: client weight: its number of training examples, or the same for all.
        buffers: ``average`` them by weight (integer ones: the whole part), let the server ``keep`` its own, or keep
            them ``local`` to each client.
        eval_every_n_rounds: rounds from one evaluation of the global model to the next; the last round is always
            evaluated.
        taps: names for submodules whose outputs methods and callbacks read, beside those the module declares:
            ``{representation: encoder, logits: head}``.
        client_lr_scheduler: scheduler stepped once a round, whose factor multiplies every client's learning rate.
        gradient_clip_val: largest norm of a local gradient; None does not clip.
        accelerator: as in Fabric: auto, cpu, gpu, ...
        devices: 1; several devices are not supported yet.
        precision: as in Fabric: 32-true, bf16-mixed, 16-mixed, ...
        threads_per_worker: threads that torch uses; None leaves its choice.
        channels_last: keep images and weights in the channels_last memory format.
        cache_references: run the frozen reference models of MOON and FedCKA on each example once a visit, not once a
            local epoch; the same bits, for memory: under each model, the compared taps of all examples of a client
            (1 MB an image for ResNet18's first two layers at 32 px). Needs training batches without augmentation.
        callbacks: observers of the run.
        logger: True writes TensorBoard events into the run's folder, False nothing; or loggers of Fabric or Lightning.
        default_root_dir: folder of all runs; None is ``runs``.
        name: folder of this run's versions; None names it after the methods.
        on_client_error: what to do when a client fails: raise, or skip it and warn.
        min_clients: fewest clients of a cohort that must succeed under ``on_client_error=skip``.
        fast_dev_run: True (or a number n) runs 1 (n) rounds of 1 (n) batches and writes nothing.
        enable_progress_bar: show a bar over the rounds on a terminal.

    Raises:
        UsageError: an argument out of its range.
    """

    def __init__(
        self,
        max_rounds: int = 10,
        local_epochs: int = 1,
        local_steps: int | None = None,
        participation: float = 1.0,
        cohort_size: int | None = None,
        sampler: Sampler | None = None,
        server_optimizer: OptimizerCallable | None = None,
        server_optimizer_scope: Scope = "parameters",
        weighting: Literal["examples", "uniform"] = "examples",
        buffers: Literal["average", "keep", "local"] = "average",
        eval_every_n_rounds: int = 1,
        taps: dict[str, str] | None = None,
        client_lr_scheduler: LRSchedulerCallable | None = None,
        gradient_clip_val: float | None = None,
        accelerator: str = "auto",
        devices: int | str = 1,
        precision: str | int | None = None,
        threads_per_worker: int | None = None,
        channels_last: bool = False,
        cache_references: bool = False,
        callbacks: list[Callback] | Callback | None = None,
        logger: Logger | list[Logger] | bool = True,
        default_root_dir: _PATH | None = None,
        name: str | None = None,
        on_client_error: Literal["raise", "skip"] = "raise",
        min_clients: int = 1,
        fast_dev_run: bool | int = False,
        enable_progress_bar: bool = True,
    ) -> None:
        require(max_rounds >= 0, "trainer.max_rounds", max_rounds, "give 0 or more rounds")
        require(local_epochs >= 1, "trainer.local_epochs", local_epochs, "give 1 or more local epochs")
        require(local_steps is None or local_steps >= 1, "trainer.local_steps", local_steps, "give 1 or more, or null")
        require(0 < participation <= 1, "trainer.participation", participation, "give a share in (0, 1]")
        require(cohort_size is None or cohort_size >= 1, "trainer.cohort_size", cohort_size, "give 1 or more, or null")
        require(eval_every_n_rounds >= 1, "trainer.eval_every_n_rounds", eval_every_n_rounds, "give 1 or more")
        require(devices in (1, "1", "auto"), "trainer.devices", devices, "only one device is supported, give 1")
        clips = gradient_clip_val is None or gradient_clip_val > 0
        require(clips, "trainer.gradient_clip_val", gradient_clip_val, "give a norm above 0, or null")
        threads = threads_per_worker is None or threads_per_worker >= 1
        require(threads, "trainer.threads_per_worker", threads_per_worker, "give 1 or more, or null")
        require(min_clients >= 1, "trainer.min_clients", min_clients, "give 1 or more")
        self.limit_batches = int(fast_dev_run) or None
        self.max_rounds = int(fast_dev_run) or max_rounds
        self.local_epochs, self.local_steps = local_epochs, local_steps
        self.participation, self.cohort_size = participation, cohort_size
        self.sampler = sampler or UniformSampler()
        self.server_optimizer, self.client_lr_scheduler = server_optimizer, client_lr_scheduler
        self.server_optimizer_scope = server_optimizer_scope
        self.weighting, self.buffers = weighting, buffers
        self.eval_every_n_rounds = eval_every_n_rounds
        self.taps = taps or {}
        self.gradient_clip_val = gradient_clip_val
        self.channels_last, self.cache_references = channels_last, cache_references
        self.logger = logger if not fast_dev_run else False
        self.default_root_dir = Path(default_root_dir or "runs")
        self.name = name
        self.on_client_error, self.min_clients = on_client_error, min_clients
        self.fast_dev_run = bool(fast_dev_run)
        if threads_per_worker is not None:
            torch.set_num_threads(threads_per_worker)
        own = [ProgressBar()] if enable_progress_bar else []
        self.callbacks: list[Any] = [*as_list(callbacks), RunRecord(), *own]
        self.fabric = self._build_fabric(accelerator, precision)
        self.run_dir: Path | None = None
        self.metrics: dict[str, float] = {}
        self.history: list[dict[str, float]] = []

    def _build_fabric(self, accelerator: str, precision: Any) -> Fabric:
        try:
            return Fabric(accelerator=accelerator, devices=1, precision=precision, callbacks=self.callbacks)
        except (ValueError, RuntimeError, TypeError) as error:
            text = str(error).splitlines()[0]
            raise UsageError(f"trainer.accelerator={accelerator!r}, trainer.precision={precision!r}: {text}") from error

    # ------------------------------------------------------------------ commands
    def fit(
        self, model: LightningModule, datamodule: LightningDataModule, method: list[Method] | Method | None = None
    ) -> None:
        """Train a model over the clients of a data module, and leave the trained global model in ``model``.

        Args:
            model: the model.
            datamodule: the clients' data: a federated data set, or ``Partitioned`` around any LightningDataModule.
            method: the methods of the run; none is FedAvg.

        Raises:
            UsageError: something does not fit together; found before round 0, with nothing written.
            ClientError: a client failed in a round.
        """
        methods = MethodList(as_list(method))
        self._prepare(model, datamodule, methods)
        self._start_run(methods)
        if self.worker.kept:
            some = "all" if not self.worker.sent else f"{len(self.worker.kept)} of {len(self.client.live)}"
            self.warn(
                f"{some} entries of the state stay with each client: metrics are means over the clients' own models"
            )
        status = "failed"
        try:
            methods.on_fit_start(self.server)
            self.fabric.call("on_fit_start", trainer=self)
            for round_ in range(self.max_rounds):
                self._round(round_)
            self.fabric.call("on_fit_end", trainer=self)
            status = "success"
        finally:
            self.fabric.call("teardown", trainer=self)
            for logger in self.loggers:
                logger.finalize(status)
            self.client.load(self.methods.evaluated_state(self.server))
            self.client.release()

    def validate(
        self,
        model: LightningModule,
        datamodule: LightningDataModule,
        ckpt_path: _PATH | None = None,
        method: list[Method] | Method | None = None,
    ) -> dict[str, float]:
        """Evaluate a model on the validation data of a data module, and return its metrics.

        Args:
            model: the model.
            datamodule: the data.
            ckpt_path: checkpoint of a run, whose global model is loaded first.
            method: the methods of the run, so that its config serves here too; they have no part in an evaluation.
        """
        return self._evaluate_once("val", model, datamodule, ckpt_path, as_list(method))

    def test(
        self,
        model: LightningModule,
        datamodule: LightningDataModule,
        ckpt_path: _PATH | None = None,
        method: list[Method] | Method | None = None,
    ) -> dict[str, float]:
        """Evaluate a model on the test data of a data module, and return its metrics.

        Args:
            model: the model.
            datamodule: the data.
            ckpt_path: checkpoint of a run, whose global model is loaded first.
            method: the methods of the run, so that its config serves here too; they have no part in an evaluation.
        """
        return self._evaluate_once("test", model, datamodule, ckpt_path, as_list(method))

    def partition(
        self, model: LightningModule, datamodule: LightningDataModule, method: list[Method] | Method | None = None
    ) -> Path:
        """Deal the data out to the clients and show who holds what; trains nothing, and returns the folder.

        It holds ``plan.npz``, ``clients.csv``, and in ``figures`` the samples of each client and class and the
        distribution of the mean pixel of each client's examples.

        Args:
            model: the model of the config, which has no part in it.
            datamodule: the data.
            method: the methods of the config, which have no part in it.
        """
        check_data(datamodule)
        datamodule.prepare_data()
        datamodule.setup("fit")
        folder = Path(CSVLogger(self.default_root_dir, "partition").log_dir)
        print(save_partition(datamodule, folder))
        return folder

    # ------------------------------------------------------------------ one round
    def _round(self, round_: int) -> None:
        """Broadcast, train the cohort, aggregate, step the server, evaluate, log: one round."""
        self.metrics, started = {"round": round_}, time.perf_counter()
        self.server.round, self.server.cohort = round_, self._cohort(round_)
        self.methods.on_round_start(self.server)
        self.fabric.call("on_round_start", trainer=self)
        with self.timed("train"):
            totals = self._train_cohort(round_)
        with self.timed("server"):
            self._aggregate(totals)
        if self._evaluation_is_due(round_):
            with self.timed("evaluate"):
                self._evaluate_all()
        self.fabric.call("on_round_end", trainer=self)
        self.metrics["time/round"] = time.perf_counter() - started
        self.history.append(self.metrics)
        self._log(round_)

    def _cohort(self, round_: int) -> list[int]:
        number = self.data.num_clients
        size = size_of_cohort(number, self.participation, self.cohort_size)
        return self.sampler(self.seed, round_, number, size)

    def _train_cohort(self, round_: int) -> Totals:
        totals = Totals()
        self.worker.lr_factor = self._lr_factors[round_]
        for k in self.server.cohort:
            try:
                update = self.worker.visit(k, round_, self.server.state)
            except ClientError as error:
                self._failed(error)
                continue
            self.fabric.call("on_client_end", trainer=self, client=self.client)
            totals.add(update)
        return totals

    def _failed(self, error: ClientError) -> None:
        if self.on_client_error == "raise":
            raise error
        self.metrics["clients/failed"] = self.metrics.get("clients/failed", 0) + 1
        self.warn(f"skipped: {error}")
        left = len(self.server.cohort) - int(self.metrics["clients/failed"])
        if left < self.min_clients:
            raise ClientError(f"trainer.min_clients={self.min_clients}, but only {left} clients are left: {error}")

    def _aggregate(self, totals: Totals) -> None:
        """Divide the sums once, and let the methods and the server optimizer move the global state."""
        delta = self.methods.transform_update(self.server, totals.delta.mean(), totals.payload)
        self.server.step(delta, totals.others.mean())
        self.methods.on_round_end(self.server, totals.payload)
        for name, mean in totals.logged.means().items():
            self.metrics[tagged("train", name)] = float(mean)
        self.metrics["drift/client"] = float(totals.drift.mean())
        self.metrics["drift/global"] = float(norm(delta))
        self._count(totals)

    def _count(self, totals: Totals) -> None:
        """Clients and bytes of the round."""
        sent = num_bytes(select(self.server.state, self.worker.sent + self.worker.sent_others))
        payload = sum(v.total.numel() * 4 for v in totals.payload.totals.values())
        self.metrics["clients"] = totals.num_clients
        self.metrics["bytes/down"] = sent * len(self.server.cohort)
        self.metrics["bytes/up"] = (sent + payload) * totals.num_clients

    def _evaluation_is_due(self, round_: int) -> bool:
        wanted = any(callback.wants_evaluation(round_) for callback in self.callbacks if isinstance(callback, Callback))
        return wanted or (round_ + 1) % self.eval_every_n_rounds == 0 or round_ + 1 == self.max_rounds

    def _evaluate_all(self) -> None:
        """Evaluate the global model, or every client's own where entries of the state do not travel."""
        state, own = self.methods.evaluated_state(self.server), self.own_entries()
        for phase in ("val", "test"):
            self.metrics.update(self._evaluate_models(phase, state, own))

    def own_entries(self) -> dict[int, State]:
        """The entries of each client's model that do not travel, of the clients that have trained; empty if all do."""
        clients = sorted(self.client.memories()) if self.worker.kept else []
        return {k: entries for k in clients if (entries := self.client.own_entries(k))}

    def _evaluate_models(
        self, phase: str, state: State, own: dict[int, State], observed: bool = True
    ) -> dict[str, float]:
        """The mean metrics of ``state``, completed by each client's ``own`` entries in turn where there are any."""
        found = Sums()
        for entries in own.values() or [State()]:
            self.client.load({**state, **entries})
            for tag, value in self.evaluate(phase, observed).items():
                found.add(tag, Weighted.of(value))
        return {tag: float(mean) for tag, mean in found.means().items()}

    def _log(self, round_: int) -> None:
        for logger in self.loggers:
            logger.log_metrics(dict(self.metrics), step=round_)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the seconds of a block to this round's ``time/<phase>``."""
        started = time.perf_counter()
        yield
        self.metrics[f"time/{phase}"] = self.metrics.get(f"time/{phase}", 0.0) + time.perf_counter() - started

    # ------------------------------------------------------------------ evaluation
    @torch.no_grad()
    def evaluate(self, phase: str, observed: bool = True) -> dict[str, float]:
        """Evaluate what is loaded in the resident module on the ``val`` or ``test`` data, in eval mode.

        If ``observed``, callbacks see each batch's taps in ``on_evaluation_batch_end``. Returns the metrics by tag,
        none without data.
        """
        loaders = self._loaders(phase)
        module, name = self.client.module, self._step_name(phase)
        if not loaders or name is None:
            return {}
        module.eval()
        self.client.logged.clear()
        stage = "validation" if name == "validation_step" else "test"
        with ambient(self.seed, phase):
            getattr(module, f"on_{stage}_epoch_start")()
            for index, loader in enumerate(loaders):
                self._evaluate_loader(loader, index, name, phase if observed else None)
            getattr(module, f"on_{stage}_epoch_end")()
        if observed:
            self.fabric.call("on_evaluation_end", trainer=self, phase=phase)
        return {tagged(phase, key): float(value) for key, value in self.client.logged.sums().means().items()}

    def _evaluate_loader(self, loader: Iterable, index: int, name: str, phase: str | None) -> None:
        step = getattr(self.client.module, name)
        extra = {"dataloader_idx": index} if is_param_in_hook_signature(step, "dataloader_idx", explicit=True) else {}
        takes_index = is_param_in_hook_signature(step, "batch_idx", min_args=2)
        for batch_idx, batch in enumerate(itertools.islice(loader, self.limit_batches)):
            moved = self.worker.to_device(batch)
            self.client.logged.batch_size = count_examples(moved)
            with self.fabric.autocast():
                step(moved, batch_idx, **extra) if takes_index else step(moved, **extra)
            if phase is not None:
                self.fabric.call("on_evaluation_batch_end", trainer=self, phase=phase, taps=self.client.tapped)

    def _step_name(self, phase: str) -> str | None:
        """The step of the module that evaluates ``phase``: its own, or for test the validation step."""
        names = ("validation_step",) if phase == "val" else ("test_step", "validation_step")
        return next((name for name in names if is_overridden(name, self.client.module)), None)

    def _loaders(self, phase: str) -> list[Iterable]:
        found = self.data.val_dataloader() if phase == "val" else self.data.test_dataloader()
        return list(found) if isinstance(found, (list, tuple)) else [found]

    def _evaluate_once(
        self, phase: str, model: LightningModule, datamodule: Any, ckpt_path: Any, methods: list[Method]
    ) -> dict[str, float]:
        self._prepare(model, datamodule, MethodList(methods))
        require(bool(self._loaders(phase)), "data", type(datamodule).__name__, f"it has no {phase} data")
        own = {} if ckpt_path is None else load_checkpoint(model, ckpt_path)
        try:
            return self._evaluate_models(phase, clone(self.client.live), own, observed=False)
        finally:
            self.client.release()

    # ------------------------------------------------------------------ before round 0
    def _prepare(self, model: LightningModule, datamodule: Any, methods: MethodList) -> None:
        """Check that everything fits and put it together; writes nothing."""
        self.seed, self.methods, self.data = base_seed(), methods, datamodule
        check_module(model)
        check_data(datamodule)
        wanted = methods.wanted_taps()
        for callback in self.callbacks:
            wanted |= {tap: type(callback).__name__ for tap in getattr(callback, "requires", ())}
        paths = resolve_taps(model, self.taps, wanted)
        datamodule.prepare_data()
        datamodule.setup("fit")
        self._check_cohort(datamodule.num_clients)
        check_classes(model, datamodule)
        check_label_counts(methods, datamodule)
        self._check_cache(datamodule)
        self._assemble(model, paths)

    def _check_cohort(self, num_clients: int) -> None:
        fits = self.cohort_size is None or self.cohort_size <= num_clients
        require(fits, "trainer.cohort_size", self.cohort_size, f"there are {num_clients} clients, give at most that")

    def _check_cache(self, datamodule: Any) -> None:
        same = not self.cache_references or getattr(datamodule.train_dataloader(0), "deterministic", False)
        mend = "the training examples are augmented, or not known to be the same in every epoch; set it to false"
        require(same, "trainer.cache_references", self.cache_references, mend)

    def _assemble(self, model: LightningModule, paths: dict[str, str]) -> None:
        self.fabric.launch()
        self.fabric.to_device(model)
        precision = self.fabric.strategy.precision
        precision.convert_module(model)
        if self.channels_last:
            model.to(memory_format=torch.channels_last)
        model.fabric = self.fabric
        self.client = Client(model, self.methods, paths)
        self.client.info = self.data.info(0)
        self.methods.setup(self.client, configure_optimizer(self.client, 1.0)[0])
        number = self.data.num_clients
        examples = sum(self.data.info(k).num_examples for k in range(number))
        how = (self.server_optimizer, number, examples, self.server_optimizer_scope)
        self.server = Server(self.client.live, self.client.trainable, *how)
        options = {name: getattr(self, name) for name in ("weighting", "buffers", "gradient_clip_val", "limit_batches")}
        options |= {"local_epochs": self.local_epochs, "local_steps": self.local_steps}
        options |= {"channels_last": self.channels_last, "cache_references": self.cache_references}
        self.worker = Worker(self.fabric, self.client, self.data, self.seed, **options)
        self._lr_factors = lr_factors(self.client_lr_scheduler, self.max_rounds)
        self.fabric.call("setup", trainer=self)

    def _start_run(self, methods: MethodList) -> None:
        """Make the run's folder and its loggers."""
        self.loggers: list[Logger] = []
        self.history = []
        if self.fast_dev_run:
            return
        name = self.name or "+".join(method.name for method in methods.methods) or "fedavg"
        table = CSVLogger(self.default_root_dir, name, flush_logs_every_n_steps=1)
        self.run_dir = Path(table.log_dir)
        _ = table.experiment  # makes the folder, before anything else is in it
        self.loggers = [table, *self._given_loggers(name, table.version)]

    def _given_loggers(self, name: str, version: int | str) -> list[Logger]:
        if isinstance(self.logger, bool):
            return [TensorBoardLogger(self.default_root_dir, name, version)] if self.logger else []
        return as_list(self.logger)

    # ------------------------------------------------------------------ for callbacks
    @property
    def summary_writers(self) -> list[Any]:
        """TensorBoard's writers among the loggers, for figures and layouts."""
        return [logger.experiment for logger in self.loggers if isinstance(logger, TensorBoardLogger)]

    def log(self, name: str, value: float) -> None:
        """Log a value of this round under ``name``."""
        self.metrics[name] = value

    def warn(self, message: str) -> None:
        """A warning of one line."""
        if self.fabric.is_global_zero:
            print(f"warning: {message}", file=sys.stderr)


def as_list(given: Any) -> list:
    """A list of what may be a list, one thing or None."""
    return list(given) if isinstance(given, (list, tuple)) else [] if given is None else [given]


def check_module(model: LightningModule) -> None:
    """Refuse what the loop cannot drive.

    Raises:
        UsageError: no ``training_step`` or ``configure_optimizers``, or manual optimization.
    """
    kind = type(model).__name__
    for name in ("training_step", "configure_optimizers"):
        require(is_overridden(name, model), "model", kind, f"it has no {name}; define one")
    require(model.automatic_optimization, "model", kind, "manual optimization is not supported, return a loss")


def check_data(datamodule: Any) -> None:
    """Refuse a data module that has no clients.

    Raises:
        UsageError: ``datamodule`` is not federated.
    """
    federated = hasattr(datamodule, "num_clients") and hasattr(datamodule, "info")
    mend = "it has no clients; wrap it: class_path: Partitioned, init_args: {datamodule: ..., num_clients: 10}"
    require(federated, "data", type(datamodule).__name__, mend)


def check_classes(model: LightningModule, datamodule: Any) -> None:
    """Refuse a model with fewer classes than the data has.

    Raises:
        UsageError: both declare ``num_classes``, and the model's is smaller.
    """
    ours, theirs = getattr(model, "num_classes", None), getattr(datamodule, "num_classes", None)
    if isinstance(ours, int) and isinstance(theirs, int):
        require(ours >= theirs, "model.num_classes", ours, f"the data has {theirs} classes, give {theirs}")


def check_label_counts(methods: MethodList, datamodule: Any) -> None:
    """Refuse a method that counts labels where there are none.

    Raises:
        UsageError: the clients' label counts are not known.
    """
    needing = [type(method).__name__ for method in methods.methods if method.needs_label_counts]
    known = not needing or datamodule.info(0).label_counts is not None
    mend = "the clients' label counts are not known; give a training set with integer labels"
    require(known, "method", ", ".join(needing), mend)


def lr_factors(scheduler: LRSchedulerCallable | None, rounds: int) -> list[float]:
    """The factor on the clients' learning rates in each round: what ``scheduler`` makes of a rate of 1."""
    if scheduler is None:
        return [1.0] * rounds
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    stepped: Any = scheduler(optimizer)
    factors = []
    for _ in range(rounds):
        factors.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        stepped.step()
    require(all(math.isfinite(f) for f in factors), "trainer.client_lr_scheduler", factors, "give a finite schedule")
    return factors
