"""The workers of one machine meet where no other user can: in a folder of their own, over loopback."""

import os
import socket
import stat
import tempfile
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from helpers.errors import refused
from helpers.runs import small_data, small_model, small_trainer
from helpers.workers import listening
from torch import distributed

from fl_lightning.callbacks import Callback
from fl_lightning.engine.processes import meeting

needs_proc = pytest.mark.skipif(not Path("/proc/net/tcp").is_file(), reason="the system does not list its sockets")


class Meets(Callback):
    """Keeps, of each worker in the second round, where it listens and what the folder is in which they have met."""

    def on_client_end(self, trainer, client):
        if trainer.server.round == 1:
            folder = Path(os.environ[meeting.FOLDER])
            self.mine = [*listening()], folder, stat.S_IMODE(folder.stat().st_mode), folder.stat().st_uid

    def on_last_round_end(self, trainer):
        self.all = trainer.gather(self.mine)


@needs_proc
def test_workers_of_one_machine_listen_on_loopback_and_leave_no_folder(tmp_path):
    meets = Meets()
    small_trainer(tmp_path, devices=2, callbacks=[meets]).fit(small_model(), small_data())
    assert len(meets.all) == 2
    for places, folder, mode, owner in meets.all:
        assert {address for address, _ in places} == {"127.0.0.1"}
        assert (mode, owner) == (0o700, os.geteuid())
        assert not folder.exists()


def test_a_folder_for_temporary_files_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with refused("TMPDIR"):
        small_trainer(tmp_path / "run", devices=2).fit(small_model(), small_data())
    assert not (tmp_path / "run").exists()


def by_threads(tmp_path, size=2):
    """What each of several threads gets that connect as the workers of one machine: a group, or an error."""
    outcomes = [None] * size

    def work(rank):
        try:
            outcomes[rank] = meeting.connect(meeting.meet_in(tmp_path), rank, size, one_machine=True)
        except RuntimeError as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    return outcomes


@needs_proc
def test_a_program_that_connects_in_the_place_of_a_worker_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(meeting, "JOIN", 1.0)
    create, before, strangers = distributed.ProcessGroupGloo.create_device, listening(), []

    def create_and_connect(**how):
        device = create(**how)
        for place in listening().keys() - before.keys():
            # the numbers by which the two workers would know each other's connection
            for number in range(2):
                strangers.append(socket.create_connection(place))
                strangers[-1].sendall(number.to_bytes(8, "little"))
        return device

    monkeypatch.setattr(distributed.ProcessGroupGloo, "create_device", create_and_connect)
    try:
        assert all(isinstance(outcome, RuntimeError) for outcome in by_threads(tmp_path))
    finally:
        for stranger in strangers:
            stranger.close()


@needs_proc
def test_nobody_connects_to_workers_that_have_met_and_what_is_connected_stays(tmp_path):
    before = listening()
    groups = by_threads(tmp_path)
    opened = [place for place in listening() if place not in before]
    assert len(opened) == 2
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        meeting.close_to_others([listener.fileno()])
        if connects(listener.getsockname()):
            pytest.skip("the kernel has no signed connections")
    assert not any(connects(place) for place in opened)
    works = [group.allreduce([torch.ones(3)]) for group in groups]
    assert all(work.wait(timedelta(seconds=120)) for work in works)


def connects(place):
    try:
        socket.create_connection(place, timeout=0.3).close()
    except OSError:
        return False
    return True


def test_the_store_of_tasks_on_one_machine_is_on_loopback():
    with socket.socket() as probe:
        probe.bind((meeting.LOOPBACK, 0))
        port = probe.getsockname()[1]
    store = meeting.meet(0, 2, meeting.LOOPBACK, port)
    other = meeting.meet(1, 2, meeting.LOOPBACK, port)
    store.set("a", "b")
    assert other.get("a") == b"b"
    if Path("/proc/net/tcp").is_file():
        assert (meeting.LOOPBACK, port) in listening()
