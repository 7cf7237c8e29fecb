"""MOON and FedCKA contrast activations with those of the received model and of the client's own last ones."""

import numpy as np
import pytest
import torch
from helpers.runs import assert_same_bits, differs
from helpers.tiers import sample

from fl_lightning.functional import rbf_cka, representation_contrast
from fl_lightning.methods import MOON, FedCKA
from fl_lightning.methods.fedcka import SIMILARITIES


def test_moon_is_absent_in_the_first_visit_and_there_in_the_second(run):
    _, trainer = run([MOON()], max_rounds=2)
    assert ["train/moon" in row for row in trainer.history] == [False, True]
    _, trainer = run([MOON(first="global", mu=2.0)], max_rounds=1)
    assert trainer.metrics["train/moon"] == pytest.approx(2 * np.log(2), rel=1e-5)
    plain = run(max_rounds=1)[0]
    for name, value in run([MOON(first="global")], max_rounds=1)[0].items():
        torch.testing.assert_close(value, plain[name], rtol=1e-4, atol=1e-5)


def test_moon_contrasts_with_the_clients_own_last_models_newest_first(run):
    seen = {}

    class Spy(MOON):
        name = "moon"

        def penalty(self, client, step):
            own = seen.get(client.info.id, [])
            assert len(client.scratch(self).names) == min(len(own), 2)
            for reference, state in zip(client.scratch(self).names, reversed(own), strict=False):
                model = client.references.models[reference]
                assert_same_bits(dict(model.state_dict()), state)
                assert differs(dict(model.state_dict()), client.received)
            return super().penalty(client, step)

        def on_client_end(self, client):
            seen.setdefault(client.info.id, []).append(client.state())
            return super().on_client_end(client)

    run([Spy(pool_size=2)], max_rounds=4)
    assert set(map(len, seen.values())) == {4}


def test_moon_random_first_model_is_each_clients_own_and_draws_nothing_of_the_clients_stream(run):
    drawn = {}

    class Spy(MOON):
        name = "moon"

        def penalty(self, client, step):
            drawn[client.info.id] = client.references.models["previous"].classifier.weight.clone()
            return super().penalty(client, step)

    assert_same_bits(run([Spy(mu=0, first="random")], max_rounds=1)[0], run(max_rounds=1)[0])
    assert not torch.equal(drawn[0], drawn[1])
    again = dict(drawn)
    run([Spy(first="random")], max_rounds=1)
    assert_same_bits(drawn, again)


def test_fedcka_is_absent_in_the_first_visit_and_there_in_the_second(run):
    _, trainer = run([FedCKA()], "cnn")
    assert ["train/fedcka" in row for row in trainer.history] == [False, True]
    assert 0.3 * 3 < trainer.history[1]["train/fedcka"] < 1.32 * 3


def test_fedcka_takes_its_layers_by_number_or_by_name(run):
    assert FedCKA(layers=3).requires == ("early.0", "early.1", "early.2")
    by_name = run([FedCKA(layers=["early.0", "early.1"])], "cnn")[0]
    assert_same_bits(by_name, run([FedCKA(layers=2)], "cnn")[0])
    assert differs(by_name, run([FedCKA(layers=7)], "cnn")[0])


def test_the_literal_frobenius_similarity_draws_away_from_the_global_model():
    """As the paper's Table 3 prints it; the negative one draws towards it."""
    a, to_global, to_previous = (torch.randn(12, 5, requires_grad=i == 0) for i in range(3))
    directions = {}
    for name in ("frobenius", "frobenius_raw", "frobenius_literal"):
        values = SIMILARITIES[name](a, to_global, to_previous)
        (gradient,) = torch.autograd.grad(representation_contrast(*values), a)
        # along the way from the previous model's activations to the global one's
        directions[name] = -(gradient * (to_global - to_previous)).sum().sign().item()
    assert directions == {"frobenius": 1, "frobenius_raw": 1, "frobenius_literal": -1}
    distance = (a - to_global).square().sum().item()
    found = [SIMILARITIES[name](a, to_global).item() for name in directions]
    assert found == pytest.approx([-distance / 60, -distance, distance])


def test_fedcka_takes_the_width_of_the_kernel(run):
    x, y = torch.randn(9, 4), torch.randn(9, 4)
    for width in (0.5, 2.0):
        found = FedCKA(similarity="rbf", bandwidth=width).similarity(x, y, x)
        assert found.tolist() == pytest.approx([rbf_cka(x, y, width).item(), 1.0])


@pytest.mark.parametrize("similarity", sample(list(SIMILARITIES), "cosine"))
def test_every_similarity_trains(run, similarity):
    assert run([FedCKA(mu=0.1, similarity=similarity)], "cnn")[1].metrics["train/fedcka"] > 0
