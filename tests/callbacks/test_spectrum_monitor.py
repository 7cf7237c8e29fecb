"""The spectra are those of the model, and every panel has what it shows."""

import numpy as np
import pytest
import torch
from helpers.errors import warned
from helpers.runs import small_data, small_model, small_trainer

from fl_lightning.callbacks import SpectrumMonitor
from fl_lightning.functional import effective_rank
from fl_lightning.models import MLP, ImageClassifier

pytestmark = pytest.mark.usefixtures("undrawn")


def fit(tmp_path, **kwargs):
    monitor = SpectrumMonitor(**kwargs.pop("monitor", {}))
    trainer = small_trainer(tmp_path, callbacks=[monitor], **kwargs)
    model, data = small_model(), small_data()
    trainer.fit(model, data)
    return trainer, model, data, np.load(trainer.run_dir / "spectra.npz")


def test_every_k_rounds_and_the_last_also_where_nothing_else_is_evaluated(tmp_path):
    trainer, _, _, spectra = fit(tmp_path, max_rounds=6, eval_every_n_rounds=6, monitor={"every_n_rounds": 3})
    assert spectra["rounds"].tolist() == [0, 3, 5]
    assert ["rank/classifier/stable" in row for row in trainer.history] == [True, False, False, True, False, True]


def test_the_scalars_of_a_spectrum_are_spread_over_it(tmp_path):
    trainer, *_ = fit(tmp_path, max_rounds=1, monitor={"max_scalars": 5})
    tags = [tag for tag in trainer.metrics if tag.startswith("spectrum/classifier/")]
    assert sorted(tags) == [f"spectrum/classifier/{place:02d}" for place in (0, 2, 4, 7, 9)]


def test_local_models_are_measured_before_aggregation(tmp_path):
    trainer, _, _, spectra = fit(
        tmp_path, participation=0.5, monitor={"local_models": True}, buffers="average", max_rounds=2
    )
    assert spectra["local_classifier"].shape == (2, 4, 10)
    assert spectra["local_representation"].shape == (2, 4, 16)
    present = ~np.isnan(spectra["local_classifier"]).any(2)
    assert present.sum(1).tolist() == [2, 2]
    assert np.flatnonzero(present[1]).tolist() == trainer.server.cohort
    assert spectra["local_rounds"].tolist() == [0, 1]
    assert spectra["probe_representation"].shape == (2, 16)
    ranks = [float(effective_rank(torch.from_numpy(one))) for one in spectra["local_classifier"][1][present[1]]]
    assert trainer.metrics["rank/classifier/local/mean"] == pytest.approx(np.mean(ranks))
    local = spectra["local_classifier"][1][present[1]]
    assert not np.allclose(local[0], local[1])


def test_local_and_global_models_are_measured_on_the_same_images(tmp_path):
    model = ImageClassifier(MLP(64, [12]), optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
    monitor = SpectrumMonitor(every_n_rounds=3, local_models=True, local_every_n_rounds=2, examples=50, threshold=5.0)
    trainer = small_trainer(tmp_path, callbacks=[monitor], max_rounds=4)
    trainer.fit(model, small_data())
    with np.load(trainer.run_dir / "spectra.npz") as spectra:
        assert spectra["rounds"].tolist() == [0, 3]
        assert spectra["local_rounds"].tolist() == [0, 2, 3]
        probed = spectra["probe_representation"]
        np.testing.assert_allclose(spectra["local_representation"], np.stack([probed] * 4, 1), rtol=1e-9, atol=1e-12)
        assert not np.allclose(probed[-1], spectra["representation"][-1])
    assert trainer.metrics["rank/representation/above_threshold"] == 0


def test_a_collapsed_representation_is_said(tmp_path):
    model = ImageClassifier(MLP(64, [8]))
    with torch.no_grad():
        model.encoder.layers[1][0].weight.zero_()
        model.encoder.layers[1][0].bias.fill_(-1)
    trainer = small_trainer(tmp_path, callbacks=[SpectrumMonitor()], max_rounds=1)
    with warned("round 0", "representation"):
        trainer.fit(model, small_data())
    assert trainer.metrics["rank/representation/effective"] == 0
