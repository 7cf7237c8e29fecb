"""What a module logs has the value and the name that Lightning gives it."""

import pytest
import torch
from helpers.conformance import by_rounds, conform, note
from helpers.tiny import TinyData, TinyModule, clients
from sklearn.metrics import roc_auc_score
from torchmetrics import MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy
from torchmetrics.functional.classification import binary_auroc

REDUCTIONS = {
    **{name: name for name in ("mean", "avg", "sum", "max", "min")},
    **{f"torch.{one.__name__}": one for one in (torch.sum, torch.max, torch.min, torch.mean)},
}


def logged(trainer, name):
    """The value of a metric in the last round, with or without its phase."""
    row = trainer.history[-1]
    return row[name] if name in row else row[f"train/{name}"]


def assert_logged(pair, *names):
    """Assert that metrics have the values that Lightning's Trainer has in the end."""
    for name in names:
        expected = float(pair.lightning.callback_metrics[name])
        assert logged(pair.trainer, name) == pytest.approx(expected, rel=1e-6), name


def logging(**metrics):
    """A module that logs the sum of each batch's first column, plus the number of the epoch, with several options."""

    class Logging(TinyModule):
        def training_step(self, batch, batch_idx):
            value = batch[0][:, 0].sum().double() + self.current_epoch
            for name, options in metrics.items():
                self.log(name, value, **options)
            return self.loss(batch)

    return Logging


reduced = logging(**{name: {"reduce_fx": one, "on_step": False, "on_epoch": True} for name, one in REDUCTIONS.items()})


@pytest.mark.parametrize("precision", ["64-true", "32-true"])
def test_reductions_over_an_epoch(precision):
    assert_logged(conform(reduced, precision, epochs=1), *REDUCTIONS)


def test_a_visit_has_the_mean_over_its_epochs_and_otherwise_the_value_of_the_last():
    pair = conform(reduced, rounds=1, epochs=3)
    assert_logged(pair, "sum", "max", "min")
    last = float(pair.lightning.callback_metrics["mean"])
    assert logged(pair.trainer, "mean") == pytest.approx(last - 1, rel=1e-6)


def test_a_value_by_step_and_by_epoch_has_lightnings_name_and_one_by_step_alone_is_the_mean_over_the_visit():
    """Lightning's value by step is the last step's; a round has one value."""
    step = {"on_step": True, "on_epoch": False}
    pair = conform(logging(both={"on_step": True, "on_epoch": True}, step=step, none={}), epochs=1)
    assert_logged(pair, "both_epoch", "both_step")
    mean = float(pair.lightning.callback_metrics["both_epoch"])
    assert [logged(pair.trainer, name) for name in ("step", "none")] == 2 * [pytest.approx(mean, rel=1e-6)]


def test_values_of_other_hooks_and_of_dictionaries():
    class Model(TinyModule):
        def on_train_epoch_start(self):
            self.log("start", 1.0 + self.current_epoch)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.log_dict({"largest": batch[0].max(), "batch": float(batch_idx)}, on_epoch=True, on_step=False)

        def on_train_epoch_end(self):
            self.log("end", 2.0 + self.current_epoch)

    assert_logged(conform(Model, epochs=1), "start", "end", "largest", "batch")


@pytest.mark.filterwarnings("ignore:Trying to infer")  # a text is one, and it warns once a process
def test_the_size_of_a_batch_is_its_weight_by_lightnings_rule():
    """Of nested batches, and of those that the module tells."""

    class Model(TinyModule):
        def training_step(self, batch, batch_idx):
            x, y = batch["first"]["x"], batch["y"]
            self.log("value", x[:, 0].mean(), on_step=False, on_epoch=True)
            self.log("told", x[:, 1].mean(), on_step=False, on_epoch=True, batch_size=1 + batch_idx)
            self.log("first", x[:, 2].mean(), on_step=False, on_epoch=True, batch_size=int(batch_idx == 0))
            return self.loss((x, y))

    class Nested(TinyData):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            return {"first": {"x": batch[0]}, "text": "a", "y": batch[1]}

    assert_logged(conform(Model, epochs=1, data=Nested), "value", "told", "first")


