"""Clients side by side under ``trainer.compile``: steps are compiled once, and give what they give as they are."""

import shutil
from functools import partial

import pytest
import torch
from helpers.beside import arrays, assert_near, digits, mlp, sgd, trained
from helpers.errors import refused, warned
from helpers.runs import assert_same_bits
from lightning.pytorch import LightningModule
from torch import nn
from torch.optim.lr_scheduler import StepLR

from fl_lightning.engine import recording, run
from fl_lightning.engine.compiled import CompiledPrograms
from fl_lightning.engine.groups import choosing, forming
from fl_lightning.methods import MOON, SCAFFOLD, FedBN, FedDyn, FedLC, FedProto, FedProx, FedUV, StructuredDeCov
from fl_lightning.models import Encoder, FedCKACNN


@pytest.fixture(autouse=True)
def _quick(undrawn, monkeypatch):
    monkeypatch.setattr(choosing, "can_try_apart", lambda device: False)
    monkeypatch.setattr(choosing, "LEAST_CLIENTS", 2)
    monkeypatch.setattr(run, "code_of_run", lambda *args: {})
    # code for one size alone would be compiled again for the next
    with torch._dynamo.config.patch(recompile_limit=1):
        yield


@pytest.fixture
def plainly(monkeypatch):
    """A trace is run as it is, which takes less time and no compiler for C++; gives the traces."""

    def compile_(function, **how):
        if isinstance(function, torch.fx.GraphModule):  # and no module's forward
            graphs.append(function)
        return function

    graphs = []
    monkeypatch.setattr(torch, "compile", compile_)
    return graphs


@pytest.fixture
def repeated(monkeypatch):
    """A number for each program that has been repeated: 1 if it was compiled."""
    found, repeat = [], recording.Recording.repeat
    monkeypatch.setattr(
        recording.Recording, "repeat", lambda self, *given: found.append(self.compiled) or repeat(self, *given)
    )
    return found


class Normed(Encoder):
    out_features = 12

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 12, bias=False), nn.BatchNorm1d(12), nn.Tanh())

    def forward(self, x):
        return self.layers(x)


LISTS = {
    "FedAvg": (list, {}),
    "momentum": (list, {"model": partial(mlp, sgd(momentum=0.9, weight_decay=1e-3))}),
    "FedProx, SCAFFOLD, FedLC": (lambda: [FedProx(0.1), SCAFFOLD(), FedLC()], {}),
    "FedDyn, StructuredDeCov": (lambda: [FedDyn(0.1), StructuredDeCov(groups=3, gamma=0.1)], {}),
    "FedBN, SCAFFOLD": (lambda: [FedBN(), SCAFFOLD()], {"model": lambda: mlp(encoder=Normed())}),
    "MOON, FedUV of some": (
        lambda: [MOON(pool_size=2), FedUV()],
        {"cohort_size": 4, "max_rounds": 4, "local_epochs": 1, "gradient_clip_val": 0.5},
    ),
}


@pytest.mark.parametrize("name", LISTS)
def test_a_compiled_step_gives_what_it_gives_as_it_is(tmp_path, plainly, repeated, name):
    methods, how = LISTS[name]
    plain, _ = trained(tmp_path, 3, methods=methods, **how)
    repeated.clear()
    compiled, _ = trained(tmp_path / "compiled", 3, methods=methods, compile=True, **how)
    assert any(repeated)
    assert_near(plain, compiled, 1e-10)


@pytest.mark.parametrize("name", ["FedAvg", "MOON, FedUV of some"])
def test_any_number_of_workers_gives_the_same_bits(tmp_path, plainly, name):
    methods, how = LISTS[name]
    found = [trained(tmp_path, 2, methods=methods, visits=False, devices=n, compile=True, **how)[0] for n in (1, 2, 3)]
    for other in found[1:]:
        assert_same_bits(found[0]["state"], other["state"])
        assert found[0]["metrics"] == other["metrics"]


def test_the_only_group_is_cut_in_two_for_any_number_of_workers(tmp_path, plainly, monkeypatch):
    monkeypatch.setattr(choosing, "LEAST_CLIENTS", 3)
    monkeypatch.setattr(forming, "LONGER", 9.0)  # with so few clients it would not pay
    monkeypatch.setattr(forming, "BOTH", 9.0)
    sizes, halves = [], forming.halves

    def noted(*given):
        parts = halves(*given)
        sizes.append([*map(len, parts)])
        return parts

    monkeypatch.setattr(forming, "halves", noted)
    how = {"data": partial(digits, num_clients=7), "visits": False, "compile": True}
    found = [trained(tmp_path, "auto", devices=n, **how)[0] for n in (1, 2)]
    assert sizes
    assert all(len(parts) == 2 and sum(parts) == 7 for parts in sizes)
    assert_same_bits(found[0]["state"], found[1]["state"])
    assert found[0]["metrics"] == found[1]["metrics"]


@pytest.mark.skipif(not shutil.which("g++"), reason="torch compiles for a CPU with g++")
def test_code_in_cpp_does_the_same_but_for_rounding(tmp_path, repeated):
    plain, _ = trained(tmp_path, 3)
    repeated.clear()
    compiled, _ = trained(tmp_path / "compiled", 3, compile=True)
    assert any(repeated)
    assert_near(plain["state"], compiled["state"], 1e-10)


