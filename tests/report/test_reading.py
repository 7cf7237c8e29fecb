"""What a run has left is read, however little of it there is."""

import csv
import io
import json
import os
import time

import pytest
import yaml
from helpers.reports import accuracies, held, make_old, snapshot, warnings_of, write_run

pytest_plugins = ["helpers.report_fixtures"]


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "fedavg" / "version_0", rounds=4, measured=False)


@pytest.fixture
def read(report):
    """``read()`` is the lines of the file of runs, and the warnings, as one text."""

    def look():
        files = report()
        return list(csv.DictReader(io.StringIO(files["runs.csv"]))), "\n".join(warnings_of(files))

    return look


def state(read):
    ((line,), _) = read()
    return line["state"], int(line["rounds"])


# ------------------------------------------------------------------ metrics.csv
def test_a_table_that_is_cut_gives_the_rounds_before_the_cut(run, read):
    """Whatever is lost, no number is another one: a number that is cut short counts for nothing."""
    text, values = (run / "metrics.csv").read_bytes(), accuracies(run)
    header = text.index(b"\n") + 1
    for end in range(header + 1, len(text), len(text) // 6):
        (run / "metrics.csv").write_bytes(text[:end])
        whole = text[header:end].count(b"\n")
        (lines, warned) = read()
        assert [int(line["rounds"]) for line in lines] == [whole]
        assert lines[0]["last"] == (str(values[whole - 1]) if whole else "")
        assert ("metrics.csv: 1 line" in warned) == (text[end - 1 : end] != b"\n")


@pytest.mark.parametrize("line", ["1", "1,0.3,4", "1,x", "1e30,0.3", "nan,0.3", "inf,0.3", ",0.3", "1.5,0.3"])
def test_a_damaged_line_is_left_out(run, read, line):
    (run / "metrics.csv").write_text(f"round,test/accuracy\n0,0.25\n{line}\n2,0.5\n")
    ((told,), warned) = read()
    assert (told["rounds"], told["last"]) == ("3", "0.5") and "metrics.csv: 1 line" in warned


def test_a_round_that_was_written_twice_counts_once(run, read):
    (run / "metrics.csv").write_text("round,test/accuracy,b\n0,0.1,\n1,0.2,7\n1,0.3,\n")
    ((line,), _) = read()
    assert (line["rounds"], line["last"]) == ("2", "0.3")


# ------------------------------------------------------------------ the state of a run
def test_a_run_is_running_while_a_process_holds_its_lock_and_stopped_after_that(tmp_path, read):
    folder = write_run(tmp_path / "version_0", rounds=9, done=3, measured=False)
    with held(folder):
        before = snapshot(folder)
        assert state(read) == ("running", 3) and snapshot(folder) == before
    assert (folder / "lock").is_file() and state(read) == ("stopped", 3)
    (folder / "lock").unlink()
    assert state(read) == ("stopped", 3)


def test_without_locks_a_run_is_running_until_half_an_hour_after_a_sign_of_life(tmp_path, read, monkeypatch):
    monkeypatch.setattr("fl_lightning.report.reading.is_locked", lambda path: None)
    folder = write_run(tmp_path / "version_0", rounds=9, done=3, measured=False)
    make_old(folder, 1700)
    assert state(read) == ("running", 3)
    make_old(folder, 1900)
    assert state(read) == ("stopped", 3)


@pytest.mark.parametrize(("later", "expected"), [(1, "finished"), (-1, "stopped")])
def test_a_run_that_ended_early_is_finished_by_its_final_model(tmp_path, read, later, expected):
    """A model that is older than the last checkpoint is that of fewer rounds."""
    folder = write_run(tmp_path / "version_0", rounds=9, done=3, measured=False)
    (folder / "checkpoints").mkdir()
    for name in ("last.ckpt", "model.ckpt"):
        (folder / "checkpoints" / name).touch()
    make_old(folder)
    then = time.time() - 9_000
    os.utime(folder / "checkpoints" / "last.ckpt", (then, then))
    os.utime(folder / "checkpoints" / "model.ckpt", (then + later, then + later))
    assert state(read) == (expected, 3)


@pytest.mark.parametrize("cut", [0, 9])
def test_a_finished_run_whose_table_is_cut_is_warned_of_and_not_in_the_means_where_a_line_is_damaged(run, read, cut):
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "model.ckpt").touch()
    whole = b"".join((run / "metrics.csv").read_bytes().splitlines(keepends=True)[:3])
    (run / "metrics.csv").write_bytes(whole[: len(whole) - cut])
    (_, warned) = read()
    assert state(read)[0] == ("stopped" if cut else "finished")
    assert ("metrics.csv is cut" in warned) == (not cut) and "of 4 rounds" in warned


# ------------------------------------------------------------------ other files
def test_what_a_run_was_changed_to_and_which_clients_failed_are_warned_of(run, read):
    change = {"trainer.local_epochs": {"before": 1, "now": 5}}
    (run / "changes.yaml").write_text(yaml.safe_dump([{"rounds_done": 2, "changes": change}]))
    (run / "failures").mkdir()
    (run / "failures" / "round-3-client-5.pt").touch()
    _, warned = read()
    assert "2 rounds" in warned and "trainer.local_epochs from 1 to 5" in warned and "client 5 in round 3" in warned


def test_a_run_from_python_has_no_config_and_is_read(run, read):
    (run / "config.yaml").unlink()
    ((line,), _) = read()
    assert (line["method"], line["seed"], line["rounds"]) == ("fedavg", "0", "4")
    assert line["partition"] == json.loads((run / "environment.json").read_text())["plan_hash"]


def test_a_run_without_a_round_has_a_page(tmp_path, run, report, read):
    (run / "metrics.csv").unlink()
    assert state(read) == ("stopped", 0)
    assert "fedavg/version_0" in report()["html"]


def test_versions_are_in_the_order_of_their_numbers(tmp_path, read):
    for number in (10, 9, 0):
        write_run(tmp_path / "a" / f"version_{number}", seed=number, measured=False)
    assert [line["run"] for line in read()[0]] == ["a/version_0", "a/version_9", "a/version_10"]
