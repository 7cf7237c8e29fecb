"""The cases of small models: their data, their models, and what every side does between the turns."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from lightning.pytorch import seed_everything
from torch import Tensor, nn
from torch.nn.functional import max_pool2d, relu

from fl_lightning.core.sampling import UniformSampler
from fl_lightning.data import FederatedDataModule, NpyImages, Synthetic
from fl_lightning.data.array_datasets import cycled
from fl_lightning.data.partitioners import Partitioner
from fl_lightning.models import ImageClassifier, Logistic
from fl_lightning.models.encoders import Encoder
from sides.work import SEED, Gate, in_order

State = dict[str, Tensor]
Visit = tuple[Tensor, Tensor]  # the examples of a client, in the order in which it trains on them


@dataclass(frozen=True)
class Case:
    """Numbers of clients in all, of clients in a round and of examples in a batch, and the learning rate."""

    clients: int
    cohort: int
    batch: int
    lr: float


CASES = {"synthetic": Case(100, 100, 10, 0.01), "femnist": Case(1000, 50, 20, 0.1)}


class EmnistCNN(Encoder):
    """The CNN for EMNIST of fedjax, without its last layer."""

    out_features = 128

    def __init__(self, dropout: bool) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3)
        self.linear = nn.Linear(64 * 12 * 12, 128)
        self.dropouts = nn.ModuleList([nn.Dropout(0.25), nn.Dropout(0.5)] if dropout else [nn.Identity()] * 2)

    def forward(self, x: Tensor) -> Tensor:
        x = max_pool2d(relu(self.conv2(relu(self.conv1(x)))), 2)
        return self.dropouts[1](relu(self.linear(self.dropouts[0](x).flatten(1))))


class InSizes(Partitioner):
    """Assigns consecutive examples to clients of given sizes."""

    def __init__(self, sizes: np.ndarray) -> None:
        self.sizes = sizes

    def __call__(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        return np.split(np.arange(len(labels)), np.cumsum(self.sizes)[:-1])


def sizes_of(clients: int) -> np.ndarray:
    """How many examples the clients of ``femnist`` have: 20 to 350, the median is about 90."""
    return np.random.default_rng(0).lognormal(4.5, 0.6, clients).astype(int).clip(20, 350)


def generate(folder: Path, clients: int) -> None:
    """Write noise as the images of ``femnist``, on which the duration of a step does not depend."""
    rng = np.random.default_rng(0)
    for split, number in (("train", int(sizes_of(clients).sum())), ("test", 62)):
        np.save(folder / f"{split}_images.npy", rng.integers(0, 256, (number, 28, 28), np.uint8))
        np.save(folder / f"{split}_labels.npy", cycled(62, number))


def load_data(args: argparse.Namespace) -> FederatedDataModule:
    batch = CASES[args.case].batch
    if args.case == "synthetic":
        return Synthetic(1, 1, num_clients=args.clients, batch_size=batch, largest=1000)
    how = {"num_clients": args.clients, "partitioner": InSizes(sizes_of(args.clients)), "batch_size": batch}
    return NpyImages(args.folder, **how)


def first_model(args: argparse.Namespace) -> ImageClassifier:
    """The model with the weights that every side begins with."""
    seed_everything(SEED, verbose=False)
    synthetic = args.case == "synthetic"
    encoder, classes = (Logistic(60), 10) if synthetic else (EmnistCNN(args.dropout), 62)
    return ImageClassifier(encoder, num_classes=classes, optimizer=partial(torch.optim.SGD, lr=CASES[args.case].lr))


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of our trainer: it evaluates after the last round only, since the other sides do not evaluate."""
    more = {name: yaml.safe_load(value) for name, value in (option.split("=", 1) for option in args.option)}
    return {"cohort_size": args.cohort, "precision": "32-true", "eval_every_n_rounds": args.rounds, **more}


def cohorts(args: argparse.Namespace) -> list[list[int]]:
    """The clients of each round, as our trainer draws them."""
    return [UniformSampler()(SEED, round_, args.clients, args.cohort) for round_ in range(args.rounds)]


def steps(args: argparse.Namespace) -> list[int]:
    """The local steps of each round, of all its clients together."""
    seed_everything(SEED, verbose=False)
    data = load_data(args)
    data.setup()
    numbers = [math.ceil(size / CASES[args.case].batch) for size in data.plan.sizes]
    return [sum(numbers[k] for k in cohort) for cohort in cohorts(args)]


def visits(args: argparse.Namespace) -> list[list[Visit]]:
    """The visits of each round, with the examples in the order in which our trainer reads them."""
    data = load_data(args)
    data.setup()
    rounds = enumerate(cohorts(args))
    return [[whole(in_order(data.train_dataloader(k), round_, k)) for k in cohort] for round_, cohort in rounds]


def whole(batches: Iterable[Any]) -> Visit:
    x, y = (torch.cat(column) for column in zip(*batches, strict=True))
    return x, y


def bind(threads: int) -> None:
    """Bind this process to one core per thread, since XLA starts a thread for each core.

    On systems without this call, XLA uses all cores.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


def play(
    args: argparse.Namespace,
    gate: Gate,
    train: Callable[[Any, Any], Any],
    prepare: Callable[[list[Visit]], Any],
    start: Any,
    weights: Callable[[Any], State],
) -> None:
    """Train round after round. Batches lie ready before the first, which only our trainer has to gather in its time.

    Args:
        args: the arguments of the side.
        gate: holds the loop between its rounds.
        train: makes the next state from a state and what ``prepare`` makes of the visits.
        prepare: puts the visits of a round into the form that ``train`` wants; its time does not count.
        start: the state to begin with.
        weights: gives the weights of a state by their names in our model.
    """
    torch.set_num_threads(args.threads)
    state, rounds = start, [prepare(round_) for round_ in visits(args)]
    gate.turn()
    for round_ in rounds:
        state = train(state, round_)
        if args.save:
            torch.save(weights(state), args.save)
        gate.turn()
