"""``self.trainer`` has the values of Lightning's Trainer in the one fit that a client's visits are parts of."""

import pytest
import torch
from helpers.conformance import SAME, StopAfter, by_rounds, conform, note, notes_of
from helpers.errors import warned
from helpers.tiny import TinyData, TinyModule, clients
from lightning.pytorch import LightningModule
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from fl_lightning import FederatedTrainer
from fl_lightning.methods import MOON

CLOCK = ("current_epoch", "global_step", "max_epochs", "max_steps", "estimated_stepping_batches")


def values(trainer, names=SAME):
    """What the trainer has, by name; the folder of the run is not Lightning's."""
    return {name: getattr(trainer, name) for name in names if name != "log_dir"}


class Asking(TinyModule):
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


class Ending(Asking):
    """Notes the clock where training begins and ends as well."""

    def clock(self):
        return values(self.trainer, CLOCK), self.current_epoch, self.global_step

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


def of_steps(number):
    theirs = {"max_epochs": -1, "max_steps": number}
    return {"rounds": 1, "epochs": 9, "ours": {"local_steps": number}, "theirs": theirs}


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (Asking, {}),
        (Asking, {"accumulate_grad_batches": 3}),
        (Asking, {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}),
        (Ending, {"rounds": 1, "epochs": 3}),
        (Ending, {"rounds": 1, "accumulate_grad_batches": 3}),
        (Ending, of_steps(6)),
        (Ending, of_steps(8)),
        (EndsEpochs, {"rounds": 1}),
    ],
    ids=["plain", "accumulated", "clipped", "end", "accumulated end", "steps", "whole passes", "epochs that end early"],
)
def test_every_value_in_every_hook_of_training(make, options):
    conform(make, "32-true", **options)


def test_the_clock_at_the_end_of_each_visit_and_of_a_fit_that_stops_early_has_the_epochs_of_its_rounds(tmp_path):
    class Model(TinyModule):
        def on_train_end(self):
            note("visit", self.current_epoch, self.global_step, self.current_epoch == self.trainer.max_epochs)

        def on_fit_end(self):
            note("fit", self.current_epoch, self.global_step, self.head.weight.tolist())

    def notes(**options):
        how = {"rounds": 3, "folder": tmp_path, "checkpoint_every_n_rounds": 1, **options}
        return notes_of(lambda: by_rounds(Model(), clients(TinyData()), **how))[1]

    *visits, stopped = notes(callbacks=[StopAfter(2)])
    assert visits == [("visit", 2, 8, False), ("visit", 4, 16, False)] and stopped[:3] == ("fit", 4, 16)
    visit, resumed = notes(ckpt_path="last")
    assert visit == ("visit", 6, 24, True) and resumed[:3] == ("fit", 6, 24)
    with warned("trainer.max_rounds=3"):  # there is no round left
        assert notes(ckpt_path="last") == [resumed]


# ---------------------------------------------------------------------- evaluation
class Evaluated(TinyModule):
    """In validation the step of the clock has no meaning: the global model belongs to no client."""

    def note(self):
        note(values(self.trainer, {*SAME} - {"global_step", "estimated_stepping_batches", "num_training_batches"}))
        note(self.trainer.num_val_batches)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.note()
        note(float(self.loss(batch)))

    def on_validation_start(self):
        self.note()

    def on_validation_epoch_end(self):
        self.note()


class Stream(IterableDataset):
    """Examples that come one after another, nobody knows how many."""

    def __iter__(self):
        return iter([(torch.full((8,), 0.1 * index), torch.tensor(index % 3)) for index in range(6)])


class Streamed(TinyData):
    def val_dataloader(self):
        return DataLoader(Stream(), batch_size=4)


@pytest.mark.parametrize(("data", "val"), [(TinyData, [6, 9]), (Streamed, [6])], ids=["two loaders", "stream"])
def test_every_value_in_validation(data, val):
    conform(Evaluated, epochs=1, data=lambda: data(val=val))


def test_every_flag_in_the_commands():
    class Model(TinyModule):
        def test_step(self, batch, batch_idx):
            flags = ("training", "validating", "testing", "predicting", "sanity_checking", "evaluating")
            note([name for name in flags if getattr(self.trainer, name)])
            self.log("loss", self.loss(batch))

        validation_step = test_step

    trainer = FederatedTrainer(max_rounds=1, accelerator="cpu", logger=False, enable_progress_bar=False)
    data = clients(TinyData(val=[4], test=[4]))
    assert notes_of(lambda: trainer.validate(Model(), data))[1] == [["validating", "evaluating"]]
    assert notes_of(lambda: trainer.test(Model(), data))[1] == [["testing", "evaluating"]]


