"""Our trainer."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from fl_lightning import FederatedTrainer
from fl_lightning.callbacks import Callback
from sides import small, work
from sides.work import Gate

PACKAGES = ("torch", "lightning")


class Boundary(Callback):
    """Waits at the gate before each round and after the last, and saves the last weights on request."""

    def __init__(self, gate: Gate, save: str | None) -> None:
        self.gate, self.save = gate, save

    def on_round_start(self, trainer: FederatedTrainer) -> None:
        self._turn(trainer)

    def on_fit_end(self, trainer: FederatedTrainer) -> None:
        if self.save and trainer.global_rank == 0:
            torch.save(dict(trainer.server.state), self.save)
        self._turn(trainer)

    def _turn(self, trainer: FederatedTrainer) -> None:
        if trainer.global_rank == 0:
            self.gate.turn(trainer.history[-1].get("test/accuracy") if trainer.history else None)


def run(args: argparse.Namespace, gate: Gate) -> None:
    case = small if args.case in small.CASES else work
    model = case.first_model(args)
    trainer = FederatedTrainer(
        max_rounds=args.rounds,
        devices=args.devices,
        threads_per_worker=args.threads // args.devices,
        callbacks=[Boundary(gate, args.save)],
        default_root_dir=Path(args.folder, "runs"),
        enable_progress_bar=False,
        accelerator="cpu",
        **case.settings(args),
    )
    trainer.fit(model, case.load_data(args))
