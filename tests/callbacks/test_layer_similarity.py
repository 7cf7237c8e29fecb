"""The similarities are those of the models' activations on the probe."""

import copy

import numpy as np
import pytest
import torch
from helpers.errors import refused
from helpers.runs import small_data, small_model, small_trainer
from helpers.tiny import TinyData, TinyModule, clients
from torch import nn

from fl_lightning.callbacks import Callback, LayerSimilarity
from fl_lightning.functional import linear_cka
from fl_lightning.methods import FedBN
from fl_lightning.models import MLP, ImageClassifier, Projector

pytestmark = pytest.mark.usefixtures("undrawn")


class Remembers(Callback):
    """Keeps the global states before and after the last round, the local ones in it, and the probe's images."""

    def on_round_start(self, trainer):
        self.before, self.local = copy.deepcopy(trainer.server.state), {}

    def on_client_end(self, trainer, client):
        self.local[client.info.id] = client.state()

    def on_last_round_end(self, trainer):
        self.after = copy.deepcopy(trainer.server.state)
        batches = trainer.representations(None, ("logits",), examples=60)
        ((_, (self.images, _), *_),) = batches


def fit(tmp_path, callback, model=None, methods=(), **kwargs):
    remembers = Remembers()
    trainer = small_trainer(tmp_path, callbacks=[callback, remembers], **kwargs)
    model = model or small_model()
    trainer.fit(model, small_data(), list(methods))
    return trainer, remembers, model, np.load(trainer.run_dir / "layer_similarity.npz")


def test_it_is_the_debiased_cka_of_local_and_global_models_on_the_probe(tmp_path):
    trainer, seen, model, file = fit(tmp_path, LayerSimilarity(1, ["early.1", "projector.layers.0"], examples=60))
    model.eval()

    def activations(state):
        model.load_state_dict(state)
        with torch.no_grad():
            early = model.encoder.layers[:3](seen.images)
            return early, model.projector.layers[0](early)

    after, before, local = activations(seen.after), activations(seen.before), [*map(activations, seen.local.values())]
    for place in (0, 1):

        def cka(one, other, place=place):
            return linear_cka(one[place], other[place], debiased=True).item()

        to_global = [cka(one, after) for one in local]
        np.testing.assert_allclose(file["to_global"][-1, place], to_global, atol=1e-5)
        pairwise = [[cka(one, other) for other in local] for one in local]
        np.testing.assert_allclose(file["between_clients"][-1, place], pairwise, atol=1e-5)
        assert file["between_rounds"][-1, place] == pytest.approx(cka(before, after), abs=1e-5)
        layer = ("early.1", "projector.layers.0")[place]
        assert trainer.metrics[f"similarity/{layer}/global"] == pytest.approx(np.mean(to_global), abs=1e-5)
        mean = np.mean([pairwise[i][j] for i in range(4) for j in range(i)])
        assert trainer.metrics[f"similarity/{layer}/clients"] == pytest.approx(mean, abs=1e-5)
    assert file["layers"].tolist() == [["early.1", "projector.layers.0"]] * 2
    assert file["clients"].tolist() == [[0, 1, 2, 3]] * 2


def test_clients_that_do_not_train_are_all_alike(tmp_path):
    model = ImageClassifier(MLP(64, [16]), optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
    *_, file = fit(tmp_path, LayerSimilarity(examples=60), model, max_rounds=1)
    for name in ("to_global", "between_clients", "between_rounds"):
        np.testing.assert_allclose(file[name], 1, atol=1e-9)
    assert file["layers"].tolist() == [["early.0", "representation", "logits"]]


def test_the_lowest_ids_of_a_cohort_are_measured_and_others_are_nan(tmp_path):
    callback = LayerSimilarity(1, ["logits"], examples=64, max_clients=3)
    trainer, *_, file = fit(tmp_path, callback, participation=0.5)
    ids = sorted(trainer.server.cohort)
    assert file["clients"][-1].tolist() == [*ids, -1]
    assert np.isfinite(file["to_global"][-1]).tolist() == [[True, True, False]]


def test_without_a_global_model_only_clients_are_compared(tmp_path):
    model = ImageClassifier(MLP(64, [16]), Projector(8))
    trainer, *_, file = fit(tmp_path, LayerSimilarity(examples=64), model, [FedBN()], max_rounds=1)
    assert np.isnan(file["to_global"]).all() and np.isnan(file["between_rounds"]).all()
    assert np.isfinite(file["between_clients"]).all()
    tags = {name.split("/")[-1] for name in trainer.metrics if name.startswith("similarity/")}
    assert tags == {"clients"}


class Unused(TinyModule):
    """A module without taps, one of whose layers no forward calls."""

    def build(self):
        self.unused = nn.Linear(3, 3)

    def test_step(self, batch, batch_idx):
        self.log("loss", self.loss(batch))


@pytest.mark.parametrize(
    ("layers", "words"), [(None, ("LayerSimilarity.layers=None", "taps")), (["unused"], ("unused='unused'",))]
)
def test_a_module_without_taps_and_a_layer_without_calls_are_refused_by_name(tmp_path, layers, words):
    trainer = small_trainer(tmp_path, callbacks=[LayerSimilarity(layers=layers)])
    with refused(*words):
        trainer.fit(Unused(), clients(TinyData(test=[20]), 7, 7))
