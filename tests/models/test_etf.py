"""The fixed simplex of FedETF: its geometry, and what training and methods do to it."""

import math
from functools import partial

import pytest
import torch
from helpers.errors import refused, warned
from helpers.runs import fitted, small_data
from helpers.softmax_regression import X, assert_printed
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from fl_lightning.callbacks import CCVR
from fl_lightning.functional import adjusted_logits
from fl_lightning.methods import FedBABU, Freeze, LogitAdjustment
from fl_lightning.models import MLP, ETFClassifier, ImageClassifier


def test_the_worked_example():
    head = ETFClassifier(2, 3, width=2).double()
    root = math.sqrt(0.75)
    head.vertices.weight.data = torch.tensor([[0, 1], [-root, -0.5], [root, -0.5]], dtype=torch.float64)
    head.projection.weight.data, head.projection.bias.data = torch.eye(2).double(), torch.zeros(2).double()
    logits, labels = head(X["A"]), torch.tensor([0, 1])
    assert_printed(logits / 10, 0.44721360, -0.99820347, 0.55098987, 0.89442719, -0.05991526, -0.83451193)
    balanced = cross_entropy(adjusted_logits(logits, torch.tensor([4, 1, 0])), labels)
    assert_printed(torch.stack([balanced, cross_entropy(logits, labels)]), 5.46486846, 5.44225210)


@pytest.mark.parametrize(("inputs", "classes", "width"), [(20, 10, None), (4, 10, None), (4, 10, 9), (8, 2, 1)])
def test_the_vertices_are_a_simplex(inputs, classes, width):
    head = ETFClassifier(inputs, classes, width)
    frame = head.vertices.weight
    assert frame.shape == (classes, width or max(inputs, classes))
    wanted = classes / (classes - 1) * (torch.eye(classes) - 1 / classes)
    torch.testing.assert_close(frame @ frame.T, wanted, rtol=0, atol=1e-6)


def test_logits_are_bounded_by_the_scale_add_up_to_0_and_ignore_the_norm_of_the_projection():
    head, z = ETFClassifier(6, 5, scale=3.0).double(), torch.randn(40, 6).double()
    logits = head(z)
    assert (logits.abs() <= 3 + 1e-12).all()
    assert logits.sum(1).abs().max() < 1e-6  # M is rounded to float32
    for parameter in (head.projection.weight, head.projection.bias):
        parameter.data *= 7
    torch.testing.assert_close(head(z), logits)
    assert torch.isfinite(head(torch.zeros(1, 6).double())).all()


def test_two_classifiers_are_drawn_apart_and_a_seed_draws_one():
    drawn = [(torch.manual_seed(seed), ETFClassifier(6, 5).vertices.weight)[1] for seed in (0, 0, 1)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


def model(**options):
    torch.manual_seed(0)
    optimizer = partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
    return ImageClassifier(MLP(64, [16]), optimizer=optimizer, classifier=partial(ETFClassifier, **options))


DATA = partial(small_data, train_size=120, test_size=50)
fit = partial(fitted, model=model, data=DATA, enable_progress_bar=False)


def test_training_moves_projection_and_scale_and_no_vertex(tmp_path):
    before = {name: value.clone() for name, value in model().state_dict().items()}
    trainer = fit(tmp_path, [LogitAdjustment()])
    moved = {name for name, value in trainer.server.state.items() if not torch.equal(value, before[name])}
    assert moved == before.keys() - {"classifier.vertices.weight"}
    assert trainer.client.sent == [name for name in before if name != "classifier.vertices.weight"]


def test_its_taps_are_the_unit_vectors_and_their_product_with_the_vertices(tmp_path):
    net = model()
    assert net.taps["representation"] == "classifier.projection" and net.taps["logits"] == "classifier.vertices"
    unit = net.classifier.projection(net.encoder(torch.randn(5, 64)))
    torch.testing.assert_close(unit.norm(dim=1), torch.ones(5))


@pytest.mark.parametrize("method", [FedBABU, Freeze])
def test_methods_that_freeze_the_head_are_refused(tmp_path, method):
    with refused(method.__name__, "classifier.vertices"):
        fit(tmp_path, [method()])


def test_a_calibration_of_the_fixed_classifier_is_refused(tmp_path):
    with refused("CCVR", "classifier.vertices"):
        fit(tmp_path, [], callbacks=[CCVR()])


def test_a_scale_below_0_is_evaluated_with_a_warning():
    head = ETFClassifier(4, 3)
    head.eval()(torch.randn(2, 4))
    head.scale.data.neg_()
    with warned("scale", "-10"):
        head.eval()(torch.randn(2, 4))
