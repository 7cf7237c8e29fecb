"""The study of a suite: its cells as trials of Optuna, which any number of processes claim.

A process claims a cell by adding a running trial that has the cell's digest; of several such trials the first holds.
A trial that failed has a reason. One without a reason was interrupted, or its process has died: it counts for nothing,
and the cell may be claimed again.
"""

from __future__ import annotations

import math
import os
import socket
import sqlite3
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial
from sqlalchemy import event
from sqlalchemy.exc import SQLAlchemyError

from fl_lightning.bench.results import CellResult, CellState, waiting
from fl_lightning.bench.suite import Cell, Suite
from fl_lightning.errors import UsageError, clipped, require, text_of

# seconds between two signs of life of a running cell, and those after which it counts as left by a dead process
HEARTBEAT, GRACE = 20, 90
# seconds for which SQLite waits while another process writes
PATIENCE = 120
# ... and after which a line says that this one waits
MOMENT = 2.0
SQLITE = "sqlite:///"
# the attribute of a trial before which nothing counts of its cell
ANEW = "anew"
# what a trial keeps of a result
KEPT_OF_RESULT = ("values", "seconds", "plan", "metrics", "machine", "run_dir", "code", "warnings")
# the errors of a database, such as one that is locked or whose disk is full
DATABASE_ERRORS = (SQLAlchemyError, StorageInternalError)


class NothingToClaim(Exception):
    """Every cell has a trial that stands for it."""


class Database(RDBStorage):
    """The database of studies, which several threads may share."""

    def record_heartbeat(self, trial_id: int) -> None:
        """Give a sign of life; where the database fails, the next one counts, which the thread must live to give."""
        with suppress(*DATABASE_ERRORS):
            super().record_heartbeat(trial_id)


class CellStudy(Study):
    """A study whose cells any number of processes claim.

    Args:
        name: its name.
        database: the connection.
        **kwargs: ``sampler`` and ``pruner`` of Optuna's study.
    """

    def __init__(self, name: str, database: Database, **kwargs: Any) -> None:
        super().__init__(name, database, **kwargs)
        self.database, self.id = database, database.get_study_id_from_name(name)

    def missing(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """The attributes and the fixed parameters of the trials to begin, in their order."""
        raise NotImplementedError

    def objective(self, trial: Trial, run: Any) -> float:
        """Run a trial by ``run(trial, cell, report)`` and return its value."""
        raise NotImplementedError

    def outcome(self, trial: FrozenTrial) -> str:
        """A line about a trial that has ended."""
        raise NotImplementedError

    def running(self) -> int:
        """How many of the wanted cells are running, here or in other processes."""
        raise NotImplementedError

    def has_work(self) -> bool:
        """Whether a cell can be claimed, once those of dead processes are free again."""
        fail_stale_trials(self)
        # one that died between its claim and its first sign of life; the attribute `process` comes after both
        late = datetime.now() - timedelta(seconds=2 * GRACE)
        for trial in self.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if "process" not in trial.user_attrs and trial.datetime_start is not None and trial.datetime_start < late:
                self.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)
        return next(self.missing(), None) is not None

    def ask(self, fixed_distributions: dict[str, BaseDistribution] | None = None) -> Trial:
        """Claim the next cell; ``optimize`` asks for it. All distributions are the objective's.

        Raises:
            NothingToClaim: there is none.
        """
        for attributes, parameters in self.missing():
            fixed = {"fixed_params": parameters} if parameters else {}
            claim = create_trial(state=TrialState.RUNNING, user_attrs=attributes, system_attrs=fixed)
            # the database gives numbers one after another, so that of two claims the second sees the first
            trial_id = self.database.create_new_trial(self.id, claim)
            self.database.record_heartbeat(trial_id)
            trial = Trial(self, trial_id)
            digest = attributes["digest"]
            holder = decisive(by_digest(self, [digest])[digest])
            with suppress(UpdateFinishedTrialError):  # of a process that was paused, and counts as dead
                if holder is not None and holder.number == trial.number:
                    trial.set_user_attr("process", f"{os.getpid()} on {socket.gethostname()}")
                    return trial
                trial.set_user_attr("repeats", None if holder is None else holder.number)
                self.tell(trial.number, state=TrialState.PRUNED, skip_if_finished=True)
        raise NothingToClaim

    def is_running(self, number: int) -> bool:
        """Whether a trial is running; not where its process was silent, and another took it for dead."""
        trials = self.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        return any(trial.number == number for trial in trials)

    def forget(self, ended: Iterable[Mapping[str, Any]], anew: bool = False) -> None:
        """Let failed cells be claimed again, given the attributes of their trials; ``anew`` drops results as well."""
        more = {ANEW: True} if anew else {}
        for attributes in ended:
            self.add_trial(create_trial(state=TrialState.FAIL, user_attrs={**attributes, **more}))


def cause_of(error: BaseException) -> str:
    """The first line of the innermost error, which the layers above the database have wrapped."""
    while error.__cause__ is not None:
        error = error.__cause__
    return clipped(text_of(error).strip().partition("\n")[0])


