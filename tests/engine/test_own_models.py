"""Own models of several clients are evaluated side by side where they train so, with the metrics of one by one."""

import pytest
from helpers.beside import assert_near, digits, mlp, trained
from helpers.errors import warned
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from fl_lightning.callbacks import Callback
from fl_lightning.engine.groups.own_models import OwnModels
from fl_lightning.methods import FedBN, FedProto, Local
from fl_lightning.models import MLP, Encoder, ImageClassifier

HOW = {"eval_every_n_rounds": 1, "local_epochs": 1, "visits": False}


class Normed(Encoder):
    """Has statistics and an affine map that FedBN leaves with each client."""

    out_features = 12

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU())

    def forward(self, x):
        return self.layers(x)


class Reads(ImageClassifier):
    """Its test step reads a number from a tensor, which a mapped step cannot."""

    def test_step(self, batch, batch_idx):
        self.log("read", self(batch[0]).mean().item())


class Counts(ImageClassifier):
    """Has a torchmetrics object, which keeps what it has seen of one model."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.right = MulticlassAccuracy(10)

    def test_step(self, batch, batch_idx):
        self.right.update(self(batch[0]), batch[1])
        self.log("right", self.right)


class Sees(Callback):
    """Sees the evaluation of each client's model."""

    def __init__(self):
        self.clients = []

    def on_evaluation_end(self, trainer, phase, client=None):
        self.clients.append(client)


METHODS = {
    "Local": (lambda: [Local()], mlp),
    "FedProto": (lambda: [FedProto()], mlp),
    "FedBN": (lambda: [FedBN()], lambda: mlp(encoder=Normed())),
}


def of(kind):
    return lambda: kind(MLP(64, [12]))


@pytest.fixture
def groups(monkeypatch):
    """The sizes of the groups of own models that are evaluated."""
    sizes, evaluate = [], OwnModels.evaluate

    def noting(self, loader, own):
        sizes.append(len(own))
        return evaluate(self, loader, own)

    monkeypatch.setattr(OwnModels, "evaluate", noting)
    return sizes


@pytest.mark.parametrize("name", METHODS)
def test_metrics_of_own_models_are_those_of_one_by_one(tmp_path, groups, name):
    methods, model = METHODS[name]
    alone, _ = trained(tmp_path, 1, model, methods=methods, **HOW)
    assert groups == []
    beside, _ = trained(tmp_path, 4, model, methods=methods, **HOW)
    assert groups and set(groups) == {3}
    assert "test/accuracy" in beside["metrics"][0]
    assert_near(alone["metrics"], beside["metrics"], 1e-10)
    assert_near(alone["state"], beside["state"], 1e-10)


@pytest.mark.parametrize("memory", [0.0, 1.0])
def test_they_do_not_depend_on_the_number_of_workers(tmp_path, memory):
    how = {**HOW, "methods": lambda: [Local()], "client_memory": memory}
    found = [trained(tmp_path, 4, devices=workers, **how)[0]["metrics"] for workers in (1, 2, 3)]
    assert found[0] == found[1] == found[2]


def test_a_step_that_cannot_be_mapped_is_run_for_one_after_the_other(tmp_path):
    how = {**HOW, "methods": lambda: [Local()], "max_rounds": 1}
    alone, _ = trained(tmp_path, 1, of(Reads), **how)
    with warned("own models", "one by one", "test_step"):
        beside, _ = trained(tmp_path, 4, of(Reads), **how)
    assert_near(alone["metrics"], beside["metrics"], 1e-10)


def test_models_with_a_torchmetrics_object_are_evaluated_one_by_one(tmp_path, groups):
    how = {**HOW, "methods": lambda: [Local()], "max_rounds": 1}
    found, _ = trained(tmp_path, 4, of(Counts), **how)
    assert groups == []
    assert 0 < found["metrics"][0]["test/right"] <= 1


def test_a_callback_that_looks_at_them_sees_each(tmp_path, groups):
    seen = Sees()
    trained(tmp_path, 4, methods=lambda: [Local()], callbacks=[seen], data=digits, **{**HOW, "max_rounds": 1})
    assert groups == []
    assert seen.clients == [*range(6)]
