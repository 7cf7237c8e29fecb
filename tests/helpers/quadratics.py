"""Quadratic losses of one number, whose optima and fixed points are known in closed form."""

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning import Partitioned
from fl_lightning.core.systems import SystemsHeterogeneity


class Quadratic(LightningModule):
    """f_k(y) = mean (y - b)^2 / 2 over the client's numbers b."""

    def __init__(self, start=0.0, lr=0.1):
        super().__init__()
        self.y, self.lr = nn.Parameter(torch.tensor([start])), lr

    def training_step(self, batch, batch_idx):
        return 0.5 * (self.y - batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Rows(LightningDataModule):
    """Numbers, or rows of them, whose labels count them."""

    def __init__(self, rows, batch_size=99):
        super().__init__()
        self.rows, self.batch_size = torch.tensor(rows), batch_size

    def train_dataloader(self):
        return DataLoader(TensorDataset(self.rows, torch.arange(len(self.rows))), batch_size=self.batch_size)


def quadratic_data(numbers):
    """Return data with one client for each number."""
    return Partitioned(Rows(numbers), num_clients=len(numbers))


class Curved(LightningModule):
    """f_k(y) = a_k / 2 (y - b_k)^2, from examples (a_k, b_k)."""

    def __init__(self, start=0.0, lr=0.1, **options):
        super().__init__()
        self.y, self.lr, self.options = nn.Parameter(torch.tensor([start])), lr, options

    def training_step(self, batch, batch_idx):
        a, b = batch[0].T
        return (0.5 * a * (self.y - b).square()).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, **self.options)


def curved_data(a, b, sizes=None, batch_size=10_000):
    """Client k holds ``sizes[k]`` (1) times the example (a_k, b_k)."""
    return repeated_rows(list(zip(a, b, strict=True)), sizes, batch_size)


def repeated_rows(examples, sizes=None, batch_size=10_000):
    """Client k holds ``sizes[k]`` (1) times its example, a row of numbers."""
    sizes = sizes or [1] * len(examples)
    rows = [row for row, n in zip(examples, sizes, strict=True) for _ in range(n)]
    data = Partitioned(Rows(rows, batch_size), num_clients=len(examples))
    ends = np.cumsum(sizes)
    data.partitioner = lambda labels, k, rng: np.split(np.arange(len(rows)), ends[:-1])
    return data


def weighted(b, weights):
    """Return the minimum of sum w_k / 2 (y - b_k)^2."""
    return float(np.dot(weights, b) / np.sum(weights))


def pull(a, lr, steps, mu=0.0):
    """Return the share of the way to its own minimum that a client covers in a visit: ``y - x = -pull (x - b)``."""
    a = np.asarray(a)
    return a / (a + mu) * (1 - (1 - lr * (a + mu)) ** np.asarray(steps))


A, B = [1.0, 4.0, 0.5], [-1.0, 2.0, 5.0]
# a run whose clients take 2 to 6 steps
UNEQUAL = {"local_steps": 6, "systems": SystemsHeterogeneity(stragglers=1.0, least=2, most=6)}


def settle(run, methods, a=A, b=B, sizes=None, batch_size=10_000, start=0.0, lr=0.1, max_rounds=100, **kwargs):
    """Return the final global y, and the trainer."""
    model, data = Curved(start=start, lr=lr), curved_data(a, b, sizes, batch_size)
    rounds = {"max_rounds": max_rounds, "checkpoint_every_n_rounds": max_rounds}
    state, trainer = run(methods, model=model, data=data, **rounds, **kwargs)
    return state["y"].item(), trainer
