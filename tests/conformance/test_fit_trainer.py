"""``self.trainer`` has the values of Lightning's Trainer in the one fit that a client's visits are parts of."""

import pytest
import torch
from helpers.conformance import (
    SAME,
    Net,
    Rows,
    StopAfter,
    assert_same_notes,
    by_rounds,
    clients,
    conform,
    note,
    notes_of,
)
from helpers.errors import warned
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from fl_lightning import FederatedTrainer
from fl_lightning.methods import MOON

ELSEWHERE = {"log_dir"}  # the folder of the run is not Lightning's


def values(trainer, names=SAME):
    """What the trainer has, by name."""
    return {name: getattr(trainer, name) for name in names if name not in ELSEWHERE}


class Asking(Net):
    """Notes what the trainer has in each hook of an epoch."""

    def on_train_epoch_start(self):
        note("epoch start", values(self.trainer))

    def on_train_batch_start(self, batch, batch_idx):
        note("batch start", values(self.trainer), len(self.trainer.optimizers))

    def training_step(self, batch, batch_idx):
        note("step", values(self.trainer))
        return self.loss(batch)

    def on_before_zero_grad(self, optimizer):
        note("zero_grad", values(self.trainer))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        note("batch end", values(self.trainer))

    def on_train_epoch_end(self):
        note("epoch end", values(self.trainer))


@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate_grad_batches": 3}, {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}],
    ids=["plain", "accumulated", "clipped"],
)
def test_every_value_in_every_hook_of_training(options):
    assert_same_notes(conform(Asking, "32-true", **options))


class Ending(Asking):
    """Notes the clock where training begins and ends."""

    def clock(self):
        names = ("current_epoch", "global_step", "max_epochs", "max_steps", "estimated_stepping_batches")
        return {**values(self.trainer, names), "own": (self.current_epoch, self.global_step)}

    def on_train_start(self):
        note("train start", values(self.trainer))

    def on_train_end(self):
        note("train end", values(self.trainer), self.clock())

    def on_fit_end(self):
        note("fit end", self.clock())


class EndsEpochs(Ending):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 2 else None

    def on_fit_end(self):
        """There the clock is that of whole visits, of whichever client."""


STEPS = {"epochs": 9, "ours": {"local_steps": 6}, "theirs": {"max_epochs": -1, "max_steps": 6}}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Ending, {"epochs": 3}),
        (Ending, {"epochs": 2, "accumulate_grad_batches": 3}),
        (Ending, STEPS),
        (Ending, STEPS | {"ours": {"local_steps": 8}, "theirs": {"max_epochs": -1, "max_steps": 8}}),
        (EndsEpochs, {"epochs": 2}),
    ],
    ids=["epochs", "accumulated", "steps", "whole passes", "epochs that end early"],
)
def test_the_clock_at_the_end_of_training_and_of_the_fit(kind, options):
    pair = conform(kind, "32-true", rounds=1, **options)
    assert_same_notes(pair)
    ends = {rest[-1]["current_epoch"] for name, *rest in pair.notes if name in ("train end", "fit end")}
    assert ends == {2 if "ours" in options else options["epochs"]}


def test_the_clock_at_the_end_of_each_visit_has_its_epochs():
    class Model(Net):
        def on_train_end(self):
            note(self.current_epoch, self.global_step, self.current_epoch == self.trainer.max_epochs)

    _, notes = notes_of(lambda: by_rounds(Model(), clients(Rows()), rounds=3, epochs=2))
    assert notes == [(2, 8, False), (4, 16, False), (6, 24, True)]


def test_a_fit_that_stops_early_ends_with_the_epochs_of_its_rounds(tmp_path):
    class Model(Net):
        def on_fit_end(self):
            note(self.current_epoch, self.global_step)

    how = {"rounds": 3, "epochs": 2, "folder": tmp_path, "checkpoint_every_n_rounds": 1}
    _, notes = notes_of(lambda: by_rounds(Model(), clients(Rows()), callbacks=[StopAfter(2)], **how))
    assert notes == [(4, 16)]
    _, notes = notes_of(lambda: by_rounds(Model(), clients(Rows()), ckpt_path="last", **how))
    _, again = notes_of(lambda: by_rounds(Model(), clients(Rows()), ckpt_path="last", **how))
    assert notes == again == [(6, 24)]  # the second has no round left


def test_every_value_in_validation():
    """There the step of the clock has no meaning: the global model belongs to no client."""

    class Model(Net):
        def note(self):
            note(
                values(self.trainer, set(SAME) - {"global_step", "estimated_stepping_batches", "num_training_batches"})
            )
            note(self.trainer.num_val_batches)

        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            self.note()

        def on_validation_start(self):
            self.note()

        def on_validation_epoch_end(self):
            self.note()

    assert_same_notes(conform(Model, "32-true", epochs=1, data=lambda: Rows(held_out=[6, 9])))


class Stream(IterableDataset):
    """Rows that come one after another, nobody knows how many."""

    def __iter__(self):
        return iter([(torch.full((5,), 0.1 * index), torch.tensor(index % 3)) for index in range(6)])


def test_validation_data_without_a_length():
    class Streamed(Rows):
        def val_dataloader(self):
            return DataLoader(Stream(), batch_size=4)

    class Model(Net):
        def validation_step(self, batch, batch_idx):
            note(self.trainer.num_val_batches, float(self.loss(batch)))

    assert_same_notes(conform(Model, epochs=1, data=lambda: Streamed(held_out=[6])))


