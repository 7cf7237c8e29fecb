"""Arguments out of their range are refused by name, and the schedule of the clients' rates is finite."""

import inspect
import warnings
from collections import namedtuple
from functools import partial

import numpy as np
import pytest
import torch
from helpers.errors import assert_names, refused, warned
from helpers.runs import small_data, small_model, small_trainer
from lightning.pytorch import LightningDataModule, LightningModule
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning import FederatedTrainer, Partitioned
from fl_lightning.data import Digits, FederatedDataModule, Partitioner, RandomFlip
from fl_lightning.engine import checks
from fl_lightning.engine.optimizers import configure_optimizer
from fl_lightning.errors import UsageError
from fl_lightning.method import Method
from fl_lightning.methods import FedLC, FedProx
from fl_lightning.models import MLP, ImageClassifier
from fl_lightning.sampling import Sampler

WRONG = {
    "max_rounds": -1,
    "local_epochs": 0,
    "local_steps": 0,
    "participation": 0.0,
    "cohort_size": 0,
    "eval_every_n_rounds": 0,
    "checkpoint_every_n_rounds": 0,
    "strategy": "ddp",
    "name": "..",
    "client_memory": -0.5,
    "cache_references": "always",
    "clients_per_step": 0,
    "gradient_clip_val": 0.0,
    "gradient_clip_algorithm": "both",
    "accumulate_grad_batches": 0,
    "client_schedulers": "pause",
    "threads_per_worker": 0,
    "min_clients": 0,
    "devices": 0,
    "workers_per_device": 0,
    "num_nodes": 1001,
    "compile": "fast",
    "fast_dev_run": -1,
}


@pytest.mark.parametrize("name", checks.RANGES)
def test_every_range_refuses_what_lies_outside_and_takes_the_default(tmp_path, name):
    fits, hint = checks.RANGES[name]
    assert fits(inspect.signature(FederatedTrainer).parameters[name].default)
    with refused(f"trainer.{name}=") as caught:
        small_trainer(tmp_path, **{name: WRONG[name]})
    assert hint in str(caught.value)


NAMES = [
    "..",
    "../x",
    "a/b",
    "/a",
    "..\\x",
    "a\nb",
    "a\0b",
    "a" * 256,
    "ü" * 128,
    ".a",
    " ",
    "a ",
    "",
    "\ud800",
    "\x1b[1m",
    7,
]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_name_that_is_not_of_one_folder_is_refused(tmp_path, name):
    with refused("trainer.name="):
        FederatedTrainer(default_root_dir=tmp_path / "runs", name=name)
    assert not list(tmp_path.iterdir())


def test_other_names_are_taken():
    assert all(map(checks.is_folder_name, ["fedavg", "two words", "ü" * 127, "alpha=0.1,seed=0", "a" * 255]))


def test_the_factors_are_those_that_the_schedule_gives_a_rate_of_1():
    assert checks.lr_factors(None, 3) == [1, 1, 1]
    assert checks.lr_factors(partial(ExponentialLR, gamma=0.5), 3) == [1, 0.5, 0.25]
    with refused("trainer.client_lr_scheduler"):
        checks.lr_factors(partial(LambdaLR, lr_lambda=lambda step: float("inf")), 2)


@pytest.mark.parametrize("devices", [1, "2", "auto", [0, 1]])
def test_devices_are_a_number_a_list_or_auto(devices):
    assert checks.are_devices(devices)


@pytest.mark.parametrize("devices", [0, "-1", "two", None, 1.5, []])
def test_other_devices_are_refused(devices, tmp_path):
    with refused("trainer.devices"):
        small_trainer(tmp_path, devices=devices)


def test_half_precision_is_refused_on_a_cpu_only():
    with refused("bf16-mixed"):
        checks.check_device(torch.device("cpu"), "16-mixed")
    checks.check_device(torch.device("cuda"), "16-mixed")


@pytest.mark.parametrize("has", [True, False])
def test_bfloat16_on_a_processor_that_emulates_it_is_named(has, monkeypatch):
    monkeypatch.setattr(checks, "has_bfloat16", lambda: has)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checks.check_device(torch.device("cpu"), "bf16-mixed")
        checks.check_device(torch.device("cpu"), "32-true")
    said = [str(one.message) for one in caught]
    assert [("no instructions for bfloat16" in text and "give 32-true" in text) for text in said] == [True] * (not has)


def test_cached_references_need_a_loader_that_says_it_is_deterministic(tmp_path):
    trainer = small_trainer(tmp_path, cache_references=True)
    for augment, fits in (([], True), ([RandomFlip()], False)):
        data = small_data(augment=augment)
        data.setup("fit")
        check = partial(checks.check_data_fits, trainer, torch.nn.Linear(1, 1), data, checks.MethodList([]))
        if fits:
            check()
        else:
            with refused("trainer.cache_references=True"):
                check()


