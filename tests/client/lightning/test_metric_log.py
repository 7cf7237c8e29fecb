"""What a module logs has Lightning's names and reductions; the first loss term that is not finite is named."""

import pytest
import torch
from helpers.errors import refused
from helpers.notes import noted
from helpers.runs import small_trainer
from helpers.tiny import TinyData, TinyModule, clients
from torchmetrics import MeanMetric, SumMetric
from torchmetrics.classification import BinaryAUROC

from fl_lightning import Method
from fl_lightning.utilities.errors import ClientError


class Net(TinyModule):
    """Logs what a test gives it; the client has 6 examples, in batches of 4 and 2."""

    def build(self):
        self.mean, self.total = MeanMetric(), SumMetric()

    def training_step(self, batch, batch_idx):
        return self.loss(batch)


def made(**hooks):
    """A module with these hooks."""
    return type("Made", (Net,), hooks)()


def step(log):
    """A training step that calls ``log(module, batch_idx)``."""

    def training_step(self, batch, batch_idx):
        log(self, batch_idx)
        return self.loss(batch)

    return {"training_step": training_step}


@pytest.fixture
def train(tmp_path):
    """``train(model, methods)`` is the metrics of a round, which a module logs under the phase, as ``train/a``."""

    def of(model, methods=(), sizes=(6,), val=(), **kwargs):
        trainer = small_trainer(tmp_path, **{"max_rounds": 1, "enable_progress_bar": False, **kwargs})
        trainer.fit(model, clients(TinyData(sum(sizes), val=val), *sizes), list(methods))
        return trainer.metrics

    return of


# ---------------------------------------------------------------- means and terms
def test_a_value_is_a_mean_over_the_clients_by_weight(train):
    class Logs(Method):
        def on_client_end(self, client):
            client.log("own", client.info.id, weight=1 + 2 * client.info.id)

        def penalty(self, client, step):
            client.log("batch", client.info.id)
            return torch.tensor(2.0, requires_grad=True)

    metrics = train(made(), [Logs()], (6, 4))
    assert metrics["train/own"] == 3 / 4
    assert metrics["train/batch"] == pytest.approx(4 / 10)
    assert metrics["train/logs"] == 2


def test_a_value_of_the_module_takes_precedence_over_the_loss(train):
    assert train(made(**step(lambda module, batch_idx: module.log("loss", 7.0))))["train/loss"] == 7


class Bad(Method):
    def __init__(self, value):
        self.value = value

    def penalty(self, client, step):
        return torch.tensor(self.value if client.num_steps == 2 else 0.0, requires_grad=True)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_first_term_that_is_not_finite_is_named_with_its_step(train, value):
    with refused("client 0", "round 0", "bad", "local step 2", kind=ClientError):
        train(made(), [Bad(value)], local_epochs=2)


def test_more_values_than_are_held_are_added_up(train, monkeypatch):
    monkeypatch.setattr("fl_lightning.client.lightning.metric_log.MAX_PENDING", 8)

    class Counts(Method):
        def penalty(self, client, step):
            return torch.tensor(float(client.num_steps), requires_grad=True)

    assert train(made(), [Counts()], (4,), local_steps=21)["train/counts"] == pytest.approx((21 - 1) / 2)


# ---------------------------------------------------------------- Lightning's arguments
def test_names_and_callback_metrics_are_lightnings(train):
    def log(module, batch_idx):
        value = 1.0 + 2 * batch_idx
        module.log("step", value)
        module.log("epoch", value, on_step=False, on_epoch=True)
        module.log("both", value, on_epoch=True)
        module.log("hidden", value, logger=False)

    def look(self, *args):
        found = self.trainer.callback_metrics
        noted.append({name: float(found[name]) for name in found if not name.startswith("loss")})

    metrics = train(made(**step(log), on_train_batch_end=look, on_train_epoch_end=look))
    now = {"step": 3.0, "both": 3.0, "both_step": 3.0, "hidden": 3.0}
    mean = pytest.approx((4 * 1 + 2 * 3) / 6)
    assert noted[1] == now
    assert noted[2] == {**now, "both": mean, "both_epoch": mean, "epoch": mean}
    logged = {name: metrics[f"train/{name}"] for name in ("step", "epoch", "both_epoch", "both_step")}
    assert logged == {"step": mean, "epoch": mean, "both_epoch": mean, "both_step": 3.0}
    assert "train/hidden" not in metrics and "train/both" not in metrics


