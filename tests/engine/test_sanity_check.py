"""The module's steps run on one batch before anything is written, and nothing of it lasts."""

import sys

import pytest
import torch
from helpers.errors import assert_names, refused, warned
from helpers.runs import assert_same_bits, small_data, small_model, small_trainer
from helpers.tiny import Sizes, TinyData, TinyModule, variant
from helpers.tiny import clients as dealt
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from fl_lightning import Method
from fl_lightning.methods import MOON, DeCov, FedDecorr, FedProto, FedRoD, FedUV
from fl_lightning.models import MLP, ImageClassifier
from fl_lightning.utilities.errors import ClientError

# calls of the modules below, recorded outside of restored state
seen = []


class Net(TinyModule):
    """Changes all that a step may change: statistics, random numbers, attributes, and what lies outside."""

    inputs, outputs = 8, 3

    def build(self):
        self.body = nn.Sequential(nn.Linear(self.inputs, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.head = nn.Linear(8, self.outputs)
        self.calls, self.sizes = 0, []

    def loss(self, batch):
        self.calls += 1
        self.sizes.append(len(batch[0]))
        seen.append((self.trainer.sanity_checking, self.training))
        return cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("loss", self.loss(batch))


class Rows(TinyData):
    """Validation data of rows of ``val_inputs`` numbers."""

    def __init__(self, val_inputs=8):
        super().__init__(40, val=(12,))
        self.val_inputs = val_inputs

    def val_dataloader(self):
        return DataLoader([(x[: self.val_inputs], y) for x, y in self.rows(12, 2)], batch_size=6)


def clients(data=None):
    return dealt(data or Rows(), 20, 20)


def fit(tmp_path, model, data=None, methods=(), **kwargs):
    trainer = small_trainer(tmp_path / "runs", enable_progress_bar=False, **{"max_rounds": 1, **kwargs})
    trainer.fit(model, data or clients(), list(methods))
    return trainer


@pytest.fixture
def unwritten(tmp_path):
    """The run must end before anything is written."""
    yield tmp_path
    assert not (tmp_path / "runs").exists()


Wide, Narrow = type("Wide", (Net,), {"inputs": 9}), type("Narrow", (Net,), {"outputs": 1})
MISFITS = {
    "inputs": (Wide, 8, ("model=Wide", "training_step", "client 0", "(4x8 float32, 4 int64")),
    "targets": (
        Narrow,
        8,
        ("model=Narrow", "training_step", "IndexError", "test_sanity_check.py:", "(loss)", "Target"),
    ),
    "validation": (Net, 4, ("model=Net", "validation_step", "val data", "(6x4 float32")),
}


class Mine(Method):
    """A method of the user's own, on whose hooks a step may rely."""


@pytest.mark.parametrize("methods", [(), (Mine(),)], ids=["alone", "own method"])
@pytest.mark.parametrize("case", MISFITS)
def test_a_module_that_does_not_fit_is_refused_by_one_line(unwritten, case, methods):
    make, val_inputs, words = MISFITS[case]
    with refused(*words) as caught:
        fit(unwritten, make(), clients(Rows(val_inputs)), methods)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_an_encoder_that_does_not_fit_is_one_line_on_two_workers(unwritten, capfd):
    with refused("MLP.in_features=60", "give 64"):
        fit(unwritten, ImageClassifier(MLP(60, [8])), small_data(), devices=2)
    assert "Traceback" not in capfd.readouterr().err


def test_a_tap_that_does_not_fit_is_refused(unwritten):
    with refused("trainer.taps", "representation='encoder:pooled'", "Tensor"):
        fit(unwritten, small_model(), small_data(), [FedProto()], taps={"representation": "encoder:pooled"})


def test_the_run_has_the_bits_of_one_without(tmp_path, monkeypatch):
    results = []
    for name in ("with", "without"):
        if name == "without":
            monkeypatch.setattr("fl_lightning.engine.commands.fit.run_sanity_check", lambda run: None)
        torch.manual_seed(0)
        model = Net()
        fit(tmp_path / name, model, max_rounds=2)
        results.append((model, torch.get_rng_state()))
    (first, random), (second, other_random) = results
    assert_same_bits(first.state_dict(), second.state_dict())
    assert torch.equal(random, other_random)
    assert (first.calls, first.sizes) == (second.calls, second.sizes)


@pytest.mark.parametrize("fast_dev_run", [False, True])
def test_the_module_can_tell_a_sanity_check_from_training_and_a_fast_dev_run_has_none(tmp_path, fast_dev_run):
    seen.clear()
    fit(tmp_path, Net(), fast_dev_run=fast_dev_run)
    # a batch of training, one of validation data
    assert [training for trial, training in seen if trial] == ([] if fast_dev_run else [True, False])
    assert len(seen) > 2 and not any(trial for trial, _ in seen[2:])


class NeedsItsHooks(Net):
    """A step that relies on a hook before it."""

    def on_train_epoch_start(self):
        self.scale = torch.ones(3)

    def training_step(self, batch, batch_idx):
        assert not self.trainer.sanity_checking
        return cross_entropy(self(batch[0]) * self.scale, batch[1])


def test_a_step_that_relies_on_hooks_is_left_to_the_run(tmp_path):
    fit(tmp_path, NeedsItsHooks())


def raises(batch):
    raise RuntimeError("CUDA error: device-side\n\n  assert")


# failing steps, and the expected parts of the error
FAILURES = {
    "key": (lambda batch: {}["x"], "KeyError", "'x'"),
    "lines": (raises, "RuntimeError", "device-side assert"),
    "exit": (lambda batch: sys.exit(0), "SystemExit", "0"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_an_error_of_the_users_own_is_one_line_with_its_place(unwritten, case):
    call, kind, text = FAILURES[case]

    class Fails(Net):
        def training_step(self, batch, batch_idx):
            return call(batch)

    words = ("model=Fails", "training_step", "client 0", kind, "test_sanity_check.py:", text)
    with refused(*words) as caught:
        fit(unwritten, Fails())
    assert "\n" not in str(caught.value)
    assert type(caught.value.__cause__).__name__ == kind


class Frozen(Net):
    def build(self):
        super().build()
        self.body.requires_grad_(False)


@pytest.mark.parametrize("method", [FedDecorr, FedUV, DeCov, MOON])
def test_a_penalty_on_representations_that_nothing_trains_is_warned_of_once(tmp_path, method):
    taps = {"representation": "body", "logits": "head"}
    with warned(f"method={method.__name__}", "representation") as caught:
        fit(tmp_path, Frozen(), methods=[method()], taps=taps)
    assert sum("representation" in str(warning.message) for warning in caught) == 1
    fit(tmp_path, Net(), methods=[method()], taps=taps)
    fit(tmp_path, Frozen(), methods=[FedRoD()], taps=taps)  # which trains a head of its own


def test_a_loss_that_has_no_backward_is_refused(unwritten):
    detached = variant(Net, training_step=lambda self, batch, batch_idx: self.loss(batch).detach())
    with refused("training_step", "loss", "gradient"):
        fit(unwritten, detached())


class Unreadable(Rows):
    """Rows that cannot be read, in training or in validation."""

    def __init__(self, phase):
        super().__init__()
        self.phase = phase

    def collate(self, rows):
        raise OSError("no such file")

    def train_dataloader(self):
        return DataLoader(self.rows(40, 1), 4, collate_fn=self.collate if self.phase == "train" else None)

    def val_dataloader(self):
        return DataLoader(self.rows(12, 2), 4, collate_fn=self.collate if self.phase == "val" else None)


@pytest.mark.parametrize(("phase", "whose"), [("train", "client 0"), ("val", "the val data")])
def test_a_batch_that_cannot_be_read_is_refused(unwritten, phase, whose):
    with refused("data=Unreadable", whose, "OSError", "test_sanity_check.py:", "(collate)"):
        fit(unwritten, Net(), clients(Unreadable(phase)))


def test_clients_that_may_fail_are_left_to_the_run(tmp_path):
    with refused("trainer.min_clients=1", kind=ClientError):
        fit(tmp_path, Narrow(), on_client_error="skip")


def pictures(drop_last=False):
    """Digits with 33 examples for each of the first two clients, and 34 for the last."""
    return small_data(num_clients=3, train_size=100, partitioner=Sizes(33, 33, 34), drop_last=drop_last)


class Normed(Net):
    inputs, outputs = 64, 10

    def loss(self, batch):
        return super().loss((batch[0].flatten(1), batch[1]))


@pytest.mark.parametrize("cohort", [1, 3])
def test_a_last_batch_of_one_example_is_refused_before_round_0_where_a_layer_normalises_over_it(tmp_path, cohort, said):
    def fitted(data, model, **kwargs):
        trainer = small_trainer(tmp_path, **{"max_rounds": 1, "cohort_size": cohort, **kwargs})
        trainer.fit(model, data)
        return trainer

    with refused("data=Digits", "2 of 3 clients (0, 1)", "data.drop_last=singletons"):
        fitted(pictures(), Normed())
    with refused("data=Partitioned", "1 of 2 clients (1)", "drop_last=True"):
        fitted(dealt(TinyData(13), 8, 5), Net(), cohort_size=1)
    assert not list(tmp_path.iterdir())
    for drop_last in ("singletons", True):
        fitted(pictures(drop_last), Normed())
    fitted(pictures(), Normed(), local_steps=1)  # which does not reach it
    fitted(pictures(), small_model())  # whose step skips it
    assert_names(said(), "data=Digits", "2 of 3 clients (0, 1)", "data.drop_last=singletons")


def test_a_doctor_and_a_visit_name_the_remedy_for_a_last_batch_of_one_example(tmp_path):
    class Starts(Normed):
        def on_train_start(self):
            """A step may rely on this, so none is tried before."""

    with refused("data=Digits", "data.drop_last=singletons"):
        small_trainer(tmp_path).doctor(Normed(), pictures(), [])
    with refused("client 0", "data.drop_last=singletons", kind=ClientError):
        small_trainer(tmp_path).fit(Starts(), pictures())