@pytest.mark.parametrize("hook", checks.TRANSFER_HOOKS)
@pytest.mark.parametrize("where", ["module", "data", "partitioned"])
def test_cached_references_are_refused_beside_a_transfer_hook(tmp_path, hook, where):
    trainer = small_trainer(tmp_path, cache_references=True)
    own = {hook: lambda self, batch, *args: batch}
    module = type("Module", (LightningModule,), own if where == "module" else {})()
    data = type("Data", (Digits,), own if where == "data" else {})()
    if where == "partitioned":
        loader = DataLoader(TensorDataset(torch.rand(20, 1), torch.arange(20) % 2))
        data = Partitioned(type("Theirs", (LightningDataModule,), own | {"train_dataloader": lambda self: loader})())
    data.setup("fit")
    owner = {"module": "Module", "data": "Data", "partitioned": "Theirs"}[where]
    with refused("trainer.cache_references=True", hook, owner):
        checks.check_data_fits(trainer, module, data, checks.MethodList([]))
    plain = small_trainer(tmp_path)
    checks.check_data_fits(plain, module, data, checks.MethodList([]))


@pytest.mark.parametrize("partitioned", [False, True])
def test_clients_without_a_full_batch_are_named_before_round_0(run, partitioned):
    data = small_data(batch_size=102, drop_last=True)
    if partitioned:
        loader = DataLoader(TensorDataset(torch.rand(30, 64), torch.arange(30) % 10), 8, drop_last=True)
        theirs = type("Theirs", (LightningDataModule,), {"train_dataloader": lambda self: loader})()
        data = Partitioned(theirs, FewForTheFirst(), 4)
    with warned("data", "of 4 clients") as caught:
        run(data=data, max_rounds=0)
    idle = [k for k in range(4) if data.info(k).num_examples < (8 if partitioned else 102)]
    assert 0 < len(idle) < 4
    said = next(str(one.message) for one in caught if "of 4 clients" in str(one.message))
    assert_names(said, "data", f"{len(idle)} of 4 clients", f"({', '.join(map(str, idle))})")


class FewForTheFirst(Partitioner):
    def __call__(self, labels, num_clients, rng):
        return np.split(np.arange(len(labels)), [5, 13, 21])


def test_a_list_is_made_of_what_may_be_one_thing():
    assert checks.as_list(None) == []
    assert checks.as_list("one") == ["one"]
    assert checks.as_list((1, 2)) == [1, 2]


class Whole(LightningModule):
    def training_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return "sgd"


@pytest.mark.parametrize("name", checks.REMOVED)
def test_a_hook_that_lightning_no_longer_calls_is_refused_with_the_one_that_took_its_place(name):
    kind = type("Old", (Whole,), {name: lambda self, *given: None})
    for stage in ("fit", "test"):
        with refused(f"model='Old.{name}'", checks.REMOVED[name]):
            checks.check_module(kind(), stage)
    checks.check_module(Whole())


@pytest.mark.parametrize("logger", ["wandb", ["wandb"], object()])
def test_what_is_no_logger_is_refused(tmp_path, logger):
    with refused("trainer.logger="):
        small_trainer(tmp_path, logger=logger)


def test_a_value_of_another_type_is_refused_as_one_out_of_range(tmp_path):
    with refused("trainer.accumulate_grad_batches={4: 2}"):
        small_trainer(tmp_path, accumulate_grad_batches={4: 2})


def test_what_lightning_refuses_of_configure_optimizers_is_one_line():
    with refused("model=Whole", "configure_optimizers", "Optimizer") as one:
        configure_optimizer(Whole())
    assert "\n" not in str(one.value)


@pytest.mark.parametrize("method", ["FedProx", FedProx])
def test_what_is_no_method_is_refused(method):
    with refused("method=", "Method"):
        checks.MethodList([method])


class WithoutPlan(FederatedDataModule):
    """Data whose setup forgets the plan."""

    def train_dataloader(self, k=0):
        return DataLoader(TensorDataset(torch.rand(8, 64), torch.arange(8)), batch_size=4)


class WithoutLength(Digits):
    """Data whose loaders have no length."""

    def train_dataloader(self, k=0):
        return iter(super().train_dataloader(k))


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        (WithoutPlan, ("data='WithoutPlan'", "self.plan", "self.partition")),
        (WithoutLength, ("data=WithoutLength", "train_dataloader(0)='generator'", "__len__")),
    ],
)
def test_data_that_cannot_be_counted_are_refused(tmp_path, kind, line):
    with refused(*line) as caught:
        small_trainer(tmp_path / "runs").fit(small_model(), kind(num_clients=2))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "runs").exists()


