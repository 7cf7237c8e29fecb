"""The model meets one batch before anything is written, and nothing of it lasts."""

import sys

import pytest
import torch
from helpers.errors import refused
from helpers.runs import assert_same_bits, history, small_data, small_model, small_trainer
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning import Partitioned
from fl_lightning.callbacks import Callback
from fl_lightning.engine.commands import fit as commands
from fl_lightning.engine.processes import apart
from fl_lightning.errors import ClientError
from fl_lightning.methods import MOON, FedProto
from fl_lightning.models import MLP, ImageClassifier

# what the modules below have seen, outside of them, where nothing is put back
seen = []


class Net(LightningModule):
    """A network with all that a step may change: statistics, dropout, attributes and a metric of its own."""

    def __init__(self, inputs=5, outputs=3):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(inputs, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, outputs))
        self.calls, self.sizes = 0, []

    def loss(self, batch):
        self.calls += 1
        self.sizes.append(len(batch[0]))
        seen.append((self.trainer.sanity_checking, self.training))
        return cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        rate = self.optimizers().param_groups[0]["lr"]
        self.log("rate", rate)
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("loss", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Rows(LightningDataModule):
    """Random rows of 5 numbers in 3 classes; those of the validation data may have other shapes."""

    def __init__(self, classes=3, val_inputs=5):
        super().__init__()
        self.classes, self.val_inputs = classes, val_inputs

    def train_dataloader(self):
        x, y = torch.randn(40, 5, generator=torch.Generator().manual_seed(0)), torch.arange(40) % self.classes
        return DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)

    def val_dataloader(self):
        x = torch.randn(12, self.val_inputs, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(x, torch.arange(12) % 3), batch_size=6)


def clients(**kwargs):
    return Partitioned(Rows(**kwargs), num_clients=2)


def fit(tmp_path, model, data, methods=(), **kwargs):
    trainer = small_trainer(tmp_path / "runs", enable_progress_bar=False, **kwargs)
    trainer.fit(model, data, list(methods))
    return trainer


@pytest.fixture(params=[True, False], ids=["forked", "in place"])
def forks(request, monkeypatch):
    monkeypatch.setattr(apart, "can_fork", lambda: request.param)
    return request.param


MISFITS = {
    "inputs": (
        lambda: Net(inputs=6),
        {},
        ("model=Net", "training_step", "client 0", "(4x5 float32, 4 int64"),
    ),
    "targets": (
        lambda: Net(outputs=1),
        {},
        ("model=Net", "training_step", "IndexError", "test_first_batch.py:", "(loss)", "Target"),
    ),
    "validation": (
        Net,
        {"val_inputs": 4},
        ("model=Net", "validation_step", "val data", "(6x4 float32"),
    ),
}


@pytest.mark.parametrize("case", MISFITS)
def test_a_module_that_does_not_fit_is_refused_by_one_line_with_nothing_written(tmp_path, forks, case):
    make, options, words = MISFITS[case]
    with refused(*words) as caught:
        fit(tmp_path, make(), clients(**options))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("devices", [1, 2])
def test_an_encoder_that_does_not_fit_is_one_line_on_any_number_of_workers(tmp_path, devices, capfd):
    with refused("MLP.in_features=60", "give 64"):
        fit(tmp_path, ImageClassifier(MLP(60, [8])), small_data(), devices=devices)
    assert "Traceback" not in capfd.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("method", "tap", "line"),
    [
        (FedProto(1.0), "encoder:pooled", ("trainer.taps", "representation='encoder:pooled'", "Tensor")),
        (MOON(1.0), "unused", ("trainer.taps", "representation='unused'")),
    ],
)
def test_a_tap_that_does_not_fit_is_refused(tmp_path, method, tap, line):
    model = small_model()
    model.unused = nn.Linear(1, 1).requires_grad_(False)
    with refused(*line):
        fit(tmp_path, model, small_data(), [method], taps={"representation": tap})
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("own", [True, False], ids=["own module", "this package's"])
def test_the_run_has_the_bits_of_one_without(tmp_path, monkeypatch, forks, own):
    results = []
    for name in ("with", "without"):
        if name == "without":
            monkeypatch.setattr(commands, "meet_first_batch", lambda run: None)
        torch.manual_seed(0)
        model, data = (Net(), clients()) if own else (small_model(), small_data(val_fraction=0.1))
        trainer = fit(tmp_path / name, model, data, [MOON(1.0)] if not own else [])
        results.append((model, trainer, torch.get_rng_state()))
    (first, one, random), (second, other, other_random) = results
    assert_same_bits(first.state_dict(), second.state_dict())
    assert history(one) == history(other)
    assert torch.equal(random, other_random)
    if own:
        assert (first.calls, first.sizes) == (second.calls, second.sizes)


def test_the_module_can_tell_that_it_is_a_trial(tmp_path, monkeypatch):
    monkeypatch.setattr(apart, "can_fork", lambda: False)
    seen.clear()
    fit(tmp_path, Net(), clients(), max_rounds=1)
    trials = [training for trial, training in seen if trial]
    assert trials == [True, False]  # a batch of training, one of validation data
    assert not any(trial for trial, _ in seen[2:])


def test_a_forked_trial_leaves_nothing_anywhere(tmp_path):
    seen.clear()
    fit(tmp_path, Net(), clients(), max_rounds=1)
    assert seen and not any(trial for trial, _ in seen)


