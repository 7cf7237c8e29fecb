"""The study of a suite: its cells as trials of Optuna, which any number of processes take from one queue.

A cell is known by its digest. One that nobody has run, or that a process left unfinished, is queued again by whoever
next finds the queue empty; one that failed has a reason, and is queued again when that is asked for.
"""

from __future__ import annotations

import itertools
import math
import os
import sqlite3
import sys
import time
import warnings
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.exceptions import ExperimentalWarning, StorageInternalError, UpdateFinishedTrialError
from optuna.storages import RDBStorage, fail_stale_trials
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy import event
from sqlalchemy.exc import SQLAlchemyError

from fl_lightning.bench.results import CellResult, CellState, waiting
from fl_lightning.bench.suite import Cell, Suite
from fl_lightning.errors import UsageError, clipped, require, text_of

# seconds between two signs of life of a running cell, and those after which it counts as left by a dead process
HEARTBEAT, GRACE = 20, 90
# cells that are queued at once
BATCH = 32
# seconds for which SQLite waits while another process writes
PATIENCE = 120
# ... and after which it is said that this one waits
MOMENT = 2.0
SQLITE = "sqlite:///"
# the attribute of a trial before which nothing counts of its cell
ANEW = "anew"
# what a trial keeps of a result
KEPT_OF_RESULT = ("values", "seconds", "plan", "metrics", "machine", "run_dir", "code")
# what a database fails with, such as one that is locked or whose disk is full
DATABASE_ERRORS = (SQLAlchemyError, StorageInternalError)


class QueueEmpty(Exception):
    """No cell waits."""


class Database(RDBStorage):
    """The database of studies, which several threads may share."""

    def record_heartbeat(self, trial_id: int) -> None:
        """Give a sign of life; where the database fails, the next one counts, which the thread must live to give."""
        with suppress(*DATABASE_ERRORS):
            super().record_heartbeat(trial_id)


class CellStudy(Study):
    """A study of which only some cells are taken from the queue.

    It may hold cells of another scale, of a suite as it was before an edit, or that ``--only`` leaves out.

    Args:
        name: its name.
        database: the connection.
        digests: those of the cells that are taken.
        **kwargs: ``sampler`` and ``pruner``, as of Optuna's own.
    """

    def __init__(self, name: str, database: Database, digests: Container[str], **kwargs: Any) -> None:
        super().__init__(name, database, **kwargs)
        self.database, self.digests = database, digests

    def queued(self) -> list[FrozenTrial]:
        """The trials of our own cells that wait."""
        trials = self.get_trials(deepcopy=False, states=(TrialState.WAITING,))
        return [trial for trial in trials if digest_of(trial) in self.digests]

    def ask(self, fixed_distributions: dict[str, BaseDistribution] | None = None) -> Trial:
        """Take the next trial from the queue; ``optimize`` asks for it. All distributions are the objective's.

        Raises:
            QueueEmpty: no trial of ours waits.
        """
        study = self.database.get_study_id_from_name(self.study_name)
        for trial in self.queued():
            number = self.database.get_trial_id_from_study_id_trial_number(study, trial.number)
            # another process may have taken it meanwhile, or even have finished it
            with suppress(UpdateFinishedTrialError):
                if self.database.set_trial_state_values(number, TrialState.RUNNING):
                    return Trial(self, number)
        raise QueueEmpty


