"""FedVLS keeps the received model's predictions of the classes that a client lacks."""

import pytest
import torch
from helpers.runs import assert_same_bits, differs, draw
from helpers.softmax_regression import Softmax, V, W, X, Y, fit, only_first
from torch import nn
from torch.nn.functional import cross_entropy

from fl_lightning.functional import adjusted_logits, logit_suppression, vacant_class_distillation
from fl_lightning.methods import FedVLS, LogitAdjustment
from fl_lightning.models import MLP, ImageClassifier

W4, V4 = (
    torch.cat([rows, torch.tensor([last], dtype=torch.float64)]) for rows, last in ((W, [-0.2, 0.1]), (V, [0.1, 0.1]))
)
COUNTS = torch.tensor([3, 0, 1, 0])


LOGITS, REFERENCE, TARGETS = draw(6, 4), draw(6, 4, seed=1), torch.tensor([0, 2, 2, 0, 0, 2])


# ---------------------------------------------------------------- laws
@pytest.mark.parametrize("counts", [[3, 1, 2, 4], [3, 0, 2, 4]])
def test_fewer_than_two_vacant_classes_distil_nothing(counts):
    logits = LOGITS.clone().requires_grad_()
    term = vacant_class_distillation(logits, REFERENCE, torch.tensor(counts))
    term.backward()
    assert term.item() == 0 and not logits.grad.any()


def test_the_distillation_moves_vacant_classes_only_and_its_gradients_sum_to_0():
    logits = LOGITS.clone().requires_grad_()
    vacant_class_distillation(logits, REFERENCE, COUNTS).backward()
    assert not logits.grad[:, ::2].any() and logits.grad[:, 1::2].all()
    assert logits.grad.sum(1).abs().max() < 1e-15
    p, q = (values[:, 1::2].softmax(1) for values in (LOGITS, REFERENCE))
    torch.testing.assert_close(logits.grad[:, 1::2], (p - q) / 6, rtol=1e-12, atol=1e-15)


def test_the_loss_gives_vacant_classes_no_gradient_and_the_suppression_none_to_labels():
    logits = LOGITS.clone().requires_grad_()
    cross_entropy(adjusted_logits(logits, COUNTS), TARGETS).backward()
    assert not logits.grad[:, 1::2].any() and logits.grad[:, ::2].all()
    logits.grad = None
    logit_suppression(logits, TARGETS, COUNTS).backward()
    assert not logits.grad.gather(1, TARGETS[:, None]).any() and not logits.grad[:, 1::2].any()


def test_without_both_terms_it_is_the_adjustment_by_the_local_prior_bit_for_bit(run):
    neutral, strong, adjusted = (run([method])[0] for method in (FedVLS(0, 0), FedVLS(1.0, 5.0), LogitAdjustment()))
    assert_same_bits(neutral, adjusted)
    assert differs(strong, adjusted)


def test_the_first_step_of_a_visit_distils_nothing(run):
    model = ImageClassifier(MLP(64, [16]))  # its training mode computes as its eval mode does
    row = run([FedVLS()], model=model, local_steps=1, max_rounds=1)[1].history[-1]
    assert row["train/fedvls/distillation"] == pytest.approx(0, abs=1e-9)


# ---------------------------------------------------------------- values
class FourClasses(Softmax):
    def build(self):
        self.body, self.head = nn.Identity(), nn.Linear(2, 4)


class FromV(FedVLS):
    """Begins the visit at V4, while the reference is the received W4."""

    name = "fedvls"

    def on_client_start(self, client):
        super().on_client_start(client)
        client.add_to_parameters({"head.weight": V4 - client.received["head.weight"]})


def test_the_worked_example_of_the_terms():
    logits = X["A"] @ V4.T
    values = [
        cross_entropy(adjusted_logits(logits, COUNTS), Y["A"]).item(),
        logit_suppression(logits, Y["A"], COUNTS).item(),
        vacant_class_distillation(logits, X["A"] @ W4.T, COUNTS).item(),
    ]
    wanted = [0.746287578976665, -0.27830595057164254, 0.0015400640782081663]
    assert values == pytest.approx(wanted, rel=0, abs=1e-12)
    assert values[0] + 0.005 * values[1] + 0.1 * values[2] == pytest.approx(0.7450500556316276, rel=0, abs=1e-12)


def test_the_worked_example_of_a_step(tmp_path):
    """The client has the label counts (3, 0, 1, 0), and takes a step on its first two examples."""
    how = {"added": (torch.ones(4, 2), [0, 0, 1, 3]), "sizes": [4, 2], "cohort_size": 1, "sampler": only_first}
    trainer = fit(tmp_path, [FromV()], model=FourClasses(W4), local_steps=1, **how)
    wanted = torch.tensor(
        [
            [0.030057376624470278, 0.07113524675105946],
            [0.20015494063364345, -0.00015385887985272298],
            [-0.13007096110841126, 0.32873176678042115],
            [0.09984505936635658, 0.10015385887985273],
        ],
        dtype=torch.float64,
    )
    torch.testing.assert_close(trainer.server.state["head.weight"], wanted, rtol=0, atol=1e-9)
