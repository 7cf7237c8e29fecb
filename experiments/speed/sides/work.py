"""Shared by all sides: the gate that pauses a loop between its rounds, the data and the model."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from types import SimpleNamespace
from typing import Any

from lightning.fabric import Fabric
from lightning.pytorch import seed_everything
from overhead import BATCH, CLIENTS, build

from fl_lightning.core.seeding import derive_seed
from fl_lightning.data import Batches, NpyImages
from fl_lightning.models import ImageClassifier

SEED = 0


class Gate:
    """Pauses a loop between its rounds: reports the duration of the last one, and blocks until a line arrives.

    The gate takes over the standard output, to which nothing else can be written from then on.

    Args:
        rounds: rounds until the loop may run to its end.
    """

    def __init__(self, rounds: int) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._left = rounds
        self._began: float | None = None

    def tell(self, **what: object) -> None:
        print(json.dumps(what), file=self._out, flush=True)

    def turn(self, accuracy: float | None = None) -> None:
        """The first round is about to begin, or one has ended with this accuracy.

        After the last it waits too, so that no side ends while another has its turn.
        """
        if self._began is None:
            self.tell(ready=True)
        else:
            self.tell(seconds=time.perf_counter() - self._began, accuracy=accuracy)
            self._left -= 1
        if not sys.stdin.readline() and self._left:
            raise EOFError("the controlling process has ended")
        self._began = time.perf_counter()


def load_data(args: argparse.Namespace) -> NpyImages:
    """The clients and their batches, which every side reads."""
    sizes = {"train_size": CLIENTS * args.images, "test_size": args.test}
    return NpyImages(args.folder, num_clients=CLIENTS, batch_size=BATCH, **sizes)


def first_model(args: argparse.Namespace) -> ImageClassifier:
    """The model with the weights that every side begins with."""
    seed_everything(SEED, verbose=False)
    return build(args.model)


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of our trainer that a side receives."""
    return {"precision": args.precision, "channels_last": args.channels_last}


def without_trainer(args: argparse.Namespace) -> SimpleNamespace:
    """The attributes of a trainer that the bare loop reads."""
    data = load_data(args)
    data.setup()
    fabric = Fabric(accelerator="cpu", devices=1)
    server, run = SimpleNamespace(round=0), SimpleNamespace(loaders=SimpleNamespace(channels_last=False))
    return SimpleNamespace(data=data, seed=SEED, server=server, fabric=fabric, run=run)


def in_order(loader: Batches, round_: int, k: int) -> Batches:
    """The batches of client ``k``, which are to come in the order that our trainer gives them in a round."""
    loader.generator.manual_seed(derive_seed(SEED, "batches", round_, k))
    return loader
