"""Clients side by side under ``trainer.compile``: steps are compiled once, and give what they give as they are."""

import shutil
from functools import partial

import pytest
import torch
from helpers.beside import assert_near, digits, mlp, normed, rows, trained
from helpers.errors import warned
from helpers.runs import assert_same_bits
from helpers.tiers import sample
from helpers.tiny import TinyModule
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from fl_lightning import Method
from fl_lightning.engine import run
from fl_lightning.engine.groups import choosing
from fl_lightning.methods import MOON, SCAFFOLD, FedBN, FedDyn, FedLC, FedProx, FedUV, StructuredDeCov
from fl_lightning.models import FedCKACNN

TAPS = {"representation": "body", "logits": "head"}
ROWS = partial(rows, (16, 32, 16, 24, 40, 24))
# neither short batches nor momentum, which would be programs of their own
PLAIN = partial(SGD, lr=0.1)
TINY = {"model": partial(TinyModule, PLAIN), "data": ROWS, "taps": TAPS, "local_epochs": 1, "visits": False}


@pytest.fixture(autouse=True)
def _quick(undrawn, monkeypatch):
    monkeypatch.setattr(choosing, "LEAST_CLIENTS", 2)
    monkeypatch.setattr(run, "code_of_run", lambda *args: {})
    # code for one size alone would be compiled again for the next
    with torch._dynamo.config.patch(recompile_limit=1):
        yield


class Compiler:
    """Takes the place of ``torch.compile``: runs each trace as ``compile_`` makes it, and counts.

    Attributes:
        traces: number of functions to compile.
        steps: number of calls but for the first of each, which is a trial.
    """

    def __init__(self, compile_):
        self.compile, self.traces, self.calls = compile_, 0, 0

    def __call__(self, function, **how):
        if not isinstance(function, torch.fx.GraphModule):
            return function  # a module's forward
        self.traces += 1
        compiled = self.compile(function, **how)

        def counted(*inputs):
            self.calls += 1
            return compiled(*inputs)

        return counted

    @property
    def steps(self):
        return self.calls - self.traces


@pytest.fixture
def compiler(monkeypatch):
    """A trace is run as it is, which takes less time and no compiler for C++."""
    compiler = Compiler(lambda function, **how: function)
    monkeypatch.setattr(torch, "compile", compiler)
    return compiler


METHODS = {
    "FedProx, SCAFFOLD, FedLC": (lambda: [FedProx(0.1), SCAFFOLD(), FedLC()], TINY),
    "FedDyn, StructuredDeCov": (lambda: [FedDyn(0.1), StructuredDeCov(groups=3, gamma=0.1)], TINY),
    "FedBN": (lambda: [FedBN()], TINY | {"model": partial(normed, 8), "taps": None}),
    "MOON, FedUV of some": (
        lambda: [MOON(pool_size=2), FedUV()],
        {"cohort_size": 4, "max_rounds": 3, "local_epochs": 1, "gradient_clip_val": 0.5},
    ),
    "images": (list, {"local_epochs": 1}),
}


@pytest.mark.parametrize("name", sample([*METHODS], *[name for name in METHODS if name != "MOON, FedUV of some"]))
def test_a_compiled_step_gives_what_it_gives_as_it_is(tmp_path, compiler, name):
    methods, how = METHODS[name]
    plain, _ = trained(tmp_path, 3, methods=methods, **how)
    assert not compiler.traces
    compiled, _ = trained(tmp_path / "compiled", 3, methods=methods, compile=True, **how)
    assert compiler.steps > 0
    assert_near(plain, compiled, 1e-10)


@pytest.mark.thorough
@pytest.mark.skipif(not shutil.which("g++"), reason="torch compiles for a CPU with g++")
def test_code_in_cpp_does_the_same_but_for_rounding(tmp_path, monkeypatch):
    compiler = Compiler(torch.compile)
    monkeypatch.setattr(torch, "compile", compiler)
    plain, _ = trained(tmp_path, 3, **TINY)
    compiled, _ = trained(tmp_path / "compiled", 3, compile=True, **TINY)
    assert compiler.steps > 0
    assert_near(plain["state"], compiled["state"], 1e-10)