@pytest.mark.parametrize("epochs", [1, 2])
def test_metrics_of_torchmetrics(epochs):
    """They are computed and reset every epoch, and the last value counts."""

    class Model(TinyModule):
        def build(self):
            self.accuracy, self.sum, self.mean = MulticlassAccuracy(3, average="micro"), SumMetric(), MeanMetric()
            self.both = MetricCollection({"mean": MeanMetric(), "sum": SumMetric()}, prefix="c/")

        def training_step(self, batch, batch_idx):
            self.accuracy(self(batch[0]), batch[1])
            self.sum.update(batch[0].sum())
            self.mean.update(batch[0].sum())
            self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
            self.log_dict({"sum": self.sum, "mean": self.mean}, on_step=False, on_epoch=True)
            self.both(batch[0].sum() + self.current_epoch)
            self.log_dict(self.both, on_step=False, on_epoch=True)
            return self.loss(batch)

    assert_logged(conform(Model, epochs=epochs), "accuracy", "sum", "mean", "c/mean", "c/sum")


def test_the_trainer_holds_what_was_logged_so_far():
    class Model(TinyModule):
        def training_step(self, batch, batch_idx):
            self.log("value", 1.0 + batch_idx, on_step=False, on_epoch=True, prog_bar=True)
            return self.loss(batch)

        def on_train_epoch_end(self):
            note(float(self.trainer.callback_metrics["value"]))

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", 2.0 + batch_idx)

        def on_validation_epoch_end(self):
            note(float(self.trainer.callback_metrics["val_loss"]))

        on_validation_end = on_validation_epoch_end

    pair = conform(Model, data=lambda: TinyData(val=[6]), epochs=1, compared=sorted)
    assert len(pair.notes) == 6


# ---------------------------------------------------------------------- over clients
@pytest.mark.parametrize("devices", [1, 2])
def test_over_clients_a_sum_adds_a_mean_weighs_by_examples_and_metrics_are_of_all_batches(devices):
    """The first client sees one class, of which an area under the curve is undefined."""

    class Model(TinyModule):
        def build(self):
            self.seen = SumMetric()
            self.areas = MetricCollection({"exact": BinaryAUROC(), "binned": BinaryAUROC(thresholds=5)})

        def training_step(self, batch, batch_idx):
            x = batch[0][:, 0].double()
            self.areas.update(x, (batch[1] > 0).long())
            self.log_dict(self.areas, on_step=False, on_epoch=True)
            for name in ("sum", "max", "min", "mean"):
                self.log(name, getattr(x, name)(), reduce_fx=name, on_step=False, on_epoch=True)
            self.seen.update(float(len(x)))
            self.log("seen", self.seen, on_step=False, on_epoch=True)
            return self.loss(batch)

        def on_train_epoch_end(self):
            self.log("computed", self.seen.compute())

    row = by_rounds(Model(), clients(TinyData(25), 1, 16, 8), devices=devices, epochs=1).history[-1]
    batches = [*TinyData(25).train_dataloader()]
    x, y = torch.cat([x for x, _ in batches])[:, 0].double(), torch.cat([y for _, y in batches])
    for name in ("sum", "max", "min", "mean"):
        assert row[f"train/{name}"] == pytest.approx(float(getattr(x, name)()), rel=1e-6), name
    assert row["train/seen"] == 25
    assert row["train/computed"] == pytest.approx((1 * 1 + 16 * 16 + 8 * 8) / 25)
    assert row["train/exact"] == pytest.approx(roc_auc_score(y > 0, x))
    assert row["train/binned"] == pytest.approx(float(binary_auroc(x, (y > 0).long(), thresholds=5)))
    assert not [tag for tag in row if tag.startswith("train/") and tag.endswith("/clients")]
