"""The drift of clients: what agrees has dissimilarity 1, and every number is that of the changes themselves."""

from functools import partial

import numpy as np
import pytest
import torch
from helpers.runs import measured, plain_sgd_model

from fl_lightning.callbacks import Callback, Drift
from fl_lightning.callbacks.drift import against_counts, correlation, summary_of_changes
from fl_lightning.data import IID, Digits

pytestmark = pytest.mark.usefixtures("undrawn")
fit = partial(measured, "drift.npz", max_rounds=1)


def summary(changes, weights=None, lr_totals=None):
    number = len(changes)
    ones = np.ones(number)
    return summary_of_changes(
        changes @ changes.T, ones if weights is None else weights, ones if lr_totals is None else lr_totals
    )


def test_changes_that_differ_in_their_rates_alone_are_one_gradient():
    change, rates = np.random.default_rng(0).normal(size=5), np.array([0.1, 0.2, 0.4])
    assert summary(np.outer(rates, change), lr_totals=rates)["dissimilarity"] == pytest.approx(1)
    assert summary(np.outer(rates, change))["dissimilarity"] > 1.1


def test_opposite_changes_have_no_mean_and_a_change_of_0_no_direction():
    change = np.ones(3)
    opposite = summary(np.stack([change, -change]))
    assert np.isnan(opposite["dissimilarity"])
    assert np.isnan(opposite["to_mean"]).all()
    assert opposite["pairwise"][0, 1] == pytest.approx(-1)
    assert np.isnan(summary(np.stack([change, 0 * change]))["pairwise"][0, 1])


def test_the_sum_of_learning_rates_is_that_of_all_steps(tmp_path):
    class Rates(Callback):
        def on_client_end(self, trainer, client):
            if trainer.server.round == 1:
                assert client.lr_total == pytest.approx(3 * 0.05)

    schedule = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    fit(tmp_path, Drift(), Rates(), model=plain_sgd_model(), client_lr_scheduler=schedule, local_steps=3, max_rounds=2)


def test_label_skew_makes_clients_drift_apart(tmp_path):
    _, skewed = fit(tmp_path, Drift())
    _, equal = fit(tmp_path, Drift(), data=Digits(num_clients=4, batch_size=32, train_size=400, partitioner=IID()))
    assert skewed["dissimilarity"][0] > 1.3 * equal["dissimilarity"][0]
    assert np.nanmean(skewed["to_mean"]) < np.nanmean(equal["to_mean"])
    # the bias of a class grows with its share of the client's data
    assert skewed["bias_correlation"][0].mean() > 0.2


def test_a_classifier_in_proportion_to_the_counts_is_correlated_with_them():
    counts = np.array([5.0, 1.0, 0.0])
    layer = torch.nn.Linear(4, 3)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(counts)[:, None].float() / 2)
        layer.bias.copy_(torch.from_numpy(-counts))
    found = against_counts(layer, counts)
    assert found["row_norms"].tolist() == counts.tolist()
    assert (found["row_norm_correlation"], found["bias_correlation"]) == (pytest.approx(1), pytest.approx(-1))
    assert np.isnan(correlation(counts, np.ones(3)))
    assert np.isnan(against_counts(torch.nn.Linear(4, 3, bias=False), counts)["bias_correlation"])


def test_a_tap_without_weights_is_measured_where_the_classifier_is_left_out(tmp_path):
    trainer, file = fit(tmp_path, Drift(classifier=False), taps={"logits": "projector"})
    assert "biases" not in file
    assert "drift/classifier/bias" not in trainer.metrics
