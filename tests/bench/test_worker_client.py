"""The process of a cell and its scheduler: their messages, and the end of a cell whose process or scheduler dies."""

import multiprocessing
import os
import re
import signal
import threading
import time

import pytest
from helpers.errors import assert_names

from fl_lightning.bench.worker_client import THREADS, Interrupt, WorkerClient, locked
from fl_lightning.utilities.errors import LONGEST

PROGRAM = "helpers.cell_program"


@pytest.fixture
def run(tmp_path):
    """``run(name)`` runs a cell of this name and returns its answer."""
    client = WorkerClient(program=PROGRAM)
    return lambda name, on_round=lambda *_: None: client.run(cell(name, tmp_path), on_round)


def cell(name, folder):
    return {"name": name, "folder": name, "output": str(folder), "log": str(folder / "logs" / name)}


def test_a_cell_reports_its_rounds_and_then_its_answer(run, tmp_path):
    rounds = []
    answer = run("good", lambda *told: rounds.append(told))
    assert rounds == [(0, 0.0), (1, 0.5)] and answer["done"]["values"] == {1: 0.5}
    assert (tmp_path / "logs" / "good").read_text().endswith("in good\nfrom another program\n")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("refused", "trainer.max_rounds=-1: give 0 or more"),
        ("breaks", r"KeyError at .*cell_program.py:\d+ \(run_cell\): 'width'"),
        ("exits", ".* status 3"),
        ("memory", r"MemoryError at .*cell_program.py:\d+ \(run_cell\).*"),
    ],
)
def test_a_cell_that_fails_has_its_reason(run, tmp_path, name, reason):
    assert re.fullmatch(reason, run(name)["failed"])
    assert ("Traceback" in (tmp_path / "logs" / name).read_text()) == (name in ("breaks", "memory"))


@pytest.mark.parametrize(("name", "reason"), [("killed", "SIGKILL"), ("segfault", "SIGSEGV"), ("leaves", "status 0")])
def test_a_cell_whose_process_dies_fails_with_the_signal(run, tmp_path, name, reason):
    assert_names(run(name)["failed"], reason, str(tmp_path / "logs" / name))
    assert "done" in run("good")


def test_a_reason_is_one_line_that_any_file_can_hold(run):
    reason = run("odd")["failed"]
    assert reason.encode() and reason.isprintable() and len(reason) <= LONGEST and r"\ud800" in reason


def test_a_log_that_cannot_be_written_fails_the_cell(run, tmp_path):
    (tmp_path / "logs").write_text("no folder")
    assert_names(run("good")["failed"], "--output", "logs")


def test_the_scheduler_may_end_a_run_early(run):
    rounds = []
    assert "done" in run("long", lambda round_, value: rounds.append(round_) or round_ == 1)
    assert len(rounds) < 1000


def test_a_folder_that_another_process_has_is_waited_for(tmp_path, capsys):
    fcntl = pytest.importorskip("fcntl")
    with (tmp_path / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        threading.Timer(0.3, fcntl.flock, (file.fileno(), fcntl.LOCK_UN)).start()
        with locked(tmp_path):
            assert str(tmp_path) in capsys.readouterr().err


def test_an_interrupted_client_ends(tmp_path):
    client = WorkerClient(program=PROGRAM)
    with pytest.raises(Interrupt):
        client.run(cell("endless", tmp_path), lambda round_, value: client.interrupt() if round_ == 1 else None)
    with pytest.raises(Interrupt):
        client.run(cell("good", tmp_path), lambda *_: None)


def drive(folder, pipe):
    """A scheduler that tells the process of its cell."""
    client = WorkerClient(program=PROGRAM)
    client.run(cell("endless", folder), lambda *_: pipe.send(client._process.pid))


def test_the_process_of_a_cell_ends_with_its_scheduler(tmp_path):
    here, there = multiprocessing.Pipe()
    scheduler = multiprocessing.get_context("spawn").Process(target=drive, args=(tmp_path, there))
    scheduler.start()
    pid = here.recv()
    scheduler.kill()
    scheduler.join()
    end = time.monotonic() + 60
    while is_alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert not is_alive(pid)


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_cell_is_no_worker_of_a_cluster_and_has_its_own_gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.setenv("LOCAL_RANK", "1")
    multiprocessing.forkserver._forkserver._stop()  # the next one has this environment
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    clients = [WorkerClient(job, PROGRAM) for job in range(3)]
    found = [client.run(cell("good", tmp_path), lambda *_: None)["done"]["environment"] for client in clients]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in found] == ["2", "5", "2"]
    assert not {"SLURM_NTASKS", "LOCAL_RANK"} & set(found[0]) and os.environ["LOCAL_RANK"] == "1"


@pytest.mark.parametrize("stated", [None, "2"])
def test_libraries_have_one_thread_in_a_cell_unless_the_environment_says_otherwise(monkeypatch, tmp_path, stated):
    for name in THREADS:
        monkeypatch.delenv(name, raising=False)
    if stated:
        monkeypatch.setenv(THREADS[0], stated)
    multiprocessing.forkserver._forkserver._stop()  # the next one has this environment
    before = dict(os.environ)
    found = WorkerClient(0, PROGRAM).run(cell("good", tmp_path), lambda *_: None)["done"]["environment"]
    assert [found[name] for name in THREADS] == [stated or "1", "1", "1"]
    assert dict(os.environ) == before


def test_configs_are_checked_in_a_process(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    client = WorkerClient(program=PROGRAM)
    assert client.check("test/accuracy", {"a": "good", "b": "bad"}) == {"b": "is bad"}
    assert signal.getsignal(signal.SIGINT) is before
