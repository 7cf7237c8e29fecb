"""Temporary folders of processes that were killed are removed by the next one."""

import multiprocessing
import os
import signal
import tempfile

import pytest

from fl_lightning.storage import tempdirs
from fl_lightning.storage.tempdirs import TemporaryFolder


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(tempdirs, "SECONDS_TO_LOCK", -1.0)


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
    monkeypatch.setattr(tempdirs, "SECONDS_TO_LOCK", 60.0)
    TemporaryFolder("mine-")
    assert first.path.exists()
