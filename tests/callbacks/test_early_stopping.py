"""EarlyStopping ends a run by Lightning's rule, on all workers alike, and resumes in its state."""

from functools import partial

import pytest
import torch
from helpers.errors import refused, warned
from helpers.runs import assert_same_bits, small_data, small_model, small_trainer, watched
from helpers.tiny import TinyData, TinyModule, clients, variant

from fl_lightning.callbacks import BestCheckpoint, Callback, EarlyStopping
from fl_lightning.core.systems import SystemsHeterogeneity
from fl_lightning.utilities.errors import ClientError

fit = partial(watched, max_rounds=9, data=partial(small_data, train_size=100))


class Falls(Callback):
    """Logs a metric that improves until a round."""

    def __init__(self, until):
        self.until = until

    def on_evaluation_end(self, trainer, phase, client=None):
        trainer.log("score", min(float(trainer.server.round), self.until))


def stopping(**kwargs):
    return EarlyStopping("score", mode="max", patience=2, **kwargs)


def test_the_run_ends_after_patience_rounds_without_improvement_with_a_checkpoint(tmp_path):
    trainer = fit(tmp_path, Falls(2), stopping(), devices=2, checkpoint_every_n_rounds=100)
    # rounds 0, 1 and 2 improve, 3 and 4 do not
    assert [row["round"] for row in trainer.history] == [0, 1, 2, 3, 4]
    checkpoint = torch.load(trainer.run_dir / "checkpoints/last.ckpt", weights_only=True)
    assert checkpoint["round"] == 5
    assert_same_bits(checkpoint["state_dict"], trainer.server.state)


def test_rounds_without_evaluation_do_not_count(tmp_path):
    assert len(fit(tmp_path, Falls(2), stopping(), max_rounds=20, eval_every_n_rounds=2).history) == 8


@pytest.mark.parametrize(("every", "rounds"), [(1, 2), (3, 6), (20, 9)])
def test_evaluations_that_only_a_callback_requires_do_not_count(tmp_path, every, rounds):
    requires = variant(Callback, requires_evaluation=lambda self, round_: True)
    stops = EarlyStopping("test/loss", min_delta=100.0, patience=1)
    assert len(fit(tmp_path, requires(), stops, eval_every_n_rounds=every).history) == rounds


@pytest.mark.filterwarnings("ignore:.*no update arrives")
@pytest.mark.parametrize("watching", ["callback", "schedule"])
def test_a_metric_of_training_may_be_missing_in_a_round_without_an_update(tmp_path, watching):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "train/loss"}}

    members = {"configure_optimizers": configure_optimizers} if watching == "schedule" else {}
    callbacks = [EarlyStopping("train/loss")] if watching == "callback" else []
    trainer = small_trainer(tmp_path, systems=SystemsHeterogeneity(dropout_before=1.0), callbacks=callbacks)
    trainer.fit(variant(TinyModule, **members)(), clients(TinyData()))
    assert [row["clients"] for row in trainer.history] == [0, 0]


@pytest.mark.parametrize(("patience", "rounds"), [(2, 5), (4, 7)])
def test_a_resumed_run_goes_on_counting_with_the_patience_of_its_config(tmp_path, patience, rounds):
    fit(tmp_path, Falls(2), stopping(), max_rounds=4)
    resumed = fit(tmp_path, Falls(2), EarlyStopping("score", mode="max", patience=patience), ckpt_path="last")
    assert len(resumed.history) == rounds


def test_a_second_fit_begins_anew(tmp_path):
    trainer = fit(tmp_path, Falls(2), stopping())
    trainer.fit(small_model(), small_data(train_size=100))
    assert len(trainer.history) == 5


@pytest.mark.parametrize(("hook", "tag"), [("on_round_end", "score"), ("on_evaluation_end", "test/own")])
def test_what_callbacks_of_the_user_log_can_be_monitored_wherever_they_stand(tmp_path, hook, tag):
    logs = variant(Callback, **{hook: lambda self, trainer, *_, **__: trainer.log(tag, 1.0)})
    stops = EarlyStopping(tag, patience=2)
    for order in ([stops, logs()], [logs(), stops]):
        assert len(fit(tmp_path, *order).history) == 3


