"""A changed run is refused with key and both values, or continues in a new version."""

import importlib
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml
from helpers.checkpoints import bytes_of
from helpers.errors import refused, warned
from helpers.runs import assert_same_bits, differs, small_data, small_model, small_trainer
from helpers.tiny import Sizes, TinyData, TinyModule, clients
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from fl_lightning import Method, Partitioned
from fl_lightning.callbacks import Callback
from fl_lightning.core.clock import Clock
from fl_lightning.core.sampling import UniformSampler
from fl_lightning.core.systems import SystemsHeterogeneity
from fl_lightning.data.augmentation import RandomCrop, RandomFlip
from fl_lightning.methods import MOON, SCAFFOLD, FedBN, FedCKA, FedDyn, FedProx
from fl_lightning.optim import FedAdam
from fl_lightning.utilities.errors import UsageError

sgd = partial(SGD, lr=0.1)


class Net(TinyModule):
    """A classifier with the layers and the schedules that runs differ in."""

    def __init__(self, optimizer=sgd, schedules=(), p=0.0, smoothing=0.0, frozen=False, act=nn.ReLU):
        super().__init__(optimizer)
        self.body = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), act(), nn.Dropout(p))
        self.criterion, self.schedules = nn.CrossEntropyLoss(label_smoothing=smoothing), schedules
        self.taps = {"representation": "body", "logits": "head"}
        self.body[0].requires_grad_(not frozen)

    def loss(self, batch):
        return self.criterion(self(batch[0]), batch[1])

    def test_step(self, batch, batch_idx):
        self.log("loss", self.loss(batch))

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        made = [schedule(self, optimizer) for schedule in self.schedules]
        return ([optimizer], made) if made else optimizer


class Pictures(TensorDataset):
    """A data set with a transform, and a name that differs in each process, as in Hugging Face."""

    def __init__(self, tensors, transform, fingerprint):
        super().__init__(*tensors)
        self.transform, self._fingerprint = transform, fingerprint


class Loaded(TinyData):
    """A data module that keeps only a folder of its arguments: its loader knows the others."""

    def __init__(self, batch_size=16, drop_last=False, sampler=None, flip=0.5, note="a", folder=Path("a")):
        super().__init__(train=60)
        self.folder = folder
        rows = Pictures(self.rows(60, 1).tensors, RandomFlip(flip), note)
        how = {"sampler": sampler(rows)} if sampler else {"shuffle": True}
        self.given = DataLoader(rows, batch_size, drop_last=drop_last, **how)

    def train_dataloader(self):
        return self.given


class Own(Method):
    """A method that keeps one argument under a private name, and may know a file."""

    def __init__(self, rate=1.0, teacher=None):
        self._rate, self.teacher = rate, teacher


class Renamed(Method):
    """A method that keeps its argument under another name."""

    def __init__(self, temperature):
        self.t = temperature


class RenamedNet(Net):
    """A module that keeps its argument under another name, and functions."""

    def __init__(self, temperature=0.5, function=torch.relu, power=2.0):
        super().__init__()
        self.t, self.function, self.inner = temperature, function, nn.ReLU()
        self.inner.functions = [F.gelu, partial(torch.pow, exponent=power)]
        self.inner.power = self.inner.functions[1]


class Relabelled(TinyData):
    """Data whose labels begin with another class."""

    def __init__(self, first=0):
        super().__init__(test=(6,))
        self.others = first

    def rows(self, number, seed):
        x, y = super().rows(number, seed).tensors
        return TensorDataset(x, (y + self.others) % 3)


class Notes(Callback):
    """Records the restored state."""

    def __init__(self, name="a"):
        self.name, self.given = name, None

    def state_dict(self):
        return {"name": self.name}

    def load_state_dict(self, state):
        self.given = state


def net(**kwargs):
    return lambda: Net(**kwargs)


def tiny():
    return clients(Relabelled(), 6, 4, 4)


def digits(**kwargs):
    given = {"num_clients": 3, "train_size": 96, "test_size": 20, "batch_size": 32, "augment": [RandomFlip(0.5)]}
    return lambda: small_data(**{**given, **kwargs})


def loaded(**kwargs):
    return lambda: clients(Loaded(**kwargs), 20, 40)


def step_lr(gamma):
    return lambda module, optimizer: StepLR(optimizer, 1, gamma=gamma)


def decay(base):
    return lambda module, optimizer: LambdaLR(optimizer, lambda epoch: base**epoch)


