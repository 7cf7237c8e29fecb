"""The fixture of worked examples: softmax regression of two features in three classes, in float64."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from helpers.runs import small_trainer
from helpers.tiny import TinyData, TinyModule, clients

# rows are classes
W = torch.tensor([[0.1, 0.2], [0, -0.1], [0.3, 0]], dtype=torch.float64)
V = torch.tensor([[0, 0.1], [0.2, 0], [-0.1, 0.3]], dtype=torch.float64)
X = {"A": [[1, 0.5], [-0.5, 1]], "B": [[0.5, -1], [1, 1]], "C": [[-1, 0.5], [0.5, 0.5]]}
X = {name: torch.tensor(rows, dtype=torch.float64) for name, rows in X.items()}
Y = {"A": torch.tensor([0, 2]), "B": torch.tensor([1, 1]), "C": torch.tensor([0, 2])}


class Softmax(TinyModule):
    """It begins at ``start``, with SGD of rate 0.1; its bias, if any, begins at 0."""

    def __init__(self, start=W, bias=False):
        super().__init__(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        self.head.weight = nn.Parameter(start.clone())
        self.head.bias = nn.Parameter(torch.zeros(3, dtype=torch.float64)) if bias else None

    def build(self):
        self.body, self.head = nn.Identity(), nn.Linear(2, 3)

    def test_step(self, batch, batch_idx):
        self.log("loss", cross_entropy(self(batch[0]), batch[1]))


class Given(TinyData):
    """These examples, in batches of this size, for training and for test."""

    def __init__(self, x, y, batch_size):
        super().__init__(batch_size=batch_size)
        self.examples = TensorDataset(x, y)

    def train_dataloader(self):
        return DataLoader(self.examples, self.batch_size)

    test_dataloader = train_dataloader


def fit(folder, methods, names="A", model=None, added=((), ()), sizes=None, batch_size=2, **kwargs):
    """Train a client on each of the batches, and others on added examples (x, y), and return the trainer."""
    x, y = torch.cat([X[name] for name in names]), torch.cat([Y[name] for name in names])
    more = [torch.as_tensor(part, dtype=like.dtype) for part, like in zip(added, (x, y), strict=True)]
    data = Given(torch.cat([x, more[0].reshape(-1, 2)]), torch.cat([y, more[1]]), batch_size)
    options = {"max_rounds": 1, "precision": "64-true", "enable_progress_bar": False}
    options["taps"] = {"logits": "head", "representation": "body"}
    trainer = small_trainer(folder, **{**options, **kwargs})
    sizes = sizes or [2] * len(names) + ([len(more[1])] if len(more[1]) else [])
    trainer.fit(model or Softmax(), clients(data, *sizes), list(methods))
    return trainer


def only_first(seed, round_, number, size):
    """A sampler that always draws client 0."""
    return [0]


def assert_printed(found, *numbers):
    """Fail unless ``found`` has the numbers of an example, which are printed with eight digits."""
    wanted = torch.tensor(numbers, dtype=torch.float64).reshape(found.shape)
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-8)
