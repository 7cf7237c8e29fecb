"""The distances from neural collapse agree with the definition, and are 0 for a simplex equiangular tight frame."""

from functools import partial

import numpy as np
import pytest
import torch
from helpers.runs import small_data, small_model, small_trainer
from helpers.tiny import TinyData, TinyModule, clients
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning.callbacks import NeuralCollapse, SpectrumMonitor
from fl_lightning.functional import cosines, neural_collapse
from fl_lightning.methods import Local
from fl_lightning.models import MLP, ImageClassifier

pytestmark = pytest.mark.usefixtures("undrawn")
Z = [[2.0, 0.1], [2.2, 0.0], [1.8, -0.1], [-1.0, 1.8], [-1.2, 1.6], [-1.0, -1.7]]
LABELS = [0, 0, 0, 1, 1, 2]
WEIGHT = [[1.2, 0.1], [-0.5, 0.9], [-0.6, -1.0]]
OF_SCALE = ("1", "1_quotient", "2_norm_means", "2_angle_means", "3")


class Given(TinyModule):
    """The logits are a linear function of the images, which is trained with the rate ``lr``."""

    def __init__(self, weight, lr=0.0):
        super().__init__(partial(torch.optim.SGD, lr=lr))
        self.taps = {"representation": "body", "logits": "head"}
        self.body, self.head = nn.Identity(), nn.Linear(len(weight[0]), len(weight), bias=False)
        self.head.weight.data = torch.as_tensor(weight, dtype=torch.float64).clone()

    def test_step(self, batch, batch_idx):
        self.log("loss", self.loss(batch))


class Rows(TinyData):
    """Given examples for training, and those at ``tested`` for the test, in batches of 2."""

    def __init__(self, z, labels, tested=slice(None)):
        super().__init__()
        self.rows = TensorDataset(torch.as_tensor(z, dtype=torch.float64), torch.as_tensor(labels))
        self.tested = TensorDataset(*self.rows[tested])

    def train_dataloader(self):
        return DataLoader(self.rows, 2)

    def val_dataloader(self):
        return []

    def test_dataloader(self):
        return DataLoader(self.tested, 2)


def measured(tmp_path, z=Z, labels=LABELS, weight=WEIGHT, tested=slice(None)):
    """The values that a run logs as ``nc/...``, and its arrays."""
    how = {"max_rounds": 1, "precision": "64-true", "callbacks": [NeuralCollapse()]}
    trainer = small_trainer(tmp_path, **how)
    trainer.fit(Given(weight), clients(Rows(z, labels, tested)))
    values = {tag.removeprefix("nc/"): value for tag, value in trainer.metrics.items() if tag.startswith("nc/")}
    return values, dict(np.load(trainer.run_dir / "neural_collapse.npz"))


@pytest.mark.parametrize(
    ("tested", "expected"),
    [
        (
            slice(None),
            {
                **{"1": 0.00390502, "1_quotient": 0.00583982, "2_norm_means": 0.01977218, "2_norm_weights": 0.08102543},
                **{"2_angle_means": 0.02118726, "2_angle_weights": 0.05761214, "2_etf": 0.15593556, "3": 0.00809575},
                **{"4": 0, "classes": 3, "dead_units": 0},
            },
        ),
        (
            slice(5),
            {
                **{"1": 0.00167680, "1_quotient": 0.00896, "2_norm_means": 0, "2_norm_weights": 0.11054044},
                **{"2_angle_means": 0, "2_angle_weights": 0.58862941, "3": 0.32607244, "classes": 2},
            },
        ),
    ],
)
def test_the_values_are_those_of_an_example_by_hand(tmp_path, tested, expected):
    values, _ = measured(tmp_path, tested=tested)
    assert {name: values[name] for name in expected} == pytest.approx(expected, abs=5e-9)


def frame(classes, dimensions):
    """The vectors of a simplex equiangular tight frame in some dimensions, turned at random."""
    draw = torch.Generator().manual_seed(classes)
    turned, _ = torch.linalg.qr(torch.randn(dimensions, classes, generator=draw, dtype=torch.float64))
    return (torch.eye(classes, dtype=torch.float64) - 1 / classes) @ turned.T


def draws(classes=4, dimensions=5, number=40):
    """Examples of classes of unequal size, and a classifier."""
    draw = torch.Generator().manual_seed(1)
    labels = torch.arange(number).sqrt().long() % classes
    z = torch.randn(number, dimensions, generator=draw, dtype=torch.float64)
    places = 2 * torch.randn(classes, dimensions, generator=draw, dtype=torch.float64)
    return z + places[labels], labels, places + torch.randn(classes, dimensions, generator=draw, dtype=torch.float64)


@pytest.mark.parametrize(("classes", "dimensions"), [(2, 2), (4, 6)])
def test_a_simplex_and_a_multiple_of_it_as_the_classifier_have_collapsed(tmp_path, classes, dimensions):
    vectors, labels = frame(classes, dimensions), torch.arange(3 * classes) % classes
    values, arrays = measured(tmp_path, vectors[labels] + 0.3, labels, 5 * vectors)
    distances = {name: value for name, value in values.items() if name not in ("classes", "dead_units")}
    assert len(distances) == 9 and distances == pytest.approx(dict.fromkeys(distances, 0), abs=1e-12)
    expected = np.where(np.eye(classes), 1, -1 / (classes - 1))
    np.testing.assert_allclose(arrays["cosines_means"][0], expected, atol=1e-12)
    np.testing.assert_allclose(arrays["norms_weights"][0], np.ones(classes), atol=1e-12)


