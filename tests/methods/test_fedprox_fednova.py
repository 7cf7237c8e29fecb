"""FedProx draws clients back to the received model; FedNova normalises the change of a client by its steps."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from helpers.quadratics import A, B, Curved, Quadratic, curved_data, pull, quadratic_data, settle, weighted
from helpers.tiny import variant
from torch.optim import SGD

from fl_lightning import Method
from fl_lightning.methods import FedBN, FedNova, FedProx
from fl_lightning.models import MLP, ImageClassifier


def test_fedprox_on_a_quadratic_stops_at_the_proximal_point(run):
    """min a/2 (y - b)^2 + mu/2 (y - w)^2 is at (a b + mu w) / (a + mu)."""
    model = Quadratic(start=2.0)
    _, trainer = run([FedProx(mu=3.0)], model=model, data=quadratic_data([-1.0]), max_rounds=1, local_steps=60)
    assert model.y.item() == pytest.approx((1 * -1.0 + 3 * 2.0) / 4, abs=1e-5)
    assert trainer.metrics["train/fedprox"] == pytest.approx(1.5 * (model.y.item() - 2.0) ** 2, rel=1e-4)


@pytest.mark.parametrize("mu", [0.0, 2.0])
def test_fedavg_and_fedprox_settle_beside_the_optimum_where_the_closed_form_says(run, mu):
    methods, shares = [FedProx(mu=mu)] * (mu > 0), pull(A, 0.1, 5, mu)
    fixed = weighted(B, shares)
    assert settle(run, methods, start=fixed, local_steps=5, max_rounds=2)[0] == pytest.approx(fixed, abs=1e-5)
    # each round goes the same share of the way there
    found = settle(run, methods, local_steps=5, max_rounds=2)[0]
    assert found == pytest.approx(fixed * (1 - (1 - shares.mean()) ** 2), abs=1e-5)
    assert abs(fixed - weighted(B, A)) > 0.05


def test_fedprox_draws_entries_that_do_not_travel_to_the_clients_own(run):
    """Else a normalisation layer would be drawn to the weights of round 0."""
    gaps = []

    class Watch(Method):
        def on_client_start(self, client):
            gaps.append(max(float(v.abs().max()) for v in client.drift_so_far(client.trainable).values()))

    run([FedBN(), FedProx(1.0), Watch()])
    assert gaps == [0.0] * 8


def test_fednova_is_fedavg_for_equal_steps(run):
    start = ImageClassifier(MLP(64, [16]), optimizer=partial(SGD, lr=0.1, momentum=0.9))
    plain, _ = run(model=copy.deepcopy(start), local_steps=3)
    nova, _ = run([FedNova()], model=copy.deepcopy(start), local_steps=3)
    for name in plain:
        torch.testing.assert_close(nova[name], plain[name], rtol=1e-6, atol=1e-8)


def test_fednova_removes_the_inconsistency_of_unequal_steps(run):
    """tau_k = n_k: FedAvg stands still where clients weigh n_k tau_k, FedNova where they weigh n_k alone."""
    a, sizes, lr = [0.05, 0.2, 0.1], [1, 12, 4], 0.05
    options = {"a": a, "sizes": sizes, "batch_size": 1, "lr": lr, "max_rounds": 2}
    share = np.array(sizes) * pull(a, lr, sizes)
    plain, nova = weighted(B, share), weighted(B, share / sizes)
    assert settle(run, [], start=plain, **options)[0] == pytest.approx(plain, abs=1e-5)
    assert settle(run, [FedNova()], start=nova, **options)[0] == pytest.approx(nova, abs=1e-5)
    assert abs(settle(run, [FedNova()], start=plain, **options)[0] - nova) < abs(plain - nova) - 0.02
    optimum = weighted(B, [n * ak for n, ak in zip(sizes, a, strict=True)])
    assert abs(nova - optimum) < 0.1 * abs(plain - optimum)


@pytest.mark.parametrize("rho", [0.0, 0.9])
def test_fednova_counts_a_step_by_its_weight_under_momentum(run, rho):
    norms = []

    class Spy(FedNova):
        def on_client_end(self, client):
            norms.append((client.scratch(self).norm, client.num_steps))
            return super().on_client_end(client)

    data = curved_data(A, B, sizes=[2, 5, 1], batch_size=1)
    run([Spy()], model=Curved(momentum=rho), data=data, max_rounds=1)
    for norm, tau in norms:
        assert norm == pytest.approx((tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho))
    assert [tau for _, tau in norms] == [2, 5, 1]


def test_fednova_beside_fedprox_in_closed_form(run):
    """a_k = sum (1 - lr mu)^j, and tau_eff counts plain steps."""
    mu, lr, sizes = 2.0, 0.1, [2, 5, 1]
    data = curved_data(A, B, sizes, batch_size=1)
    state, _ = run([FedProx(mu), FedNova()], model=Curved(lr=lr), data=data, max_rounds=1)
    p = np.array(sizes) / 8
    change = pull(A, lr, sizes, mu) * np.array(B)
    norms = np.array([sum((1 - lr * mu) ** j for j in range(tau)) for tau in sizes])
    assert state["y"].item() == pytest.approx((p @ sizes) * (p @ (change / norms)), rel=1e-5)


@pytest.mark.parametrize("rho", [0.0, 0.9])
def test_fednova_beside_fedprox_removes_the_pull_from_constant_gradients(run, rho):
    """All gradients of a client are -b: the model moves by tau_eff steps along their mean, whatever mu and momentum."""
    sizes, linear = [2, 5, 1], variant(Curved, training_step=lambda self, batch, _: -(self.y * batch[0][:, 1]).mean())
    data, p = curved_data(A, B, sizes, batch_size=1), np.array(sizes) / 8
    state, _ = run([FedProx(2.0), FedNova()], model=linear(momentum=rho), data=data, max_rounds=1)
    assert state["y"].item() == pytest.approx(0.1 * (p @ sizes) * (p @ B), rel=1e-5)
