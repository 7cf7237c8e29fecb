"""MOON contrasts a client's representation with those of the received model and of its own last ones."""

import numpy as np
import pytest
import torch
from helpers.runs import assert_same_bits, differs

from fl_lightning.methods import MOON


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
