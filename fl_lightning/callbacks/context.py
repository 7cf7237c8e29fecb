"""The context of a run that callbacks may use, which the engine implements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from torch import Tensor

from fl_lightning.aggregation import Sums
from fl_lightning.client import Client
from fl_lightning.method import MethodList
from fl_lightning.server import Server
from fl_lightning.state import State

Gathered = TypeVar("Gathered")


class BatchIndex(NamedTuple):
    """Index of a batch: its client, or None for test data, and its number and loader."""

    client: int | None
    batch: int
    loader: int = 0


# index, batch, targets and taps
Observed = tuple[BatchIndex, Any, Tensor | None, dict[str, Tensor]]


class RunContext(Protocol):
    """The part of a trainer that callbacks may use: properties of the run, and evaluations of its models.

    Attributes:
        max_rounds: rounds of the run.
        eval_every_n_rounds: rounds from one evaluation to the next.
        callbacks: callbacks of the run.
        taps: paths of submodules by name, from the argument ``taps``.
        weights: file of the initial weights; None if the module's own weights are used.
        should_stop: set to True, on any worker, to end the run after this round.
        save_best: set to True, on all workers, to keep the checkpoint of this round as ``best.ckpt``.
    """

    max_rounds: int
    eval_every_n_rounds: int
    callbacks: list[Any]
    taps: dict[str, str]
    weights: Path | None
    should_stop: bool
    save_best: bool

    @property
    def run(self) -> Any:
        """Internal parts of the current run, or of the last one, without a stable interface.

        Raises:
            RuntimeError: the trainer has not started a run.
        """

    @property
    def server(self) -> Server:
        """The global state: ``state``, ``round``, ``cohort``."""

    @property
    def client(self) -> Client:
        """The module in which the clients of this worker train; ``client.memories()`` are their memories."""

    @property
    def methods(self) -> MethodList:
        """The methods of the run."""

    @property
    def data(self) -> Any:
        """The clients' data."""

    @property
    def seed(self) -> int:
        """Base seed of all random streams."""

    @property
    def run_dir(self) -> Path | None:
        """Folder of the run; None on all workers except the first, and in runs that write no files."""

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of this round by tag."""

    @property
    def history(self) -> list[dict[str, float]]:
        """Metrics of all finished rounds."""

    @property
    def resumed(self) -> bool:
        """Whether the run resumes in the folder of its checkpoint."""

    @property
    def resumed_from(self) -> Path | None:
        """Folder of the run whose checkpoint is resumed, on the worker that writes; None for a new run."""

    @property
    def summary_writers(self) -> list[Any]:
        """TensorBoard writers of this worker; empty on workers that do not write."""

    @property
    def global_rank(self) -> int:
        """Rank of this worker, from 0."""

    @property
    def world_size(self) -> int:
        """Number of workers."""

    def log(self, name: str, value: float) -> None:
        """Log a value of this round under ``name``.

        Raises:
            UsageError: the value is not a number.
        """

    def log_figure(self, name: str, figure: Any) -> None:
        """Save a Matplotlib figure as ``figures/<name>.png``, with _ for /, and pass it to loggers of images."""

    def warn(self, message: str) -> None:
        """Show a warning of one line, on the first worker only."""

    def gather(self, value: Gathered) -> list[Gathered]:
        """Return the values of all workers by rank; all workers call this, with small values."""

    def all_reduce(self, sums: Sums) -> None:
        """Add the sums of all workers in place, exactly; all workers call this."""

    def alone(self) -> AbstractContextManager[None]:
        """Return a context in which a worker waits for no others, as in ``on_client_end``.

        Workers can thus share the clients, and each evaluate some of them completely.
        """

    def domains_of(self, phase: str) -> list[str]:
        """Return the names of the domains with ``val`` or ``test`` data; empty for data without domains."""

    @property
    def has_own_test_data(self) -> bool:
        """Whether each client has its own test data."""

    def num_examples(self, domain: str, phase: str = "test") -> int:
        """Return the number of examples of a domain from :meth:`domains_of`; 0 if a loader does not know it."""

    def has_data(self, phase: str, client: int | None = None) -> bool:
        """Return whether there are ``val`` or ``test`` data; with ``client``, whether it has its own test examples.

        Raises:
            UsageError: the data set does not divide its test data among clients.
        """

    def evaluate(
        self, phase: str, state: State | None = None, client: int | None = None, domain: str | None = None
    ) -> dict[str, float]:
        """Return the metrics of a state by tag; empty without data. Callbacks do not see the batches.

        All workers call this and share the batches; in ``on_client_end`` a worker evaluates all of them.

        Args:
            phase: ``val`` or ``test``.
            state: a state, or entries that replace entries of the global model; None is the global model in its
                reported form.
            client: id of a client, whose local entries complete the state and on whose test data it is evaluated.
                (Validation data are not divided among clients.) None uses all data.
            domain: domain from :meth:`domains_of` on whose data the state is evaluated; None for all.
        """

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

    def training_logits(self, client: int, logits: Tensor) -> Tensor:
        """Return logits ``(B, C)`` as the loss of a client's training step sees them, changed by ``transform_logits``.

        A worker does this alone. Only the worker that owns the client has its memory.

        Args:
            client: id of the client.
            logits: raw logits, returned unchanged if no method of the run transforms logits.
        """

    def rehearse(self, client: int, methods: Sequence[str] | None = None) -> int:
        """Take the first local step of a client's next visit, and restore all state, to measure the cost of a step.

        A worker does this alone. Only the worker that owns the client has its memory.

        Args:
            client: id of the client.
            methods: names of the methods that take part; None for all methods of the run.

        Returns:
            Number of forward passes of reference models in the step.
        """
