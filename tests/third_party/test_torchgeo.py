"""torchgeo's tasks (0.8) on its own kind of data module, whose batches are dictionaries that it augments itself."""

from typing import ClassVar

import matplotlib.pyplot as plt
import pytest
import torch
from helpers.published import Published
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fl_lightning import Partitioned
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

    def test_its_figures_are_in_tensorboard(self, tmp_path):
        class Drawn(Fields):
            def plot(self, sample):
                figure, axes = plt.subplots(figsize=(1, 1))
                axes.imshow(sample["image"].permute(1, 2, 0) / 255)
                return figure

        data = Partitioned(datamodules.NonGeoDataModule(Drawn, batch_size=8), self.partitioner, self.clients)
        trainer, _, _ = self.run(tmp_path, "fedavg", data=data, logger=True, devices=2)
        events = EventAccumulator(str(trainer.run_dir))
        events.Reload()
        assert set(events.Tags()["images"]) == {"image/0", "image/1"}


class TestFrozenBackbone(TestClassificationTask):
    test_its_figures_are_in_tensorboard = None

    def module(self):
        return trainers.ClassificationTask(model="test_resnet", num_classes=3, lr=1e-2, freeze_backbone=True)


class TestSemanticSegmentationTask(Published):
    taps: ClassVar = {"representation": "model.backbone"}
    partitioner = IID()
    logged = ("train_loss", "train_MulticlassAccuracy", "val_loss", "test_loss", "test_MulticlassJaccardIndex")

    def module(self):
        return trainers.SemanticSegmentationTask(model="fcn", num_filters=4, num_classes=3, lr=1e-2, patience=1)

    def data(self):
        return datamodules.NonGeoDataModule(Fields, batch_size=8, target="mask")
