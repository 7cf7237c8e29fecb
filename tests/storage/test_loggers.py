"""Loggers receive hyper-parameters and figures."""

import csv
from functools import partial
from types import SimpleNamespace

import lightning.pytorch.loggers
import pytest
import yaml
from helpers.runs import fitted, plain_sgd_model, small_data
from lightning.fabric.loggers import CSVLogger, Logger, TensorBoardLogger
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

from fl_lightning.callbacks import Callback
from fl_lightning.cli import main
from fl_lightning.methods import FedDecorr, FedProx
from fl_lightning.storage.loggers import COLUMNS, method_text, page_values


class Fake(Logger):
    """A logger that records its calls."""

    name, version, root_dir = "fake", 0, None

    def __init__(self, **members):
        self.calls = []
        vars(self).update(members)

    def log_metrics(self, metrics, step=None):
        self.calls.append(("metrics", step))

    def log_hyperparams(self, params):
        self.calls.append(("hyperparams", params))


class Recorder:
    """Remembers the arguments of each call of one method."""

    def __init__(self, name):
        self.calls = []
        setattr(self, name, lambda *args, **kwargs: self.calls.append((args, kwargs)))


class Draws(Callback):
    def on_round_end(self, trainer):
        self.figure = Figure()
        trainer.log_figure("mine/plot", self.figure)


class Logs(Callback):
    def on_round_end(self, trainer):
        trainer.log("test_mine", 1.0)
        trainer.log("mine", 1.0)


DATA = partial(small_data, train_size=100)
fit = partial(fitted, methods=lambda: [FedProx(0.5), FedDecorr(0.2)], model=plain_sgd_model, data=DATA, local_steps=1)


class Board:
    """TensorBoard's events of a run."""

    def __init__(self, folder):
        (path,) = folder.rglob("events.out*")
        self.folder = path.parent
        self.events = EventAccumulator(str(self.folder)).Reload()
        contents = self.events.PluginTagToContent("hparams").items()
        parsed = {tag: plugin_data_pb2.HParamsPluginData.FromString(content) for tag, content in contents}
        self.params = dict(parsed["_hparams_/session_start_info"].session_start_info.hparams)
        self.experiment = parsed["_hparams_/experiment"].experiment

    @property
    def compared(self):
        return [info.name.tag for info in self.experiment.metric_infos]


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """A run with loggers of all kinds: its folder, its trainer, and two loggers that remember."""
    folder, fakes = tmp_path_factory.mktemp("logged"), [Fake(), Fake()]
    kinds = {
        "board": TensorBoardLogger,
        "lightnings_board": lightning.pytorch.loggers.TensorBoardLogger,
        "lightnings_csv": lightning.pytorch.loggers.CSVLogger,
        "csv": CSVLogger,
    }
    loggers = [kind(folder / name) for name, kind in kinds.items()]
    return folder, fit(folder, logger=[*fakes, *loggers], callbacks=[Logs()]), fakes


def test_every_logger_has_the_hyperparameters_before_the_first_metrics(logged):
    folder, _, fakes = logged
    for logger in fakes:
        assert [kind for kind, _ in logger.calls] == ["hyperparams", "metrics", "metrics"]
        params = logger.calls[0][1]
        assert params["methods"] == "fedprox+feddecorr"
        assert params["method"] == {"fedprox": {"mu": 0.5}, "feddecorr": {"beta": 0.2, "form": "official"}}
        assert params["trainer"]["local_steps"] == 1
        assert params["trainer"]["default_root_dir"] == str(folder)
        assert "logger" not in params["trainer"]


@pytest.mark.parametrize("kind", ["board", "lightnings_board"])
def test_tensorboard_compares_runs_by_their_final_metrics(logged, kind):
    folder, trainer, _ = logged
    board = Board(folder / kind)
    assert board.params["methods"].string_value == "fedprox+feddecorr"
    assert board.params["method/fedprox/mu"].number_value == 0.5
    assert {"test/accuracy", "test/loss", "train/loss", "train/fedprox"} <= {*board.compared}
    assert not any(tag.startswith(("time/", "placed/")) for tag in board.compared)
    # names that begin with a phase are compared
    assert "test_mine" in board.compared and "mine" not in board.compared
    points = board.events.Scalars("test/accuracy")
    assert [point.step for point in points] == [0, 1]
    assert points[-1].value == pytest.approx(trainer.metrics["test/accuracy"])


