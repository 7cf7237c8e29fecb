"""Runs each cell in a process, forked from one that has imported torch.

The scheduler and the process of a cell communicate through a pipe. The process sends each round and finally its answer;
the scheduler sends ``stop``, which ends the run after its current round as a success, or ``interrupt``, which acts like
Ctrl-C in a fit.
"""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from fl_lightning.storage.tempdirs import lock
from fl_lightning.utilities.errors import Stopped, UsageError, text_of, truncate, with_location

Task = Mapping[str, Any]
Answer = dict[str, Any]
RoundReport = Callable[[int, float], bool | None]
# seconds that a process has to end after its answer
LEAVE = 30.0
# the environment variables by which SLURM and torchrun describe a worker
WORKERS = ("SLURM_", "RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
# the environment variables by which torch, NumPy and scikit-learn choose a number of threads
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
# the module whose functions the processes call
PROGRAM = "fl_lightning.cli.bench_worker"
START = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
_STARTING = threading.Lock()


class Interrupt(Exception):
    """A run was stopped before its cell was done."""


class WorkerClient:
    """Runs one cell after another, each in a new process, on the GPU that the number of the job chooses."""

    def __init__(self, job: int = 0, program: str = PROGRAM) -> None:
        self.job, self.program, self.interrupted = job, program, False
        self._process: Any = None
        self._pipe: multiprocessing.connection.Connection | None = None

    def run(self, cell: Task, on_round: RoundReport) -> Answer:
        """Run a cell and return ``{"done": ...}`` or ``{"failed": reason}``.

        Args:
            cell: its ``name``, the ``fragments`` of its config, the ``output`` folder of all runs, the ``folder`` of
                its own, its ``log`` file and the suite's ``metric``.
            on_round: takes a round and its metric; true ends the run after this round or the next.
        """
        return self._call("run_cell", cell, on_round)

    def check(self, metric: str, configs: Mapping[str, Any]) -> dict[str, str]:
        """Build the objects of configs without running them, and return the errors by name of the config."""
        task = {"metric": metric, "configs": dict(configs), "log": os.devnull}
        answer = self._call("check_configs", task, lambda *_: None)
        return answer.get("done", dict.fromkeys(configs, answer.get("failed", "")))

    def interrupt(self) -> None:
        """Let the run end as a fit ends on a signal."""
        self.interrupted = True
        self._send("interrupt")

    def kill(self) -> None:
        """End the process at once."""
        self.interrupted = True
        if self._process is not None:
            with suppress(ValueError):  # it has ended
                self._process.kill()

    def _call(self, function: str, task: Task, on_round: RoundReport) -> Answer:
        """Call a function in a new process."""
        if self.interrupted:
            raise Interrupt
        context: Any = multiprocessing.get_context(START)
        pipe, far_end = context.Pipe()
        process = context.Process(target=serve, args=(far_end, self.program, function, dict(task), self.job))
        with _STARTING, importable():
            multiprocessing.set_forkserver_preload([self.program])
            process.start()
        far_end.close()
        self._process, self._pipe = process, pipe
        if self.interrupted:  # while it was started
            self._send("interrupt")
        answer: Answer = {}
        try:
            while not {"done", "failed", "stopped"} & answer.keys():
                answer = pipe.recv()
                if "round" in answer and on_round(answer["round"], answer["value"]):
                    self._send("stop")
        except (EOFError, ConnectionError):
            pass  # the process ended without an answer: its exit status says why
        finally:
            self._pipe = None
            pipe.close()  # which ends a process that still runs
            process.join(LEAVE)
            process.kill()
            process.join()
        if "done" in answer or "failed" in answer:
            return answer
        if self.interrupted or "stopped" in answer:
            raise Interrupt
        how = exit_text(process.exitcode)
        return {"failed": f"its process {how}; see {task['log']}"}

    def _send(self, message: str) -> None:
        if self._pipe is not None:
            with suppress(OSError):  # it has ended
                self._pipe.send(message)


def exit_text(status: int) -> str:
    """How a process with this exit status ended."""
    if status >= 0:
        return f"ended with status {status}"
    if -status == signal.SIGKILL:
        return "was killed by SIGKILL (often for lack of memory)"
    names = {int(number): number.name for number in signal.Signals}
    return f"was killed by {names.get(-status, f'signal {-status}')}"


@contextmanager
def importable() -> Iterator[None]:
    """Let processes that the block starts find this package, but not run the script of the user again.

    Libraries start one thread in each of them, unless an environment variable says otherwise.
    """
    script, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    before = dict(os.environ)
    paths = [str(Path(__file__).parents[2].resolve()), before.get("PYTHONPATH")]
    os.environ.update({**dict.fromkeys(THREADS, "1"), **before, "PYTHONPATH": os.pathsep.join(filter(None, paths))})
    try:
        yield
    finally:
        sys.modules["__main__"] = script
        for name in (*THREADS, "PYTHONPATH"):
            del os.environ[name]
        os.environ.update(before)


# ------------------------------------------------------------------ in the process of a cell
def serve(pipe: Any, program: str, function: str, task: dict[str, Any], job: int) -> None:
    """Call a function of the program and send its answer; its output goes into the file ``task["log"]``."""
    sys.argv = sys.orig_argv = ["fl-lightning"]
    if hasattr(os, "setsid"):
        os.setsid()  # Ctrl-C reaches the scheduler alone, which tells the workers
    # a shell that starts the scheduler in the background lets it ignore this signal, which ends a fit
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for key in [key for key in os.environ if key.startswith(WORKERS[0]) or key in WORKERS]:
        del os.environ[key]
    gpus = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    if len(gpus) > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[job % len(gpus)]
    stop = threading.Event()
    threading.Thread(target=listen, args=(pipe, stop), daemon=True).start()

    def report(round_: int, value: float) -> bool:
        pipe.send({"round": round_, "value": value})
        return stop.is_set()

    path = Path(task["log"])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    except OSError as error:
        pipe.send({"failed": truncate(f"--output: {error}; use a writable folder")})
    else:
        pipe.send(answer_of(program, function, task, report))


def listen(pipe: Any, stop: threading.Event) -> None:
    """Follow the messages of the scheduler, and end the process with it: the last checkpoint of the run stands."""
    with suppress(EOFError, OSError):
        while True:
            if pipe.recv() == "stop":
                stop.set()
            else:
                os.kill(os.getpid(), signal.SIGINT)
    os._exit(0)


def answer_of(program: str, function: str, task: Task, report: RoundReport) -> Answer:
    """Call a function of the program; returns its answer, or why it has failed."""
    try:
        call = getattr(import_module(program), function)
        gc.freeze()  # the imported libraries hold many objects, which each collection would look through
        return {"done": call(task, report)}
    except (Stopped, KeyboardInterrupt) as stopped:
        return {"stopped": str(stopped)}
    except SystemExit as ended:
        return {"failed": truncate(f"the run ended the program with status {ended.code or 0}")}
    except Exception as error:
        if not isinstance(error, UsageError):
            traceback.print_exc()
        return {"failed": reason_of(error)}
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):  # the disk may be full
                stream.flush()


def reason_of(error: Exception) -> str:
    """An error on one line; the text of an error of this package says enough without its type."""
    of_package = type(error).__module__ == UsageError.__module__
    return truncate(text_of(error) if of_package else with_location(error))


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a run's folder, which a process that was paused, and counts as dead, may still have."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a") as file:
        if lock(file) is False:
            print(f"waiting for another process, which has {folder}", file=sys.stderr, flush=True)
            while lock(file) is False:
                time.sleep(0.5)
        yield
