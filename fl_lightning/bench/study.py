"""The study of a suite: its cells as trials of Optuna, which any number of processes claim.

A process claims a cell by adding a running trial with the digest of the cell; of several such trials the first holds.
A trial that failed has a reason. One without a reason was interrupted, or its process has died: it counts for nothing,
and the cell may be claimed again.
"""

from __future__ import annotations

import math
import os
import socket
import sqlite3
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning, StorageInternalError, UpdateFinishedTrialError
from optuna.pruners import BasePruner
from optuna.storages import RDBStorage, fail_stale_trials
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial
from sqlalchemy import event
from sqlalchemy.exc import SQLAlchemyError

from fl_lightning.bench.cell import Cell
from fl_lightning.bench.results import CellResult, CellState, StoredCell, waiting
from fl_lightning.bench.suite import Suite
from fl_lightning.utilities.errors import UsageError, require, text_of, truncate

# seconds between two signs of life of a running cell, and those after which its process counts as dead
HEARTBEAT, GRACE = 20, 90
# seconds for which SQLite waits while another process writes
PATIENCE = 120
SQLITE = "sqlite:///"
# the attribute of a trial that makes the earlier trials of its cell count for nothing
ANEW = "anew"
# the parts of a result that a trial keeps
KEPT_OF_RESULT = ("values", "seconds", "plan", "metrics", "machine", "run_dir", "code", "warnings")
# the errors of a database, such as one that is locked or whose disk is full
DATABASE_ERRORS = (SQLAlchemyError, StorageInternalError)


