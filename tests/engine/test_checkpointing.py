"""A run that resumes from a checkpoint ends with the bits of one that never stopped."""

import csv
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from helpers.checkpoints import bytes_of
from helpers.errors import assert_names, refused
from helpers.methods import METHODS
from helpers.runs import Stops, assert_same_bits, history, plain_sgd_model, small_data, small_trainer
from torch.optim import Adam

from fl_lightning.callbacks import SpectrumMonitor
from fl_lightning.methods import MOON
from fl_lightning.utilities.errors import ClientError


@pytest.fixture(autouse=True)
def _undrawn(undrawn):
    """Only what runs leave in checkpoints and tables is tested here."""


def fit(tmp_path, methods=(), ckpt_path=None, stop=None, name="run", **kwargs):
    callbacks = [SpectrumMonitor(), *([Stops(stop)] if stop is not None else [])]
    given = {"callbacks": callbacks, "max_rounds": 4, "participation": 0.6, "name": name, **kwargs}
    trainer = small_trainer(tmp_path, **given)
    try:
        trainer.fit(plain_sgd_model(), data(), list(methods), ckpt_path)
    except ClientError:
        assert stop is not None
    return trainer


def data():
    return small_data(num_clients=5, train_size=100, test_size=30)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The folder of a run of MOON that stopped in its third round, and a run of four rounds that did not."""
    folder = tmp_path_factory.mktemp("stopped")
    fit(folder, [MOON()], stop=2)
    return folder / "run", fit(folder, [MOON()], name="whole")


@pytest.fixture
def run_dir(tmp_path, stopped):
    """A copy of the run that stopped, in ``tmp_path``."""
    shutil.copytree(stopped[0], tmp_path / "run")
    return tmp_path / "run/version_0"


def rows(folder):
    with (folder / "metrics.csv").open() as file:
        return [
            {k: v for k, v in row.items() if not k.startswith(("time/", "placed/"))} for row in csv.DictReader(file)
        ]


@pytest.mark.parametrize(("name", "workers"), [("SCAFFOLD", (2, 1)), ("FedProto", (1, 1))])
def test_a_run_that_was_stopped_ends_with_the_bits_of_one_that_was_not(tmp_path, name, workers):
    """Those of all methods, after other numbers of workers, are in test_same_bits."""
    how = {"threads_per_worker": 1, "server_optimizer": lambda p: Adam(p, lr=0.05)}
    whole = fit(tmp_path, METHODS[name](), name="whole", **how)
    fit(tmp_path, METHODS[name](), stop=2, devices=workers[0], **how)
    trainer = fit(tmp_path, METHODS[name](), "last", devices=workers[1], **how)
    assert_same_bits(whole.server.state, trainer.server.state)
    assert history(whole) == history(trainer)
    assert rows(tmp_path / "whole/version_0") == rows(tmp_path / "run/version_0")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["version_0"]
    assert np.load(tmp_path / "run/version_0/spectra.npz")["rounds"].tolist() == [0, 1, 2, 3]


def test_a_copy_of_a_checkpoint_continues_in_a_new_version(tmp_path, stopped, run_dir):
    folder = run_dir / "checkpoints"
    shutil.copyfile(folder / "last.ckpt", folder / "mine.ckpt")
    before = bytes_of(run_dir)
    beside = fit(tmp_path, [MOON()], folder / "mine.ckpt")
    assert beside.run_dir.name == "version_1"
    assert before == bytes_of(run_dir)
    shutil.move(folder, tmp_path / "elsewhere")
    fit(tmp_path, [MOON()], tmp_path / "elsewhere/last.ckpt", max_rounds=3)
    shutil.rmtree(tmp_path / "elsewhere")
    moved = fit(tmp_path, [MOON()], "last")
    assert moved.run_dir.name == "version_2"
    for again in (beside, moved):
        assert_same_bits(stopped[1].server.state, again.server.state)


@pytest.mark.parametrize("path", ["version_0/checkpoints/last.ckpt", "checkpoints/last.ckpt", "last.ckpt"])
def test_a_run_resumes_from_within_its_folder(tmp_path, monkeypatch, path):
    folder = fit(tmp_path, max_rounds=1).run_dir
    monkeypatch.chdir(folder.joinpath("checkpoints/last.ckpt").parents[path.count("/")])
    assert fit(tmp_path, max_rounds=2, ckpt_path=path).run_dir == folder


def test_a_resumed_run_without_a_round_left_has_the_metrics_of_its_last_round(tmp_path):
    metrics = fit(tmp_path, max_rounds=2).metrics
    again = fit(tmp_path, max_rounds=2, ckpt_path="last")
    assert again.metrics == metrics == again.history[-1]


def test_the_last_checkpoint_is_that_of_the_last_due_round_and_old_memories_are_gone(tmp_path):
    fit(tmp_path, [MOON()], stop=3, checkpoint_every_n_rounds=2)
    folder = tmp_path / "run/version_0/checkpoints"
    assert torch.load(folder / "last.ckpt", weights_only=True)["round"] == 2
    assert sorted(path.name for path in folder.iterdir()) == ["clients", "last.ckpt"]
    files = {path.name for path in (folder / "clients").iterdir()}
    held = torch.load(folder / "last.ckpt", weights_only=True)["clients"]
    names = {name for name, _ in held.values()}
    assert files >= names and len({name.split("-")[0] for name in names}) == len(held)


def test_a_client_is_written_once_a_visit_and_the_checkpoint_grows_by_the_metrics_alone(tmp_path):
    sizes = []
    for rounds in (2, 6):
        how = {"cohort_size": 2, "participation": 1.0, "max_rounds": rounds, "name": str(rounds)}
        trainer = fit(tmp_path, [MOON()], **how)
        folder = trainer.run_dir / "checkpoints"
        # of the last two rounds, the last visit of each client
        dones = [{k: r + 1 for r in range(done) for k in trainer.sampler(0, r, 5, 2)} for done in (rounds, rounds - 1)]
        names = {f"{k}-{r}.pt" for checkpoint in dones for k, r in checkpoint.items()}
        assert {path.name for path in (folder / "clients").iterdir()} == names
        sizes.append((folder / "last.ckpt").stat().st_size - 20 * sum(map(len, trainer.history)))
    assert sizes[1] < sizes[0] + 1000


def test_a_restart_by_torchrun_continues_and_a_first_start_does_not(tmp_path, run_dir, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert len(fit(tmp_path, [MOON()]).history) == 4
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["version_0"]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert fit(tmp_path, [MOON()], max_rounds=1).run_dir.name == "version_1"


def test_a_missing_checkpoint_is_refused(tmp_path):
    for path, word in ((tmp_path / "nothing.ckpt", "nothing.ckpt"), ("", "last"), (".", "last")):
        with refused("ckpt_path='", word):
            fit(tmp_path, [], path)


def test_last_without_a_run_is_refused_with_the_names_of_others(tmp_path):
    fit(tmp_path, [], max_rounds=1, name="other")
    for command in (
        partial(fit, tmp_path, []),
        partial(small_trainer(tmp_path, name="run").test, plain_sgd_model(), data()),
    ):
        with refused("ckpt_path='last'", str(tmp_path / "run"), "trainer.name", "other"):
            command(ckpt_path="last")
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_last_of_a_run_without_a_checkpoint_begins_with_round_0_and_says_so(tmp_path, said):
    (tmp_path / "run" / "version_0").mkdir(parents=True)
    assert len(fit(tmp_path, [], "last", max_rounds=1).history) == 1
    assert_names(said(), "round 0")
    assert len(fit(tmp_path, [], "last", max_rounds=2).history) == 2
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"version_0", "version_1"}