@pytest.mark.parametrize(
    ("hook", "options", "names"),
    [
        ("on_train_batch_end", {"on_epoch": True}, {"a_step", "a_epoch"}),
        ("on_train_epoch_end", {}, {"a"}),
        ("on_train_batch_end", {"on_step": False}, ("on_step=False", "on_epoch=False")),
        ("on_train_epoch_end", {"on_step": True}, ("self.log(on_step=True)", "on_train_epoch_end")),
        ("on_fit_start", {}, ("self.log()", "on_fit_start")),
    ],
)
def test_each_hook_has_its_own_defaults_and_refuses_what_it_does_not_allow(train, hook, options, names):
    model = made(**{hook: lambda self, *args: self.log("a", 1.0, **options)})
    if isinstance(names, tuple):
        with refused(*names):
            train(model)
    else:
        metrics = train(model)
        assert {name for name in ("a", "a_step", "a_epoch") if f"train/{name}" in metrics} == names


def test_a_value_logged_once_an_epoch_weighs_as_much_as_the_clients_examples(train):
    def log(self):
        self.log("a", float(self.trainer.num_training_batches))

    metrics = train(made(on_train_epoch_end=log), sizes=(12, 4), local_epochs=2)
    assert metrics["train/a"] == pytest.approx((12 * 3 + 4 * 1) / 16)


def max_of_first(values):
    return values[0].max()


@pytest.mark.parametrize(
    ("value", "options", "named"),
    [
        ("text", {}, ("'str'",)),
        ({"b": {"c": 1.0}}, {}, ("'dict'",)),
        ([1.0], {}, ("'list'",)),
        (torch.zeros(2, 3), {}, ("'tensor'", "value.mean()", "(2, 3)")),
        (SumMetric(), {}, ("'SumMetric'", "'mean', 'total'")),  # it is no attribute of the module
        *((1.0, {"reduce_fx": one}, ("reduce_fx=",)) for one in ("median", torch.prod, max_of_first)),
    ],
)
def test_what_cannot_be_logged_is_refused_by_its_name(train, value, options, named):
    with refused("self.log('a', ...") as caught:
        train(made(**step(lambda module, batch_idx: module.log("a", value, **options))))
    assert all(word in str(caught.value) for word in named)


def test_a_name_belongs_to_one_hook_with_one_set_of_arguments(train):
    def log(module, batch_idx):
        module.log("a", 1.0, reduce_fx="mean", on_step=True)
        module.log("a", 1.0, reduce_fx=torch.mean)
        module.log("a", 1.0, reduce_fx="max")

    with refused("self.log('a', ...)='training_step'"):
        train(made(**step(log)))


def test_one_name_for_two_loaders_is_refused(train):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("own", 1.0, add_dataloader_idx=False)

    with refused("self.log('own', ...)='validation_step'"):
        train(made(validation_step=validation_step), val=(4, 4))


# ---------------------------------------------------------------- torchmetrics objects
class Unmergeable(BinaryAUROC):
    """Its states cannot be merged, since it resets them in its own way."""

    def reset(self):
        super().reset()


def test_clients_whose_metric_is_undefined_are_left_out_of_its_mean(train):
    """The labels are 0, 1, 2, 0, ...; the first client has one of them, and the others order one of two pairs well."""
    scores = torch.tensor([0.5, 0.9, 0.1])

    class Scores(Net):
        def build(self):
            super().build()
            self.area, self.never = Unmergeable(), Unmergeable()

        def training_step(self, batch, batch_idx):
            y = batch[1]
            self.area.update(scores[: len(y)], (y == 1).long())
            self.never.update(scores[: len(y)], torch.zeros_like(y))
            self.log_dict({"area": self.area, "never": self.never}, on_step=True, on_epoch=True)
            return self.loss(batch)

    metrics = train(Scores(), sizes=(1, 3, 3))
    assert metrics["train/area_epoch"] == 0.5
    assert metrics["train/area_epoch/clients"] == 2
    assert metrics["train/never_epoch/clients"] == 0
    assert not {"train/never_epoch", "train/area_step", "train/never_step"} & metrics.keys()
