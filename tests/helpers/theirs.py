"""A user's own module, data module and data set, which know nothing of federated learning."""

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import SumMetric

from fl_lightning.models import ImageClassifier


class Theirs(LightningModule):
    """A user's own module, in ten lines."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch["x"]), batch["label"])
        self.log("train_loss", loss)
        return {"loss": loss}

    def test_step(self, batch):
        self.log("hits", (self.net(batch["x"]).argmax(1) == batch["label"]).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Labelled(torch.utils.data.Dataset):
    def __init__(self, items):
        self.items, self.labels = items, [item["label"] for item in items]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


class TheirData(LightningDataModule):
    """A user's own data module, in ten lines."""

    def setup(self, stage):
        x = torch.randn(300, 6, generator=torch.Generator().manual_seed(0))
        self.items = [{"x": row, "label": int(row[:3].argmax())} for row in x]

    def train_dataloader(self):
        return DataLoader(Labelled(self.items[:240]), batch_size=16, shuffle=True)

    def test_dataloader(self):
        return DataLoader(self.items[240:], batch_size=25)


class Synchronises(ImageClassifier):
    """Gathers numbers from all processes in every step, in three ways, and adds them to its loss."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if loss is None:
            return None
        metric, total = SumMetric(), loss.detach().clone()
        metric.update(loss.detach())
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(total)
        return loss * (1 + metric.compute() + self.all_gather(loss.detach()).sum() + total)


class Mistaken(ImageClassifier):
    """A module that raises an exception once the run has begun."""

    def training_step(self, batch, batch_idx):
        if self.trainer.sanity_checking:
            return super().training_step(batch, batch_idx)
        raise LookupError("their own mistake")


class Misspelt(ImageClassifier):
    """A module with a mistake in every step."""

    def training_step(self, batch, batch_idx):
        return self.los(batch)


class Unbuilt(ImageClassifier):
    """A module whose constructor raises an exception."""

    def __init__(self):
        raise LookupError("their own mistake")
