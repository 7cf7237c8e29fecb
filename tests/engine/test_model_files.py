"""The model file for Lightning, and files of initial weights."""

import json

import lightning.pytorch
import numpy as np
import pytest
import torch
from helpers.errors import refused, warned
from helpers.methods import METHODS
from helpers.runs import assert_same_bits, plain_sgd_model, small_data, small_trainer
from helpers.theirs import Labelled, TheirData, Theirs
from lightning.pytorch import Trainer
from torch import nn
from torch.utils.data import DataLoader

from fl_lightning import Partitioned
from fl_lightning.callbacks import Callback
from fl_lightning.data import NpyImages
from fl_lightning.methods import Local
from fl_lightning.models import MLP, ImageClassifier

pytestmark = pytest.mark.filterwarnings("ignore:.*(workers|log_every_n_steps|GPU|hyperparameters|model.ckpt)")


class Data(TheirData):
    """Lightning's Trainer asks for one more argument's name than ours."""

    def setup(self, stage):
        super().setup(stage)

    def test_dataloader(self):
        return DataLoader(Labelled(self.items[240:]), batch_size=25)


class Net(Theirs):
    """A module with hyper-parameters and additional entries in a checkpoint."""

    def __init__(self, width: int = 16, smooth: float = 0.0, act: type = nn.ReLU):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), act(), nn.Linear(width, 3))
        self.seen = None

    def test_step(self, batch, batch_idx):
        self.log("hits", (self.net(batch["x"]).argmax(1) == batch["label"]).float().mean())

    def on_save_checkpoint(self, checkpoint):
        assert set(checkpoint["state_dict"]) == set(self.state_dict())
        checkpoint["their_words"] = {"names": ["a", "b"], "table": torch.arange(3)}

    def on_load_checkpoint(self, checkpoint):
        assert "state_dict" in checkpoint
        self.seen = checkpoint["their_words"]


def data(kind=Data):
    return Partitioned(kind(), num_clients=3)


def fit(tmp_path, model=None, data_=None, ckpt_path=None, weights=None, methods=(), **kwargs):
    torch.manual_seed(0)
    trainer = small_trainer(tmp_path, **{"name": "run", "max_rounds": 1, **kwargs})
    model = Net(8) if model is None else model
    trainer.fit(model, data_ or data(), list(methods), ckpt_path, weights)
    return trainer, model


def file(tmp_path, name="model.ckpt"):
    return tmp_path / f"run/version_0/checkpoints/{name}"


