"""Tests that every module published by others must pass."""

import math
from typing import ClassVar

import lightning.pytorch
import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from fl_lightning import Partitioned
from fl_lightning.core.state import clone, tensors
from fl_lightning.data import IID, Pooled
from fl_lightning.methods import MOON, FedDecorr, FedProx
from helpers.conformance import by_lightning
from helpers.runs import small_trainer

METHODS = {
    "fedavg": lambda: [],
    "all": lambda: [FedProx(mu=0.01), MOON(mu=0.1, first="global"), FedDecorr(beta=0.01, form="paper")],
}


class Loaders:
    """The hooks of a data module of given data sets, for either namespace of Lightning.

    Args:
        train: training data.
        test: validation and test data; None for none.
        batch_size: of all loaders.
        options: further arguments of the loaders.
    """

    def __init__(self, train, test=None, batch_size=8, **options):
        super().__init__()
        self.train, self.test, self.batch_size, self.options = train, test, batch_size, options

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True, **self.options)

    def val_dataloader(self):
        return [] if self.test is None else DataLoader(self.test, batch_size=self.batch_size)

    test_dataloader = val_dataloader


class Sets(Loaders, LightningDataModule):
    """A data module of given data sets."""


class Published:
    """The tests of one module. A subclass defines the module, its data, and its properties.

    Attributes:
        taps: names for submodules, as ``trainer.taps``.
        partitioner: deals the training data out.
        logged: metrics that the module logs and the run must have.
        unmoved: trained parameters that get no gradient.
        namespace: of the module: ``lightning.pytorch``, or ``pytorch_lightning``.
        precision: in which one client is compared with Lightning's fit.
        tolerance: of that comparison, absolute and relative.
        options: further arguments of the trainer.
    """

    pytestmark = pytest.mark.thorough
    taps: ClassVar[dict[str, str]] = {}
    partitioner = IID()
    logged: ClassVar[tuple[str, ...]] = ()
    unmoved: ClassVar[frozenset[str]] = frozenset()
    rounds, epochs, clients = 3, 1, 3
    namespace = lightning.pytorch
    precision, tolerance = "64-true", 1e-8
    options: ClassVar[dict] = {}

    def module(self):
        """A module with new weights."""
        raise NotImplementedError

    def data(self):
        """A data module that knows nothing of clients."""
        raise NotImplementedError

    def deterministic(self, module):
        """The module without what draws random numbers in training."""
        for part in module.modules():
            if isinstance(part, torch.nn.Dropout):
                part.p = 0.0
            elif isinstance(part, (torch.nn.MultiheadAttention, torch.nn.LSTM)):
                part.dropout = 0.0
        return module

    def seeded(self, build):
        torch.manual_seed(0)
        return build()

    def run(self, tmp_path, methods, model=None, data=None, ckpt_path=None, **kwargs):
        """A run of the module: (the trainer, the state it began with, the last global state)."""
        model = model or self.seeded(self.module)
        data = data or Partitioned(self.seeded(self.data), self.partitioner, self.clients)
        before = clone(tensors(model))
        given = {"max_rounds": self.rounds, "local_epochs": self.epochs, "taps": self.taps, "threads_per_worker": 1}
        trainer = small_trainer(tmp_path, **{**given, **self.options, **kwargs})
        trainer.fit(model, data, METHODS[methods](), ckpt_path)
        return trainer, before, clone(trainer.server.state)

    @pytest.mark.parametrize("methods", METHODS)
    def test_it_trains(self, tmp_path, methods):
        model = self.seeded(self.module)
        trained = {name for name, value in model.named_parameters() if value.requires_grad}
        trainer, before, after = self.run(tmp_path, methods, model)
        still = {name for name in before if torch.equal(before[name], after[name])}
        losses = [row["train/loss"] for row in trainer.history]
        assert still & trained == self.unmoved, sorted(still & trained ^ self.unmoved)
        assert all(math.isfinite(value) for row in trainer.history for value in row.values())
        assert losses[-1] < losses[0], losses
        assert set(self.logged) <= trainer.metrics.keys(), sorted(trainer.metrics)

    def test_one_client_is_lightnings_fit(self, tmp_path):
        ours, theirs = (self.deterministic(self.seeded(self.module)) for _ in range(2))
        data = Partitioned(in_order(self.seeded(self.data)), Pooled(), 1)
        trainer, _, state = self.run(tmp_path, "fedavg", ours, data, precision=self.precision)
        how = {"check_val_every_n_epoch": self.epochs, "namespace": self.namespace, **self.options}
        given = self.rounds, self.epochs, self.precision
        reference = by_lightning(theirs, in_order(self.seeded(self.data)), *given, **how)
        expected = tensors(theirs)
        assert state.keys() == expected.keys()
        for name in state:
            self.assert_close(name, state[name], expected[name])
        for name in {"val_loss", *self.logged} & reference.callback_metrics.keys():
            # of training, Lightning has the last step's value there, and a round the mean over its steps
            if name.startswith("val"):
                value = torch.tensor(trainer.metrics[name], dtype=torch.float64)
                self.assert_close(name, value, reference.callback_metrics[name].double())

    def assert_close(self, name, actual, expected):
        given = {"rtol": self.tolerance, "atol": self.tolerance, "msg": lambda text: f"{name}: {text}"}
        torch.testing.assert_close(actual, expected, **given)


def in_order(datamodule):
    """The data module, its training batches in the order of the data set."""
    build = datamodule.train_dataloader

    def train_dataloader():
        loader = build()
        given = {"collate_fn": loader.collate_fn, "drop_last": loader.drop_last}
        return DataLoader(loader.dataset, batch_size=loader.batch_size, **given)

    datamodule.train_dataloader = train_dataloader
    return datamodule
