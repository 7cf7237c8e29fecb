"""FedProx draws clients back to the received model."""

import pytest
from helpers.quadratics import A, B, Quadratic, pull, quadratic_data, settle, weighted

from fl_lightning import Method
from fl_lightning.methods import FedBN, FedProx


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
