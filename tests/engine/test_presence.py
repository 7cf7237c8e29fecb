"""Workers that do not come, fall silent or are late are named."""

import multiprocessing
import os
import re
import signal
import time
from itertools import pairwise

import pytest
from helpers.errors import assert_names, refused, warned
from helpers.runs import assert_same_bits, small_data, small_model, small_trainer
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.plugins.environments.lightning import find_free_network_port

from fl_lightning.callbacks import Callback
from fl_lightning.engine.processes import meeting, presence, workers
from fl_lightning.errors import LostWorkerError


def sooner(monkeypatch, **seconds):
    for name, value in seconds.items():
        for module in (presence, meeting, workers):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Seconds instead of minutes. A worker is silent for many of its signs of life before it counts as lost."""
    sooner(monkeypatch, BEAT=0.05, LOOK=0.2, PATIENCE=1.0, SILENCE=3.0, JOIN=3.0)


class At(Callback):
    """Does something on one worker in the second round."""

    def __init__(self, rank, does):
        self.rank, self.does = rank, does

    def on_client_end(self, trainer, client):
        if trainer.global_rank == self.rank and trainer.server.round == 1:
            self.does()


def fit(tmp_path, *callbacks):
    trainer = small_trainer(tmp_path, devices=2, callbacks=list(callbacks), threads_per_worker=1)
    trainer.fit(small_model(), small_data())
    return trainer


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def test_a_worker_that_is_stopped_is_named_and_then_lost(tmp_path):
    with (
        warned("round 1", "worker 1", "process", "stopped"),
        refused("round 1", "worker 1", "process", kind=LostWorkerError),
    ):
        fit(tmp_path, At(1, stop))
    assert (tmp_path / "fedavg/version_0/checkpoints/last.ckpt").is_file()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_is_stopped_and_goes_on_in_time_changes_nothing(tmp_path, monkeypatch, rank):
    """The other worker sends for it as soon as it misses its signs of life."""
    sooner(monkeypatch, SILENCE=300.0)
    alone = small_trainer(tmp_path, threads_per_worker=1)
    alone.fit(small_model(), small_data())
    missed, left = [], [stop]

    def go_on(text, **how):
        if "no sign of life" in text:
            missed.append(os.kill(int(re.search(r"process (\d+)", text)[1]), signal.SIGCONT))

    class Missed(Callback):
        def on_last_round_end(self, trainer):
            self.of = trainer.gather(len(missed))

    def run():
        monkeypatch.setattr(presence.warnings, "warn", go_on)
        counts = Missed()
        trainer = fit(tmp_path, At(rank, lambda: left and left.pop()()), counts)
        assert counts.of[1 - rank] > 0
        assert_same_bits(trainer.server.state, alone.server.state)

    # in a process of its own: where this one is stopped, so are the tests
    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    assert process.exitcode == 0


def test_a_worker_that_is_late_is_named_and_waited_for(tmp_path, monkeypatch):
    """It is late until it was named three times: by then a silent one would be lost."""
    told, thrice = [], tmp_path / "thrice"

    def note(text, **how):
        if "alive" in text:
            assert_names(text, "round 1", "worker 1")
            told.append(int(re.search(r"(\d+) s: alive", text)[1]))
        if len(told) == 3:
            thrice.touch()

    monkeypatch.setattr(presence.warnings, "warn", note)
    trainer = fit(tmp_path / "runs", At(1, lambda: wait_for(thrice)))
    assert len(trainer.history) == 2
    # ever more rarely, not at each of the looks
    assert all(later >= 2 * sooner for sooner, later in pairwise(told)) and told[2] >= presence.SILENCE


def wait_for(path):
    for _ in range(6000):
        if path.exists():
            return
        time.sleep(0.02)
    raise AssertionError(f"{path} does not come")


def test_a_node_that_never_comes_is_named_and_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(LightningEnvironment, "creates_processes_externally", True)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(find_free_network_port()))  # which the run would leave behind
    trainer = small_trainer(tmp_path, num_nodes=2)
    named = "worker 1 (node 1) of 2"
    with (
        warned(named),
        refused(named),
    ):
        trainer.fit(small_model(), small_data())
    assert not list(tmp_path.iterdir())


def test_a_first_worker_that_never_comes_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(LightningEnvironment, "creates_processes_externally", True)
    variables = {"LOCAL_RANK": "0", "NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with (
        warned("worker 0", "127.0.0.1:29999"),
        refused("MASTER_PORT=29999"),
    ):
        small_trainer(tmp_path, num_nodes=2).fit(small_model(), small_data())
