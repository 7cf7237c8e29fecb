"""The numbers of callbacks that measure models are those of the models themselves: one run that several tests read."""

import copy
from itertools import pairwise

import numpy as np
import pytest
import torch
from helpers.errors import refused
from helpers.runs import small_data, small_model, small_trainer, watched
from helpers.tiny import TinyData, TinyModule, clients
from torch import nn

from fl_lightning.callbacks import Callback, Drift, LayerAlignment, LayerSimilarity, SpectrumMonitor
from fl_lightning.client.run_context import RunContext
from fl_lightning.functional import linear_cka
from fl_lightning.methods import FedBN, Local
from fl_lightning.models import MLP, ImageClassifier, Projector

pytestmark = pytest.mark.usefixtures("undrawn")
LAYERS = ["encoder.layers.1.0", "encoder.layers.2.0", "projector.layers.0", "projector.layers.3", "classifier"]


class Remembers(Callback):
    """Keeps the global states before and after the last round, what clients did in it, and the probe's images."""

    def on_round_start(self, trainer):
        self.before, self.local, self.changes = copy.deepcopy(trainer.server.state), {}, {}

    def on_client_end(self, trainer, client):
        self.local[client.info.id] = client.state()
        layers = {name: value.flatten().numpy().copy() for name, value in client.change.items()}
        self.changes[client.info.id] = (layers, client.weight, client.lr_total)

    def on_last_round_end(self, trainer):
        self.after = copy.deepcopy(trainer.server.state)
        ((_, (self.images, _), *_),) = trainer.representations(None, ("logits",), examples=60)


