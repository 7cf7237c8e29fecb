"""The study of a suite: its queue, and what it says of each cell."""

import threading

import pytest
from helpers.benches import toy_database, toy_suite
from helpers.errors import refused
from optuna.trial import TrialState

from fl_lightning.bench import study as studies
from fl_lightning.bench.study import (
    QueueEmpty,
    check_alone,
    decisive,
    digest_of,
    enqueue_failed,
    enqueue_missing,
    exists,
    fail_dead,
    find_study,
    hidden,
    is_queued,
    open_database,
    open_study,
    repeats,
    results_of,
)

pytestmark = pytest.mark.filterwarnings("ignore:Heartbeat of storage")


@pytest.fixture
def suite(tmp_path):
    return toy_suite(tmp_path)


@pytest.fixture
def backend(tmp_path):
    return toy_database(tmp_path)


@pytest.fixture
def study(suite, backend):
    return open_study(suite, backend, suite.cells())


def take(study, reason=None, value=None, result=None):
    """Take the next cell from the queue, and let it fail, or finish it, or leave it running."""
    trial = study.ask()
    if reason is not None:
        trial.set_user_attr("reason", reason)
    if result is not None:
        trial.set_user_attr("result", result)
    if reason is not None or value is not None:
        study.tell(trial, value, TrialState.FAIL if value is None else None)
    return trial


def states(study, suite):
    return [result.state for result in results_of(study, suite.cells()).values()]


def test_each_cell_is_queued_once_with_what_it_is(study, suite, monkeypatch):
    monkeypatch.setattr(studies, "BATCH", 3)
    assert enqueue_missing(study, suite.cells()) == 3
    assert enqueue_missing(study, suite.cells()) == 1
    assert enqueue_missing(study, suite.cells()) == 0
    trials = study.get_trials()
    assert [trial.user_attrs["cell"] for trial in trials] == [cell.name for cell in suite.cells()]
    first = suite.cells()[0]
    assert trials[0].user_attrs == {
        "cell": "method=FedAvg,lr=0.1,seed=0",
        "digest": first.digest,
        "labels": {"method": "FedAvg", "lr": "0.1"},
        "seed": 0,
        "scale": 1.0,
    }


def test_cells_of_the_same_config_are_one(study, suite):
    assert enqueue_missing(study, [*suite.cells(), *suite.cells()]) == 4


def test_a_failed_cell_is_queued_again_only_when_that_is_asked(study, suite):
    enqueue_missing(study, suite.cells())
    take(study, reason="too large")
    assert states(study, suite)[0] == "failed"
    assert results_of(study, suite.cells())[suite.cells()[0].digest].reason == "too large"
    assert enqueue_missing(study, suite.cells()) == 0
    assert enqueue_failed(study, suite.cells()) == 1
    assert states(study, suite) == ["waiting"] * 4
    assert enqueue_failed(study, suite.cells()) == 0


def test_a_cell_that_was_interrupted_is_queued_again(study, suite):
    enqueue_missing(study, suite.cells()[:1])
    study.tell(take(study), state=TrialState.FAIL)
    assert states(study, suite) == ["waiting"] * 4
    assert enqueue_missing(study, suite.cells()[:1]) == 1


def test_a_retried_cell_that_is_interrupted_has_not_failed(study, suite):
    enqueue_missing(study, suite.cells()[:1])
    take(study, reason="too large")
    enqueue_failed(study, suite.cells())
    study.tell(take(study), state=TrialState.FAIL)
    assert decisive(study.get_trials()) is None


def test_the_result_of_a_cell_is_what_its_trial_holds(study, suite):
    enqueue_missing(study, suite.cells())
    told = {"values": {"0": 0.25, "1": 0.1}, "seconds": 2.0, "plan": "p", "metrics": {"test/loss": 3.0}}
    take(study, value=0.1, result={**told, "machine": "m", "run_dir": "r"})
    trial = take(study)
    trial.report(0.75, 4)
    done, running, waiting = list(results_of(study, suite.cells()).values())[:3]
    assert (done.state, done.values, done.seconds, done.plan) == ("done", {0: 0.25, 1: 0.1}, 2.0, "p")
    assert (done.metrics, done.machine, done.run_dir, done.scale) == ({"test/loss": 3.0}, "m", "r", 1.0)
    assert (running.state, running.values) == ("running", {4: 0.75})
    assert (waiting.state, waiting.values) == ("waiting", {})
    assert {result.state for result in results_of(None, suite.cells()).values()} == {"waiting"}


