"""What is told of a run in few words."""

import pytest

from fl_lightning.records.summary import best, few_digits, final_names, names_to_show, tagged


@pytest.mark.parametrize(
    ("name", "tag"), [("loss", "train/loss"), ("train/loss", "train/loss"), ("train_loss", "train_loss")]
)
def test_a_name_that_begins_with_its_phase_is_kept(name, tag):
    assert tagged("train", name) == tag


def test_the_last_line_has_the_metrics_of_a_module_that_names_them_otherwise():
    assert final_names({"test/accuracy": 1.0, "test/loss": 1.0, "test/more": 1.0}) == ["test/accuracy", "test/loss"]
    assert final_names({"train/loss": 1.0, "val_loss": 1.0, "test_f1": 1.0}) == ["test_f1"]
    assert final_names({"train/loss": 1.0, "val_loss": 1.0, "lr": 1.0}) == ["val_loss"]
    assert names_to_show({"lr": 0.1, "val_f1": 0.5, "train/loss": 2e-5}) == ["val_f1", "train/loss"]


def test_best_is_the_least_loss_the_most_accuracy_and_nothing_of_an_unknown_metric():
    history = [{"round": 0, "test/accuracy": 0.5, "test_loss": 1.0, "test/x": 1.0}, {"round": 1, "test/accuracy": 0.4}]
    history.append({"round": 2, "test/accuracy": 0.5, "test_loss": 2.0})
    assert best(history, "test/accuracy") == ("0.5000", "1")
    assert best(history, "test_loss") == ("1.0000", "1")
    assert best(history, "test/x") == ("-", "-")


def test_numbers_keep_their_digits():
    assert [few_digits(value) for value in (0.0, 0.12345, 1e-9, 123456.0)] == ["0.0000", "0.1235", "1e-09", "1.235e+05"]
