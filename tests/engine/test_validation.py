"""Arguments out of their range are refused by name, before anything is written."""

import errno
from collections import namedtuple
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from helpers.errors import assert_names, refused, warned
from helpers.runs import small_data, small_model, small_trainer
from helpers.tiny import TinyData, TinyModule, clients
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, StepLR
from torch.utils.data import DataLoader

from fl_lightning import FederatedTrainer
from fl_lightning.callbacks import Scores
from fl_lightning.core.method import Method
from fl_lightning.core.sampling import Sampler, UniformSampler
from fl_lightning.data import IID, Digits, RandomFlip
from fl_lightning.engine import validation
from fl_lightning.methods import FedLC, FedProx
from fl_lightning.models import MLP, ImageClassifier

WRONG = {
    "max_rounds": [-1, 2.0],
    "local_epochs": [0, 2.0],
    "local_steps": [0, 1.5],
    "participation": [0.0],
    "cohort_size": [0, 1.5],
    "eval_every_n_rounds": [0, 1.5],
    "checkpoint_every_n_rounds": [0, 1.5],
    "strategy": ["ddp", "a" * 1000],
    "name": ["..", "../x", "/a", "a\nb", "a\0b", "ü" * 128, ".a", "a ", "", "\ud800", 7],
    "client_memory": [-0.5],
    "cache_references": ["always"],
    "deterministic": ["always", 2],
    "clients_per_step": [0],
    "gradient_clip_val": [0.0],
    "gradient_clip_algorithm": ["both"],
    "accumulate_grad_batches": [0, {4: 2}],
    "client_schedulers": ["pause"],
    "weighting": ["size"],
    "buffers": ["mean"],
    "on_client_error": ["ignore"],
    "server_optimizer_scope": ["all"],
    "threads_per_worker": [0],
    "min_clients": [-1],
    "devices": [0, "-2", "two", None, 1.5, [], 100_000],
    "timeout": [0],
    "workers_per_device": [0, 2],
    "num_nodes": [0, 1001],
    "compile": ["fast"],
    "fast_dev_run": [-1],
    "logger": ["wandb", ["wandb"], object()],
    "precision": ["transformer-engine"],
    "channels_last": ["yes"],
    "taps": [["body"], {"representation": torch.nn.Identity()}],
    "sampler": ["uniform", UniformSampler],
    "systems": [{}],
    "clock": [3],
    "asynchronous": [True],
    "callbacks": [Scores],
    "default_root_dir": [5],
}


@pytest.mark.parametrize("name", WRONG)
def test_a_value_out_of_its_range_is_refused_by_name(tmp_path, name):
    for value in WRONG[name]:
        with refused(f"trainer.{name}=") as caught:
            FederatedTrainer(**{"default_root_dir": tmp_path, name: value})
        assert len(str(caught.value)) < 400
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("given", [{"name": "ü" * 127}, {"name": "two words"}, {"devices": "2"}, {"devices": [0, 1]}])
def test_other_values_are_taken(tmp_path, given):
    small_trainer(tmp_path, **given)


def fit(tmp_path, model=None, data=None, methods=(), **kwargs):
    trainer = small_trainer(tmp_path / "runs", **kwargs)
    trainer.fit(model or small_model(), data or small_data(), list(methods))
    return trainer


@pytest.fixture
def unwritten(tmp_path):
    """The run must end before anything is written."""
    yield tmp_path
    assert not (tmp_path / "runs").exists()


class WithoutLength(Digits):
    """Its loaders have no length."""

    def train_dataloader(self, k=0):
        return iter(super().train_dataloader(k))


class Given(Sampler):
    """Always the same clients."""

    def __init__(self, *clients):
        self.clients = clients

    def choose(self, rng, round_, num_clients, cohort_size):
        return np.array(self.clients)


class Mine(Method):
    def on_client_begin(self, client):
        pass


SCHEDULE, OPTIMIZER = "trainer.client_lr_scheduler", "trainer.server_optimizer"
# the words of the line, and what is passed to fit
REFUSED = [
    ((SCHEDULE,), {"client_lr_scheduler": partial(LambdaLR, lr_lambda=lambda step: float("inf"))}),
    ((SCHEDULE,), {"client_lr_scheduler": partial(StepLR, step_size=0)}),
    ((SCHEDULE, "round 1=-1.0"), {"client_lr_scheduler": partial(ExponentialLR, gamma=-1.0)}),
    ((OPTIMIZER, "-1.0"), {"server_optimizer": partial(torch.optim.SGD, lr=-1.0)}),
    ((OPTIMIZER, "SGD.lr=nan"), {"server_optimizer": partial(torch.optim.SGD, lr=float("nan"))}),
    ((OPTIMIZER, "LBFGS.step()"), {"server_optimizer": torch.optim.LBFGS}),
    ((OPTIMIZER, "SparseAdam"), {"server_optimizer": partial(torch.optim.SparseAdam, lr=0.1)}),
    *(
        (("trainer.sampler=Given", f"round 0={sorted(cohort)}"), {"sampler": Given(*cohort)})
        for cohort in ((0, 0), (0, 4), (-1, 0), ())
    ),
    (("data=WithoutLength", "train_dataloader(0)='generator'", "__len__"), {"data": WithoutLength(num_clients=2)}),
    (("trainer.cache_references=True",), {"data": small_data(augment=[RandomFlip()]), "cache_references": True}),
    (("model=", "helpers.tiny.TinyModule", "Net()"), {"model": TinyModule, "data": clients(TinyData())}),
    *((("method=", "Method"), {"methods": [method]}) for method in ("FedProx", FedProx, Method())),
    (("method='Mine.on_client_begin'", "on_client_start"), {"methods": [Mine()]}),
]


