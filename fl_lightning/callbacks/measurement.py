"""Base classes of callbacks that measure every few rounds, and functions that they share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from fl_lightning.callbacks.base import Callback
from fl_lightning.client import Client
from fl_lightning.client.run_context import RunContext
from fl_lightning.core.seeding import numpy_rng
from fl_lightning.core.state import State
from fl_lightning.core.weighted import Sums, Weighted
from fl_lightning.storage.atomic_io import write_atomically
from fl_lightning.utilities.errors import LostWorkerError, UsageError, require, with_location

if TYPE_CHECKING:
    from fl_lightning.plotting.figures import Plot, Runs

Key = TypeVar("Key", int, tuple[int, int])
Value = TypeVar("Value")


class PeriodicCallback(Callback):
    """A callback that acts every few rounds and in the last one.

    Args:
        every_n_rounds: number of rounds between two calls, at least 1. The last round is always included; with None it
            is the only one.

    Attributes:
        after_evaluation: whether the call in the last round follows the evaluation of the final model, even if a
            callback ends the run early.
    """

    after_evaluation: ClassVar[bool] = False

    def __init__(self, every_n_rounds: int | None = 10) -> None:
        valid = every_n_rounds is None or every_n_rounds >= 1
        require(valid, f"{type(self).__name__}.every_n_rounds", every_n_rounds, "use 1 or more")
        self.every_n_rounds = every_n_rounds

    def due(self, round_: int) -> bool:
        """Return whether the callback acts in this round."""
        return self.is_multiple(round_) or round_ == self._last_round

    def is_multiple(self, number: int) -> bool:
        """Return whether a number of rounds is a multiple of ``every_n_rounds``."""
        return self.every_n_rounds is not None and number % self.every_n_rounds == 0

    def measure(self, trainer: RunContext) -> None:
        """Measure and log at the end of a round that is due; all workers call this."""
        raise NotImplementedError

    def on_fit_start(self, trainer: RunContext) -> None:
        self._last_round = trainer.max_rounds - 1

    def on_round_end(self, trainer: RunContext) -> None:
        round_ = trainer.server.round
        if self.due(round_) and not (self.after_evaluation and round_ == self._last_round):
            self.measure(trainer)

    def on_last_round_end(self, trainer: RunContext) -> None:
        if self.after_evaluation:
            self.measure(trainer)


class Measurement(PeriodicCallback):
    """A callback that measures every few rounds and in the last one, and stores arrays in a file of the run.

    A subclass sets :attr:`file` and overrides :meth:`measure`, which passes the arrays of a round to :meth:`keep`.

    Args:
        every_n_rounds: rounds from one measurement to the next, at least 1; the last round has one too.

    Attributes:
        file: name of the ``.npz`` file in the run's folder.
        series: the measurements so far, by name: ``rounds``, and the entries of the subclass, each of one shape.
    """

    file: ClassVar[str]

    def on_fit_start(self, trainer: RunContext) -> None:
        super().on_fit_start(trainer)
        self.series: dict[str, list[np.ndarray]] = defaultdict(list)
        self._source, self._continues = trainer.resumed_from, False

    def on_fit_end(self, trainer: RunContext) -> None:
        if self.series:
            self.draw(trainer)

    def plot(self, runs: Runs) -> Iterable[Plot]:
        """Yield the figures of the run, drawn at its end; by default none for a callback outside this package.

        Args:
            runs: the arrays of the file, as ``{"": [arrays]}``; a report passes the arrays of each seed by label of the
                runs to the plot functions of this package.
        """
        from fl_lightning.plotting.plots import PLOTS

        return PLOTS[self.file][1](runs) if self.file in PLOTS else ()

    def draw(self, trainer: RunContext, extra_arrays: Mapping[str, np.ndarray] | None = None) -> None:
        """Log the figures, on the worker that writes; ``extra_arrays`` are for the figures only."""
        if trainer.run_dir is not None:
            log_figures(trainer, self.plot({"": [{**self._arrays(), **(extra_arrays or {})}]}))

    def append(self, name: str, value: Any) -> None:
        """Append an entry to the series."""
        self.series[name].append(np.asarray(value))

    def keep(self, trainer: RunContext, measured: Mapping[str, Any] | None = None) -> None:
        """Append the arrays of a round by name, and the round itself, and write the file."""
        for name, value in {**(measured or {}), "rounds": trainer.server.round}.items():
            self.append(name, value)
        self.save(trainer)

    def save(self, trainer: RunContext) -> None:
        """Write the file, on the worker that writes."""
        if trainer.run_dir is not None:
            self.set_other_aside(trainer.run_dir / self.file)
            arrays: dict[str, Any] = self._arrays()
            write_atomically(trainer.run_dir / self.file, partial(np.savez, **arrays))

    def _arrays(self) -> dict[str, np.ndarray]:
        return {name: np.stack(entries) for name, entries in self.series.items()}

    def state_dict(self) -> dict[str, Any]:
        # a checkpoint must not grow with the rounds: the arrays are in the file
        return {"lengths": {name: len(entries) for name, entries in self.series.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        lengths = state.get("lengths", {})
        if self._source is None or not lengths:
            return
        path = self._source / self.file
        try:
            with np.load(path, allow_pickle=False) as saved:
                series = {name: list(saved[name][:number]) for name, number in lengths.items()}
        except Exception:  # NumPy and zipfile raise many kinds for a damaged file
            series = {}
        self._continues = {name: len(entries) for name, entries in series.items()} == lengths
        if self._continues:
            self.series.update(series)
        else:
            warn_of_damage(path)

    def set_other_aside(self, path: Path) -> None:
        """Rename an existing file that another callback or an earlier part of the run has written.

        Its new name is the first free one of ``name.1.npz``, ``name.2.npz``, ...
        """
        if not self._continues and path.exists():
            places = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in count(1))
            moved_to = path.rename(next(place for place in places if not place.exists()))
            rank_zero_warn(f"{path} belongs to another callback or run; renamed to {moved_to.name}")
        self._continues = True


class EvaluationMeasurement(Measurement):
    """A measurement of the evaluated models on all test data, from the batches of the run's own evaluations.

    A subclass collects batches in :meth:`see` and measures the model in :meth:`of_model`. If entries of the state stay
    with the clients, the values of :meth:`measured` are means over the personalized models.
    """

    def requires_evaluation(self, round_: int) -> bool:
        return self.due(round_)

    def needs_local_models(self, round_: int) -> bool:
        return self.due(round_)

    def see(self, targets: Tensor | None, taps: dict[str, Tensor]) -> None:
        """Collect a batch of this worker."""
        raise NotImplementedError

    def of_model(self, trainer: RunContext) -> dict[str, Tensor]:
        """Return the values of the model in the worker's module, and forget its batches."""
        raise NotImplementedError

    def on_round_start(self, trainer: RunContext) -> None:
        self._global, self._own = Sums(), Sums()

    def on_evaluation_batch_end(
        self, trainer: RunContext, phase: str, batch: Any, targets: Tensor | None, taps: dict[str, Tensor]
    ) -> None:
        if phase == "test" and self.due(trainer.server.round):
            self.see(targets, taps)

    def on_evaluation_end(self, trainer: RunContext, phase: str, client: int | None = None) -> None:
        if phase == "test" and self.due(trainer.server.round):
            values = {name: Weighted.of(value) for name, value in self.of_model(trainer).items()}
            (self._global if client is None else self._own).add(values)

    def measured(self, trainer: RunContext) -> dict[str, Tensor]:
        """Return the values of this round's model, or their means; empty without test data. All workers call this."""
        trainer.all_reduce(self._own)
        return self._own.means() or self._global.means()


