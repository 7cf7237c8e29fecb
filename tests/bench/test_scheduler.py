"""``bench`` takes cells from a queue that any number of processes share, until all are done."""

import csv
import os
import signal
import sqlite3
from contextlib import closing

import pytest
from helpers.benches import TOY, outcome, toy_suite
from helpers.errors import assert_names
from optuna.storages import RDBStorage
from sqlalchemy.exc import OperationalError

pytest_plugins = ["helpers.bench_fixtures"]

pytestmark = pytest.mark.filterwarnings("ignore:Heartbeat of storage")
NAMES = [f"method={method},lr={lr},seed=0" for method in ("FedAvg", "FedProx") for lr in ("0.1", "0.2")]


@pytest.fixture
def suite(tmp_path):
    return toy_suite(tmp_path).path


@pytest.fixture
def cells(bench, suite, tmp_path):
    """``cells()`` looks at the study: its cells by name, as the columns of the file of cells."""

    def look():
        bench(suite, "--status", "--save", tmp_path / "look")
        with next((tmp_path / "look").glob("*.cells.csv")).open() as file:
            return {line["cell"]: line for line in csv.DictReader(file)}

    return look


def states(cells):
    return [line["state"] for line in cells().values()]


def alter(tmp_path, *statements):
    """Change the database of the study, as a process elsewhere does."""
    with closing(sqlite3.connect(tmp_path / "runs" / f"{tmp_path.name}-toy" / "study.db", timeout=60)) as database:
        for statement in statements:
            database.execute(statement)
        database.commit()


def test_every_cell_is_run_once_and_told_where_and_how(bench, suite, cells, tmp_path):
    told = []

    def answer(cell, on_round):
        told.append(cell)
        return outcome()

    ended = bench(suite, answer=answer)
    assert (ended.status, ended.ran) == (0, NAMES)
    assert states(cells) == ["done"] * 4
    assert ended.out.count("test/accuracy 50.00 %") == 4 and "(4 of 4 done)" in ended.out and "# Toy" in ended.out
    assert told[1]["metric"] == "test/accuracy" and told[1]["output"] == str(tmp_path / "runs" / f"{tmp_path.name}-toy")
    assert len({one["folder"] for one in told}) == 4
    assert told[1]["fragments"][-2:] == ({"model": {"init_args": {"lr": 0.2}}}, {"seed_everything": 0})
    assert bench(suite).ran == []


def interrupt():
    """The answer of a cell that the scheduler interrupts."""
    os.kill(os.getpid(), signal.SIGTERM)


def test_cells_with_one_config_run_once(bench, tmp_path):
    alike = toy_suite(tmp_path, TOY.replace("FedProx: {method: [{class_path: FedProx}]}", "Same: {method: []}")).path
    ended = bench(alike)
    assert len(ended.ran) == 2
    assert "| Same | **50.00** | **50.00** |" in ended.out


def test_the_rounds_of_a_running_cell_are_seen(bench, suite, cells):
    seen = []

    def answer(cell, on_round):
        for round_, value in enumerate([0.1, 0.3]):
            on_round(round_, value)
        seen.append(cells()[cell["name"]])
        return outcome([0.1, 0.3, 0.2])

    bench(suite, "--only", NAMES[0], answer=answer)
    assert (seen[0]["state"], seen[0]["values"]) == ("running", '{"0": 0.1, "1": 0.3}')
    done = cells()[NAMES[0]]
    assert (done["state"], done["values"], done["value"]) == ("done", '{"0": 0.1, "1": 0.3, "2": 0.2}', "0.2")


def test_a_failed_cell_has_its_reason_and_runs_again_only_when_asked(bench, suite, cells):
    ended = bench(suite, answer=lambda cell, _: {"failed": "no data"} if "FedProx" in cell["name"] else outcome())
    assert ended.status == 1 and "FedProx,lr=0.1,seed=0: failed: no data" in ended.out
    assert ended.out.count("failed: no data") == 2 + 1  # a line for each cell, and a footnote of the table
    assert_names(ended.err, "error: ", "2 of 4 cells", "--retry")
    assert states(cells) == ["done"] * 2 + ["failed"] * 2
    assert cells()[NAMES[2]]["reason"] == "no data"
    assert bench(suite).ran == []
    # a repeated cell that is interrupted has not failed
    assert bench(suite, "--retry", answer=lambda *_: interrupt()).ran == [NAMES[2]]
    assert cells()[NAMES[2]]["state"] == "waiting"
    # nor has the one that was to be repeated after it
    assert "failed" not in bench(suite, "--status").out and states(cells) == ["done"] * 2 + ["waiting"] * 2
    assert sorted(bench(suite).ran) == NAMES[2:] and states(cells) == ["done"] * 4


