"""Lightning's loggers by class path, with published trackers behind them: MLflow (3.17) and W&B (0.31) offline."""

import pytest
import yaml

from fl_lightning.cli import main

pytestmark = pytest.mark.thorough

CONFIG = {
    "model": {"class_path": "ImageClassifier", "init_args": {"encoder": {"class_path": "Logistic"}}},
    "data": {"class_path": "Digits", "init_args": {"num_clients": 2, "train_size": 60, "test_size": 30}},
    "method": [{"class_path": "FedProx", "init_args": {"mu": 0.5}}],
    "trainer": {"max_rounds": 2, "threads_per_worker": 1, "callbacks": [{"class_path": "SpectrumMonitor"}]},
}


@pytest.fixture
def fit(monkeypatch, tmp_path, recwarn):
    """``fit(class_path, **init_args)`` runs a config with a logger; no logger may fail."""
    monkeypatch.chdir(tmp_path)

    def run(class_path, **init_args):
        trainer = {**CONFIG["trainer"], "logger": {"class_path": class_path, "init_args": init_args}}
        (tmp_path / "config.yaml").write_text(yaml.safe_dump({**CONFIG, "trainer": trainer}))
        main(["fit", "--config", "config.yaml"])
        assert not [one for one in recwarn if "logger: " in str(one.message)]
        return yaml.safe_load((tmp_path / "runs/fedprox/version_0/config.yaml").read_text())

    return run


def test_mlflow_has_the_rounds_the_hyperparameters_and_the_figures(fit, tmp_path):
    tracking = pytest.importorskip("mlflow.tracking")
    store = f"sqlite:///{tmp_path}/mlflow.db"
    where = {"tracking_uri": store, "experiment_name": "digits", "artifact_location": str(tmp_path / "artifacts")}
    config = fit("lightning.pytorch.loggers.MLFlowLogger", **where)
    assert config["trainer"]["logger"]["init_args"]["tracking_uri"] == store
    client = tracking.MlflowClient(store)
    (run,) = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["method/FedProx/mu"] == "0.5"
    assert [one.step for one in client.get_metric_history(run.info.run_id, "test/accuracy")] == [0, 1]
    assert list(tmp_path.glob("artifacts/**/figures/spectrum/classifier/1.png"))


def test_wandb_offline_has_the_rounds_and_the_figures(fit, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    fit("lightning.pytorch.loggers.WandbLogger", offline=True, save_dir=str(tmp_path), project="digits")
    summary = dict(wandb.run.summary)
    assert (summary["round"], summary["test/accuracy"] > 0) == (1, True)
    assert wandb.run.config["method"]["FedProx"]["mu"] == 0.5
    wandb.finish()
    (folder,) = tmp_path.glob("wandb/offline-run-*")
    assert list(folder.glob("*.wandb"))
    assert list(folder.glob("files/media/images/spectrum/classifier_*.png"))