def test_the_page_has_no_values_that_a_resumed_run_may_change(logged):
    board = Board(logged[0] / "lightnings_board")
    free = ("max_rounds", "default_root_dir", "name", "logger", "devices", "enable_progress_bar", "callbacks")
    assert board.params["trainer/local_steps"].number_value == 1
    assert not [key for key in board.params if key in ("ckpt_path", "allow_changes")]
    assert not [key for key in board.params if key.startswith(tuple(f"trainer/{one}" for one in free))]
    saved = yaml.safe_load((board.folder / "hparams.yaml").read_text())  # it has all of them
    assert saved["trainer"]["max_rounds"] == 2 and saved["methods"] == "fedprox+feddecorr"


def test_method_alpha_rate_and_seed_are_the_columns_of_the_page_before_the_accuracy(tmp_path):
    main(["fit", "--config=smoke/feduv", "--trainer.max_rounds=1", f"--trainer.default_root_dir={tmp_path}"])
    board = Board(tmp_path)
    # TensorBoard sorts them
    assert [info.name for info in board.experiment.hparam_infos] == sorted(COLUMNS.values())
    assert board.params["Method"].string_value.startswith("FedUV(mu=0.5")
    assert board.params["alpha"].number_value == 0.5 and board.params["seed"].string_value == "0"
    assert board.params["learning rate"].number_value == 0.05
    assert board.compared[:5] == ["test/accuracy", "test/loss", "round", "train/accuracy", "train/loss"]


def test_lightnings_csv_logger_has_them_and_fabrics_which_takes_none_is_left_out(logged):
    saved = yaml.safe_load(next(logged[0].glob("lightnings_csv/**/hparams.yaml")).read_text())
    assert saved["method"]["fedprox"] == {"mu": 0.5}
    with next(logged[0].glob("csv/**/metrics.csv")).open() as file:
        assert len(list(csv.DictReader(file))) == 2


def test_loggers_that_take_images_get_each_figure_in_their_way_and_others_nothing(tmp_path):
    names = ("log_image", "log_figure", "log_figure", "add_figure")
    images, mlflow, comet, board = (Recorder(name) for name in names)
    wandb = Fake(log_image=images.log_image, experiment=SimpleNamespace())
    loggers = [wandb, Fake(experiment=mlflow, run_id="r1"), Fake(experiment=comet), Fake(experiment=board), Fake()]
    draws = Draws()
    fit(tmp_path, logger=loggers, callbacks=draws, max_rounds=1)
    assert images.calls == [((), {"key": "mine/plot", "images": [draws.figure], "step": 0})]
    assert mlflow.calls == [(("r1", draws.figure, "figures/mine/plot/0.png"), {})]
    assert comet.calls == [((), {"figure_name": "mine/plot", "figure": draws.figure, "step": 0})]
    assert board.calls == [(("mine/plot", draws.figure, 0), {})]
    assert next(tmp_path.glob("**/figures/mine_plot.png")).is_file()


def test_a_resumed_run_has_each_point_and_its_hyperparameters_once(tmp_path):
    fit(tmp_path, logger=True, name="run")
    trainer = fit(tmp_path, logger=True, ckpt_path="last", name="run", max_rounds=4)
    (folder,) = tmp_path.glob("run/version_*")
    events = EventAccumulator(str(folder)).Reload()
    points = events.Scalars("test/accuracy")
    assert [point.step for point in points] == [0, 1, 2, 3]
    assert points[-1].value == pytest.approx(trainer.metrics["test/accuracy"])
    assert len(events.Tensors("custom_scalars__config__")) == 1
    assert {"_hparams_/session_start_info", "_hparams_/experiment"} <= {*events.PluginTagToContent("hparams")}


def test_columns_have_the_paths_of_keys_and_texts_where_the_page_would_round_numbers():
    model = {"class_path": "Net", "init_args": {"optimizer": {"class_path": "SGD", "init_args": {"lr": 0.1}}}}
    shown = page_values({"seed_everything": 12345678, "data": {"normalize": True, "batch_size": 32}, "model": model})
    assert shown == {
        "seed": "12345678",
        "data/normalize": "True",
        "data/batch_size": 32,
        "model": "Net",
        "model/optimizer": "SGD",
        "learning rate": 0.1,
        "Method": "FedAvg",
    }
    config = {"method": {"FedUV": {"mu": 0.5, "lambda_": None}, "FedBN": {}}}
    assert method_text(config) == "FedUV(mu=0.5), FedBN()"
