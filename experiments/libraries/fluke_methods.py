"""Measures differences between fluke's methods and the papers on a linear model, and its resumed runs; makes fluke.csv.

In an environment of its own: ``pip install fluke-fl==0.8.1``, then
``python experiments/libraries/fluke_methods.py > experiments/libraries/fluke.csv``.
"""

import copy
import csv
import sys
import tempfile
from importlib.metadata import version

import torch
from fluke import DDict, FlukeENV
from fluke.algorithms.apfl import APFLClient
from fluke.algorithms.fedamp import FedAMPClient
from fluke.algorithms.fedavg import FedAVG
from fluke.algorithms.fedavgm import FedAVGMServer
from fluke.algorithms.fedsam import SAMOptimizer
from fluke.algorithms.per_fedavg import PerFedAVGClient, PerFedAVGOptimizer
from fluke.algorithms.pfedme import PFedMeClient, PFedMeOptimizer
from fluke.config import OptimizerConfigurator
from fluke.data import DataSplitter, FastDataLoader
from fluke.data.datasets import DataContainer
from fluke.evaluation import ClassificationEval
from torch import nn
from torch.nn.functional import cross_entropy

LR = 0.1


def linear(seed):
    """Return a linear classifier with 4 inputs and 3 classes."""
    torch.manual_seed(seed)
    return nn.Linear(4, 3)


def batches():
    """Return a loader of one batch."""
    torch.manual_seed(0)
    return FastDataLoader(torch.randn(8, 4), torch.arange(8) % 3, num_labels=3, batch_size=8)


def client(kind, optimizer=torch.optim.SGD, **arguments):
    """Return a client of fluke with one batch, which trains for one epoch."""
    settings = OptimizerConfigurator({"name": optimizer, "lr": LR, **arguments.pop("of_optimizer", {})})
    data, loss = batches(), nn.CrossEntropyLoss()
    return kind(
        index=0, train_set=data, test_set=data, optimizer_cfg=settings, loss_fn=loss, local_epochs=1, **arguments
    )


def gradient(model, loader):
    """Return the gradient of the loss, as one vector."""
    (x, y), *_ = loader
    found = torch.autograd.grad(cross_entropy(model(x), y), [*model.parameters()])
    return torch.cat([part.flatten() for part in found])


def vector(model):
    """Return the parameters as one vector."""
    return torch.cat([value.detach().flatten() for value in model.parameters()])


def fedavgm():
    """The distance that the server's model moves in a round with one client, over the client's change."""
    begun, trained = linear(0), linear(1)
    server = FedAVGMServer(copy.deepcopy(begun), None, [client(PFedMeClient, k=1)], weighted=False, momentum=0.9)
    moved = []
    for _ in range(2):
        before = vector(server.model)
        server.aggregate(server.clients, [copy.deepcopy(trained)])
        moved.append(float((vector(server.model) - before).norm() / (vector(trained) - before).norm()))
    return moved


def fedasam():
    """The perturbation of a bias of 0 by its gradient, and of one of 1."""
    model = linear(0)
    model.bias.data = torch.tensor([0.0, 1.0, 1.0])
    optimizer = SAMOptimizer(model.parameters(), rho=0.5, adaptive=True, lr=LR)
    (x, y), *_ = batches()
    cross_entropy(model(x), y).backward()
    before = model.bias.detach().clone()
    optimizer.first_step()
    return (model.bias - before).abs()[:2].tolist()


def pfedme():
    """The model after a visit with lambda 0 and with lambda 15: the norm of their difference."""
    results = []
    for lamda in (0.0, 15.0):
        one = client(PFedMeClient, PFedMeOptimizer, k=5, of_optimizer={"lamda": lamda, "mu": 0.0})
        one.model, one.internal_model = linear(0), linear(0)
        one.fit()
        results.append(vector(one.model))
    return [float((results[0] - results[1]).norm())]


def apfl():
    """The norm of the gradient that the personal model has after a visit."""
    one = client(APFLClient, model=linear(1), lam=0.25)
    one.model, personal = linear(0), one.personalized_model
    one.fit()
    return [sum(0.0 if p.grad is None else float(p.grad.norm()) for p in personal.parameters())]


def perfedavg():
    """Distances of the result of a step from those of the paper's outer step and of two steps of SGD."""
    beta, model = 0.05, linear(0)
    one = client(PerFedAVGClient, PerFedAVGOptimizer, mode="FO", beta=beta)
    one.model = copy.deepcopy(model)
    one._get_next_batch = lambda: next(iter(batches()))
    one.fit()
    inner = copy.deepcopy(model)
    for value, grad in zip(inner.parameters(), torch.autograd.grad(loss_of(model), [*model.parameters()]), strict=True):
        value.data -= LR * grad
    outer = beta * gradient(inner, batches())
    return [float((vector(one.model) - start + outer).norm()) for start in (vector(model), vector(inner))]


def loss_of(model):
    """Return the loss on the one batch."""
    (x, y), *_ = batches()
    return cross_entropy(model(x), y)


def fedamp():
    """The coefficient of the proximal term, of a client with lambda 1 and a learning rate of 0.1 and of 0.01."""
    found = []
    for lr in (0.1, 0.01):
        one = client(FedAMPClient, model=linear(1), lam=1.0, of_optimizer={"lr": lr})
        one.model = linear(0)
        one.optimizer, one.scheduler = one._optimizer_cfg(one.model)
        gap = (vector(one.model) - vector(one.personalized_model)).square().sum()
        found.append(float(one._proximal_loss(one.model, one.personalized_model) / gap))
    return found


def federation():
    """Return a run of FedAvg with four clients, which has not begun."""
    FlukeENV().set_seed(0)
    FlukeENV().set_evaluator(ClassificationEval(1, 3))
    x, y = torch.randn(80, 4), torch.arange(80) % 3
    optimizer, scheduler = DDict(name="SGD", lr=LR), DDict(name="StepLR", step_size=1, gamma=1)
    of_client = DDict(batch_size=8, local_epochs=1, loss="CrossEntropyLoss", optimizer=optimizer, scheduler=scheduler)
    settings = DDict(model=linear(0), client=of_client, server=DDict(weighted=True))
    return FedAVG(4, DataSplitter(DataContainer(x, y, x[:20], y[:20], 3), distribution="iid"), settings)


def resumed():
    """The largest difference of a run's weights from those of its repetition, and of a run resumed after 2 rounds."""
    runs = [federation() for _ in range(4)]
    begun, last = runs[2], runs[3]
    for run in runs[:2]:
        FlukeENV().set_seed(0)
        run.run(4, 1.0)
    FlukeENV().set_seed(0)
    begun.run(2, 1.0)
    with tempfile.TemporaryDirectory() as folder:
        path = begun.save(folder)
        FlukeENV().set_seed(0)
        last.load(path)
        last.run(2, 1.0)
    return [float((vector(runs[0].server.model) - vector(run.server.model)).abs().max()) for run in (runs[1], last)]


MEASURED = {"FedAvgM": fedavgm, "FedASAM": fedasam, "PFedMe": pfedme, "APFL": apfl, "PerFedAvg": perfedavg}
MEASURED |= {"FedAMP": fedamp, "resumed runs": resumed}

if __name__ == "__main__":
    output, sys.stdout = sys.stdout, sys.stderr  # fluke prints
    rows = csv.writer(output, lineterminator="\n")
    rows.writerow(["library", "version", "method", "measured", "values"])
    for method, measure in MEASURED.items():
        text = measure.__doc__.rstrip(".")
        rows.writerow(["fluke", version("fluke-fl"), method, text, " ".join(f"{x:.6g}" for x in measure())])
