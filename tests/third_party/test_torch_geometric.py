"""PyTorch Geometric (2.8): a graph classifier in the form of its Lightning examples, on its own data module."""

from typing import ClassVar

import pytest
import torch
from helpers.published import Published
from lightning.pytorch import LightningModule
from torch import nn
from torchmetrics import Accuracy

from fl_lightning.data import Dirichlet

geometric = pytest.importorskip("torch_geometric")
models = pytest.importorskip("torch_geometric.nn")
from torch_geometric.data import Data  # noqa: E402
from torch_geometric.data.lightning import LightningDataset  # noqa: E402


def graphs(number, seed):
    """Rings (class 0), stars (1) and paths (2) of random sizes, their nodes described by their degree and noise."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for index in range(number):
        n = int(torch.randint(5, 9, (1,), generator=generator))
        nodes = torch.arange(n)
        edges = [(nodes, (nodes + 1) % n), (torch.zeros(n - 1).long(), nodes[1:]), (nodes[:-1], nodes[1:])][index % 3]
        edge_index = torch.cat([torch.stack(edges), torch.stack(edges[::-1])], 1)
        degree = torch.bincount(edge_index[0], minlength=n).float().unsqueeze(1)
        x = torch.cat([degree, torch.randn(n, 2, generator=generator)], 1)
        found.append(Data(x=x, edge_index=edge_index, y=torch.tensor([index % 3])))
    return found


class GraphClassifier(LightningModule):
    """A GNN, the sum over each graph's nodes, and an MLP."""

    def __init__(self):
        super().__init__()
        self.gnn = models.GIN(in_channels=3, hidden_channels=16, num_layers=2)
        self.classifier = models.MLP([16, 16, 3], norm="batch_norm", dropout=0.0)
        self.train_acc = Accuracy(task="multiclass", num_classes=3)
        self.val_acc, self.test_acc = self.train_acc.clone(), self.train_acc.clone()

    def forward(self, x, edge_index, batch):
        return self.classifier(models.global_add_pool(self.gnn(x, edge_index), batch))

    def training_step(self, data, batch_idx):
        logits = self(data.x, data.edge_index, data.batch)
        loss = nn.functional.cross_entropy(logits, data.y)
        self.train_acc(logits.softmax(-1), data.y)
        self.log("train_acc", self.train_acc, prog_bar=True, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, data, batch_idx):
        logits = self(data.x, data.edge_index, data.batch)
        self.val_acc(logits.softmax(-1), data.y)
        self.log("val_acc", self.val_acc, prog_bar=True, on_step=False, on_epoch=True)
        self.log("val_loss", nn.functional.cross_entropy(logits, data.y))

    def test_step(self, data, batch_idx):
        self.test_acc(self(data.x, data.edge_index, data.batch).softmax(-1), data.y)
        self.log("test_acc", self.test_acc, prog_bar=True, on_step=False, on_epoch=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class TestGIN(Published):
    taps: ClassVar = {"representation": "classifier.norms.0", "logits": "classifier"}
    partitioner = Dirichlet(1.0, min_size=8)
    logged = ("train_acc", "val_acc", "val_loss", "test_acc")
    precision, tolerance = "32-true", 1e-5  # 64-true does not convert what is in a graph, nor does Lightning's

    def module(self):
        return GraphClassifier()

    def data(self):
        return LightningDataset(
            graphs(60, 0), graphs(18, 1), graphs(18, 2), batch_size=8, pin_memory=False, drop_last=True
        )


@pytest.mark.thorough
def test_a_metric_of_graphs_counts_graphs(tmp_path):
    """A batch of graphs counts as many examples as it has graphs, not nodes or edges."""
    from torch_geometric.loader import DataLoader

    from fl_lightning.client import count_examples

    (batch,) = DataLoader(graphs(5, 0), batch_size=5)
    assert count_examples(batch) == 5
