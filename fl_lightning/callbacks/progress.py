"""A progress bar over the rounds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from fl_lightning.callbacks.base import Callback

if TYPE_CHECKING:
    from fl_lightning.client import Client
    from fl_lightning.trainer import FederatedTrainer


class ProgressBar(Callback):
    """Rounds done, time left, accuracy and loss; nothing where the output is not a terminal."""

    def on_fit_start(self, trainer: FederatedTrainer) -> None:
        # disable=None asks tqdm to be quiet when it does not write to a terminal
        quiet = None if trainer.global_rank == 0 else True
        self._bar: Any = tqdm(total=trainer.max_rounds, desc="rounds", unit="round", disable=quiet)
        self._shown: dict[str, str] = {}

    def on_round_start(self, trainer: FederatedTrainer) -> None:
        self._clients = 0

    def on_client_end(self, trainer: FederatedTrainer, client: Client) -> None:
        self._clients += 1
        self._bar.set_postfix({**self._shown, "clients": f"{self._clients}/{len(trainer.server.cohort)}"})

    def on_round_end(self, trainer: FederatedTrainer) -> None:
        names = ("test/accuracy", "test/loss", "train/loss")
        self._shown |= {name: f"{trainer.metrics[name]:.4f}" for name in names if name in trainer.metrics}
        self._bar.set_postfix(self._shown, refresh=False)
        self._bar.update()

    def teardown(self, trainer: FederatedTrainer) -> None:
        if hasattr(self, "_bar"):
            self._bar.close()
