"""The distances from neural collapse are those of the definition, and 0 for a simplex equiangular tight frame."""

from functools import partial

import numpy as np
import pytest
import torch
from helpers.errors import refused
from helpers.runs import small_data, small_model, small_trainer
from helpers.tiny import TinyData, TinyModule, clients
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning.callbacks import NeuralCollapse, SpectrumMonitor
from fl_lightning.functional import cosines, neural_collapse
from fl_lightning.methods import FedBN
from fl_lightning.models import MLP, ImageClassifier

pytestmark = pytest.mark.usefixtures("undrawn")
Z = [[2.0, 0.1], [2.2, 0.0], [1.8, -0.1], [-1.0, 1.8], [-1.2, 1.6], [-1.0, -1.7]]
LABELS = [0, 0, 0, 1, 1, 2]
WEIGHT = [[1.2, 0.1], [-0.5, 0.9], [-0.6, -1.0]]
NAMES = ("1", "1_quotient", "2_norm_means", "2_norm_weights", "2_angle_means", "2_angle_weights", "2_etf", "3", "4")


class Given(TinyModule):
    """The logits are a fixed linear function of the images."""

    taps = {"representation": "body", "logits": "head"}

    def __init__(self, weight):
        super().__init__(partial(torch.optim.SGD, lr=0.0))
        self.body, self.head = nn.Identity(), nn.Linear(len(weight[0]), len(weight), bias=False)
        self.head.weight.data = torch.as_tensor(weight, dtype=torch.float64).clone()

    def test_step(self, batch, batch_idx):
        self.log("loss", self.loss(batch))


class Rows(TinyData):
    """Given examples for training, and those at ``tested`` for the test, in batches of 2."""

    def __init__(self, z, labels, tested=slice(None)):
        super().__init__()
        self.rows = TensorDataset(torch.as_tensor(z, dtype=torch.float64), torch.as_tensor(labels))
        self.tested = TensorDataset(*self.rows[tested])

    def train_dataloader(self):
        return DataLoader(self.rows, 2)

    def val_dataloader(self):
        return []

    def test_dataloader(self):
        return DataLoader(self.tested, 2)


def measured(tmp_path, z=Z, labels=LABELS, weight=WEIGHT, tested=slice(None), **kwargs):
    """The values that a run logs as ``nc/...``, and its arrays."""
    how = {"max_rounds": 1, "precision": "64-true", "callbacks": [NeuralCollapse(**kwargs)]}
    trainer = small_trainer(tmp_path, **how)
    trainer.fit(Given(weight), clients(Rows(z, labels, tested)))
    values = {tag.removeprefix("nc/"): value for tag, value in trainer.metrics.items() if tag.startswith("nc/")}
    return values, dict(np.load(trainer.run_dir / "neural_collapse.npz"))


@pytest.mark.parametrize(
    ("tested", "how", "expected"),
    [
        (
            slice(None),
            {},
            {
                **{"1": 0.00390502, "1_quotient": 0.00583982, "2_norm_means": 0.01977218, "2_norm_weights": 0.08102543},
                **{"2_angle_means": 0.02118726, "2_angle_weights": 0.05761214, "2_etf": 0.15593556, "3": 0.00809575},
                **{"4": 0, "classes": 3, "dead_units": 0},
            },
        ),
        (slice(None), {"center": "samples"}, {"1": 0.00342720}),
        (slice(None), {"center_weights": True}, {"2_etf": 0.15017546, "1": 0.00390502}),
        (
            slice(5),
            {},
            {
                **{"1": 0.00167680, "1_quotient": 0.00896, "2_norm_means": 0, "2_norm_weights": 0.11054044},
                **{"2_angle_means": 0, "2_angle_weights": 0.58862941, "3": 0.32607244, "classes": 2},
            },
        ),
    ],
)
def test_the_values_are_those_of_an_example_by_hand(tmp_path, tested, how, expected):
    values, _ = measured(tmp_path, tested=tested, **how)
    assert {name: values[name] for name in expected} == pytest.approx(expected, abs=5e-9)
