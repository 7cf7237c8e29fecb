"""The alignment is that of the layers' singular vectors."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from helpers.errors import refused
from helpers.runs import small_data, small_model, small_trainer

from fl_lightning.callbacks import Callback, LayerAlignment
from fl_lightning.functional import singular_alignment
from fl_lightning.methods import FedBN, Local

pytestmark = pytest.mark.usefixtures("undrawn")


class Remembers(Callback):
    """Keeps the local states of the last round."""

    def on_round_start(self, trainer):
        self.local = []

    def on_client_end(self, trainer, client):
        self.local.append(client.state())


def expected(state, first, second, k):
    u, v = (np.linalg.svd(state[f"{path}.weight"].double().numpy(), full_matrices=False) for path in (first, second))
    return np.abs(v[2][:k] @ u[0][:, :k])


def fit(tmp_path, callback, model=None, methods=(), **kwargs):
    remembers = Remembers()
    trainer = small_trainer(tmp_path, callbacks=[callback, remembers], **kwargs)
    model = model or small_model()
    trainer.fit(model, small_data(), list(methods))
    return trainer, remembers, model, np.load(trainer.run_dir / "layer_alignment.npz")


def test_layers_that_are_aligned_have_the_identity():
    u, v = (torch.linalg.qr(torch.randn(6, 6).double())[0] for _ in range(2))
    first, second = torch.diag(torch.arange(6.0, 0, -1).double()) @ v, torch.randn(4, 6).double()
    first = u @ first
    left = torch.linalg.qr(torch.randn(4, 4).double())[0]
    aligned = left @ torch.diag(torch.tensor([9.0, 5, 3, 2]).double()) @ u.T[:4]
    torch.testing.assert_close(singular_alignment(first, aligned, 4), torch.eye(4).double())
    assert singular_alignment(first, second, 4).diagonal().mean() < 0.9


def test_it_is_that_of_the_global_model_and_the_mean_over_local_ones(tmp_path):
    trainer, seen, model, file = fit(tmp_path, LayerAlignment(number=12), max_rounds=1)
    paths = ["encoder.layers.1.0", "encoder.layers.2.0", "projector.layers.0", "projector.layers.3", "classifier"]
    assert file["pairs"][0].tolist() == [list(pair) for pair in pairwise(paths)]
    state = {name: value.detach() for name, value in model.state_dict().items()}
    for place, pair in enumerate(file["pairs"][0]):
        of_global = expected(state, *pair, 12)
        rows, columns = of_global.shape
        np.testing.assert_allclose(file["global"][0, place, :rows, :columns], of_global, atol=1e-6)
        assert np.isnan(file["global"][0, place, rows:]).all()
        local = np.mean([expected(one, *pair, 12) for one in seen.local], 0)
        np.testing.assert_allclose(file["local"][0, place, :rows, :columns], local, atol=1e-6)
        mean = np.diagonal(of_global).mean()
        assert trainer.metrics[f"alignment/{pair[1]}/global"] == pytest.approx(mean, abs=1e-6)
    assert file["global"].shape == (1, 4, 12, 12)


def test_layers_that_stay_with_the_clients_have_no_global_model(tmp_path):
    *_, file = fit(tmp_path, LayerAlignment(number=3), methods=[Local()], max_rounds=1)
    assert np.isnan(file["global"]).all() and np.isfinite(file["local"][0, 0]).all()
    # statistics that stay do not matter to weights that travel
    *_, file = fit(tmp_path, LayerAlignment(number=3), methods=[FedBN()], max_rounds=1)
    assert np.isfinite(file["global"][0, 0]).all()


@pytest.mark.parametrize(
    ("layers", "kind", "words"),
    [
        (["encoder.layers.0.0", "classifier"], "cnn", ("LayerAlignment.layers='encoder.layers.0.0'", "Conv2d")),
        (["encoder.layers.1.0", "classifier"], "mlp", ("LayerAlignment.layers", "'encoder.layers.1.0'", "32", "16")),
    ],
)
def test_layers_without_weight_matrices_that_follow_are_refused(tmp_path, layers, kind, words):
    with refused(*words):
        small_trainer(tmp_path, callbacks=[LayerAlignment(layers=layers)]).fit(small_model(kind), small_data(kind))
