"""Callbacks observe a run; they never change what it computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from fl_lightning.client import Client
    from fl_lightning.trainer import FederatedTrainer


class Callback:
    """The hooks of an observer; each does nothing until it is overridden.

    With several workers every one has its own copy, and calls its hooks alike, but for :meth:`on_client_end` and
    :meth:`on_evaluation_batch_end`, which see what that worker trains and evaluates. ``trainer.team.gather`` hands over
    what the others have seen, and ``trainer.run_dir`` is None on all but the one that writes.

    Attributes:
        requires: names of the taps it reads in :meth:`on_evaluation_batch_end`, checked before round 0.
    """

    requires: tuple[str, ...] = ()

    def wants_evaluation(self, round_: int) -> bool:
        """Whether the global model is to be evaluated in this round, whatever ``eval_every_n_rounds`` says."""
        return False

    def setup(self, trainer: FederatedTrainer) -> None:
        """Before anything is written: refuse with a UsageError what does not fit."""

    def on_fit_start(self, trainer: FederatedTrainer) -> None:
        """Everything is checked and the run's folder is there; no client has trained."""

    def on_round_start(self, trainer: FederatedTrainer) -> None:
        """The cohort of ``trainer.server.round`` is drawn."""

    def on_client_end(self, trainer: FederatedTrainer, client: Client) -> None:
        """A client has trained, on this worker; its local model is still in ``client.module``."""

    def on_evaluation_batch_end(self, trainer: FederatedTrainer, phase: str, taps: dict[str, Tensor]) -> None:
        """A batch of the ``val`` or ``test`` data has been evaluated; ``taps`` hold its activations, ``(B, ...)``."""

    def on_evaluation_end(self, trainer: FederatedTrainer, phase: str) -> None:
        """A model has been evaluated on ``phase``: the global one, or each client's own where entries do not travel."""

    def on_round_end(self, trainer: FederatedTrainer) -> None:
        """The server has stepped and the global model is evaluated where that is due; ``trainer.log`` still counts."""

    def on_fit_end(self, trainer: FederatedTrainer) -> None:
        """The last round is done."""

    def state_dict(self) -> dict[str, Any]:
        """What a run that goes on from a checkpoint needs of it: tensors and plain values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave, after :meth:`on_fit_start`; empty where the callback is new."""

    def teardown(self, trainer: FederatedTrainer) -> None:
        """The run is over, or has failed."""