def plateau(**kwargs):
    def made(module, optimizer):
        watching = ReduceLROnPlateau(optimizer, **{"patience": 0, "threshold": 10.0, **kwargs})
        return {"scheduler": watching, "monitor": "test/loss"}

    return net(schedules=[made])


def momentum(parameters):
    return SGD(parameters, lr=1.0, momentum=0.5)


def fit(folder, ckpt_path=None, allow_changes=False, model=Net, data=tiny, method=list, **kwargs):
    given = {"max_rounds": 2, "name": "run", "enable_progress_bar": False, "threads_per_worker": 1, **kwargs}
    torch.manual_seed(0)
    trainer = small_trainer(folder, **given)
    trainer.fit(model(), data(), method(), ckpt_path, allow_changes=allow_changes)
    return trainer


# ------------------------------------------------------------------ changes that are refused
# a run; each is begun once, and resumed with the changes below
STARTS = {
    "plain": {},
    "options": {
        "local_steps": 3,
        "cohort_size": 2,
        "server_optimizer": momentum,
        "systems": SystemsHeterogeneity(dropout_before=0.2, available={"0": [[1]]}),
        "client_lr_scheduler": lambda o: StepLR(o, 1, gamma=0.5),
        "method": lambda: [FedProx(0.1), Own(0.1)],
    },
    "schedules": {"model": net(schedules=[step_lr(0.5), decay(0.9)])},
    "watched": {"model": plateau(), "eval_every_n_rounds": 4},
    "digits": {"model": small_model, "data": digits(), "method": lambda: [FedCKA(layers=1)]},
    "loader": {"data": loaded()},
    "renamed": {"model": lambda: RenamedNet(0.5), "method": lambda: [Renamed(0.5)]},
}
# changed arguments, and a part of the error
REFUSED = {
    "plain": [
        ({"local_epochs": 2}, "trainer.local_epochs=2 (was 1)"),
        ({"server_optimizer": momentum}, "trainer.server_optimizer.momentum=0.5 (was 0)"),
        ({"server_optimizer_scope": "all_float"}, "trainer.server_optimizer_scope='all_float' (was"),
        ({"precision": "bf16-mixed"}, "trainer.precision='bf16-mixed' (was '32-true')"),
        ({"threads_per_worker": 2}, "trainer.threads_per_worker=2 (was 1)"),
        ({"channels_last": True}, "trainer.channels_last=True (was False)"),
        ({"deterministic": "warn"}, "trainer.deterministic=True (was None)"),
        ({"taps": {"logits": "body.3"}}, "trainer.taps.logits='body.3' (was None)"),
        ({"sampler": type("Other", (UniformSampler,), {})()}, "trainer.sampler='"),
        ({"fast_dev_run": 2}, "trainer.fast_dev_run=2 (was False)"),
        ({"client_lr_scheduler": lambda o: StepLR(o, 1)}, "trainer.client_lr_scheduler=["),
        ({"model": net(optimizer=partial(SGD, lr=0.2))}, "model.optimizer.lr=0.2 (was 0.1)"),
        ({"model": net(optimizer=partial(Adam, lr=0.1))}, "model.optimizer='torch.optim.adam.Adam' (was"),
        ({"model": net(p=0.5)}, "model.modules.body.3.p=0.5 (was 0.0)"),
        ({"model": net(act=nn.Tanh)}, "model.modules.body.2='torch.nn."),
        ({"model": net(frozen=True)}, "model.trained='4 tensors, "),
        ({"method": lambda: [FedProx()]}, "method=['fedprox'] (was [])"),
        ({"data": lambda: clients(Relabelled(1), 6, 4, 4)}, "data.labels='"),
    ],
    "renamed": [
        ({"model": lambda: RenamedNet(0.7)}, "model.t=0.7 (was 0.5)"),
        ({"model": lambda: RenamedNet(function=torch.tanh)}, "model.function='"),
        ({"model": lambda: RenamedNet(power=3.0)}, "model.modules.inner.power.keywords.exponent=3.0 (was 2.0)"),
        ({"method": lambda: [Renamed(0.7)]}, "method.Renamed.t=0.7 (was 0.5)"),
    ],
    "options": [
        ({"local_steps": 4}, "trainer.local_steps=4 (was 3)"),
        ({"server_optimizer": FedAdam}, "trainer.server_optimizer='FedAdam' (was 'torch.optim."),
        (
            {"systems": SystemsHeterogeneity(dropout_before=0.2, available={"0": [[2]]})},
            "trainer.systems.available.0.0.0=2 (was 1)",
        ),
        ({"client_lr_scheduler": lambda o: StepLR(o, 1, gamma=0.1)}, "client_lr_scheduler.1=0.1 (was 0.5)"),
        ({"method": lambda: [FedProx(0.2), Own(0.1)]}, "method.FedProx.mu=0.2 (was 0.1)"),
        ({"method": lambda: [FedProx(0.1), Own(0.2)]}, "method.Own.rate=0.2 (was 0.1)"),
    ],
    "schedules": [
        ({"model": net(schedules=[step_lr(0.4), decay(0.9)])}, "lr_scheduler.0.gamma=0.4 (was 0.5)"),
        ({"model": net(schedules=[step_lr(0.5), decay(0.8)])}, "model.lr_scheduler.1.functions.0.base=0.8 (was 0.9)"),
    ],
    "watched": [({"eval_every_n_rounds": 2}, "trainer.eval_every_n_rounds=2 (was 4)")],
    "digits": [
        ({"data": digits(augment=[RandomFlip(0.1)])}, "data.augment.0.p=0.1 (was 0.5)"),
        ({"data": digits(augment=[RandomFlip(0.5), RandomCrop(1)])}, "data.augment=["),
        ({"method": lambda: [FedCKA(layers=1, similarity="rbf")]}, "method.FedCKA.similarity"),
    ],
    "loader": [
        ({"data": loaded(batch_size=8)}, "data.train_dataloader.batch_size=8 (was 16)"),
        ({"data": loaded(sampler=partial(RandomSampler, replacement=True))}, "sampler.replacement=True (was False)"),
        ({"data": loaded(flip=0.1)}, "transform.p=0.1 (was 0.5)"),
        ({"data": loaded(folder="b")}, "datamodule.folder='b' (was None)"),
    ],
}
CASES = {f"{start}: {expected} {i}": (start, i) for start in REFUSED for i, (_, expected) in enumerate(REFUSED[start])}