# ---------------------------------------------------------------------- what else it has
def test_the_trainer_has_what_lightnings_own_methods_ask_for_and_names_what_it_lacks(tmp_path):
    class Data(TinyData):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            assert self.trainer.training or self.trainer.testing
            return batch

    class Model(TinyModule):
        def on_train_batch_start(self, batch, batch_idx):
            trainer = self.trainer
            assert trainer.lightning_module is self and trainer.model is self
            assert isinstance(trainer.datamodule, Data)
            assert [type(one) for one in trainer.optimizers] == [torch.optim.SGD]
            assert self.optimizers().optimizer is trainer.optimizers[0]
            assert trainer.callbacks == []
            assert trainer.precision_plugin is trainer.strategy.precision_plugin
            assert trainer.strategy.root_device == self.device
            assert trainer.default_root_dir == str(tmp_path)
            assert trainer.state.stage == "train" and trainer.state.fn == "fit"
            assert len(trainer.train_dataloader) == trainer.num_training_batches
            assert not hasattr(trainer, "fit_loop") and getattr(trainer, "nonsense", 3) == 3
            with pytest.raises(AttributeError, match=r"fit_loop.*own_module_specification\.md"):
                trainer.fit_loop.run()
            note(trainer.log_dir)

        def test_step(self, batch, batch_idx):
            note(self.trainer.num_test_batches)

    trainer, notes = notes_of(lambda: by_rounds(Model(), clients(Data(test=[6])), folder=tmp_path))
    assert notes.count([2]) == 4 and notes.count(str(trainer.run_dir)) == 16


class Inner(LightningModule):
    """A part of a module which asks for the trainer in its forward."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        trainer = self.trainer
        note(trainer.training, trainer.max_epochs, self.current_epoch, self.global_step, trainer.world_size)
        return self.layer(x)


class Nested(TinyModule):
    def build(self):
        self.inner = nn.ModuleDict({"list": nn.ModuleList([nn.Sequential(Inner())])})

    def forward(self, x):
        return super().forward(self.inner["list"][0](x))


def test_lightning_modules_inside_of_containers_have_the_trainer_until_the_run_ends():
    """Lightning itself leaves them without one, so that they could not be compared with it."""
    model = Nested()
    _, notes = notes_of(lambda: by_rounds(model, clients(TinyData())))
    assert notes == [(True, 4, step // 4, step, 1) for step in range(16)]
    with pytest.raises(RuntimeError, match="not attached"):
        model.trainer  # noqa: B018
    assert model.current_epoch == 0 and model.fabric is None


def test_frozen_copies_have_the_trainer():
    how = {"methods": [MOON()], "taps": {"representation": "body", "logits": "head"}, "precision": "32-true"}
    _, notes = notes_of(lambda: by_rounds(Nested(), clients(TinyData()), **how))
    assert len(notes) > 16 and {one[:2] for one in notes} == {(True, 4)}
    assert {one[3] for one in notes} == set(range(16))


@pytest.mark.parametrize("devices", [1, 2])
def test_loggers_write_nothing_in_a_visit_and_warn_once(devices, tmp_path, undrawn):
    class Model(TinyModule):
        def training_step(self, batch, batch_idx):
            assert self.trainer.is_global_zero
            self.logger.experiment.add_scalar("mine", 1.0, self.global_step)
            self.logger.log_metrics({"other": 1.0}, step=self.global_step)
            return self.loss(batch)

        def test_step(self, batch, batch_idx):
            if self.trainer.is_global_zero and batch_idx == 0:
                self.logger.experiment.add_scalar("tested", 1.0, 0)

    data = clients(TinyData(28, test=[6]), 14, 14)
    with warned("self.logger") as caught:
        trainer = by_rounds(Model(), data, devices=devices, logger=True, folder=tmp_path)
    assert sum("self.logger" in str(one.message) for one in caught) == 1
    tags = EventAccumulator(str(trainer.run_dir)).Reload().Tags()["scalars"]
    assert "mine" not in tags and "other" not in tags and "tested" in tags
