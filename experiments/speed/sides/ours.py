"""Our trainer."""

from __future__ import annotations

import argparse
from pathlib import Path

from fl_lightning import FederatedTrainer
from fl_lightning.callbacks import Callback
from sides.work import Gate, first_model, load_data

PACKAGES = ("torch", "lightning")


class Boundary(Callback):
    """The gate stands before each round and after the last."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def on_round_start(self, trainer: FederatedTrainer) -> None:
        self._turn(trainer)

    def on_fit_end(self, trainer: FederatedTrainer) -> None:
        self._turn(trainer)

    def _turn(self, trainer: FederatedTrainer) -> None:
        if trainer.global_rank == 0:
            self.gate.turn(trainer.history[-1]["test/accuracy"] if trainer.history else None)


def run(args: argparse.Namespace, gate: Gate) -> None:
    model = first_model(args)
    trainer = FederatedTrainer(
        max_rounds=args.rounds,
        devices=args.devices,
        threads_per_worker=args.threads // args.devices,
        precision=args.precision,
        channels_last=args.channels_last,
        callbacks=[Boundary(gate)],
        default_root_dir=Path(args.folder, "runs"),
        enable_progress_bar=False,
        accelerator="cpu",
    )
    trainer.fit(model, load_data(args))
