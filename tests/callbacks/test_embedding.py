"""The embedding shows the probe's classes, and says whose models they are."""

from functools import partial

import numpy as np
import pytest
import torch
from helpers.runs import measured, small_model

from fl_lightning.callbacks import Embedding
from fl_lightning.callbacks.embedding import embed
from fl_lightning.methods import FedBN
from fl_lightning.models import MLP, ImageClassifier, Projector

pytestmark = pytest.mark.usefixtures("undrawn")
fit = partial(measured, "embedding.npz")


def test_groups_that_are_far_apart_stay_apart_and_a_seed_gives_the_same_bits():
    rng = np.random.default_rng(0)
    centers = 20 * rng.standard_normal((3, 8))
    z = np.concatenate([center + rng.standard_normal((20, 8)) for center in centers]).astype(np.float32)
    points = embed(z, 10.0, 7)
    distances = np.linalg.norm(points[:, None] - points[None], axis=-1)
    np.fill_diagonal(distances, np.inf)
    assert (distances.argmin(1) // 20 == np.arange(60) // 20).all()
    assert points.tobytes() == embed(z, 10.0, 7).tobytes()
    for z in (np.ones((9, 3)), 1e30 * np.eye(9), np.diag([np.inf] * 9)):
        assert not embed(z.astype(np.float32), 30.0, 0).any()


def test_classes_clients_and_the_projector(tmp_path):
    callback = Embedding(examples=120, clients=[3, 1], classes=[2, 5, 8])
    trainer, file = fit(tmp_path, callback, logger=True)
    assert file["rounds"].tolist() == [1]
    labels = file["labels"][0]
    assert set(labels) == {2, 5, 8} and 20 <= len(labels) <= 60
    assert file["clients"].tolist() == [[1, 3]]
    shapes = {name: file[name].shape for name in ("global", "local", "joint")}
    number = len(labels)
    assert shapes == {"global": (1, number, 2), "local": (1, 2, number, 2), "joint": (1, 3, number, 2)}
    assert all(np.isfinite(file[name]).all() for name in shapes)
    (folder,) = trainer.run_dir.glob("*/embedding")
    lines = (folder / "metadata.tsv").read_text().splitlines()
    assert lines[0] == "class\tmodel"
    assert lines[1:] == [f"{c}\t{name}" for name in ("global", "client 1", "client 3") for c in labels]
    rows = np.loadtxt(folder / "tensors.tsv")
    model = small_model()
    model.load_state_dict(trainer.server.state)
    model.eval()
    batches = trainer.representations(None, ("logits",), examples=120)
    with torch.no_grad():
        x, y = (torch.cat(parts) for parts in zip(*(batch for _, batch, *_ in batches), strict=True))
        z = model.projector(model.encoder(x))
    wanted = z[torch.isin(y, torch.tensor([2, 5, 8]))].numpy()
    np.testing.assert_allclose(rows[:number], wanted, atol=1e-5)


def test_the_first_clients_of_a_round_are_taken_and_others_are_nan(tmp_path):
    trainer, file = fit(tmp_path, Embedding(1, examples=16), cohort_size=1)
    assert file["clients"][-1].tolist() == [*trainer.server.cohort, -1]
    assert np.isfinite(file["local"][-1]).all((1, 2)).tolist() == [True, False]
    _, file = fit(tmp_path, Embedding(examples=16, clients=[]), max_rounds=1)
    assert file["local"].shape == (1, 0, 16, 2)


def test_without_a_global_model_clients_alone_are_embedded(tmp_path):
    model = ImageClassifier(MLP(64, [16]), Projector(8))
    _, file = fit(tmp_path, Embedding(examples=16, clients=[0]), model=model, methods=[FedBN()], max_rounds=1)
    assert np.isnan(file["global"]).all() and np.isnan(file["joint"][:, 0]).all()
    assert np.isfinite(file["local"]).all()