class ClientMeasurement(Measurement):
    """A measurement of each client of a cohort, in rounds that are due.

    A subclass appends tables with one row for each client by :meth:`append_table`. The ids are in ``clients`` (R, m),
    where m is the minimum of ``max_clients`` and the number of clients. Rows without a client have id -1 and are nan.

    Args:
        every_n_rounds: rounds from one measurement to the next, at least 1; the last round has one too.
        max_clients: number of clients measured in a round at most, at least 1; drawn at random from a larger cohort,
            with a seed derived from the run, the class and the round.
    """

    def __init__(self, every_n_rounds: int = 10, max_clients: int = 20) -> None:
        super().__init__(every_n_rounds)
        require(max_clients >= 1, f"{type(self).__name__}.max_clients", max_clients, "use 1 or more")
        self.max_clients = max_clients

    def on_round_start(self, trainer: RunContext) -> None:
        where = (trainer.seed, type(self).__name__, trainer.server.round)
        self.chosen = drawn_clients(trainer.server.cohort, self.max_clients, *where)
        self.mine: dict[int, dict[str, Any]] = {}

    def measures(self, trainer: RunContext, client: Client) -> bool:
        """Return whether to measure this client: the round is due, the client chosen, and it has taken a local step."""
        return self.due(trainer.server.round) and client.info.id in self.chosen and client.num_steps > 0

    def measure(self, trainer: RunContext) -> None:
        clients = merge_sorted(trainer.gather(self.mine))
        if clients:
            self.append_table(trainer, "clients", {k: k for k in clients}, fill=-1)
            self.record(trainer, clients)
            self.keep(trainer)

    def record(self, trainer: RunContext, clients: dict[int, dict[str, Any]]) -> None:
        """Append and log the values of a round; all workers call this.

        ``clients`` are the entries of :attr:`mine` of all workers by client in ascending order, at least one.
        """
        raise NotImplementedError

    def rows(self, trainer: RunContext) -> int:
        """Return the number m of rows of a table."""
        return min(self.max_clients, trainer.data.num_clients)

    def append_table(self, trainer: RunContext, name: str, values: dict[int, Any], fill: Any = np.nan) -> None:
        """Append a table: a row for each client of ``values``, in order, then rows of ``fill``."""
        rows = np.stack(list(values.values()))
        table = np.full((self.rows(trainer), *rows.shape[1:]), fill)
        table[: len(rows)] = rows
        self.append(name, table)

    def append_tables(self, trainer: RunContext, clients: dict[int, dict[str, Any]]) -> None:
        """Append a table for each name of the clients' values."""
        for name in next(iter(clients.values())):
            self.append_table(trainer, name, {k: values[name] for k, values in clients.items()})


