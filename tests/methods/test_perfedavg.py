"""Per-FedAvg trains a model from which one step leads to a good model of each client."""

from itertools import cycle

import pytest
import torch
from helpers.errors import warned
from helpers.quadratics import Curved, curved_data
from helpers.runs import assert_same_bits
from helpers.softmax_regression import X, Y, assert_printed, fit

from fl_lightning import Method
from fl_lightning.methods import SCAFFOLD, FedProx, PerFedAvg
from fl_lightning.training.extra_passes import ExtraPasses

EXAMPLE = {
    "FO": [0.07005322, 0.19344967, 0.05463984, -0.09113149, 0.27530694, -0.00231818],
    "HF": [0.07337475, 0.19286695, 0.04909758, -0.09020095, 0.27752767, -0.00266600],
}


@pytest.mark.parametrize("form", EXAMPLE)
def test_the_worked_example(tmp_path, monkeypatch, form):
    """The step's batch is A, and the stream's batches are B and C."""
    other = ([X[name], Y[name]] for name in "BC")
    monkeypatch.setattr(ExtraPasses, "batches", lambda *args: other)
    state = fit(tmp_path, [PerFedAvg(0.5, hessian=form == "HF")]).server.state
    assert_printed(state["head.weight"], *EXAMPLE[form])


def test_the_worked_example_of_an_adapted_model(tmp_path):
    trainer = fit(tmp_path, [PerFedAvg(0.5)], max_rounds=0)
    found = trainer.personal_state(0)["head.weight"]
    assert_printed(found, 0.31292467, 0.18243564, -0.02887430, -0.21102923, 0.11594963, 0.12859359)


A, B, RATE, INNER = 2.0, 3.0, 0.1, 0.2


@pytest.mark.parametrize(("form", "delta"), [("FO", 1e-3), ("HF", 1e-3), ("HF", 10.0)])
@pytest.mark.parametrize("steps", [1, 3])
def test_on_a_quadratic_the_outer_step_starts_at_y_and_the_product_is_exact(run, form, delta, steps):
    """With H = a the gradient at the adapted point is a (1 - alpha a)(y - b); HF has the factor (1 - alpha a) again."""
    y = 0.0
    for _ in range(steps):
        gradient = A * (1 - INNER * A) * (y - B)
        y -= RATE * gradient * (1 - INNER * A if form == "HF" else 1.0)
    method = PerFedAvg(INNER, form == "HF", delta)
    data = curved_data([A], [B])
    state, _ = run([method], model=Curved(lr=RATE), data=data, max_rounds=1, local_steps=steps)
    assert state["y"].item() == pytest.approx(y, rel=1e-4)


def test_on_a_linear_loss_the_first_order_form_is_fedavg(run):
    class Slope(Curved):
        def training_step(self, batch, batch_idx):
            return (self.y * batch[0][:, 1].mean()).sum()

    data = [curved_data([1.0, 1.0], [3.0, -2.0]) for _ in range(2)]
    plain, _ = run([], model=Slope(momentum=0.9), data=data[0], local_steps=3)
    found, _ = run([PerFedAvg(0.5)], model=Slope(momentum=0.9), data=data[1], local_steps=3)
    assert_same_bits(plain, found)


@pytest.mark.parametrize("hessian", [False, True])
def test_each_step_takes_new_batches_of_a_stream_that_leaves_those_of_training(tmp_path, hessian):
    """Of a client with three batches in a fixed order; the second one of a step serves for two gradients."""
    seen = []

    class Watch(Method):
        def penalty(self, client, step):
            seen.append(step.batch[0].tolist())

    fit(tmp_path, [PerFedAvg(0.1, hessian), Watch()], names="ABC", sizes=[6], local_epochs=2)
    passes = 4 if hessian else 2
    steps = [seen[i : i + passes] for i in range(0, len(seen), passes)]
    own = cycle(X[name].tolist() for name in "ABC")
    stream = cycle(X[name].tolist() for name in "ABC")
    assert len(steps) == 6
    for first, *others in steps:
        assert first == next(own)
        assert others[0] == next(stream)
        if hessian:
            assert others[1] == others[2] == next(stream)


def test_corrections_are_added_at_y(run):
    y, mu = 0.0, 0.5
    for _ in range(2):
        y -= RATE * (A * (1 - INNER * A) * (y - B) + mu * y)
    methods, data = [FedProx(mu), PerFedAvg(INNER)], curved_data([A], [B])
    state, _ = run(methods, model=Curved(lr=RATE), data=data, max_rounds=1, local_steps=2)
    assert state["y"].item() == pytest.approx(y, rel=1e-5)


def test_the_adapted_model_of_every_client_starts_at_the_global_one(run):
    state, trainer = run([PerFedAvg(INNER)], model=Curved(), data=curved_data([1.0, 2.0], [3.0, -1.0]), cohort_size=1)
    for k, (a, b) in enumerate([(1.0, 3.0), (2.0, -1.0)]):
        y = state["y"].item()
        assert trainer.personal_state(k)["y"].item() == pytest.approx(y - INNER * a * (y - b), rel=1e-5)


def test_beside_methods_that_read_gradients_at_y_it_warns(run):
    with warned("PerFedAvg", "SCAFFOLD"):
        run([PerFedAvg(), SCAFFOLD("gradients")], max_rounds=1)
    assert torch.is_grad_enabled()
