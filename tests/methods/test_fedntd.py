"""FedNTD keeps the received model's predictions of the classes except the label."""

import pytest
import torch
from helpers.runs import draw
from helpers.softmax_regression import V, W, X, Y, assert_printed
from torch.nn.functional import cross_entropy, one_hot

from fl_lightning.functional import not_true_distillation
from fl_lightning.methods import FedLC, FedNTD
from fl_lightning.models import MLP, ImageClassifier

LOGITS, REFERENCE, TARGETS = draw(6, 4), draw(6, 4, seed=1), torch.tensor([0, 1, 2, 3, 0, 1])


@pytest.mark.parametrize(("temperature", "term", "loss"), [(1, 0.01559598, 1.03231754), (3, 0.01576043, 1.03248199)])
def test_the_worked_example(temperature, term, loss):
    logits = X["A"] @ V.T
    found = not_true_distillation(logits, X["A"] @ W.T, Y["A"], temperature)
    assert_printed(torch.stack([found, cross_entropy(logits, Y["A"]) + found]), term, loss)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_the_gradient_is_the_difference_of_the_distributions_and_0_at_the_label(temperature):
    logits = LOGITS.clone().requires_grad_()
    not_true_distillation(logits, REFERENCE, TARGETS, temperature).backward()
    true = one_hot(TARGETS, 4).bool()
    p, q = ((o.masked_fill(true, -torch.inf) / temperature).softmax(1) for o in (LOGITS, REFERENCE))
    torch.testing.assert_close(logits.grad, temperature / 6 * (p - q), rtol=1e-12, atol=1e-15)
    assert not logits.grad[true].any() and logits.grad[~true].all()


def test_equal_predictions_of_the_other_classes_have_term_0():
    true = one_hot(TARGETS, 4)
    for same in (LOGITS, LOGITS + 3 * true, LOGITS + draw(6, 1)):
        logits = LOGITS.clone().requires_grad_()
        term = not_true_distillation(logits, same, TARGETS)
        term.backward()
        assert abs(term.item()) < 1e-15 and logits.grad.abs().max() < 1e-15
    two = not_true_distillation(LOGITS[:, :2], REFERENCE[:, :2], TARGETS % 2)
    assert two.item() == 0


def plain():
    torch.manual_seed(0)
    return ImageClassifier(MLP(64, [16]))


def test_the_first_step_of_a_visit_is_fedavgs(run):
    """Then the local model is the received one, so that the term has no gradient."""
    states = [run(methods, model=plain(), local_steps=1)[0] for methods in ([], [FedNTD(beta=50.0)])]
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=0, atol=1e-6)


def test_the_term_reads_raw_logits_beside_a_method_that_changes_those_of_the_loss(run):
    """In the first step of a visit they are the received model's."""
    terms = []

    class Noted(FedNTD):
        name = "fedntd"

        def penalty(self, client, step):
            term = super().penalty(client, step)
            terms.append((client.num_steps, term.item()))
            return term

    run([FedLC(tau=5.0), Noted()], model=plain(), local_epochs=2)
    assert all((term == 0) == (step == 0) for step, term in terms)