@pytest.fixture(scope="module")
def last(tmp_path_factory):
    """``last(start)`` is the checkpoint of a run of :data:`STARTS`."""
    begun = {}

    def of(start):
        if start not in begun:
            folder = tmp_path_factory.mktemp(start)
            fit(folder, **STARTS[start])
            begun[start] = folder / "run/version_0/checkpoints/last.ckpt"
        return begun[start]

    return of


def refusal(tmp_path, path, now):
    """Return the error of a changed run, which must not change or create any file."""
    files = bytes_of(path.parents[1])
    with pytest.raises(UsageError) as caught:
        fit(tmp_path, path, **now)
    assert bytes_of(path.parents[1]) == files
    assert not (tmp_path / "run").exists()
    text = str(caught.value)
    assert text.startswith("ckpt_path=") and "\n" not in text and len(text) < 300
    return text


@pytest.mark.parametrize("name", CASES)
def test_a_run_that_differs_is_refused_by_key_and_both_values(tmp_path, last, name):
    start, place = CASES[name]
    now, expected = REFUSED[start][place]
    assert expected in refusal(tmp_path, last(start), {**STARTS[start], **now})


def test_several_differences_are_listed_as_far_as_a_line_goes(tmp_path, last):
    now = {"local_epochs": 2, "weighting": "uniform", "model": net(optimizer=AdamW, p=0.5), "max_rounds": 3}
    text = refusal(tmp_path, last("plain"), now)
    assert "trainer.local_epochs=2 (was 1), trainer.weighting='uniform'" in text
    assert " more; " in text and "--allow_changes" in text


@pytest.mark.parametrize(
    ("now", "words"),
    [
        ({"max_rounds": 1}, ("trainer.max_rounds=1", "2 rounds")),
        ({"data": lambda: clients(TinyData(test=(6,)), 7, 7)}, ("data.", "the partition differs")),
        ({"model": lambda: TinyModule()}, ("model",)),
    ],
)
def test_what_no_run_can_continue_with_is_refused_even_where_changes_are_allowed(tmp_path, last, now, words):
    for allowed in (False, True):
        with refused("ckpt_path=", *words):
            fit(tmp_path, last("plain"), allowed, **now)


def test_the_final_model_is_no_checkpoint_of_a_run(tmp_path, last):
    with refused("RUN/checkpoints/last.ckpt"):
        fit(tmp_path, last("plain").with_name("model.ckpt"))


