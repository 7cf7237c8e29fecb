"""What a module logs has Lightning's names and reductions; the first loss term that is not finite is named."""

import pytest
import torch
from helpers.errors import refused
from lightning.pytorch import LightningModule
from torchmetrics import MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassConfusionMatrix

from fl_lightning.client.entry import MOST_PENDING
from fl_lightning.client.logged import Logged


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.mean, self.total = MeanMetric(), SumMetric()


def logged(*values, batch_size=1):
    """What methods log."""
    found = Logged(Module())
    found.begin_batch([torch.zeros(batch_size)])
    for name, value, weight in values:
        found.add(name, value, weight)
    return found


def in_hook(hook="training_step", examples=10):
    """A module, and what it logs in a hook, in batches of 4."""
    module = Module()
    found = Logged(module, examples=None if hook.startswith("validation") else examples)
    found.begin_batch((torch.zeros(4, 2), torch.zeros(4)))
    module._current_fx_name = hook
    return module, found


def values(sums):
    return {name: value.value for name, value in sums.items()}


def numbers(metrics):
    return {name: float(value) for name, value in metrics.items()}


# ---------------------------------------------------------------- means and terms
def test_values_count_by_weight_and_by_the_batch_where_none_is_given():
    found = logged(("a", 1.0, 3), ("a", torch.tensor(5.0), 1), ("b", 2.0, None), ("b", 4.0, 21), batch_size=7)
    sums = found.sums()
    assert values(sums) == {"a": 2.0, "b": 3.5}
    assert sums["b"].weight == 28


def test_a_weight_of_0_counts_for_nothing():
    assert values(logged(("a", 1.0, 2), ("a", 9.0, 0), batch_size=5).sums()) == {"a": 1.0}


def test_what_was_taken_counts_no_more():
    found = logged(("a", 1.0, 1))
    assert [one.value for one in found.take().values()] == [1.0]
    found.add("a", 3.0)
    assert [one.value for one in found.take().values()] == [3.0]
    assert found.take() == {}


def test_a_value_of_the_module_takes_precedence_over_a_term_of_its_name():
    found = logged(("loss", 1.0, 1))
    found.add_term("loss", torch.tensor(7.0))
    found.add_term("fedprox", torch.tensor(2.0))
    assert values(found.sums()) == {"loss": 1.0, "fedprox": 2.0}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_the_first_term_that_is_not_finite_is_named_with_its_step(bad):
    found = Logged(Module())
    for step in range(4):
        found.add_term("loss", torch.tensor(bad if step >= 3 else 1.0))
        found.add_term("fedcka", torch.tensor(bad if step == 2 else 0.0))
        if step == 2:
            found.end_epoch()
    assert found.first_bad_term() == ("fedcka", 2)


def test_more_values_than_are_held_are_added_up():
    found = Logged(Module())
    for value in range(MOST_PENDING + 5):
        found.add_term("loss", torch.tensor(float(value)))
    assert values(found.sums())["loss"] == (MOST_PENDING + 4) / 2


def test_a_watched_value_is_the_latest():
    _, found = in_hook()
    for value in (10.0, 1.0, 4.0):
        found.log("a", value)
        found.log("b", value, on_epoch=True, on_step=False)
    assert found.callback_metrics()["a"] == 4.0
    found.end_epoch()
    assert found.callback_metrics()["b"] == 5.0
    assert found.callback_metrics().keys() == {"a", "b"}


# ---------------------------------------------------------------- Lightning's arguments
@pytest.mark.parametrize(
    ("reduce_fx", "expected"),
    [
        *(("mean", 35 / 12), ("AVG", 35 / 12), (torch.mean, 35 / 12)),
        *(("sum", 7.0), (torch.sum, 7.0), (sum, 7.0)),
        *(("max", 5.0), (torch.max, 5.0), (max, 5.0)),
        *(("min", 2.0), (torch.min, 2.0), (min, 2.0)),
    ],
)
def test_a_mean_is_over_the_visit_and_another_reduction_over_the_last_epoch(reduce_fx, expected):
    _, found = in_hook()
    for epoch in ((1.0, 4.0), (2.0, 5.0)):
        for value, size in zip(epoch, (4, 2), strict=True):
            found.log("a", torch.tensor(value), reduce_fx=reduce_fx, batch_size=size, on_epoch=True, on_step=False)
        found.end_epoch()
    mean = (4 * 1 + 2 * 4 + 4 * 2 + 2 * 5) / 12
    assert values(found.sums()) == {"a": pytest.approx(mean if expected == 35 / 12 else expected)}