def test_a_rotation_and_every_example_twice_leave_all_values(tmp_path):
    z, labels, weight = draws()
    values, _ = measured(tmp_path, z, labels, weight)
    turned, _ = torch.linalg.qr(torch.randn(5, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64))
    again, _ = measured(tmp_path, torch.cat([z, z]) @ turned, torch.cat([labels, labels]), weight @ turned)
    assert again == pytest.approx(values, rel=1e-9)
    assert 0 < values["4"] < 1 and all(values[name] > 0.01 for name in OF_SCALE)


def test_the_distances_of_the_means_depend_on_neither_scale_nor_place(tmp_path):
    z, labels, weight = draws()
    values, moved = (measured(tmp_path, one, labels, weight)[0] for one in (z, 3 * z + 7))
    assert {name: moved[name] for name in OF_SCALE} == pytest.approx({n: values[n] for n in OF_SCALE}, rel=1e-9)


def test_two_means_are_always_opposite(tmp_path):
    z, labels, weight = draws(classes=2)
    assert measured(tmp_path, z, labels, weight)[0]["2_angle_means"] == pytest.approx(0, abs=1e-12)


def test_the_fourth_value_compares_with_the_nearest_mean(tmp_path):
    z, labels, weight = draws()
    means = torch.stack([z[labels == c].mean(0) for c in range(4)])
    differ = (z @ weight.T).argmax(1) != torch.cdist(z, means).argmin(1)
    assert measured(tmp_path, z, labels, weight)[0]["4"] == pytest.approx(float(differ.double().mean()))


def test_classes_without_examples_count_only_among_the_absent(tmp_path):
    z, labels, weight = draws()
    tested = labels < 2
    values, arrays = measured(tmp_path, z, labels, weight, tested)
    alone, _ = measured(tmp_path, z[tested], labels[tested], weight[:2])
    assert {name: values[name] for name in alone} == pytest.approx(alone, rel=1e-9)
    between, norms = cosines(weight), weight.norm(dim=1)
    assert values["absent/cosine"] == pytest.approx(float(between[2, 3]))
    assert values["absent/cosine_present"] == pytest.approx(float(between[2:, :2].mean()))
    assert values["absent/norm"] == pytest.approx(float(norms[2:].mean() / norms[:2].mean()))
    assert np.isnan(arrays["cosines_means"][0, 2:]).all() and np.isfinite(arrays["cosines_weights"]).all()


def test_a_single_class_has_no_distances(tmp_path):
    values, arrays = measured(tmp_path, tested=slice(3))
    assert values == {"classes": 1, "4": 0, "dead_units": 0} | {n: v for n, v in values.items() if "absent" in n}
    assert np.isnan(arrays["nc_1"]).all() and np.isnan(arrays["nc_3"]).all()


def test_equal_means_and_a_diverged_model_have_no_distances():
    weight, within = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), torch.eye(4)
    equal = neural_collapse(torch.ones(3, 4), within, weight)
    assert all(not torch.isfinite(equal[name]) for name in OF_SCALE)
    assert torch.isfinite(equal["2_etf"])
    diverged = neural_collapse(torch.full((3, 4), torch.inf), within, weight)
    assert all(value.isnan() for value in diverged.values())


def test_units_that_are_never_active_are_dead(tmp_path):
    model = ImageClassifier(MLP(64, [8]))
    with torch.no_grad():
        model.encoder.layers[1][0].bias[:3] = -100
    trainer = small_trainer(tmp_path, callbacks=[NeuralCollapse()], max_rounds=1)
    trainer.fit(model, small_data())
    assert trainer.metrics["nc/dead_units"] == pytest.approx(3 / 8)


def test_personalized_models_are_averaged(tmp_path):
    z, labels, weight = draws()
    trainer = small_trainer(tmp_path, callbacks=[NeuralCollapse()], max_rounds=1, precision="64-true")
    trainer.fit(Given(weight, lr=0.1), clients(Rows(z, labels), 20, 20), [Local()])
    means = torch.stack([z[labels == c].mean(0) for c in range(4)])
    within = (z - means[labels]).T @ (z - means[labels]) / len(z)
    rows = [trainer.client.memories().own_entries(k)["head.weight"] for k in range(2)]
    own = [float(neural_collapse(means, within, row)["3"]) for row in rows]
    assert own[0] != pytest.approx(own[1], rel=1e-3)
    assert trainer.metrics["nc/3"] == pytest.approx(np.mean(own), rel=1e-9)


def test_a_round_needs_no_further_pass_through_the_network(tmp_path):
    passes = []
    for number, callbacks in enumerate([[], [NeuralCollapse(), SpectrumMonitor()]]):
        model = small_model()
        model.classifier.register_forward_hook(lambda *args, number=number: passes.append(number))
        small_trainer(tmp_path, callbacks=callbacks, max_rounds=2).fit(model, small_data())
    assert passes.count(0) == passes.count(1) > 0
