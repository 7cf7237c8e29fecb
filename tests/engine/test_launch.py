"""Starting the workers: by forks, by running the program again, or not at all, and the messages about it."""

import multiprocessing
import os
import signal
import socket
from pathlib import Path

import pytest
import torch
from helpers.errors import assert_names, refused
from helpers.runs import small_data, small_model, small_trainer
from helpers.workers import listening
from lightning.fabric import connector
from lightning.fabric.plugins.environments.lightning import LightningEnvironment, find_free_network_port
from lightning.fabric.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

from fl_lightning.callbacks import Callback
from fl_lightning.distributed import launcher, rendezvous
from fl_lightning.utilities.errors import ClientError, LostWorkerError


@pytest.fixture
def notebook(monkeypatch):
    """A prompt, which has no program to run again."""
    monkeypatch.setattr(launcher, "IS_INTERACTIVE", True)
    monkeypatch.setattr(connector, "_IS_INTERACTIVE", True)


@pytest.fixture
def macos(monkeypatch):
    monkeypatch.setattr(launcher.sys, "platform", "darwin")
    monkeypatch.setattr(launcher.platform, "system", lambda: "Darwin")


def test_auto_is_one_worker_in_this_process_where_none_can_be_forked(tmp_path, macos, said):
    trainer = small_trainer(tmp_path, devices="auto", max_rounds=1)
    trainer.fit(small_model(), small_data())
    assert trainer.world_size == 1
    assert_names(said(), "trainer.devices=auto", "1 worker", "Darwin")


def test_several_workers_run_the_program_anew_where_they_cannot_be_forked(tmp_path, macos, said, monkeypatch):
    monkeypatch.setattr(launcher, "can_run_anew", lambda: True)
    trainer = small_trainer(tmp_path, devices=2)
    assert not launcher.uses_fork(trainer)
    fabric = launcher.build_fabric(trainer, *launcher.devices_and_nodes(trainer, small_data()))
    assert isinstance(fabric.strategy.launcher, _SubprocessScriptLauncher)
    assert_names(said(), "trainer.devices=2", "Darwin")


@pytest.mark.parametrize("obstacle", ["Darwin", "GPU", "trainer.threads_per_worker=2"])
def test_several_workers_are_refused_in_a_notebook_where_they_cannot_be_forked(
    tmp_path, request, notebook, monkeypatch, obstacle
):
    if obstacle == "Darwin":
        request.getfixturevalue("macos")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: obstacle == "GPU")
    with refused("trainer.devices=2", obstacle):
        threads = 2 if "threads" in obstacle else 1
        small_trainer(tmp_path, devices=2, threads_per_worker=threads).fit(small_model(), small_data())
    assert not list(tmp_path.iterdir())


def test_workers_are_forked_in_a_notebook(tmp_path, notebook):
    trainer = small_trainer(tmp_path, devices=2, max_rounds=1)
    trainer.fit(small_model(), small_data())
    assert trainer.world_size == 2


class Fails(Callback):
    """Fails on one worker alone, with an error that no pipe takes at once."""

    def on_round_end(self, trainer):
        if trainer.global_rank == 1:
            raise ClientError("long" * 2**16)


def test_a_worker_that_fails_with_a_long_error_ends(tmp_path):
    trainer = small_trainer(tmp_path, devices=2, callbacks=[Fails()])
    with refused("worker 1", "ClientError", kind=LostWorkerError):
        trainer.fit(small_model(), small_data())


def test_devices_that_an_accelerator_does_not_take_are_refused_with_a_remedy(tmp_path):
    with refused("trainer.devices=[1]"):
        small_trainer(tmp_path, devices=[1]).fit(small_model(), small_data())


# ---------------------------------------------------------------------- where the workers meet


class Listens(Callback):
    """Keeps where each worker listens."""

    def on_last_round_end(self, trainer):
        self.all = trainer.gather({address for address, _ in listening()})


@pytest.mark.skipif(not Path("/proc/net/tcp").is_file(), reason="the system does not list its sockets")
def test_workers_of_one_machine_listen_on_loopback_whatever_the_port(tmp_path, monkeypatch):
    listens = Listens()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        small_trainer(tmp_path / "run", devices=2, callbacks=[listens]).fit(small_model(), small_data())
    assert listens.all == [{"127.0.0.1"}] * 2


@pytest.mark.parametrize(("node", "missing"), [(0, "worker 1 of 2"), (1, "MASTER_PORT=")])
def test_a_node_that_never_comes_is_named_and_nothing_is_written(tmp_path, monkeypatch, node, missing):
    monkeypatch.setattr(rendezvous, "JOIN", 0.5)
    monkeypatch.setattr(LightningEnvironment, "creates_processes_externally", True)
    # the run would leave a port behind that it finds itself
    where = {"LOCAL_RANK": "0", "NODE_RANK": node, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": find_free_network_port()}
    for name, value in where.items():
        monkeypatch.setenv(name, str(value))
    with refused(missing):
        small_trainer(tmp_path, num_nodes=2).fit(small_model(), small_data())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("lost", [1, 2])
def test_a_worker_that_ends_between_joining_and_connecting_ends_the_others(tmp_path, monkeypatch, lost):
    gloo = launcher.connect

    def connect(store, rank, *rest):
        if rank == lost:
            os.kill(os.getpid(), signal.SIGKILL)
        return gloo(store, rank, *rest)

    monkeypatch.setattr(launcher, "connect", connect)
    with refused(f"worker {lost}", "SIGKILL", kind=LostWorkerError):
        small_trainer(tmp_path, devices=3).fit(small_model(), small_data())
    assert not multiprocessing.active_children()
