"""The context of a run that callbacks may use: the part of a trainer without arguments and commands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from fl_lightning.client import Client
from fl_lightning.core.clock import in_microseconds
from fl_lightning.core.method import MethodList
from fl_lightning.core.server import Server
from fl_lightning.core.state import State
from fl_lightning.core.weighted import Sums
from fl_lightning.storage.serializable import on_cpu
from fl_lightning.utilities.errors import UsageError, choices, require
from fl_lightning.utilities.lightning_replacements import ATTRIBUTES

Gathered = TypeVar("Gathered")


class BatchIndex(NamedTuple):
    """Index of a batch: its client, or None for test data, and its number and loader."""

    client: int | None
    batch: int
    loader: int = 0


# index, batch, targets and taps
Observed = tuple[BatchIndex, Any, Tensor | None, dict[str, Tensor]]


class RunContext:
    """The part of a trainer that callbacks may use: properties of the run, and evaluations of its models.

    Attributes:
        max_rounds: rounds of the run, at most.
        max_seconds: simulated seconds of the run, at most; None for no limit.
        eval_every_n_rounds: rounds from one evaluation to the next.
        eval_every_seconds: simulated seconds from one evaluation to the next, in place of rounds; None counts rounds.
        callbacks: callbacks of the run.
        taps: paths of submodules by name, from the argument ``taps``.
        weights: file of the initial weights; None if the module's own weights are used.
        should_stop: set to True, on any worker, to end the run after this round.
        save_best: set to True, on all workers, to keep the checkpoint of this round as ``best.ckpt``.
    """

    max_rounds: int
    max_seconds: float | None
    eval_every_n_rounds: int
    eval_every_seconds: float | None
    callbacks: list[Any]
    taps: dict[str, str]
    weights: Path | None
    should_stop: bool
    save_best: bool

    def __init__(self) -> None:
        self.should_stop = self.save_best = False
        self._run: Any = None
        self._fitted: Any = None

    if not TYPE_CHECKING:  # with this method, mypy would allow any attribute

        def __getattr__(self, name: str) -> Any:
            """Name what replaces an attribute of Lightning's Trainer."""
            if name in ATTRIBUTES:
                raise AttributeError(f"trainer.{name}: no such attribute; {ATTRIBUTES[name]}")
            return super().__getattribute__(name)  # the error of a property, or Python's own

        def __setattr__(self, name: str, value: Any) -> None:
            """Refuse a new attribute once there is a run: a misspelt ``should_stop`` would be ignored."""
            if self.__dict__.get("_run") is not None and not hasattr(self, name):
                raise AttributeError(f"trainer.{name}: the trainer has no such attribute, so setting it has no effect")
            super().__setattr__(name, value)

    @property
    def run(self) -> Any:
        """Internal parts of the current run, or of the last one, without a stable interface.

        Raises:
            RuntimeError: the trainer has not started a run.
        """
        if self._run is None:
            raise RuntimeError("the trainer has no run yet; call fit, validate or test")
        return self._run

    @property
    def server(self) -> Server:
        """The global state: ``state``, ``round``, ``cohort``."""
        return self.run.server

    @property
    def client(self) -> Client:
        """The module in which the clients of this worker train; ``client.memories()`` are their memories."""
        return self.run.client

    @property
    def methods(self) -> MethodList:
        """The methods of the run."""
        return self.run.methods

    @property
    def data(self) -> Any:
        """The clients' data."""
        return self.run.data

    @property
    def seed(self) -> int:
        """Base seed of all random streams."""
        return self.run.seed

    @property
    def run_dir(self) -> Path | None:
        """Folder of the run; None on all workers except the first, and in runs that write no files."""
        return None if self._run is None else self._run.folder.path

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of this round by tag."""
        return {} if self._run is None else self._run.metrics.current

    @property
    def history(self) -> list[dict[str, float]]:
        """Metrics of all finished rounds."""
        return [] if self._run is None else self._run.metrics.history

    @property
    def evaluation_is_due(self) -> bool:
        """Whether the arguments ask for an evaluation after this round, also if it were not the last."""
        if self.eval_every_seconds is None:
            return (self.server.round + 1) % self.eval_every_n_rounds == 0
        before = self.history[-1].get("clock/seconds", 0.0) if self.history else 0.0
        every = max(1, in_microseconds(self.eval_every_seconds))
        return self.server.microseconds // every > in_microseconds(before) // every

    @property
    def resumed(self) -> bool:
        """Whether the run resumes in the folder of its checkpoint."""
        return self.run.folder.resumed

    @property
    def resumed_from(self) -> Path | None:
        """Folder of the run whose checkpoint is resumed, on the worker that writes; None for a new run."""
        return self.run.folder.source

    @property
    def summary_writers(self) -> list[Any]:
        """TensorBoard writers of this worker; empty on workers that do not write."""
        return self.run.folder.summary_writers

    @property
    def global_rank(self) -> int:
        """Rank of this worker, from 0."""
        return self.run.fabric.global_rank

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return self.run.fabric.world_size

    def log(self, name: str, value: float) -> None:
        """Log a value of this round under ``name``.

        Raises:
            UsageError: the value is not a number.
        """
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(f"trainer.log: {name}={value!r}: log a number") from error
        self.run.metrics.update({name: number})

    def log_figure(self, name: str, figure: Any) -> None:
        """Save a Matplotlib figure as ``figures/<name>.png``, with _ for /, and pass it to loggers of images."""
        self.run.folder.log_figure(name, figure, self.server.round)

    def warn(self, message: str) -> None:
        """Show a warning of one line, on the first worker only."""
        rank_zero_warn(message, stacklevel=5)

    def gather(self, value: Gathered) -> list[Gathered]:
        """Return the values of all workers by rank; all workers call this, with small values."""
        return self.run.workers.gather(value, "trainer.gather")

    def all_reduce(self, sums: Sums) -> None:
        """Add the sums of all workers in place, exactly; all workers call this."""
        sums.all_reduce(self.run.workers)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Return a context in which a worker waits for no others, as in ``on_client_end``.

        Workers can thus share the clients, and each evaluate some of them completely.
        """
        with self.run.workers.local_only():
            yield

    def domains_of(self, phase: str) -> list[str]:
        """Return the names of the domains with ``val`` or ``test`` data; empty for data without domains."""
        return self.run.loaders.domains(phase)

    @property
    def has_own_test_data(self) -> bool:
        """Whether each client has its own test data."""
        return not self.run.loaders.missing_test_data_reason

    def num_examples(self, domain: str, phase: str = "test") -> int:
        """Return the number of examples of a domain from :meth:`domains_of`; 0 if a loader does not know it."""
        return self.run.loaders.num_examples(domain, phase)

    def has_data(self, phase: str, client: int | None = None) -> bool:
        """Return whether there are ``val`` or ``test`` data; with ``client``, whether it has its own test examples.

        Raises:
            UsageError: the data set does not divide its test data among clients.
        """
        loaders = self.run.loaders.evaluation(phase, client)
        return any(len(loader) for loader in loaders) if client is not None else bool(loaders)

    def evaluate(
        self, phase: str, state: State | None = None, client: int | None = None, domain: str | None = None
    ) -> dict[str, float]:
        """Return the metrics of a state by tag; empty without data. Callbacks do not see the batches.

        All workers call this and share the batches; in ``on_client_end`` a worker evaluates all of them.

        Args:
            phase: ``val`` or ``test``.
            state: a state, or entries that replace entries of the global model; None is the global model in its
                reported form.
            client: id of a client, whose own entries complete the state and on whose test data it is evaluated.
                (Validation data are not divided among clients.) None uses all data.
            domain: domain from :meth:`domains_of` on whose data the state is evaluated; None for all.
        """
        fits = phase == "test" or (phase == "val" and client is None)
        require(fits, "trainer.evaluate: phase", phase, "use val or test; with client, use test")
        complete = self._complete(state, client, domain, phase if client is None else "")
        before = self.client.state()
        try:
            return self.run.evaluator.evaluate(phase, complete, observed=False, data_of=client, domain=domain)
        finally:
            self.client.worker_module.load(before)

    def representations(
        self,
        state: State | None,
        taps: tuple[str, ...],
        data: Literal["test", "train"] = "test",
        client: int | None = None,
        examples: int | None = None,
        domain: str | None = None,
    ) -> Iterator[Observed]:
        """Yield the taps of a state in eval mode, batch by batch.

        All workers call this and share the batches (for training data: the clients); in ``on_client_end`` a worker
        visits all of them.

        Args:
            state: as in :meth:`evaluate`.
            taps: names of taps, or paths of submodules as in ``trainer.taps``.
            data: test data, or the clients' training data from their loaders.
            client: id of the client whose data are used and whose entries complete the state; None for all test data,
                or the training data of all clients in turn.
            examples: approximate number of test examples of a random probe, at least 1, which is the same in every
                round, in batches of at most 64. None for all.
            domain: domain from :meth:`domains_of` to whose test data the batches are restricted; None for all.

        Yields:
            ``(index, batch, targets, taps)``: ``index.client`` and ``index.batch`` identify the batch; targets are
            ``(B,)``, or None; taps are ``(B, ...)`` by name.
        """
        require(data in ("test", "train"), "trainer.representations: data", data, "use test or train")
        require(examples is None or examples >= 1, "trainer.representations: examples", examples, "use 1 or more")
        require(
            examples is None or data == "test",
            "trainer.representations: data",
            data,
            "a probe needs test data; remove examples",
        )
        complete = self._complete(state, client, domain, "test" if data == "test" and client is None else "")
        # in the batch order of the next round, not in the order of the training that just ended
        return self.run.representations.observe(complete, taps, data, client, self.server.round + 1, examples, domain)

    def recalibrated(
        self, state: State | None = None, clients: Sequence[int] | None = None, once: bool = False
    ) -> State:
        """Return BatchNorm's running statistics for a state, recomputed on training data, by name; empty without data.

        All workers call this and share the clients.

        Args:
            state: as in :meth:`evaluate`.
            clients: ids of clients whose training data are used; None for all.
            once: approximate by one pass for all layers, as ``trainer.buffers=recalibrate_once``.
        """
        ids = range(self.data.num_clients) if clients is None else clients
        return self.run.recalibration.statistics(self._complete(state), ids, self.server.round, once)

    def personal_state(self, client: int) -> State:
        """Return the state that is evaluated for a client: the global model with the client's own entries.

        A worker does this alone. Only the worker that owns the client has its memory.
        """
        self._check(client)
        evaluated = self.methods.evaluated_state(self.server)
        return {**evaluated, **self.client.lifecycle.personal_entries(self.data.info(client), evaluated)}

    def fine_tune(self, client: int, state: State | None, steps: int) -> State:
        """Train a state for some steps on the data of a client, with the module's own loss, and return it.

        The client's memory and the state of the run do not change. A worker does this alone, so that workers can share
        clients: ``range(trainer.global_rank, number, trainer.world_size)``, or, in a run with client-local entries, the
        clients that this worker owns: ``trainer.client.memories()``.

        Args:
            client: id of the client.
            state: as in :meth:`evaluate`.
            steps: local steps, at least 0.

        Raises:
            UsageError: an unknown client, ``steps`` below 0, a state of another model, or a client whose local entries
                another worker owns.
        """
        self._check(client, state)
        require(steps >= 0, "trainer.fine_tune: steps", steps, "use 0 or more")
        owner = self._owner(client)
        hint = f"worker {owner} owns its local entries; fine-tune the clients in trainer.client.memories()"
        require(owner == self.global_rank, "trainer.fine_tune: client", client, hint)
        complete = {**self.personal_state(client), **(state or {})}
        return self.run.local_training.fine_tune(client, self.server.round, complete, steps)

    def training_logits(self, client: int, logits: Tensor) -> Tensor:
        """Return logits ``(B, C)`` as the loss of a client's training step sees them, changed by ``transform_logits``.

        A worker does this alone. Only the worker that owns the client has its memory.

        Args:
            client: id of the client.
            logits: raw logits, returned unchanged if no method of the run transforms logits.
        """
        self._check(client)
        transforming_methods = MethodList(self.methods.overriding("transform_logits"))
        if not transforming_methods.methods:
            return logits
        state = self.methods.evaluated_state(self.server)
        return self.run.local_training.transformed(client, self.server.round, state, transforming_methods, logits)

    def rehearse(self, client: int, methods: Sequence[str] | None = None) -> int:
        """Take the first local step of a client's next visit, and restore all state, to measure the cost of a step.

        A worker does this alone. Only the worker that owns the client has its memory.

        Args:
            client: id of the client.
            methods: names of the methods that take part; None for all methods of the run.

        Returns:
            Number of forward passes of reference models in the step.
        """
        self._check(client)
        participants = self.methods.methods
        if methods is not None:
            participants = [method for method in participants if method.name in methods]
        state = self.server.state
        return self.run.local_training.rehearse(client, self.server.round, state, MethodList(participants))

    def _complete(
        self, state: State | None, client: int | None = None, domain: str | None = None, phase: str = ""
    ) -> State:
        """Return the global model, updated by the local entries of ``client``, from its owner, and by ``state``.

        All workers call this. ``phase`` is empty for the data of a client and for training data.
        """
        self._check(client, state)
        if domain is not None:
            domains = self.domains_of(phase) if phase else []
            hint = f"unknown domain; available in these data: {', '.join(domains) or 'none'}"
            require(domain in domains, "domain", domain, f"{hint}; pass no client")
        personal, evaluated = State(), self.methods.evaluated_state(self.server)
        if client is not None and self.client.has_own_models:
            if self._owner(client) == self.global_rank:
                personal = on_cpu(self.client.lifecycle.personal_entries(self.data.info(client), evaluated))
            gathered = self.gather((client, personal))
            agrees = all(k == client for k, _ in gathered)
            require(agrees, "client", client, "differs between workers; pass the same client on all workers")
            personal = next((entries for _, entries in gathered if entries), {})
        return {**evaluated, **personal, **(state or {})}

    def _owner(self, client: int) -> int:
        """Rank of the worker that has a client's memory, where its model depends on it; this worker if none has."""
        owners = self.client.memories().owners if self.client.has_own_models else {}
        return owners.get(client, self.global_rank)

    def _check(self, client: int | None, state: State | None = None) -> None:
        """Refuse an unknown client, and a state of another model."""
        number, live = self.data.num_clients, self.client.live
        require(client is None or client in range(number), "client", client, f"use an id from 0 to {number - 1}")
        for name, value in (state or {}).items():
            if name not in live:
                raise UsageError(f"state={name!r}: the model has no such entry; available: {choices(live, name)}")
            shape = tuple(live[name].shape)
            require(
                tuple(value.shape) == shape, f"state: {name}", tuple(value.shape), f"pass a tensor of shape {shape}"
            )