class CellStudy(Study):
    """A study whose cells any number of threads and processes claim; created if it does not exist.

    ``cells`` has the attributes and fixed parameters of each cell's trial, by digest.
    """

    # runs a trial by ``run(trial, cell, report)`` and returns its value
    objective: Callable[[Trial, Any], float]
    # a line about a trial that has ended
    outcome: Callable[[FrozenTrial], str]

    def __init__(
        self,
        name: str,
        database: RDBStorage,
        minimize: bool,
        cells: Mapping[str, tuple[dict[str, Any], dict[str, Any]]],
        about: Mapping[str, Any],
        pruner: BasePruner | None = None,
    ) -> None:
        direction = StudyDirection.MINIMIZE if minimize else StudyDirection.MAXIMIZE
        optuna.create_study(study_name=name, direction=direction, storage=database, load_if_exists=True)
        super().__init__(name, database, optuna.samplers.RandomSampler(seed=0), pruner)
        self.database, self.trials_by_cell = database, cells
        for key, value in about.items():
            self.set_user_attr(key, value)

    def wanted(self) -> Collection[str]:
        """The digests of the cells to run by now."""
        return self.trials_by_cell.keys()

    def missing(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Return the attributes and parameters of the trials to start: fixed ones, or of a trial that did not end."""
        for digest, trials in by_digest(self, self.wanted()).items():
            if decisive(trials) is None:
                attributes, parameters = self.trials_by_cell[digest]
                before = next((trial.params for trial in reversed(trials) if trial.params), {})
                yield attributes, parameters or dict(before)

    def last_trials(self) -> list[FrozenTrial]:
        """The decisive trial of each cell that has one."""
        return list(filter(None, map(decisive, by_digest(self, self.trials_by_cell).values())))

    def claim(self) -> Trial | None:
        """Release the cells of dead processes and claim the next cell; None if no cell is waiting."""
        fail_stale_trials(self)
        # processes that died between their claim and its first sign of life; the attribute `process` comes after both
        late = datetime.now() - timedelta(seconds=2 * GRACE)
        for trial in self.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            start = trial.datetime_start
            if "process" not in trial.user_attrs and start is not None and start < late:
                self.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)
        for attributes, parameters in self.missing():
            fixed = {"fixed_params": parameters} if parameters else {}
            running = create_trial(state=TrialState.RUNNING, user_attrs=attributes, system_attrs=fixed)
            # numbers of the database are consecutive, so the second of two claims sees the first
            trial_id = self.database.create_new_trial(self.database.get_study_id_from_name(self.study_name), running)
            self.beat(trial_id)
            claimed, digest = Trial(self, trial_id), attributes["digest"]
            holder = decisive(by_digest(self, [digest])[digest])
            with suppress(UpdateFinishedTrialError):  # of a process that was paused, and counts as dead
                if holder is not None and holder.number == claimed.number:
                    claimed.set_user_attr("process", f"{os.getpid()} on {socket.gethostname()}")
                    return claimed
                claimed.set_user_attr("repeats", None if holder is None else holder.number)
                self.tell(claimed, state=TrialState.PRUNED, skip_if_finished=True)
        return None

    def beat(self, trial_id: int) -> None:
        """Update a trial's heartbeat; if the database fails, the next heartbeat counts."""
        with suppress(*DATABASE_ERRORS):
            self.database.record_heartbeat(trial_id)

    @contextmanager
    def heartbeat(self, trial: Trial) -> Iterator[None]:
        """Give signs of life of a trial, from a thread, as long as the block runs."""
        ended = threading.Event()

        def keep_beating() -> None:
            while not ended.wait(HEARTBEAT):
                self.beat(trial._trial_id)

        thread = threading.Thread(target=keep_beating, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def retry(self) -> None:
        """Let failed cells be claimed again."""
        failed = [trial for trial in self.last_trials() if trial.state == TrialState.FAIL]
        self.free([trial.user_attrs["digest"] for trial in failed])

    def free(self, digests: Iterable[str], **attributes: bool) -> None:
        """Make cells claimable again; with ``anew=True``, their earlier trials no longer count."""
        for digest in digests:
            self.add_trial(
                create_trial(state=TrialState.FAIL, user_attrs={**self.trials_by_cell[digest][0], **attributes})
            )


def cause_of(error: BaseException) -> str:
    """The first line of the innermost error, which the layers above the database have wrapped."""
    while error.__cause__ is not None:
        error = error.__cause__
    return truncate(text_of(error).strip().partition("\n")[0])


# ------------------------------------------------------------------ the database
def open_database(url: str) -> RDBStorage:
    """A connection to the database at ``url``, for several threads."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=ExperimentalWarning)
    sqlite = url.startswith("sqlite")
    how: dict[str, Any] = {"pool_pre_ping": True, **({"connect_args": {"timeout": PATIENCE}} if sqlite else {})}
    for pause in (0.5, 1.0, None):
        try:
            database = RDBStorage(url, how, heartbeat_interval=HEARTBEAT, grace_period=GRACE)
            if not sqlite:
                return database
            # SQLite knows no SELECT FOR UPDATE: a transaction locks the database from its begin on, since otherwise two
            # claims could get one number
            event.listen(database.engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
            event.listen(database.engine, "connect", wait_less_for_disk)
            database.engine.dispose()  # the connections that have been opened before
            return database
        except (*DATABASE_ERRORS, ImportError, RuntimeError, ValueError) as error:
            # another process may have created the tables at the same time
            why = cause_of(error)
            if pause is None or "locked" in why:
                driver = "install its driver (such as psycopg[binary], psycopg2-binary or mysqlclient), or "
                hint = f"{driver * isinstance(error, ImportError)}give another URL"
                raise UsageError(f"--storage={hidden(url)!r}: cannot be used: {why}; {hint}") from error
        time.sleep(pause)
    raise AssertionError


@contextmanager
def open_to_read(url: str) -> Iterator[RDBStorage]:
    """A connection to an existing database that changes neither it nor the folder of a file.

    Raises:
        UsageError: the database does not exist, or it cannot be read.
    """
    require(exists(url), "STUDY", hidden(url), "no such database")
    how: dict[str, Any] = {}
    if url.startswith(SQLITE):
        path = Path(url.removeprefix(SQLITE).split("?")[0]).resolve()
        # without a writer, a connection that may not lock creates no files next to the database
        still = "" if path.with_name(f"{path.name}-wal").exists() else "&immutable=1"
        how["creator"] = partial(sqlite3.connect, f"{path.as_uri()}?mode=ro{still}", uri=True, check_same_thread=False)
    try:
        database = RDBStorage(url, how, skip_table_creation=True)
    except (*DATABASE_ERRORS, ImportError, RuntimeError, ValueError) as error:
        hint = f"cannot be read: {cause_of(error)}; pass the output of bench"
        raise UsageError(f"STUDY={hidden(url)!r}: {hint}") from error
    yield database
    database.remove_session()
    database.engine.dispose()


def wait_less_for_disk(connection: Any, record: Any) -> None:
    """Let a power cut lose the end of a cell, which is in the folder of its run, too."""
    with suppress(sqlite3.OperationalError):  # while another process begins, which sets it, too
        connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")


def hidden(url: str) -> str:
    """A URL without its password."""
    head, at, tail = url.rpartition("@")
    scheme, _, login = head.partition("://")
    return f"{scheme}://{login.split(':')[0]}{at}{tail}" if at else url


def exists(url: str) -> bool:
    """Whether there is a database at ``url``, as far as that shows without creating one."""
    # also true for a folder or a dead link, for which opening fails
    return not url.startswith(SQLITE) or os.path.lexists(url.removeprefix(SQLITE).split("?")[0])


# ------------------------------------------------------------------ the study of a suite
def find_study(suite: Suite, database: RDBStorage, output: Path | None = None) -> Study | None:
    """Return the study of a suite; None if it does not exist."""
    summaries = optuna.get_all_study_summaries(database, include_best_trial=False)
    of_suite = next((summary for summary in summaries if summary.study_name == suite.name), None)
    if of_suite is not None and of_suite.n_trials:
        metric, margin = of_suite.user_attrs.get("metric"), of_suite.user_attrs.get("margin")
        hint = f"the database has a study of this name by {metric}, and this one is by {suite.metric}; "
        hint += "use another --output or --storage, or rename the suite's file"
        require(metric == suite.metric, "suite", suite.name, hint)
        now = suite.decide and suite.decide.margin
        hint = f"the first cell was run with {margin}; restore it, or use another --output or --storage"
        require(None in (margin, now) or margin == now, f"{suite.path}: decide.margin", now, hint)
    foreign = {summary.user_attrs.get("suite", suite.name) for summary in summaries} - {suite.name}
    hint = f"it has the study of the suite {', '.join(sorted(foreign))}, not of {suite.name}; use another folder"
    require(output is None or not foreign, "--output", str(output), hint)
    return None if of_suite is None else optuna.load_study(study_name=suite.name, storage=database)


def trial_digest(trial: FrozenTrial) -> str | None:
    """The digest of a trial's cell; None where it has none, or where it repeats another trial."""
    return None if "repeats" in trial.user_attrs else trial.user_attrs.get("digest")


def by_digest(study: Study, digests: Iterable[str]) -> dict[str, list[FrozenTrial]]:
    """The trials of each digest, in their order, from the last one that drops earlier results."""
    trials_of: dict[str, list[FrozenTrial]] = {digest: [] for digest in digests}
    for trial in study.get_trials(deepcopy=False):
        if (digest := trial_digest(trial)) in trials_of:
            trials_of[digest] = [*([] if ANEW in trial.user_attrs else trials_of[digest]), trial]
    return trials_of


def decisive(trials: Sequence[FrozenTrial]) -> FrozenTrial | None:
    """The trial that decides the state of a cell; None where the cell has to be run (again)."""
    for state in (TrialState.COMPLETE, TrialState.RUNNING):
        for trial in trials:
            if trial.state == state:
                return trial
    return trials[-1] if trials and "reason" in trials[-1].user_attrs else None


def attributes_of(cell: Cell) -> dict[str, Any]:
    """The attributes of a cell's trial."""
    of_cell = {"digest": cell.digest, "labels": cell.labels, "seed": cell.seed, "scale": cell.scale}
    return {**of_cell, "cell": cell.name}


def load_results(study: Study, cells: Sequence[Cell], results: Mapping[str, CellResult]) -> int:
    """Mark cells as done whose results, by digest, come from elsewhere; return the number of new results."""
    worst = math.inf if study.direction == StudyDirection.MINIMIZE else -math.inf
    loadable = {cell.digest: cell for cell in cells if cell.digest in results}
    num_new = 0
    for digest, trials in by_digest(study, loadable).items():
        if any(trial.state == TrialState.COMPLETE for trial in trials):
            continue
        result = results[digest]
        final = result.values[max(result.values)]
        kept_attributes = {key: getattr(result, key) for key in KEPT_OF_RESULT}
        study.add_trial(
            create_trial(
                value=worst if math.isnan(final) else final,  # Optuna takes no nan
                intermediate_values=dict(result.values),
                user_attrs={**attributes_of(loadable[digest]), "result": kept_attributes},
            )
        )
        num_new += 1
    return num_new


def results_of(
    study: Study | None, cells: Sequence[Cell], stored: Mapping[str, CellResult] | None = None
) -> dict[str, CellResult]:
    """The result of each cell, by its digest: that of the study, or else a ``stored`` one; other cells wait."""
    trials_of = by_digest(study, [cell.digest for cell in cells]) if study is not None else {}
    results = {}
    for cell in cells:
        result = result_of_trial(cell, decisive(trials_of.get(cell.digest, ())))
        results[cell.digest] = (stored or {}).get(cell.digest, result) if result.state == "waiting" else result
    return results


def read_study(study: Study) -> Iterator[StoredCell]:
    """Yield the cells of a study with the labels that they were run with, without configs, and their results."""
    digests = filter(None, map(trial_digest, study.get_trials(deepcopy=False)))
    for digest, trials in by_digest(study, digests).items():
        attributes = trials[-1].user_attrs
        scale = attributes.get("scale", 1.0)
        cell = Cell(dict(attributes["labels"]), int(attributes["seed"]), ({},), scale, digest)
        yield cell, result_of_trial(cell, decisive(trials))


def result_of_trial(cell: Cell, trial: FrozenTrial | None) -> CellResult:
    """The result of a cell, from its decisive trial."""
    if trial is None:
        return waiting(cell)
    states: Mapping[TrialState, CellState]
    states = {TrialState.COMPLETE: "done", TrialState.FAIL: "failed", TrialState.RUNNING: "running"}
    kept_attributes: Mapping[str, Any] = trial.user_attrs.get("result", {})
    values = kept_attributes.get("values") or trial.intermediate_values
    return replace(
        waiting(cell),
        state=states.get(trial.state, "waiting"),
        reason=trial.user_attrs.get("reason", ""),
        scale=trial.user_attrs.get("scale", cell.scale),
        **{key: kept_attributes[key] for key in KEPT_OF_RESULT[1:] if key in kept_attributes},
        values={int(round_): float(value) for round_, value in values.items()},
    )
