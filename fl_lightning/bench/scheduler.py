"""Runs the missing cells of studies: each of several jobs claims a cell and runs it until all cells are done."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from optuna.exceptions import TrialPruned, UpdateFinishedTrialError
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, Trial, TrialState

from fl_lightning.bench.cell import Cell
from fl_lightning.bench.results import CellResult
from fl_lightning.bench.study import DATABASE_ERRORS, CellStudy, attributes_of, results_of
from fl_lightning.bench.suite import Suite
from fl_lightning.bench.worker_client import Interrupt, RoundReport, WorkerClient
from fl_lightning.storage.metric_format import format_value
from fl_lightning.utilities.errors import printable

# seconds between two checks of a study whose cells are all done or run elsewhere
POLL = 2.0
# seconds between two rounds of a running cell that its trial records, for the study's charts
PACE = 1.0
# the signals that stop the program, which resumes later: SLURM sends the last one before the end of a job
STOPPING_NAMES = ("SIGINT", "SIGTERM", "SIGUSR1")
STOPPING = [getattr(signal, name) for name in STOPPING_NAMES if hasattr(signal, name)]


class Failed(Exception):
    """A cell failed; its trial has the reason."""


class Scheduler:
    """Runs the missing cells of studies, one study after another, with several jobs side by side.

    Attributes:
        caught: the signal that has stopped it.
        error: the error that has ended a job, such as a lost connection to the database.
    """

    def __init__(
        self,
        studies: Sequence[CellStudy],
        metric: str,
        output: Path,
        jobs: int = 1,
        say: Callable[[str], object] = print,
        client: Callable[[int], Any] = WorkerClient,
    ) -> None:
        self.studies, self.metric, self.output, self.say = studies, metric, output, say
        self.clients = [client(job) for job in range(jobs)]
        self.caught: signal.Signals | None = None
        self.error: BaseException | None = None
        self._stop, self._said = threading.Event(), set[str]()

    def run(self) -> None:
        """Run all cells that are not done."""
        with ExitStack() as stack:
            # other threads than the main one cannot have handlers
            for number in STOPPING if threading.current_thread() is threading.main_thread() else ():
                handler = signal.getsignal(number)
                if handler not in (signal.SIG_IGN, None):  # one that is ignored stays ignored
                    signal.signal(number, self._catch)
                    stack.callback(signal.signal, number, handler)
            pool = stack.enter_context(ThreadPoolExecutor(len(self.clients)))
            jobs = [pool.submit(self._job, client) for client in self.clients]
            # with a timeout: a handler of a signal runs between two waits
            while wait(jobs, 0.2).not_done:
                pass

    def stop(self) -> None:
        """Let the jobs end: their runs stop as a fit does on a signal, and can be resumed."""
        self._stop.set()
        for client in self.clients:
            client.interrupt()

    def _catch(self, number: int, frame: Any) -> None:
        if self.caught is None:
            self.caught = signal.Signals(number)
            self.say(f"{self.caught.name}: the runs stop after their present round; a second signal ends them at once")
            self.stop()
        else:
            for client in self.clients:
                client.kill()

    def _say_once(self, kind: str, line: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            self.say(line)

    def _job(self, client: Any) -> None:
        """Run cells with one client until all are done."""
        try:
            while not self._stop.is_set():
                if any(self._run_next(study, client) for study in self.studies):
                    continue
                trials = [trial for study in self.studies for trial in study.last_trials()]
                elsewhere = sum(trial.state == TrialState.RUNNING for trial in trials)
                if not elsewhere:
                    return
                self._say_once("waits", f"no cell to start; running here or in other processes: {elsewhere}")
                self._stop.wait(POLL)
        except Exception as error:
            self.error = self.error or error
            self.stop()

    def _run_next(self, study: CellStudy, client: Any) -> bool:
        """Claim a cell and run it; returns whether there was one."""
        trial = study.claim()
        if trial is None:
            return False
        value, state, ended = None, TrialState.FAIL, None
        try:
            with study.heartbeat(trial):
                value = study.objective(trial, partial(self._run_cell, client))
            state = TrialState.COMPLETE
        except TrialPruned:
            state = TrialState.PRUNED
        except UpdateFinishedTrialError:
            self.say("this process was silent, and another one has taken its cell")
        except (Failed, Interrupt):
            pass  # without a reason, the cell can be claimed again
        except Exception:
            with suppress(UpdateFinishedTrialError, *DATABASE_ERRORS):
                study.tell(trial, state=TrialState.FAIL, skip_if_finished=True)
            raise
        with suppress(UpdateFinishedTrialError):
            ended = study.tell(trial, value, state, skip_if_finished=True)
        if ended is not None and (ended.state == TrialState.COMPLETE or "reason" in ended.user_attrs):
            self.say(study.outcome(ended))
        return True

    def _run_cell(self, client: Any, trial: Trial, cell: Cell, report: RoundReport) -> dict[str, Any]:
        """Run a cell for a trial and return its result."""
        task = {
            "name": cell.name,
            "fragments": cell.fragments,
            "folder": cell.folder,
            "output": str(self.output),
            "log": str(self.output / "logs" / f"{cell.folder}.log"),
            "metric": self.metric,
        }
        answer = client.run(task, report)
        if "failed" in answer:
            trial.set_user_attr("reason", printable(answer["failed"]))
            raise Failed
        result: dict[str, Any] = answer["done"]
        for warning in result.get("warnings", ()):
            self._say_once(f"warning {warning}", f"{cell.name}: warning: {warning}")
        return result


class SuiteStudy(CellStudy):
    """The study of a suite, which may also contain other cells, for example of another scale.

    Args:
        choose: selects the cells to run from the results of all cells; by default all.
    """

    def __init__(
        self,
        suite: Suite,
        database: RDBStorage,
        cells: Sequence[Cell],
        choose: Callable[[Mapping[str, CellResult]], Sequence[Cell]] | None = None,
    ) -> None:
        about = {"suite": suite.name, "metric": suite.metric, "title": suite.title, "file": str(suite.path.resolve())}
        margin = {"margin": suite.decide.margin} if suite.decide else {}
        trials: dict[str, Any] = {cell.digest: (attributes_of(cell), {}) for cell in cells}
        super().__init__(suite.name, database, suite.minimize, trials, {**about, **margin})
        self.suite, self.cells, self.choose = suite, {cell.digest: cell for cell in cells}, choose

    def results(self) -> dict[str, CellResult]:
        """The results of the cells, by digest."""
        return results_of(self, list(self.cells.values()))

    def wanted(self) -> Collection[str]:
        """The digests of the cells to run by now."""
        if self.choose is None:
            return self.cells
        return [cell.digest for cell in self.choose(self.results())]

    def objective(self, trial: Trial, run: Any) -> float:
        """The last value of the cell's metric."""
        last_report = time.monotonic()

        def report(round_: int, value: float) -> None:
            nonlocal last_report
            if time.monotonic() > last_report + PACE:
                with suppress(UpdateFinishedTrialError):
                    trial.report(value, round_)
                last_report = time.monotonic()

        result = run(trial, self.cells[trial.user_attrs["digest"]], report)
        trial.set_user_attr("result", result)  # one value: each is a transaction
        return last_value(result)

    def outcome(self, trial: FrozenTrial) -> str:
        """A line about a cell that has ended."""
        results, digests = self.results(), set(self.wanted())
        finished = sum(results[digest].state == "done" for digest in digests)
        text = f"failed: {trial.user_attrs.get('reason')}"
        if trial.state == TrialState.COMPLETE and trial.duration is not None:
            value = format_value(self.suite.metric, trial.values[0])
            text = f"{self.suite.metric} {value}, {trial.duration.total_seconds():.1f} s"
        name = self.cells[trial.user_attrs["digest"]].name
        so_far = "" if self.choose is None else " so far"
        return f"{name}: {text} ({finished} of {len(digests)} done{so_far})"


def last_value(result: Mapping[str, Any]) -> float:
    """The metric of the last round of a cell."""
    return float(result["values"][max(result["values"])])
