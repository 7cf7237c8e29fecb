"""Modules and data modules of ``pytorch_lightning`` are taken as those of ``lightning.pytorch``."""

import importlib
import sys
import types

import lightning.pytorch
import pytest
import torch
import yaml
from helpers.runs import assert_same_bits, history, small_trainer
from helpers.tiny import TinyData, TinyModule
from lightning.pytorch import LightningDataModule as OfLightning
from torch import nn

from fl_lightning import Partitioned
from fl_lightning.cli import main
from fl_lightning.methods import MOON
from fl_lightning.utilities.lightning_compat import (
    LightningDataModule,
    LightningModule,
    classes,
    is_callback,
    is_overridden,
)

MODULE = """
import torch
from NAMESPACE import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Inner(LightningModule):
    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(6, width)

    def forward(self, x):
        if self.training:
            self.log("mean_input", x.mean())
        return self.layer(x)

class Net(LightningModule):
    taps = {"representation": "inner", "logits": "inner"}

    def __init__(self, width=3):
        super().__init__()
        self.inner = Inner(width)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.inner(batch[0]), batch[1])

    def on_train_start(self):
        self.log("epoch", float(self.current_epoch))

    def test_step(self, batch, batch_idx):
        self.log("hits", (self.inner(batch[0]).argmax(1) == batch[1]).float().mean())

    def predict_step(self, batch, batch_idx):
        return self.inner(batch[0])

    def on_save_checkpoint(self, checkpoint):
        checkpoint["mine"] = {"number": 7}

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

class Data(LightningDataModule):
    def setup(self, stage):
        x = torch.randn(90, 6, generator=torch.Generator().manual_seed(0))
        self.set = TensorDataset(x, x[:, :3].argmax(1))

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] * 2, batch[1]]

    def train_dataloader(self):
        return DataLoader(self.set, batch_size=16)

    def test_dataloader(self):
        return DataLoader(self.set, batch_size=40)
"""


@pytest.fixture
def other(monkeypatch):
    """A stand-in for the other distribution, with classes of its own."""
    module = types.ModuleType("pytorch_lightning")
    for name in ("LightningModule", "LightningDataModule", "Callback"):
        kind = type(name, (nn.Module,) if name == "LightningModule" else (), {"on_train_start": lambda self: None})
        setattr(module, name, kind)
    monkeypatch.setitem(sys.modules, "pytorch_lightning", module)
    return module


def test_a_class_of_either_distribution_is_one_of_both(other):
    class Net(other.LightningModule):
        def on_train_start(self):
            pass

    assert issubclass(Net, LightningModule) and not issubclass(Net, LightningDataModule)
    assert isinstance(TinyModule(), LightningModule) and isinstance(TinyData(), LightningDataModule)
    assert not issubclass(nn.Linear, LightningModule)
    assert {Net, TinyModule} <= set(LightningModule.__subclasses__())
    assert is_overridden("on_train_start", Net())
    assert not is_overridden("on_train_start", other.LightningModule())
    assert is_callback(other.Callback())


def test_without_the_other_distribution_there_is_one_class_of_a_name(monkeypatch):
    monkeypatch.delitem(sys.modules, "pytorch_lightning", raising=False)
    assert classes("LightningDataModule") == (OfLightning,)
    assert not is_callback(TinyModule())
    assert is_callback(lightning.pytorch.callbacks.ModelSummary())


@pytest.fixture
def module_of(tmp_path, monkeypatch):
    """``module_of(name)`` imports a user's module of one of the distributions."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)

    def write(name):
        pytest.importorskip(name)
        (tmp_path / f"of_{name.replace('.', '_')}.py").write_text(MODULE.replace("NAMESPACE", name))
        return importlib.import_module(f"of_{name.replace('.', '_')}")

    return write


def test_the_same_module_of_either_distribution_trains_to_the_same_bits(tmp_path, module_of, undrawn):
    found = {}
    for name in ("lightning.pytorch", "pytorch_lightning"):
        torch.manual_seed(0)
        model, data = module_of(name).Net(), Partitioned(module_of(name).Data(), num_clients=3)
        trainer = small_trainer(tmp_path, name=name)
        trainer.fit(model, data, [MOON()])
        path = tmp_path / name / "version_0/checkpoints/model.ckpt"
        found[name] = trainer, small_trainer(tmp_path).predict(model, data), torch.load(path, weights_only=True)
        assert type(model).load_from_checkpoint(path).inner.layer.bias.equal(model.inner.layer.bias)
    (ours, predicted, saved), (theirs, also, other) = found.values()
    assert_same_bits(ours.server.state, theirs.server.state)
    assert history(ours) == history(theirs)
    assert {"test/hits", "train/mean_input", "train/epoch", "train/moon"} <= set(ours.metrics)
    assert all(map(torch.equal, predicted, also))
    assert saved["mine"] == other["mine"] == {"number": 7}


def test_a_config_names_classes_of_the_other_distribution(module_of, tmp_path, capsys, undrawn):
    module = module_of("pytorch_lightning")
    data = {"class_path": f"{module.__name__}.Data"}
    config = {
        "model": {"class_path": f"{module.__name__}.Net", "init_args": {"width": 4}},
        "data": {"class_path": "Partitioned", "init_args": {"datamodule": data}},
        "trainer": {"max_rounds": 1, "logger": False},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    main(["fit", "--config", "config.yaml"])
    assert "1 round, test/hits" in capsys.readouterr().out
    path = tmp_path / "runs/fedavg/version_0/checkpoints/model.ckpt"
    loaded = module.Net.load_from_checkpoint(path)
    assert_same_bits(loaded.state_dict(), torch.load(path, weights_only=True)["state_dict"])
