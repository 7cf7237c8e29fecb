"""Measure the cost of callbacks: the seconds of their hooks against a round of training.

python experiments/speed/callbacks.py [--images 10000] [--test 10000] [--width 4] [--threads 1]

FedUVCNN with its projector, 10 clients, batch 64, images of 32 px. One round of one local epoch is timed without
callbacks. The callbacks then observe 11 rounds of a step a client, since their cost does not depend on the number of
steps. Rounds 1 to 10 contain the measurements of every ten rounds, whose cost is divided by ten rounds. Round 11 and
the end of the run contain the measurements made once in a run, with the figures.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
from overhead import generate, machine

from fl_lightning import FederatedTrainer  # found by overhead.py
from fl_lightning import callbacks as known
from fl_lightning.callbacks import Callback
from fl_lightning.data import NpyImages
from fl_lightning.models import FedUVCNN, ImageClassifier, Projector

KINDS = (
    *(known.SpectrumMonitor, known.NeuralCollapse, known.LayerSimilarity, known.LayerAlignment, known.Embedding),
    *(known.Drift, known.PerClassAccuracy, known.PersonalAccuracy, known.DeviationBound, known.CostLedger),
    known.LocalLosses,
)
NAMES = [kind.__name__ for kind in KINDS]
ROUNDS = 11


class Watch:
    """The seconds that a callback's hooks take in each round."""

    def __init__(self, callback: Callback) -> None:
        self.name = type(callback).__name__
        self.seconds = np.zeros(ROUNDS)
        for hook in (name for name in dir(Callback) if name.startswith("on_")):
            setattr(callback, hook, self.timed(getattr(callback, hook)))

    def timed(self, hook: Callable[..., None]) -> Callable[..., None]:
        @wraps(hook)
        def call(trainer: FederatedTrainer, *args: Any, **kwargs: Any) -> None:
            began = time.perf_counter()
            hook(trainer, *args, **kwargs)
            self.seconds[min(trainer.server.round, ROUNDS - 1)] += time.perf_counter() - began

        return call


class RoundTime(Callback):
    def on_round_start(self, trainer: FederatedTrainer) -> None:
        self.began = time.perf_counter()

    def on_round_end(self, trainer: FederatedTrainer) -> None:
        self.seconds = time.perf_counter() - self.began


def fit(args: argparse.Namespace, folder: Path, images: int, rounds: int, callbacks: list[Callback]) -> None:
    model = ImageClassifier(
        FedUVCNN(args.width), Projector(256), optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.9)
    )
    data = NpyImages(str(folder), num_clients=args.clients, batch_size=64, train_size=images)
    trainer = FederatedTrainer(
        max_rounds=rounds,
        threads_per_worker=args.threads,
        callbacks=callbacks,
        default_root_dir=str(folder),
        accelerator="cpu",
    )
    trainer.fit(model, data)


def measure(args: argparse.Namespace) -> tuple[float, list[Watch]]:
    """Return the seconds of a round without callbacks, and the seconds of each callback's hooks."""
    fit_progress, callbacks = RoundTime(), [getattr(known, name)() for name in args.callbacks]
    watches = [Watch(one) for one in callbacks]
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder), args.images, args.test)
        fit(args, Path(folder), args.images, 1, [fit_progress])
        fit(args, Path(folder), args.clients * 64, ROUNDS, callbacks)
    return fit_progress.seconds, watches


def report(args: argparse.Namespace, round_: float, watches: list[Watch]) -> None:
    print(f"{machine()}, {args.threads} threads")
    print(f"FedUVCNN width {args.width}, {args.images} images, {args.test} of test; a round: {round_:.1f} s")
    print(f"{'':18}{'s in ten rounds':>16}{'share of a round':>18}{'s at the end':>14}")
    for watch in watches:
        print(row(watch.name, watch.seconds, round_))
    print(row("together", sum(watch.seconds for watch in watches), round_))


def row(name: str, seconds: np.ndarray, round_: float) -> str:
    ten = seconds[:-1].sum()
    return f"{name:18}{ten:16.2f}{ten / 10 / round_:18.2%}{seconds[-1]:14.2f}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=10000)
    parser.add_argument("--test", type=int, default=10000)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--callbacks", nargs="+", choices=NAMES, default=NAMES)
    given = parser.parse_args()
    report(given, *measure(given))