class Given(Sampler):
    """Always the same clients."""

    def __init__(self, *clients):
        self.clients = clients

    def choose(self, rng, round_, num_clients, cohort_size):
        return np.array(self.clients)


@pytest.mark.parametrize("clients", [(0, 0), (0, 4), (-1, 0), ()])
def test_a_sampler_that_repeats_or_leaves_the_range_is_refused_before_round_0(tmp_path, clients):
    with refused("trainer.sampler=Given", f"round 0={sorted(clients)}"):
        small_trainer(tmp_path / "runs", sampler=Given(*clients)).fit(small_model(), small_data())
    assert not (tmp_path / "runs").exists()


def test_a_folder_of_runs_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for root in ("file", "file/runs"):
        with refused("trainer.default_root_dir="):
            small_trainer(tmp_path / root).fit(small_model(), small_data())
    trainer = small_trainer(tmp_path / "runs")
    monkeypatch.setattr(checks.os, "access", lambda path, mode: False)
    with refused("trainer.default_root_dir=", "read-only"):
        trainer.fit(small_model(), small_data())
    monkeypatch.undo()
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: namedtuple("Usage", "free")(0))
    with refused("trainer.default_root_dir="):
        trainer.fit(small_model(), small_data())
    with refused("trainer.default_root_dir"):
        trainer.partition(small_data())
    with refused("output="):
        trainer.predict(small_model(), small_data(), output=tmp_path / "runs" / "predictions.pt")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("optimizer", "named"),
    [
        (partial(torch.optim.SGD, lr=-1.0), ("-1.0",)),
        (partial(torch.optim.SGD, lr=float("nan")), ("SGD.lr=nan",)),
        (torch.optim.LBFGS, ("LBFGS.step()",)),
        (partial(torch.optim.SparseAdam, lr=0.1), ("SparseAdam",)),
    ],
)
def test_a_server_optimizer_that_cannot_step_is_refused(tmp_path, optimizer, named):
    with refused("trainer.server_optimizer", *named):
        small_trainer(tmp_path / "runs", server_optimizer=optimizer).fit(small_model(), small_data())
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("options", [{"lr": -0.1}, {"lr": 0.1, "momentum": -0.9}, {"lr": 0.1, "weight_decay": -1.0}])
def test_a_client_optimizer_out_of_range_is_refused(tmp_path, options):
    model = small_model()
    model.optimizer = partial(torch.optim.SGD, **options)
    with refused("model=ImageClassifier", "configure_optimizers"):
        small_trainer(tmp_path / "runs").fit(model, small_data())
    model.optimizer = partial(torch.optim.SGD, lr=float("nan"))
    with refused("model=ImageClassifier", "configure_optimizers", "SGD.lr=nan"):
        small_trainer(tmp_path / "runs").fit(model, small_data())
    assert not (tmp_path / "runs").exists()


def test_an_error_in_configure_optimizers_of_the_users_own_stays_what_it_is():
    class Wrong(Whole):
        def configure_optimizers(self):
            raise ValueError("mine")

    with pytest.raises(ValueError, match=r"^mine$") as caught:
        configure_optimizer(Wrong())
    assert not isinstance(caught.value, UsageError)


def test_a_schedule_that_cannot_be_followed_is_refused():
    with refused("trainer.client_lr_scheduler", "StepLR(step_size=0, gamma=0.1)"):
        checks.lr_factors(partial(StepLR, step_size=0), 2)
    with refused("trainer.client_lr_scheduler", "round 1=-1.0"):
        checks.lr_factors(partial(ExponentialLR, gamma=-1.0), 2)


def test_the_bare_method_is_refused():
    with refused("method='Method'"):
        checks.MethodList([Method()])


def test_workers_of_a_cpu_are_counted_by_devices(tmp_path):
    with refused("trainer.workers_per_device=2"):
        small_trainer(tmp_path, workers_per_device=2)
    checks.check_device(torch.device("cuda"), workers_per_device=2)


def test_a_value_in_a_line_is_not_longer_than_the_line(tmp_path):
    with refused("trainer.strategy=", "auto") as caught:
        small_trainer(tmp_path, strategy="a" * 1000)
    assert len(str(caught.value)) < 300


def test_a_method_that_counts_labels_needs_a_model_of_as_many_classes(tmp_path):
    model = ImageClassifier(MLP(64, [8]), num_classes=12)
    with refused("model.num_classes=12", "FedLC", "give 10"):
        small_trainer(tmp_path / "runs").fit(model, small_data(), [FedLC()])
    small_trainer(tmp_path, max_rounds=0).fit(model, small_data(), [FedProx()])