def test_every_flag_in_the_commands():
    class Model(Net):
        def note(self):
            flags = ("training", "validating", "testing", "predicting", "sanity_checking", "evaluating")
            note([name for name in flags if getattr(self.trainer, name)])

        def validation_step(self, batch, batch_idx):
            self.note()
            self.log("loss", self.loss(batch))

        def test_step(self, batch, batch_idx):
            self.note()
            self.log("loss", self.loss(batch))

    trainer = FederatedTrainer(max_rounds=1, accelerator="cpu", logger=False, enable_progress_bar=False)
    for command, flag in (("validate", "validating"), ("test", "testing")):
        _, notes = notes_of(
            lambda command=command: getattr(trainer, command)(Model(), clients(Rows(held_out=[4], tested=[4])))
        )
        assert notes == [[flag, "evaluating"]]


def test_what_lightnings_own_methods_ask_for(tmp_path):
    class Model(Net):
        def on_train_batch_start(self, batch, batch_idx):
            trainer = self.trainer
            assert trainer.lightning_module is self and trainer.model is self
            assert [type(one) for one in trainer.optimizers] == [torch.optim.SGD]
            assert self.optimizers().optimizer is trainer.optimizers[0]
            assert trainer.callbacks == []
            assert trainer.precision_plugin is trainer.strategy.precision_plugin
            assert trainer.strategy.root_device == self.device
            assert trainer.default_root_dir == str(tmp_path)
            assert trainer.state.stage == "train" and trainer.state.fn == "fit"
            assert len(trainer.train_dataloader) == trainer.num_training_batches
            note(trainer.log_dir)

        def test_step(self, batch, batch_idx):
            note(self.trainer.num_test_batches)

    trainer, notes = notes_of(lambda: by_rounds(Model(), clients(Rows(tested=[6])), folder=tmp_path))
    assert notes.count([2]) == 4 and notes.count(str(trainer.run_dir)) == 16


def test_the_data_module_is_the_users_and_has_the_trainer_too():
    class Data(Rows):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            note(self.trainer.current_epoch, self.trainer.training)
            return batch

    class Model(Net):
        def on_train_start(self):
            assert isinstance(self.trainer.datamodule, Data)

    assert_same_notes(conform(Model, data=Data))


def test_a_name_that_it_lacks_is_one_line_that_names_it():
    class Model(Net):
        def on_train_start(self):
            assert not hasattr(self.trainer, "fit_loop") and getattr(self.trainer, "nonsense", 3) == 3
            with pytest.raises(AttributeError, match=r"fit_loop") as info:
                self.trainer.fit_loop.run()
            note(str(info.value))

    _, notes = notes_of(lambda: by_rounds(Model(), clients(Rows()), rounds=1))
    assert len(notes) == 1 and "\n" not in notes[0] and "own_module_specification.md" in notes[0]


class Inner(LightningModule):
    """A part of a module which asks for the trainer in its forward."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x):
        note(
            self.trainer.training,
            self.trainer.max_epochs,
            self.current_epoch,
            self.global_step,
            self.trainer.world_size,
        )
        return self.layer(x)


class Nested(Net):
    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleDict({"list": nn.ModuleList([nn.Sequential(Inner())])})

    def forward(self, x):
        return self.net(self.inner["list"][0](x))


def test_lightning_modules_inside_of_containers_have_the_trainer():
    """Lightning itself leaves them without one, so that they could not be compared with it."""
    _, notes = notes_of(lambda: by_rounds(Nested(), clients(Rows())))
    steps = [(True, 4, step // 4, step, 1) for step in range(16)]
    assert notes == steps


def test_frozen_copies_have_the_trainer():
    taps = {"representation": "net.0", "logits": "net"}
    _, notes = notes_of(lambda: by_rounds(Nested(), clients(Rows()), methods=[MOON()], taps=taps, precision="32-true"))
    assert len(notes) > 16 and {one[:2] for one in notes} == {(True, 4)}
    assert {one[3] for one in notes} == set(range(16))


def test_after_the_run_the_module_has_no_trainer():
    model = Nested()
    by_rounds(model, clients(Rows()))
    with pytest.raises(RuntimeError, match="not attached"):
        model.trainer  # noqa: B018
    assert model.current_epoch == 0 and model.fabric is None


@pytest.mark.parametrize("devices", [1, 2])
def test_loggers_write_nothing_in_a_visit_and_warn_once(devices, tmp_path):
    class Model(Net):
        def training_step(self, batch, batch_idx):
            assert self.trainer.is_global_zero
            self.logger.experiment.add_scalar("mine", 1.0, self.global_step)
            self.logger.log_metrics({"other": 1.0}, step=self.global_step)
            return self.loss(batch)

        def test_step(self, batch, batch_idx):
            if self.trainer.is_global_zero and batch_idx == 0:
                self.logger.experiment.add_scalar("tested", 1.0, 0)

    data = clients(Rows(28, tested=[6]), 14, 14)
    with warned("self.logger") as caught:
        trainer = by_rounds(Model(), data, devices=devices, logger=True, folder=tmp_path)
    assert sum("self.logger" in str(one.message) for one in caught) == 1
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(trainer.run_dir)).Reload()
    tags = events.Tags()["scalars"]
    assert "mine" not in tags and "other" not in tags and "tested" in tags
