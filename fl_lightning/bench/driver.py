"""Drives the runner processes: each takes cells from the study's queue until all of them are done."""

from __future__ import annotations

import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from optuna.exceptions import TrialPruned, UpdateFinishedTrialError
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState

from fl_lightning.bench.process import Interrupt, Runner
from fl_lightning.bench.results import CellResult
from fl_lightning.bench.study import (
    CellStudy,
    Database,
    QueueEmpty,
    digest_of,
    enqueue_missing,
    fail_dead,
    is_running,
    open_study,
    repeats,
    results_of,
    running,
)
from fl_lightning.bench.suite import Cell, Suite
from fl_lightning.errors import printable
from fl_lightning.records.summary import told

# seconds between two looks at an empty queue while other processes run cells
QUEUE_POLL = 2.0
# seconds between two values of a cell that goes on which the study is told, for its charts
PACE = 1.0
# the signals after which the program goes on later: SLURM sends the last one before the end of a job
STOPPING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))


class Failed(Exception):
    """A cell failed; its trial has the reason."""


class Dropped(Exception):
    """Another process has taken a trial over."""


class Repetition(TrialPruned):
    """A trial repeats another one."""


class Driver:
    """Runs the cells of a suite, in several runner processes side by side.

    Args:
        suite: the suite.
        cells: those of its cells that are run.
        database: the connection to it.
        output: folder of all runs.
        jobs: number of runner processes.
        say: takes the lines that say what has been done.
        runner: makes the runner of a job, by its number.
        wanted: says which of the cells are to be run by now, from what there is of all of them; by default all.
        hours: after which no cell is begun any more.

    Attributes:
        caught: the signal that has stopped it; None without one.
        error: what a job has failed with, such as a database that is not there any more; None without one.
        late: whether the hours have been spent before all was done.
    """

    def __init__(
        self,
        suite: Suite,
        cells: Sequence[Cell],
        database: Database,
        output: Path,
        jobs: int = 1,
        say: Callable[[str], object] = print,
        runner: Callable[[int], Any] = Runner,
        wanted: Callable[[Mapping[str, CellResult]], Sequence[Cell]] | None = None,
        hours: float = math.inf,
    ) -> None:
        self.wanted, self.late, self._end = wanted, False, time.monotonic() + 3600 * hours
        self.suite, self.cells, self.database, self.output, self.say = suite, cells, database, output, say
        self.metric, self.by_digest = suite.metric, {cell.digest: cell for cell in cells}
        self.runners = [runner(job) for job in range(jobs)]
        self.caught: signal.Signals | None = None
        self.error: BaseException | None = None
        self._stop, self._lock, self._waits = threading.Event(), threading.Lock(), False

    def run(self) -> None:
        """Run all cells that are not done."""
        with ExitStack() as stack:
            # other threads than the main one cannot have handlers
            for number in STOPPING if threading.current_thread() is threading.main_thread() else ():
                handler = signal.getsignal(number)
                if handler not in (signal.SIG_IGN, None):  # one that is ignored stays ignored
                    signal.signal(number, self._catch)
                    stack.callback(signal.signal, number, handler)
            pool = stack.enter_context(ThreadPoolExecutor(len(self.runners)))
            jobs = [pool.submit(self._job, runner) for runner in self.runners]
            # with a timeout: a handler of a signal runs between two waits
            while wait(jobs, 0.2).not_done:
                pass

    def stop(self) -> None:
        """Let the jobs end: their runs stop as a fit does on a signal, and go on another time."""
        self._stop.set()
        for runner in self.runners:
            runner.interrupt()

    def _catch(self, number: int, frame: Any) -> None:
        if self.caught is None:
            self.caught = signal.Signals(number)
            self.say(f"{self.caught.name}: the runs stop after their present round; a second signal ends them at once")
            self.stop()
        else:
            for runner in self.runners:
                runner.kill()

    def _job(self, runner: Any) -> None:
        """Work with one runner until nothing is left to do."""
        try:
            self._work(runner)
        except Exception as error:
            self.error = self.error or error
            self.stop()
        finally:
            runner.close()

    def _work(self, runner: Any) -> None:
        """Take trials from the queues until all are done."""
        studies = self._open_studies()
        while not self._stop.is_set():
            study = next(filter(self._has_work, studies), None)
            if study is not None and time.monotonic() >= self._end:
                self.late = True
                return
            if study is not None:
                with suppress(QueueEmpty, Interrupt, Dropped):
                    trial = run_next(study, partial(self._objective, study, runner))
                    if digest_of(trial) is not None:
                        self.say(self._outcome(study, trial))
                continue
            elsewhere = sum(digest_of(trial) in study.digests for study in studies for trial in running(study))
            if not elsewhere:
                return
            with self._lock:
                if not self._waits:
                    self.say(f"the queue is empty; still running, here or in other processes: {elsewhere}")
                self._waits = True
            self._stop.wait(QUEUE_POLL)

    def _has_work(self, study: CellStudy) -> bool:
        """Whether a trial is in the queue, after those were queued that nobody has begun or that were interrupted."""
        fail_dead(study)
        with self._lock:
            return bool(study.queued()) or self._enqueue(study)

    # ------------------------------------------------------------------ what is run, here the cells of a suite
    def _open_studies(self) -> list[CellStudy]:
        return [open_study(self.suite, self.database, self.cells)]

    def _enqueue(self, study: CellStudy) -> bool:
        """Queue what is missing; returns whether anything is."""
        cells = self.cells if self.wanted is None else self.wanted(results_of(study, self.cells))
        return enqueue_missing(study, cells) > 0

    def _objective(self, study: CellStudy, runner: Any, trial: Trial) -> float:
        """Run a trial and return its value."""
        drop_repetition(study, trial)
        report = Reporter(trial)
        result = self._run_cell(study, runner, trial, self.by_digest[trial.user_attrs["digest"]], report)
        drop_repetition(study, trial)
        trial.set_user_attr("result", result)  # one value: each is a transaction
        last, value = last_value(result)
        report.tell(last, value)
        return value

    def _outcome(self, study: CellStudy, trial: FrozenTrial) -> str:
        """The line about a trial that has ended."""
        results = results_of(study, self.cells)
        cells = self.cells if self.wanted is None else self.wanted(results)
        digests = {cell.digest for cell in cells}
        done = sum(results[digest].state == "done" for digest in digests)
        outcome = f"failed: {trial.user_attrs.get('reason')}"
        if trial.state == TrialState.COMPLETE and trial.duration is not None:
            value = told(self.suite.metric, trial.values[0])
            outcome = f"{self.suite.metric} {value}, {trial.duration.total_seconds():.1f} s"
        name = self.by_digest[trial.user_attrs["digest"]].name
        return f"{name}: {outcome} ({done} of {len(digests)} done{' so far' * (self.wanted is not None)})"

    def _run_cell(
        self, study: CellStudy, runner: Any, trial: Trial, cell: Cell, report: Callable[[int, float], bool | None]
    ) -> dict[str, Any]:
        """Run a cell for a trial; returns what it tells of itself."""
        message = {
            "name": cell.name,
            "fragments": cell.fragments,
            "folder": cell.folder,
            "output": str(self.output),
            "log": str(self.output / "logs" / f"{cell.folder}.log"),
            "metric": self.metric,
        }
        answer = runner.run(message, report)
        if not is_running(study, trial.number):
            self.say(f"{cell.name}: this process was silent, and another one has taken the cell")
            raise Dropped
        if "failed" in answer:
            trial.set_user_attr("reason", printable(answer["failed"]))
            raise Failed
        return answer["done"]


