"""A runner process, as the process sees it that drives it.

They talk in lines of JSON: down go a cell and, while it runs, the wish that it stops; up come what it reports of each
round, and at last what became of it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

Message = dict[str, Any]
# how often a cell is begun whose process dies
ATTEMPTS = 3
# seconds that an interrupted runner has to end
LEAVE = 30.0
# what torchrun tells a worker
WORKERS = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
COMMAND = (sys.executable, "-m", "fl_lightning.cli.cells")


class Interrupt(Exception):
    """The runner was told to end, before its cell was done."""


class Runner:
    """A process that runs one cell after another; it is started when it is first needed.

    Args:
        job: number of this process among those that work side by side, which chooses its GPU.
        command: the program.
    """

    def __init__(self, job: int = 0, command: Sequence[str] = COMMAND) -> None:
        self.command = list(command)
        self.environment = runner_environment(job)
        self.interrupted = self._begun = False
        self._process: subprocess.Popen[str] | None = None

    def run(self, cell: Mapping[str, Any], on_round: Callable[[int, float], bool | None]) -> Message:
        """Run a cell, and return what became of it: ``{"done": ...}`` or ``{"failed": reason}``.

        Args:
            cell: see :func:`fl_lightning.bench.runner.serve`.
            on_round: takes a round and its metric; true where the run is to end after this round, or the next.

        Raises:
            Interrupt: :meth:`interrupt` was called.
        """
        ends = []
        for _ in range(ATTEMPTS):
            answer = self._once(cell, on_round)
            if answer is not None and "stopped" not in answer:
                return answer
            if self.interrupted:
                raise Interrupt
            ends.append(self._ending())
        times = f"{len(ends)} times" if len(set(ends)) == 1 else "each time"
        return {"failed": f"the process that ran it {ends[-1]}, {times}; see {cell['log']}"}

    def interrupt(self) -> None:
        """Let the process end: as a fit ends on a signal, or at once where it has not begun the cell."""
        self.interrupted = True
        self._signal(signal.SIGINT if self._begun else signal.SIGTERM)

    def kill(self) -> None:
        """End the process at once."""
        self.interrupted = True
        self._signal(signal.SIGKILL)

    def close(self) -> None:
        """End the process, which has nothing to do."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(OSError):
            process.stdin.close()  # type: ignore[union-attr]
        try:
            process.wait(LEAVE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()  # type: ignore[union-attr]

    def _once(self, cell: Mapping[str, Any], on_round: Callable[[int, float], bool | None]) -> Message | None:
        """Begin or resume a cell; None where the process has died."""
        if self._process is None or self._process.poll() is not None:
            self.close()
            # in a session of its own: Ctrl-C reaches the driver alone, which tells its runners
            pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
            self._process = subprocess.Popen(self.command, env=self.environment, start_new_session=True, **pipes)
        self._begun = False
        self._send({"run": cell})
        while not self.interrupted or self._begun:
            message = self._receive()
            if message is None or not {"begun", "round"} & set(message):
                return message
            self._begun = True
            if "round" in message and on_round(message["round"], message["value"]):
                self._send({"stop": True})
        return None

    def _send(self, message: Message) -> None:
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(message) + "\n")  # type: ignore[union-attr]

    def _receive(self) -> Message | None:
        for line in iter(self._process.stdout.readline, ""):  # type: ignore[union-attr]
            # a library may print while it is imported, before the runner keeps this pipe to itself
            with suppress(ValueError):
                message = json.loads(line)
                if isinstance(message, dict) and line.endswith("\n"):
                    return message
        return None

    def _signal(self, number: signal.Signals) -> None:
        process = self._process
        if process is not None:
            with suppress(OSError):
                process.send_signal(number)

    def _ending(self) -> str:
        """How the process ended."""
        status = self._process.wait() if self._process is not None else 0
        if status >= 0:
            return f"ended with status {status}"
        often = " (often for lack of memory)" if -status == signal.SIGKILL else ""
        # most real-time ones have no name
        name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
        return f"was killed by {name}{often}"


def runner_environment(job: int) -> dict[str, str]:
    """The environment of a runner, in which it sees one of the GPUs where there are several to choose from."""
    # it is no worker of a cluster's, even where SLURM or torchrun has started several drivers
    own = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_") and key not in WORKERS}
    # it runs this package, wherever it lies; -m adds the working folder, which has the user's own classes
    own["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(Path(__file__).parents[2].resolve()), own.get("PYTHONPATH", "")])
    )
    gpus = [gpu for gpu in own.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    if len(gpus) > 1:
        own["CUDA_VISIBLE_DEVICES"] = gpus[job % len(gpus)]
    return own
