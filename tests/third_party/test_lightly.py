"""lightly (1.6): SimCLR in the form of its examples, of the namespace pytorch_lightning."""

from typing import ClassVar

import pytest
import torch
from helpers.published import Loaders, Published
from torch import nn

from fl_lightning.data import Dirichlet

pytest.importorskip("lightly")
pytorch_lightning = pytest.importorskip("pytorch_lightning")
from lightly.loss import NTXentLoss  # noqa: E402
from lightly.models.modules import SimCLRProjectionHead  # noqa: E402


class Views(torch.utils.data.Dataset):
    """Two views of each image and its label, as lightly's transforms and data sets give them."""

    def __init__(self, number, seed):
        self.targets = torch.arange(number) % 3
        self.images = torch.randn(number, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
        self.images[torch.arange(number), self.targets] += 1.5

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        noise = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(index)) * 0.3
        views = self.images[index] + noise
        return [views[0], views[1]], int(self.targets[index]), f"{index}.png"


class SimCLR(pytorch_lightning.LightningModule):
    def __init__(self, memory=0):
        super().__init__()
        layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
        self.backbone = nn.Sequential(*layers)
        self.projection_head = SimCLRProjectionHead(8, 16, 8)
        self.criterion = NTXentLoss(memory_bank_size=memory)

    def forward(self, x):
        return self.projection_head(self.backbone(x).flatten(start_dim=1))

    def training_step(self, batch, batch_index):
        (x0, x1), _, _ = batch
        loss = self.criterion(self.forward(x0), self.forward(x1))
        self.log("train_loss_ssl", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.06)


class TheirSets(Loaders, pytorch_lightning.LightningDataModule):
    """A data module of the namespace pytorch_lightning."""


class TestSimCLR(Published):
    namespace = pytorch_lightning
    taps: ClassVar = {"representation": "projection_head"}
    partitioner = Dirichlet(1.0, min_size=8)
    logged = ("train_loss_ssl",)
    epochs = 2

    def module(self):
        return SimCLR()

    def data(self):
        return TheirSets(Views(60, 0), drop_last=True)


class TestMemoryBank(TestSimCLR):
    """The criterion rebinds its buffers in its first step: the bank, empty until then."""

    test_one_client_is_lightnings_fit = None  # the bank begins with random numbers

    def module(self):
        return SimCLR(memory=(32, 8))
