"""Callbacks of Lightning's own trainer are refused by a line that names ours."""

import pytest
from helpers.errors import refused
from helpers.runs import plain_sgd_model, small_data, small_model, small_trainer
from lightning.pytorch import callbacks
from torch.optim.lr_scheduler import StepLR

from fl_lightning.callbacks import EarlyStopping

GIVEN = {
    "EarlyStopping": (callbacks.EarlyStopping("val_loss"), "fl_lightning.callbacks.EarlyStopping"),
    "ModelCheckpoint": (callbacks.ModelCheckpoint(), "trainer.checkpoint_every_n_rounds"),
    "LearningRateMonitor": (callbacks.LearningRateMonitor(), "lr"),
    "ModelSummary": (callbacks.ModelSummary(), "doctor"),
    "StochasticWeightAveraging": (callbacks.StochasticWeightAveraging(1e-2), "evaluated_state"),
    "GradientAccumulationScheduler": (
        callbacks.GradientAccumulationScheduler({0: 2}),
        "trainer.accumulate_grad_batches",
    ),
    "DeviceStatsMonitor": (callbacks.DeviceStatsMonitor(), "fl_lightning.callbacks.CostLedger"),
    "LearningRateFinder": (callbacks.LearningRateFinder(), "tune"),
    "LambdaCallback": (callbacks.LambdaCallback(on_train_batch_end=print), "on_train_batch_end"),
}


@pytest.mark.parametrize("name", GIVEN)
def test_a_callback_of_lightnings_own_trainer_is_refused(tmp_path, name):
    theirs, hint = GIVEN[name]
    with refused(f"trainer.callbacks='{name}'", hint):
        small_trainer(tmp_path, callbacks=[theirs])


@pytest.mark.parametrize(
    ("brought", "words"),
    [
        ([callbacks.EarlyStopping("val_loss")], ("EarlyStopping", "fl_lightning.callbacks.EarlyStopping")),
        (EarlyStopping("val/loss"), ("trainer.callbacks",)),
        (callbacks.LambdaCallback(), ("LambdaCallback", "on_train_batch_end", "fl_lightning.callbacks.Callback")),
    ],
)
def test_callbacks_that_a_module_brings_are_refused_before_anything_is_written(tmp_path, brought, words):
    model = small_model()

    class Brings(type(model)):
        def configure_callbacks(self):
            return brought

    model.__class__ = Brings
    with refused("Brings.configure_callbacks()=", *words):
        small_trainer(tmp_path).fit(model, small_data())
    assert not list(tmp_path.iterdir())


def test_the_clients_learning_rate_is_logged_as_lr(tmp_path):
    def halves(optimizer):
        return StepLR(optimizer, 1, 0.5)

    how = {"client_lr_scheduler": halves, "devices": 2, "local_steps": 1}
    trainer = small_trainer(tmp_path, **how)
    trainer.fit(plain_sgd_model(lr=0.1), small_data(train_size=100, num_clients=3))
    assert [row["lr"] for row in trainer.history] == [pytest.approx(0.1), pytest.approx(0.05)]
