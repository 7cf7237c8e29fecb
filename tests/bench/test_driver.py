"""The driver: it takes cells from the queue until all are done."""

import threading
from functools import partial

import pytest
from helpers.benches import FakeRunner, outcome, toy_database, toy_driver, toy_suite
from optuna.storages import RDBStorage
from optuna.trial import TrialState
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from fl_lightning.bench import driver as drivers
from fl_lightning.bench.process import Interrupt
from fl_lightning.bench.study import enqueue_failed, enqueue_missing, open_study, results_of

pytestmark = pytest.mark.filterwarnings("ignore:Heartbeat of storage")


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    monkeypatch.setattr(drivers, "QUEUE_POLL", 0.05)
    monkeypatch.setattr(drivers, "PACE", 0.0)


@pytest.fixture
def suite(tmp_path):
    return toy_suite(tmp_path)


def states(study, suite):
    return [result.state for result in results_of(study, suite.cells()).values()]


@pytest.mark.parametrize("jobs", [1, 3])
def test_all_cells_are_run_once(tmp_path, suite, jobs):
    driver, study, said = toy_driver(suite, tmp_path, jobs=jobs)
    driver.run()
    ran = [name for runner in driver.runners for name in runner.ran]
    assert sorted(ran) == sorted(cell.name for cell in suite.cells())
    assert states(study, suite) == ["done"] * 4
    assert len(study.get_trials()) == 4  # optimize has invented none
    assert len([line for line in said if "test/accuracy 50.00 %" in line]) == 4 and "(4 of 4 done)" in said[-1]
    assert all(runner.closed for runner in driver.runners) and driver.error is None


def test_a_cell_is_told_where_and_how_to_run(tmp_path, suite):
    cell, told = suite.cells()[1], []
    driver, *_ = toy_driver(
        suite, tmp_path, [cell], runner=partial(FakeRunner, answer=lambda c, _: told.append(c) or outcome())
    )
    driver.run()
    assert told[0]["folder"] == cell.folder and told[0]["output"] == str(tmp_path)
    assert told[0]["fragments"] == cell.fragments and told[0]["metric"] == "test/accuracy"


def test_rounds_are_reported_while_a_cell_runs(tmp_path, suite):
    seen = []

    def answer(cell, on_round):
        for round_, value in enumerate([0.1, 0.3]):
            on_round(round_, value)
        seen.append(study.get_trials()[-1].intermediate_values)
        on_round(1, 0.3)  # a run that resumes reports it again
        return outcome([0.1, 0.3, 0.2])

    driver, study, _ = toy_driver(suite, tmp_path, suite.cells()[:1], runner=partial(FakeRunner, answer=answer))
    driver.run()
    assert seen == [{0: 0.1, 1: 0.3}]
    trial = study.get_trials()[0]
    assert trial.intermediate_values == {0: 0.1, 1: 0.3, 2: 0.2} and trial.value == 0.2
    assert results_of(study, suite.cells()[:1])[suite.cells()[0].digest].values == {0: 0.1, 1: 0.3, 2: 0.2}


def test_a_failed_cell_has_its_reason_and_the_rest_runs(tmp_path, suite):
    def answer(cell, on_round):
        return {"failed": "no data there"} if "FedProx" in cell["name"] else outcome()

    driver, study, said = toy_driver(suite, tmp_path, runner=partial(FakeRunner, answer=answer))
    driver.run()
    assert sorted(states(study, suite)) == ["done"] * 2 + ["failed"] * 2
    assert any("FedProx" in line and "failed: no data there" in line for line in said)
    again, study, _ = toy_driver(suite, tmp_path)
    again.run()
    assert not again.runners[0].ran
    enqueue_failed(study, suite.cells())
    again.run()
    assert len(again.runners[0].ran) == 2 and states(study, suite) == ["done"] * 4


def test_what_is_done_is_not_done_again_after_an_edit(tmp_path, suite):
    toy_driver(suite, tmp_path)[0].run()
    edited = toy_suite(tmp_path, suite.path.read_text().replace("values: [0.1, 0.2]", "values: [0.1, 0.3]"))
    driver, study, _ = toy_driver(edited, tmp_path)
    driver.run()
    assert sorted(driver.runners[0].ran) == sorted(cell.name for cell in edited.cells() if "lr=0.3" in cell.name)
    assert states(study, edited) == ["done"] * 4


