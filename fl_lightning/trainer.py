"""The one loop: broadcast, local training, aggregate, server step, evaluate, log."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable

from fl_lightning.callbacks.base import Callback
from fl_lightning.callbacks.progress import ProgressBar
from fl_lightning.callbacks.record import RunRecord
from fl_lightning.checkpoint import find_checkpoint, in_place, load_callbacks, load_checkpoint, load_run, save_run
from fl_lightning.checks import (
    as_list,
    check_classes,
    check_compile,
    check_cores,
    check_data,
    check_devices,
    check_label_counts,
    check_module,
    check_precision,
    cores,
    lr_factors,
)
from fl_lightning.client import Client
from fl_lightning.compiled import replace_forward
from fl_lightning.engine import Failures, Stopwatch, Team, place
from fl_lightning.errors import ClientError, UsageError, require
from fl_lightning.evaluation import Evaluator
from fl_lightning.launch import ClientStrategy, keep_freed_memory, threads, world_of_cluster
from fl_lightning.logged import tagged
from fl_lightning.memory import Memories
from fl_lightning.method import Method, MethodList
from fl_lightning.report.partition import save_partition
from fl_lightning.sampling import Sampler, UniformSampler, size_of_cohort
from fl_lightning.seeding import base_seed
from fl_lightning.server import Scope, Server
from fl_lightning.state import State, Sums, Weighted, clone, norm, num_bytes, select
from fl_lightning.taps import resolve_taps
from fl_lightning.worker import Totals, Worker, configure_optimizer

Found = TypeVar("Found")


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
        devices: as in Fabric: how many, or which. On a CPU this is the number of workers, processes that train clients
            side by side; ``auto`` takes one for each core, and no more than there are clients in a round. The result is
            the same, bit for bit, for any number of workers of equal ``threads_per_worker``. Under torchrun and SLURM
            their number of processes counts.
        workers_per_device: workers that share a GPU; on a CPU, workers are counted by ``devices``.
        strategy: auto; a strategy that wraps the model would average the gradients of different clients.
        num_nodes: machines that a cluster environment starts this program on.
        precision: as in Fabric: 32-true, bf16-mixed, 16-mixed, ...
        threads_per_worker: threads of each worker, at least 1; None is 1 where there are several workers, else torch's
            choice. With more than 1 thread, several workers run the program anew instead of being forked.
        client_memory: GiB of main memory in which each worker keeps what methods remember of clients; what is beyond it
            lies in the folder of temporary files.
        channels_last: keep images and weights in the channels_last memory format, in which convolutions are faster;
            None does what the module's attribute ``channels_last`` says, false where it has none. ImageClassifier says
            so for an encoder with convolutions.
        checkpoint_every_n_rounds: rounds from one checkpoint to the next; the last round always has one.
        cache_references: run the frozen reference models of MOON and FedCKA on each example once a visit, not once a
            local epoch; the same bits, for memory: under each model, the compared taps of all examples of a client
            (1 MB an image for ResNet18's first two layers at 32 px). Needs training batches without augmentation.
        compile: run the module's ``forward`` through ``torch.compile`` in training: True, or one of its modes, such as
            ``reduce-overhead``, which takes CUDA graphs on a GPU. Batches smaller than the usual one run as they are.
            Where it cannot be compiled a warning says so and it runs as it is. Rounding differs from the module's own.
        callbacks: observers of the run.
        logger: True writes TensorBoard events into the run's folder, False nothing; or loggers of Fabric or Lightning.
        default_root_dir: folder of all runs; None is ``runs``.
        name: folder of this run's versions; None names it after the methods.
        on_client_error: what to do when a client fails: raise, or skip it and warn.
        min_clients: fewest clients of a cohort that must succeed under ``on_client_error=skip``.
        fast_dev_run: True (or a number n) runs 1 (n) rounds of 1 (n) batches and writes nothing.
        enable_progress_bar: show a bar over the rounds on a terminal.

    Attributes:
        run_dir: folder of the run, None in workers other than the first and where nothing is written.
        metrics: of the present round by tag.
        history: the metrics of all rounds.
        resumed: whether the run goes on from a checkpoint.
        holders: worker that holds the memory of a client, of the clients that remember something.
        client_files: file of a client's memory in the last checkpoint, of the clients that remember something.

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
        devices: int | str | list[int] = 1,
        workers_per_device: int = 1,
        strategy: str = "auto",
        num_nodes: int = 1,
        precision: str | int | None = None,
        threads_per_worker: int | None = None,
        client_memory: float = 4.0,
        checkpoint_every_n_rounds: int = 1,
        channels_last: bool | None = None,
        cache_references: bool = False,
        compile: bool | str = False,
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
        every = checkpoint_every_n_rounds
        require(every >= 1, "trainer.checkpoint_every_n_rounds", every, "give 1 or more")
        check_devices(devices, workers_per_device, num_nodes)
        wraps = "it wraps the model, which would average the gradients of different clients; give auto"
        require(strategy == "auto", "trainer.strategy", strategy, wraps)
        check_compile(compile)
        require(client_memory >= 0, "trainer.client_memory", client_memory, "give 0 or more GiB")
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
        self.channels_last, self.cache_references, self.compile = channels_last, cache_references, compile
        self.logger = logger if not fast_dev_run else False
        self.default_root_dir = Path(default_root_dir or "runs")
        self.name = name
        self.on_client_error, self.min_clients = on_client_error, min_clients
        self.fast_dev_run = bool(fast_dev_run)
        self.accelerator, self.devices, self.num_nodes, self.precision = accelerator, devices, num_nodes, precision
        self.workers_per_device, self.threads_per_worker = workers_per_device, threads_per_worker
        self.client_memory, self.checkpoint_every_n_rounds = client_memory, checkpoint_every_n_rounds
        own = [ProgressBar()] if enable_progress_bar else []
        self.callbacks: list[Any] = [*as_list(callbacks), RunRecord(), *own]
        self.fabric = self._build_fabric(1)
        check_precision(precision, self.fabric.device)
        check_cores(devices, self.fabric.device)
        self.run_dir: Path | None = None
        self.metrics: dict[str, float] = {}
        self.history: list[dict[str, float]] = []
        self.resumed = False
        self.holders: dict[int, int] = {}
        self.client_files: dict[int, str] = {}
        self._batches: dict[int, int] = {}

    def _build_fabric(self, devices: int | str | list[int], num_nodes: int = 1) -> Fabric:
        how: dict[str, Any] = {"accelerator": self.accelerator, "precision": self.precision, "devices": devices}
        try:
            fabric = Fabric(**how, callbacks=self.callbacks)
            if fabric.world_size * num_nodes * self.workers_per_device == 1:
                return fabric
            strategy = ClientStrategy(self.workers_per_device, self._forks)
            return Fabric(**how, num_nodes=num_nodes, strategy=strategy, callbacks=self.callbacks)
        except (ValueError, RuntimeError, TypeError, MisconfigurationException) as error:
            text = " ".join(str(error).split())
            raise UsageError(
                ", ".join(f"trainer.{name}={value!r}" for name, value in how.items()) + f": {text}"
            ) from error

    # ------------------------------------------------------------------ commands
    def fit(
        self,
        model: LightningModule,
        datamodule: LightningDataModule,
        method: list[Method] | Method | None = None,
        ckpt_path: _PATH | None = None,
    ) -> None:
        """Train a model over the clients of a data module, and leave the trained global model in ``model``.

        Args:
            model: the model.
            datamodule: the clients' data: a federated data set, or ``Partitioned`` around any LightningDataModule.
            method: the methods of the run; none is FedAvg.
            ckpt_path: checkpoint to go on from, in its own folder and to the same bits: a path, or ``last`` for that of
                the newest version of this run. torchrun's restarts go on from the last one by themselves.

        Raises:
            UsageError: something does not fit together; found before round 0, with nothing written.
            ClientError: a client failed in a round.
        """
        methods = MethodList(as_list(method))
        self._launch(partial(self._fit, methods, ckpt_path), model, datamodule, methods)

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
        command = partial(self._evaluate_once, "val", model, ckpt_path)
        return self._launch(command, model, datamodule, MethodList(as_list(method)))

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
        command = partial(self._evaluate_once, "test", model, ckpt_path)
        return self._launch(command, model, datamodule, MethodList(as_list(method)))

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
        self.team.begin(round_)
        self.methods.on_round_start(self.server)
        self.fabric.call("on_round_start", trainer=self)
        with self.timed("train"):
            totals = self._train_cohort(round_)
        with self.timed("server"):
            self._aggregate(totals)
        if self._evaluation_is_due(round_):
            with self.timed("evaluate"):
                self._evaluate_all()
        with self.timed("log"):
            self.fabric.call("on_round_end", trainer=self)
        self.metrics["time/log"] += self._writing
        self.metrics["time/round"] = time.perf_counter() - started
        self.history.append(self.metrics)
        self._log(round_)

    def _cohort(self, round_: int) -> list[int]:
        number = self.data.num_clients
        size = size_of_cohort(number, self.participation, self.cohort_size)
        return self.sampler(self.seed, round_, number, size)

    def _train_cohort(self, round_: int) -> Totals:
        """Train the clients that are placed here, and add up what all workers' clients send."""
        totals, failures = Totals(self.fabric.device), Failures()
        self.worker.clock = Stopwatch()
        self.worker.lr_factor = self._lr_factors[round_]
        for k in self._placed():
            self.team.check()
            try:
                totals.add(self.worker.visit(k, round_, self.server.state))
            except (ClientError, UsageError) as error:
                failures.add(k, error)
                if self.on_client_error == "raise":
                    break
                continue
            self.fabric.call("on_client_end", trainer=self, client=self.client)
        self._join(failures)
        self.team.add_up(totals.sums)
        self.worker.clock.lap("wait")
        self.metrics |= {f"time/{phase}": seconds for phase, seconds in self._mean_seconds().items()}
        return totals

    def _placed(self) -> list[int]:
        """The clients of this worker, whose memories follow them."""
        placed = place({k: self._steps(k) for k in self.server.cohort}, self.team.size, self.holders)
        there = {k: worker for worker, clients in enumerate(placed) for k in clients}
        moves = [
            (k, self.holders[k], there[k]) for k in self.server.cohort if self.holders.get(k, there[k]) != there[k]
        ]
        self.team.move(self.client.memories(), moves)
        for worker, clients in enumerate(placed if self.team.size > 1 else ()):
            self.metrics[f"placed/{worker}/clients"] = len(clients)
            self.metrics[f"placed/{worker}/steps"] = sum(map(self._steps, clients))
        self.worker.clock.lap("place")
        return sorted(placed[self.team.rank])

    def _steps(self, k: int) -> int:
        """Expected local steps of client ``k``."""
        if self.local_steps is not None:
            return self.local_steps
        if k not in self._batches:
            self._batches[k] = len(self.data.train_dataloader(k))
        return self._batches[k] * self.local_epochs

    def _join(self, failures: Failures) -> None:
        """Tell the other workers what happened here, and take in what happened there."""
        # clients without memory have no holder: a run in which none remembers anything moves nothing
        held = dict.fromkeys(self.client.memories().keys() & set(self.server.cohort), self.team.rank)
        for theirs, metrics, holders in self.team.gather((failures.found, self.metrics, held)):
            failures.take(theirs)
            self.metrics = metrics | self.metrics
            self.holders |= holders
        if not failures.found:
            return
        if self.on_client_error == "raise":
            failures.throw()
        for text in failures.texts():
            self.warn(f"skipped: {text}")
        self.metrics["clients/failed"] = len(failures.found)
        left = len(self.server.cohort) - len(failures.found)
        if left < self.min_clients:
            few = f"trainer.min_clients={self.min_clients}, but only {left} clients are left: {failures.texts()[-1]}"
            raise ClientError(few)

    def _mean_seconds(self) -> dict[str, float]:
        """Seconds of the phases of the visits, as means over the workers."""
        workers = self.team.gather(dict(self.worker.clock.seconds))
        return {phase: sum(w.get(phase, 0.0) for w in workers) / len(workers) for phase in PHASES}

    def _aggregate(self, totals: Totals) -> None:
        """Divide the sums once, and let the methods and the server optimizer move the global state."""
        delta = self.methods.transform_update(self.server, totals.means("delta"), totals.payload)
        self.server.step(delta, totals.means("others"))
        self.methods.on_round_end(self.server, totals.payload)
        for name, mean in totals.means("logged").items():
            self.metrics[tagged("train", name)] = float(mean)
        self.metrics["drift/client"] = totals.drift
        self.metrics["drift/global"] = float(norm(delta))
        self._count(totals)

    def _count(self, totals: Totals) -> None:
        """Clients and bytes of the round."""
        sent = num_bytes(select(self.server.state, self.worker.sent + self.worker.sent_others))
        payload = sum(v.total.numel() * 4 for v in totals.payload.values())
        self.metrics["clients"] = totals.num_clients
        self.metrics["bytes/down"] = sent * len(self.server.cohort)
        self.metrics["bytes/up"] = (sent + payload) * totals.num_clients

    def _evaluation_is_due(self, round_: int) -> bool:
        wanted = any(callback.wants_evaluation(round_) for callback in self.callbacks if isinstance(callback, Callback))
        return wanted or (round_ + 1) % self.eval_every_n_rounds == 0 or round_ + 1 == self.max_rounds

    def _evaluate_all(self) -> None:
        """Evaluate the global model, or every client's own where entries of the state do not travel."""
        state = self.methods.evaluated_state(self.server)
        for phase in ("val", "test"):
            # one client's at a time: those on disk need not be in memory together
            own = filter(None, map(self.client.own_entries, self.client.memories())) if self.own_models else None
            self.metrics.update(self._evaluate_models(phase, state, own))

    @property
    def own_models(self) -> bool:
        """Whether each client that has trained has a model of its own, which is what is evaluated."""
        return bool(self.worker.kept and self.holders)

    def _evaluate_models(
        self, phase: str, state: State, own: Iterable[State] | None, observed: bool = True
    ) -> dict[str, float]:
        """The metrics of ``state``; or the means over the clients, who each complete it by their ``own`` entries."""
        if own is None:
            self.client.load(state)
            return self.evaluate(phase, observed)
        found = Sums()
        for entries in own:
            self.client.load({**state, **entries})
            found.add({tag: Weighted.of(value) for tag, value in self.evaluate(phase, observed, shared=False).items()})
        self.team.add_up(found)
        return {tag: float(mean) for tag, mean in found.means().items()}

    def evaluate(self, phase: str, observed: bool = True, shared: bool = True) -> dict[str, float]:
        """Evaluate what is loaded in the resident module on the ``val`` or ``test`` data, in eval mode.

        If ``observed``, callbacks see each batch's taps in ``on_evaluation_batch_end``. The batches are dealt out over
        the workers, which then all call this; unless ``shared``, this worker evaluates them all. Returns the metrics by
        tag, none without data.
        """
        return self.evaluator.evaluate(phase, observed, shared)

    def _log(self, round_: int) -> None:
        began = time.perf_counter()
        for logger in self.loggers:
            logger.log_metrics(dict(self.metrics), step=round_)
        self._writing = time.perf_counter() - began

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the seconds of a block to this round's ``time/<phase>``."""
        started = time.perf_counter()
        yield
        self.metrics[f"time/{phase}"] = self.metrics.get(f"time/{phase}", 0.0) + time.perf_counter() - started

    # ------------------------------------------------------------------ before round 0
    def _launch(
        self, command: Callable[[], Found], model: LightningModule, datamodule: Any, methods: MethodList
    ) -> Found:
        """Check what can be checked, start the workers, put everything together, and run a command in each."""
        self.seed, self.methods, self.data = base_seed(), methods, datamodule
        check_module(model)
        check_data(datamodule)
        paths = resolve_taps(model, self.taps, self._wanted_taps())
        loaded = self._forks
        if loaded:
            # before the others are forked, so that they share it
            self._load_data()
        devices, num_nodes = self._workers()
        self.fabric = self._build_fabric(devices, num_nodes)
        with threads(self.threads_per_worker or (1 if self.fabric.world_size > 1 else None)):
            return self.fabric.launch(partial(self._work, command, model, paths, loaded))

    @property
    def _forks(self) -> bool:
        """Whether workers are forked: a forked process has one thread, and cannot use a GPU its parent has used."""
        alone = world_of_cluster() is None and "LOCAL_RANK" not in os.environ
        return alone and self.threads_per_worker in (None, 1) and not torch.cuda.is_initialized()

    def _workers(self) -> tuple[int | str | list[int], int]:
        """Devices and number of nodes."""
        world = world_of_cluster()
        if world is not None:
            return world
        if self.devices != "auto" or self.fabric.device.type != "cpu":
            return self.devices, self.num_nodes
        chosen = max(1, cores() // (self.threads_per_worker or 1))
        if self._forks:
            chosen = min(chosen, size_of_cohort(self.data.num_clients, self.participation, self.cohort_size))
        print(f"trainer.devices=auto: {chosen} workers on {cores()} cores", file=sys.stderr)
        return chosen, self.num_nodes

    def _load_data(self) -> None:
        # the first worker of each machine fetches the data, and the others wait
        if self.fabric.local_rank == 0:
            self.data.prepare_data()
        self.fabric.barrier()
        self.data.setup("fit")

    def _work(
        self, command: Callable[[], Found], model: LightningModule, paths: dict[str, str], loaded: bool, fabric: Fabric
    ) -> Found:
        """What each worker does."""
        self.team = Team(fabric)
        keep_freed_memory()
        if not loaded:
            self._load_data()
        self._check_cohort(self.data.num_clients)
        check_classes(model, self.data)
        check_label_counts(self.methods, self.data)
        self._check_cache(self.data)
        self._assemble(model, paths)
        try:
            return command()
        finally:
            self.client.memories().close()
            self.client.release()

    def _wanted_taps(self) -> dict[str, str]:
        wanted = self.methods.wanted_taps()
        for callback in self.callbacks:
            wanted |= {tap: type(callback).__name__ for tap in getattr(callback, "requires", ())}
        return wanted

    def _check_cohort(self, num_clients: int) -> None:
        fits = self.cohort_size is None or self.cohort_size <= num_clients
        require(fits, "trainer.cohort_size", self.cohort_size, f"there are {num_clients} clients, give at most that")

    def _check_cache(self, datamodule: Any) -> None:
        same = not self.cache_references or getattr(datamodule.train_dataloader(0), "deterministic", False)
        mend = "the training examples are augmented, or not known to be the same in every epoch; set it to false"
        require(same, "trainer.cache_references", self.cache_references, mend)

    def _assemble(self, model: LightningModule, paths: dict[str, str]) -> None:
        self.fabric.to_device(model)
        precision = self.fabric.strategy.precision
        precision.convert_module(model)
        last = bool(getattr(model, "channels_last", False) if self.channels_last is None else self.channels_last)
        if last:
            model.to(memory_format=torch.channels_last)
        model.fabric = self.fabric
        if self.compile:
            replace_forward(model, self.compile, self.warn)
        self.client = Client(
            model, self.methods, paths, Memories(self.client_memory * 2**30, self.fabric.device), self.seed
        )
        self.client.info = self.data.info(0)
        self.methods.setup(self.client, configure_optimizer(self.client)[0])
        number = self.data.num_clients
        examples = sum(self.data.info(k).num_examples for k in range(number))
        how = (self.server_optimizer, number, examples, self.server_optimizer_scope, self.seed)
        self.server = Server(self.client.live, self.client.trainable, *how)
        options = {name: getattr(self, name) for name in ("weighting", "buffers", "gradient_clip_val", "limit_batches")}
        options |= {"local_epochs": self.local_epochs, "local_steps": self.local_steps}
        options |= {"channels_last": last, "cache_references": self.cache_references}
        self.worker = Worker(self.fabric, self.client, self.data, self.seed, self.team, **options)
        self.evaluator = Evaluator(self.worker, self.team, partial(self.fabric.call, trainer=self))
        self._lr_factors = lr_factors(self.client_lr_scheduler, self.max_rounds)
        self.holders, self._batches = {}, {}
        self.fabric.call("setup", trainer=self)

    def _fit(self, methods: MethodList, ckpt_path: _PATH | None) -> None:
        name = self.name or "+".join(method.name for method in methods.methods) or "fedavg"
        path = self.team.gather(find_checkpoint(ckpt_path, self.default_root_dir / name))[0]
        methods.on_fit_start(self.server)
        self.history, self.client_files = [], {}
        self._writing, self.resumed = 0.0, path is not None
        found = load_run(self, path) if path is not None else {"round": 0}
        self._start_run(name, path, found["round"])
        if self.worker.kept:
            some = "all" if not self.worker.sent else f"{len(self.worker.kept)} of {len(self.client.live)}"
            self.warn(
                f"{some} entries of the state stay with each client: metrics are means over the clients' own models"
            )
        status = "failed"
        try:
            self.fabric.call("on_fit_start", trainer=self)
            load_callbacks(self.callbacks, found)
            for round_ in range(found["round"], self.max_rounds):
                self._round(round_)
                self._save(round_)
            self.fabric.call("on_fit_end", trainer=self)
            status = "success"
        finally:
            self.fabric.call("teardown", trainer=self)
            for logger in self.loggers:
                logger.finalize(status)
            self.client.load(self.methods.evaluated_state(self.server))

    def _save(self, round_: int) -> None:
        """Write the checkpoint that is due after a round."""
        due = (round_ + 1) % self.checkpoint_every_n_rounds == 0 or round_ + 1 == self.max_rounds
        if due and self._checkpoints is not None:
            began = time.perf_counter()
            save_run(self, self._checkpoints)
            self._writing += time.perf_counter() - began

    def _evaluate_once(self, phase: str, model: LightningModule, ckpt_path: Any) -> dict[str, float]:
        require(bool(self.evaluator.loaders(phase)), "data", type(self.data).__name__, f"it has no {phase} data")
        own = {} if ckpt_path is None else load_checkpoint(model, ckpt_path)
        mine = [own[k] for k in sorted(own)[self.team.rank :: self.team.size]]
        return self._evaluate_models(phase, clone(self.client.live), mine if own else None, observed=False)

    def _start_run(self, name: str, path: Path | None, done: int) -> None:
        """Make the run's folder and its loggers; or take up those of the run of a checkpoint after ``done`` rounds."""
        self.loggers: list[Logger] = []
        self.run_dir = None
        if not self.fast_dev_run and self.fabric.is_global_zero:
            table = self._table(name, path)
            self.run_dir = Path(table.log_dir)
            self.loggers = [table, *self._given_loggers(self.run_dir, done)]
        folder = self.team.gather(self.run_dir)[0]
        self._checkpoints = None if folder is None else folder / "checkpoints"

    def _table(self, name: str, path: Path | None) -> CSVLogger:
        if path is None or not in_place(path):
            table = CSVLogger(self.default_root_dir, name, flush_logs_every_n_steps=1)
            _ = table.experiment  # makes the folder, before anything else is in it
            return table
        folder = path.parents[1]
        table = CSVLogger(folder.parents[1], folder.parent.name, folder.name, flush_logs_every_n_steps=1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it begins a new file in a folder that is not empty
            for metrics in self.history:
                table.log_metrics(dict(metrics), step=int(metrics["round"]))
        return table

    def _given_loggers(self, folder: Path, done: int) -> list[Logger]:
        if isinstance(self.logger, bool):
            where = (folder.parents[1], folder.parent.name, folder.name)
            return [TensorBoardLogger(*where, purge_step=done or None)] if self.logger else []
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


# of the visits, beside what the trainer times itself
PHASES = ("place", "load", "data", "forward_backward", "correct", "step", "collect", "wait")