def test_the_queue_gives_only_the_cells_that_are_asked_for(suite, backend, study):
    enqueue_missing(study, suite.cells())
    mine = suite.cells()[2:3]
    other = open_study(suite, backend, mine)
    assert other.ask().user_attrs["digest"] == mine[0].digest
    assert not is_queued(other)
    with pytest.raises(QueueEmpty):
        other.ask()
    assert len(other.get_trials(states=(TrialState.RUNNING,))) == 1


def test_threads_take_different_cells(suite, backend):
    enqueue_missing(open_study(suite, backend, suite.cells()), suite.cells())
    start, taken = threading.Barrier(2), []

    def work():
        study = open_study(suite, backend, suite.cells())
        start.wait()
        taken.extend(study.ask().number for _ in range(2))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(4))


def test_of_two_trials_of_a_cell_one_is_dropped(study, suite, backend):
    cell = suite.cells()[:1]
    enqueue_missing(study, cell)
    study.enqueue_trial({"cell": "again"}, user_attrs=study.get_trials()[0].user_attrs)
    first, second = study.ask(), study.ask()
    assert repeats(study, first.number, cell[0].digest) is None
    assert repeats(study, second.number, cell[0].digest) == first.number
    study.tell(first, 0.5)
    assert repeats(study, second.number, cell[0].digest) == first.number
    second.set_user_attr("repeats", first.number)
    study.tell(second, state=TrialState.PRUNED)
    assert [digest_of(trial) for trial in study.get_trials()] == [cell[0].digest, None]
    assert states(study, suite)[0] == "done"


def test_a_running_cell_without_a_sign_of_life_is_queued_again(study, suite, monkeypatch):
    """Optuna does not look at a trial that never had a heartbeat."""
    enqueue_missing(study, suite.cells()[:2])
    take(study).set_user_attr("process", "1 on here")
    take(study)
    fail_dead(study)
    assert states(study, suite)[:2] == ["running", "running"]
    monkeypatch.setattr(studies, "GRACE", -1)
    fail_dead(study)
    assert states(study, suite)[:2] == ["running", "waiting"]


@pytest.mark.parametrize(
    ("url", "said"),
    [("nonsense", "Could not parse"), ("sqlite:////nowhere/x.db", "unable to open"), ("mysql://me:secret@h/x", "me@h")],
)
def test_a_storage_that_cannot_be_used_is_named(url, said, monkeypatch):
    monkeypatch.setattr(studies.time, "sleep", lambda seconds: None)
    with refused("--storage=") as caught:
        open_database(url)
    assert said in str(caught.value) and "secret" not in str(caught.value) and len(str(caught.value)) < 300


def test_a_password_is_not_shown():
    assert hidden("postgresql://me:secret@host:1/name") == "postgresql://me@host:1/name"
    assert hidden("sqlite:///a/study.db") == "sqlite:///a/study.db"


def test_the_study_of_another_suite_is_refused(tmp_path, suite, study, backend):
    other = toy_suite(tmp_path, suite.path.read_text() + "metric: test/loss\n")
    for opens in (lambda: open_study(other, backend), lambda: find_study(other, backend)):
        with refused("--storage=", "test/accuracy", "--output"):
            opens()
    (tmp_path / "elsewhere").mkdir()
    stranger = toy_suite(tmp_path / "elsewhere")
    assert find_study(stranger, backend) is None
    check_alone(suite, backend, tmp_path)
    with refused("--output=", "elsewhere-toy"):
        check_alone(stranger, backend, tmp_path)


def test_to_look_creates_nothing(tmp_path):
    assert not exists(f"sqlite:///{tmp_path / 'none.db'}") and not list(tmp_path.iterdir())
    assert exists("postgresql://host/name")