def test_a_cell_of_a_dead_process_is_taken_up_again(tmp_path, suite):
    """Its trial is running and has had one heartbeat, but no more."""
    database = toy_database(tmp_path)
    study = open_study(suite, database, suite.cells())
    enqueue_missing(study, suite.cells()[:2])
    dead = study.ask()
    database.record_heartbeat(dead._trial_id)
    driver, study, said = toy_driver(suite, tmp_path, suite.cells()[:2])

    def say(line):
        said.append(line)
        if "still running" in line:
            with database.engine.begin() as connection:
                connection.execute(text("UPDATE trial_heartbeats SET heartbeat = '2000-01-01 00:00:00'"))

    driver.say = say
    driver.run()
    assert driver.runners[0].ran == [suite.cells()[1].name, suite.cells()[0].name]
    assert states(study, suite)[:2] == ["done", "done"]
    assert study.get_trials()[dead.number].state == TrialState.FAIL
    assert sum("still running" in line for line in said) == 1


def test_a_process_that_was_taken_for_dead_tells_nothing(tmp_path, suite):
    def answer(cell, on_round):
        for trial in study.get_trials(states=(TrialState.RUNNING,)):
            if len(driver.runners[0].ran) == 1:  # another process finds it stale
                study.tell(trial.number, state=TrialState.FAIL)
        on_round(0, 0.9)
        return outcome([0.9] if len(driver.runners[0].ran) == 1 else [0.5])

    driver, study, said = toy_driver(suite, tmp_path, suite.cells()[:1], runner=partial(FakeRunner, answer=answer))
    driver.run()
    assert driver.error is None and any("another one has taken the cell" in line for line in said)
    assert [trial.state for trial in study.get_trials()] == [TrialState.FAIL, TrialState.COMPLETE]
    assert results_of(study, suite.cells()[:1])[suite.cells()[0].digest].values == {0: 0.5}


def test_a_cell_that_two_processes_have_queued_is_done_once(tmp_path, suite):
    cells = suite.cells()[:2]
    driver, study, _ = toy_driver(suite, tmp_path, cells)
    enqueue_missing(study, cells)
    for trial in study.get_trials():
        study.enqueue_trial({"cell": "again"}, user_attrs=trial.user_attrs)
    driver.run()
    assert driver.runners[0].ran == [cell.name for cell in cells]
    ended = [trial.state for trial in study.get_trials()]
    assert ended == [TrialState.COMPLETE] * 2 + [TrialState.PRUNED] * 2


def test_an_interrupted_cell_is_queued_again(tmp_path, suite):
    def answer(cell, on_round):
        driver.stop()
        raise Interrupt

    driver, study, said = toy_driver(suite, tmp_path, runner=partial(FakeRunner, answer=answer))
    driver.run()
    assert len(driver.runners[0].ran) == 1 and driver.error is None
    assert states(study, suite) == ["waiting"] * 4 and not any("failed" in line for line in said)
    toy_driver(suite, tmp_path)[0].run()
    assert states(study, suite) == ["done"] * 4


def test_an_error_of_the_database_ends_all_jobs(tmp_path, suite):
    def answer(cell, on_round):
        driver.database.engine.dispose()
        raise ConnectionError("the server is gone")

    driver, *_ = toy_driver(suite, tmp_path, jobs=2, runner=partial(FakeRunner, answer=answer))
    driver.run()
    assert isinstance(driver.error, ConnectionError) and threading.active_count() < 10
    assert all(runner.closed for runner in driver.runners)


def test_an_error_of_the_driver_s_own_is_no_lost_trial(tmp_path, suite):
    """Optuna says by a ValueError that a trial is another one's; one of ours would queue the cell for ever."""

    def answer(cell, on_round):
        raise ValueError("no number")

    driver, *_ = toy_driver(suite, tmp_path, runner=partial(FakeRunner, answer=answer))
    driver.run()
    assert str(driver.error) == "no number" and len(driver.runners[0].ran) == 1


def test_a_sign_of_life_that_the_database_does_not_take_ends_no_thread(tmp_path, suite, monkeypatch):
    """The thread lives on and gives the next one, so that no other process takes the cell for left."""

    def locked(self, trial_id):
        raise OperationalError("", {}, Exception("database is locked"))

    driver, study, _ = toy_driver(suite, tmp_path)
    monkeypatch.setattr(RDBStorage, "record_heartbeat", locked)
    driver.run()
    assert driver.error is None and states(study, suite) == ["done"] * 4


def test_two_drivers_share_the_cells(tmp_path, suite):
    together, began = threading.Barrier(2), []

    def answer(cell, on_round):
        if len(began) < 2:  # the first cell of each: both are at work at the same time
            began.append(cell["name"])
            together.wait(600)
        return outcome()

    both = [toy_driver(suite, tmp_path, runner=partial(FakeRunner, answer=answer)) for _ in range(2)]
    threads = [threading.Thread(target=driver.run) for driver, *_ in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    study = both[0][1]
    assert states(study, suite) == ["done"] * 4
    completed = [trial.user_attrs["digest"] for trial in study.get_trials() if trial.state == TrialState.COMPLETE]
    assert len(completed) == len(set(completed)) == 4
