"""Several schedulers share a study, one is killed, and a server is restarted: each cell is complete exactly once."""

import collections
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import optuna
import pytest
from helpers.benches import toy_suite
from optuna.trial import TrialState

from fl_lightning.bench.study import find_study, open_database

PROGRAM = """
import sys, time
from pathlib import Path
from fl_lightning.bench import load_suite, scheduler, study
study.HEARTBEAT, study.GRACE, scheduler.POLL = 1, 3, 0.2
path, url, folder = sys.argv[1:]

class Sleeper:
    def __init__(self, job):
        pass
    def run(self, cell, on_round):
        with open(f"{folder}/begun", "a") as file:
            file.write(f"{__import__('os').getpid()}\\n")
        time.sleep(0.2)
        return {"done": {"values": {0: 0.5}}}
    def interrupt(self):
        pass

suite, database = load_suite(path), study.open_database(url)
studies = [scheduler.SuiteStudy(suite, database, suite.cells())]
one = scheduler.Scheduler(studies, "test/accuracy", Path(folder), 2, print, Sleeper)
one.run()
sys.exit(one.error and f"{type(one.error).__name__}: {one.error}")
"""
SUITE = {"base": {}, "axes": {"lr": {"key": "lr", "values": list(range(30))}}}


@pytest.fixture
def start(tmp_path):
    """``start(url)`` starts a scheduler, which is ended with the test."""
    schedulers, path = [], toy_suite(tmp_path, SUITE).path

    def begin(url):
        schedulers.append(subprocess.Popen([sys.executable, "-c", PROGRAM, path, url, tmp_path]))
        return schedulers[-1]

    yield begin
    for scheduler in schedulers:
        scheduler.kill()
        scheduler.wait()


def killed_in_a_cell(scheduler, others, folder, cells):
    """Kill a scheduler after so many cells have begun, one of them its own."""
    end = time.monotonic() + 120
    begun = Path(folder, "begun")
    while time.monotonic() < end:
        pids = begun.read_text().split() if begun.exists() else []
        if len(pids) >= cells and str(scheduler.pid) in pids[-4:]:
            scheduler.send_signal(signal.SIGKILL)
            scheduler.wait()
            return
        time.sleep(0.02)
    raise AssertionError(f"{len(pids)} cells have begun")


def assert_each_is_complete_once(folder, url):
    suite = toy_suite(folder, SUITE)
    study = find_study(suite, open_database(url))
    trials = study.get_trials(deepcopy=False)
    complete = collections.Counter(t.user_attrs["digest"] for t in trials if t.state == TrialState.COMPLETE)
    assert complete == dict.fromkeys((cell.digest for cell in suite.cells()), 1)
    assert not [trial for trial in trials if not trial.state.is_finished()]


def test_with_sqlite(start, tmp_path):
    url = f"sqlite:///{tmp_path / 'study.db'}"
    schedulers = [start(url) for _ in range(3)]
    killed_in_a_cell(schedulers[0], schedulers[1:], tmp_path, 8)
    assert [scheduler.wait(120) for scheduler in schedulers[1:]] == [0, 0]
    assert_each_is_complete_once(tmp_path, url)


@pytest.fixture
def postgres():
    """The URL of a PostgreSQL server, and a function that restarts it."""
    programs = shutil.which("pg_ctl"), shutil.which("initdb")
    if None in programs or not (find_spec("psycopg") or find_spec("psycopg2")):
        pytest.skip("no PostgreSQL, or no driver of it")
    folder = Path(tempfile.mkdtemp(prefix="fl_lightning-"))  # other users cannot look into the folders of pytest
    data, user = folder / "data", {}
    if os.getuid() == 0:  # which PostgreSQL refuses
        user = {"user": "postgres"}
        shutil.chown(folder, "postgres")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def control(*words):
        command = [programs[0], "-w", "-D", data, *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder, **user)

    command = [programs[1], "-D", data, "-U", "me", "-A", "trust"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder, **user)
    control("-o", f"-p {port} -k {folder} -c listen_addresses=127.0.0.1", "-l", folder / "log", "start")
    driver = "psycopg" if find_spec("psycopg") else "psycopg2"
    yield f"postgresql+{driver}://me@127.0.0.1:{port}/postgres", lambda: control("-l", folder / "log", "restart")
    control("-m", "immediate", "stop")
    shutil.rmtree(folder)


def test_with_postgres_that_is_restarted(start, postgres, tmp_path):
    url, restart = postgres
    schedulers = [start(url) for _ in range(2)]
    killed_in_a_cell(schedulers[0], schedulers[1:], tmp_path, 8)
    restart()
    schedulers[1].wait(120)  # it ends with an error where it needed the server at that moment
    assert start(url).wait(120) == 0
    assert_each_is_complete_once(tmp_path, url)
    assert optuna.get_all_study_names(url)