def measure_clients(trainer: RunContext, clients: Sequence[int], measure: Callable[[int], Value]) -> dict[int, Value]:
    """Return the measurement of each client by id, in ascending order; all workers call this.

    A worker measures the clients that it owns, and its share of the clients without an owner. In a run that skips
    clients that fail, one whose measurement fails is left out, with a warning.
    """
    owners, size = trainer.client.memories().owners, trainer.world_size
    values, failures = dict[int, Value](), dict[int, str]()
    with trainer.alone():
        for place, k in enumerate(clients):
            if owners.get(k, place % size) == trainer.global_rank:
                try:
                    values[k] = measure(k)
                except Exception as error:
                    if not skips(trainer, error):
                        raise
                    failures[k] = with_location(error)
    gathered = trainer.gather((values, failures))
    for k, text in merge_sorted(failed for _, failed in gathered).items():
        trainer.warn(f"round {trainer.server.round}: client {k} is not measured: {text}")
    return merge_sorted(measured for measured, _ in gathered)


def skips(trainer: RunContext, error: Exception) -> bool:
    """Return whether the run goes on without a client that has failed with this error."""
    return trainer.run.trainer.on_client_error == "skip" and not isinstance(error, (LostWorkerError, UsageError))


def labelled(
    trainer: RunContext, callback: Callback, state: State | None, tap: str, data: Any = "test", **where: Any
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a tap ``(B, ...)`` of a state and the labels ``(B,)`` of this worker's batches; refuse data without labels.

    ``state``, ``data`` and ``where`` are arguments of ``trainer.representations``.
    """
    for _, _, targets, taps in trainer.representations(state, (tap,), data, **where):
        if targets is None:
            who, kind = type(callback).__name__, type(trainer.data).__name__
            raise UsageError(f"{who} with the {data} data={kind!r}: no labels; add integer labels (B,)")
        yield taps[tap], targets


def log_figures(trainer: RunContext, plots: Iterable[Plot]) -> None:
    """Draw and log figures."""
    from fl_lightning.plotting.figures import figures

    for name, figure in figures(plots):
        trainer.log_figure(name, figure)


def warn_of_damage(path: Path) -> None:
    """Warn that a file of a resumed run cannot be continued."""
    rank_zero_warn(f"{path} is missing or damaged; it starts again with the rounds after the checkpoint")


def drawn_clients(clients: Sequence[int], number: int, seed: int, purpose: str, *where: int) -> list[int]:
    """Return at most ``number`` of ``clients``, drawn at random with a derived seed, in ascending order."""
    if len(clients) <= number:
        return sorted(clients)
    return sorted(numpy_rng(seed, purpose, *where).choice(sorted(clients), number, replace=False).tolist())


def honest_clients(trainer: RunContext, callback: Callback) -> list[int]:
    """Return the clients that do not attack; refuse a run without any."""
    clients = trainer.methods.honest_clients(trainer.server)
    require(bool(clients), type(callback).__name__, trainer.methods.names, "all clients attack; take the callback out")
    return clients


def merge_sorted(parts: Iterable[Mapping[Key, Value]]) -> dict[Key, Value]:
    """Return the items of all workers in ascending order of clients or batches."""
    merged: dict[Key, Value] = {}
    for part in parts:
        merged |= part
    return dict(sorted(merged.items(), key=itemgetter(0)))


def finite_mean(values: Any) -> float:
    """Return the mean of the numbers except nan; nan without numbers."""
    array = np.asarray(values, dtype=np.float64)
    return float(np.nanmean(array)) if np.isfinite(array).any() else float("nan")


def quotient(numerator: Any, denominator: Any) -> np.ndarray:
    """Return the quotient; nan unless the denominator is above 0."""
    numerator, denominator = np.asarray(numerator), np.asarray(denominator)
    return np.divide(numerator, np.where(denominator > 0, denominator, np.nan))


def log_finite(trainer: RunContext, values: Mapping[str, float], prefix: str = "") -> None:
    """Log the finite values."""
    for name, value in values.items():
        if np.isfinite(value):
            trainer.log(prefix + name, value)


# ---------------------------------------------------------------------- refusals
def require_test_data(trainer: RunContext, callback: Callback) -> None:
    """Refuse data without test data."""
    hint = "no test data; add a test_dataloader"
    key = f"{type(callback).__name__} with the data"
    require(trainer.has_data("test"), key, type(trainer.data).__name__, hint)


def has_test_step(trainer: RunContext) -> bool:
    """Return whether the module has a step that evaluates test data."""
    return bool({"test_step", "validation_step"} & trainer.client.worker_module.hooks)


def require_label_counts(trainer: RunContext, callback: Callback, remedy: str = "take the callback out") -> int:
    """Return the number of classes; refuse clients without label counts."""
    counts, key = trainer.data.info(0).label_counts, f"{type(callback).__name__} with the data"
    require(counts is not None, key, type(trainer.data).__name__, f"clients without label counts; {remedy}")
    return len(counts)


def require_global_model(trainer: RunContext, callback: Callback, remedy: str = "take the callback out") -> None:
    """Refuse a run without a global model, because entries of the state stay with the clients."""
    hint = f"the run has no global model; {remedy}"
    key, num_kept = f"{type(callback).__name__} with entries that stay with the clients", len(trainer.client.kept)
    require(trainer.client.has_global_model, key, num_kept, hint)


def classifier_of(
    trainer: RunContext,
    callback: Callback,
    remedy: str = "bind it to the last linear layer",
    classes: int | None = None,
) -> Any:
    """Return the layer of the tap ``logits``; refuse a layer without a weight matrix of ``classes`` rows."""
    who, path = type(callback).__name__, trainer.client.tap_paths["logits"]
    layer: nn.Module = trainer.client.module.get_submodule(path)
    weight = getattr(layer, "weight", None)
    if not (isinstance(weight, Tensor) and weight.ndim == 2):
        raise UsageError(f"{who}: the tap logits={path!r} has no weight matrix; {remedy}")
    fits = classes in (None, len(weight))
    require(fits, f"{who}: rows of {path}", len(weight), f"the labels have {classes} classes")
    return layer


def class_groups(counts: np.ndarray, threshold: float = 1.0) -> dict[str, np.ndarray]:
    """Return the majority, minority and missing classes of PerClassAccuracy, each as a boolean ``(C,)``.

    ``counts (C,)`` are the client's training examples of each class; a threshold of 1 is an even division.
    """
    missing = counts == 0
    majority = ~missing & (counts >= threshold * counts.sum() / len(counts))
    return {"majority": majority, "minority": ~missing & ~majority, "missing": missing}