def last_value(result: Mapping[str, Any]) -> tuple[int, float]:
    """The last round of what a cell tells of itself, and its metric; in JSON, rounds are texts."""
    values = {int(round_): float(value) for round_, value in result["values"].items()}
    return max(values.items())


def run_next(study: Study, objective: Callable[[Trial], float]) -> FrozenTrial:
    """Run the next trial of a study's queue; returns it as it has ended.

    Raises:
        QueueEmpty: another process has taken the last one.
        Interrupt: the job was told to stop; nothing says that the trial failed, so it is queued again.
        Dropped: the trial is not ours to finish.
    """
    numbers: list[int] = []
    own: list[ValueError] = []

    def begun(trial: Trial) -> float:
        numbers.append(trial.number)
        trial.set_user_attr("process", f"{os.getpid()} on {socket.gethostname()}")
        try:
            return objective(trial)
        except ValueError as error:
            own.append(error)
            raise

    try:
        # within optimize there is a heartbeat
        study.optimize(begun, n_trials=1, catch=(Failed,))
    except (ValueError, UpdateFinishedTrialError) as error:
        # a trial that is not running any more takes no value
        if not numbers or error in own or is_running(study, numbers[0]):
            raise
        raise Dropped from error
    return next(trial for trial in study.get_trials(deepcopy=False) if trial.number == numbers[0])


def drop_repetition(study: Study, trial: Trial, error: type[Exception] = Repetition) -> None:
    """Give up a trial whose cell is done, or is run by another one, by raising ``error``."""
    other = repeats(study, trial.number, trial.user_attrs["digest"])
    if other is not None:
        trial.set_user_attr("repeats", other)
        raise error


class Reporter:
    """Tells a trial the metric of its rounds, not more often than takes no noticeable time.

    Args:
        trial: the trial.
    """

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self._told: set[int] = set()
        self._last = time.monotonic()

    def __call__(self, round_: int, value: float) -> None:
        """Tell it of a round, unless it has just been told of another."""
        if time.monotonic() > self._last + PACE:
            self.tell(round_, value)

    def tell(self, round_: int, value: float) -> None:
        """Tell it of a round; not twice, as where a run resumes."""
        if round_ not in self._told:
            self._told.add(round_)
            self._last = time.monotonic()
            with suppress(UpdateFinishedTrialError):
                self.trial.report(value, round_)