class Scheduled(LightningModule):
    """Its rate falls from visit to visit, or from step to step."""

    def __init__(self, interval):
        super().__init__()
        self.layer, self.interval = nn.Linear(8, 3), interval

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": StepLR(optimizer, 1, 0.9), "interval": self.interval},
        }


def test_a_program_is_compiled_once_for_all_numbers_of_clients_and_all_rates(tmp_path, plainly):
    how = {"model": lambda: Scheduled("epoch"), "data": arrays, "local_epochs": 1, "max_rounds": 3}
    compiled, _ = trained(tmp_path, 6, compile=True, **how)
    assert len(plainly) == 1
    plain, _ = trained(tmp_path / "plain", 6, **how)
    assert_near(plain["state"], compiled["state"], 1e-10)


def fails(*args, **how):
    raise RuntimeError("no compiler here\nand much more")


UNCOMPILED = {
    "a step that reads the epoch": ({"methods": lambda: [FedProto()]}, "epoch", None),
    "a rate that changes": ({"model": lambda: Scheduled("step"), "data": arrays}, "from step to step", None),
    "a convolution": (
        {"model": lambda: mlp(encoder=FedCKACNN(1, 16)), "data": partial(digits, image_size=16, train_size=120)},
        "a convolution",
        None,
    ),
    "no compiler": ({}, "no compiler here", fails),
}


@pytest.mark.parametrize("name", UNCOMPILED)
def test_what_cannot_be_compiled_runs_as_it_is_and_says_so_once(tmp_path, monkeypatch, plainly, repeated, name):
    how, words, compile_ = UNCOMPILED[name]
    plain, _ = trained(tmp_path, 3, **how)
    repeated.clear()
    if compile_ is not None:
        monkeypatch.setattr(CompiledPrograms, "_compile", compile_)
    with warned("trainer.compile: ", words) as caught:
        other, _ = trained(tmp_path / "compiled", 3, compile=True, **how)
    assert sum("trainer.compile" in str(one.message) for one in caught) == 1
    assert not any(repeated)
    assert_same_bits(plain["state"], other["state"])


class Short(LightningModule):
    """Logs a number of short batches, which cannot be repeated."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def training_step(self, batch, batch_idx):
        if len(batch[0]) < 8:
            self.log("short", 1.0)
        return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Noisy(Short):
    """Adds noise to its batches."""

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.layer(batch[0] + torch.randn_like(batch[0])), batch[1])


def test_a_program_that_cannot_be_repeated_leaves_the_others_compiled(tmp_path, plainly, repeated):
    """Else the bits of a group would depend on which groups its worker has trained before."""
    how = {"model": Short, "data": arrays, "local_epochs": 1, "visits": False, "compile": True}
    found = []
    for rounds in (2, 4):
        repeated.clear()
        with warned("trainer.compile: ", "a number to be logged"):
            trained(tmp_path / str(rounds), 6, **how, max_rounds=rounds)
        found.append(sum(repeated))
    assert found[1] > found[0]


def test_a_program_that_fails_to_compile_leaves_the_others_compiled(tmp_path, monkeypatch, plainly, repeated):
    calls, compile_ = [], CompiledPrograms._compile

    def second(*given):
        calls.append(1)
        return fails() if len(calls) == 1 else compile_(*given)

    monkeypatch.setattr(CompiledPrograms, "_compile", second)
    with warned("trainer.compile: ", "no compiler here"):
        trained(tmp_path, 3, methods=lambda: [SCAFFOLD()], visits=False, compile=True)
    assert any(repeated)


def test_a_step_that_draws_random_numbers_is_not_compiled(tmp_path, plainly, repeated):
    how = {"model": Noisy, "data": arrays, "visits": False}
    with warned("trainer.compile: ", "draws random numbers") as caught:
        compiled, _ = trained(tmp_path, 6, compile=True, **how)
    assert len([one for one in caught if "trainer.compile" in str(one.message)]) == 1
    plain, _ = trained(tmp_path / "plain", 6, **how)
    assert_same_bits(plain["state"], compiled["state"])


def test_a_run_resumes_in_the_groups_that_it_began_in(tmp_path, plainly, monkeypatch):
    monkeypatch.setattr(choosing, "LEAST_CLIENTS", 3)
    how = {"visits": False, "compile": True, "name": "run", "checkpoint_every_n_rounds": 1}
    trained(tmp_path, "auto", **how, max_rounds=1)
    with refused("ckpt_path=", "trainer.clients_per_step"):
        trained(tmp_path, 128, **how, max_rounds=2, ckpt_path="last")


def test_a_compiled_step_that_gives_other_values_is_not_used(tmp_path, monkeypatch, plainly):
    compiled = CompiledPrograms.compiled

    def wrong(*given):
        program = compiled(*given)
        return lambda *inputs: [2 * output for output in program(*inputs)]

    alone, _ = trained(tmp_path, 1)
    monkeypatch.setattr(CompiledPrograms, "compiled", wrong)
    with warned("one by one: a compiled step gives other values", "trainer.compile"):
        other, _ = trained(tmp_path / "compiled", 3, compile=True)
    assert_near(alone["state"], other["state"], 1e-10)
