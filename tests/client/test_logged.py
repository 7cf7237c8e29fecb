"""Logged values are means by their weights, and the first loss term that is not finite is named."""

import pytest
import torch
from torchmetrics import MeanMetric

from fl_lightning.client.logged import MANY, Logged, tagged
from fl_lightning.errors import UsageError


def logged(*values, batch_size=1):
    found = Logged()
    found.batch_size = batch_size
    for name, value, weight in values:
        found.add(name, value, weight)
    return found


def means(values):
    return {name: value.mean().item() for name, value in values.items()}


def test_values_count_by_weight_and_by_the_batch_where_none_is_given():
    found = logged(("a", 1.0, 3), ("a", torch.tensor(5.0), 1), ("b", 2.0, None), ("b", 4.0, 21), batch_size=7)
    sums = found.sums()
    assert means(sums) == {"a": 2.0, "b": 3.5}
    assert sums["b"].weight.item() == 28


def test_a_weight_of_0_counts_for_nothing():
    assert means(logged(("a", 1.0, 2), ("a", 9.0, 0), batch_size=5).sums()) == {"a": 1.0}


def test_what_was_taken_counts_no_more():
    found = logged(("a", 1.0, 1))
    assert means(found.take()) == {"a": 1.0}
    found.add("a", 3.0)
    assert means(found.take()) == {"a": 3.0}
    assert found.take() == {}


def test_a_value_of_the_module_takes_precedence_over_a_term_of_its_name():
    found = logged(("loss", 1.0, 1))
    found.add_term("loss", torch.tensor(7.0))
    found.add_term("fedprox", torch.tensor(2.0))
    assert means(found.sums()) == {"loss": 1.0, "fedprox": 2.0}


def test_a_metric_object_gives_its_value_and_is_reset():
    metric = MeanMetric()
    metric.update(torch.tensor([2.0, 4.0]))
    sums = logged(("m", metric, 2)).sums()
    assert means(sums) == {"m": 3.0}
    assert metric.update_count == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_the_first_term_that_is_not_finite_is_named_with_its_step(bad):
    found = Logged()
    for step in range(4):
        found.add_term("loss", torch.tensor(bad if step >= 3 else 1.0))
        found.add_term("fedcka", torch.tensor(bad if step == 2 else 0.0))
    assert found.first_bad_term() == ("fedcka", 2)


def test_more_values_than_are_held_are_added_up():
    found = Logged()
    for value in range(MANY + 5):
        found.add_term("loss", torch.tensor(float(value)))
    assert means(found.sums())["loss"] == (MANY + 4) / 2


def test_a_watched_mean_is_that_since_the_mark():
    found = logged(("a", 10.0, 4))
    found.mark()
    found.add("a", 1.0, 1)
    found.add("a", 4.0, 2)
    assert found.current("a") == 3.0
    with pytest.raises(UsageError, match=r"monitor='b': it is not logged; choose one of \['a'\]"):
        found.current("b")


@pytest.mark.parametrize(
    ("name", "tag"), [("loss", "train/loss"), ("train/loss", "train/loss"), ("train_loss", "train_loss")]
)
def test_a_name_that_begins_with_its_phase_is_kept(name, tag):
    assert tagged("train", name) == tag