class NeedsItsHooks(Net):
    """A step that relies on a hook before it."""

    def on_train_epoch_start(self):
        self.scale = torch.ones(3)

    def training_step(self, batch, batch_idx):
        assert not self.trainer.sanity_checking
        return cross_entropy(self.net(batch[0]) * self.scale, batch[1])


class Raises(Net):
    """A step that fails by itself."""

    def training_step(self, batch, batch_idx):
        raise RuntimeError("mine")


def test_a_step_that_relies_on_hooks_is_left_to_the_run(tmp_path, forks):
    fit(tmp_path, NeedsItsHooks(), clients(), max_rounds=1)


class Unprintable(Exception):
    """An error that fails to say what it is."""

    def __str__(self):
        raise ValueError


def recurses(batch):
    return recurses(batch)


def raising(error):
    def raises(batch):
        raise error

    return raises


# how a step of the user's fails, and the begin and the end of what is said of it
FAILURES = {
    "attribute": (lambda batch: batch.labels, "AttributeError", "'list' object has no attribute 'labels'"),
    "key": (lambda batch: {}["x"], "KeyError", "'x'"),
    "no text": (raising(AssertionError()), "AssertionError", "raise error"),
    "lines": (raising(RuntimeError("CUDA error: device-side\n\n  assert")), "RuntimeError", "device-side assert"),
    "memory": (raising(MemoryError("out")), "MemoryError", "out"),
    "recursion": (recurses, "RecursionError", "maximum recursion depth exceeded"),
    "iteration": (raising(StopIteration("none left")), "StopIteration", "none left"),
    "exit": (lambda batch: sys.exit(0), "SystemExit", "0"),
    "unprintable": (raising(Unprintable()), "Unprintable", "its __str__ raises ValueError"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_an_error_of_the_users_own_is_one_line_with_its_place(tmp_path, case, monkeypatch):
    monkeypatch.setattr(apart, "can_fork", lambda: False)
    call, kind, text = FAILURES[case]

    class Fails(Net):
        def training_step(self, batch, batch_idx):
            return call(batch)

    with refused("model=Fails", "training_step", "client 0", kind, "test_first_batch.py:", text) as caught:
        fit(tmp_path, Fails(), clients())
    assert "\n" not in str(caught.value) and type(caught.value.__cause__).__name__ == kind
    assert not (tmp_path / "runs").exists()


def test_an_error_of_the_users_own_is_said_by_a_fork_too(tmp_path):
    with refused("RuntimeError", "test_first_batch.py", "(training_step)"):
        fit(tmp_path, Raises(), clients())
    assert not (tmp_path / "runs").exists()


class Prepares(Callback):
    """A callback of the user's own, on whose work a step may rely."""

    def __init__(self, ready):
        self.ready = ready

    def on_round_start(self, trainer):
        prepared["scale"] = self.ready


prepared = {}


class NeedsACallback(Net):
    def training_step(self, batch, batch_idx):
        return self.loss(batch) * prepared["scale"]


def test_a_step_that_relies_on_a_callback_is_left_to_the_run(tmp_path, forks):
    prepared.clear()
    with refused("KeyError", "'scale'"):
        fit(tmp_path, NeedsACallback(), clients())
    with refused("client 0", "round 0", "TypeError", "NoneType", kind=ClientError):
        fit(tmp_path, NeedsACallback(), clients(), callbacks=[Prepares(None)], max_rounds=1)
    prepared.clear()
    fit(tmp_path, NeedsACallback(), clients(), callbacks=[Prepares(1.0)], max_rounds=1)


class Detached(Net):
    def training_step(self, batch, batch_idx):
        return self.loss(batch).detach()


class Complex(Net):
    def training_step(self, batch, batch_idx):
        return self.loss(batch) * 1j


@pytest.mark.parametrize(("make", "word"), [(Detached, "gradient"), (Complex, "complex")])
def test_a_loss_that_has_no_backward_is_refused(tmp_path, forks, make, word):
    with refused(f"model={make.__name__}", "training_step", "loss", word):
        fit(tmp_path, make(), clients())
    assert not (tmp_path / "runs").exists()


class Unreadable(Rows):
    """A data set whose rows cannot be read, in training or in validation."""

    def __init__(self, phase):
        super().__init__()
        self.phase = phase

    def loader(self, phase):
        whole = Rows.train_dataloader(self)
        return DataLoader(whole.dataset, 4, collate_fn=self.collate) if phase == self.phase else whole

    def collate(self, rows):
        raise OSError("no such file")

    def train_dataloader(self):
        return self.loader("train")

    def val_dataloader(self):
        return self.loader("val")


@pytest.mark.parametrize(("phase", "whose"), [("train", "client 0"), ("val", "the val data")])
def test_a_batch_that_cannot_be_read_is_refused(tmp_path, forks, phase, whose):
    with refused("data=Unreadable", whose, "OSError", "test_first_batch.py:", "(collate)"):
        fit(tmp_path, Net(), Partitioned(Unreadable(phase), num_clients=2))
    assert not (tmp_path / "runs").exists()


def test_clients_that_may_fail_are_left_to_the_run(tmp_path, forks):
    with refused("trainer.min_clients=1", kind=ClientError):
        fit(tmp_path, Net(outputs=1), clients(), on_client_error="skip")


def test_a_forked_process_that_says_nothing_is_no_misfit():
    assert apart.said_by_fork(lambda: apart.os._exit(3)) == ""


def test_a_short_trial_run_meets_no_batch_beforehand(tmp_path, monkeypatch):
    monkeypatch.setattr(commands, "meet_first_batch", lambda run: pytest.fail("called"))
    fit(tmp_path, Net(), clients(), fast_dev_run=True)