def test_nan_is_no_extreme_that_could_be_missed():
    _, found = in_hook()
    for value in (1.0, float("nan"), 2.0):
        found.log("a", value, reduce_fx="max")
    assert values(found.sums())["a"] != values(found.sums())["a"]


@pytest.mark.parametrize("reduce_fx", ["median", torch.prod, lambda values: values, None, [1]])
def test_another_reduction_is_refused_by_its_name(reduce_fx):
    _, found = in_hook()
    with refused("reduce_fx=", "self.log('a', ...)"):
        found.log("a", 1.0, reduce_fx=reduce_fx)


def test_names_and_callback_metrics_are_lightnings():
    _, found = in_hook()
    for value in (1.0, 3.0):
        found.log("step", value)
        found.log("epoch", value, on_step=False, on_epoch=True)
        found.log("both", value, on_epoch=True)
        found.log("hidden", value, logger=False)
    now = {"step": 3.0, "both": 3.0, "both_step": 3.0, "hidden": 3.0}
    assert numbers(found.callback_metrics()) == now
    found.end_epoch()
    assert numbers(found.callback_metrics()) == {**now, "both": 2.0, "both_epoch": 2.0, "epoch": 2.0}
    assert values(found.sums()) == {"step": 2.0, "epoch": 2.0, "both_epoch": 2.0, "both_step": 3.0}


@pytest.mark.parametrize(
    ("hook", "options", "names"),
    [
        ("training_step", {"on_epoch": True}, {"a_step", "a_epoch"}),
        ("on_train_batch_end", {"on_epoch": True}, {"a_step", "a_epoch"}),
        ("validation_step", {"on_step": True}, {"a_step", "a_epoch"}),
        ("on_train_epoch_end", {}, {"a"}),
        ("validation_step", {}, {"a"}),
    ],
)
def test_each_hook_has_its_own_defaults(hook, options, names):
    _, found = in_hook(hook)
    found.log("a", 1.0, **options)
    assert found.sums().keys() == names


@pytest.mark.parametrize(
    ("hook", "options", "message"),
    [
        ("on_train_epoch_end", {"on_step": True}, ("self.log(on_step=True)", "on_train_epoch_end")),
        ("on_fit_start", {}, ("self.log()", "on_fit_start")),
        ("training_step", {"on_step": False}, ("on_step=False", "on_epoch=False")),
    ],
)
def test_levels_that_a_hook_does_not_allow_are_refused(hook, options, message):
    with refused(*message):
        in_hook(hook)[1].log("a", 1.0, **options)


def test_a_value_logged_once_an_epoch_weighs_as_much_as_the_clients_examples():
    _, found = in_hook("on_train_epoch_end", examples=30)
    for value in (1.0, 2.0):
        found.log("a", value)
        found.end_epoch()
    sums = found.sums()
    assert (sums["a"].value, sums["a"].weight) == (1.5, 60)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("text", ("'str'",)),
        ({"b": {"c": 1.0}}, ("'dict'",)),
        ([1.0], ("'list'",)),
        (MetricCollection([SumMetric()]), ("'MetricCollection'",)),
        (torch.zeros(2, 3), ("'tensor'", "value.mean()", "(2, 3)")),
    ],
)
def test_what_is_no_single_number_is_refused_by_its_name(value, named):
    _, found = in_hook()
    with refused("self.log('a', ...)=", *named):
        found.log("a", value)


