"""Runs whose clients train one by one, the same ones in groups, and how far apart they are."""

import math

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning import Partitioned
from fl_lightning.callbacks import Callback
from fl_lightning.data import Digits, Dirichlet
from fl_lightning.engine import rounds
from fl_lightning.models import MLP, ImageClassifier
from helpers.runs import history, small_trainer

# examples of the clients of ``arrays``: in batches of 8, clients end with a batch of 2, 4 or 8, after 2 to 6 batches
SIZES = (10, 20, 34, 16, 42, 12)


class Visits(Callback):
    """Keeps the model that each client has at the end of each visit, and what is known of the visit."""

    def __init__(self):
        self.found = {}

    def on_client_end(self, trainer, client):
        counts = {name: getattr(client, name) for name in ("num_steps", "lr", "lr_total", "drift", "weight", "epoch")}
        self.found[f"{trainer.server.round}-{client.info.id}"] = {
            "state": client.state(),
            "metrics": client.metrics,
            "epochs": client.epochs,
            **counts,
        }


class Arrays(LightningDataModule):
    """Examples of 8 features in 3 classes, each class around a place of its own."""

    def __init__(self, number, batch_size, shuffle):
        super().__init__()
        self.batch_size, self.shuffle = batch_size, shuffle
        draw = torch.Generator().manual_seed(1)
        self.y = torch.arange(number) % 3
        self.x = torch.randn(3, 8, generator=draw)[self.y] + torch.randn(number, 8, generator=draw)

    def train_dataloader(self):
        return DataLoader(TensorDataset(self.x, self.y), self.batch_size, shuffle=self.shuffle)


def arrays(sizes=SIZES, batch_size=8, shuffle=True, doubles=True, kind=Arrays):
    """A client for each of the sizes, whose batches a DataLoader gives."""
    inner = kind(sum(sizes), batch_size, shuffle)
    inner.x = inner.x.double() if doubles else inner.x
    data, parts = Partitioned(inner, num_clients=len(sizes)), torch.arange(sum(sizes)).split(list(sizes))
    data.partitioner = lambda labels, k, rng: [part.numpy() for part in parts]
    data.partitioner.moved = 0
    return data


def digits(**kwargs):
    """Six clients of unequal sizes and classes, whose batches are gathered from one array."""
    given = {"num_clients": 6, "batch_size": 16, "train_size": 240, "test_size": 60, "partitioner": Dirichlet(0.5)}
    return Digits(**{**given, **kwargs})


def sgd(**kwargs):
    """Builds a client's optimizer."""
    return lambda parameters: torch.optim.SGD(parameters, **{"lr": 0.05, **kwargs})


def mlp(optimizer=None, projector=None, encoder=None):
    return ImageClassifier(encoder or MLP(64, [16, 12]), projector, optimizer=optimizer or sgd())


def trained(tmp_path, size, model=mlp, data=digits, methods=list, visits=True, ckpt_path=None, callbacks=(), **kwargs):
    """What a run in groups of at most ``size`` clients, or of ``auto``, came to, by name; and its trainer."""
    torch.manual_seed(0)
    seen, given = Visits(), {"precision": "64-true", "local_epochs": 2, "threads_per_worker": 1}
    given |= {"enable_progress_bar": False, "eval_every_n_rounds": 99, "checkpoint_every_n_rounds": 99}
    callbacks = [*callbacks, *([seen] if visits else [])]
    trainer = small_trainer(tmp_path, **{**given, "clients_per_step": size, "callbacks": callbacks, **kwargs})
    dealt = data()
    with Sizes() as sizes:
        trainer.fit(model(), dealt, methods(), ckpt_path)
    # a comparison of one by one with one by one would say nothing
    assert (max(sizes.found) > 1) == (size != 1)
    memories = {} if "client_memory" in kwargs else trainer.client.memories()  # the run removes those on disk
    remembered = {str(k): memories.get(k, {}) for k in range(dealt.num_clients)}
    state = {name: value.clone() for name, value in trainer.server.state.items()}
    metrics = [{tag: value for tag, value in row.items() if "memory" not in tag} for row in history(trainer)]
    return {"state": state, "visits": seen.found, "remembered": remembered, "metrics": metrics}, trainer


class Sizes:
    """In this block it keeps the sizes of the groups that are trained."""

    def __enter__(self):
        self.found, self._kept = [], (rounds.train_client, rounds.train_group)
        rounds.train_client, rounds.train_group = map(self._noting, self._kept)
        return self

    def __exit__(self, *error):
        rounds.train_client, rounds.train_group = self._kept

    def _noting(self, train):
        def noting(run, group, *args):
            self.found.append(len(group))
            return train(run, group, *args)

        return noting


def assert_near(one, other, limit, where=""):
    """Fail where two trees differ: a tensor by more than ``limit`` of its largest entry, a number by that of itself."""
    if isinstance(one, torch.Tensor) and one.is_floating_point():
        gap, size = (one - other).abs().max(), one.abs().max()
        assert gap <= limit * size, f"{where}: {gap / size:.1e}"
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for name, value in one.items():
            assert_near(value, other[name], limit, f"{where}/{name}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for place, (value, same) in enumerate(zip(one, other, strict=True)):
            assert_near(value, same, limit, f"{where}/{place}")
    elif isinstance(one, float):
        assert math.isclose(one, other, rel_tol=limit, abs_tol=limit * 1e-3), f"{where}: {one} {other}"
    else:
        assert one == other, where


def assert_same_alone(tmp_path, limit=1e-10, **kwargs):
    """Clients side by side give what they give one by one; returns the trainer of the groups."""
    alone, _ = trained(tmp_path, 1, **kwargs)
    beside, trainer = trained(tmp_path, 4, **kwargs)
    assert_near(alone, beside, limit)
    return trainer
