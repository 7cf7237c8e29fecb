"""Reference models run once a batch, as far as the last tap, and cached observations have the same bits."""

import pytest
import torch
from helpers.errors import refused
from helpers.runs import small_data, small_trainer
from helpers.tiny import TinyModule
from torch import nn
from torch.nn.functional import mse_loss

from fl_lightning import Method
from fl_lightning.data import Pooled
from fl_lightning.utilities.errors import ClientError

# the batches that reference models ran on: their sizes, and whether the forward got to the head
_begun, _ended = [], []


@pytest.fixture(autouse=True)
def _nothing_noted():
    _begun.clear()
    _ended.clear()


class Net(TinyModule):
    """Notes the forwards of its frozen copies, which are in eval mode."""

    def build(self):
        self.body, self.head = nn.Sequential(nn.Flatten(), nn.Linear(64, 6)), nn.Linear(6, 10)
        self.taps = {"early": "body", "late": "head"}

    def forward(self, x):
        if not self.training:
            _begun.append(len(x))
        hidden = self.body(x)
        if not self.training:
            _ended.append(len(x))
        return self.head(hidden)


class Observes(Method):
    """Pulls a tap towards that of a reference model, which it compares with a copy of its own."""

    requires = ("early", "late")

    def __init__(self, taps=("early",), reference="global"):
        self.taps, self.reference = taps, reference

    def on_client_start(self, client):
        client.load_reference(self.reference, client.received, self.taps)
        copy = client.reference_copy()
        assert not copy.training and not any(parameter.requires_grad for parameter in copy.parameters())
        client.scratch(self).copy = copy

    def penalty(self, client, step):
        found, body = client.observe(self.reference), client.scratch(self).copy.body
        assert client.observe(self.reference) is found
        assert torch.equal(found["early"], body(step.batch[0])) and not found["early"].requires_grad
        return mse_loss(step.taps["early"], found["early"])


def data(train):
    return small_data(num_clients=1, partitioner=Pooled(), train_size=train, test_size=5, batch_size=4)


def fit(tmp_path, methods, model=Net, train=11, **kwargs):
    torch.manual_seed(0)
    given = {"max_rounds": 1, "enable_progress_bar": False, "cache_references": False, **kwargs}
    trainer = small_trainer(tmp_path, **given)
    trainer.fit(model(), data(train), methods)
    return trainer


def test_a_reference_model_runs_once_a_batch_and_as_far_as_the_last_tap(tmp_path):
    fit(tmp_path, [Observes()], local_epochs=2)
    assert sorted(_begun) == [3, 3, 4, 4, 4, 4] and _ended == []


class InPlace(Net):
    def training_step(self, batch, batch_idx):
        batch[0].mul_(2)
        return super().training_step(batch, batch_idx)


class Rebinding(Net):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return list(batch)

    def training_step(self, batch, batch_idx):
        batch[0] = batch[0] * 2
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("kind", [InPlace, Rebinding])
def test_a_step_that_changes_its_batch_is_refused(tmp_path, kind):
    with refused(f"{kind.__name__}.training_step", kind=ClientError):
        fit(tmp_path, [Observes()], kind)
