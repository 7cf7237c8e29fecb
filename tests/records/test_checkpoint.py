"""A checkpoint is read when all its files are as they were written; else the one before it, and a warning says why."""

import os
import shutil
from functools import partial

import pytest
import torch
from helpers.checkpoints import flip
from helpers.errors import refused, warned
from helpers.runs import assert_same_bits, history, small_trainer
from helpers.tiny import TinyData, TinyModule, clients
from torch.optim import SGD

from fl_lightning.callbacks import BestCheckpoint
from fl_lightning.methods import SCAFFOLD


def fit(folder, ckpt_path=None, **kwargs):
    torch.manual_seed(0)
    trainer = small_trainer(folder, **{"max_rounds": 4, "name": "run", "enable_progress_bar": False, **kwargs})
    trainer.fit(TinyModule(partial(SGD, lr=0.1)), clients(TinyData(), 8, 6), SCAFFOLD(), ckpt_path)
    return trainer


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """The folder of a run of three rounds, and the trainer of one of four rounds."""
    folder = tmp_path_factory.mktemp("begun")
    fit(folder, max_rounds=3)
    return folder / "run", fit(folder, name="whole")


@pytest.fixture
def checkpoints(tmp_path, begun):
    """The checkpoints of a copy of the run, which lies in ``tmp_path``."""
    shutil.copytree(begun[0], tmp_path / "run")
    return tmp_path / "run/version_0/checkpoints"


def cut(path):
    path.write_bytes(path.read_bytes()[:-9])


def copy_previous(path):
    shutil.copy(path.with_name(path.name.replace("last", "previous")), path)


# what is damaged, and how
DAMAGES = {
    "flipped": ("last.ckpt", flip),
    "cut": ("last.ckpt", cut),
    "older": ("last.ckpt", copy_previous),
    "client flipped": ("clients/0-3.pt", flip),
    "client missing": ("clients/1-3.pt", lambda path: path.unlink()),
    "manifest missing": ("last.ckpt.json", lambda path: path.unlink()),
    "manifest cut": ("last.ckpt.json", cut),
    "manifest of another": ("last.ckpt.json", copy_previous),
    "newer": ("last.ckpt.json", lambda path: path.write_text(path.read_text().replace('"format": 1', '"format": 2'))),
    "history": ("history.jsonl", lambda path: flip(path, 0.9)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_resumes(tmp_path, begun, checkpoints, damage):
    name, spoil = DAMAGES[damage]
    spoil(checkpoints / name)
    if name == "history.jsonl":  # metrics.csv has the same rows
        (checkpoints.parent / "metrics.csv").unlink()
    with warned(name.replace("last.ckpt.json", "last.ckpt"), "previous.ckpt"):
        again = fit(tmp_path, "last")
    assert_same_bits(begun[1].server.state, again.server.state)
    assert history(begun[1]) == history(again)


def test_rows_of_a_damaged_history_come_from_the_table_that_has_the_same(tmp_path, begun, checkpoints):
    (checkpoints / "history.jsonl").unlink()
    with warned("history.jsonl", "metrics.csv"):
        again = fit(tmp_path, "last")
    assert history(begun[1]) == history(again)


def test_a_file_that_both_checkpoints_need_ends_in_one_line(tmp_path, checkpoints):
    for name in ("0-2.pt", "0-3.pt"):
        (checkpoints / "clients" / name).unlink()
    with refused("ckpt_path=", "clients/0-3.pt", "previous.ckpt", "clients/0-2.pt") as caught:
        fit(tmp_path, "last")
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------------- a checkpoint is data
def runs_code(path):
    torch.save({"state_dict": print}, path)


def claims_much_memory(path):
    torch.save({"state_dict": {"w": torch.zeros(1).expand(2**42)}}, path)


@pytest.mark.parametrize("write", [runs_code, claims_much_memory, lambda path: path.write_bytes(b"hello")])
def test_a_file_that_is_hostile_or_no_checkpoint_is_one_line(tmp_path, write):
    write(tmp_path / "given.ckpt")
    trainer, data = small_trainer(tmp_path), clients(TinyData(), 8, 6)
    for key in ("weights", "ckpt_path"):
        with refused(f"{key}=", "given.ckpt") as caught:
            trainer.fit(TinyModule(), data, **{key: tmp_path / "given.ckpt"})
        assert "\n" not in str(caught.value)


def test_weights_with_a_manifest_are_verified(checkpoints, tmp_path):
    flip(checkpoints / "last.ckpt")
    with refused("weights=", "last.ckpt"):
        small_trainer(tmp_path).fit(TinyModule(), clients(TinyData(), 8, 6), weights=checkpoints / "last.ckpt")


# ---------------------------------------------------------------------- what is written, and removed
class Killed(BaseException):
    pass


def kill_at(patch, number):
    """Let the process end before it changes its files for this time; returns how many changes are left."""
    left = [number]

    def counted(change):
        def counts(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return change(*args, **kwargs)

        return counts

    for module, name in ((os, "replace"), (os, "link"), (shutil, "copyfile"), (torch, "save")):
        patch.setattr(module, name, counted(getattr(module, name)))
    return left


def test_a_kill_at_any_change_of_the_files_leaves_a_run_that_resumes(tmp_path, monkeypatch):
    def resume(rounds, ckpt_path="last"):
        return fit(tmp_path, ckpt_path, max_rounds=rounds, callbacks=[BestCheckpoint("train/loss")])

    resume(1, None)
    shutil.copytree(tmp_path / "run", tmp_path / "begun")
    whole, number, left = resume(2), 0, [-1]
    while left[0] < 0:
        shutil.rmtree(tmp_path / "run")
        shutil.copytree(tmp_path / "begun", tmp_path / "run")
        with monkeypatch.context() as patch:
            left = kill_at(patch, number)
            try:
                resume(2)
            except Killed:
                number += 1
        again = resume(2)
        assert_same_bits(again.server.state, whole.server.state)
        assert history(again) == history(whole)
    assert number > 5


def test_what_no_checkpoint_names_is_removed_at_the_next_start_and_nothing_else(tmp_path, checkpoints):
    kept = {path for path in checkpoints.rglob("*") if path.is_file()}
    theirs = {checkpoints / name for name in ("mine.partial", "notes.txt", "clients/notes.pt", "clients/a-b.pt")}
    left = {
        checkpoints / name for name in ("last.partial", "last.ckpt.partial", "clients/5-9.pt", "clients/5-9.partial")
    }
    for path in (*theirs, *left):
        path.write_text("x")
    (tmp_path / "elsewhere.pt").write_text("x")
    (checkpoints / "clients/6-6.pt").symlink_to(tmp_path / "elsewhere.pt")
    fit(tmp_path, "last", max_rounds=3)
    assert {path for path in checkpoints.rglob("*") if path.is_file()} == {
        *kept,
        *theirs,
        checkpoints / "clients/6-6.pt",
    }


def test_where_no_links_can_be_made_the_best_checkpoint_is_a_copy(tmp_path, monkeypatch):
    def refuses(*_):
        raise OSError

    monkeypatch.setattr(os, "link", refuses)
    fit(tmp_path, max_rounds=2, callbacks=[BestCheckpoint("train/loss")])
    folder = tmp_path / "run/version_0/checkpoints"
    assert (folder / "best.ckpt").read_bytes() == (folder / "last.ckpt").read_bytes()