def test_only_edited_cells_run_again(bench, suite, tmp_path):
    bench(suite)
    edited = toy_suite(tmp_path, TOY.replace("[0.1, 0.2]", "[0.1, 0.3]")).path
    assert bench(edited).ran == [name.replace("lr=0.2", "lr=0.3") for name in NAMES if "0.2" in name]


def test_an_interrupted_cell_runs_again(bench, suite, cells):
    ended = bench(suite, answer=lambda *_: interrupt())
    assert ended.status == 128 + signal.SIGTERM and len(ended.ran) == 1 and "failed" not in ended.out
    assert_names(ended.err, "SIGTERM", f"bench {suite}")
    assert states(cells) == ["waiting"] * 4
    assert sorted(bench(suite).ran) == NAMES and states(cells) == ["done"] * 4


def die(cell, on_round):
    raise SystemExit  # of the thread, which leaves the trial as it is


@pytest.mark.parametrize("heartbeat", [True, False])
def test_a_cell_of_a_dead_process_is_run_again(bench, suite, cells, tmp_path, heartbeat):
    bench(suite, "--only", NAMES[0], answer=die)
    assert states(cells) == ["running", *["waiting"] * 3]
    if heartbeat:
        alter(tmp_path, "UPDATE trial_heartbeats SET heartbeat = '2000-01-01 00:00:00'")
    else:
        alter(
            tmp_path,
            "DELETE FROM trial_heartbeats",
            "DELETE FROM trial_user_attributes WHERE key = 'process'",
            "UPDATE trials SET datetime_start = '2000-01-01 00:00:00'",
        )
    assert sorted(bench(suite).ran) == NAMES and states(cells) == ["done"] * 4


def test_a_process_that_counted_as_dead_tells_nothing(bench, suite, cells, tmp_path):
    began = []

    def answer(cell, on_round):
        began.append(cell["name"])
        if len(began) == 1:
            alter(tmp_path, "UPDATE trials SET state = 'FAIL' WHERE state = 'RUNNING'")
            on_round(0, 0.9)
        return outcome([0.9] if len(began) == 1 else [0.5])

    ended = bench(suite, "--only", NAMES[0], answer=answer)
    assert ended.status == 0 and ended.ran == [NAMES[0]] * 2
    assert cells()[NAMES[0]]["values"] == '{"0": 0.5}'


@pytest.mark.parametrize("error", [ConnectionError("the server is gone"), ValueError("no number")])
def test_an_error_ends_all_jobs(bench, suite, error):
    """Optuna raises ValueError for a trial that another process has taken; one of ours must not repeat the cell."""

    def answer(cell, on_round):
        raise error

    ended = bench(suite, "--jobs", 2, answer=answer)
    assert ended.status == 1 and len(ended.ran) <= 2
    assert_names(ended.err, type(error).__name__, str(error), "bench")


def test_a_locked_database_may_miss_a_heartbeat(bench, suite, cells, monkeypatch):
    def locked(self, trial_id):
        raise OperationalError("", {}, Exception("database is locked"))

    monkeypatch.setattr(RDBStorage, "record_heartbeat", locked)
    assert bench(suite).status == 0 and states(cells) == ["done"] * 4


def test_the_study_of_another_suite_or_metric_is_refused(bench, suite, tmp_path):
    bench(suite)
    folder = tmp_path / "runs" / f"{tmp_path.name}-toy"
    (tmp_path / "elsewhere").mkdir()
    other = toy_suite(tmp_path / "elsewhere").path
    ended = bench(other, "--output", folder)
    assert ended.status == 2
    assert_names(ended.err, "--output=", f"{tmp_path.name}-toy", "elsewhere-toy")
    # two suites may share a database that is given as such
    assert bench(other, "--output", folder, "--storage", f"sqlite:///{folder / 'study.db'}").status == 0
    ended = bench(toy_suite(tmp_path, TOY + "metric: test/loss\n").path)
    assert ended.status == 2
    assert_names(ended.err, "suite=", "test/accuracy", "--output")
