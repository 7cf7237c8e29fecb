"""What loggers get beside metrics: hyper-parameters and figures."""

import csv
import time
from types import SimpleNamespace

import lightning.pytorch.loggers
import pytest
import yaml
from helpers.runs import plain_sgd_model, small_data, small_trainer
from lightning.fabric.loggers import CSVLogger, Logger, TensorBoardLogger
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

from fl_lightning.callbacks import Callback
from fl_lightning.methods import FedDecorr, FedProx
from fl_lightning.records.loggers import (
    COLUMNS_SHOWN,
    SHOWN_FIRST,
    by_path,
    coefficients,
    page_columns,
    wait_for_new_second,
)


class Fake(Logger):
    """A logger that remembers what it gets."""

    name, version, root_dir = "fake", 0, None

    def __init__(self, **members):
        self.calls = []
        vars(self).update(members)

    def log_metrics(self, metrics, step=None):
        self.calls.append(("metrics", step))

    def log_hyperparams(self, params):
        self.calls.append(("hyperparams", params))


class Recorder:
    """Remembers the arguments of each call of ``log_image``, ``log_figure`` or ``add_figure``."""

    def __init__(self, *names):
        self.calls = []
        for name in names:
            setattr(self, name, lambda *args, **kwargs: self.calls.append((args, kwargs)))


class Draws(Callback):
    def on_round_end(self, trainer):
        self.figure = Figure()
        trainer.log_figure("mine/plot", self.figure)


class Logs(Callback):
    def on_round_end(self, trainer):
        trainer.log("test_mine", 1.0)
        trainer.log("mine", 1.0)


def fit(tmp_path, logger, **kwargs):
    trainer = small_trainer(tmp_path, logger=logger, **{"max_rounds": 2, "local_steps": 1, **kwargs})
    trainer.fit(plain_sgd_model(), small_data(train_size=100), [FedProx(0.5), FedDecorr(0.2)])
    return trainer


def hparams_of(folder):
    """The start of a session in TensorBoard's events: the hyper-parameters and the tags that it compares."""
    events = EventAccumulator(str(folder)).Reload()
    contents = events.SummaryMetadata
    tags = events.PluginTagToContent("hparams")
    assert contents
    parsed = {tag: plugin_data_pb2.HParamsPluginData.FromString(content) for tag, content in tags.items()}
    start = parsed["_hparams_/session_start_info"].session_start_info.hparams
    compared = parsed["_hparams_/experiment"].experiment.metric_infos
    return dict(start), {info.name.tag for info in compared}, events


def test_every_logger_has_the_hyperparameters_before_the_first_metrics(tmp_path):
    first, second = Fake(), Fake()
    fit(tmp_path, [first, second], server_optimizer=None, local_steps=2)
    for logger in (first, second):
        assert [kind for kind, _ in logger.calls] == ["hyperparams", "metrics", "metrics"]
        params = logger.calls[0][1]
        assert params["methods"] == "fedprox+feddecorr"
        assert params["method"] == {"fedprox": {"mu": 0.5}, "feddecorr": {"beta": 0.2, "form": "official"}}
        assert params["trainer"]["local_steps"] == 2
        assert params["trainer"]["default_root_dir"] == str(tmp_path)
        assert "logger" not in params["trainer"]


@pytest.mark.parametrize("kind", [TensorBoardLogger, lightning.pytorch.loggers.TensorBoardLogger, None])
def test_tensorboard_compares_runs_by_their_final_metrics(tmp_path, kind):
    trainer = fit(tmp_path, kind(tmp_path / "theirs") if kind else True)
    folder = next(tmp_path.glob("**/events.out*")).parent
    params, compared, events = hparams_of(folder)
    assert params["methods"].string_value == "fedprox+feddecorr"
    assert params["method/fedprox/mu"].number_value == 0.5
    assert {"test/accuracy", "test/loss", "train/loss", "train/fedprox"} <= compared
    assert not any(tag.startswith(("time/", "placed/")) for tag in compared)
    points = events.Scalars("test/accuracy")
    assert [point.step for point in points] == [0, 1]
    assert points[-1].value == pytest.approx(trainer.metrics["test/accuracy"])
    if kind is lightning.pytorch.loggers.TensorBoardLogger:
        assert yaml.safe_load((folder / "hparams.yaml").read_text())["methods"] == "fedprox+feddecorr"


def test_lightnings_csv_logger_has_them_and_fabrics_which_takes_none_is_left_out(tmp_path):
    fit(tmp_path, [lightning.pytorch.loggers.CSVLogger(tmp_path / "csv"), CSVLogger(tmp_path / "fabric")])
    saved = yaml.safe_load(next(tmp_path.glob("csv/**/hparams.yaml")).read_text())
    assert saved["method"]["fedprox"] == {"mu": 0.5}
    with next(tmp_path.glob("fabric/**/metrics.csv")).open() as file:
        assert len(list(csv.DictReader(file))) == 2


def test_loggers_that_take_images_get_each_figure_in_their_way_and_others_nothing(tmp_path):
    images, mlflow, comet, board = (Recorder("log_image"), *(Recorder(n) for n in ("log_figure",) * 2), Recorder())
    board.add_figure = lambda *args, **kwargs: board.calls.append((args, kwargs))
    wandb = Fake(log_image=images.log_image, experiment=SimpleNamespace())
    loggers = [wandb, Fake(experiment=mlflow, run_id="r1"), Fake(experiment=comet), Fake(experiment=board), Fake()]
    draws = Draws()
    fit(tmp_path, loggers, callbacks=draws, max_rounds=1)
    assert images.calls == [((), {"key": "mine/plot", "images": [draws.figure], "step": 0})]
    assert mlflow.calls == [(("r1", draws.figure, "figures/mine/plot/0.png"), {})]
    assert comet.calls == [((), {"figure_name": "mine/plot", "figure": draws.figure, "step": 0})]
    assert board.calls == [(("mine/plot", draws.figure, 0), {})]
    assert next(tmp_path.glob("**/figures/mine_plot.png")).is_file()