def lightning_trainer(tmp_path):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(accelerator="cpu", default_root_dir=tmp_path, **quiet)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The folder of a run of :class:`Net`, which tests only read, its trainer and its model."""
    folder = tmp_path_factory.mktemp("done")
    return folder, *fit(folder)


@pytest.fixture(scope="module")
def state(done):
    return torch.load(file(done[0]), weights_only=True)["state_dict"]


# ---------------------------------------------------------------------- for Lightning
def test_lightning_loads_the_final_model_and_tests_it_to_the_same_metrics(tmp_path, done):
    folder, trainer, model = done
    loaded = Net.load_from_checkpoint(file(folder))
    assert_same_bits(loaded.state_dict(), model.state_dict())
    assert loaded.hparams["width"] == 8
    assert loaded.seen["names"] == ["a", "b"]
    (metrics,) = lightning_trainer(tmp_path).test(Net(8), Data(), ckpt_path=file(folder), verbose=False)
    assert metrics["hits"] == pytest.approx(trainer.metrics["test/hits"])


def test_the_model_file_is_whole_at_the_end_only_and_tied_weights_are_in_it(tmp_path):
    class Tied(Net):
        def __init__(self):
            super().__init__(8)
            self.other = self.net[0]

    class Looks(Callback):
        def on_round_end(self, trainer):
            assert not file(tmp_path).exists()
            trainer.should_stop = True

    with warned("model.ckpt"):  # a class among the hyper-parameters is omitted
        fit(tmp_path, Tied(), callbacks=Looks(), max_rounds=2)
    saved = torch.load(file(tmp_path), weights_only=True)
    assert {"net.0.weight", "other.weight"} <= set(saved["state_dict"])
    assert saved["pytorch-lightning_version"] == lightning.pytorch.__version__
    assert "act" not in saved["hyper_parameters"]
    assert [path.name for path in file(tmp_path).parent.glob("*partial*")] == []
    fresh = Tied()
    small_trainer(tmp_path).test(fresh, data(), file(tmp_path, "last.ckpt"))
    assert_same_bits(fresh.state_dict(), saved["state_dict"])


def test_a_run_without_a_global_model_has_no_model_file_and_warns(tmp_path):
    with warned("model.ckpt"):
        fit(tmp_path, plain_sgd_model(), small_data(train_size=100), methods=[Local()])
    assert not file(tmp_path).exists()
    assert file(tmp_path, "last.ckpt").exists()


@pytest.mark.parametrize("name", ["last.ckpt", "model.ckpt"])
def test_the_modules_own_entries_come_back_when_a_model_is_loaded(tmp_path, done, name):
    path = file(done[0], name)
    for how in ({"ckpt_path": path}, {"weights": path}):
        model = Net(8)
        small_trainer(tmp_path).test(model, data(), **how)
        assert torch.equal(model.seen["table"], torch.arange(3))
    _, model = fit(tmp_path, weights=path)
    assert model.seen["names"] == ["a", "b"]


def test_a_checkpoint_of_lightning_is_tested_and_begun_with(tmp_path):
    class Plain(Net):
        def __init__(self):
            super().__init__(8)
            self.hparams.clear()  # a class among them cannot be read with weights_only

    theirs = lightning_trainer(tmp_path)
    theirs.fit_loop.max_epochs = 1
    trained = Plain()
    theirs.fit(trained, Data())
    theirs.save_checkpoint(tmp_path / "theirs.ckpt")
    (expected,) = theirs.test(trained, Data(), verbose=False)
    for key in ("ckpt_path", "weights"):
        metrics = small_trainer(tmp_path).test(Plain(), data(), **{key: tmp_path / "theirs.ckpt"})
        assert metrics["test/hits"] == pytest.approx(expected["hits"])
    _, model = fit(tmp_path, Plain(), weights=tmp_path / "theirs.ckpt", max_rounds=0)
    assert_same_bits(model.state_dict(), trained.state_dict())


# ---------------------------------------------------------------------- what users add
class Counts(Data):
    """A data module with a state."""

    calls = 0

    def state_dict(self):
        return {"calls": self.calls + 1}

    def load_state_dict(self, state):
        self.calls = 10 * state["calls"]


@pytest.mark.parametrize("devices", [1, 2])
def test_states_of_module_and_data_module_are_restored_by_a_run_that_resumes(tmp_path, devices):
    fit(tmp_path, data_=data(Counts), devices=devices)
    again = data(Counts)
    _, model = fit(tmp_path, data_=again, max_rounds=2, ckpt_path="last", devices=devices)
    assert model.seen["names"] == ["a", "b"]
    assert again.datamodule.calls == 10
    assert torch.load(file(tmp_path), weights_only=True)[Counts.__qualname__] == {"calls": 11}


class Holds(Net):
    """It adds an object to its checkpoints, as pytorch-forecasting's models do, and wants it back."""

    def on_save_checkpoint(self, checkpoint):
        super().on_save_checkpoint(checkpoint)
        checkpoint["data"] = Labelled([{"label": 1}])

    def on_load_checkpoint(self, checkpoint):
        super().on_load_checkpoint(checkpoint)
        self.labels = checkpoint["data"].labels


def test_objects_that_a_module_adds_are_in_no_file_and_are_the_present_ones_for_a_run_that_resumes(tmp_path):
    with warned("on_save_checkpoint"):
        fit(tmp_path, Holds(8))
    kept = torch.load(file(tmp_path, "last.ckpt"), weights_only=True)["module"]
    assert kept["their_words"]["names"] == ["a", "b"] and "data" not in kept
    assert "data" not in torch.load(file(tmp_path), weights_only=True)
    with warned("on_save_checkpoint"):
        _, model = fit(tmp_path, Holds(8), max_rounds=2, ckpt_path="last")
    assert model.labels == [1] and model.seen["names"] == ["a", "b"]


class ReadsAll(Net):
    """It reads what Lightning's checkpoints hold beside the module, of which a run keeps nothing."""

    names = ("optimizer_states", "lr_schedulers", "callbacks", "loops")

    def on_save_checkpoint(self, checkpoint):
        super().on_save_checkpoint(checkpoint)
        checkpoint["held"] = [len(checkpoint[name]) for name in self.names]
        checkpoint["numbers"] = torch.arange(3)
        del checkpoint["optimizer_states"]

    def on_load_checkpoint(self, checkpoint):
        super().on_load_checkpoint(checkpoint)
        self.held = {name: checkpoint[name] for name in (*self.names, "held", "epoch", "global_step")}


