"""What the programs of this folder share: parts that run as processes with a time limit, and results as JSON lines."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from lightning.fabric.accelerators import CUDAAccelerator

sys.path.insert(0, str(Path.cwd()))

from fl_lightning.distributed.launcher import gc_disabled, init_forked_process
from fl_lightning.utilities.numerics import WORKSPACE

# a function that takes the program, and its time limit in seconds
Part = tuple[Callable[["Program"], None], float]
# seconds that a part has after SIGTERM, and that must be left to begin one
GRACE, MIN_SECONDS = 3.0, 8.0


def arguments(about: str | None, seconds: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, to try the program on a CPU")
    parser.add_argument("--seconds", type=int, default=seconds, help="limit of the program")
    parser.add_argument("--output", type=Path, default=Path("runs/gpu"), metavar="FOLDER", help="of the results")
    return parser


def arguments_of_parts(about: str | None, seconds: int, jobs: int) -> argparse.ArgumentParser:
    parser = arguments(about, seconds)
    parser.add_argument("--parts", nargs="+", help="only these, by name or by the name before the first colon")
    parser.add_argument("--jobs", type=int, default=jobs, help="parts that run at the same time")
    parser.add_argument("--slow", type=float, default=1.0, help="multiplies the time limits of the parts")
    parser.add_argument("--list", action="store_true", help="print the parts and their limits, and run nothing")
    return parser


class Program:
    """A program that writes ``NAME.jsonl`` and ``NAME.log``; each part has a copy of this object in its process.

    Args:
        name: of the program.
        args: its arguments.
        scratch: a folder for temporary files of all parts.
    """

    def __init__(self, name: str, args: argparse.Namespace, scratch: Path) -> None:
        self.name, self.args, self.scratch = name, args, scratch
        self.device, self.tiny, self.on_gpu = args.device, args.tiny, args.device == "cuda"
        self.accelerator = "gpu" if self.on_gpu else "cpu"
        self.part = name  # that is being run
        self._began = time.time()
        self._console = os.dup(1)
        args.output.mkdir(parents=True, exist_ok=True)
        self.path("jsonl").touch()
        self._start = self.path("jsonl").stat().st_size

    @property
    def seconds_left(self) -> float:
        return self.args.seconds - (time.time() - self._began)

    def path(self, suffix: str) -> Path:
        return self.args.output / f"{self.name}.{suffix}"

    def record(self, **values: Any) -> None:
        """Append a line to the results; a crash later loses nothing."""
        line = json.dumps({"part": self.part, "at": round(time.time() - self._began, 1), **values}, default=str) + "\n"
        with self.path("jsonl").open("a") as file:
            file.write(line)
        os.write(self._console, line.encode())

    def record_end(self, part: str, status: object, log: Path, ok: bool) -> None:
        """Record how a process has ended and append its output to the log; the line of a failure has the end of it."""
        text = log.read_text(errors="replace")
        with self.path("log").open("a") as file:
            file.write(f"===== {part}: {status}\n{text[-20_000:]}\n")
        self.part = part
        self.record(ok=ok, ended=status, **({} if ok else {"log": text[-1500:]}))

    def exit_status(self) -> int:
        """1 where a line of this program is not ok."""
        with self.path("jsonl").open() as file:
            file.seek(self._start)
            failed = {line["part"] for line in map(json.loads, file) if not line.get("ok", True)}
        print(f"not ok: {', '.join(sorted(failed)) or 'nothing'}; {self.path('jsonl')}, {self.path('log')}")
        return int(bool(failed))

    def run(self, parts: dict[str, Part]) -> None:
        """Run the parts in this order, ``--jobs`` at a time; after ``--seconds`` none continues."""
        waiting, running = list(parts), list[Job]()
        try:
            while waiting or running:
                while waiting and len(running) < self.args.jobs and self.seconds_left > MIN_SECONDS:
                    function, limit = parts[name := waiting.pop(0)]
                    running.append(Job(self, name, function, min(limit * self.args.slow, self.seconds_left - GRACE)))
                if not running:
                    self.part = self.name
                    self.record(skipped=waiting)
                    break
                wait([job.process.sentinel for job in running], max(0.0, min(job.seconds_left for job in running)))
                for job in [job for job in running if job.process.exitcode is not None or job.seconds_left <= 0]:
                    running.remove(job)
                    job.end()
        finally:
            for job in running:
                job.end()


class Job:
    """A part in a process, forked from this one, which has imported the package but not used the GPU."""

    def __init__(self, program: Program, name: str, function: Callable[[Program], None], limit: float) -> None:
        self.program, self.name, self._began, self._limit = program, name, time.time(), limit
        self._log = program.scratch / f"{name.replace(':', '-').replace('/', '-')}.log"
        self._log.touch()
        self.process = multiprocessing.get_context("fork").Process(target=self._work, args=(function,))
        with gc_disabled():
            self.process.start()

    @property
    def seconds_left(self) -> float:
        return self._limit - (time.time() - self._began)

    def end(self) -> None:
        """Record how the part has ended, after its end or its time."""
        status = "timeout" if self.process.exitcode is None else self.process.exitcode
        for number in (signal.SIGTERM, signal.SIGKILL):  # to the programs that it has started, too
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid or 0, number)
            self.process.join(GRACE)
        self.program.record_end(self.name, status, self._log, status == 0)

    def _work(self, function: Callable[[Program], None]) -> None:
        init_forked_process()
        os.environ.update({**WORKSPACE, **os.environ})  # torch reads it once, perhaps before a deterministic run
        os.setsid()
        with self._log.open("a") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        self.program.part = self.name
        try:
            function(self.program)
        except BaseException:
            traceback.print_exc()
            raise SystemExit(1) from None
        finally:
            sys.stdout.flush()
            sys.stderr.flush()


@contextmanager
def open_program(file: str, args: argparse.Namespace) -> Iterator[Program]:
    """The program of a file; exits after this block, with status 1 where a line is not ok."""
    if args.device == "cuda" and not CUDAAccelerator.is_available():  # unlike torch's function, it leaves the GPU alone
        sys.exit("no GPU is available; --device cpu --tiny tries the program")
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # which ends its processes, too
    try:
        with tempfile.TemporaryDirectory(prefix="gpu-") as scratch:
            program = Program(Path(file).stem, args, Path(scratch))
            yield program
            sys.exit(program.exit_status())
    finally:
        signal.signal(signal.SIGTERM, previous)


def run_program(file: str, args: argparse.Namespace, parts: dict[str, Part]) -> None:
    """Run the parts, or list them; exits with status 1 where a line is not ok."""
    wanted = args.parts or parts
    chosen = {name: part for name, part in parts.items() if name in wanted or name.partition(":")[0] in wanted}
    if not chosen:
        sys.exit(f"--parts={' '.join(wanted)}: unknown; --list prints the parts")
    if args.list:
        print("\n".join(f"{name:32}{limit:5.0f} s" for name, (_, limit) in chosen.items()))
        return
    with open_program(file, args) as program:
        program.run(chosen)


def each(function: Callable[..., None], limit: float, *choices: tuple[Any, ...]) -> dict[str, Part]:
    """A part for each choice of a function's further arguments; a single part without choices."""

    def part(choice: tuple[Any, ...]) -> Part:
        return lambda program: function(program, *choice), limit

    return {":".join([function.__name__, *map(str, choice)]): part(choice) for choice in choices or [()]}


@contextmanager
def mps(program: Program) -> Iterator[bool]:
    """Start NVIDIA's Multi-Process Service for the processes that this one starts; yields whether it answers."""
    control = shutil.which("nvidia-cuda-mps-control")
    if not program.on_gpu or control is None:
        program.record(mps="is not installed" if program.on_gpu else "needs a GPU")
        yield False
        return
    names = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
    for name in names:
        os.environ[name] = tempfile.mkdtemp(dir=program.scratch)

    def answers(*command: str, text: str = "") -> bool:
        return subprocess.run(["timeout", "30", *command], input=text, text=True).returncode == 0

    def stop() -> None:
        answers(control, text="quit\n")
        for name in names:
            del os.environ[name]

    started = answers(control, "-d")
    works = started and answers(sys.executable, "-c", "import torch; torch.ones(2, device='cuda').sum().item()")
    program.record(mps=works, started=started)
    if not works:
        stop()
    try:
        yield works
    finally:
        if works:
            stop()
