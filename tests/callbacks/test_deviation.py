"""The deviation bound: its sign is that of a gradient step, and calibration with 0 changes nothing."""

import numpy as np
import pytest
import torch
from helpers.errors import refused
from helpers.runs import small_data, small_model, small_trainer
from torch.nn.functional import cross_entropy

from fl_lightning.callbacks import DeviationBound
from fl_lightning.callbacks.deviation import class_means, deviations, ratios
from fl_lightning.callbacks.measurement import class_groups
from fl_lightning.data import Dirichlet
from fl_lightning.functional import calibrated_logits
from fl_lightning.methods import FedBABU, FedLC, Freeze, LogitAdjustment

pytestmark = pytest.mark.usefixtures("undrawn")


def skewed(counts, width=6, seed=0):
    """Examples that are alike within each class, with positive representations, and a classifier."""
    rng = torch.Generator().manual_seed(seed)
    centres = torch.rand(len(counts), width, generator=rng, dtype=torch.float64)
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    weight = torch.randn(len(counts), width, generator=rng, dtype=torch.float64)
    return centres[labels], labels, weight


def means_of(z, labels, weight, counts, tau=1.0):
    parts = zip(z.split(7), labels.split(7), strict=True)
    batches = [(None, None, targets, {"representation": rows, "logits": rows @ weight.T}) for rows, targets in parts]
    return class_means(batches, torch.tensor(counts), tau, None)


def step_of(z, labels, weight, logits=lambda x: x):
    weight = weight.clone().requires_grad_()
    cross_entropy(logits(z @ weight.T), labels).backward()
    return -weight.grad


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("calibrated", [False, True])
def test_with_one_majority_class_the_bound_is_where_the_step_of_a_minority_class_changes_its_sign(seed, calibrated):
    """Of two classes the condition of Theorem 1 is the sign of the step exactly, whatever the counts."""
    signs = set()
    for few in (1, 3, 10, 25, 60):
        counts = [100, few]
        z, labels, weight = skewed(counts, seed=seed)
        weight[1] = weight[0] - 0.3  # so that the examples of either class look alike to the classifier
        logits = (lambda x, n=counts: calibrated_logits(x, torch.tensor(n), 2.0)) if calibrated else lambda x: x
        step = step_of(z, labels, weight, logits)
        means = means_of(z, labels, weight, counts, 2.0)
        ratio = ratios(means["h"], means["q" if calibrated else "p"], np.array(counts, float))[0, 1]
        assert (ratio > 1) == (step[1] @ torch.from_numpy(means["h"][1]) < 0)
        signs.add(bool(ratio > 1))
    assert len(signs) > 1 or seed != 0


def test_the_bound_is_that_of_the_definition():
    counts = [50, 40, 4]
    z, labels, weight = skewed(counts)
    means = means_of(z, labels, weight, counts)
    p = (z @ weight.T).softmax(1)
    h = [z[labels == c].mean(0) for c in range(3)]
    found = deviations(
        means, np.array(counts, float), class_groups(np.array(counts)), step_of(z, labels, weight).numpy()
    )
    bounds = [
        float((1 - p[labels == 2, 2].mean()) * h[2] @ h[2] / (p[labels == j, 2].mean() * (h[2] @ h[j]))) for j in (0, 1)
    ]
    every = [n / 4 / bound for n, bound in zip(counts, bounds, strict=False)]
    assert found["ratio"][2] == pytest.approx(max(every))
    assert found["bound"][2] == pytest.approx(bounds[int(np.argmax(every))])
    assert np.isnan(found["ratio"][:2]).all()
    printed = [torch.exp(torch.tensor(4**-0.25 - n**-0.25)).item() for n in counts[:2]]
    q = (z @ weight.T).exp() / (z @ weight.T - torch.tensor(counts).double().pow(-0.25)).exp().sum(1, keepdim=True)
    mine = sum(e * float(q[labels == 2, y].mean()) for y, e in enumerate(printed)) * float(h[2] @ h[2])
    j = int(np.argmax([n / b for n, b in zip(counts, bounds, strict=False)]))
    calibrated = mine / float(q[labels == j, 2].mean() * (h[2] @ h[j]))
    assert found["bound_calibrated"][2] == pytest.approx(calibrated, rel=1e-6)


def fit(tmp_path, deviation=None, methods=(), **kwargs):
    trainer = small_trainer(tmp_path, callbacks=[deviation or DeviationBound()], **{"max_rounds": 1, **kwargs})
    data = small_data(partitioner=Dirichlet(0.3), batch_size=1000)
    trainer.fit(small_model(), data, list(methods))
    return trainer, data


def test_after_one_step_on_all_data_a_predicted_class_has_deviated(tmp_path):
    trainer, data = fit(tmp_path, local_steps=1)
    file = np.load(trainer.run_dir / "deviation.npz")
    known = np.isfinite(file["ratio"][0])
    for row, k in enumerate(file["clients"][0]):
        assert (known[row] == class_groups(data.info(k).label_counts.numpy())["minority"]).all()
    assert trainer.metrics["deviation/predicted"] > 0
    assert trainer.metrics["deviation/confirmed"] > 0.9


def test_tau_is_that_of_fedlc_in_the_run_unless_it_is_given(tmp_path):
    def bound(deviation, method=None):
        trainer, _ = fit(tmp_path, deviation, [method or FedLC(tau=0.5)], local_steps=1)
        return np.load(trainer.run_dir / "deviation.npz")["bound_calibrated"]

    of_method = bound(None)
    np.testing.assert_array_equal(of_method, bound(DeviationBound(tau=0.5)))
    assert not np.array_equal(of_method, bound(DeviationBound(tau=2.0)), equal_nan=True)
    adjusts = LogitAdjustment(tau=2.0)  # whose coefficient is another
    np.testing.assert_array_equal(bound(None, adjusts), bound(DeviationBound(tau=1.0), adjusts))


def test_a_head_that_does_not_move_has_no_sign_and_one_that_is_not_trained_is_refused(tmp_path):
    trainer, _ = fit(tmp_path, methods=[FedBABU()])
    assert np.isnan(np.load(trainer.run_dir / "deviation.npz")["own"]).all()
    assert "deviation/observed" not in trainer.metrics
    trainer, _ = fit(tmp_path, methods=[Freeze()])
    model = small_model()
    model.classifier.requires_grad_(False)
    with refused("DeviationBound", "classifier='classifier.weight'"):
        small_trainer(tmp_path, callbacks=[DeviationBound()]).fit(model, small_data())