@pytest.mark.parametrize(("words", "options"), REFUSED)
def test_what_cannot_be_followed_is_refused_before_anything_is_written(unwritten, words, options):
    with refused(*words):
        fit(unwritten, **options)


def test_half_precision_is_refused_on_a_cpu(unwritten):
    with pytest.warns(UserWarning, match="precision='16-mixed'"), refused("bf16-mixed"):
        fit(unwritten, precision="16-mixed")


def test_clients_without_a_full_batch_are_named_before_round_0(tmp_path):
    class Drops(TinyData):
        def loader(self, *args):
            return DataLoader(self.rows(30, 1), 8, drop_last=True)

    with warned("data", "1 of 4 clients", "(0)"):
        fit(tmp_path, TinyModule(), clients(Drops(), 5, 8, 8, 9), max_rounds=0)
    with warned("data", "of 4 clients"):
        fit(tmp_path, data=small_data(batch_size=102, drop_last=True), max_rounds=0)


def test_a_run_of_no_rounds_is_warned_of(tmp_path):
    with warned("trainer.max_rounds=0", "nothing is trained", "1 or more"):
        fit(tmp_path, max_rounds=0)


def test_a_module_that_cannot_be_evaluated_is_named_before_round_0(tmp_path, said):
    fit(tmp_path, TinyModule(), clients(TinyData(test=(6,)), 7, 7), max_rounds=0)
    assert_names(said(), "model=TinyModule", "test_step", "validation_step")


def test_batches_that_no_client_fills_are_named_before_round_0(tmp_path, said):
    fit(tmp_path, data=small_data(batch_size=64, num_clients=3, train_size=120, partitioner=IID()), max_rounds=0)
    assert_names(said(), "data.batch_size=64", "40")


@pytest.mark.parametrize("hook", validation.TRANSFER_HOOKS)
@pytest.mark.parametrize("where", ["Module", "Data", "Theirs"])
def test_cached_references_are_refused_beside_a_transfer_hook(unwritten, hook, where):
    def kind(name, base):
        return type(name, (base,), {hook: lambda self, batch, *args: batch} if where == name else {})

    data = kind("Data", Digits)(num_clients=2) if where == "Data" else clients(kind("Theirs", TinyData)())
    with refused("trainer.cache_references=True", hook, where):
        fit(unwritten, kind("Module", TinyModule)(), data, cache_references=True)


# ---------------------------------------------------------------- modules and methods
@pytest.mark.parametrize("name", validation.REMOVED)
def test_a_hook_that_lightning_no_longer_calls_is_refused_with_the_one_that_took_its_place(unwritten, name):
    kind = type("Old", (TinyModule,), {name: lambda self, *given: None})
    with refused(f"model='Old.{name}'", validation.REMOVED[name]):
        fit(unwritten, kind(), clients(TinyData()))
    with refused(f"model='Old.{name}'", validation.REMOVED[name]):
        small_trainer(unwritten).test(kind(), clients(TinyData()))


def test_a_method_that_counts_labels_needs_a_model_of_as_many_classes(unwritten, tmp_path_factory):
    model = ImageClassifier(MLP(64, [8]), num_classes=12)
    with refused("model.num_classes=12", "FedLC", "set 10"):
        fit(unwritten, model, methods=[FedLC()])
    fit(tmp_path_factory.mktemp("other"), model, methods=[FedProx()], max_rounds=0)


# ---------------------------------------------------------------- folders
def test_a_folder_of_runs_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for root in ("file", "file/runs", "long" * 99):
        with refused("trainer.default_root_dir="):
            small_trainer(tmp_path / root).fit(small_model(), small_data())
    with monkeypatch.context() as patched, refused("trainer.default_root_dir=", "another folder"):
        patched.setattr("pathlib.Path.mkdir", Mock(side_effect=FileNotFoundError(errno.ENOENT, "No such file")))
        small_trainer(tmp_path / "runs").fit(small_model(), small_data())
    trainer = small_trainer(tmp_path / "runs")
    monkeypatch.setattr(validation.os, "access", lambda path, mode: False)
    with refused("trainer.default_root_dir=", "read-only"):
        trainer.fit(small_model(), small_data())
    monkeypatch.undo()
    size = 0
    monkeypatch.setattr(validation.shutil, "disk_usage", lambda path: namedtuple("Usage", "total free")(size, 0))
    validation.check_folder("trainer.default_root_dir", tmp_path)  # on a file system without a size
    size = 2**30
    with refused("trainer.default_root_dir=", "disk is full"):
        trainer.fit(small_model(), small_data())
    with refused("trainer.default_root_dir"):
        trainer.partition(small_data())
    with refused("output="):
        trainer.predict(small_model(), small_data(), output=tmp_path / "runs" / "predictions.pt")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("make", [torch.nn.Linear, lambda *_: torch.compile(TinyModule())])
@pytest.mark.parametrize("command", ["fit", "test"])
def test_a_module_that_is_no_lightning_module_is_refused_by_its_class(tmp_path, command, make):
    model = make(8, 3)
    with refused(f"model={type(model).__name__!r}", "LightningModule"):
        getattr(small_trainer(tmp_path), command)(model, clients(TinyData()))


def test_arguments_in_each_others_places_are_refused_with_their_order(tmp_path):
    with refused("model='Digits'", "fit(model, data)"):
        small_trainer(tmp_path).fit(small_data(), small_model())
    with refused("ckpt_path=", "methods are one list"):
        small_trainer(tmp_path).fit(small_model(), small_data(), FedProx(), FedLC())
