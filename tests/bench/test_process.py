"""A runner process and its driver: what they tell each other, and what happens to a cell whose process dies."""

import re
import sys
import threading
import time

import pytest

from fl_lightning.bench.process import Interrupt, Runner, runner_environment
from fl_lightning.errors import LONGEST

# a runner without torch, which does what the name of the cell says
PROGRAM = """
import ctypes, os, signal, sys, time
print("a banner of a library")
print("3")
from fl_lightning.bench.runner import serve
from fl_lightning.errors import UsageError

def run(cell, report):
    name, died = cell["name"], os.path.join(cell["output"], "died")
    print("in", name, "torch" in sys.modules, flush=True)
    os.system("echo from another program")
    if name == "killed" or (name == "killed once" and not os.path.exists(died)):
        open(died, "a").write("x")
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "exits":
        sys.exit(3)
    if name == "refused":
        raise UsageError("trainer.max_rounds=-1: give 0 or more")
    if name == "segfault":
        ctypes.string_at(0)
    if name == "leaves":
        os._exit(0)
    if name == "odd":
        raise OSError("/data/\\udcff.png is no image\\0\\n\\ud800" * 99)
    if name == "memory":
        bytearray(2**62)
    if name == "breaks":
        raise KeyError("width")
    for round_ in range(1000 if name in ("long", "endless") else 2):
        if report(round_, round_ / 2) and name == "long":
            break
        time.sleep(0.01 if name in ("long", "endless") else 0)
    return {"values": {round_: 0.5}, "pid": os.getpid()}

serve(run)
"""


@pytest.fixture(scope="module")
def runner():
    """One runner for most of the tests: it lives on after a cell that failed."""
    one = Runner(command=[sys.executable, "-c", PROGRAM])
    yield one
    one.close()


@pytest.fixture
def run(runner, tmp_path):
    """``run(name)`` runs a cell of this name and returns its outcome."""
    return lambda name, on_round=lambda *_: None: runner.run(cell(name, tmp_path), on_round)


def cell(name, folder):
    return {"name": name, "folder": name, "output": str(folder), "log": str(folder / "logs" / name)}


def test_a_cell_reports_its_rounds_and_then_its_outcome(run, tmp_path):
    rounds = []
    answer = run("good", lambda *told: rounds.append(told))
    assert rounds == [(0, 0.0), (1, 0.5)] and answer["done"]["values"] == {"1": 0.5}
    # what the program prints before it reads the cell may come here, too
    assert (tmp_path / "logs" / "good").read_text().endswith("in good False\nfrom another program\n")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("refused", "trainer.max_rounds=-1: give 0 or more"),
        ("breaks", r"KeyError at <string>:\d+ \(run\): 'width'"),
        ("exits", ".* status 3"),
        ("memory", r"MemoryError at <string>:\d+ \(run\)"),
    ],
)
def test_a_cell_that_fails_has_its_reason_and_the_runner_lives_on(run, tmp_path, name, reason):
    before = run("good")["done"]["pid"]
    assert re.fullmatch(reason, run(name)["failed"])
    assert ("Traceback" in (tmp_path / "logs" / name).read_text()) == (name in ("breaks", "memory"))
    assert run("good")["done"]["pid"] == before


def test_a_cell_whose_process_dies_is_run_again(run, tmp_path):
    assert "done" in run("killed once")
    assert (tmp_path / "died").read_text() == "x"


@pytest.mark.parametrize(("name", "reason"), [("killed", "SIGKILL"), ("segfault", "SIGSEGV"), ("leaves", "status 0")])
def test_a_cell_whose_process_always_dies_fails_with_the_signal(run, tmp_path, name, reason):
    failed = run(name)["failed"]
    assert reason in failed and "3 times" in failed and str(tmp_path / "logs" / name) in failed
    assert name != "killed" or (tmp_path / "died").read_text() == "xxx"
    assert "done" in run("good")


def test_a_reason_is_one_line_that_any_file_can_hold(run):
    reason = run("odd")["failed"]
    assert reason.encode() and reason.isprintable() and len(reason) <= LONGEST and r"\ud800" in reason


def test_the_driver_may_end_a_run_early(run):
    rounds = []

    def on_round(round_, value):
        rounds.append(round_)
        return round_ == 1

    assert "done" in run("long", on_round)
    assert len(rounds) < 1000
    rounds.clear()
    assert "done" in run("good", on_round)
    assert rounds == [0, 1]


def test_a_folder_that_another_process_has_is_waited_for(run, tmp_path):
    fcntl = pytest.importorskip("fcntl")
    (tmp_path / "good").mkdir()
    ends = []
    with (tmp_path / "good" / "lock").open("w") as file:
        file.write("process 7 on there\n")
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        thread = threading.Thread(target=lambda: ends.append(run("good")))
        thread.start()
        log = tmp_path / "logs" / "good"
        while not (log.is_file() and "process 7 on there" in log.read_text()):
            time.sleep(0.02)
        assert not ends
    thread.join()
    assert "done" in ends[0]


def test_an_interrupted_runner_ends(tmp_path):
    one = Runner(command=[sys.executable, "-c", PROGRAM])
    with pytest.raises(Interrupt):
        one.run(cell("endless", tmp_path), lambda round_, value: one.interrupt() if round_ == 1 else None)
    assert one._process.wait(300) == 0
    one.close()


def test_a_runner_without_a_driver_ends(tmp_path):
    one = Runner(command=[sys.executable, "-c", PROGRAM])

    def on_round(round_, value):
        if round_ == 1:
            one._process.stdin.close()

    assert one._once(cell("endless", tmp_path), on_round) is None
    assert one._process.wait(300) == 0
    one.close()


def test_a_runner_is_no_worker_of_a_cluster_and_has_its_own_gpu(monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert [runner_environment(job)["CUDA_VISIBLE_DEVICES"] for job in range(3)] == ["2", "5", "2"]
    assert not {"SLURM_NTASKS", "LOCAL_RANK"} & set(runner_environment(0))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert runner_environment(1)["CUDA_VISIBLE_DEVICES"] == "3"
