"""A run resumes as itself: what differs is refused by key and both values, or goes on in a new version that says so."""

import importlib
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml
from helpers.errors import refused
from helpers.runs import assert_same_bits, differs, small_data, small_model, small_trainer
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from fl_lightning import Method, Partitioned
from fl_lightning.callbacks import Callback, EarlyStopping, SpectrumMonitor
from fl_lightning.data.augmentation import RandomCrop, RandomFlip
from fl_lightning.engine.identity.changes import differing, message
from fl_lightning.engine.identity.description import IN_DATA, canonical, description, modules_of, of_module
from fl_lightning.engine.optimizers import configure_optimizer
from fl_lightning.errors import UsageError
from fl_lightning.methods import MOON, SCAFFOLD, FedBN, FedCKA, FedDyn, FedLC, FedProx
from fl_lightning.optim import FedAdam, FedAvgM
from fl_lightning.sampling import UniformSampler
from fl_lightning.systems import SystemsHeterogeneity


class Net(LightningModule):
    """A classifier of the digits whose optimizer and schedule are given."""

    def __init__(self, optimizer=None, schedule=None, p=0.0, smoothing=0.0, frozen=False, act=nn.ReLU, width=8):
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Flatten(), nn.Linear(64, width), nn.BatchNorm1d(width), act(), nn.Dropout(p), nn.Linear(width, 10)]
        self.layers, self.loss = nn.Sequential(*layers), nn.CrossEntropyLoss(label_smoothing=smoothing)
        self.taps = {"representation": "layers.4", "logits": "layers.5"}
        self.make, self.schedule = optimizer or partial(SGD, lr=0.1), schedule
        self.layers[1].requires_grad_(not frozen)

    def training_step(self, batch, batch_idx):
        loss = self.loss(self.layers(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def test_step(self, batch, batch_idx):
        self.log("loss", self.loss(self.layers(batch[0]), batch[1]))

    def configure_optimizers(self):
        optimizer = self.make(self.parameters())
        return optimizer if self.schedule is None else ([optimizer], [self.schedule(self, optimizer)])


class Toy(LightningDataModule):
    """A user's data module that keeps nothing of its arguments: its loader alone knows them."""

    def __init__(self, batch_size=16, drop_last=False, sampler=None):
        super().__init__()
        x = torch.randn(120, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        given = TensorDataset(x, torch.arange(120) % 10)
        how = {"sampler": sampler(given)} if sampler else {"shuffle": True}
        self.loader = DataLoader(given, batch_size=batch_size, drop_last=drop_last, **how)

    def train_dataloader(self):
        return self.loader


class Notes(Callback):
    """Notes what it is given of a checkpoint."""

    def __init__(self, name="a"):
        self.name, self.given = name, None

    def state_dict(self):
        return {"name": self.name}

    def load_state_dict(self, state):
        self.given = state


class Own(Method):
    """A user's method that keeps its argument under a private name."""

    def __init__(self, rate=1.0):
        self._rate = rate


def net(**kwargs):
    return lambda: Net(**kwargs)


def data(**kwargs):
    return lambda: small_data(**{"num_clients": 3, "train_size": 96, "test_size": 20, **kwargs})


DIGITS = data()


def toy(**kwargs):
    return lambda: Partitioned(Toy(**kwargs), num_clients=3)


def plateau(**kwargs):
    def made(module, optimizer):
        watching = ReduceLROnPlateau(optimizer, **{"patience": 0, "threshold": 10.0, **kwargs})
        return {"scheduler": watching, "monitor": "test/loss"}

    return net(schedule=made)


def over_the_run(module, optimizer):
    return LambdaLR(optimizer, lambda epoch: 1 - epoch / module.trainer.max_epochs)


def fit(folder, ckpt_path=None, allow_changes=False, model=Net, data=None, method=list, **kwargs):
    given = {"max_rounds": 2, "name": "run", "enable_progress_bar": False, "threads_per_worker": 1, **kwargs}
    trainer = small_trainer(folder, **given)
    more = {"allow_changes": True} if allow_changes else {}
    trainer.fit(model(), (data or DIGITS)(), method(), ckpt_path, **more)
    return trainer


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The folder of a run without options. What is refused leaves it as it is, so the tests share it."""
    folder = tmp_path_factory.mktemp("plain")
    fit(folder)
    return folder


def refusal(folder, now):
    """The line with which a run that differs is refused; every file stays as it is."""
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(UsageError) as refused:
        fit(folder, "last", **now)
    assert files == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    text = str(refused.value)
    assert "\n" not in text
    assert len(text) < 300
    return text


SERVER = {"server_optimizer": lambda p: SGD(p, lr=1.0, momentum=0.5)}
# what the run was, what it is now, and what the line says
REFUSED = {
    "local epochs": ({}, {"local_epochs": 2}, "trainer.local_epochs=2 (was 1)"),
    "local steps": ({"local_steps": 3}, {"local_steps": 4}, "trainer.local_steps=4 (was 3)"),
    "participation": ({}, {"participation": 0.5}, "trainer.participation=0.5 (was 1.0)"),
    "cohort size": ({"cohort_size": 2}, {"cohort_size": 1}, "trainer.cohort_size=1 (was 2)"),
    "server optimizer": ({}, SERVER, "trainer.server_optimizer.momentum=0.5 (was 0)"),
    "its class": (SERVER, {"server_optimizer": FedAdam}, "trainer.server_optimizer='FedAdam' (was 'torch.optim."),
    "its scope": ({}, {"server_optimizer_scope": "all_float"}, "trainer.server_optimizer_scope='all_float' (was"),
    "weighting": ({}, {"weighting": "uniform"}, "trainer.weighting='uniform' (was 'examples')"),
    "buffers": ({}, {"buffers": "local"}, "trainer.buffers='local' (was 'average')"),
    "precision": ({}, {"precision": "bf16-mixed"}, "trainer.precision='bf16-mixed' (was '32-true')"),
    "threads": ({}, {"threads_per_worker": 2}, "trainer.threads_per_worker=2 (was 1)"),
    "compile": ({}, {"compile": True}, "trainer.compile=True (was False)"),
    "channels_last": ({}, {"channels_last": True}, "trainer.channels_last=True (was False)"),
    "clipping": ({}, {"gradient_clip_val": 1.0}, "trainer.gradient_clip_val=1.0 (was None)"),
    "accumulation": ({}, {"accumulate_grad_batches": 2}, "trainer.accumulate_grad_batches=2 (was 1)"),
    "taps": ({}, {"taps": {"logits": "layers.3"}}, "trainer.taps.logits='layers.3' (was None)"),
    "sampler": ({}, {"sampler": type("Other", (UniformSampler,), {})()}, "trainer.sampler='"),
    "systems": (
        {"systems": SystemsHeterogeneity(dropout_before=0.2)},
        {"systems": SystemsHeterogeneity(dropout_before=0.3)},
        "trainer.systems.dropout_before=0.3 (was 0.2)",
    ),
    "clients that are there": (
        {"systems": SystemsHeterogeneity(available={"0": [[1]]})},
        {"systems": SystemsHeterogeneity(available={"0": [[2]]})},
        "trainer.systems.available.0.0=[2] (was [1])",
    ),
    "trial": ({}, {"fast_dev_run": 2}, "trainer.fast_dev_run=2 (was False)"),
    "factors": (
        {"client_lr_scheduler": lambda o: StepLR(o, 1, gamma=0.5)},
        {"client_lr_scheduler": lambda o: StepLR(o, 1, gamma=0.1)},
        "trainer.client_lr_scheduler=[1.0, 0.1] (was [1.0, 0.5])",
    ),
    "factors beside none": ({}, {"client_lr_scheduler": lambda o: StepLR(o, 1)}, "trainer.client_lr_scheduler=["),
    "factors over the run": (
        {"client_lr_scheduler": lambda o: CosineAnnealingLR(o, 2)},
        {"client_lr_scheduler": lambda o: CosineAnnealingLR(o, 4), "max_rounds": 4},
        "trainer.client_lr_scheduler=[1.0, ",
    ),
    "fewer rounds": ({}, {"max_rounds": 1}, "trainer.max_rounds=1: the checkpoint has 2 rounds done"),
    "learning rate": ({}, {"model": net(optimizer=partial(SGD, lr=0.2))}, "model.optimizer.lr=0.2 (was 0.1)"),
    "a group's": (
        {},
        {"model": net(optimizer=lambda p: SGD([{"params": list(p)[:1], "lr": 0.5}], lr=0.1))},
        "model.optimizer.lr=0.5 (was 0.1)",
    ),
    "optimizer": ({}, {"model": net(optimizer=partial(Adam, lr=0.1))}, "model.optimizer='torch.optim.adam.Adam' (was"),
    "schedule": ({}, {"model": net(schedule=lambda _, o: StepLR(o, 1))}, "model.lr_scheduler=["),
    "its argument": (
        {"model": net(schedule=lambda _, o: StepLR(o, 1, gamma=0.5))},
        {"model": net(schedule=lambda _, o: StepLR(o, 1, gamma=0.4))},
        "model.lr_scheduler.0.gamma=0.4 (was 0.5)",
    ),
    "its function": (
        {"model": net(schedule=lambda _, o: LambdaLR(o, lambda e: 0.9**e))},
        {"model": net(schedule=lambda _, o: LambdaLR(o, lambda e: 0.8**e))},
        "model.lr_scheduler.0.functions=",
    ),
    "its course over the run": (
        {"model": net(schedule=over_the_run)},
        {"model": net(schedule=over_the_run), "max_rounds": 3},
        "model.lr_scheduler.0.functions=",
    ),
    "dropout": ({}, {"model": net(p=0.5)}, "model.modules.layers.4='Dropout(p=0.5, inplace=False)' (was"),
    "activation": ({}, {"model": net(act=nn.Tanh)}, "model.modules.layers.3='Tanh()' (was 'ReLU(inplace=False)')"),
    "loss": ({}, {"model": net(smoothing=0.1)}, "model.modules.loss='CrossEntropyLoss("),
    "what is frozen": ({}, {"model": net(frozen=True)}, "model.trained='4 tensors, "),
    "method": ({}, {"method": lambda: [FedProx()]}, "method=['fedprox'] (was [])"),
    "coefficient": (
        {"method": lambda: [FedProx(0.1)]},
        {"method": lambda: [FedProx(0.2)]},
        "method.FedProx.mu=0.2 (was 0.1)",
    ),
    "private coefficient": (
        {"method": lambda: [Own(0.1)]},
        {"method": lambda: [Own(0.2)]},
        "method.Own.rate=0.2 (was 0.1)",
    ),
    "batch size": ({}, {"data": data(batch_size=16)}, "data.batch_size=16 (was 32)"),
    "drop_last": ({}, {"data": data(drop_last=True, batch_size=32)}, "data.drop_last=True (was False)"),
    "noise": ({}, {"data": data(client_noise=0.1)}, "data.client_noise=0.1 (was 0.0)"),
    "augmentation": (
        {"data": data(augment=[RandomFlip(0.5)])},
        {"data": data(augment=[RandomFlip(0.1)])},
        "data.augment.0.p=0.1 (was 0.5)",
    ),
    "augmentations": (
        {"data": data(augment=[RandomFlip()])},
        {"data": data(augment=[RandomFlip(), RandomCrop(1)])},
        "data.augment=[",
    ),
    "a user's batch size": (
        {"data": toy()},
        {"data": toy(batch_size=8)},
        "data.train_dataloader.batch_size=8 (was 16);",
    ),
    "a user's drop_last": ({"data": toy()}, {"data": toy(drop_last=True)}, "drop_last=True (was False)"),
    "a user's sampler": (
        {"data": toy()},
        {"data": toy(sampler=lambda given: RandomSampler(given, replacement=True))},
        "data.train_dataloader.sampler.replacement=True (was False)",
    ),
    "another partition": ({}, {"data": data(num_clients=4)}, "plan_hash='"),
    "evaluations that a schedule watches": (
        {"model": plateau()},
        {"model": plateau(), "eval_every_n_rounds": 2},
        "trainer.eval_every_n_rounds=2 (was 1)",
    ),
    "rounds after an evaluation that a schedule watched": (
        {"model": plateau(), "eval_every_n_rounds": 4},
        {"model": plateau(), "eval_every_n_rounds": 4, "max_rounds": 4},
        "trainer.max_rounds=4 (was 2)",
    ),
    "a callback that asks for evaluations that a schedule watches": (
        {"model": plateau(), "eval_every_n_rounds": 2},
        {"model": plateau(), "eval_every_n_rounds": 2, "callbacks": [SpectrumMonitor()]},
        "trainer.callbacks=[",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_run_that_differs_is_refused_by_key_and_both_values(tmp_path, plain, name):
    before, now, expected = REFUSED[name]
    if before:
        fit(tmp_path, **before)
    text = refusal(tmp_path if before else plain, now)
    assert expected in text
    assert text.startswith("ckpt_path=")


def test_several_differences_are_listed_as_far_as_a_line_goes(plain):
    now = {"local_epochs": 2, "weighting": "uniform", "model": net(optimizer=AdamW, p=0.5), "data": data(batch_size=8)}
    text = refusal(plain, now)
    assert "trainer.local_epochs=2 (was 1), trainer.weighting='uniform'" in text
    assert text.endswith("more; give what it was, or --allow_changes true to go on in a new version")


def test_another_number_of_workers_needs_the_threads_of_before(tmp_path):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        fit(tmp_path, threads_per_worker=None)
        text = refusal(tmp_path, {"threads_per_worker": None, "devices": 2})
    finally:
        torch.set_num_threads(before)
    assert "trainer.threads_per_worker=1 (was 2)" in text


# ------------------------------------------------------------------ what may change
@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """The folder of a run of two rounds, and the state of three rounds without an interruption."""
    folder = tmp_path_factory.mktemp("begun")
    fit(folder, **ONE)
    return folder, fit(folder, name="whole", **{**ONE, "max_rounds": 3}).server.state


ONE = {
    "method": lambda: [SCAFFOLD()],
    "cohort_size": 2,
    "callbacks": [Notes()],
    "server_optimizer": lambda p: SGD(p, lr=1.0, momentum=0.5),
}


FREE = {
    "more rounds": {},
    "devices": {"devices": 2},
    "loggers": {"logger": True},
    "intervals": {"eval_every_n_rounds": 3, "checkpoint_every_n_rounds": 3},
    "client_memory": {"client_memory": 0.0},
    "errors": {"on_client_error": "skip", "min_clients": 2},
    "a callback less": {"callbacks": []},
    "a callback more": {"callbacks": [Notes("b"), Notes()]},
    "a callback's arguments": {"callbacks": [Notes("b")]},
    "the same by another class": {"client_lr_scheduler": lambda o: StepLR(o, 100)},
    "a partitioner of the same plan": {"data": data(test_size=20)},
}


@pytest.mark.parametrize("name", FREE)
def test_what_changes_no_bit_may_change(tmp_path, begun, name):
    folder, whole = begun
    shutil.copytree(folder / "run", tmp_path / "run")
    trainer = fit(tmp_path, "last", **{**ONE, "max_rounds": 3, **FREE[name]})
    assert_same_bits(trainer.server.state, whole)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["version_0"]
    assert not (tmp_path / "run/version_0/changes.yaml").exists()


def test_callbacks_are_known_by_class_and_arguments(tmp_path, recwarn):
    fit(tmp_path, callbacks=[Notes("a"), Notes("b")])
    swapped = [Notes("b"), Notes("c"), Notes("a")]
    fit(tmp_path, "last", callbacks=swapped, max_rounds=3)
    assert [one.given for one in swapped] == [{"name": "b"}, {}, {"name": "a"}]
    fit(tmp_path, "last", callbacks=[Notes("a")], max_rounds=3)
    assert any("trainer.callbacks: Notes, Notes.1: no callback" in str(one.message) for one in recwarn)


def test_early_stopping_of_another_metric_starts_fresh(tmp_path):
    fit(tmp_path, callbacks=[EarlyStopping("test/loss")])
    other = EarlyStopping("train/loss")
    fit(tmp_path, "last", callbacks=[other], max_rounds=2)
    assert other.state_dict()["best_score"] == float("inf")


def test_a_schedule_of_given_length_goes_on_in_a_longer_run(tmp_path):
    how = {"client_lr_scheduler": lambda o: CosineAnnealingLR(o, 4)}
    whole = fit(tmp_path, name="whole", max_rounds=4, **how)
    fit(tmp_path, **how)
    assert_same_bits(fit(tmp_path, "last", max_rounds=4, **how).server.state, whole.server.state)


def test_a_file_without_a_description_still_resumes(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "fl_lightning.engine.checkpointing.identity",
        lambda run: {"seed_everything": run.seed, "method": run.methods.names, "plan_hash": run.data.plan.hash},
    )
    whole = fit(tmp_path, name="whole", max_rounds=3)
    fit(tmp_path)
    monkeypatch.undo()
    assert_same_bits(fit(tmp_path, "last", max_rounds=3).server.state, whole.server.state)


def older(monkeypatch, argument):
    """Let checkpoints be of a version whose methods had no such argument."""

    def without(run):
        found = description(run)
        methods = {k: {n: v for n, v in one.items() if n != argument} for k, one in found["method"].items()}
        return {**found, "method": methods}

    monkeypatch.setattr("fl_lightning.engine.run.description", without)


def test_a_file_older_than_an_argument_resumes_with_its_default_alone(tmp_path, monkeypatch):
    how = {"max_rounds": 3, "method": lambda: [FedLC()]}
    whole = fit(tmp_path, name="whole", **how)
    with monkeypatch.context() as patched:
        older(patched, "margin")
        fit(tmp_path, method=lambda: [FedLC()])
    with refused("method.FedLC.margin='log_prior'", "(was 'fourth_root')"):
        fit(tmp_path, "last", max_rounds=3, method=lambda: [FedLC(margin="log_prior")])
    assert_same_bits(fit(tmp_path, "last", **how).server.state, whole.server.state)


def test_a_server_optimizer_that_an_old_file_does_not_name_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "fl_lightning.engine.checkpointing.identity",
        lambda run: {"seed_everything": run.seed, "method": run.methods.names, "plan_hash": run.data.plan.hash},
    )
    fit(tmp_path)
    monkeypatch.undo()
    with refused("trainer.server_optimizer='Adam'", "(was 'another')"):
        fit(tmp_path, "last", max_rounds=3, server_optimizer=partial(Adam, lr=0.1))


# ------------------------------------------------------------------ going on with changes
def test_a_changed_run_goes_on_in_a_new_version_that_says_so(tmp_path):
    fit(tmp_path)
    before = {path: path.read_bytes() for path in (tmp_path / "run/version_0").rglob("*") if path.is_file()}
    now = {"max_rounds": 3, "model": net(optimizer=partial(SGD, lr=0.5))}
    trainer = fit(tmp_path, "last", allow_changes=True, **now)
    assert [row["round"] for row in trainer.history] == [0, 1, 2]
    assert before == {path: path.read_bytes() for path in (tmp_path / "run/version_0").rglob("*") if path.is_file()}
    (entry,) = yaml.safe_load((tmp_path / "run/version_1/changes.yaml").read_text())
    assert entry["changes"] == {"model.optimizer.lr": {"before": 0.1, "now": 0.5}}
    assert entry["rounds_done"] == 2
    assert entry["ckpt_path"].endswith("version_0/checkpoints/last.ckpt")
    assert entry["time"].startswith("20")
    # it is a run of its own: it resumes in place as it is now
    whole = fit(tmp_path, tmp_path / "run/version_0/checkpoints/last.ckpt", True, **{**now, "max_rounds": 4})
    shutil.rmtree(tmp_path / "run/version_2")
    again = fit(tmp_path, "last", allow_changes=True, **{**now, "max_rounds": 4})
    assert_same_bits(again.server.state, whole.server.state)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["version_0", "version_1"]
    fit(tmp_path, "last", allow_changes=True, local_epochs=2, **{**now, "max_rounds": 4})
    first, second = yaml.safe_load((tmp_path / "run/version_2/changes.yaml").read_text())
    assert first == entry
    assert list(second["changes"]) == ["trainer.local_epochs"]


def test_one_model_is_continued_by_several_methods(tmp_path, recwarn):
    fit(tmp_path, method=lambda: [MOON(), SCAFFOLD()])
    path = tmp_path / "run/version_0/checkpoints/last.ckpt"
    goes_on = {"ckpt_path": path, "allow_changes": True, "max_rounds": 3}
    kept, states = [], []
    for method in (lambda: [SCAFFOLD()], lambda: [FedDyn()], lambda: [FedBN(), SCAFFOLD()], list):
        trainer = fit(tmp_path, method=method, **goes_on)
        states.append(trainer.server.state)
        names = {name for memory in trainer.client.memories().values() for name in memory}
        saved = {name for file in (trainer.run_dir / "checkpoints/clients").glob("*") for name in torch.load(file)}
        kept.append((names, saved))
    assert kept == [(names, names) for names in ({"scaffold"}, {"feddyn"}, {"state", "scaffold"}, set())]
    assert all(differs(one, other) for i, one in enumerate(states) for other in states[:i])


def test_what_stays_of_a_method_goes_on_as_it_was(tmp_path):
    """A method without effect beside it changes no bit, so its control variates are those of before."""
    whole = fit(tmp_path, name="whole", method=lambda: [SCAFFOLD()], max_rounds=3, participation=0.7)
    fit(tmp_path, method=lambda: [SCAFFOLD()], participation=0.7)
    how = {"method": lambda: [SCAFFOLD(), FedProx(0.0)], "participation": 0.7, "max_rounds": 3}
    assert_same_bits(fit(tmp_path, "last", True, **how).server.state, whole.server.state)


@pytest.mark.parametrize(
    ("before", "now"),
    [(partial(Adam, lr=0.1), FedAvgM), (FedAvgM, partial(SGD, lr=1.0, momentum=0.9)), (None, partial(Adam, lr=0.1))],
)
def test_another_server_optimizer_starts_fresh_with_a_line(tmp_path, recwarn, before, now):
    fit(tmp_path, server_optimizer=before)
    trainer = fit(tmp_path, "last", True, server_optimizer=now, max_rounds=3)
    assert any("trainer.server_optimizer: the checkpoint has" in str(one.message) for one in recwarn)
    assert all(torch.isfinite(value).all() for value in trainer.server.state.values())


def test_a_server_optimizer_with_other_options_keeps_its_state(tmp_path):
    fit(tmp_path, server_optimizer=partial(SGD, lr=1.0, momentum=0.9))
    trainer = fit(tmp_path, "last", True, server_optimizer=partial(SGD, lr=0.5, momentum=0.9))
    assert trainer.server.optimizer.param_groups[0]["lr"] == 0.5
    assert len(trainer.server.optimizer.state) == len(trainer.server.parameters)


def test_another_seed_of_the_same_partition_goes_on_where_it_is_allowed(tmp_path, monkeypatch):
    fit(tmp_path, data=toy_plan)
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    with refused("seed_everything=1", "(was 0)"):
        fit(tmp_path, "last", data=toy_plan)
    assert len(fit(tmp_path, "last", True, data=toy_plan, max_rounds=3).history) == 3


def toy_plan():
    def halves(labels, number, rng):
        return [torch.arange(60).numpy(), torch.arange(60, 120).numpy()]

    halves.moved = 0
    made = Partitioned(Toy(), num_clients=2)
    made.partitioner = halves
    return made


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        ({"max_rounds": 1}, "trainer.max_rounds=1: the checkpoint has 2 rounds done"),
        ({"data": data(num_clients=4)}, "another partition"),
    ],
)
def test_what_no_run_can_go_on_with_is_refused_always(plain, now, expected):
    assert expected in refusal(plain, {"allow_changes": True, **now})


@pytest.mark.parametrize(
    ("model", "expected"),
    [(net(width=9), "model.layers.1.weight=(9, 64)"), (small_model, "its state holds 9 entries")],
)
def test_another_model_is_refused_always(plain, model, expected):
    text = refusal(plain, {"allow_changes": True, "model": model})
    assert expected in text
    assert text.endswith("give the same model")


def test_the_final_model_is_no_checkpoint_of_a_run(plain):
    with refused("RUN/checkpoints/last.ckpt"):
        fit(plain, plain / "run/version_0/checkpoints/model.ckpt")


def test_where_other_parameters_are_trained_methods_start_fresh(tmp_path):
    fit(tmp_path, method=lambda: [SCAFFOLD()])
    trainer = fit(tmp_path, "last", True, method=lambda: [SCAFFOLD()], model=net(frozen=True), max_rounds=3)
    variates = trainer.methods.methods[0].global_variate
    assert variates.keys() == trainer.server.parameters.keys()
    assert "layers.1.weight" not in variates


def test_another_schedule_that_watches_a_metric_starts_fresh(tmp_path, recwarn):
    fit(tmp_path, model=plateau(factor=0.5), max_rounds=3)
    trainer = fit(tmp_path, "last", True, model=plateau(factor=0.1), max_rounds=4)
    assert any("it starts fresh" in str(one.message) for one in recwarn)
    assert trainer.history[-1]["lr"] == pytest.approx(0.1)  # a mean; with the state of before it would be 0.0125
    assert trainer.run.local_training.monitored.config.scheduler.factor == 0.1


# ------------------------------------------------------------------ descriptions
class Pictures:
    """A data set whose state has a name of its own in each process, as one of Hugging Face."""

    def __init__(self, transform, items, fingerprint):
        self.transform, self.items, self._fingerprint = transform, items, fingerprint

    def __getitem__(self, index):
        return self.items[index]

    def __len__(self):
        return len(self.items)


def test_of_a_data_set_its_transforms_count_and_not_what_it_holds():
    one, other = (canonical(Pictures(RandomFlip(0.5), items, name)) for items, name in (([1], "a"), ([2], "b")))
    assert one == other
    assert one["transform"]["p"] == 0.5


def test_the_similarities_of_fedcka_are_known_apart():
    """Those that are in older files as they are now still resume."""
    names = ["linear", "debiased", "rbf", "frobenius", "frobenius_raw", "frobenius_literal", "cosine"]
    described = [canonical(FedCKA(similarity=name))["similarity"] for name in names]
    assert all(one not in described[:i] for i, one in enumerate(described))
    assert described[:2] == ["linear_ckas", {"class": "linear_ckas", "debiased": True}]


def test_values_of_a_description_are_plain_and_without_addresses():
    class Thing:
        def __init__(self, a, b):
            self.a, self._b = a, b

    given = Thing(partial(SGD, lr=0.1), {"f": torch.relu, "t": torch.tensor([1.5]), "path_of": float})
    described = canonical([given, torch.float32, {3, 1}, (1, None)])
    assert " at 0x" not in repr(described)
    assert described[0]["a"]["lr"] == 0.1
    assert described[0]["b"]["t"] == [1.5]
    assert described[1:] == ["torch.float32", [1, 3], [1, None]]
    assert canonical(given) == canonical(Thing(given.a, given._b))


def test_keys_that_one_of_two_descriptions_lacks_are_unknown():
    old, new = {"class": "A", "x": 1, "gone": 2}, {"class": "A", "x": 1, "new": 3}
    assert differing(old, new, "k") == {}
    assert differing({"a": 1}, {}, "taps") == {"taps.a": (1, None)}
    assert differing(float("nan"), float("nan"), "k") == {}


def test_the_line_stays_short_whatever_differs():
    changes = {f"model.{'very.' * 5}long.key{i}": ("x" * 500, list(range(500))) for i in range(9)}
    line = message("ckpt_path='...'", changes, "a hint")
    assert len(line) < 300
    assert " more; a hint" in line


# ------------------------------------------------------------------ the user's own code
METHOD = """
from fl_lightning import Method
from own_helpers import unused

class Mine(Method):
    '''Mine.'''
    a = 1
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """``own(text)`` is the method of a module with this source, loaded anew."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_helpers.py").write_text("unused = 1\n")

    def made(text=METHOD):
        (tmp_path / "own_code.py").write_text(text)
        for name in ("own_code", "own_helpers"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.invalidate_caches()
        return lambda: [importlib.import_module("own_code").Mine()]

    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # the same second and size would be taken for the same file
    yield made
    for name in ("own_code", "own_helpers"):
        sys.modules.pop(name, None)


def test_changed_code_is_refused_and_comments_are_not(tmp_path, own):
    fit(tmp_path, method=own())
    fit(tmp_path, "last", method=own(METHOD.replace("'''Mine.'''", "'''Yours.'''  # a comment")))
    text = refusal(tmp_path, {"method": own(METHOD.replace("a = 1", "a = 2"))})
    assert "code.own_code='" in text and "--allow_changes true" in text
    method = own()
    (tmp_path / "own_helpers.py").write_text("unused = 2\n")
    assert "code.own_helpers='" in refusal(tmp_path, {"method": method})
    trainer = fit(tmp_path, "last", True, method=method, max_rounds=3)
    (entry,) = yaml.safe_load((trainer.run_dir / "changes.yaml").read_text())
    assert list(entry["changes"]) == ["code.own_helpers"]


def test_a_file_that_says_nothing_of_its_code_resumes_and_goes_on_saying_nothing(tmp_path, own, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(
            "fl_lightning.engine.run.description",
            lambda run: {key: value for key, value in description(run).items() if key != "code"},
        )
        fit(tmp_path, method=own())
    trainer = fit(tmp_path, "last", method=own(METHOD.replace("a = 1", "a = 2")), max_rounds=3)
    assert "code" not in trainer.run.description
    saved = torch.load(tmp_path / "run/version_0/checkpoints/last.ckpt")
    assert saved["round"] == 3 and "code" not in saved["description"]


def test_a_replay_is_where_corrected_code_is_tried(tmp_path, own):
    trainer = fit(tmp_path, method=own())
    method = own(METHOD.replace("a = 1", "a = 2"))
    path = trainer.run_dir / "checkpoints/last.ckpt"
    again = small_trainer(tmp_path, max_rounds=3, name="run", enable_progress_bar=False, threads_per_worker=1)
    assert again.replay(Net(), DIGITS(), 2, 0, path, method())["steps"] > 0


def test_what_a_runs_objects_keep_is_searched_for_code():
    class Kept:
        pass

    class Outer:
        def __init__(self, inner):
            self.inner = inner

    def around(value):
        return lambda: value

    names = [modules_of([make(Kept())]) for make in (Outer, around, lambda one: {"a": [partial(print, one)]})]
    outer = "test_what_a_runs_objects_keep_is_searched_for_code"
    assert [one[__name__] for one in names] == [{outer}] * 3
    assert modules_of([MOON(), 3, "text", torch.ones(2)]).keys() >= {"fl_lightning.methods.moon"}
    assert __name__ not in modules_of([MOON()])


# ------------------------------------------------------------------ paths, and what their names are taken for
class Deep(nn.Module):
    """A layer with an argument whose name has a word of paths, and with functions among its attributes."""

    def __init__(self, drop_path=0.0, act=torch.relu, several=(), weights=None):
        super().__init__()
        self.drop_path, self.act, self.several, self.weights = drop_path, act, list(several), weights

    def forward(self, x):
        return x


class DeepNet(Net):
    """A net of such a layer, which has itself an argument whose name is that of a path."""

    def __init__(self, drop_path_rate=0.0, cache_dir="here", act=torch.relu, **kwargs):
        super().__init__()
        self.drop_path_rate, self.cache_dir, self.act, self.deep = drop_path_rate, cache_dir, act, Deep(**kwargs)


class Rooted(Method):
    """A method whose argument is called root."""

    def __init__(self, root=1, teacher=None):
        self.root, self.teacher = root, teacher


def layer(**kwargs):
    return lambda: DeepNet(**kwargs)


def lambdas(number):
    return [lambda x: x + number, lambda x: x * number]


PLUS, TIMES = lambdas(2)
NOW_REFUSED = {
    "rate": ({}, {"drop_path_rate": 0.9}, "model.drop_path_rate=0.9 (was 0.0)"),
    "folder of a model": ({}, {"cache_dir": "there"}, "model.cache_dir='there' (was 'here')"),
    "layer's rate": ({}, {"drop_path": 0.9}, "model.attributes.deep.drop_path=0.9 (was 0.0)"),
    "own activation": ({}, {"act": torch.tanh}, "model.act='"),
    "builtin": ({"several": [torch.relu]}, {"several": [torch.tanh]}, "model.attributes.deep.several.0='"),
    "function": ({"several": [F.gelu]}, {"several": [F.silu]}, "deep.several.0='torch.nn.functional.silu' (was '"),
    "method": ({"several": [torch.Tensor.relu]}, {"several": [torch.Tensor.tanh]}, "deep.several.0='"),
    "partial": (
        {"several": [partial(F.elu, alpha=1.0)]},
        {"several": [partial(F.elu, alpha=2.0)]},
        "model.attributes.deep.several.0.alpha=2.0 (was 1.0)",
    ),
    "lambda": ({"several": [PLUS]}, {"several": [TIMES]}, "deep.several.0='"),
    "lambda's value": ({"several": [PLUS]}, {"several": [lambdas(3)[0]]}, "deep.several.0='"),
    "one less": ({"several": [F.gelu]}, {"several": []}, "deep.several.0=None (was '"),
}


@pytest.mark.parametrize("name", NOW_REFUSED)
def test_what_a_model_keeps_beside_its_modules_counts(name):
    before, now, expected = NOW_REFUSED[name]
    models = [DeepNet(**arguments) for arguments in (before, before, now)]
    described, again, changed = (of_module(model, *configure_optimizer(model)) for model in models)
    assert not differing(described, again, "model")
    assert expected in message("", differing(described, changed, "model"), "")


def test_the_activation_of_torchs_transformer_counts(tmp_path):
    def encoder(activation):
        made = Net()
        made.encoder = nn.TransformerEncoderLayer(8, 2, 8, activation=activation)
        return made

    fit(tmp_path, model=lambda: encoder("relu"))
    fit(tmp_path, "last", model=lambda: encoder("relu"))
    text = refusal(tmp_path, {"model": lambda: encoder("gelu")})
    assert "model.attributes.encoder.activation='" in text and "gelu' (was 'torch.nn.functional.relu')" in text


def test_files_without_these_entries_still_resume(tmp_path, monkeypatch):
    def former(run):
        found = description(run)
        model = {key: value for key, value in found["model"].items() if key not in ("attributes", "drop_path_rate")}
        method = {name: {"class": one["class"]} for name, one in found["method"].items()}
        return {**found, "model": model, "method": method}

    how = {"model": layer(drop_path_rate=0.5, drop_path=0.5, several=[F.gelu]), "method": lambda: [Rooted(3)]}
    with monkeypatch.context() as patched:
        patched.setattr("fl_lightning.engine.run.description", former)
        fit(tmp_path, **how)
    assert fit(tmp_path, "last", max_rounds=3, **how).history[-1]["round"] == 2
    assert "method.Rooted.root=1 (was 3)" in refusal(tmp_path, {**how, "method": lambda: [Rooted(1)], "max_rounds": 3})


def test_a_file_is_known_by_what_it_holds_but_for_the_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in (("a.pt", "one"), ("b.pt", "one"), ("c.pt", "another")):
        (tmp_path / name).write_text(text)

    def changes(before, now):
        return list(differing(canonical(before), canonical(now), "k"))

    a, b, c = (Rooted(teacher=Path(name)) for name in ("a.pt", "b.pt", "c.pt"))
    assert (changes(a, b), changes(a, c)) == ([], ["k.teacher"])
    assert (changes(["a.pt"], ["b.pt"]), changes(["a.pt"], ["c.pt"])) == ([], ["k.0"])
    former = {**canonical(a), "teacher": "a.pt"}  # it knew files by their names
    assert not differing(former, canonical(a), "k")
    assert list(differing(former, canonical(b), "k")) == ["k.teacher"]
    assert changes(Rooted(teacher="nowhere.pt"), Rooted(teacher="elsewhere.pt")) == ["k.teacher"]
    for one in (canonical(Rooted("a.pt"), IN_DATA), canonical(Rooted(Path("c.pt")), IN_DATA)):
        assert one == canonical(Rooted(None), IN_DATA)
    assert canonical(Rooted(3), IN_DATA)["root"] == 3
