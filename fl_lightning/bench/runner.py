"""The loop of a runner process: it runs one cell after another, and tells what becomes of each."""

from __future__ import annotations

import gc
import json
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fl_lightning.errors import Stopped, UsageError, clipped, located, text_of
from fl_lightning.records.temporary import lock

RoundReport = Callable[[int, float], bool]
RunCell = Callable[[Mapping[str, Any], RoundReport], dict[str, Any]]
# seconds between two attempts to lock the folder of a run
LOCK_POLL = 0.5


def serve(run: RunCell, clean: Callable[[], object] = gc.collect) -> None:
    """Run the cells that arrive on stdin, until it is closed.

    A cell has its ``name``, the ``fragments`` of its config, the ``output`` folder of all runs, the ``folder`` of its
    own, its ``log`` file and the suite's ``metric``. What a run prints goes into that file.

    Args:
        run: runs a cell and returns what it tells of itself. It reports each round with its metric; the answer is
            whether the run is to end.
        clean: frees what the cell has left, once its outcome is told.
    """
    # a shell that starts the driver in the background lets it ignore this signal, which ends a fit
    signal.signal(signal.SIGINT, signal.default_int_handler)
    driver = DriverLine()
    with suppress(KeyboardInterrupt):
        answer: dict[str, Any] = {}
        while "stopped" not in answer:
            cell = driver.cells.get()
            driver.send({"begun": cell["name"]})
            answer = outcome(run, cell, driver)
            driver.send(answer)
            try:
                clean()
            except Exception as error:  # as on a GPU that a failed run has left unusable
                print(f"the process that runs cells ends, and the next begins another: {error}", file=sys.stderr)
                return


class DriverLine:
    """The line to the driver: stdin and stdout, which the runs themselves do not see.

    Attributes:
        cells: what arrives.
        stop: whether the present run is to end.
    """

    def __init__(self) -> None:
        self.cells: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.stop = threading.Event()
        self._requests = os.fdopen(os.dup(0))
        self._answers = os.fdopen(os.dup(1), "w")
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(2, 1)
        threading.Thread(target=self._listen, daemon=True).start()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message to the driver, or end the process where there is none any more."""
        try:
            self._answers.write(json.dumps(message) + "\n")
            self._answers.flush()
        except BrokenPipeError:
            os._exit(1)

    def report(self, round_: int, value: float) -> bool:
        """Report a round and its metric; returns whether the run is to end."""
        self.send({"round": round_, "value": value})
        return self.stop.is_set()

    def _listen(self) -> None:
        for line in self._requests:
            message = json.loads(line)
            if "run" in message:
                self.stop.clear()
                self.cells.put(message["run"])
            else:
                self.stop.set()
        # the driver has ended: nobody waits for this run, whose last checkpoint stands
        os._exit(0)


def outcome(run: RunCell, cell: Mapping[str, Any], driver: DriverLine) -> dict[str, Any]:
    """Run a cell, and say what became of it; a cell that fails does not end the process."""
    try:
        with logging_to(Path(cell["log"])), locked(Path(cell["output"]) / cell["folder"]):
            try:
                return {"done": run(cell, driver.report)}
            except Exception as error:
                if not isinstance(error, UsageError):
                    traceback.print_exc()
                # the text of an error of our own says enough without its type
                own = type(error).__module__ == UsageError.__module__
                return {"failed": clipped(text_of(error) if own else located(error))}
    except (Stopped, KeyboardInterrupt) as stopped:
        return {"stopped": str(stopped)}
    except OSError as error:
        return {"failed": clipped(f"--output: {error}; give a folder that can be written to")}
    except SystemExit as ended:
        return {"failed": clipped(f"the run ended the program with status {ended.code or 0}")}


@contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Write what the block prints, in whatever language, to the end of a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    before = os.dup(1), os.dup(2)
    with path.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):  # on a full disk, the log is the least that is lost
                stream.flush()
        for number, old in zip((1, 2), before, strict=True):
            os.dup2(old, number)
            os.close(old)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a run's folder in the block; waits while another process has it.

    A process that was paused, and therefore taken for dead, may come back and go on with its run. It is waited for:
    what it has done is in the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a+") as file:
        waits = lock(file) is False
        if waits:
            file.seek(0)
            print(f"waiting for the run of another process: {file.read().strip()}", file=sys.stderr, flush=True)
        while waits and lock(file) is False:
            time.sleep(LOCK_POLL)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield
