"""Small runs on the embedded digits, and assertions on their states."""

import shutil
import signal
from functools import partial

import numpy as np
import torch
from torch.optim import SGD

from fl_lightning import FederatedTrainer
from fl_lightning.callbacks import Callback
from fl_lightning.core.seeding import derive_seed
from fl_lightning.data import Digits, Dirichlet
from fl_lightning.models import MLP, FedCKACNN, ImageClassifier, Projector
from fl_lightning.utilities.errors import ClientError


def draw(*shape, seed=0):
    """Numbers in float64 that a seed names."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Stops(Callback):
    """Ends the run in a round, after its rows are written and before its checkpoint is, or fails one client of it."""

    def __init__(self, round_, client=None):
        self.round, self.client = round_, client

    def on_client_end(self, trainer, client):
        if trainer.server.round == self.round and self.client in (None, client.info.id):
            raise ClientError("stopped")


class OnWorker(Callback):
    """Calls a function on one worker after each visit of the second round."""

    def __init__(self, act, rank=1):
        self.act, self.rank = act, rank

    def on_client_end(self, trainer, client):
        if trainer.global_rank == self.rank and trainer.server.round == 1:
            self.act()


def sends(number, rank=1):
    """Send a signal to one worker in the second round."""
    return OnWorker(partial(signal.raise_signal, number), rank)


class Removes(Callback):
    """Removes a folder in the second round."""

    def __init__(self, folder):
        self.folder = folder

    def on_round_start(self, trainer):
        if trainer.server.round == 1:
            shutil.rmtree(self.folder)


def small_model(kind="mlp"):
    """A classifier of the digits: an MLP with a normalising projector, or FedCKA's CNN on 16 px."""
    torch.manual_seed(0)
    sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    if kind == "cnn":
        return ImageClassifier(FedCKACNN(1, 16), optimizer=sgd)
    return ImageClassifier(MLP(64, [32, 24]), Projector(16), optimizer=sgd)


def plain_sgd_model(**kwargs):
    """A classifier with BatchNorm, for methods that are defined for SGD without momentum."""
    torch.manual_seed(0)
    return ImageClassifier(MLP(64, [32, 24]), Projector(16), optimizer=partial(SGD, **{"lr": 0.1, **kwargs}))


def small_data(kind="mlp", **kwargs):
    given = {"num_clients": 4, "batch_size": 32, "train_size": 400, "partitioner": Dirichlet(0.3)}
    return Digits(image_size=16 if kind == "cnn" else None, **{**given, **kwargs})


def ready(data):
    """A data module that is set up."""
    data.setup()
    return data


def small_trainer(tmp_path, **kwargs):
    return FederatedTrainer(
        **{"max_rounds": 2, "logger": False, "default_root_dir": tmp_path, "accelerator": "cpu", **kwargs}
    )


def made(given):
    """What this makes, if it is a maker."""
    return given() if callable(given) and not isinstance(given, torch.nn.Module) else given


def fitted(folder, methods=(), model=small_model, data=small_data, ckpt_path=None, weights=None, **kwargs):
    """Train a small run; return the trainer. What makes methods, a model or data may stand for them."""
    torch.manual_seed(0)
    trainer = small_trainer(folder, **kwargs)
    trainer.fit(made(model), made(data), made(methods), ckpt_path, weights)
    return trainer


def watched(folder, *callbacks, **kwargs):
    """Train a small run with callbacks; return the trainer."""
    return fitted(folder, callbacks=list(callbacks), **kwargs)


def measured(file, folder, *callbacks, **kwargs):
    """Train a small run with callbacks; return the trainer and the arrays of a file of the run."""
    trainer = watched(folder, *callbacks, **kwargs)
    return trainer, np.load(trainer.run_dir / file)


def train(folder, methods=(), kind="mlp", data=None, model=None, **kwargs):
    """Train a small run; return the final global state and the trainer."""
    trainer = fitted(folder, methods, model or small_model(kind), data or small_data(kind), **kwargs)
    return {name: value.clone() for name, value in trainer.server.state.items()}, trainer


def train_in_turn(folder, methods=(), ckpt_path=None, model=plain_sgd_model, data=None, **kwargs):
    """Train clients one after another; return the final global state and the trainer."""
    data = data or partial(small_data, train_size=120, test_size=50)
    how = {"max_rounds": 3, "clients_per_step": 1, "threads_per_worker": 1, **kwargs}
    return train(folder, methods, data=data, model=model, ckpt_path=ckpt_path, **how)


def train_by_hand(model, data, seed, round_, k):
    """Train in a plain loop on the batches that client k has in a round of a run with this seed."""
    loader, optimizer = data.train_dataloader(k), SGD(model.parameters(), lr=0.1)
    loader.generator.manual_seed(derive_seed(seed, "batches", round_, k))
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def history(trainer):
    """Return the metrics of all rounds, without seconds and places."""
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "placed/"))} for row in trainer.history]


def assert_same_bits(first, second):
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def differs(first, second):
    return any(not torch.equal(first[name], second[name]) for name in first)


def assert_finite(state, trainer):
    assert all(torch.isfinite(value).all() for value in state.values())
    assert all(value == value for value in trainer.metrics.values())
    assert trainer.metrics["test/accuracy"] > 0
