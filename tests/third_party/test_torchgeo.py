"""torchgeo's tasks (0.8) on its own kind of data module, whose batches are dictionaries that it augments itself."""

from typing import ClassVar

import pytest
import torch
from helpers.published import Published

from fl_lightning.data import IID, Dirichlet

trainers = pytest.importorskip("torchgeo.trainers")
datamodules = pytest.importorskip("torchgeo.datamodules")


class Fields(torch.utils.data.Dataset):
    """Images of bright and dark fields, with a label each and a mask."""

    def __init__(self, split, target="label", number=48):
        self.target, self.number = target, number if split == "train" else number // 3
        self.offset = {"train": 0, "val": 1000, "test": 2000}[split]

    def __len__(self):
        return self.number

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(self.offset + index)
        label = index % 3
        image = torch.randint(0, 60, (3, 32, 32), generator=generator).float()
        image[label, :, :16] += 120
        mask = torch.zeros(32, 32, dtype=torch.int64)
        mask[:, :16] = 1 + label % 2
        return {"image": image, self.target: torch.tensor(label) if self.target == "label" else mask}


class TestClassificationTask(Published):
    taps: ClassVar = {"representation": "model.global_pool", "logits": "model.fc"}
    partitioner = Dirichlet(1.0, min_size=8)
    logged = ("train_loss", "train_OverallAccuracy", "val_loss", "val_AverageAccuracy", "test_loss", "test_F1Score")

    def module(self):
        return trainers.ClassificationTask(model="test_resnet", num_classes=3, lr=1e-3, patience=1)

    def data(self):
        return datamodules.NonGeoDataModule(Fields, batch_size=8)


class TestSemanticSegmentationTask(Published):
    taps: ClassVar = {"representation": "model.backbone"}
    partitioner = IID()
    logged = ("train_loss", "train_MulticlassAccuracy", "val_loss", "test_loss", "test_MulticlassJaccardIndex")

    def module(self):
        return trainers.SemanticSegmentationTask(model="fcn", num_filters=4, num_classes=3, lr=1e-2, patience=1)

    def data(self):
        return datamodules.NonGeoDataModule(Fields, batch_size=8, target="mask")
