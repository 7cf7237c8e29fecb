"""Apple's pfl-research, with the number of ranks that it is started with."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any

import numpy as np
import torch
from overhead import BATCH, CLIENTS, LR
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.callback.central_evaluation import CentralEvaluationCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.internal.ops.pytorch_ops import distributed
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel

from fl_lightning.data import Batches
from sides.work import SEED, Gate, first_model, in_order, load_data

PACKAGES = ("torch", "pfl")


class Loss(torch.nn.Module):
    """The model with the two functions that pfl calls."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.model.train()(x), y)

    @torch.no_grad()
    def metrics(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Weighted]:
        logits = self.model.eval()(x)
        return {"accuracy": Weighted(int((logits.argmax(1) == y).sum()), len(y))}


class Examples(Dataset):
    """Examples in our batches, which every pass draws again."""

    def __init__(self, open_batches: Callable[[], Batches]) -> None:
        super().__init__((open_batches().rows,))
        self.open_batches = open_batches

    def iter(self, batch_size: int | None) -> Any:
        return iter(self.open_batches())

    def get_worker_partition(self) -> Examples:
        mine = copy(self.open_batches())
        part = distributed.distribute_range(len(self))
        mine.rows = mine.rows[part.start : part.stop]
        return Examples(lambda: mine)


class Boundary(TrainingProcessCallback):
    """The gate stands after each round, and the other ranks wait there for the first."""

    round = 0

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        self._turn(None)
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        self.round = central_iteration + 1
        self._turn(aggregate_metrics.to_simple_dict().get("Central val | accuracy"))
        return False, Metrics()

    def _turn(self, accuracy: float | None) -> None:
        if distributed.global_rank == 0:
            self.gate.turn(accuracy)
        if distributed.world_size > 1:
            torch.distributed.barrier()


def parameters(args: argparse.Namespace) -> tuple[NNAlgorithmParams, NNTrainHyperParams, NNEvalHyperParams]:
    # clients' own models are evaluated in the first round only, which pfl does not let out
    rounds = {"central_num_iterations": args.rounds, "evaluation_frequency": args.rounds + 1}
    algorithm = NNAlgorithmParams(**rounds, train_cohort_size=CLIENTS, val_cohort_size=0)
    training = NNTrainHyperParams(local_batch_size=BATCH, local_num_epochs=1, local_learning_rate=LR)
    return algorithm, training, NNEvalHyperParams(local_batch_size=BATCH)


def run(args: argparse.Namespace, gate: Gate) -> None:
    torch.set_num_threads(args.threads // distributed.world_size)
    network, data, boundary = Loss(first_model(args)), load_data(args), Boundary(gate)
    np.random.seed(SEED)  # noqa: NPY002  # pfl's ranks draw alike from it
    data.setup()
    model = PyTorchModel(network, partial(torch.optim.SGD, momentum=0.9), torch.optim.SGD(network.parameters(), lr=1.0))
    everyone = itertools.cycle(range(CLIENTS)).__next__
    clients = FederatedDataset(
        lambda k: Examples(lambda: in_order(data.train_dataloader(k), boundary.round, k)), everyone
    )
    algorithm, training, evaluation = parameters(args)
    central = CentralEvaluationCallback(Examples(data.test_dataloader), evaluation)
    how = {"callbacks": [central, boundary], "send_metrics_to_platform": False}
    backend = SimulatedBackend(clients, clients)
    FederatedAveraging().run(algorithm, backend, model, training, evaluation, **how)
