"""Fixtures of all tests: one thread, one seed, and a small run on the embedded digits."""

import functools
import gc
import importlib.metadata
import logging
import os
import sys
from pathlib import Path

import pytest
import sklearn.datasets
import torch
from helpers.notes import noted
from helpers.runs import train
from lightning.fabric.utilities import registry
from lightning.fabric.utilities.rank_zero import rank_zero_only

from fl_lightning.cli import main
from fl_lightning.cli.cli import FederatedCLI
from fl_lightning.client.run_context import RunContext

# a program that tests start in another process
collect_ignore = ["helpers/flower.py"]


SMOKE = Path(__file__).resolve().parents[1] / "experiments" / "smoke"
# attributes of the command line that building a parser sets, by command
PARSER = ("parser", "_subcommand_method_arguments", "_subcommand_parsers")
PARSERS = {}


# a small run lists the installed packages twice, and reads the digits: more than a third of its time
registry.entry_points = functools.cache(registry.entry_points)
importlib.metadata.version = functools.cache(importlib.metadata.version)
sklearn.datasets.load_digits = functools.cache(sklearn.datasets.load_digits)


def pytest_collection_finish():
    gc.freeze()  # the libraries and the tests are a million objects, which each collection would look through


def pytest_sessionfinish():
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def _same_start_of_shared_runs(tmp_path_factory):
    """The runs that several tests share are made before the fixtures of the first of these.

    Decoded images are kept in a folder of the tests' own.
    """
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PL_GLOBAL_SEED", "0")
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _same_start(monkeypatch):
    torch.set_num_threads(1)  # several cost more than they gain on models of this size
    monkeypatch.setattr(sys, "argv", ["cli.py"])
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # no test cuts the power
    monkeypatch.setattr(rank_zero_only, "rank", 0)  # a test that plays another worker leaves its rank behind
    torch.manual_seed(0)
    noted.clear()


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory):
    """The folder of a run of three rounds by the command line, with spectra; tests only read it, or copy it first."""
    folder = tmp_path_factory.mktemp("finished")
    size = ["--trainer.max_rounds=3", "--data.train_size=200", "--data.test_size=100"]
    where = [f"--trainer.default_root_dir={folder}", "--trainer.name=finished"]
    main(["fit", f"--config={SMOKE / 'fedavg.yaml'}", *size, *where])
    return folder / "finished" / "version_0"


@pytest.fixture
def run(tmp_path):
    """``run(methods)`` trains and returns (final global state, trainer)."""
    return functools.partial(train, tmp_path)


@pytest.fixture
def undrawn(monkeypatch):
    """Skip the figures, which take most of the time of a small run and are tested elsewhere."""
    monkeypatch.setattr("fl_lightning.plotting.figures.figures", lambda plots: ())
    monkeypatch.setattr(RunContext, "log_figure", lambda *args: None)


@pytest.fixture
def one_parser(monkeypatch):
    """Commands are parsed by one parser each, as the cells of a suite are: building it takes half of a command."""
    set_up = FederatedCLI.setup_parser

    def once(self, *given):
        command = self._command
        if command not in PARSERS:
            set_up(self, *given)
            PARSERS[command] = {name: vars(self)[name] for name in PARSER}
        vars(self).update(PARSERS[command])

    monkeypatch.setattr(FederatedCLI, "setup_parser", once)


@pytest.fixture
def said(caplog, monkeypatch):
    """``said()`` is what Lightning's logger said so far, a message a line."""
    # the name depends on the imported packages; other tests change the levels
    for name in ("lightning.fabric", "lightning.pytorch", "lightning_fabric", "pytorch_lightning"):
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
        caplog.set_level(logging.INFO, logger=name)
    caplog.set_level(logging.INFO)
    return lambda: "\n".join(caplog.messages)
