"""The hooks of a visit come in the order in which Lightning calls them, with arguments of the same kinds."""

import pytest
from helpers.conformance import conform, recording
from helpers.tiny import TinyData, TinyModule
from lightning.pytorch import LightningModule
from torch.optim import LBFGS, SGD
from torch.optim.lr_scheduler import StepLR

TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
HOOKS = {name for name in dir(LightningModule) if name.startswith("on_")}
IN_AN_EPOCH = (
    *sorted(name for name in HOOKS if name.startswith(("on_train_batch", "on_train_epoch"))),
    *("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"),
    *("backward", "configure_gradient_clipping", "lr_scheduler_step", "optimizer_zero_grad", "training_step"),
    *TRANSFER,
)
AROUND = ("prepare_data", "setup", "configure_model", "configure_optimizers", "on_fit_start")
ONCE = (*AROUND, "on_train_start", "on_train_end", "on_fit_end", "teardown")


def epochs_of(notes):
    """The notes of each epoch, from its first hook to its last."""
    epochs, inside = [], False
    for one in notes:
        if one[0] == "on_train_epoch_start":
            epochs.append([])
            inside = True
        if inside:
            epochs[-1].append(one)
        inside = inside and one[0] != "on_train_epoch_end"
    return epochs


def evaluation_of(notes):
    """The notes from the first hook of an evaluation to its last."""
    names = [name for name, _ in notes]
    last = len(names) - names[::-1].index("on_validation_model_train")
    return notes[names.index("on_validation_model_eval") : last]


class Scheduled(TinyModule):
    """A loss with an extra output, and a schedule over steps and one over epochs."""

    def training_step(self, batch, batch_idx):
        return {"loss": self.loss(batch), "size": len(batch[0])}

    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), lr=0.1)
        return [optimizer], [StepLR(optimizer, 1), {"scheduler": StepLR(optimizer, 2), "interval": "step"}]

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        return self.loss(batch)

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        return {"loss": self.loss(batch)}


class Second(Scheduled):
    """An optimizer that calls its closure more than once."""

    def configure_optimizers(self):
        return LBFGS(self.parameters(), lr=0.01, max_iter=2)


@pytest.mark.parametrize("accumulated", [1, 3])
@pytest.mark.parametrize("more", [[], ["optimizer_step"]], ids=["plain", "own step"])
@pytest.mark.parametrize("base", [Scheduled, Second])
def test_the_hooks_of_an_epoch_come_as_in_lightning(base, more, accumulated):
    make = recording(base, [*IN_AN_EPOCH, *more])
    epochs = epochs_of(conform(make, "32-true", compared=epochs_of, accumulate_grad_batches=accumulated).notes)
    assert len(epochs) == 4
    assert {*IN_AN_EPOCH, *more} - {name for name, _ in epochs[0]} <= {"lr_scheduler_step"}


@pytest.mark.parametrize("name", [*IN_AN_EPOCH, "optimizer_step"])
def test_one_hook_alone_is_called_as_among_others(name):
    """What is not overridden may be left out, but never what is."""
    assert conform(recording(Scheduled, [name]), "32-true", rounds=1).notes


@pytest.mark.parametrize("held_out", [[6], [6, 3]], ids=["one loader", "two loaders"])
def test_the_hooks_of_an_evaluation_come_as_in_lightning(held_out):
    hooks = {name for name in HOOKS if "validation" in name} - {"on_validation_model_zero_grad"}
    names = {*hooks, "validation_step", "test_step", *TRANSFER}
    make, data = recording(Scheduled, names), lambda: TinyData(val=held_out)
    pair = conform(make, "32-true", rounds=1, epochs=1, data=data, compared=evaluation_of)
    assert {name for name, _ in evaluation_of(pair.notes)} == names - {"test_step"}


def test_the_hooks_around_the_rounds_come_once_a_run_and_those_of_training_at_every_visit():
    def first_of_each(notes):
        return list(dict.fromkeys(notes))

    pair = conform(recording(Scheduled, ONCE), "32-true", rounds=3, epochs=1, compared=first_of_each)
    assert tuple(name for name, _ in first_of_each(pair.notes)) == ONCE
    count = {name: sum(one[0] == name for one in pair.notes) for name in ONCE}
    assert count.pop("configure_optimizers") >= 1
    assert count.pop("on_train_start") == count.pop("on_train_end") == 3
    assert set(count.values()) == {1}