# ------------------------------------------------------------------ the database
def open_database(url: str) -> Database:
    """A connection to the database at ``url``, for several threads.

    Raises:
        UsageError: it cannot be reached.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=ExperimentalWarning)
    how: dict[str, Any] = {"pool_pre_ping": True}
    if url.startswith("sqlite"):
        warn_of_lock(url)
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


def warn_of_lock(url: str) -> None:
    """Say on stderr if another process has locked a database for more than moments."""
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
    # SQLite knows no SELECT FOR UPDATE, so that two claims could get one number
    event.listen(database.engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))

    @event.listens_for(database.engine, "connect")
    def connected(connection: Any, record: Any) -> None:
        # a power cut may lose the end of a cell, which is in the folder of its run, too
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
    # whatever lies there, even a folder or a dead link: opening it tells
    return not url.startswith(SQLITE) or os.path.lexists(url.removeprefix(SQLITE).split("?")[0])


@contextmanager
def undamaged() -> Iterator[None]:
    """Refuse a database in which the block finds what neither Optuna nor bench has written."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        hint = "give a copy from before that, or another --output or --storage"
        raise UsageError(f"--storage: the study is damaged: {text_of(error)}; {hint}") from error


# ------------------------------------------------------------------ the study of a suite
def create_study(name: str, minimize: bool, database: Database) -> None:
    """Create a study where there is none of this name."""
    direction = StudyDirection.MINIMIZE if minimize else StudyDirection.MAXIMIZE
    optuna.create_study(study_name=name, direction=direction, storage=database, load_if_exists=True)


def check_study(suite: Suite, database: Database, output: Path | None = None) -> bool:
    """Whether the database has the study of a suite.

    Args:
        suite: the suite.
        database: the connection.
        output: the folder of the database, if no other suite may have its study there.

    Raises:
        UsageError: the study is that of another suite, or of another margin, or there are others beside it.
    """
    with undamaged():
        summaries = optuna.get_all_study_summaries(database, include_best_trial=False)
        others = {summary.user_attrs.get("suite", suite.name) for summary in summaries} - {suite.name}
        own = next((summary for summary in summaries if summary.study_name == suite.name), None)
    hint = f"it has the study of the suite {', '.join(sorted(others))}, not of {suite.name}; give another folder"
    require(output is None or not others, "--output", str(output), hint)
    if own is None:
        return False
    with undamaged():
        attributes, trials = own.user_attrs, own.n_trials
    # one that has just been created has no attributes yet
    known = {key: attributes.get(key, value) for key, value in (("suite", suite.name), ("metric", suite.metric))}
    title = attributes.get("title", "not a suite")
    hint = f"the database has a study of this name, {title!r} by {known['metric']}; this one is by {suite.metric}; "
    hint += "give another --output or --storage, or rename the suite's file"
    same = known == {"suite": suite.name, "metric": suite.metric} and (bool(attributes) or not trials)
    require(same, "suite", suite.name, hint)
    margin, now = attributes.get("margin"), suite.decide and suite.decide.margin
    hint = f"the first cell was run with {margin}; put that back, or give another --output or --storage"
    require(not trials or None in (margin, now) or margin == now, f"{suite.path}: decide.margin", now, hint)
    return True


def find_study(suite: Suite, database: Database) -> Study | None:
    """The study of a suite, None where there is none.

    Raises:
        UsageError: it is that of another suite, or of another margin.
    """
    return optuna.load_study(study_name=suite.name, storage=database) if check_study(suite, database) else None


def about(suite: Suite) -> dict[str, Any]:
    """The attributes of a suite's study."""
    own = {"suite": suite.name, "metric": suite.metric, "title": suite.title, "file": str(suite.path.resolve())}
    return own | ({"margin": suite.decide.margin} if suite.decide else {})


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
    for state in (TrialState.COMPLETE, TrialState.RUNNING):
        for trial in trials:
            if trial.state == state:
                return trial
    return trials[-1] if trials and "reason" in trials[-1].user_attrs else None


def attributes_of(cell: Cell) -> dict[str, Any]:
    """The attributes of a cell's trial."""
    return {key: getattr(cell, key) for key in ("digest", "labels", "seed", "scale")} | {"cell": cell.name}


def load_results(study: Study, cells: Sequence[Cell], known: Mapping[str, CellResult]) -> int:
    """Count cells as done whose results, by digest, are known from elsewhere; returns how many the study lacked."""
    worst = math.inf if study.direction == StudyDirection.MINIMIZE else -math.inf
    loaded, alike = 0, {cell.digest: cell for cell in cells if cell.digest in known}
    for digest, trials in by_digest(study, alike).items():
        if any(trial.state == TrialState.COMPLETE for trial in trials):
            continue
        result = known[digest]
        last = result.values[max(result.values)]
        trial = create_trial(
            value=worst if math.isnan(last) else last,  # Optuna takes no nan
            intermediate_values=dict(result.values),
            user_attrs={
                **attributes_of(alike[digest]),
                "result": {key: getattr(result, key) for key in KEPT_OF_RESULT},
            },
        )
        study.add_trial(trial)
        loaded += 1
    return loaded


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