class Scheduled(TinyModule):
    """Its rate falls from visit to visit."""

    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": StepLR(optimizer, 1, 0.9), "interval": "epoch"}]


class ReadsEpoch(Method):
    """Reads the number of the pass."""

    def penalty(self, client, step):
        return torch.tensor(float(client.epoch))


class Short(TinyModule):
    """Logs a number of short batches, which cannot be repeated."""

    def training_step(self, batch, batch_idx):
        if len(batch[0]) < 8:
            self.log("short", 1.0)
        return self.loss(batch)


class Noisy(TinyModule):
    """Adds noise to its batches."""

    def forward(self, x):
        return super().forward(x + torch.randn_like(x))


def test_a_program_is_compiled_once_for_all_numbers_of_clients_and_all_rates(tmp_path, compiler):
    how = {**TINY, "model": Scheduled, "max_rounds": 3}
    compiled, _ = trained(tmp_path, 6, compile=True, **how)
    assert compiler.traces == 1
    plain, _ = trained(tmp_path / "plain", 6, **how)
    assert_near(plain["state"], compiled["state"], 1e-10)


def fails(*args, **how):
    raise RuntimeError("no compiler here\nand much more")


UNCOMPILED = {
    "a step that reads the epoch": ({"methods": lambda: [ReadsEpoch()]}, "epoch"),
    "random numbers": ({"model": Noisy}, "draws random numbers"),
    "a convolution": (
        {
            "model": lambda: mlp(encoder=FedCKACNN(1, 16)),
            "data": partial(digits, image_size=16, train_size=120),
            "taps": None,
        },
        "a convolution",
    ),
    "no compiler": ({}, "no compiler here"),
}


@pytest.mark.parametrize("name", UNCOMPILED)
def test_what_cannot_be_compiled_runs_as_it_is_with_one_warning(tmp_path, compiler, name):
    given, words = UNCOMPILED[name]
    how = {**TINY, **given}
    plain, _ = trained(tmp_path, 3, **how)
    if name == "no compiler":
        compiler.compile = fails
    with warned("trainer.compile: ", words) as caught:
        other, _ = trained(tmp_path / "compiled", 3, compile=True, **how)
    assert sum("trainer.compile" in str(one.message) for one in caught) == 1
    assert compiler.steps <= 0
    assert_same_bits(plain["state"], other["state"])


def test_a_program_that_cannot_be_repeated_leaves_the_others_compiled(tmp_path, compiler):
    """Else the bits of a group would depend on which groups its worker has trained before."""
    steps = []
    how = {**TINY, "model": partial(Short, PLAIN), "data": rows, "compile": True}
    for rounds in (2, 4):
        before = compiler.steps
        with warned("trainer.compile: ", "a number to be logged"):
            trained(tmp_path / str(rounds), 6, **how, max_rounds=rounds)
        steps.append(compiler.steps - before)
    assert steps[1] > steps[0]


def test_a_program_that_fails_to_compile_leaves_the_others_compiled(tmp_path, compiler):
    compiler.compile = lambda function, **how: fails if compiler.traces == 1 else function
    with warned("trainer.compile: ", "no compiler here"):
        trained(tmp_path, 3, methods=lambda: [SCAFFOLD()], compile=True, **TINY)
    assert compiler.steps > 0


def test_a_compiled_step_that_gives_other_values_is_not_used(tmp_path, compiler):
    alone, _ = trained(tmp_path, 1, **TINY)
    compiler.compile = lambda function, **how: lambda *inputs: [2 * output for output in function(*inputs)]
    with warned("one by one: a compiled step gives other values", "trainer.compile"):
        other, _ = trained(tmp_path / "compiled", 3, compile=True, **TINY)
    assert_near(alone["state"], other["state"], 1e-10)
