"""Shared by the tests: one thread, one seed, and a small run on the embedded digits."""

from functools import partial

import pytest
import torch

from fl_lightning import FederatedTrainer
from fl_lightning.data import Digits, Dirichlet
from fl_lightning.models import MLP, FedCKACNN, ImageClassifier, Projector


@pytest.fixture(autouse=True)
def _same_start(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    torch.manual_seed(0)


def small_model(kind="mlp"):
    """A classifier of the digits: an MLP with a normalising projector, or FedCKA's CNN on 16 px."""
    torch.manual_seed(0)
    sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    if kind == "cnn":
        return ImageClassifier(FedCKACNN(1, 16), optimizer=sgd)
    return ImageClassifier(MLP(64, [32, 24]), Projector(16), optimizer=sgd)


def small_data(kind="mlp", **kwargs):
    given = {"num_clients": 4, "batch_size": 32, "train_size": 400, "partitioner": Dirichlet(0.3)}
    return Digits(image_size=16 if kind == "cnn" else None, **{**given, **kwargs})


def small_trainer(tmp_path, **kwargs):
    return FederatedTrainer(
        **{"max_rounds": 2, "logger": False, "default_root_dir": tmp_path, "accelerator": "cpu", **kwargs}
    )


@pytest.fixture
def run(tmp_path):
    """``run(methods)`` trains and gives (final global state, trainer)."""

    def train(methods=(), kind="mlp", data=None, model=None, **kwargs):
        trainer = small_trainer(tmp_path, **kwargs)
        trainer.fit(model or small_model(kind), data or small_data(kind), list(methods))
        return {name: value.clone() for name, value in trainer.server.state.items()}, trainer

    return train


def assert_same_bits(first, second):
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def differs(first, second):
    return any(not torch.equal(first[name], second[name]) for name in first)
