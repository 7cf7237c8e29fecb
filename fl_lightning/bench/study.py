"""The study of a suite: its cells as trials of Optuna, which any number of processes claim.

A process claims a cell by adding a running trial that has the cell's digest; of several such trials the first holds.
A trial that failed has a reason. One without a reason was interrupted, or its process has died: it counts for nothing,
and the cell may be claimed again.
"""

from __future__ import annotations

import math
import os
import socket
import time
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
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
    """A study whose cells any number of processes claim; it is created where there is none of its name.

    Args:
        cells: by digest, the attributes and the fixed parameters of the trial of each cell.
        about: attributes of the study.
    """

    def __init__(
        self,
        name: str,
        database: Database,
        minimize: bool,
        cells: Mapping[str, tuple[dict[str, Any], dict[str, Any]]],
        about: Mapping[str, Any],
        **kwargs: Any,
    ) -> None:
        direction = StudyDirection.MINIMIZE if minimize else StudyDirection.MAXIMIZE
        optuna.create_study(study_name=name, direction=direction, storage=database, load_if_exists=True)
        super().__init__(name, database, **kwargs)
        self.database, self.id, self.trials_by_cell = database, database.get_study_id_from_name(name), cells
        for key, value in about.items():
            self.set_user_attr(key, value)

    def objective(self, trial: Trial, run: Any) -> float:
        """Run a trial by ``run(trial, cell, report)`` and return its value."""
        raise NotImplementedError

    def outcome(self, trial: FrozenTrial) -> str:
        """A line about a trial that has ended."""
        raise NotImplementedError

    def wanted(self) -> Collection[str]:
        """The digests of the cells to run by now."""
        return self.trials_by_cell.keys()

    def missing(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """The attributes and parameters of the trials to begin: fixed ones, or those of a trial that did not end."""
        for digest, trials in by_digest(self, self.wanted()).items():
            if decisive(trials) is None:
                attributes, parameters = self.trials_by_cell[digest]
                before = next((trial.params for trial in reversed(trials) if trial.params), {})
                yield attributes, parameters or dict(before)

    def last_trials(self) -> list[FrozenTrial]:
        """The trial that is decisive for each cell, where there is one."""
        return list(filter(None, map(decisive, by_digest(self, self.trials_by_cell).values())))

    def running(self) -> int:
        """How many cells are running, here or in other processes."""
        return sum(trial.state == TrialState.RUNNING for trial in self.last_trials())

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

    def trial(self, number: int) -> FrozenTrial:
        """A trial as it is now; it does not run any more where its process was silent and another took it for dead."""
        return next(trial for trial in self.get_trials(deepcopy=False) if trial.number == number)

    def retry(self) -> None:
        """Let failed cells be claimed again."""
        for trial in self.last_trials():
            if trial.state == TrialState.FAIL:
                attributes, _ = self.trials_by_cell[trial.user_attrs["digest"]]
                self.add_trial(create_trial(state=TrialState.FAIL, user_attrs=attributes))

    def forget(self, digests: Iterable[str]) -> None:
        """Drop the results of cells, which can then be claimed again."""
        for digest in digests:
            attributes = {**self.trials_by_cell[digest][0], ANEW: True}
            self.add_trial(create_trial(state=TrialState.FAIL, user_attrs=attributes))


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


# ------------------------------------------------------------------ the study of a suite
def find_study(suite: Suite, database: Database, output: Path | None = None) -> Study | None:
    """The study of a suite, None where there is none.

    Raises:
        UsageError: it is the study of another metric or margin, or the folder ``output`` has those of other suites.
    """
    summaries = {one.study_name: one for one in optuna.get_all_study_summaries(database, include_best_trial=False)}
    own = summaries.get(suite.name)
    if own is not None:
        # one that has just been created has no attributes yet
        known = own.user_attrs if own.n_trials else {"metric": suite.metric, **own.user_attrs}
        hint = f"the database has a study of this name by {known.get('metric')}, and this one is by {suite.metric}; "
        hint += "give another --output or --storage, or rename the suite's file"
        require(known.get("metric") == suite.metric, "suite", suite.name, hint)
        margin, now = known.get("margin"), suite.decide and suite.decide.margin
        hint = f"the first cell was run with {margin}; put that back, or give another --output or --storage"
        require(not own.n_trials or None in (margin, now) or margin == now, f"{suite.path}: decide.margin", now, hint)
    others = {one.user_attrs.get("suite", suite.name) for one in summaries.values()} - {suite.name}
    hint = f"it has the study of the suite {', '.join(sorted(others))}, not of {suite.name}; give another folder"
    require(output is None or not others, "--output", str(output), hint)
    return None if own is None else optuna.load_study(study_name=suite.name, storage=database)


def digest_of(trial: FrozenTrial) -> str | None:
    """The digest of a trial's cell; None where it has none, or where it repeats another trial."""
    return None if "repeats" in trial.user_attrs else trial.user_attrs.get("digest")


def by_digest(study: Study, digests: Iterable[str]) -> dict[str, list[FrozenTrial]]:
    """The trials of each digest, in their order, from the last one that drops earlier results."""
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
