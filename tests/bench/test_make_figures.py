"""The papers' figures are drawn from the stored numbers of runs of our own."""

import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from helpers.tiers import sample

from fl_lightning.bench import Cell, load_suite
from fl_lightning.cli import main

PAPERS = Path(__file__).resolve().parents[2] / "experiments" / "papers"
sys.path.insert(0, str(PAPERS / "programs"))

import make_figures  # noqa: E402, found through the path above

SMOKE = PAPERS.parent / "smoke" / "fedavg.yaml"


@pytest.fixture(scope="module")
def stored():
    return make_figures.stored_numbers()


def test_the_page_has_the_stored_numbers(stored):
    page = (make_figures.DOCS / make_figures.PAGE).read_text()
    assert make_figures.with_tables(page, stored) == page, "run python experiments/papers/programs/make_figures.py"
    for name in make_figures.DRAWN:
        assert (make_figures.DOCS / make_figures.PICTURES / f"{name}.png").is_file()
        assert f"(figures/{name}.png)" in page


@pytest.mark.parametrize("name", sample(make_figures.DRAWN, "clients"))
def test_each_picture_is_drawn(name, stored, tmp_path):
    figure = make_figures.DRAWN[name](stored)
    figure.savefig(tmp_path / "drawn.png", dpi=30)
    assert all(axes.has_data() for axes in figure.axes)


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


def test_what_the_figures_need_of_fashion_mnist_is_collected(tmp_path, monkeypatch):
    began = []
    monkeypatch.setattr(make_figures, "embedded", lambda cell, run: began.append(cell.labels["method"]) or iter(()))
    for cell, run in finished(tmp_path, "figures_fashion.yaml"):
        np.savez(run / "spectra.npz", representation=[np.zeros(4), np.full(4, 2.0 + cell.seed)])
        np.savez(run / make_figures.ALIGNMENT, **{"pairs": [[["a", "b"]]], "global": [np.eye(2)], "local": [np.eye(2)]})
        (run / "metrics.csv").write_text("round,test/accuracy\n0,0.5\n1,0.75\n")
        rows = [f"{r},{k},{e},{r + e / 10},{k}" for r in range(2) for k in range(3) for e in range(2)]
        (run / "local_losses.csv").write_text("\n".join(["round,client,epoch,loss,feddecorr", *rows]))
    found = make_figures.collect("figures_fashion", tmp_path)
    np.testing.assert_allclose(found["2 classes/CNN/FedAvg/accuracy"], [[50, 75]] * 2)
    assert found["IID/CNN/MOON/representation"].tolist() == [[2.0] * 4, [3.0] * 4]
    # of each seed and client, over the epochs of all rounds
    assert found["alpha 0.05/CNN/FedUV/loss"].shape == (2, 3, 4)
    np.testing.assert_allclose(found["alpha 0.05/CNN/FedUV/loss"][1, 2], [0, 0.1, 1, 1.1], atol=1e-6)
    np.testing.assert_allclose(found["alpha 0.05/CNN/FedDecorr/feddecorr"][0, :, 0], [0, 1, 2])
    assert sorted(began) == ["FedAvg", "FedAvg", "FedUV", "FedUV"]


def test_the_points_of_an_embedding_are_those_of_its_classes_and_of_its_models(tmp_path, monkeypatch):
    counts = np.zeros((4, 10), int)
    counts[:, 0], counts[2, 5] = 90, 9
    np.savez(tmp_path / "per_class.npz", label_counts=[counts])
    asked = []

    def next_round(cell, run, folder, method, watch):
        asked.append((folder.name, [one["class_path"] for one in method], watch["init_args"]["classes"]))
        of_class = np.repeat(watch["init_args"]["classes"], 200)
        models = 1 + len(watch["init_args"]["clients"])
        joint = np.broadcast_to(np.arange(models)[:, None, None], (models, len(of_class), 2))
        local = np.broadcast_to(of_class[:, None], (models - 1, len(of_class), 2))
        made = folder / "version_0"
        (made / "checkpoints").mkdir(parents=True)
        (made / "checkpoints" / "model.ckpt").touch()
        np.savez(made / "embedding.npz", labels=[of_class], local=[local], joint=[joint])

    monkeypatch.setattr(make_figures, "one_more", next_round)
    found = dict(make_figures.embedded(Cell({"method": "FedAvg"}, 0, ({},)), tmp_path))
    assert asked[0] == ("FedAvg-classes", [], [0, 5, 1]) and asked[3] == ("FedLC-clients", ["FedLC"], [1])
    assert found["embedding/FedLC/classes"][..., 0].mean(1).tolist() == [0, 5, 1]  # majority, minority, missing
    assert found["embedding/FedLC/clients"][..., 0].mean(1).tolist() == [0, 1, 2, 3, 4]  # the global model first
    assert found["embedding/FedAvg/counts"].tolist() == [90, 9, 0]


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