def test_a_config_names_each_value_of_a_list_of_classes():
    from fl_lightning.records.hyperparameters import of_config

    prox = {"class_path": "fl_lightning.methods.FedProx", "init_args": {"mu": 0.1}}
    mine = {"class_path": "mine.Watch"}
    config = {"method": [prox], "trainer": {"callbacks": [mine, mine], "devices": [0, 1]}, "model": prox}
    assert of_config(config) == {
        "method": {"FedProx": {"mu": 0.1}},
        "trainer": {"callbacks": {"Watch": {}, "Watch.1": {}}, "devices": [0, 1]},
        "model": prox,
    }


def test_runs_are_compared_by_metrics_whose_names_begin_with_the_phase(tmp_path):
    fit(tmp_path, True, callbacks=[Logs()])
    _, compared, _ = hparams_of(next(tmp_path.glob("**/events.out*")).parent)
    assert "test_mine" in compared and "mine" not in compared


def test_a_resumed_run_has_each_point_and_its_hyperparameters_once(tmp_path):
    fit(tmp_path, True, name="run")
    trainer = small_trainer(tmp_path, logger=True, local_steps=1, name="run", max_rounds=4)
    trainer.fit(plain_sgd_model(), small_data(train_size=100), [FedProx(0.5), FedDecorr(0.2)], ckpt_path="last")
    (folder,) = tmp_path.glob("run/version_*")
    params, compared, events = hparams_of(folder)
    points = events.Scalars("test/accuracy")
    assert [point.step for point in points] == [0, 1, 2, 3]
    assert points[-1].value == pytest.approx(trainer.metrics["test/accuracy"])
    assert params["coefficients"].string_value.startswith("fedprox(mu=0.5")
    assert {"test/accuracy", "round"} <= compared
    assert len(events.Tensors("custom_scalars__config__")) == 1


def test_a_new_file_of_events_sorts_after_those_of_the_folder(tmp_path):
    for second in (1, now := int(time.time())):
        (tmp_path / f"events.out.tfevents.{second}.host.1.9").touch()
    wait_for_new_second(tmp_path)
    assert int(time.time()) > now


def test_a_clock_that_was_set_back_delays_a_run_by_no_more_than_a_second(tmp_path, monkeypatch):
    (tmp_path / f"events.out.tfevents.{int(time.time()) + 3600}.host.1.9").touch()
    waited = []
    monkeypatch.setattr(time, "sleep", waited.append)
    wait_for_new_second(tmp_path)
    assert waited == [1]


def test_no_column_can_change_when_a_run_is_extended(tmp_path):
    fit(tmp_path, lightning.pytorch.loggers.TensorBoardLogger(tmp_path / "theirs"))
    folder = next(tmp_path.glob("**/events.out*")).parent
    params, _, _ = hparams_of(folder)
    free = ("max_rounds", "default_root_dir", "name", "logger", "devices", "enable_progress_bar", "callbacks")
    assert params["trainer/local_steps"].number_value == 1
    assert not [key for key in params if key in ("ckpt_path", "allow_changes")]
    assert not [key for key in params if key.startswith(tuple(f"trainer/{one}" for one in free))]
    assert yaml.safe_load((folder / "hparams.yaml").read_text())["trainer"]["max_rounds"] == 2  # it has all of them


def test_the_page_of_hyperparameters_first_shows_what_tells_runs_apart(tmp_path):
    fit(tmp_path, True)
    events = EventAccumulator(str(next(tmp_path.glob("**/events.out*")).parent)).Reload()
    content = events.PluginTagToContent("hparams")["_hparams_/experiment"]
    experiment = plugin_data_pb2.HParamsPluginData.FromString(content).experiment
    shown = {info.name for info in experiment.hparam_infos if info.differs}
    assert {"methods", "coefficients"} <= shown <= set(SHOWN_FIRST)
    assert len(shown) == COLUMNS_SHOWN
    tags = [info.name.tag for info in experiment.metric_infos]
    assert tags[:5] == ["test/accuracy", "test/loss", "round", "train/accuracy", "train/loss"]


def test_classes_and_their_arguments_have_the_paths_of_their_keys():
    sgd = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}
    config = {"model": {"class_path": "Net", "init_args": {"optimizer": sgd, "sizes": [1, 2]}}, "class_path": "x"}
    assert by_path(config) == {
        "model": "Net",
        "model/optimizer": "torch.optim.SGD",
        "model/optimizer/lr": 0.1,
        "model/sizes": "[1, 2]",
        "class_path": "x",
    }


def test_truth_values_and_the_seed_are_texts_as_the_page_rounds_numbers_to_five_digits():
    shown = page_columns({"seed_everything": 12345678, "data": {"normalize": True, "batch_size": 32}, "method": []})
    assert shown == {
        "seed_everything": "12345678",
        "data/normalize": "True",
        "data/batch_size": 32,
        "coefficients": "",
    }


def test_the_coefficients_of_all_methods_are_one_text():
    config = {"method": {"FedUV": {"mu": 0.5, "lambda_": None}, "FedBN": {}}}
    assert coefficients(config) == "FedUV(mu=0.5), FedBN()"
    assert coefficients({"method": {"FedProx": {"mu": 0.5, "form": "a"}}}) == "mu=0.5, form=a"  # beside its name
    assert coefficients({"method": None}) == coefficients({"method": []}) == ""
