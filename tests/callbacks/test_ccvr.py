"""Calibration after training: the statistics that clients send merge to those of all examples."""

from functools import partial

import numpy as np
import pytest
import torch
from helpers.runs import assert_same_bits, differs, small_data, small_model, small_trainer
from torch.optim import SGD

from fl_lightning.callbacks import CCVR
from fl_lightning.callbacks.ccvr import ClassStatistics
from fl_lightning.methods import FedDyn
from fl_lightning.models import MLP, ImageClassifier


def merged(clients, c):
    """The published merging of (count, mean, unbiased covariance) in float64 NumPy."""
    found = [(len(z[y == c]), z[y == c]) for z, y in clients]
    found = [(n, z.mean(0), np.cov(z.T) if n > 1 else 0.0) for n, z in found if n]
    number = sum(n for n, _, _ in found)
    mean = sum(n * m for n, m, _ in found) / number
    covariance = sum((n - 1) / (number - 1) * s + n / (number - 1) * np.outer(m, m) for n, m, s in found)
    return mean, covariance - number / (number - 1) * np.outer(mean, mean)


def test_the_sums_of_clients_give_their_merged_means_and_covariances():
    rng = np.random.default_rng(0)
    clients = [(rng.normal(3, 2, (n, 4)), rng.integers(0, 3, n)) for n in (7, 1, 20)]
    statistics = ClassStatistics(3)
    for z, y in clients:
        for part in np.array_split(np.arange(len(y)), 2):
            statistics.add(torch.from_numpy(z[part]), torch.from_numpy(y[part]))
    for c in range(3):
        for ours, theirs in zip(statistics.gaussian(c), merged(clients, c), strict=True):
            np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-10, atol=1e-10)


def test_draws_have_the_mean_and_covariance_of_their_class_and_skip_classes_of_one():
    statistics = ClassStatistics(3)
    z = torch.tensor([[0.0, 0.0], [2.0, 1.0], [4.0, 5.0], [9.0, 9.0]])
    statistics.add(z, torch.tensor([0, 0, 0, 2]))
    drawn, labels = statistics.sample(40_000, torch.Generator().manual_seed(0))
    assert labels.unique().tolist() == [0]
    torch.testing.assert_close(drawn.mean(0), z[:3].mean(0), rtol=0.02, atol=0.02)
    torch.testing.assert_close(drawn.T.cov(), z[:3].T.cov(), rtol=0.03, atol=0.03)


def fit(tmp_path, methods=(), model=None, **kwargs):
    trainer = small_trainer(tmp_path, callbacks=[CCVR(**kwargs)])
    model = model or small_model()
    trainer.fit(model, small_data(), list(methods))
    return trainer, model


def test_only_the_classifier_of_what_is_saved_is_calibrated_and_it_can_be_tested(tmp_path, run):
    plain, _ = run()
    trainer, model = fit(tmp_path)
    assert_same_bits(dict(model.state_dict()), plain)
    path = trainer.run_dir / "checkpoints" / "ccvr.ckpt"
    calibrated = torch.load(path, weights_only=True)["state_dict"]
    changed = {name for name in plain if not torch.equal(plain[name], calibrated[name])}
    assert changed == {"classifier.weight", "classifier.bias"}
    found = small_trainer(tmp_path).test(small_model(), small_data(), path)
    assert found["test/accuracy"] == pytest.approx(trainer.metrics["ccvr/accuracy"])
    assert found["test/loss"] == pytest.approx(trainer.metrics["ccvr/loss"], rel=1e-5)


def test_calibration_mends_a_classifier_that_was_never_trained(tmp_path):
    """The encoder learns beside a classifier that is then thrown away."""
    torch.manual_seed(0)
    model = ImageClassifier(MLP(64, [64]), optimizer=partial(SGD, lr=0.0))
    trainer, _ = fit(tmp_path, model=model, epochs=20, lr=0.05)
    assert trainer.metrics["test/accuracy"] < 0.3
    assert trainer.metrics["ccvr/accuracy"] > 0.7


def test_it_calibrates_the_model_that_is_reported(tmp_path):
    model = ImageClassifier(MLP(64, [32]), optimizer=partial(SGD, lr=0.1))
    trainer, model = fit(tmp_path, [FedDyn(0.1)], model)
    saved = torch.load(trainer.run_dir / "checkpoints" / "ccvr.ckpt", weights_only=True)["state_dict"]
    body = {name: value for name, value in saved.items() if name.startswith("encoder")}
    assert_same_bits(body, {name: model.state_dict()[name] for name in body})
    assert differs(body, {name: trainer.server.state[name] for name in body})