def cause_of(error: BaseException) -> str:
    """What a database itself says, in the first of the errors that the layers above it have made of it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return clipped(text_of(error).strip().partition("\n")[0])


def open_database(url: str) -> Database:
    """A connection to the database at ``url``, for several threads.

    Raises:
        UsageError: it cannot be reached.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=ExperimentalWarning)
    how: dict[str, Any] = {"pool_pre_ping": True}
    if url.startswith("sqlite"):
        tell_of_lock(url)
        how["connect_args"] = {"timeout": PATIENCE}
    for pause in (0.5, 1.0, None):
        try:
            database = Database(url, how, heartbeat_interval=HEARTBEAT, grace_period=GRACE)
            if url.startswith("sqlite"):
                prepare_sqlite(database)
            return database
        except (*DATABASE_ERRORS, ImportError, RuntimeError, ValueError) as error:
            # two processes that create the tables at the same time meet here, too
            why = cause_of(error)
            if pause is None or "locked" in why:
                driver = "install its driver (such as psycopg[binary], psycopg2-binary or mysqlclient), or "
                hint = f"{driver * isinstance(error, ImportError)}give another URL"
                raise UsageError(f"--storage={hidden(url)!r}: cannot be used: {why}; {hint}") from error
        time.sleep(pause)
    raise AssertionError


def tell_of_lock(url: str) -> None:
    """Say on stderr that a database is waited for which another process has locked, for more than moments."""
    if not url.startswith(SQLITE) or not exists(url):
        return
    address = Path(url.removeprefix(SQLITE).split("?")[0]).resolve().as_uri()
    try:
        with closing(sqlite3.connect(f"{address}?mode=rw", timeout=MOMENT, uri=True, isolation_level=None)) as database:
            database.execute("BEGIN IMMEDIATE")
    except sqlite3.Error as error:
        if "locked" in str(error):
            text = f"another process has locked {url.removeprefix(SQLITE)}; waiting for it for up to {PATIENCE} s"
            print(f"warning: {text}", file=sys.stderr, flush=True)


def prepare_sqlite(database: Database) -> None:
    """Let transactions lock the database from their begin on, and wait for the disk less often."""
    # SQLite knows no SELECT FOR UPDATE, so that two could take the same trial from the queue
    event.listen(database.engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))

    @event.listens_for(database.engine, "connect")
    def connected(connection: Any, record: Any) -> None:
        # what a power cut may lose is the end of a cell, which is in the folder of its run, too
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")

    database.engine.dispose()  # the connections that have been opened before


def hidden(url: str) -> str:
    """A URL without its password."""
    head, at, tail = url.rpartition("@")
    scheme, _, rest = head.partition("://")
    return f"{scheme}://{rest.split(':')[0]}{at}{tail}" if at else url


def default_url(output: Path) -> str:
    """The database beside the results."""
    return f"{SQLITE}{output / 'study.db'}"


def exists(url: str) -> bool:
    """Whether there is a database at ``url``, as far as that shows without creating one."""
    # whatever lies there, even a folder or a dead link: what it is shows when it is opened
    return not url.startswith(SQLITE) or os.path.lexists(url.removeprefix(SQLITE).split("?")[0])


def open_study(suite: Suite, database: Database, cells: Sequence[Cell] = ()) -> CellStudy:
    """The study of a suite, created where there is none, from whose queue only ``cells`` are taken.

    Raises:
        UsageError: it is that of another suite.
    """
    direction = StudyDirection.MINIMIZE if suite.minimize else StudyDirection.MAXIMIZE
    optuna.create_study(study_name=suite.name, direction=direction, storage=database, load_if_exists=True)
    study = find_study(suite, database, cells)
    assert study is not None  # it has just been made
    about = {"suite": suite.name, "metric": suite.metric, "title": suite.title, "file": str(suite.path.resolve())}
    for key, value in about.items():
        study.set_user_attr(key, value)
    return study


def find_study(suite: Suite, database: Database, cells: Sequence[Cell] = ()) -> CellStudy | None:
    """The study of a suite, None where there is none.

    Raises:
        UsageError: it is that of another suite.
    """
    try:
        # what is never asked for parameters needs no sampler that looks at the others
        sampler = optuna.samplers.RandomSampler(seed=0)
        study = CellStudy(suite.name, database, {cell.digest for cell in cells}, sampler=sampler)
    except KeyError:
        return None
    with undamaged():
        attributes, trials = study.user_attrs, study.get_trials(deepcopy=False)
    # one that has just been created has no attributes yet
    known = {key: attributes.get(key, own) for key, own in (("suite", suite.name), ("metric", suite.metric))}
    hint = f"the study {suite.name!r} there is of another suite, or of another metric than {suite.metric}; "
    hint += "give another --output or --storage, or rename the suite's file"
    same = known == {"suite": suite.name, "metric": suite.metric} and (bool(attributes) or not trials)
    require(same, "--storage", f"{attributes.get('title', 'not a suite')} ({known['metric']})", hint)
    return study


