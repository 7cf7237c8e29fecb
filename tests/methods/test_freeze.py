"""Freeze, like FedBABU, keeps the head as it was drawn, on the clients or on the server alone."""

from functools import partial

import pytest
import torch
from helpers.runs import assert_same_bits, differs
from helpers.tiny import variant
from torch.optim import SGD

from fl_lightning import Method
from fl_lightning.callbacks import Callback
from fl_lightning.methods import FedBABU, FedDyn, Freeze
from fl_lightning.models import MLP, ImageClassifier

DECAYING = partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.1)


@pytest.mark.parametrize("method", [FedBABU(), Freeze()])
@pytest.mark.parametrize("server", [None, partial(torch.optim.Adam, lr=0.1)])
def test_a_frozen_head_keeps_every_bit_on_clients_and_server_and_the_body_learns(run, method, server):
    model = ImageClassifier(MLP(64, [16]), optimizer=DECAYING)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    local = []

    Watch = variant(Callback, on_client_end=lambda self, trainer, client: local.append(client.state()))

    state, _ = run([method], model=model, server_optimizer=server, callbacks=[Watch()])
    for found in (*local, state):
        assert torch.equal(found["classifier.weight"], before["classifier.weight"])
        assert torch.equal(found["classifier.bias"], before["classifier.bias"])
        assert not torch.equal(found["encoder.layers.1.0.weight"], before["encoder.layers.1.0.weight"])


@pytest.mark.parametrize("others", [[], [FedDyn(0.1)]], ids=["alone", "FedDyn"])
def test_a_head_that_is_reset_moves_on_the_client_and_not_on_the_server(run, others):
    model = ImageClassifier(MLP(64, [16]), optimizer=DECAYING)
    before = model.classifier.weight.detach().clone()
    local = []

    class Watch(Callback):
        def on_client_end(self, trainer, client):
            local.append((client.received["classifier.weight"].clone(), client.state()["classifier.weight"]))

    state, _ = run([Freeze("reset_each_round"), *others], model=model, callbacks=[Watch()])
    assert torch.equal(state["classifier.weight"], before)
    for received, trained in local:
        assert torch.equal(received, before) and not torch.equal(trained, before)


def test_an_orthogonal_head_has_orthonormal_rows_and_one_seed_draws_one(run):
    heads = [run([Freeze(orthogonal=True)], max_rounds=1)[0]["classifier.weight"] for _ in range(2)]
    torch.testing.assert_close(heads[0] @ heads[0].T, torch.eye(10), atol=1e-5, rtol=0)
    assert torch.equal(*heads)


def test_fedbabu_is_a_frozen_head_bit_for_bit_and_not_fedavg(run, fedavg):
    babu, _ = run([FedBABU()])
    assert_same_bits(babu, run([Freeze()])[0])
    assert differs(babu, fedavg["mlp"])


@pytest.mark.parametrize("width", [16, 1024])
def test_the_update_of_a_model_of_any_size_is_a_dictionary_that_a_method_may_change(run, width):
    class Halved(Method):
        def transform_client_update(self, client, delta):
            for change in delta.values():
                change.mul_(0.5)
            return delta | {}

    def trained(methods):
        torch.manual_seed(0)
        model = ImageClassifier(MLP(64, [width]), optimizer=partial(SGD, lr=0.1))
        start = {name: value.clone() for name, value in model.state_dict().items()}
        state, _ = run(methods, model=model, max_rounds=1)
        return {name: state[name] - value for name, value in start.items()}

    halved, unchanged = trained([Halved()]), trained([])
    for name, change in unchanged.items():
        torch.testing.assert_close(2 * halved[name], change, rtol=1e-4, atol=1e-6)
