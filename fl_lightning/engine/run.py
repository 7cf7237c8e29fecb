"""A run: all its parts, as one worker has them, and how it trains clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from inspect import Parameter, signature
from typing import Any, Protocol

from lightning.fabric import Fabric
from torch import Tensor

from fl_lightning.callbacks.base import Callback
from fl_lightning.client import Client
from fl_lightning.client.worker_module import WorkerModule
from fl_lightning.core.method import MethodList
from fl_lightning.core.server import Server
from fl_lightning.core.state import State
from fl_lightning.core.systems import SystemOutcome
from fl_lightning.core.update import CohortMeans, Update, UpdateRows
from fl_lightning.data.datamodule import FederatedDataModule
from fl_lightning.distributed.workers import Workers
from fl_lightning.engine.evaluation.evaluator import Evaluator, Representations
from fl_lightning.engine.recalibration import Recalibration
from fl_lightning.engine.run_arguments import RunArguments
from fl_lightning.engine.versions import Versions
from fl_lightning.storage.metrics import Metrics
from fl_lightning.storage.run_folder import RunFolder
from fl_lightning.training.device_loaders import Loaders
from fl_lightning.training.local_training import LocalTraining, Stopwatch
from fl_lightning.training.patching import patched
from fl_lightning.utilities.errors import ClientError, LostWorkerError, UsageError, add_note, check_all


class ClientBackend(Protocol):
    """Trains and evaluates a run's clients: on the workers of this program, or at real sites."""

    def present(self, run: Run, round_: int) -> Sequence[int]:
        """The clients that are present in a round, in ascending order, from which its cohort is drawn."""

    def train(self, run: Run, round_: int, simulated: dict[int, SystemOutcome]) -> tuple[CohortMeans, list[int]]:
        """Train a cohort; returns the means of its updates, and the clients whose updates are in them, ascending."""

    def evaluate(self, run: Run) -> None:
        """Evaluate the global model, or the clients' own models where entries of the state do not travel."""


# a client, and its update or the reason why it has none; or the updates of several
VisitResult = tuple[int, Update | Exception] | UpdateRows
# epochs, or steps where the run counts them, of each client; None is a whole visit
Work = Mapping[int, int | None]
# the clients that train together on a worker
Part = tuple[int, ...]


class VisitRunner:
    """Trains clients on a worker, and evaluates their own models, one after another; subclasses have other ways.

    A part of a cohort is a tuple of clients that one worker trains; here each client is one.

    Args:
        reason: why the clients train in this way.
    """

    def __init__(self, reason: str = "trainer.clients_per_step is 1") -> None:
        self.reason = reason

    def prepare(self, run: Run) -> None:
        """Choose how to train, once the methods have their server values, before round 0; all workers call this."""

    def settings(self) -> dict[str, Any]:
        """Return the arguments of the trainer on which the bits of a result depend, with their effective values."""
        return {"clients_per_step": 1, "clients_per_step=auto": False}

    def divide(self, run: Run, steps: Mapping[int, int]) -> dict[Part, float]:
        """Divide a cohort by the local ``steps`` of each client; return each part's cost in steps of one client."""
        return {(k,): number for k, number in steps.items()}

    def run(self, run: Run, part: Part, round_: int, work: Work, observed: bool) -> Iterator[VisitResult]:
        """Train the clients of a part from the server's state, and give the result of each.

        Until the next result is asked for, the module holds the client. Then its memory loses what is not committed.
        Where the clients are ``observed``, each result is of one client.
        """
        for k in part:
            try:
                with run.versions.receiving(k) as received:
                    yield k, update_or_failure(partial(run.local_training.visit, k, round_, received, work[k]))
            finally:
                run.client.memories().drop(k)

    def beside(self, k: int) -> dict[int, dict]:
        """Return the memories, before the present part, of the clients on which the bits of client ``k`` depend."""
        return {}

    def repeat(self, run: Run, k: int, round_: int, steps: Mapping[int, int], work: Work) -> None:
        """Repeat the visit of a client of the cohort with these ``steps``; its failure is raised at once."""
        step = run.client.training_step

        def checked(*args: Any) -> Tensor | None:
            # a run checks at the end of the visit instead, since each check waits for the device
            loss = step(*args)
            run.client.lifecycle.check_terms()
            return loss

        with patched(run.client, training_step=checked), run.versions.receiving(k) as received:
            run.local_training.visit(k, round_, received, work[k])

    def place_models(self, run: Run) -> list[list[int]]:
        """Return the clients with a memory whose models this worker evaluates, by part; all workers call this."""
        return [[k] for k in run.client.memories()]

    def evaluate_models(
        self, run: Run, phase: str, state: State, parts: Sequence[Sequence[int]], observed: bool = True
    ) -> Iterator[dict[str, float]]:
        """Give the metrics of each client's own model by tag."""
        for part in parts:  # those on disk need not fit into memory together
            for k in part:
                entries = run.client.lifecycle.personal_entries(run.data.info(k), state)
                yield run.evaluator.evaluate(phase, {**state, **entries}, observed, k)


def update_or_failure(visit: Callable[[], Update]) -> Update | Exception:
    """Return the update of a visit, or the failure of its client."""
    try:
        return visit()
    except LostWorkerError:
        raise
    except (ClientError, UsageError) as error:
        return error


@cache
def arguments_taken(function: Callable[..., Any]) -> set[str] | None:
    """Return the names of the arguments of a function; None if it takes any."""
    parameters = signature(function).parameters
    takes_any = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values())
    return None if takes_any else {*parameters}


@dataclass(frozen=True, kw_only=True)
class Run:
    """The parts of a run, as one worker has them: ``client`` is the module in which all its clients train."""

    trainer: RunArguments
    backend: ClientBackend
    runner: VisitRunner
    seed: int
    fabric: Fabric
    workers: Workers
    data: FederatedDataModule
    methods: MethodList
    client: Client
    server: Server
    versions: Versions
    loaders: Loaders
    local_training: LocalTraining
    evaluator: Evaluator
    representations: Representations
    recalibration: Recalibration
    metrics: Metrics
    stopwatch: Stopwatch
    folder: RunFolder
    # as plain values, before round 0
    description: dict[str, Any] = field(default_factory=dict)

    @property
    def worker_module(self) -> WorkerModule:
        """The user's module in this process."""
        return self.client.worker_module

    @property
    def callbacks(self) -> list[Callback]:
        """The observers of the run."""
        return self.trainer.callbacks

    def call(self, hook: str, **arguments: Any) -> None:
        """Call a hook of all callbacks, each with the arguments that it takes."""
        if hook == "setup":  # in which they refuse runs that do not fit
            check_all(partial(self._call_one, callback, hook, self.trainer) for callback in self.callbacks)
            return
        named = {"trainer": self.trainer, **arguments}
        for callback in self.callbacks:
            function = getattr(callback, hook)
            function = getattr(function, "__func__", function)
            if function is not getattr(Callback, hook):
                names = arguments_taken(function)
                kwargs = {name: named[name] for name in named if names is None or name in names}
                self._call_one(callback, hook, **kwargs)

    def _call_one(self, callback: Callback, hook: str, *args: Any, **kwargs: Any) -> None:
        """Call a hook of a callback. An exception keeps its type and gets a note that names the callback."""
        kind = type(callback).__name__
        try:
            with self.workers.within(f"{hook} of {kind}"):
                getattr(callback, hook)(*args, **kwargs)
        except Exception as error:
            add_note(error, f"in {kind}.{hook}, round {self.server.round}")
            raise