@contextmanager
def undamaged() -> Iterator[None]:
    """Refuse a database in which the block finds what neither Optuna nor bench has written."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        hint = "give a copy from before that, or another --output or --storage"
        raise UsageError(f"--storage: the study is damaged: {text_of(error)}; {hint}") from error


def check_alone(suite: Suite, database: Database, output: Path) -> None:
    """Refuse an output folder of another suite.

    Raises:
        UsageError: its database has the study of another suite.
    """
    with undamaged():
        summaries = optuna.get_all_study_summaries(database, include_best_trial=False)
        others = {summary.user_attrs.get("suite", suite.name) for summary in summaries} - {suite.name}
    hint = f"it has the study of the suite {', '.join(sorted(others))}, not of {suite.name}; give another folder"
    require(not others, "--output", str(output), hint)


def digest_of(trial: FrozenTrial) -> str | None:
    """The digest of a trial's cell; None where it has none, or where it repeats another trial."""
    return None if "repeats" in trial.user_attrs else trial.user_attrs.get("digest")


def by_digest(study: Study, digests: Iterable[str]) -> dict[str, list[FrozenTrial]]:
    """The trials of each digest, in their order; where one was to begin anew, it and those after it."""
    trials_of: dict[str, list[FrozenTrial]] = {digest: [] for digest in digests}
    for trial in study.get_trials(deepcopy=False):
        if (digest := digest_of(trial)) in trials_of:
            trials_of[digest] = [*([] if ANEW in trial.user_attrs else trials_of[digest]), trial]
    return trials_of


def decisive(trials: Sequence[FrozenTrial]) -> FrozenTrial | None:
    """The trial that says what became of a cell; None where it has to be run (again)."""
    for state in (TrialState.COMPLETE, TrialState.RUNNING, TrialState.WAITING):
        for trial in trials:
            if trial.state == state:
                return trial
    # the last of the others: without a reason, it was interrupted, or its process has died
    return trials[-1] if trials and "reason" in trials[-1].user_attrs else None


def with_trials(study: Study, cells: Sequence[Cell]) -> Iterator[tuple[Cell, list[FrozenTrial]]]:
    """Each cell with its trials; of several cells of the same config, one."""
    alike = {cell.digest: cell for cell in cells}
    for digest, trials in by_digest(study, alike).items():
        yield alike[digest], trials


def enqueue_missing(study: Study, cells: Sequence[Cell]) -> int:
    """Queue the next cells that are to be run and that no trial stands for; returns how many.

    A few at a time: each look at the study reads all that wait. Two processes may queue a cell twice; the one who takes
    it second drops it, see :func:`repeats`.
    """
    missing = (cell for cell, trials in with_trials(study, cells) if decisive(trials) is None)
    return enqueue(study, itertools.islice(missing, BATCH))


def enqueue_failed(study: Study, cells: Sequence[Cell]) -> int:
    """Queue the cells that failed; returns how many."""
    ends = [(cell, decisive(trials)) for cell, trials in with_trials(study, cells)]
    return enqueue(study, [cell for cell, end in ends if end is not None and end.state == TrialState.FAIL])


def enqueue(study: Study, cells: Iterable[Cell], anew: bool = False) -> int:
    """Queue cells; returns how many. Begun ``anew``, their results until now count no more."""
    queued = {cell.digest: cell for cell in cells}.values()
    for cell in queued:
        study.enqueue_trial({"cell": cell.name}, user_attrs=attributes(cell) | ({ANEW: True} if anew else {}))
    return len(queued)