def test_the_same_name_with_other_arguments_is_refused():
    _, found = in_hook()
    found.log("a", 1.0, reduce_fx="mean", on_step=True)
    found.log("a", 1.0, reduce_fx=torch.mean)
    with refused("self.log('a', ...)='training_step'"):
        found.log("a", 1.0, reduce_fx="max")


def test_loaders_have_suffixes_or_names_of_their_own():
    _, found = in_hook("validation_step")
    for index in (0, 1):
        found.begin_batch((torch.zeros(4),), index)
        found.log("a", float(index))
        found.log("b", float(index), on_step=True)
        found.log(f"own{index}", float(index), add_dataloader_idx=False)
        found.end_loader()
    with refused("self.log('own0', ...)='validation_step'"):
        found.log("own0", 1.0, add_dataloader_idx=False)
    with refused("'a/dataloader_idx_1'"):
        found.log("a/dataloader_idx_1", 1.0)
    record = found.end_evaluation()
    assert record == {
        **{"a/dataloader_idx_0": 0.0, "a/dataloader_idx_1": 1.0, "own0": 0.0, "own1": 1.0},
        **{"b_epoch/dataloader_idx_0": 0.0, "b_epoch/dataloader_idx_1": 1.0},
    }
    assert numbers(found.callback_metrics()) == {**record, "b/dataloader_idx_0": 0.0, "b/dataloader_idx_1": 1.0}


def test_a_value_that_is_changed_in_place_later_was_logged_as_it_was():
    _, found = in_hook()
    value = torch.tensor(1.0)
    found.log("a", value)
    value += 5
    assert values(found.sums()) == {"a": 1.0}


def test_a_batch_without_a_size_needs_one_where_lightning_needs_it():
    _, found = in_hook()
    found.begin_batch(object())
    found.log("step", 1.0)
    found.log("sum", 1.0, reduce_fx="sum", on_epoch=True)
    found.log("given", 1.0, on_epoch=True, batch_size=3)
    with refused("batch_size="):
        found.log("mean", 1.0, on_epoch=True)


# ---------------------------------------------------------------- torchmetrics objects
def test_a_metric_is_computed_and_reset_every_epoch_and_the_last_value_counts():
    module, found = in_hook()
    for epoch in ((2.0, 4.0), (10.0, 20.0)):
        for value in epoch:
            module.mean.update(value)
            found.log("m", module.mean, on_epoch=True, on_step=False)
        found.end_epoch()
        assert module.mean.update_count == 0
    assert numbers(found.callback_metrics()) == {"m": 15.0}
    sums = found.sums()
    assert (sums["m"].value, sums["m"].weight) == (15.0, 8)


def test_a_collection_is_logged_as_a_dictionary():
    module, found = in_hook()
    module.collection = MetricCollection({"mean": MeanMetric(), "sum": SumMetric()}, prefix="c/")
    for value in (1.0, 3.0):
        module.collection(torch.tensor(value))
        found.log_dict(module.collection, on_epoch=True, on_step=False)
    found.log_dict({"x": 1.0, "y": 2.0}, reduce_fx="sum")
    assert values(found.sums()) == {"c/mean": 2.0, "c/sum": 4.0, "x": 1.0, "y": 2.0}


def test_a_metric_that_is_no_attribute_or_no_number_is_refused():
    module, found = in_hook()
    with refused("='SumMetric'", "['mean', 'total']"):
        found.log("m", SumMetric())
    module.matrix = MulticlassConfusionMatrix(3)
    module, found = in_hook()
    module.matrix = MulticlassConfusionMatrix(3)
    module.matrix.update(torch.tensor([0, 1]), torch.tensor([0, 2]))
    found.log("m", module.matrix)
    with refused("compute()"):
        found.end_epoch()


def test_the_epochs_last_hook_sees_the_epochs_values():
    module, found = in_hook()
    for value in (1.0, 3.0):
        found.log("a", value, on_epoch=True)
    module._current_fx_name = "on_train_epoch_end"
    assert numbers(found.callback_metrics()) == {"a": 2.0, "a_step": 3.0, "a_epoch": 2.0}
    found.end_epoch()
    assert values(found.sums()) == {"a_epoch": 2.0, "a_step": 3.0}
