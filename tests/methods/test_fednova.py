"""FedNova normalises the change of a client by its steps."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from helpers.quadratics import A, B, Curved, curved_data, pull, settle, weighted
from torch.optim import SGD

from fl_lightning.methods import FedNova, FedProx
from fl_lightning.models import MLP, ImageClassifier


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
