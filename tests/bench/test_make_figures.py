"""The papers' figures are drawn from the stored numbers of runs of our own."""

import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from fl_lightning.bench import Cell, load_suite
from fl_lightning.cli import main

PAPERS = Path(__file__).resolve().parents[2] / "experiments" / "papers"
sys.path.insert(0, str(PAPERS / "programs"))

import make_figures  # noqa: E402, found through the path above

SMOKE = PAPERS.parent / "smoke" / "fedavg.yaml"


def finished(root, suite):
    """Each cell of a suite with the folder of its run, which has no file but the final model."""
    for cell in load_suite(PAPERS / "scaled" / suite).cells():
        run = root / cell.folder / "version_0"
        (run / "checkpoints").mkdir(parents=True)
        (run / "checkpoints" / "model.ckpt").touch()
        yield cell, run


def test_the_last_measurement_of_each_run_is_collected(tmp_path, monkeypatch):
    began = []

    def next_round(cell, run):
        began.append((cell.labels["alpha"], cell.seed))
        yield f"continued/{cell.labels['alpha']}", np.zeros(2)

    monkeypatch.setattr(make_figures, "continued", next_round)
    with pytest.raises(SystemExit, match="alpha=IID"):  # has no finished run
        make_figures.collect("figures", tmp_path)
    for number, (cell, run) in enumerate(finished(tmp_path, "figures.yaml")):
        for file, names in make_figures.FILES.items():
            np.savez(run / file, **{name: [np.full(2, -1.0), np.full(2, number + cell.seed / 10)] for name in names})
    found = make_figures.collect("figures", tmp_path)
    assert found["IID/FedAvg/before"].shape == (3, 2)
    assert found["0.05/FedUV/classifier"].min() > 0  # the last, not the first
    np.testing.assert_allclose(found["1/FedAvg/after"][:, 0] % 1, [0.0, 0.1, 0.2], atol=1e-5)
    assert sorted(began) == [(alpha, seed) for alpha in ("0.05", "0.1") for seed in range(3)]


def test_neighbours_of_the_own_kind_are_counted():
    rng = np.random.default_rng(0)
    apart, mixed = np.arange(3)[:, None, None] * 100.0, np.zeros((3, 1, 1))
    groups = np.stack([where + rng.random((3, 50, 2)) for where in (apart, mixed)])
    shares = make_figures.own_neighbours(groups)
    assert shares[0].tolist() == [100, 100, 100] and abs(shares[1].mean() - 100 * 49 / 149) < 5


@pytest.mark.thorough
def test_methods_continue_the_same_model(tmp_path, monkeypatch, one_parser, undrawn):
    config = yaml.safe_load(SMOKE.read_text())
    config["trainer"] = {"max_rounds": 1, "default_root_dir": str(tmp_path), "name": "begun", "threads_per_worker": 1}
    cell = Cell({"alpha": "0.1", "method": "FedAvg"}, 0, (config,))
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    monkeypatch.setattr(sys, "argv", sys.argv[:1])
    main(["fit", "--config", str(path)])
    monkeypatch.setattr(make_figures, "CONTINUED", {"FedAvg": None, "FedLC, tau 0": 0.0, "FedLC": 1.0})
    found = dict(make_figures.continued(cell, tmp_path / "begun" / "version_0"))
    plain, same, other = (found[f"continued/0.1/{name}/groups_after"] for name in make_figures.CONTINUED)
    np.testing.assert_allclose(same, plain, atol=1e-3)  # without calibration FedLC is FedAvg
    began = tmp_path / "begun" / "version_0" / "continued" / "FedLC" / "version_1"
    assert dict(make_figures.continued(cell, tmp_path / "begun" / "version_0")).keys() == found.keys()
    assert not began.exists()  # what was trained is not trained again
    assert not np.allclose(np.nan_to_num(other), np.nan_to_num(plain), atol=1e-3)
