"""Temporary folders: those of processes that were killed are removed by the next one."""

import multiprocessing
import os
import signal
import tempfile

import pytest

from fl_lightning.records import temporary
from fl_lightning.records.temporary import TemporaryFolder


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(temporary, "SECONDS_TO_LOCK", -1.0)


def killed():
    folder = TemporaryFolder("mine-")
    (folder.path / "file").write_text("large")
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_folder_of_a_killed_process_is_removed_by_the_next(tmp_path):
    process = multiprocessing.get_context("fork").Process(target=killed)
    process.start()
    process.join()
    (left,) = tmp_path.iterdir()
    folder = TemporaryFolder("mine-")
    assert list(tmp_path.iterdir()) == [folder.path]
    assert folder.path != left
    folder.close()
    assert not list(tmp_path.iterdir())


def test_folders_in_use_new_ones_and_those_of_others_stay(tmp_path, monkeypatch):
    theirs = tmp_path / "mine-theirs"
    theirs.mkdir()
    first = TemporaryFolder("mine-")
    second = TemporaryFolder("mine-")
    assert {*tmp_path.iterdir()} == {theirs, first.path, second.path}
    first._lock.close()
    monkeypatch.setattr(temporary, "SECONDS_TO_LOCK", 60.0)
    temporary.remove_leftovers("mine-")
    assert first.path.exists()


def put_fifo(lock):
    os.mkfifo(lock)


def put_link(lock):
    lock.symlink_to(lock.parents[1] / "fifo")


def put_folder(lock):
    lock.mkdir()


@pytest.mark.parametrize("put", [put_fifo, put_link, put_folder])
def test_what_is_no_file_is_neither_waited_for_nor_removed(tmp_path, put):
    os.mkfifo(tmp_path / "fifo")
    os.mkfifo(tmp_path / "mine-fifo")
    (tmp_path / "mine-link").symlink_to(tmp_path)
    (tmp_path / "mine-x").mkdir()
    put(tmp_path / "mine-x" / "lock")
    before = {*tmp_path.iterdir()}
    # a FIFO that is opened waits for its other end, and this test for its timeout
    TemporaryFolder("mine-").close()
    assert {*tmp_path.iterdir()} == before
    assert os.path.lexists(tmp_path / "mine-x" / "lock")


def test_folders_of_other_users_are_not_opened(tmp_path, monkeypatch):
    theirs = tmp_path / "mine-theirs"
    theirs.mkdir()
    (theirs / "lock").touch()
    user = os.geteuid()
    monkeypatch.setattr(temporary.os, "geteuid", lambda: user + 1)
    temporary.remove_leftovers("mine-")
    assert theirs.exists()
    monkeypatch.setattr(temporary.os, "geteuid", lambda: user)
    temporary.remove_leftovers("mine-")
    assert not theirs.exists()
