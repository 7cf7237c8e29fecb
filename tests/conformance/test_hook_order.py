"""The hooks of a visit come in the order in which Lightning calls them, with arguments of the same kinds."""

import pytest
from helpers.conformance import Net, Rows, conform, recording
from lightning.pytorch import LightningModule
from torch.optim import LBFGS, SGD
from torch.optim.lr_scheduler import StepLR

IN_AN_EPOCH = (
    "backward",
    "configure_gradient_clipping",
    "lr_scheduler_step",
    "on_after_backward",
    "on_after_batch_transfer",
    "on_before_backward",
    "on_before_batch_transfer",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "on_train_batch_end",
    "on_train_batch_start",
    "on_train_epoch_end",
    "on_train_epoch_start",
    "optimizer_zero_grad",
    "training_step",
    "transfer_batch_to_device",
)
EVALUATING = tuple(
    name.replace("validation", stage)
    for stage in ("validation", "test")
    for name in (
        "on_validation_batch_end",
        "on_validation_batch_start",
        "on_validation_end",
        "on_validation_epoch_end",
        "on_validation_epoch_start",
        "on_validation_model_eval",
        "on_validation_model_train",
        "on_validation_start",
        "validation_step",
    )
)
ONCE = (
    "configure_model",
    "configure_optimizers",
    "on_fit_end",
    "on_fit_start",
    "on_train_end",
    "on_train_start",
    "prepare_data",
    "setup",
    "teardown",
)


def epochs_of(notes):
    """The notes of each epoch."""
    epochs, inside = [], False
    for one in notes:
        if one[0] == "on_train_epoch_start":
            epochs.append([])
            inside = True
        if inside:
            epochs[-1].append(one)
        inside = inside and one[0] != "on_train_epoch_end"
    return epochs


class Scheduled(Net):
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


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 3}], ids=["each batch", "accumulated"])
@pytest.mark.parametrize("more", [[], ["optimizer_step"]], ids=["plain", "own step"])
@pytest.mark.parametrize("base", [Scheduled, Second])
def test_the_hooks_of_an_epoch_come_as_in_lightning(base, more, options):
    pair = conform(lambda: recording(base, [*IN_AN_EPOCH, *more])(), "32-true", **options)
    ours, theirs = epochs_of(pair.notes), epochs_of(pair.expected_notes)
    assert len(theirs) == 4
    for epoch, expected in zip(ours, theirs, strict=True):
        assert epoch == expected
    assert {name for name, _ in theirs[0]} >= {*IN_AN_EPOCH, *more} - (
        {"lr_scheduler_step"} if base is Second else set()
    )


@pytest.mark.parametrize("name", IN_AN_EPOCH)
def test_one_hook_alone_is_called_as_among_others(name):
    """What is not overridden may be left out, but never what is."""
    pair = conform(lambda: recording(Scheduled, [name])(), "32-true", rounds=1)
    assert pair.notes == pair.expected_notes
    assert pair.notes


@pytest.mark.parametrize("held_out", [[6], [6, 3]], ids=["one loader", "two loaders"])
def test_the_hooks_of_an_evaluation_come_as_in_lightning(held_out):
    names = [*EVALUATING, "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"]
    make = recording(Scheduled, names)
    pair = conform(make, "32-true", rounds=1, epochs=1, data=lambda: Rows(held_out=held_out))
    ours, theirs = (evaluation_of(notes) for notes in (pair.notes, pair.expected_notes))
    assert ours == theirs
    assert {name for name, _ in theirs} == {name for name in names if "test" not in name}


def evaluation_of(notes):
    """The notes from the first hook of an evaluation to its last."""
    names = [name for name, _ in notes]
    last = len(names) - names[::-1].index("on_validation_model_train")
    return notes[names.index("on_validation_model_eval") : last]


def test_the_hooks_around_the_rounds_come_as_in_lightning():
    pair = conform(recording(Scheduled, ONCE), "32-true", rounds=1, epochs=1)
    ours = list(dict.fromkeys(pair.notes))
    assert ours == pair.expected_notes
    assert [name for name, _ in ours] == [
        "prepare_data",
        "setup",
        "configure_model",
        "configure_optimizers",
        "on_fit_start",
        "on_train_start",
        "on_train_end",
        "on_fit_end",
        "teardown",
    ]


def test_the_hooks_around_the_rounds_are_called_once_a_run_and_those_of_training_at_every_visit():
    pair = conform(recording(Scheduled, ONCE), "32-true", rounds=3, epochs=1)
    count = {name: sum(one[0] == name for one in pair.notes) for name in ONCE}
    assert count.pop("configure_optimizers") >= 1
    assert count.pop("on_train_start") == count.pop("on_train_end") == 3
    assert set(count.values()) == {1}


def test_the_hooks_of_a_data_module_are_called_as_in_lightning():
    names = ("prepare_data", "setup", "teardown", "on_before_batch_transfer", "on_after_batch_transfer")
    pair = conform(Net, "32-true", data=recording(Rows, [*names, "transfer_batch_to_device"]), rounds=1)
    of_batches = [one for one in pair.notes if "transfer" in one[0]]
    assert of_batches == [one for one in pair.expected_notes if "transfer" in one[0]]
    called = [name for name, _ in pair.notes]
    assert called[0] == "prepare_data" and called[-1] == "teardown" and "setup" in called


def test_the_names_of_these_tests_are_hooks():
    assert all(hasattr(LightningModule, name) for name in (*IN_AN_EPOCH, *EVALUATING, *ONCE))