def test_a_metric_that_is_nan_ends_the_run(tmp_path):
    nan = variant(Callback, on_evaluation_end=lambda self, trainer, *_, **__: trainer.log("score", float("nan")))
    with warned("round 0", "score"):
        assert len(fit(tmp_path, nan(), stopping()).history) == 1


class Overflows(TinyModule):
    """Its loss of the test data is infinite from the second round on, while its weights are finite."""

    def test_step(self, batch, batch_idx):
        self.log("loss", self.loss(batch) * (float("inf") if self.global_step else 1))


def test_a_loss_that_is_infinite_ends_a_run_that_watches_it_with_its_files_and_fails_another(tmp_path):
    data, length = clients(TinyData(test=[8]), 7, 7), {"max_rounds": 4, "enable_progress_bar": False}
    trainer = small_trainer(tmp_path, name="run", callbacks=[EarlyStopping("test/loss")], **length)
    with warned("round 1", "test/loss"):
        trainer.fit(Overflows(), data)
    assert [row["round"] for row in trainer.history] == [0, 1]
    files = tmp_path / "run/version_0/checkpoints"
    assert torch.load(files / "last.ckpt", weights_only=True)["round"] == 2
    assert_same_bits(torch.load(files / "model.ckpt", weights_only=True)["state_dict"], trainer.server.state)
    assert all(value.isfinite().all() for value in trainer.server.state.values())
    ways = (lambda: small_trainer(tmp_path, **length).fit(Overflows(), data), lambda: trainer.test(Loses(), data))
    for way in ways:  # the trainer that has stopped has forgotten it
        with refused("test/loss", kind=ClientError):
            way()


Loses = variant(TinyModule, test_step=lambda self, batch, _: self.log("loss", float("inf")))


@pytest.mark.parametrize(
    ("options", "rounds"), [({"stopping_threshold": 1.5}, 3), ({"divergence_threshold": 0.5, "min_delta": 9.0}, 1)]
)
def test_thresholds_end_the_run(tmp_path, options, rounds):
    assert len(fit(tmp_path, Falls(5), stopping(**options)).history) == rounds


def test_an_unknown_metric_is_refused_with_those_there_are_or_ignored_if_not_strict(tmp_path):
    with refused("EarlyStopping.monitor='absent'", "test/accuracy", "test/loss"):
        fit(tmp_path, EarlyStopping("absent"))
    with warned("EarlyStopping.monitor='absent'", "test/accuracy"):
        assert len(fit(tmp_path, EarlyStopping("absent", strict=False), max_rounds=2).history) == 2


@pytest.mark.parametrize("kind", [EarlyStopping, BestCheckpoint])
@pytest.mark.parametrize("monitor", ["test/absent", "test_accuracy", "val/loss"])
def test_a_metric_that_no_step_logs_is_refused_before_anything_is_written(tmp_path, kind, monitor):
    with refused(f"{kind.__name__}.monitor={monitor!r}", "test/accuracy", "test/loss"):
        fit(tmp_path, kind(monitor, mode="max"))
    assert not list(tmp_path.iterdir())


def test_a_metric_that_usually_rises_without_a_mode_is_named_before_round_0(tmp_path):
    kinds = (EarlyStopping, BestCheckpoint)
    with warned("EarlyStopping.mode", "test/accuracy", "max") as lines:
        fit(tmp_path, *(kind("test/accuracy") for kind in kinds), max_rounds=1)
    keys = [str(line.message).partition("=")[0] for line in lines]
    assert [key for key in keys if key.endswith(".mode")] == [f"{kind.__name__}.mode" for kind in kinds]


def test_a_metric_with_a_mode_or_that_usually_falls_causes_no_warning(tmp_path):
    rows = [("test/accuracy", "min"), ("test/accuracy", "max"), ("test/loss", None), ("train/loss", None)]
    observers = [EarlyStopping(monitor, mode=mode) for monitor, mode in rows]
    for monitor, mode in rows[1:3]:
        fit(tmp_path, *observers, BestCheckpoint(monitor, mode), max_rounds=1)
