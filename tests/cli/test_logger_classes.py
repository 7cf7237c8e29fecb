"""Loggers by class path, from the command line."""

import csv
import sys

import pytest
import yaml
from helpers.errors import assert_names
from lightning_utilities.core.imports import RequirementCache

from fl_lightning.cli import main

CONFIG = {
    "model": {"class_path": "ImageClassifier", "init_args": {"encoder": {"class_path": "Logistic"}}},
    "data": {"class_path": "Digits", "init_args": {"num_clients": 2, "train_size": 60, "test_size": 30}},
    "trainer": {"max_rounds": 2, "threads_per_worker": 1},
}


CSV = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "theirs"}}


@pytest.fixture
def fit(monkeypatch, tmp_path, undrawn):
    """``fit(loggers)`` runs a config with these and gives the run's own table."""
    monkeypatch.chdir(tmp_path)

    def run(loggers):
        (tmp_path / "config.yaml").write_text(
            yaml.safe_dump({**CONFIG, "trainer": {**CONFIG["trainer"], "logger": loggers}})
        )
        main(["fit", "--config", "config.yaml"])
        return list(csv.DictReader((tmp_path / "runs/fedavg/version_0/metrics.csv").read_text().splitlines()))

    return run


@pytest.mark.parametrize("path", ["", "lightning.pytorch.loggers.", "lightning.fabric.loggers."])
def test_a_table_of_lightnings_logger_has_what_that_of_the_run_has(fit, tmp_path, monkeypatch, path):
    monkeypatch.delitem(sys.modules, "lightning_fabric.loggers", raising=False)  # other tests import both distributions
    where = "root_dir" if "fabric" in path else "save_dir"
    given = {"class_path": f"{path}CSVLogger", "init_args": {where: str(tmp_path / "theirs")}}
    ours = fit([given])
    (path,) = (tmp_path / "theirs").glob("**/metrics.csv")
    theirs = list(csv.DictReader(path.read_text().splitlines()))
    assert [row["test/accuracy"] for row in theirs] == [row["test/accuracy"] for row in ours]
    assert len(ours) == 2


@pytest.mark.parametrize("others", [None, [], [CSV]])
def test_a_logger_whose_library_is_not_installed_is_one_line(fit, capsys, monkeypatch, others):
    missing = RequirementCache("mlflow-is-not-installed")
    monkeypatch.setattr("lightning.pytorch.loggers.mlflow._MLFLOW_AVAILABLE", missing)
    logger = {"class_path": "lightning.pytorch.loggers.MLFlowLogger"}
    with pytest.raises(SystemExit, match="2"):
        fit(logger if others is None else [*others, logger])
    assert_names(capsys.readouterr().err.splitlines()[-1], "error: MLFlowLogger(", "mlflow-is-not-installed", "install")


def test_a_logger_that_is_misspelt_is_answered_with_the_nearest_or_all(fit, capsys):
    for name, words in (("csv", ["CSVLogger", "TensorBoardLogger"]), ("TensorBoardLoger", ["TensorBoardLogger"])):
        with pytest.raises(SystemExit, match="2"):
            fit(name)
        assert_names(capsys.readouterr().err.splitlines()[-1], f"trainer.logger='{name}'", *words)
