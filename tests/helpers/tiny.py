"""A minimal module and data module; tests override only the parts that they examine."""

from functools import partial

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning import Partitioned
from fl_lightning.data.partitioners import Partitioner, Pooled

SGD_WITH_MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class TinyModule(LightningModule):
    """A classifier of rows of 8 numbers in 3 classes: two layers and SGD with momentum.

    Args:
        optimizer: makes the optimizer of the parameters.
    """

    def __init__(self, optimizer=SGD_WITH_MOMENTUM):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(8, 6), nn.Tanh()), nn.Linear(6, 3)
        self.optimizer = optimizer
        self.build()

    def build(self):
        """Add to the module, or change it."""

    def forward(self, x):
        return self.head(self.body(x))

    def loss(self, batch):
        x, y = batch
        return cross_entropy(self(x), y)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return self.optimizer(self.parameters())


def variant(base, **members):
    """A subclass of ``base`` with these methods or attributes."""
    return type(f"{base.__name__}Variant", (base,), members)


class TinyData(LightningDataModule):
    """Rows of 8 random numbers around the place of their class, in loaders of a fixed order.

    Args:
        train: number of training examples; 14 in batches of 4 end with a batch of 2.
        val: number of examples of each validation loader.
        test: number of examples of each test loader.
        batch_size: of all loaders.
        shuffle: whether the training loader shuffles.
    """

    def __init__(self, train=14, val=(), test=(), batch_size=4, shuffle=False):
        super().__init__()
        self.train, self.val, self.test, self.batch_size, self.shuffle = train, val, test, batch_size, shuffle

    def rows(self, number, seed):
        draw = torch.Generator().manual_seed(seed)
        y = torch.arange(number) % 3
        places = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
        return TensorDataset(places[y] + torch.randn(number, 8, generator=draw), y)

    def loader(self, number, seed, shuffle=False):
        return DataLoader(self.rows(number, seed), self.batch_size, shuffle=shuffle)

    def train_dataloader(self):
        return self.loader(self.train, 1, self.shuffle)

    def val_dataloader(self):
        return [self.loader(number, 2 + index) for index, number in enumerate(self.val)]

    def test_dataloader(self):
        return [self.loader(number, 12 + index) for index, number in enumerate(self.test)]


class Sizes(Partitioner):
    """The first examples for the first client, and so on."""

    def __init__(self, *sizes):
        self.sizes = sizes

    def __call__(self, labels, num_clients, rng):
        return [part.numpy() for part in torch.arange(sum(self.sizes)).split(list(self.sizes))]


def clients(data, *sizes):
    """Deal the examples of a data module out in order; without sizes, one client has them all."""
    return Partitioned(data, Sizes(*sizes) if sizes else Pooled(), num_clients=len(sizes) or 1)
