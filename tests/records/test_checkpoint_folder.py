"""A kill at any moment of the writing leaves a valid checkpoint, and nothing that is not needed stays."""

import json
import os
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers.checkpoints import checkpoints, save

from fl_lightning.records import checkpoint_folder
from fl_lightning.records.checkpoint import Checkpoint, valid_checkpoint
from fl_lightning.records.checkpoint_folder import CheckpointFolder
from fl_lightning.records.files import write_stamped


class Killed(BaseException):
    pass


def killed_at(number, work):
    """Whether ``work`` ended before line ``number`` of the code that writes checkpoints."""
    left = [number]

    def trace(frame, event, _):
        if not frame.f_code.co_filename.endswith(("records/checkpoint_folder.py", "records/history.py")):
            return None
        left[0] -= event == "line"
        if left[0] == 0:
            raise Killed
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except Killed:
        return False
    finally:
        sys.settrace(before)
    return True


@pytest.mark.parametrize("rounds", [0, 2])
def test_a_kill_at_any_line_leaves_a_valid_checkpoint(tmp_path, monkeypatch, rounds):
    monkeypatch.setattr(os, "fsync", lambda number: None)
    begun, done, number, seen = checkpoints(tmp_path / "begun", rounds).path, False, 0, set()
    while not done:
        number += 1
        path = tmp_path / "now/version_0/checkpoints"
        shutil.rmtree(tmp_path / "now", ignore_errors=True)
        path.parent.mkdir(parents=True)
        if rounds:
            shutil.copytree(begun, path)
        folder = CheckpointFolder(path)
        if rounds:
            folder.resume(valid_checkpoint(path / "last.ckpt", print))
        done = killed_at(number, partial(save, folder, rounds + 1, best=True))
        if rounds or (path / "last.ckpt").exists():
            said = []
            found = valid_checkpoint(path / "last.ckpt", said.append)
            seen.add((found.path.name, found.manifest.round, len(found.history)))
            CheckpointFolder(path).resume(found)
            assert valid_checkpoint(path / "last.ckpt", print).manifest.round == found.manifest.round
            if found.manifest.round > rounds:
                assert valid_checkpoint(path / "best.ckpt", print).manifest.round == found.manifest.round
    before = {("last.ckpt", 2, 2), ("previous.ckpt", 2, 2)} if rounds else set()
    assert seen == before | {("last.ckpt", rounds + 1, rounds + 1)}


def test_a_full_disk_is_named(tmp_path):
    with pytest.raises(OSError, match="No space left on device"):
        write_stamped({"w": torch.zeros(10)}, Path("/dev/full"))


def names(path):
    return sorted(str(one.relative_to(path)) for one in path.rglob("*") if one.is_file())


def test_the_last_two_and_the_best_are_kept_with_their_clients(tmp_path):
    folder = checkpoints(tmp_path, 1)
    save(folder, 2, best=True)
    for round_ in (3, 4, 5):
        save(folder, round_)
    clients = [f"clients/{k}-{r}.pt" for k in (0, 1) for r in (2, 4, 5)]
    files = [f"{name}.ckpt{suffix}" for name in ("best", "last", "previous") for suffix in ("", ".json")]
    assert names(folder.path) == sorted([*files, *clients, "clients/7-1.pt", "history.jsonl"])
    assert valid_checkpoint(folder.path / "best.ckpt", print).manifest.round == 2
    assert len(valid_checkpoint(folder.path / "previous.ckpt", print).history) == 4


def test_what_no_checkpoint_names_is_removed_at_the_next_start_and_nothing_else(tmp_path):
    path = checkpoints(tmp_path).path
    kept = names(path)
    theirs = ["mine.partial", "notes.txt", "clients/notes.pt", "clients/a-b.pt"]
    left = ["last.partial", "last.ckpt.partial", "model.partial", "clients/5-9.pt", "clients/5-9.partial"]
    for name in [*theirs, *left]:
        (path / name).write_text("x")
    (tmp_path / "elsewhere.pt").write_text("x")
    (path / "clients/6-6.pt").symlink_to(tmp_path / "elsewhere.pt")
    CheckpointFolder(path).resume(valid_checkpoint(path / "last.ckpt", print))
    assert names(path) == sorted([*kept, *theirs, "clients/6-6.pt"])
    assert (tmp_path / "elsewhere.pt").exists()


def test_a_folder_of_clients_that_is_a_link_is_left_alone(tmp_path):
    path = checkpoints(tmp_path).path
    shutil.move(path / "clients", tmp_path / "theirs")
    (tmp_path / "theirs/9-9.pt").write_text("x")
    (path / "clients").symlink_to(tmp_path / "theirs")
    CheckpointFolder(path).resume(valid_checkpoint(path / "last.ckpt", print))
    assert (tmp_path / "theirs/9-9.pt").exists()


def test_where_no_links_can_be_made_the_best_is_a_copy(tmp_path, monkeypatch):
    def refuses(*_):
        raise OSError

    monkeypatch.setattr(checkpoint_folder.os, "link", refuses)
    folder = checkpoints(tmp_path, 1)
    save(folder, 2, best=True)
    assert valid_checkpoint(folder.path / "best.ckpt", print).manifest.round == 2


def test_the_files_of_a_checkpoint_do_not_grow_with_the_rounds(tmp_path):
    folder = checkpoints(tmp_path, 2)
    sizes = {name: (folder.path / name).stat().st_size for name in ("last.ckpt", "last.ckpt.json")}
    for round_ in range(3, 9):
        save(folder, round_)
    assert sizes["last.ckpt"] == (folder.path / "last.ckpt").stat().st_size
    assert sizes["last.ckpt.json"] - 2 <= (folder.path / "last.ckpt.json").stat().st_size <= sizes["last.ckpt.json"] + 2
    rows = (folder.path / "history.jsonl").read_text().splitlines()
    assert [json.loads(row)["round"] for row in rows] == list(range(8))


def test_a_checkpoint_from_before_becomes_the_previous_one(tmp_path):
    path = tmp_path / "version_0/checkpoints"
    folder = CheckpointFolder(path)
    path.mkdir(parents=True)
    (path / "last.ckpt").write_text("of a former version")
    folder.resume(Checkpoint(path / "last.ckpt"))
    save(folder, 2)
    assert (path / "previous.ckpt").read_text() == "of a former version"
    assert not (path / "previous.ckpt.json").exists()
