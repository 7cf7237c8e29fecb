"""FedRS scales the logits of classes that a client does not hold."""

import copy

import pytest
import torch
from helpers.errors import refused
from helpers.runs import assert_same_bits, plain_sgd_model

from fl_lightning.methods import FedProx, FedRS, FedUV


def test_fedrs_without_bias_is_scaled_products_of_features_and_weights(run):
    seen = []

    class Spy(FedRS):
        name = "fedrs"

        def transform_logits(self, client, logits):
            found = super().transform_logits(client, logits)
            head = client.module.classifier
            present = client.info.label_counts > 0
            seen.append(torch.allclose(found[:, present], (logits - head.bias)[:, present]))
            return found

    run([Spy(use_bias=False)], max_rounds=1)
    assert seen and all(seen)


@pytest.mark.parametrize("beside", [FedProx(0.1), FedUV()], ids=["fedprox", "feduv"])
def test_fedrs_without_bias_leaves_the_bias_as_it_is(run, beside):
    """No gradient, rather than one of 0, with which weight decay would still move it."""
    for methods in ([FedRS(use_bias=False), beside], [beside, FedRS(use_bias=False)]):
        model = plain_sgd_model(weight_decay=0.1, momentum=0.9)
        before = model.classifier.bias.detach().clone()
        assert before.any()
        state, _ = run(methods, model=model, max_rounds=2)
        assert torch.equal(state["classifier.bias"], before)
        assert not torch.equal(state["classifier.weight"], plain_sgd_model().classifier.weight)


def test_fedrs_without_bias_takes_a_classifier_that_has_none_and_refuses_what_is_none(run):
    model = plain_sgd_model()
    model.classifier = torch.nn.Linear(16, 10, bias=False)
    states = [run([FedRS(use_bias=use)], model=copy.deepcopy(model), max_rounds=1)[0] for use in (True, False)]
    assert_same_bits(*states)
    model.classifier = torch.nn.Sequential(torch.nn.Linear(16, 10))
    with refused("FedRS.use_bias=False", "logits", "'classifier'"):
        run([FedRS(use_bias=False)], model=model)
