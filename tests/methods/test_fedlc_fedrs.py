"""FedLC lowers logits by label counts, FedRS scales those of classes that a client does not hold; in training alone."""

import copy
from types import SimpleNamespace

import pytest
import torch
from helpers.runs import assert_same_bits, plain_sgd_model, small_data

from fl_lightning.core.method import Step
from fl_lightning.data import Dirichlet
from fl_lightning.methods import FedLC, FedProx, FedRS, FedUV

LOGITS, TARGETS = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 3, 0, 1])
COUNTS = torch.tensor([3, 4, 5, 60])


def loss_without_the_true_class(**options):
    method = FedLC(denominator="exclude_true", **options)
    client = SimpleNamespace(info=SimpleNamespace(label_counts=COUNTS))
    loss = torch.nn.functional.cross_entropy(method.transform_logits(client, LOGITS), TARGETS)
    return (loss + method.penalty(client, Step(None, TARGETS, {"logits": LOGITS}))).item()


def test_fedlc_literal_equation_leaves_the_true_class_out():
    lowered = LOGITS.double() - 0.5 * COUNTS.double() ** -0.25
    literal = [torch.logsumexp(row[torch.arange(4) != y], 0) - row[y] for row, y in zip(lowered, TARGETS, strict=True)]
    assert loss_without_the_true_class(tau=0.5) == pytest.approx(torch.stack(literal).mean().item(), rel=1e-5)


def test_fedlc_by_the_log_prior_is_equation_5_as_printed():
    prior = COUNTS / COUNTS.sum()
    literal = [
        sum(torch.exp(-row[y] + row[i] + torch.log(prior[i] / prior[y])) for i in range(4) if i != y).log()
        for row, y in zip(LOGITS, TARGETS, strict=True)
    ]
    expected = torch.stack(literal).mean().item()
    assert loss_without_the_true_class(margin="log_prior") == pytest.approx(expected, rel=1e-5)


def test_fedlc_is_not_applied_in_evaluation(run):
    _, trainer = run([FedLC(tau=50.0)], max_rounds=0)
    plain = run([], max_rounds=0)[1]
    assert trainer.evaluate("test") == plain.evaluate("test")


@pytest.mark.parametrize(("missing", "margin"), [("floor", "fourth_root"), ("mask", "log_prior")])
def test_fedlc_with_missing_classes_trains_under_bf16(run, missing, margin):
    data = small_data(partitioner=Dirichlet(0.05), train_size=120, test_size=50)
    data.setup()
    assert (data.plan.label_counts == 0).any()
    state, trainer = run([FedLC(missing=missing, margin=margin)], data=data, precision="bf16-mixed")
    assert all(torch.isfinite(value).all() for value in state.values())
    assert trainer.metrics["train/loss"] > 0


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


def test_fedrs_without_bias_takes_a_classifier_that_has_none(run):
    model = plain_sgd_model()
    model.classifier = torch.nn.Linear(16, 10, bias=False)
    states = [run([FedRS(use_bias=use)], model=copy.deepcopy(model), max_rounds=1)[0] for use in (True, False)]
    assert_same_bits(*states)
