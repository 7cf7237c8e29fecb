"""What a module logs has the value and the name that Lightning gives it."""

import pytest
import torch
from helpers.conformance import Net, Rows, both_precisions, by_rounds, clients, conform, note, same
from helpers.runs import assert_same_bits, history
from torchmetrics import MeanMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from fl_lightning.errors import ClientError, UsageError


def pick(row, phase, name):
    """The metric ``name`` of a phase, under whichever of the two tags it has."""
    return row[name] if name in row else row[f"{phase}/{name}"]


def logging_module(**options):
    """A module that logs the sum of each batch's first column, plus the number of the epoch."""

    class Model(Net):
        def training_step(self, batch, batch_idx):
            value = batch[0][:, 0].sum().double() + self.current_epoch
            self.log("value", value, **options)
            return self.loss(batch)

    return Model


REDUCTIONS = ["mean", "sum", "max", "min", "avg"]


@both_precisions
@pytest.mark.parametrize("reduce_fx", [*REDUCTIONS, torch.sum, torch.max, torch.min, torch.mean])
def test_reductions_over_an_epoch(reduce_fx, precision):
    make = logging_module(reduce_fx=reduce_fx, on_step=False, on_epoch=True)
    pair = conform(make, precision, epochs=1)
    expected = float(pair.lightning.callback_metrics["value"])
    assert pick(pair.trainer.history[-1], "train", "value") == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("reduce_fx", ["sum", "max", "min"])
def test_a_visit_has_the_value_of_its_last_epoch(reduce_fx):
    pair = conform(logging_module(reduce_fx=reduce_fx, on_step=False, on_epoch=True), epochs=3)
    expected = float(pair.lightning.callback_metrics["value"])
    assert pick(pair.trainer.history[-1], "train", "value") == pytest.approx(expected, rel=1e-6)


def test_a_mean_is_over_all_epochs_of_the_visit():
    pair = conform(logging_module(on_step=False, on_epoch=True), rounds=1, epochs=3)
    last = float(pair.lightning.callback_metrics["value"])
    assert pick(pair.trainer.history[-1], "train", "value") == pytest.approx(last - 1, rel=1e-6)


def test_a_value_by_step_and_by_epoch_has_lightnings_name():
    pair = conform(logging_module(on_step=True, on_epoch=True), epochs=1)
    expected = float(pair.lightning.callback_metrics["value_epoch"])
    assert pick(pair.trainer.history[-1], "train", "value_epoch") == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("on_step", [True, None])
def test_a_value_by_step_alone_is_the_mean_over_the_visit(on_step):
    """Lightning's is the last step's; a round has one value."""
    pair = conform(logging_module(on_step=on_step, on_epoch=False if on_step else None), epochs=1)
    mean = float(conform(logging_module(on_epoch=True), epochs=1).lightning.callback_metrics["value_epoch"])
    assert pick(pair.trainer.history[-1], "train", "value") == pytest.approx(mean, rel=1e-6)


def test_values_of_other_hooks_and_of_dictionaries():
    class Model(Net):
        def on_train_epoch_start(self):
            self.log("start", 1.0 + self.current_epoch)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.log_dict({"largest": batch[0].max(), "batch": float(batch_idx)}, on_epoch=True, on_step=False)

        def on_train_epoch_end(self):
            self.log("end", 2.0 + self.current_epoch)

    pair = conform(Model, epochs=1)
    for name in ("start", "end", "largest", "batch"):
        expected = float(pair.lightning.callback_metrics[name])
        assert pick(pair.trainer.history[-1], "train", name) == pytest.approx(expected, rel=1e-6), name


def test_the_size_of_a_batch_is_its_weight_by_lightnings_rule():
    """Of nested batches, and of those that the module tells."""

    class Model(Net):
        def training_step(self, batch, batch_idx):
            x, y = batch["first"]["x"], batch["y"]
            self.log("value", x[:, 0].mean(), on_step=False, on_epoch=True)
            self.log("told", x[:, 1].mean(), on_step=False, on_epoch=True, batch_size=1 + batch_idx)
            return self.loss((x, y))

    class Nested(Rows):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            return {"first": {"x": batch[0]}, "text": "a", "y": batch[1]}

    pair = conform(Model, epochs=1, data=Nested)
    for name in ("value", "told"):
        expected = float(pair.lightning.callback_metrics[name])
        assert pick(pair.trainer.history[-1], "train", name) == pytest.approx(expected, rel=1e-6), name


def test_metrics_of_torchmetrics():
    class Model(Net):
        def __init__(self):
            super().__init__()
            self.accuracy, self.sum, self.mean = MulticlassAccuracy(3, average="micro"), SumMetric(), MeanMetric()

        def training_step(self, batch, batch_idx):
            self.accuracy(self(batch[0]), batch[1])
            self.sum.update(batch[0].sum())
            self.mean.update(batch[0].sum())
            self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
            self.log_dict({"sum": self.sum, "mean": self.mean}, on_step=False, on_epoch=True)
            return self.loss(batch)

    pair = conform(Model, epochs=1)
    for name in ("accuracy", "sum", "mean"):
        expected = float(pair.lightning.callback_metrics[name])
        assert pick(pair.trainer.history[-1], "train", name) == pytest.approx(expected, rel=1e-6), name


