"""FedDyn weighs clients as its closed forms say, and reports the model that is asked for."""

import pytest
from helpers.quadratics import A, B, Curved, curved_data, settle, weighted

from fl_lightning.methods import FedDyn


def test_feddyn_weighs_clients_by_examples_when_scaled_and_alike_when_not(run):
    sizes = [2, 1, 6]
    for scaled, weights in ((True, sizes), (False, [1, 1, 1])):
        found, _ = settle(run, [FedDyn(1.0, scaled)], sizes=sizes, lr=0.2, local_steps=8, max_rounds=15)
        assert found == pytest.approx(weighted(B, [a * w for a, w in zip(A, weights, strict=True)]), abs=1e-3)


def test_feddyn_first_round_in_closed_form(run):
    """From w = 0 and g = 0, one step: y = lr a b; w' = 2 mean(y), the reported model mean(y), whatever the sizes."""
    model, data = Curved(), curved_data(A, B, sizes=[1, 3, 2])
    state, _ = run([FedDyn(0.5)], model=model, data=data, local_steps=1, max_rounds=1)
    mean = 0.1 * sum(a * b for a, b in zip(A, B, strict=True)) / 3
    assert state["y"].item() == pytest.approx(2 * mean, rel=1e-6)
    assert model.y.item() == pytest.approx(mean, rel=1e-6)


@pytest.mark.parametrize(("reported", "clients"), [("cloud", None), ("all", 3), ("selected", 1)])
def test_feddyn_reports_the_model_asked_for(run, reported, clients):
    """In the first round only one of three clients moves: their mean counts the two that still hold w = 1."""
    model, method = Curved(start=1.0), FedDyn(0.5, reported=reported)
    given = {"local_steps": 1, "max_rounds": 1, "cohort_size": 1}
    state, trainer = run([method], model=model, data=curved_data(A, B), **given)
    (k,) = trainer.server.cohort
    step = -0.1 * A[k] * (1.0 - B[k])
    assert state["y"].item() == pytest.approx(1 + step + step / 3, rel=1e-5)
    assert model.y.item() == pytest.approx(state["y"].item() if clients is None else 1 + step / clients, rel=1e-5)
