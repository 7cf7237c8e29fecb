"""A damaged checkpoint is never used: the run resumes from the previous one, and a warning names the damaged file."""

import os
import random
import shutil
import sys
from contextlib import contextmanager, suppress
from functools import partial

import pytest
import torch
from helpers.checkpoints import flip
from helpers.errors import refused, warned
from helpers.runs import assert_same_bits, fitted, history, small_trainer
from helpers.tiny import TinyData, TinyModule, clients
from torch.optim import SGD

from fl_lightning.callbacks import BestCheckpoint
from fl_lightning.client import client_state
from fl_lightning.engine.checkpointing import save_run
from fl_lightning.methods import SCAFFOLD
from fl_lightning.storage import atomic_io, checkpoint
from fl_lightning.storage.atomic_io import DamagedFileError
from fl_lightning.storage.checkpoint import PackedRows, unpack_rows, verify

MODEL, DATA = partial(TinyModule, partial(SGD, lr=0.1)), partial(clients, TinyData(), 8, 6)
HOW = {"max_rounds": 4, "name": "run", "enable_progress_bar": False}
fit = partial(fitted, methods=lambda: [SCAFFOLD()], model=MODEL, data=DATA, **HOW)


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


# damaged file, and damage
DAMAGES = {
    "flipped": ("last.ckpt", flip),
    "cut": ("last.ckpt", cut),
    "client flipped": ("clients/0-3.pt", flip),
    "client of another round": ("clients/0-3.pt", lambda path: shutil.copy(path.with_name("0-2.pt"), path)),
    "client missing": ("clients/1-3.pt", lambda path: path.unlink()),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_resumes(tmp_path, begun, checkpoints, damage):
    name, spoil = DAMAGES[damage]
    spoil(checkpoints / name)
    with warned(name, "previous.ckpt"):
        again = fit(tmp_path, ckpt_path="last")
    assert_same_bits(begun[1].server.state, again.server.state)
    assert history(begun[1]) == history(again)


def test_a_file_that_both_checkpoints_need_ends_in_one_line(tmp_path, checkpoints):
    for name in ("0-2.pt", "0-3.pt"):
        (checkpoints / "clients" / name).unlink()
    with refused("ckpt_path=", "clients/0-3.pt", "previous.ckpt", "clients/0-2.pt") as caught:
        fit(tmp_path, ckpt_path="last")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("number", [100, pytest.param(3000, marks=pytest.mark.thorough)])
def test_a_flipped_bit_is_noticed(checkpoints, number):
    rng = random.Random(0)
    files = [checkpoints / "last.ckpt", *sorted((checkpoints / "clients").glob("*-3.pt"))]
    for _ in range(number):
        path = rng.choice(files)
        before = path.read_bytes()
        flip(path, rng.random(), rng.randrange(8))
        with pytest.raises(DamagedFileError):
            verify(files[0])
        path.write_bytes(before)


# ---------------------------------------------------------------------- a checkpoint of another version
def test_a_checkpoint_of_another_version_is_refused_and_its_weights_can_be_used(tmp_path, begun, checkpoints):
    path = checkpoints / "last.ckpt"
    contents = torch.load(path, weights_only=True)
    torch.save({**contents, "format": 1}, path)
    with refused("ckpt_path=", "last.ckpt", "version", "weights"):
        fit(tmp_path, ckpt_path="last")
    trainer = small_trainer(tmp_path, max_rounds=0)
    trainer.fit(TinyModule(), clients(TinyData(), 8, 6), weights=path)
    assert_same_bits(trainer.server.state, contents["state_dict"])


def test_rows_of_metrics_are_restored_with_their_types():
    rows = [{"round": 0, "loss": 0.1}, {}, {"round": 2, "extra": float("inf"), "loss": -0.0}, {"loss": 3, "round": 3.0}]
    packed = PackedRows()
    packed.pack(rows[:1])
    assert repr(unpack_rows(packed.pack(rows))) == repr(rows)
    assert unpack_rows(PackedRows().pack([])) == []


# ---------------------------------------------------------------------- a checkpoint is data
def flipped(path):
    state = TinyModule().state_dict()
    torch.save(state, path)
    content = path.read_bytes()
    # in the middle of the first entry, since a bit of the padding changes nothing
    entry = next(iter(state.values())).numpy().tobytes()
    flip(path, (content.index(entry) + len(entry) // 2) / len(content))


WRITERS = [
    lambda path: torch.save({"state_dict": print}, path),  # which would run code
    lambda path: path.write_bytes(b"hello"),
    flipped,
]


@pytest.mark.parametrize("write", WRITERS)
def test_a_file_that_is_hostile_damaged_or_no_checkpoint_is_one_line(tmp_path, write):
    write(tmp_path / "given.ckpt")
    trainer, data = small_trainer(tmp_path), clients(TinyData(), 8, 6)
    for key in ("weights", "ckpt_path"):
        with refused(f"{key}=", "given.ckpt") as caught:
            trainer.fit(TinyModule(), data, **{key: tmp_path / "given.ckpt"})
        assert "\n" not in str(caught.value)


# ---------------------------------------------------------------------- written and removed files
class Killed(BaseException):
    pass


SAVING = tuple(module.__file__ for module in (checkpoint, atomic_io, client_state))


@contextmanager
def killed_at(number):
    """Raise an error before a line of the code that saves a run. Yields a list with the number of lines before it."""
    left, lines = [number], set()

    def trace(frame, event, _):
        if frame.f_code.co_filename not in SAVING:
            return None
        line = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and line not in lines and within_save(frame):
            lines.add(line)
            left[0] -= 1
            if left[0] == -1:
                raise Killed
        return trace

    sys.settrace(trace)
    try:
        yield left
    finally:
        sys.settrace(None)


def within_save(frame):
    while frame is not None and frame.f_code is not save_run.__code__:
        frame = frame.f_back
    return frame is not None


@pytest.mark.filterwarnings("ignore:.*previous.ckpt is used instead")  # of a save that is killed between two renames
@pytest.mark.parametrize("step", [25, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_save_that_is_killed_at_any_line_leaves_a_run_that_resumes(tmp_path, step):
    def resume(rounds, ckpt_path="last"):
        return fit(tmp_path, ckpt_path=ckpt_path, max_rounds=rounds, callbacks=[BestCheckpoint("train/loss")])

    def restored():
        shutil.rmtree(tmp_path / "run")
        shutil.copytree(tmp_path / "begun", tmp_path / "run")

    resume(2, None)
    shutil.copytree(tmp_path / "run", tmp_path / "begun")
    whole = resume(3)
    left, number = [-1], 0
    while left[0] < 0:
        restored()
        with suppress(Killed), killed_at(number) as left:
            resume(3)
        again = resume(3)
        assert_same_bits(again.server.state, whole.server.state)
        assert history(again) == history(whole)
        verify(tmp_path / "run/version_0/checkpoints/best.ckpt")
        number += step
    assert number > 40


def test_what_no_checkpoint_names_is_removed_at_the_next_start_and_nothing_else(tmp_path, checkpoints):
    kept = {path for path in checkpoints.rglob("*") if path.is_file()}
    theirs = {checkpoints / name for name in ("mine.partial", "notes.txt", "clients/notes.pt", "clients/a-b.pt")}
    for path in (*theirs, *(checkpoints / name for name in ("last.partial", "clients/5-9.pt", "clients/5-9.partial"))):
        path.write_text("x")
    fit(tmp_path, ckpt_path="last", max_rounds=3)
    assert {path for path in checkpoints.rglob("*") if path.is_file()} == kept | theirs


def test_where_no_links_can_be_made_the_best_checkpoint_is_a_copy(tmp_path, monkeypatch):
    def refuses(*_):
        raise OSError

    monkeypatch.setattr(os, "link", refuses)
    fit(tmp_path, max_rounds=2, callbacks=[BestCheckpoint("train/loss")])
    folder = tmp_path / "run/version_0/checkpoints"
    assert (folder / "best.ckpt").read_bytes() == (folder / "last.ckpt").read_bytes()