class Evaluated(Net):
    """Logs in each hook of validation."""

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        x, _ = batch
        self.log("val_loss", self.loss(batch))
        self.log("val_sum", x.sum(), reduce_fx="sum")
        self.log("val_max", x.max(), reduce_fx="max", add_dataloader_idx=False)

    def on_validation_epoch_end(self):
        self.log("val_end", 1.0 + self.current_epoch)


@both_precisions
def test_validation_with_one_loader(precision):
    class Model(Evaluated):
        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)

    pair = conform(Model, precision, data=lambda: Rows(held_out=[11]), epochs=1)
    for name in ("val_loss", "val_sum", "val_max", "val_end"):
        expected = float(pair.lightning.callback_metrics[name])
        assert pick(pair.trainer.history[-1], "val", name) == pytest.approx(expected, rel=1e-5), name


def test_several_validation_loaders_have_lightnings_suffixes():
    class Model(Evaluated):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            self.log("val_loss", self.loss(batch))
            self.log("val_sum", batch[0].sum(), reduce_fx="sum")
            self.log(f"val_max_{dataloader_idx}", batch[0].max(), reduce_fx="max", add_dataloader_idx=False)

    pair = conform(Model, data=lambda: Rows(held_out=[11, 7]), epochs=1)
    names = [name for name in pair.lightning.callback_metrics if name.startswith("val_")]
    assert "val_loss/dataloader_idx_1" in names and "val_max_1" in names
    for name in names:
        expected = float(pair.lightning.callback_metrics[name])
        assert pick(pair.trainer.history[-1], "val", name) == pytest.approx(expected, rel=1e-6), name


def test_the_trainer_holds_what_was_logged_so_far():
    class Model(Net):
        def training_step(self, batch, batch_idx):
            self.log("value", 1.0 + batch_idx, on_step=False, on_epoch=True, prog_bar=True)
            return self.loss(batch)

        def on_train_epoch_end(self):
            note(float(self.trainer.callback_metrics["value"]))

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", 2.0 + batch_idx)

        def on_validation_epoch_end(self):
            note(float(self.trainer.callback_metrics["val_loss"]))

        def on_validation_end(self):
            note(float(self.trainer.callback_metrics["val_loss"]))

    pair = conform(Model, data=lambda: Rows(held_out=[6]), epochs=1)
    assert sorted(pair.notes) == same(sorted(pair.expected_notes), 1e-6)
    assert len(pair.notes) == 6


# ---------------------------------------------------------------------- over clients
def over_clients(model, devices=1, **options):
    torch.manual_seed(0)
    return by_rounds(model(), clients(Rows(25), 3, 14, 8), devices=devices, epochs=1, **options)


def test_over_clients_a_sum_adds_and_the_others_are_what_they_say():
    """On two workers the same, bit for bit."""

    class Model(Net):
        def training_step(self, batch, batch_idx):
            x = batch[0][:, 0].double()
            for name in ("sum", "max", "min"):
                self.log(name, getattr(x, name)(), reduce_fx=name, on_step=False, on_epoch=True)
            self.log("mean", x.mean(), on_step=False, on_epoch=True)
            return self.loss(batch)

    one, two = over_clients(Model), over_clients(Model, 2)
    x = torch.cat([x for x, _ in Rows(25).train_dataloader()])[:, 0].double()
    for name in ("sum", "max", "min", "mean"):
        assert one.history[-1][f"train/{name}"] == pytest.approx(float(getattr(x, name)()), rel=1e-6), name
    assert history(one) == history(two)
    assert_same_bits(one.server.state, two.server.state)


def test_metrics_of_torchmetrics_are_those_of_each_client_alone():
    """On two workers as on one: no client's metric waits for another's, or holds its numbers."""

    class Model(Net):
        def __init__(self):
            super().__init__()
            self.sum = SumMetric()

        def training_step(self, batch, batch_idx):
            self.sum.update(float(len(batch[1])))
            self.log("seen", self.sum, on_step=False, on_epoch=True)
            return self.loss(batch)

        def on_train_epoch_end(self):
            self.log("computed", self.sum.compute())

    one, two = over_clients(Model), over_clients(Model, 2)
    mean = (3 * 3 + 14 * 14 + 8 * 8) / 25
    assert one.history[-1]["train/computed"] == pytest.approx(mean)
    assert history(one) == history(two)


# ---------------------------------------------------------------------- what is refused
def test_a_reduction_of_the_users_own_is_refused():
    with pytest.raises((UsageError, ClientError), match="reduce_fx"):
        over_clients(logging_module(reduce_fx=lambda values: values[0]))


def test_one_name_with_two_reductions_is_refused_as_by_lightning():
    class Model(Net):
        def training_step(self, batch, batch_idx):
            self.log("value", 1.0, reduce_fx="sum" if batch_idx else "max")
            return self.loss(batch)

    with pytest.raises((UsageError, ClientError), match="value"):
        over_clients(Model)


def test_neither_step_nor_epoch_is_refused_as_by_lightning():
    with pytest.raises((UsageError, ClientError), match="on_step"):
        over_clients(logging_module(on_step=False, on_epoch=False))