# ------------------------------------------------------------------ changes that are allowed
ONE = {"method": lambda: [SCAFFOLD()], "cohort_size": 2, "callbacks": [Notes()], "server_optimizer": momentum}
FREE = {
    "workers": {"devices": 2},
    "a callback less": {"callbacks": []},
    "others": {
        "logger": True,
        "eval_every_n_rounds": 3,
        "checkpoint_every_n_rounds": 3,
        "client_memory": 0.0,
        "deterministic": False,
        "on_client_error": "skip",
        "min_clients": 2,
        "callbacks": [Notes("b"), Notes()],
        "client_lr_scheduler": lambda o: StepLR(o, 100),
        "data": lambda: Partitioned(Relabelled(), type("Same", (Sizes,), {})(6, 4, 4), num_clients=3),
    },
}


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """The folder of a run of two rounds, and the state of three rounds without an interruption."""
    folder = tmp_path_factory.mktemp("begun")
    fit(folder, **ONE)
    return folder, fit(folder, name="whole", **{**ONE, "max_rounds": 3}).server.state


@pytest.mark.filterwarnings("ignore:trainer.callbacks. Notes")  # what a callback that is left out has saved
@pytest.mark.parametrize("name", FREE)
def test_what_changes_no_bit_may_change(tmp_path, begun, name):
    folder, whole = begun
    shutil.copytree(folder / "run", tmp_path / "run")
    trainer = fit(tmp_path, "last", **{**ONE, "max_rounds": 3, **FREE[name]})
    assert_same_bits(trainer.server.state, whole)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["version_0"]
    assert not (tmp_path / "run/version_0/changes.yaml").exists()


@pytest.mark.parametrize("end", [{"max_rounds": 3}, {"max_seconds": 6.0}])
@pytest.mark.parametrize("every", [{"eval_every_n_rounds": 2}, {"eval_every_seconds": 4.0}])
def test_the_evaluation_at_the_end_of_a_run_does_not_change_a_longer_one(tmp_path, every, end):
    how = {"model": plateau(), "clock": Clock(), "max_rounds": 5, **every}
    whole = fit(tmp_path, name="whole", **how)
    assert len(fit(tmp_path, **how | end).history) == 3
    trainer = fit(tmp_path, "last", **how)
    assert [row["lr"] for row in trainer.history] == [row["lr"] for row in whole.history]
    assert_same_bits(trainer.server.state, whole.server.state)


def test_data_that_are_built_anew_and_lie_elsewhere_are_the_same(tmp_path, last):
    data = loaded(note="another process", folder=Path("b"))
    assert len(fit(tmp_path, last("loader"), data=data, max_rounds=3).history) == 3


