"""Accuracy of each class: a client without a class does not know it, and every number is a plain count."""

import numpy as np
import pytest
import torch
from helpers.errors import refused
from helpers.runs import small_data, small_model, small_trainer
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning.callbacks import Callback, PerClassAccuracy
from fl_lightning.callbacks.per_class import accuracy, by_group, confusion
from fl_lightning.data import IID, ClassesPerClient
from fl_lightning.methods import FedBN

pytestmark = pytest.mark.usefixtures("undrawn")


class States(Callback):
    """Keeps the local models of the last round."""

    def __init__(self):
        self.states = {}

    def on_client_end(self, trainer, client):
        self.states[client.info.id] = client.state()


def fit(tmp_path, watching=(), data=None, methods=(), **kwargs):
    data = data or small_data(partitioner=ClassesPerClient(4), num_clients=3)
    callbacks = [PerClassAccuracy(**{"examples": None, **kwargs.pop("measure", {})}), *watching]
    trainer = small_trainer(tmp_path, callbacks=callbacks, **{"max_rounds": 1, "local_epochs": 15, **kwargs})
    model = small_model()
    trainer.fit(model, data, list(methods))
    return trainer, model, data


@torch.no_grad()
def plainly(model, state, data):
    """The accuracy of each class, counted one by one."""
    model.load_state_dict(state)
    model.eval()
    x, y = next(iter(DataLoader(TensorDataset(*map(torch.cat, zip(*data.test_dataloader(), strict=True))), 10_000)))
    predicted = model(x).argmax(1)
    return np.array([float((predicted[y == c] == c).double().mean()) for c in range(10)])


def test_before_aggregation_missing_classes_have_accuracy_0_and_every_number_is_a_plain_count(tmp_path):
    states = States()
    trainer, model, data = fit(tmp_path, [states])
    file = np.load(trainer.run_dir / "per_class.npz")
    final = {name: value.clone() for name, value in trainer.server.state.items()}
    for row, k in enumerate(file["clients"][0]):
        np.testing.assert_allclose(file["before"][0, row], plainly(model, states.states[k], data), rtol=1e-12)
        assert file["label_counts"][0, row].tolist() == data.info(k).label_counts.tolist()
        missing = file["label_counts"][0, row] == 0
        assert (file["before"][0, row][missing] == 0).all()
    after = plainly(model, final, data)
    np.testing.assert_allclose(file["after"][0], np.tile(after, (3, 1)), rtol=1e-12)
    assert trainer.metrics["per_class/before/missing"] == 0
    assert trainer.metrics["per_class/before/majority"] > 0.6
    assert trainer.metrics["per_class/after/missing"] == pytest.approx(file["groups_after"][0, :, 2].mean())
    assert trainer.metrics["per_class/after/all"] == pytest.approx(after.mean())
    images = len(data.test_dataloader().rows)
    assert (file["confusion_before"][0].sum(), file["confusion_after"][0].sum()) == (3 * images, images)
    hits = np.trace(file["confusion_after"][0]) / images
    assert hits == pytest.approx(trainer.metrics["test/accuracy"])


def test_without_skew_there_is_no_missing_class_and_no_scalar_of_it(tmp_path):
    trainer, *_ = fit(tmp_path, data=small_data(partitioner=IID()), local_epochs=1, measure={"majority": 0.5})
    assert "per_class/before/majority" in trainer.metrics
    assert "per_class/before/missing" not in trainer.metrics
    assert np.isnan(np.load(trainer.run_dir / "per_class.npz")["groups_before"][0, :, 2]).all()


def test_where_entries_stay_with_the_clients_each_has_a_model_of_its_own_after_aggregation(tmp_path):
    trainer, *_ = fit(tmp_path, methods=[FedBN()], local_epochs=5)
    after = np.load(trainer.run_dir / "per_class.npz")["after"][0]
    assert not np.array_equal(after[0], after[1])
    # the metric of the run is of all test data, too, on average over the clients' own models
    counts = np.load(trainer.run_dir / "per_class.npz")["confusion_after"][0]
    assert np.trace(counts) / counts.sum() == pytest.approx(trainer.metrics["test/accuracy"])


def test_groups_are_means_over_their_classes():
    matrix = np.array([[8, 2, 0, 0], [1, 1, 0, 0], [3, 0, 1, 0], [0, 0, 0, 0]])
    found = accuracy(matrix)
    np.testing.assert_array_equal(found, [0.8, 0.5, 0.25, np.nan])
    np.testing.assert_allclose(by_group(found, np.array([60, 40, 0, 0]), 1.0), [0.65, np.nan, 0.25])
    np.testing.assert_allclose(by_group(found, np.array([90, 10, 0, 0]), 1.0), [0.8, 0.5, 0.25])


def test_logits_of_other_classes_are_refused():
    batch = (torch.eye(2), torch.tensor([0, 1]))
    assert confusion([batch], 2).tolist() == [[1, 0], [0, 1]]
    with refused("logits=(2, 2)", "3"):
        confusion([batch], 3)
