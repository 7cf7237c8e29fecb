"""Runs whose clients train sequentially or in groups, and comparisons of their results."""

import math
from unittest.mock import patch

import torch
from torch import nn

from fl_lightning.callbacks import Callback
from fl_lightning.data import Digits, Dirichlet
from fl_lightning.engine.run import VisitRunner
from fl_lightning.models import MLP, Encoder, ETFClassifier, ImageClassifier
from helpers.runs import history, small_trainer
from helpers.tiny import TinyData, clients

# examples of the clients of ``rows``: in batches of 8, clients end with a batch of 2, 4 or 8, after 2 to 6 batches
SIZES = (10, 20, 34, 16, 42, 12)


class Visits(Callback):
    """Records the model and the attributes of each client at the end of each visit."""

    def __init__(self):
        self.found = {}

    def on_client_end(self, trainer, client):
        names = ("num_steps", "lr", "lr_total", "drift", "weight", "epoch", "metrics")
        visit = {name: getattr(client, name) for name in names} | {"epochs": client.visit.loss_terms()}
        self.found[f"{trainer.server.round}-{client.info.id}"] = {**visit, "state": client.state()}


class Normed(Encoder):
    """BatchNorm after a layer without bias, which would have no gradient but rounding."""

    def __init__(self, inputs=64):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(inputs, 12, bias=False), nn.BatchNorm1d(12), nn.Tanh())
        self.out_features, self.early = 12, ("layers.1", "layers.3")

    def forward(self, x):
        return self.layers(x)


def rows(sizes=SIZES, kind=TinyData, shuffle=True):
    """A client for each of the sizes, whose batches a DataLoader gives."""
    return clients(kind(sum(sizes), batch_size=8, shuffle=shuffle), *sizes)


def digits(**kwargs):
    """Six clients of unequal sizes and classes, whose batches are gathered from one array."""
    given = {"num_clients": 6, "batch_size": 16, "train_size": 240, "test_size": 60, "partitioner": Dirichlet(0.5)}
    return Digits(**{**given, **kwargs})


def sgd(**kwargs):
    """Builds a client's optimizer."""
    return lambda parameters: torch.optim.SGD(parameters, **{"lr": 0.05, **kwargs})


def mlp(optimizer=None, encoder=None):
    return ImageClassifier(encoder or MLP(64, [16, 12]), optimizer=optimizer or sgd())


def etf():
    return ImageClassifier(MLP(64, [16, 12]), optimizer=sgd(momentum=0.9), classifier=ETFClassifier)


def normed(inputs=64):
    return mlp(encoder=Normed(inputs))


def trained(tmp_path, size, model=mlp, data=digits, methods=list, visits=True, ckpt_path=None, callbacks=(), **kwargs):
    """Return the results by name of a run in groups of at most ``size`` clients, or of ``auto``, and its trainer."""
    from fl_lightning.vectorized.runner import VectorizedRunner

    torch.manual_seed(0)
    seen, given = Visits(), {"precision": "64-true", "local_epochs": 2, "threads_per_worker": 1}
    given |= {"enable_progress_bar": False, "eval_every_n_rounds": 99, "checkpoint_every_n_rounds": 99}
    callbacks = [*callbacks, *([seen] if visits else [])]
    trainer = small_trainer(tmp_path, **{**given, "clients_per_step": size, "callbacks": callbacks, **kwargs})
    dealt = data()
    sizes = []

    def noted(original):
        def run(self, run, part, *args, **kwargs):
            sizes.append(len(part))
            return original(self, run, part, *args, **kwargs)

        return run

    with (
        patch.object(VisitRunner, "run", noted(VisitRunner.run)),
        patch.object(VectorizedRunner, "run", noted(VectorizedRunner.run)),
    ):
        trainer.fit(model(), dealt, methods(), ckpt_path)
    # otherwise both runs of a comparison would be sequential
    assert (max(sizes) > 1) == (size != 1)
    memories = {} if "client_memory" in kwargs else trainer.client.memories()  # the run removes those on disk
    remembered = {str(k): memories.get(k, {}) for k in range(dealt.num_clients)}
    state = {name: value.clone() for name, value in trainer.server.state.items()}
    metrics = [{tag: value for tag, value in row.items() if "memory" not in tag} for row in history(trainer)]
    return {"state": state, "visits": seen.found, "remembered": remembered, "metrics": metrics}, trainer


def assert_near(one, other, limit, where=""):
    """Fail if tensors of two trees differ by more than ``limit`` of their largest entry, or numbers of their value."""
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
    """Assert that groups of clients have the results of sequential clients; return the trainer of the groups."""
    alone, _ = trained(tmp_path, 1, **kwargs)
    beside, trainer = trained(tmp_path, 4, **kwargs)
    assert_near(alone, beside, limit)
    return trainer