def test_a_file_is_known_by_what_it_holds(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in (("a.pt", "one"), ("b.pt", "one"), ("c.pt", "another")):
        (tmp_path / name).write_text(text)

    def resume(teacher, path="last"):
        fit(tmp_path, path, method=lambda: [Own(teacher=teacher)])

    resume(Path("a.pt"), None)
    resume("b.pt")
    for changed in (Path("c.pt"), "nowhere.pt"):
        with refused("method.Own.teacher='"):
            resume(changed)


def test_callbacks_are_known_by_class_and_arguments(tmp_path, recwarn):
    fit(tmp_path, callbacks=[Notes("a"), Notes("b")])
    swapped = [Notes("b"), Notes("c"), Notes("a")]
    fit(tmp_path, "last", callbacks=swapped, max_rounds=3)
    assert [one.given for one in swapped] == [{"name": "b"}, {}, {"name": "a"}]
    fit(tmp_path, "last", callbacks=[Notes("a")], max_rounds=3)
    assert any("trainer.callbacks: Notes, Notes.1" in str(one.message) for one in recwarn)


# ------------------------------------------------------------------ continuing with changes
def test_a_changed_run_continues_in_a_new_version_that_lists_the_changes(tmp_path):
    fit(tmp_path)
    before = bytes_of(tmp_path / "run/version_0")
    now = {"max_rounds": 3, "model": net(optimizer=partial(SGD, lr=0.5))}
    trainer = fit(tmp_path, "last", allow_changes=True, **now)
    assert [row["round"] for row in trainer.history] == [0, 1, 2]
    assert bytes_of(tmp_path / "run/version_0") == before
    (entry,) = yaml.safe_load((tmp_path / "run/version_1/changes.yaml").read_text())
    assert entry["changes"] == {"model.optimizer.lr": {"before": 0.1, "now": 0.5}}
    assert entry["rounds_done"] == 2
    assert entry["ckpt_path"].endswith("version_0/checkpoints/last.ckpt")
    # a separate run, which resumes in place
    fit(tmp_path, "last", allow_changes=True, **{**now, "max_rounds": 4})
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["version_0", "version_1"]
    fit(tmp_path, "last", allow_changes=True, local_epochs=2, **{**now, "max_rounds": 4})
    first, second = yaml.safe_load((tmp_path / "run/version_2/changes.yaml").read_text())
    assert first == entry
    assert list(second["changes"]) == ["trainer.local_epochs"]


def test_one_model_is_continued_by_several_methods_which_start_fresh(tmp_path):
    path = fit(tmp_path, method=lambda: [MOON(), SCAFFOLD()]).run_dir / "checkpoints/last.ckpt"
    kept, states = [], []
    for method in (lambda: [SCAFFOLD()], lambda: [FedDyn()], lambda: [FedBN(), SCAFFOLD()], list):
        with warned("methods", "fresh"):
            trainer = fit(tmp_path, path, True, method=method, max_rounds=3)
        states.append(trainer.server.state)
        names = {name for memory in trainer.client.memories().values() for name in memory}
        saved = {name for file in (trainer.run_dir / "checkpoints/clients").glob("*") for name in torch.load(file)}
        kept.append((names, saved))
    assert kept == [(names, names) for names in ({"scaffold"}, {"feddyn"}, {"state", "scaffold"}, set())]
    assert all(differs(one, other) for i, one in enumerate(states) for other in states[:i])


def test_what_has_not_changed_continues_as_it_was(tmp_path):
    """Another method starts fresh, and the server optimizer continues; and vice versa."""
    how = {"method": lambda: [SCAFFOLD()], "server_optimizer": momentum}
    path = fit(tmp_path, **how).run_dir / "checkpoints/last.ckpt"
    kept = torch.load(path, weights_only=True)["server"]["optimizer"]["state"][0]["momentum_buffer"]
    with warned("methods", "fresh"):
        trainer = fit(tmp_path, path, True, **{**how, "method": list})
    assert torch.equal(trainer.server.optimizer.state_dict()["state"][0]["momentum_buffer"], kept)
    with warned("server_optimizer", "fresh"):
        trainer = fit(tmp_path, path, True, **{**how, "server_optimizer": None})
    assert not trainer.server.optimizer.state and {"scaffold"} == {*trainer.client.memories()[0]}


@pytest.mark.parametrize("start", ["options", "plain"])
def test_another_server_optimizer_starts_fresh_with_a_warning(tmp_path, last, start):
    now = {**STARTS[start], "server_optimizer": partial(Adam, lr=0.1), "max_rounds": 3}
    with warned("server_optimizer", "fresh"):
        trainer = fit(tmp_path, last(start), True, **now)
    assert all(torch.isfinite(value).all() for value in trainer.server.state.values())


def test_another_seed_of_the_same_partition_continues_where_it_is_allowed(tmp_path, last, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    with refused("seed_everything=1", "(was 0)"):
        fit(tmp_path, last("plain"))
    assert len(fit(tmp_path, last("plain"), True, max_rounds=3).history) == 3


def test_another_schedule_that_watches_a_metric_starts_fresh(tmp_path):
    fit(tmp_path, model=plateau(factor=0.5), max_rounds=3)
    with warned("schedule", "fresh"):
        trainer = fit(tmp_path, "last", True, model=plateau(factor=0.1), max_rounds=4)
    assert trainer.history[-1]["lr"] == pytest.approx(0.1)  # with the old state it would be 0.0125


# ------------------------------------------------------------------ the user's own code
METHOD = """
from fl_lightning import Method, Partitioned
from own_helpers import unused

class Mine(Method):
    '''Mine.'''
    a = 1
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """``own(text)`` returns the method of a reloaded module with this source."""
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
    path = fit(tmp_path, method=own()).run_dir / "checkpoints/last.ckpt"
    fit(tmp_path, "last", method=own(METHOD.replace("'''Mine.'''", "'''Yours.'''  # a comment")))
    changed = own(METHOD.replace("a = 1", "a = 2"))
    with refused("code.own_code was edited", "--allow_changes"):
        fit(tmp_path, "last", method=changed)
    # a replay is where corrected code is tried
    again = small_trainer(tmp_path, max_rounds=3, name="run", enable_progress_bar=False, threads_per_worker=1)
    assert again.replay(Net(), tiny(), 2, 0, path, changed())["steps"] > 0
    method = own()
    (tmp_path / "own_helpers.py").write_text("unused = 2\n")
    with refused("code.own_helpers was edited"):
        fit(tmp_path, "last", method=method)
    trainer = fit(tmp_path, "last", True, method=method, max_rounds=3)
    (entry,) = yaml.safe_load((trainer.run_dir / "changes.yaml").read_text())
    assert list(entry["changes"]) == ["code.own_helpers"]
