"""Summaries of a run."""

import math

import pytest

from fl_lightning.storage.metric_format import (
    best,
    few_digits,
    final_names,
    fixed,
    format_value,
    names_to_show,
    tagged,
)


@pytest.mark.parametrize(
    ("name", "tag"), [("loss", "train/loss"), ("train/loss", "train/loss"), ("train_loss", "train_loss")]
)
def test_a_name_that_begins_with_its_phase_is_kept(name, tag):
    assert tagged("train", name) == tag


def test_the_last_line_has_the_metrics_of_a_module_that_names_them_otherwise():
    logged = {"test/more": 1.0, "test/loss": 1.0, "test/f1": 1.0, "test/accuracy": 1.0}
    assert final_names(logged) == ["test/accuracy", "test/loss", "test/more", "test/f1"]
    assert final_names({"train/loss": 1.0, "val_loss": 1.0, "test_f1": 1.0}) == ["test_f1"]
    assert final_names({"train/loss": 1.0, "val_loss": 1.0, "lr": 1.0}) == ["val_loss"]
    assert names_to_show({"lr": 0.1, "val_f1": 0.5, "train/loss": 2e-5}) == ["val_f1", "train/loss"]
    assert names_to_show({"test/acc": 0.1, "test/loss": 0.5, "val/f1": 0.5}) == ["test/loss", "test/acc", "val/f1"]


def test_best_is_the_least_loss_the_most_accuracy_and_nothing_of_an_unknown_metric():
    history = [{"round": 0, "test/accuracy": 0.5, "test_loss": 1.0, "test/x": 1.0}, {"round": 1, "test/accuracy": 0.4}]
    history.append({"round": 2, "test/accuracy": 0.5, "test_loss": 2.0})
    assert best(history, "test/accuracy") == ("50.00 %", "0")
    assert best(history, "test_loss") == ("1.0000", "0")
    assert best(history, "test/x") == ("-", "-")
    first = [{"round": 0, "test/accuracy": math.nan}, {"round": 1, "test/accuracy": 0.5}]
    assert best(first, "test/accuracy") == ("50.00 %", "1") and best(first[:1], "test/accuracy") == ("-", "-")


def test_a_number_that_is_0_as_it_is_shown_has_no_sign():
    assert [fixed(value, 2) for value in (-0.004, -0.0, 0.004, -0.006)] == ["0.00", "0.00", "0.00", "-0.01"]
    assert [fixed(value, 2, "+") for value in (-0.004, 0.004, 0.006)] == ["0.00", "0.00", "+0.01"]
    assert few_digits(-0.0) == "0.0000" and format_value("test/accuracy", -0.0) == "0.00 %"


def test_numbers_keep_their_digits():
    assert [few_digits(value) for value in (0.0, 0.12345, 1e-9, 123456.0)] == ["0.0000", "0.1235", "1e-09", "1.235e+05"]


def test_shares_are_told_in_percent_whatever_the_module_calls_them():
    for name in ("test/accuracy", "test_acc", "val/MulticlassAccuracy", "test/BinaryF1Score", "test/f1", "mean_iou"):
        assert format_value(name, 0.1234567) == "12.35 %"
        assert best([{"round": 0, name: 0.25}, {"round": 1, name: 0.5}], name) == ("50.00 %", "1")
    assert format_value("test/accuracy", 83.0) == "83.0000"  # of a module that logs percent
    assert (
        format_value("test/loss", 0.5)
        == format_value("accuracy_loss", 0.5)
        == format_value("test/previous", 0.5)
        == "0.5000"
    )
