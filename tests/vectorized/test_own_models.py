"""Own models of several clients are evaluated side by side where they train so, with the metrics of one by one."""

import math

import pytest
from helpers.beside import Normed, assert_near, trained
from helpers.errors import warned
from torchmetrics.classification import MulticlassAccuracy

from fl_lightning.callbacks import Callback
from fl_lightning.methods import FedBN, FedProto, Local
from fl_lightning.models import MLP, ImageClassifier

CLIENTS = 6
steps = []


@pytest.fixture(autouse=True)
def _quick(undrawn):
    steps.clear()


class Watched(ImageClassifier):
    """Notes its test steps: one for each client, or for each group."""

    def __init__(self, encoder=None):
        super().__init__(encoder or MLP(64, [12]))

    def test_step(self, batch, batch_idx):
        steps.append(batch_idx)
        return super().test_step(batch, batch_idx)


class Reads(Watched):
    """Its test step reads a number from a tensor, which a mapped step cannot."""

    def test_step(self, batch, batch_idx):
        super().test_step(batch, batch_idx)
        self.log("read", self(batch[0]).mean().item())


class Counts(Watched):
    """Has a torchmetrics object, which keeps what it has seen of one model."""

    def __init__(self):
        super().__init__()
        self.right = MulticlassAccuracy(10)

    def test_step(self, batch, batch_idx):
        super().test_step(batch, batch_idx)
        self.right.update(self(batch[0]), batch[1])
        self.log("right", self.right)


class Half(Watched):
    """Has a metric that every second model lacks."""

    def test_step(self, batch, batch_idx):
        super().test_step(batch, batch_idx)
        self.log("odd", len(steps) if len(steps) % 2 else math.nan)


class Starts(Callback):
    """Forgets the step of the sanity check."""

    def on_round_start(self, trainer):
        steps.clear()


class Sees(Callback):
    """Sees the evaluation of each client's model."""

    def __init__(self):
        self.clients = []

    def on_evaluation_end(self, trainer, phase, client=None):
        self.clients.append(client)


HOW = {"eval_every_n_rounds": 1, "local_epochs": 1, "visits": False, "max_rounds": 1, "callbacks": [Starts()]}


@pytest.mark.parametrize("method", [Local, FedBN, FedProto])
def test_metrics_of_own_models_are_those_of_one_by_one(tmp_path, method):
    how = {**HOW, "model": lambda: Watched(Normed()), "methods": lambda: [method()]}
    alone, _ = trained(tmp_path, 1, **how)
    assert len(steps) == CLIENTS
    beside, _ = trained(tmp_path, 4, **how)
    assert 0 < len(steps) < CLIENTS
    assert "test/accuracy" in beside["metrics"][0]
    assert_near(alone, beside, 1e-10)


def test_a_step_that_cannot_be_mapped_is_run_for_one_after_the_other(tmp_path):
    alone, _ = trained(tmp_path, 1, Reads, methods=lambda: [Local()], **HOW)
    with warned("personalized models", "sequentially", "test_step"):
        beside, _ = trained(tmp_path, 4, Reads, methods=lambda: [Local()], **HOW)
    assert_near(alone["metrics"], beside["metrics"], 1e-10)


def test_models_with_a_torchmetrics_object_are_evaluated_one_by_one(tmp_path):
    found, _ = trained(tmp_path, 4, Counts, methods=lambda: [Local()], **HOW)
    assert len(steps) == CLIENTS
    assert 0 < found["metrics"][0]["test/right"] <= 1


def test_a_callback_that_looks_at_them_sees_each(tmp_path):
    seen = Sees()
    trained(tmp_path, 4, Watched, methods=lambda: [Local()], **{**HOW, "callbacks": [Starts(), seen]})
    assert len(steps) == CLIENTS
    assert seen.clients == [*range(CLIENTS)]


def test_models_without_a_value_are_left_out_of_its_mean(tmp_path):
    found, _ = trained(tmp_path, 1, Half, methods=lambda: [Local()], **HOW)
    metrics = found["metrics"][0]
    assert len(steps) == CLIENTS
    assert (metrics["test/odd"], metrics["test/odd/clients"]) == ((1 + 3 + 5) / 3, 3)
    assert "test/accuracy/clients" not in metrics
