"""What callbacks may use of a trainer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from fl_lightning.client import Client
from fl_lightning.errors import UsageError, choices, require
from fl_lightning.method import MethodList
from fl_lightning.server import Server
from fl_lightning.state import State
from fl_lightning.sums import Sums

if TYPE_CHECKING:
    from fl_lightning.engine.evaluation.evaluator import Observed
    from fl_lightning.engine.run import Run

Gathered = TypeVar("Gathered")


class RunAccess:
    """The part of a trainer that callbacks may use: what is known of the run, and questions about its models.

    Attributes:
        max_rounds: rounds of the run.
        eval_every_n_rounds: rounds from one evaluation to the next.
        callbacks: those of the run.
        taps: what the argument ``taps`` binds: paths of submodules by name.
        weights: the file of the weights that the run began with; None where it began with those of the module.
        should_stop: set it to True, on any worker, and the run ends after the present round.
        keep_as_best: set it to True, on all workers, and the present round has a checkpoint, kept as ``best.ckpt``.
    """

    max_rounds: int
    eval_every_n_rounds: int
    callbacks: list[Any]
    taps: dict[str, str]
    weights: Path | None

    def __init__(self) -> None:
        self.should_stop = self.keep_as_best = False
        self._run: Run | None = None
        self._fitted: Run | None = None

    @property
    def run(self) -> Run:
        """The parts of the run that goes on, or else of the last fit; without one, of the last run.

        They are internal: callbacks use the members below.

        Raises:
            RuntimeError: the trainer has begun no run.
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
        """The module in which the clients of this worker train, and, as ``client.memories()``, what they remember."""
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
        """Base seed of all addressed streams."""
        return self.run.seed

    @property
    def run_dir(self) -> Path | None:
        """Folder of the run; None on workers other than the first and where nothing is written."""
        return None if self._run is None else self._run.folder.path

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the present round, by tag."""
        return {} if self._run is None else self._run.metrics.current

    @property
    def history(self) -> list[dict[str, float]]:
        """The metrics of all rounds that are done."""
        return [] if self._run is None else self._run.metrics.history

    @property
    def resumed(self) -> bool:
        """Whether the run resumes in the folder of its checkpoint."""
        return self.run.folder.resumed

    @property
    def resumed_from(self) -> Path | None:
        """Folder of the run whose checkpoint this one resumes from, on the worker that writes; None without one."""
        return self.run.folder.source

    @property
    def summary_writers(self) -> list[Any]:
        """TensorBoard's writers among the loggers of this worker; none on those that do not write."""
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
            UsageError: it is no number.
        """
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(f"trainer.log: {name}={value!r}: give a number") from error
        self.run.metrics.update({name: number})

    def log_figure(self, name: str, figure: Any) -> None:
        """Save a figure of Matplotlib as ``figures/<name>.png``, with _ for /, and give it to loggers of images."""
        self.run.folder.log_figure(name, figure, self.server.round)

    def warn(self, message: str) -> None:
        """Give a warning of one line, on the first worker only."""
        rank_zero_warn(message, stacklevel=5)

    def gather(self, value: Gathered) -> list[Gathered]:
        """The value of each worker, by rank; all workers call this, with small values."""
        return self.run.workers.gather(value)

    def all_reduce(self, sums: Sums) -> None:
        """Add up the sums of all workers, in place and exactly; all workers call this."""
        sums.all_reduce(self.run.workers)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """In this block a worker is on its own, as in ``on_client_end``: what it asks for waits for no other worker.

        So workers can deal out clients, and evaluate each of them as a whole.
        """
        with self.run.workers.local_only():
            yield

    def domains_of(self, phase: str) -> list[str]:
        """The names of the domains of which there are ``val`` or ``test`` data; none where the data have no domains."""
        return self.run.loaders.domains(phase)

    @property
    def has_own_test_data(self) -> bool:
        """Whether each client has test data of its own."""
        return not self.run.loaders.lack_of_own_test_data

    def num_examples(self, domain: str, phase: str = "test") -> int:
        """The number of examples of one of :meth:`domains_of` a phase; 0 where a loader does not tell it."""
        return self.run.loaders.num_examples(domain, phase)

    def has_data(self, phase: str, client: int | None = None) -> bool:
        """Whether there are data of ``val`` or ``test``; with ``client``, whether it has test examples of its own.

        Raises:
            UsageError: the data set does not divide its test data over clients.
        """
        loaders = self.run.loaders.evaluation(phase, client)
        return any(len(loader) for loader in loaders) if client is not None else bool(loaders)

    def evaluate(
        self, phase: str, state: State | None = None, client: int | None = None, domain: str | None = None
    ) -> dict[str, float]:
        """Metrics by tag of a state; none without data. No callback sees the batches.

        The batches are dealt out over the workers, which all call this; in ``on_client_end`` a worker is on its own.

        Args:
            phase: ``val`` or ``test``.
            state: the state, or entries that replace those of the global model; None is the global model, as it is
                reported.
            client: id of a client: the state is completed by the entries that stay with it, and evaluated on its own
                test data. (Validation data are not divided over clients.) None uses the data of all.
            domain: one of :meth:`domains_of` the phase, on whose data the state is evaluated; None is all.
        """
        known = phase == "test" or (phase == "val" and client is None)
        require(known, "trainer.evaluate: phase", phase, "give val or test; a client has test data of its own only")
        whole, before = self._whole(state, client, domain, phase if client is None else ""), self.client.state()
        try:
            return self.run.evaluator.one_model(phase, whole, observed=False, data_of=client, domain=domain)
        finally:
            self.client.resident.load(before)

    def representations(
        self,
        state: State | None,
        taps: tuple[str, ...],
        data: Literal["test", "train"] = "test",
        client: int | None = None,
        examples: int | None = None,
        domain: str | None = None,
    ) -> Iterator[Observed]:
        """The taps of a state, in eval mode, batch by batch.

        The batches (of training data: the clients) are dealt out over the workers, which all call this; in
        ``on_client_end`` a worker is on its own.

        Args:
            state: as in :meth:`evaluate`.
            taps: names of the taps, or paths of submodules, as ``trainer.taps`` has them.
            data: the test data, or the clients' training data as their loaders give it.
            client: id of the client whose data are used and whose entries complete the state; None for the test data of
                all, or the training data of all clients in turn.
            examples: a probe: about this many test examples, at least 1, drawn at random and the same in every round,
                in batches of at most 64. None is all.
            domain: one of :meth:`domains_of` the test data, to whose test data the question is restricted; None is all.

        Yields:
            ``(index, batch, targets, taps)``: ``index.client`` and ``index.batch`` say which batch it is; targets
            ``(B,)``, None where it has none; taps by name, ``(B, ...)``.
        """
        require(data in ("test", "train"), "trainer.representations: data", data, "give test or train")
        require(examples is None or examples >= 1, "trainer.representations: examples", examples, "give 1 or more")
        require(examples is None or data == "test", "trainer.representations: data", data, "a probe is of test data")
        whole = self._whole(state, client, domain, "test" if data == "test" and client is None else "")
        # in the batch order of the round to come, not in the one in which the clients have just trained
        return self.run.representations.observe(whole, taps, data, client, self.server.round + 1, examples, domain)

    def recalibrated(
        self, state: State | None = None, clients: Sequence[int] | None = None, once: bool = False
    ) -> State:
        """The running statistics of BatchNorm for a state, recomputed on training data, by name; none without data.

        The clients are dealt out over the workers, which all call this.

        Args:
            state: as in :meth:`evaluate`.
            clients: ids of those whose training data are used; None is all.
            once: one pass for all layers, an approximation, as ``trainer.buffers=recalibrate_once``.
        """
        some = range(self.data.num_clients) if clients is None else clients
        return self.run.recalibration.statistics(self._whole(state), some, self.server.round, once)

    def fine_tune(self, client: int, state: State | None, steps: int) -> State:
        """Train a state for some steps on the data of a client, by the module's own loss, and return it.

        What the client remembers and the state of the run stay as they are. A worker does this by itself, so that
        clients can be dealt out: ``range(trainer.global_rank, number, trainer.world_size)``, or, where entries of the
        state stay with the clients, those that this worker owns: ``trainer.client.memories()``.

        Args:
            client: its id.
            state: as in :meth:`evaluate`.
            steps: local steps, at least 0.

        Raises:
            UsageError: there is no such client, ``steps`` is below 0, the state is not one of the model, or another
                worker owns what the client keeps.
        """
        self._check(client, state)
        require(steps >= 0, "trainer.fine_tune: steps", steps, "give 0 or more")
        owner = self.client.memories().owners.get(client, self.global_rank) if self.client.kept else self.global_rank
        hint = f"worker {owner} owns what it keeps; fine-tune the clients in trainer.client.memories()"
        require(owner == self.global_rank, "trainer.fine_tune: client", client, hint)
        whole = {**self.methods.evaluated_state(self.server), **self.client.own_entries(client), **(state or {})}
        return self.run.local_training.fine_tune(client, self.server.round, whole, steps)

    def training_logits(self, client: int, logits: Tensor) -> Tensor:
        """Logits ``(B, C)`` as the loss of a client's training step would see them, changed by ``transform_logits``.

        A worker does this by itself. Where methods remember something of the client, only the worker that owns it has
        it.

        Args:
            client: its id.
            logits: the raw ones; they are returned where no method of the run changes logits.
        """
        self._check(client)
        some = MethodList(self.methods.having("transform_logits"))
        if not some.methods:
            return logits
        state = self.methods.evaluated_state(self.server)
        return self.run.local_training.transformed(client, self.server.round, state, some, logits)

    def rehearse(self, client: int, methods: Sequence[str] | None = None) -> int:
        """Take the first local step of a client's next visit, of which nothing is left.

        What a step costs can be measured around it. A worker does this by itself. Where methods remember something of
        the client, only the worker that owns it has it.

        Args:
            client: its id.
            methods: names of those of the run's methods that take part; None is all of them.

        Returns:
            How many times the step runs a reference model.
        """
        self._check(client)
        some = MethodList([one for one in self.methods.methods if methods is None or one.name in methods])
        return self.run.local_training.rehearse(client, self.server.round, self.server.state, some)

    def _whole(
        self, state: State | None, client: int | None = None, domain: str | None = None, phase: str = ""
    ) -> State:
        """The global model with the entries that ``client`` keeps, from its owner, and ``state`` in their place.

        All workers ask for it. ``phase`` is empty for the data of a client and for training data, without domains.
        """
        self._check(client, state)
        if domain is not None:
            known = self.domains_of(phase) if phase else []
            hint = f"the {phase or 'asked'} data have the domains: {', '.join(known) or 'none'}; give one of them"
            require(domain in known, "domain", domain, f"{hint}, without a client")
        own: State = {}
        if client is not None and self.client.kept:
            asked = self.gather((client, self.client.own_entries(client)))
            same = all(k == client for k, _ in asked)
            require(same, "client", client, "the workers ask for several clients; all must ask for the same")
            own = next((entries for _, entries in asked if entries), {})
        return {**self.methods.evaluated_state(self.server), **own, **(state or {})}

    def _check(self, client: int | None, state: State | None = None) -> None:
        """Refuse a client that there is not, and a state that is not one of the model."""
        number, live = self.data.num_clients, self.client.live
        require(client is None or client in range(number), "client", client, f"give an id from 0 to {number - 1}")
        for name, value in (state or {}).items():
            if name not in live:
                raise UsageError(f"state={name!r}: the model has no such entry; it has {choices(live, name)}")
            shape = tuple(live[name].shape)
            require(tuple(value.shape) == shape, f"state: {name}", tuple(value.shape), f"give the shape {shape}")
