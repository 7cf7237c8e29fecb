"""Lightning's demos (2.6)."""

from typing import ClassVar

import pytest
import torch
from helpers.errors import refused
from helpers.published import Published, Sets
from helpers.runs import small_trainer
from lightning.pytorch.demos import boring_classes as boring
from lightning.pytorch.demos import lstm

from fl_lightning import Partitioned


class TestBoringModel(Published):
    taps: ClassVar = {"representation": "layer"}

    def module(self):
        return boring.BoringModel()

    def data(self):
        # the batches of one of BoringDataModule make it diverge under Lightning as well
        return Sets(boring.RandomDataset(32, 64), batch_size=16)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: (boring.BoringModel(), boring.BoringDataModuleNoLen()), "BoringDataModuleNoLen"),
        (lambda: (boring.BoringModel(), Sequential(boring.RandomDataset(32, 60))), "SequenceSampler"),
    ],
    ids=["iterable data", "batch sampler"],
)
def test_what_cannot_be_federated_is_refused(tmp_path, build, words):
    model, data = build()
    with refused(words):
        small_trainer(tmp_path).fit(model, Partitioned(data))


class Sequential(Sets):
    def train_dataloader(self):
        sampler = lstm.SequenceSampler(self.train, batch_size=20)
        return torch.utils.data.DataLoader(self.train, batch_sampler=sampler)