def arrays(trainer, name):
    return dict(np.load(trainer.run_dir / f"{name}.npz"))


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """(trainer, what is remembered, model) of a run of two rounds."""
    model, seen = small_model(), Remembers()
    similarity = LayerSimilarity(1, ["early.1", "projector.layers.0"], examples=60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fl_lightning.plotting.figures.figures", lambda plots: ())
        patch.setattr(RunContext, "log_figure", lambda *args: None)
        callbacks = [SpectrumMonitor(), LayerAlignment(1, number=12), similarity, Drift(1), seen]
        trainer = watched(tmp_path_factory.mktemp("measured"), *callbacks, model=model)
    model.eval()
    return trainer, seen, model


def test_spectra_are_those_of_the_final_global_model(measured):
    trainer, _, model = measured
    spectra = arrays(trainer, "spectra")
    assert spectra["rounds"].tolist() == [0, 1]
    weight = np.linalg.svd(model.classifier.weight.detach().double().numpy(), compute_uv=False)
    np.testing.assert_allclose(spectra["classifier"][-1], weight, rtol=1e-9)
    with torch.no_grad():
        z = torch.cat([model.projector(model.encoder(x)) for x, _ in trainer.data.test_dataloader()]).double().numpy()
    covariance = np.linalg.svd(np.cov(z.T, bias=True), compute_uv=False)
    np.testing.assert_allclose(spectra["representation"][-1], covariance, rtol=1e-4, atol=1e-6)
    tags = {tag: trainer.metrics[f"rank/representation/{tag}"] for tag in ("above_threshold", "numerical", "condition")}
    counted = covariance[covariance > 16 * 2**-23 * covariance[0]]
    assert tags["above_threshold"] == (covariance > 0.01).sum()
    assert tags["numerical"] == len(counted)
    assert tags["condition"] == pytest.approx(counted[0] / counted[-1], rel=1e-2)
    p = covariance / covariance.sum()
    rank = np.exp(-np.sum(p[p > 0] * np.log(p[p > 0])))
    assert trainer.metrics["rank/representation/effective"] == pytest.approx(rank, rel=1e-4)
    assert trainer.metrics["spectrum/classifier/00"] == pytest.approx(weight[0])
    assert trainer.metrics["spectrum/classifier/09"] == pytest.approx(weight[9])
    logged = [trainer.metrics[f"spectrum/log10/classifier/{which}"] for which in ("largest", "median", "smallest")]
    assert logged == pytest.approx(np.log10(weight[[0, 5, 9]]), rel=1e-4)


def test_drift_has_the_numbers_of_the_changes(measured):
    trainer, seen, _ = measured
    file = {name: values[-1] for name, values in arrays(trainer, "drift").items()}
    ids = file["clients"].tolist()
    assert ids == [0, 1, 2, 3]
    vectors = np.stack([np.concatenate(list(seen.changes[k][0].values())) for k in ids])
    p = np.array([seen.changes[k][1] for k in ids]) / 400
    norms = np.linalg.norm(vectors, axis=1)
    mean = p @ vectors
    np.testing.assert_allclose(file["norms"], norms, rtol=1e-6)
    cosines = vectors @ vectors.T / np.outer(norms, norms)
    np.testing.assert_allclose(file["pairwise"], cosines, atol=1e-6)
    np.testing.assert_allclose(file["to_mean"], vectors @ mean / norms / np.linalg.norm(mean), rtol=1e-5)
    gradients = vectors / np.array([seen.changes[k][2] for k in ids])[:, None]
    dissimilarity = p @ np.square(gradients).sum(1) / np.square(p @ gradients).sum()
    assert file["dissimilarity"] == pytest.approx(dissimilarity, rel=1e-5)
    assert trainer.metrics["drift/client"] == pytest.approx(p @ norms, rel=1e-6)
    assert trainer.metrics["drift/global"] == pytest.approx(np.linalg.norm(mean), rel=1e-6)
    assert trainer.metrics["drift/dissimilarity"] == file["dissimilarity"] > 1
    assert trainer.metrics["drift/cosine/pairwise"] == pytest.approx(cosines[~np.eye(4, dtype=bool)].mean(), rel=1e-4)
    last = file["layers"].tolist().index("classifier")
    part = np.stack([np.concatenate([seen.changes[k][0][f"classifier.{n}"] for n in ("weight", "bias")]) for k in ids])
    np.testing.assert_allclose(file["layer_norms"][last], np.linalg.norm(part, axis=1), rtol=1e-6)
    np.testing.assert_allclose(file["gram"][last], part @ part.T, rtol=1e-4, atol=1e-9)


def expected(state, first, second, k):
    u, v = (np.linalg.svd(state[f"{path}.weight"].double().numpy(), full_matrices=False) for path in (first, second))
    return np.abs(v[2][:k] @ u[0][:, :k])


def test_alignment_is_that_of_the_global_model_and_the_mean_over_local_ones(measured):
    trainer, seen, _ = measured
    file = arrays(trainer, "layer_alignment")
    assert file["pairs"][-1].tolist() == [list(pair) for pair in pairwise(LAYERS)]
    for place, pair in enumerate(file["pairs"][-1]):
        of_global = expected(seen.after, *pair, 12)
        rows, columns = of_global.shape
        np.testing.assert_allclose(file["global"][-1, place, :rows, :columns], of_global, atol=1e-6)
        assert np.isnan(file["global"][-1, place, rows:]).all()
        local = np.mean([expected(one, *pair, 12) for one in seen.local.values()], 0)
        np.testing.assert_allclose(file["local"][-1, place, :rows, :columns], local, atol=1e-6)
        mean = np.diagonal(of_global).mean()
        assert trainer.metrics[f"alignment/{pair[1]}/global"] == pytest.approx(mean, abs=1e-6)
    assert file["global"].shape == (2, 4, 12, 12)


def test_similarity_is_the_debiased_cka_of_local_and_global_models_on_the_probe(measured):
    trainer, seen, model = measured
    file, model = arrays(trainer, "layer_similarity"), copy.deepcopy(model)

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
        between = [[cka(one, other) for other in local] for one in local]
        np.testing.assert_allclose(file["between_clients"][-1, place], between, atol=1e-5)
        assert file["between_rounds"][-1, place] == pytest.approx(cka(before, after), abs=1e-5)
        layer = ("early.1", "projector.layers.0")[place]
        assert trainer.metrics[f"similarity/{layer}/global"] == pytest.approx(np.mean(to_global), abs=1e-5)
        mean = np.mean([between[i][j] for i in range(4) for j in range(i)])
        assert trainer.metrics[f"similarity/{layer}/clients"] == pytest.approx(mean, abs=1e-5)
    assert file["layers"].tolist() == [["early.1", "projector.layers.0"]] * 2
    assert file["clients"].tolist() == [[0, 1, 2, 3]] * 2


def test_layers_that_stay_with_the_clients_have_no_global_model(tmp_path):
    file = arrays(watched(tmp_path, LayerAlignment(number=3), methods=[Local()], max_rounds=1), "layer_alignment")
    assert np.isnan(file["global"]).all() and np.isfinite(file["local"][0, 0]).all()
    # statistics that stay do not matter to weights that travel
    file = arrays(watched(tmp_path, LayerAlignment(number=3), methods=[FedBN()], max_rounds=1), "layer_alignment")
    assert np.isfinite(file["global"][0, 0]).all()


def test_a_layer_without_a_weight_matrix_is_refused(tmp_path):
    trainer = small_trainer(tmp_path, callbacks=[LayerAlignment(layers=["encoder.layers.0.0", "classifier"])])
    with refused("LayerAlignment.layers='encoder.layers.0.0'", "Conv2d"):
        trainer.fit(small_model("cnn"), small_data("cnn"))


def test_clients_that_do_not_train_are_all_alike(tmp_path):
    model = ImageClassifier(MLP(64, [16]), optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
    file = arrays(watched(tmp_path, LayerSimilarity(examples=60), model=model, max_rounds=1), "layer_similarity")
    for name in ("to_global", "between_clients", "between_rounds"):
        np.testing.assert_allclose(file[name], 1, atol=1e-9)
    assert file["layers"].tolist() == [["early.0", "representation", "logits"]]


def test_the_lowest_ids_of_a_cohort_are_measured_and_others_are_nan(tmp_path):
    callback = LayerSimilarity(1, ["logits"], examples=64, max_clients=3)
    trainer = watched(tmp_path, callback, participation=0.5)
    file = arrays(trainer, "layer_similarity")
    ids = sorted(trainer.server.cohort)
    assert file["clients"][-1].tolist() == [*ids, -1]
    assert np.isfinite(file["to_global"][-1]).tolist() == [[True, True, False]]


def test_without_a_global_model_only_clients_are_compared(tmp_path):
    model = ImageClassifier(MLP(64, [16]), Projector(8))
    trainer = watched(tmp_path, LayerSimilarity(examples=64), model=model, methods=[FedBN()], max_rounds=1)
    file = arrays(trainer, "layer_similarity")
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
