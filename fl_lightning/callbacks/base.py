"""Callbacks observe a run, and never change its result."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from fl_lightning.callbacks.access import RunAccess
from fl_lightning.client import Client
from fl_lightning.records.hyperparameters import numbered

AnyObject = TypeVar("AnyObject")
# for callbacks of Lightning's own trainer, whose hooks mean something else: by class name, for subclasses, too
REPLACEMENTS = {
    "EarlyStopping": "give fl_lightning.callbacks.EarlyStopping",
    "ModelCheckpoint": "checkpoints are written every trainer.checkpoint_every_n_rounds rounds, and "
    "fl_lightning.callbacks.BestCheckpoint keeps the best",
    "OnExceptionCheckpoint": "checkpoints are written every trainer.checkpoint_every_n_rounds rounds; take it out",
    "LearningRateMonitor": "the clients' learning rate is logged as lr; take it out",
    "ProgressBar": "trainer.enable_progress_bar shows a bar over the rounds; take it out",
    "Timer": "seconds are logged as time/...; take it out",
    "BasePredictionWriter": "the command predict writes what it returns; take it out",
}
OWN_INSTEAD = "write a fl_lightning.callbacks.Callback, see docs/own_callback.md"


class Callback:
    """The hooks of an observer; each does nothing until it is overridden.

    Arguments are passed by name, so an override keeps the names of those it takes.

    With several workers, each worker has its own copy and calls the same hooks. :meth:`on_client_end` and
    :meth:`on_evaluation_batch_end` see only what this worker trains and evaluates; ``trainer.gather`` and
    ``trainer.all_reduce`` bring the workers' observations together. ``trainer.run_dir`` is None on all workers except
    the one that writes. Callbacks may use the members of :class:`~fl_lightning.callbacks.access.RunAccess`.

    Attributes:
        requires: names of the taps it reads in :meth:`on_evaluation_batch_end`, checked before round 0.
        panels: charts for TensorBoard's page Custom Scalars: by panel and title, a regular expression that the
            beginning of a tag matches, as in ``{"Classes": {"worst class": "class/worst$"}}``.
    """

    requires: tuple[str, ...] = ()
    panels: Mapping[str, Mapping[str, str]] = {}

    @property
    def sees_clients(self) -> bool:
        """Whether it looks at clients after their visits, which is refused where these are at sites of their own."""
        return type(self).on_client_end is not Callback.on_client_end

    def wants_evaluation(self, round_: int) -> bool:
        """Whether the global model is to be evaluated in this round, whatever ``eval_every_n_rounds`` says."""
        return False

    def sees_own_models(self, round_: int) -> bool:
        """Whether it is to see the clients' own models as they are evaluated in this round, which are then one by one.

        By default this is so where it has :meth:`on_evaluation_batch_end` or :meth:`on_evaluation_end`.
        """
        names = ("on_evaluation_batch_end", "on_evaluation_end")
        return any(getattr(type(self), name) is not getattr(Callback, name) for name in names)

    def setup(self, trainer: RunAccess) -> None:
        """Every command, before it writes anything: look at the run, and refuse with a UsageError what does not fit."""

    def on_fit_start(self, trainer: RunAccess) -> None:
        """Everything is checked and the run's folder exists; no client has trained in this run."""

    def on_round_start(self, trainer: RunAccess) -> None:
        """The cohort of ``trainer.server.round`` is drawn."""

    def on_client_end(self, trainer: RunAccess, client: Client) -> None:
        """A client has trained, on this worker, and sends an update; its local model is still in ``client.module``.

        Here a worker is on its own: ``trainer.gather`` and ``trainer.all_reduce`` leave out the others.
        """

    def on_evaluation_batch_end(
        self, trainer: RunAccess, phase: str, batch: Any, targets: Tensor | None, taps: dict[str, Tensor]
    ) -> None:
        """A batch of the ``val`` or ``test`` data has been evaluated, on this worker.

        Args:
            trainer: the trainer.
            phase: ``val`` or ``test``.
            batch: as the module's step got it.
            targets: its labels ``(B,)``, None where it has none.
            taps: the activations named in :attr:`requires`, ``(B, ...)`` each.
        """

    def on_evaluation_end(self, trainer: RunAccess, phase: str, client: int | None = None) -> None:
        """A model has been evaluated on ``phase``.

        It is the global one, with ``client`` None; or, where entries of the state do not travel, the own model of
        ``client``. There a worker is on its own, as in :meth:`on_client_end`.
        """

    def on_evaluation_command_end(self, trainer: RunAccess, phase: str) -> None:
        """``validate`` or ``test`` has evaluated a model, which is now the global one of ``trainer``.

        No round was run. What ``trainer.log`` gets is added to the metrics that the command returns.

        Args:
            trainer: the trainer.
            phase: ``val`` or ``test``.
        """

    def on_round_end(self, trainer: RunAccess) -> None:
        """The server has stepped, and the model was evaluated if that was due; ``trainer.log`` still counts."""

    def on_last_round_end(self, trainer: RunAccess) -> None:
        """The present round is the last, by ``max_rounds`` or ``should_stop``; ``trainer.log`` still counts.

        All callbacks have had :meth:`on_round_end`, and the final model is evaluated.
        """

    def on_fit_end(self, trainer: RunAccess) -> None:
        """The last round is done."""

    def summary_of_fit(self) -> str:
        """Return the text for the console at the end of a fit, ``validate`` or ``test``; empty by default."""
        return ""

    def state_dict(self) -> dict[str, Any]:
        """Return the callback's part of a checkpoint: tensors and plain values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave, after :meth:`on_fit_start`; ``state`` is empty for a new callback."""

    def teardown(self, trainer: RunAccess) -> None:
        """A fit is over, or has failed."""


def states(callbacks: list[Callback]) -> dict[str, dict[str, Any]]:
    """Return the state of each callback, by its name in a checkpoint."""
    return {name: callback.state_dict() for name, callback in named(callbacks).items()}


def load_states(callbacks: list[Callback], state: dict[str, dict[str, Any]]) -> None:
    """Restore what :func:`states` gave; a callback that was not there gets an empty state."""
    for name, callback in named(callbacks).items():
        callback.load_state_dict(state.get(name, {}))


def named(objects: Sequence[AnyObject]) -> dict[str, AnyObject]:
    """Each object by class name, with a number from the second of a class on."""
    return dict(zip(numbered(type(value).__name__ for value in objects), objects, strict=True))


def logged_instead(trainer: RunAccess) -> str | None:
    """Name the metrics of a round, for one that lacks another; None after a round that need not be evaluated."""
    done = trainer.server.round + 1
    if done % trainer.eval_every_n_rounds != 0 and done != trainer.max_rounds:
        return None
    tags = sorted(tag for tag in trainer.metrics if re.match("(train|val|test|rank|drift)[/_]", tag))
    return f"round {trainer.server.round} does not log it; among others it logs {', '.join(tags)}"


def replacement(kind: type) -> str:
    """Name the replacement of a callback of this class."""
    return next((REPLACEMENTS[base.__name__] for base in kind.__mro__ if base.__name__ in REPLACEMENTS), OWN_INSTEAD)
