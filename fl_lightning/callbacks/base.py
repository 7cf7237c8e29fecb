"""Callbacks observe a run, and never change its result."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from fl_lightning.client import Client
from fl_lightning.client.run_context import RunContext
from fl_lightning.storage.hyperparameters import numbered

AnyObject = TypeVar("AnyObject")


class Callback:
    """The hooks of an observer; each does nothing until it is overridden.

    Arguments are passed by name, so an override keeps their names.

    Each worker has a copy and calls the same hooks. :meth:`on_client_end` and :meth:`on_evaluation_batch_end` see only
    the clients and batches of this worker; ``trainer.gather`` and ``trainer.all_reduce`` combine the observations of
    all workers. ``trainer.run_dir`` is None except on the worker that writes. Callbacks may use the members of
    :class:`~fl_lightning.client.run_context.RunContext`.

    Attributes:
        requires: names of the taps for :meth:`on_evaluation_batch_end`, checked before round 0.
        panels: charts for TensorBoard's page Custom Scalars: a regular expression for the beginning of tags, by panel
            and title, as in ``{"Classes": {"worst class": "class/worst$"}}``.
    """

    requires: tuple[str, ...] = ()
    panels: Mapping[str, Mapping[str, str]] = {}

    @property
    def needs_client_access(self) -> bool:
        """Whether the callback needs access to clients after their visits, which a federation of sites refuses."""
        return type(self).on_client_end is not Callback.on_client_end

    def requires_evaluation(self, round_: int) -> bool:
        """Return whether to evaluate the global model in this round, regardless of ``eval_every_n_rounds``.

        Schedules and ``EarlyStopping`` do not see such an evaluation.
        """
        return False

    def needs_local_models(self, round_: int) -> bool:
        """Return whether the callback observes the evaluation of personalized models, which is then sequential.

        By default True for a callback with :meth:`on_evaluation_batch_end` or :meth:`on_evaluation_end`.
        """
        names = ("on_evaluation_batch_end", "on_evaluation_end")
        return any(getattr(type(self), name) is not getattr(Callback, name) for name in names)

    def setup(self, trainer: RunContext) -> None:
        """Called by every command before it writes; raise a UsageError for a run that does not fit."""

    def on_fit_start(self, trainer: RunContext) -> None:
        """Called after all checks, when the run's folder exists and no client has trained."""

    def on_round_start(self, trainer: RunContext) -> None:
        """Called after the cohort of ``trainer.server.round`` is drawn."""

    def on_client_end(self, trainer: RunContext, client: Client) -> None:
        """Called after a client has trained on this worker; its local model is still in ``client.module``.

        Workers do not wait for each other here: ``trainer.gather`` and ``trainer.all_reduce`` see only this worker.
        """

    def on_visits_end(self, trainer: RunContext, number: int) -> None:
        """Called after a ``number`` of clients have trained on this worker, without access to them."""

    def on_evaluation_batch_end(
        self, trainer: RunContext, phase: str, batch: Any, targets: Tensor | None, taps: dict[str, Tensor]
    ) -> None:
        """Called after each batch of ``val`` or ``test`` data that this worker evaluates.

        Args:
            trainer: the trainer.
            phase: ``val`` or ``test``.
            batch: the argument of the module's step.
            targets: its labels ``(B,)``, or None.
            taps: the activations named in :attr:`requires`, ``(B, ...)`` each.
        """

    def on_evaluation_end(self, trainer: RunContext, phase: str, client: int | None = None) -> None:
        """Called after a model is evaluated on all data of ``phase``.

        ``client`` is None for the global model, and the id of a client for its personalized model, whose evaluation is
        by one worker alone, as in :meth:`on_client_end`.
        """

    def on_evaluation_command_end(self, trainer: RunContext, phase: str) -> None:
        """Called after ``validate`` or ``test`` has evaluated a model, now the global model of ``trainer``.

        No round was run. Values from ``trainer.log`` are added to the metrics that the command returns.

        Args:
            trainer: the trainer.
            phase: ``val`` or ``test``.
        """

    def on_round_end(self, trainer: RunContext) -> None:
        """Called after the server's step and the evaluation; ``trainer.log`` still logs into this round."""

    def on_last_round_end(self, trainer: RunContext) -> None:
        """Called after :meth:`on_round_end` of all callbacks in the last round, by ``max_rounds`` or ``should_stop``.

        The final model is evaluated, and ``trainer.log`` still logs into this round.
        """

    def on_fit_end(self, trainer: RunContext) -> None:
        """Called after the last round."""

    def summary_of_fit(self) -> str:
        """Return the text for the console at the end of a fit, ``validate`` or ``test``; empty by default."""
        return ""

    def state_dict(self) -> dict[str, Any]:
        """Return the callback's part of a checkpoint: tensors and plain values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`, after :meth:`on_fit_start`.

        ``state`` is empty for a new callback.
        """

    def teardown(self, trainer: RunContext) -> None:
        """Called at the end of a fit, and after a failure."""


def named(objects: Sequence[AnyObject]) -> dict[str, AnyObject]:
    """Return objects by class name, with a number from the second object of a class on."""
    return dict(zip(numbered(type(value).__name__ for value in objects), objects, strict=True))


def logged_instead(trainer: RunContext) -> str | None:
    """Return a text about the metrics of a round that lacks one; None after a round without evaluation or update."""
    if not (trainer.evaluation_is_due and trainer.metrics.get("clients")):
        return None
    pattern = re.compile("(train|val|test|rank|drift)[/_]")
    tags = sorted(filter(pattern.match, trainer.metrics))
    return f"round {trainer.server.round} does not log it; among others it logs {', '.join(tags)}"