def test_what_a_run_does_not_keep_of_lightnings_checkpoints_is_empty_in_the_hooks_and_in_no_file(tmp_path):
    fit(tmp_path, ReadsAll(8), local_epochs=3)
    saved = torch.load(file(tmp_path), weights_only=True)
    assert saved["held"] == [0, 0, 0, 0] and saved["numbers"].tolist() == [0, 1, 2] and not {*ReadsAll.names} & {*saved}
    _, model = fit(tmp_path, ReadsAll(8), max_rounds=2, local_epochs=3, ckpt_path="last")
    numbers = {"held": [0, 0, 0, 0], "epoch": 3, "global_step": 1}
    assert model.held == {"optimizer_states": [], "lr_schedulers": [], "callbacks": {}, "loops": {}, **numbers}


# ---------------------------------------------------------------------- given weights
@pytest.mark.parametrize("name", ["SCAFFOLD", "FedBN", "MOON"])
def test_a_run_begins_with_given_weights_whatever_its_methods(tmp_path, name):
    class Keeps(Callback):
        def on_round_start(self, trainer):
            self.start = {key: value.clone() for key, value in trainer.server.state.items()}

    torch.manual_seed(7)
    given, keeps = plain_sgd_model().state_dict(), Keeps()
    given = {key: value + 1 for key, value in given.items()}
    torch.save(given, tmp_path / "given.pt")
    how = {"weights": tmp_path / "given.pt", "methods": METHODS[name](), "callbacks": keeps}
    fit(tmp_path, plain_sgd_model(), small_data(train_size=60, test_size=30), **how)
    assert_same_bits(keeps.start, given)


def test_a_run_from_weights_has_the_bits_of_one_from_a_module_that_has_them(tmp_path, done, state):
    loaded = Net(8)
    loaded.load_state_dict(state)
    first, _ = fit(tmp_path, loaded)
    second, _ = fit(tmp_path, Net(8), weights=file(done[0]), devices=2, threads_per_worker=1)
    assert_same_bits(first.server.state, second.server.state)


def test_weights_that_do_not_fit_are_one_line_and_leave_the_module_as_it_is(tmp_path, state):
    given = {
        ("missing", "net.0.weight"): {k: v for k, v in state.items() if k != "net.0.weight"},
        ("unknown", "more.0", "more.1", "more.2"): {**state, **{f"more.{i}": torch.zeros(1) for i in range(4)}},
        ("unknown", "0.weight", "net"): {k.removeprefix("net."): v for k, v in state.items()},
        ("net.0.bias", "[9]", "[8]"): {**state, "net.0.bias": torch.zeros(9)},
        ("state dict",): [state],
        ("tensors and plain values",): Labelled([]),
    }
    for words, contents in given.items():
        torch.save(contents, tmp_path / "given.pt")
        model = Net(8)
        before = {k: v.clone() for k, v in model.state_dict().items()}
        with refused("weights=", "given.pt", *words) as caught:
            fit(tmp_path, model, weights=tmp_path / "given.pt")
        assert "\n" not in str(caught.value)
        assert_same_bits(before, model.state_dict())
    with refused("weights='nowhere.pt'"):
        fit(tmp_path, weights="nowhere.pt")
    with refused("weights='w.pt'", "ckpt_path='last'"):
        fit(tmp_path, ckpt_path="last", weights="w.pt")
    assert not (tmp_path / "run").exists()


def test_one_image_is_classified_in_plain_pytorch_from_the_model_file_alone(tmp_path):
    draw = np.random.default_rng(0)
    for split, number in (("train", 60), ("test", 9)):
        np.save(tmp_path / f"{split}_images.npy", draw.integers(0, 200, (number, 8, 8), dtype=np.uint8))
        np.save(tmp_path / f"{split}_labels.npy", np.arange(number) % 3)
    data = NpyImages(str(tmp_path), num_clients=2)
    trainer, model = fit(tmp_path, ImageClassifier(MLP(64, [16]), num_classes=3), data)
    contents = torch.load(file(tmp_path), weights_only=True)
    ours = ImageClassifier(MLP(64, [16]), num_classes=3).eval()
    ours.load_state_dict(contents["state_dict"])
    scale = contents["datamodule_hyper_parameters"]
    assert scale == json.loads((trainer.run_dir / "environment.json").read_text())["data"]
    pixels = torch.from_numpy(np.load(tmp_path / "test_images.npy"))[:, None] / 255
    (x, _) = next(iter(data.test_dataloader()))
    mean, std = (torch.tensor(scale[name])[:, None, None] for name in ("mean", "std"))
    torch.testing.assert_close((pixels - mean) / std, x)
    (logits,) = trainer.predict(model, data)
    torch.testing.assert_close(ours((pixels - mean) / std), logits)
