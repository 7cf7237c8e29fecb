"""What a run has left is read, however little of it there is."""

import json
import os
import time

import numpy as np
import pytest
import yaml
from helpers.reports import accuracies, held, make_old, snapshot, write_run

from fl_lightning.report import run as run_module
from fl_lightning.report.reading import Arrays, read_arrays, read_metrics
from fl_lightning.report.run import find_runs, read_run


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "fedavg" / "version_0", rounds=4, measured=False)


# ------------------------------------------------------------------ metrics.csv
def test_a_table_that_is_cut_anywhere_gives_rows_of_the_whole_one(run, tmp_path):
    """The law of a torn file: whatever is lost, no number is another one."""
    text = (run / "metrics.csv").read_bytes()
    whole, told = read_metrics(run / "metrics.csv")
    assert [row["test/accuracy"] for row in whole] == accuracies(run) and told == ""
    header = text.index(b"\n") + 1
    torn = tmp_path / "metrics.csv"
    for end in range(header, len(text), 7):
        torn.write_bytes(text[:end])
        rows, told = read_metrics(torn)
        assert rows == whole[: len(rows)]
        assert len(rows) == text[header:end].count(b"\n")
        assert bool(told) == (text[end - 1 : end] != b"\n")


def test_a_number_that_is_cut_short_is_not_taken_for_a_number(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("round,test/accuracy\n0,0.25\n1,0.5")  # it was 0.5312
    assert read_metrics(path) == ([{"round": 0, "test/accuracy": 0.25}], "line 3 is cut")


@pytest.mark.parametrize("line", ["1", "1,0.3,4", "1,x", "1,\0", ",0.3"])
def test_a_damaged_line_ends_the_table(tmp_path, line):
    path = tmp_path / "metrics.csv"
    path.write_text(f"round,test/accuracy\n0,0.25\n{line}\n2,0.5\n")
    assert read_metrics(path) == ([{"round": 0, "test/accuracy": 0.25}], "line 3 is damaged")


def test_a_round_that_was_written_twice_counts_once(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("round,a,b\n0,1,\n1,2,7\n1,3,\n")
    assert read_metrics(path)[0] == [{"round": 0, "a": 1}, {"round": 1, "a": 3}]


def test_a_table_of_something_else_is_refused(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("name,price\nx,1\n")
    with pytest.raises(ValueError, match="no column round"):
        read_metrics(path)


# ------------------------------------------------------------------ what has become of a run
def test_a_run_with_all_its_rounds_is_finished(run):
    assert read_run(run).state == "finished"
    assert read_run(run).told == "finished, 4 rounds"


def test_a_run_is_running_while_a_process_holds_its_lock_and_stopped_after_that(tmp_path):
    folder = write_run(tmp_path / "version_0", rounds=9, done=3, measured=False)
    with held(folder):
        before = snapshot(folder)
        assert read_run(folder).state == "running"
        assert read_run(folder).told == "running, 3 of 9 rounds so far"
        assert snapshot(folder) == before
    assert (folder / "lock").is_file()
    assert read_run(folder).told == "stopped, 3 of 9 rounds"
    (folder / "lock").unlink()
    assert read_run(folder).state == "stopped"


def test_without_locks_a_run_is_running_for_some_of_its_rounds_after_a_sign_of_life(tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "is_locked", lambda path: None)
    folder = write_run(tmp_path / "version_0", rounds=9, done=3, measured=False)
    now = time.time()
    assert read_run(folder, now=now + 119).state == "running"
    assert read_run(folder, now=now + 200).state == "stopped"
    (folder / "metrics.csv").write_text("round,time/round\n0,1000\n")
    assert read_run(folder, now=now + 2900).state == "running"
    assert read_run(folder, now=now + 3100).state == "stopped"
    (folder / "metrics.csv").unlink()  # its first round, which nobody has timed
    assert read_run(folder, now=now + 1700).state == "running"
    assert read_run(folder, now=now + 1900).state == "stopped"


@pytest.mark.parametrize(("later", "state"), [(1, "finished"), (-1, "stopped")])
def test_a_run_that_ended_early_is_finished_by_its_final_model(tmp_path, later, state):
    """A model that is older than the last checkpoint is that of fewer rounds."""
    folder = write_run(tmp_path / "version_0", rounds=9, done=3, measured=False)
    (folder / "checkpoints").mkdir()
    for name in ("last.ckpt", "model.ckpt"):
        (folder / "checkpoints" / name).touch()
    make_old(folder)
    then = time.time() - 9_000
    os.utime(folder / "checkpoints" / "last.ckpt", (then, then))
    os.utime(folder / "checkpoints" / "model.ckpt", (then + later, then + later))
    assert read_run(folder).state == state


# ------------------------------------------------------------------ other files
def test_a_file_that_cannot_be_read_is_a_note_and_no_end(run):
    (run / "config.yaml").write_text("a: [")
    (run / "environment.json").write_text("{")
    (run / "spectra.npz").write_bytes(b"PK\3\4 cut")
    read = read_run(run)
    assert len(read.rows) == 4 and read.arrays("spectra.npz") == Arrays()
    assert [note.split()[0] for note in read.notes] == ["config.yaml", "environment.json", "spectra.npz"]


def test_what_a_run_was_changed_to_and_which_clients_failed_are_noted(run):
    change = {"trainer.local_epochs": {"before": 1, "now": 5}}
    (run / "changes.yaml").write_text(yaml.safe_dump([{"rounds_done": 2, "changes": change}]))
    (run / "failures").mkdir()
    (run / "failures" / "round-3-client-5.pt").touch()
    changed, failed = read_run(run).notes
    assert "after 2 rounds" in changed and "trainer.local_epochs from 1 to 5" in changed
    assert "client 5 in round 3" in failed


def test_a_run_from_python_has_no_config_and_is_read(run):
    (run / "config.yaml").unlink()
    read = read_run(run)
    assert (read.config, read.seed, read.rounds) == ({}, 0, 4)
    assert read.plan_hash == json.loads((run / "environment.json").read_text())["plan_hash"]


def test_versions_are_found_in_the_order_of_their_numbers(tmp_path):
    for number in (10, 9, 0):
        write_run(tmp_path / "a" / f"version_{number}", measured=False)
    assert [folder.name for folder in find_runs(tmp_path)] == ["version_0", "version_9", "version_10"]


def test_arrays_are_read_with_their_own_rounds_and_names(tmp_path):
    path = tmp_path / "some.npz"
    layers = np.array([["conv", "head"]] * 3)
    arrays = {"a": np.ones((3, 2)), "local_a": np.ones((2, 5)), "between_rounds": np.ones((3, 2)), "odd": np.ones(7)}
    np.savez(path, rounds=[0, 5, 9], local_rounds=[0, 9], layers=layers, **arrays)
    read = read_arrays(path)
    assert set(read.values) == {"a", "local_a", "between_rounds"}
    assert read.rounds["local_a"].tolist() == [0, 9] and read.rounds["a"].tolist() == [0, 5, 9]
    assert read.names == {"layers": ["conv", "head"]}


def test_arrays_that_hold_objects_or_no_rounds_are_not_read(tmp_path):
    np.savez(tmp_path / "a.npz", rounds=np.array([{}], dtype=object))
    with pytest.raises(ValueError, match="allow_pickle"):
        read_arrays(tmp_path / "a.npz")
    np.savez(tmp_path / "b.npz", x=np.ones(3))
    assert read_arrays(tmp_path / "b.npz") == Arrays()