def load_results(study: Study, cells: Sequence[Cell], known: Mapping[str, CellResult]) -> int:
    """Count cells as done whose results are known from elsewhere; returns how many.

    Args:
        study: the study.
        cells: the cells that it may have; those that it has a result of keep it.
        known: results by digest.
    """
    worst = math.inf if study.direction == StudyDirection.MINIMIZE else -math.inf
    loaded = 0
    for cell, trials in with_trials(study, cells):
        result = known.get(cell.digest)
        if result is None or result.state != "done" or any(trial.state == TrialState.COMPLETE for trial in trials):
            continue
        kept = {key: getattr(result, key) for key in KEPT_OF_RESULT}
        last = result.values[max(result.values)]
        trial = optuna.trial.create_trial(
            value=worst if math.isnan(last) else last,  # Optuna takes no nan
            intermediate_values=dict(result.values),
            user_attrs={**attributes(cell), "result": kept},
        )
        study.add_trial(trial)
        loaded += 1
    return loaded


def attributes(cell: Cell) -> dict[str, Any]:
    """What the trial of a cell says of it."""
    return {
        "cell": cell.name,
        "digest": cell.digest,
        "labels": cell.labels,
        "seed": cell.seed,
        "scale": cell.scale,
    }


def repeats(study: Study, number: int, digest: str) -> int | None:
    """The trial that the one of this ``number`` repeats: of the same cell, complete or begun before; None without.

    Both of two that begin at the same time know the other, since they look after they have begun.
    """
    trials = by_digest(study, [digest])[digest]
    began = {trial.number: (trial.datetime_start, trial.number) for trial in trials if trial.datetime_start is not None}
    for trial in trials:
        earlier = trial.state == TrialState.RUNNING and began[trial.number] < began.get(number, began[trial.number])
        if trial.number != number and (trial.state == TrialState.COMPLETE or earlier):
            return trial.number
    return None


def fail_dead(study: Study) -> None:
    """Fail the running trials whose process has died, so that their cells are queued again."""
    fail_stale_trials(study)
    # Optuna knows nothing of one that died before its first sign of life; what runs has the attribute `process`
    late = datetime.now() - timedelta(seconds=2 * GRACE)
    for trial in running(study):
        if "process" not in trial.user_attrs and trial.datetime_start is not None and trial.datetime_start < late:
            study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)


def running(study: Study) -> list[FrozenTrial]:
    """The trials that are running; not one whose process was silent, so that another took it for dead."""
    return study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))


def is_running(study: Study, number: int) -> bool:
    """Whether a trial is running."""
    return any(trial.number == number for trial in running(study))


def results_of(study: Study | None, cells: Sequence[Cell]) -> dict[str, CellResult]:
    """The result of each cell, by its digest; a cell that is not in the study waits."""
    trials_of = by_digest(study, [cell.digest for cell in cells]) if study is not None else {}
    with undamaged():
        return {cell.digest: result_of_trial(cell, decisive(trials_of.get(cell.digest, ()))) for cell in cells}


def result_of_trial(cell: Cell, trial: FrozenTrial | None) -> CellResult:
    """The result of a cell, from the trial that is decisive for it."""
    if trial is None:
        return waiting(cell)
    states: Mapping[TrialState, CellState]
    states = {TrialState.COMPLETE: "done", TrialState.FAIL: "failed", TrialState.RUNNING: "running"}
    kept: Mapping[str, Any] = trial.user_attrs.get("result", {})
    values = kept.get("values") or trial.intermediate_values
    return replace(
        waiting(cell),
        state=states.get(trial.state, "waiting"),
        reason=trial.user_attrs.get("reason", ""),
        scale=trial.user_attrs.get("scale", cell.scale),
        **{key: kept[key] for key in KEPT_OF_RESULT[1:] if key in kept},
        values={int(round_): float(value) for round_, value in values.items()},
    )
