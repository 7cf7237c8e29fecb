"""fluke, in one process as it always is."""

from __future__ import annotations

import argparse

import torch
from fluke import DDict, FlukeENV
from fluke.algorithms.fedavg import FedAVG
from fluke.data import DataSplitter, DummyDataContainer
from fluke.evaluation import ClassificationEval
from fluke.utils import ClientObserver, FederationObserver, ServerObserver
from overhead import BATCH, CLIENTS, LR
from torchmetrics import Accuracy

from fl_lightning.data import Batches
from sides.work import Gate, first_model, in_order, load_data

PACKAGES = ("torch", "fluke-fl")


class Boundary(FederationObserver, ServerObserver, ClientObserver):
    """The gate stands after each round; a client's batches are put in the order of the round before it trains."""

    accuracy: float | None = None

    def __init__(self, gate: Gate, loaders: list[Batches]) -> None:
        self.gate, self.loaders = gate, loaders

    def start_fit(self, round: int, client_id: int, **kwargs: object) -> None:
        in_order(self.loaders[client_id], round - 1, client_id)

    def server_evaluation(self, round: int, eval_type: str, evals: dict[str, float], **kwargs: object) -> None:
        self.accuracy = evals["accuracy"]

    def end_round(self, round: int) -> None:
        self.gate.turn(self.accuracy)


def parameters(model: torch.nn.Module) -> DDict:
    client = {
        "batch_size": BATCH,
        "local_epochs": 1,
        "loss": "CrossEntropyLoss",
        "optimizer": {"name": "SGD", "lr": LR, "momentum": 0.9},
        "scheduler": {"name": "StepLR", "step_size": 1, "gamma": 1},
        "persistency": False,  # momentum is reset in each round, as on the other sides
    }
    return DDict(model=model, client=client, server={"weighted": False})


def run(args: argparse.Namespace, gate: Gate) -> None:
    torch.set_num_threads(args.threads)
    model, data = first_model(args), load_data(args)
    data.setup()
    loaders = [data.train_dataloader(k) for k in range(CLIENTS)]
    container = DummyDataContainer(loaders, [None] * CLIENTS, data.test_dataloader(), data.num_classes)
    accuracy = Accuracy(task="multiclass", num_classes=data.num_classes)
    FlukeENV().set_evaluator(ClassificationEval(1, data.num_classes, accuracy=accuracy))
    federation = FedAVG(CLIENTS, DataSplitter(container), parameters(model))
    federation.set_callbacks([Boundary(gate, loaders)])
    gate.turn()
    federation.run(args.rounds, 1.0)
