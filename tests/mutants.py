"""Measure the power of the tests: change one operator of the package at a time, and see whether a test fails.

    python tests/mutants.py                     # 300 mutants, default tier; writes tests/mutants.csv
    python tests/mutants.py --tier all          # the same mutants, all tests
    python tests/mutants.py --faults            # the deliberate faults of tests/faults.yaml instead

Each mutant changes one place in one file. It runs in a copy of the repository, against the tests that TESTS names for
its file, until the first failure. A mutant is *killed* if a test fails, or if the tests use 60 seconds of processor time
where they need less without it. A worker imports the libraries once and forks for each mutant.
"""

from __future__ import annotations

import argparse
import ast
import csv
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "fl_lightning"
SECONDS = 60
MODULES = {
    "sums": ["sums"],
    "method": ["method.py"],
    "server": ["server.py"],
    "rounds": ["engine/rounds.py"],
    "local_training": ["engine/local_training.py"],
    "functional": ["functional"],
    "partitioners": ["data/partitioners"],
    "statistics": ["bench/statistics.py"],
}
TESTS = {
    "sums": ["tests/sums", "tests/engine/test_rounds.py"],
    "method": ["tests/test_method.py", "tests/test_composition.py", "tests/methods/test_common.py"],
    "server": ["tests/test_server.py", "tests/optim", "tests/methods/test_fedavg.py", "tests/engine/test_rounds.py"],
    "rounds": ["tests/engine/test_rounds.py", "tests/test_systems.py", "tests/test_trainer.py"],
    "local_training": [
        *(f"tests/conformance/test_{name}.py" for name in ("fit", "hook_order", "fit_logging")),
        "tests/engine/test_rounds.py",
    ],
    "functional": ["tests/functional", "fl_lightning/functional"],
    "partitioners": ["tests/data/test_partitioners.py"],
    "statistics": ["tests/bench/test_statistics.py"],
}
SWAPS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Div,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.MatMult: ast.Mult,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "sum": "len", "zeros_like": "ones_like"}


class Mutant:
    """One changed place: the text of a file, and what was changed in which line."""

    def __init__(self, module: str, path: str, node: ast.AST, replacement: str, source: str):
        self.module, self.path, self.line = module, path, node.lineno
        start, end = (
            _offset(source, node.lineno, node.col_offset),
            _offset(source, node.end_lineno, node.end_col_offset),
        )
        self.before, self.after = source[start:end], replacement
        self.text = source[:start] + replacement + source[end:]

    def __str__(self) -> str:
        short = (" ".join(text.split())[:60] for text in (self.before, self.after))
        return f"{self.path}:{self.line}: " + " -> ".join(short)


def _offset(source: str, line: int, column: int) -> int:
    lines = source.splitlines(keepends=True)
    return sum(map(len, lines[: line - 1])) + len(lines[line - 1].encode()[:column].decode())


def mutants_of(module: str, path: Path) -> list[Mutant]:
    """Return all mutants of a file. Docstrings, annotations, messages and imports have none."""
    source = path.read_text()
    found = []

    def add(node: ast.AST, replacement: str) -> None:
        mutant = Mutant(module, str(path.relative_to(ROOT)), node, replacement, source)
        if mutant.before != mutant.after:
            found.append(mutant)

    def visit(node: ast.AST) -> None:
        if isinstance(node, (ast.Import, ast.ImportFrom, ast.JoinedStr)):
            return
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("require", "UsageError", "warn", "warnings.warn"):
            return
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
            add(node, f"({ast.unparse(ast.BinOp(node.left, SWAPS[type(node.op)](), node.right))})")
        elif isinstance(node, ast.BoolOp):
            add(node, f"({ast.unparse(ast.BoolOp(SWAPS[type(node.op)](), node.values))})")
        elif isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
            swapped = ast.Compare(node.left, [SWAPS[type(node.ops[0])](), *node.ops[1:]], node.comparators)
            add(node, f"({ast.unparse(swapped)})")
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
            add(node, f"({ast.unparse(node.operand)})")
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            add(node, str(not node.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            add(node, repr(node.value + 1))
        elif isinstance(node, ast.Name) and node.id in NAMES:
            add(node, NAMES[node.id])
        elif isinstance(node, ast.IfExp):
            add(node, f"({ast.unparse(ast.IfExp(node.test, node.orelse, node.body))})")
        elif isinstance(node, (ast.If, ast.While)):
            add(node.test, f"not ({ast.unparse(node.test)})")
        elif isinstance(node, ast.Return) and node.value is not None:
            add(node, "return None")
        elif isinstance(node, (ast.AugAssign, ast.Expr)) and not isinstance(getattr(node, "value", 0), ast.Constant):
            add(node, "pass")
        elif isinstance(node, (ast.Break, ast.Continue)):
            add(node, "pass")
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "op", "ops", "type_params"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    visit(child)

    visit(ast.parse(source))
    return found


def drawn(number: int, seed: int) -> list[Mutant]:
    """Draw the same number of mutants from each module, without replacement."""
    rng, chosen = random.Random(seed), []
    for index, (module, places) in enumerate(MODULES.items()):
        files = [file for place in places for file in _python_files(ROOT / PACKAGE / place)]
        every = [mutant for file in files for mutant in mutants_of(module, file)]
        share = number * (index + 1) // len(MODULES) - number * index // len(MODULES)
        chosen += rng.sample(every, min(share, len(every)))
    return chosen


def _python_files(place: Path) -> list[Path]:
    return sorted(place.rglob("*.py")) if place.is_dir() else [place]


# --------------------------------------------------------------------------------------------- a worker


class Worker:
    """A process with the libraries imported, which forks for each mutant, in a copy of the repository of its own."""

    def __init__(self, repository: Path, folder: Path):
        self.copy = folder
        files = subprocess.run(["git", "ls-files"], cwd=repository, capture_output=True, text=True, check=True).stdout
        for name in files.splitlines():
            if (repository / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(repository / name, folder / name)
        environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(Path(__file__).resolve()), "--worker"]
        self.process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, tests: list[str], marker: str, write: bool = False) -> tuple[str, float]:
        """Run tests in the copy until the first failure; return the outcome and its seconds."""
        started = time.monotonic()
        there = [test for test in tests if (self.copy / test).exists()]
        assert there, f"none of these tests exists: {tests}"
        assert self.process.stdin is not None and self.process.stdout is not None
        print(int(write), marker or "-", *there, sep="\t", file=self.process.stdin, flush=True)
        return self.process.stdout.readline().strip(), time.monotonic() - started

    def run_mutant(self, path: str, text: str, tests: list[str], marker: str) -> tuple[str, float]:
        """Run tests with another text of one file."""
        file = self.copy / path
        original = file.read_text()
        for cache in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
            cache.unlink()  # nothing writes another one: a cache of the same second would hide the change
        file.write_text(text)
        try:
            return self.run(tests, marker)
        finally:
            file.write_text(original)


def serve() -> None:
    """Import the libraries, then answer each line of standard input by an outcome."""
    import hypothesis
    import lightning.pytorch
    import optuna
    import pytest
    import scipy.stats
    import sklearn.datasets
    import sqlalchemy
    import torch
    import torch._dynamo
    import torchmetrics
    import torchvision

    del hypothesis, lightning, optuna, scipy, sklearn, sqlalchemy, torchmetrics, torchvision
    torch.set_num_threads(1)
    for line in sys.stdin:
        write, marker, *tests = line.rstrip("\n").split("\t")
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
            sys.dont_write_bytecode = not int(write)
            os.environ["PYTHONDONTWRITEBYTECODE"] = "" if int(write) else "1"
            log = os.open("mutant.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            tier = [] if marker == "-" else ["-m", "" if marker == "all" else marker]
            code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tier, *tests])
            sys.stdout.flush()
            os._exit(int(code))
        outcome = _wait(child)
        print(outcome, flush=True)


def _wait(child: int) -> str:
    deadline = time.monotonic() + 10 * SECONDS
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            _kill_group(child)
            return "survived" if code == 0 else "killed" if code > 0 else "out of time"
        time.sleep(0.02)
    _kill_group(child)
    os.waitpid(child, 0)
    return "out of time"


def _kill_group(child: int) -> None:
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        pass


# --------------------------------------------------------------------------------------------- the whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=300, help="number of mutants (default: 300)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw (default: 0)")
    parser.add_argument("--tier", choices=["default", "all"], default="default", help="the tests that run")
    parser.add_argument("--jobs", type=int, default=2, help="number of processes (default: 2)")
    parser.add_argument("--module", choices=MODULES, action="append", help="only mutants of this module")
    parser.add_argument("--only", metavar="CSV", help="only the mutants that survived in this file")
    parser.add_argument("--output", default=str(ROOT / "tests" / "mutants.csv"), help="a row for each mutant")
    parser.add_argument("--faults", action="store_true", help="the deliberate faults of tests/faults.yaml instead")
    parser.add_argument("--list", action="store_true", help="print the mutants and end")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return serve()
    mutants = [one for one in drawn(options.number, options.seed) if one.module in (options.module or MODULES)]
    if options.only:
        with open(options.only, newline="") as file:
            wanted = {row["mutant"] for row in csv.DictReader(file) if row["outcome"] == "survived"}
        mutants = [one for one in mutants if str(one) in wanted]
    if options.list:
        return print(*mutants, sep="\n")
    marker = "all" if options.tier == "all" else ""
    with tempfile.TemporaryDirectory() as folder:
        idle: Queue[Worker] = Queue()
        for number in range(options.jobs):
            idle.put(Worker(ROOT, Path(folder, str(number))))

        def with_worker(task):
            worker = idle.get()
            try:
                return task(worker)
            finally:
                idle.put(worker)

        # without a mutant all tests pass, within the limit
        def warm(worker: Worker) -> dict[str, tuple[str, float]]:
            return {module: worker.run(TESTS[module], marker, write=True) for module in {m.module for m in mutants}}

        with ThreadPoolExecutor(options.jobs) as pool:
            workers = [idle.get() for _ in range(options.jobs)]
            for times in pool.map(warm, workers):
                for module, (outcome, seconds) in times.items():
                    print(f"{module}: {outcome} without a mutant, {seconds:.0f} s", flush=True)
                    if outcome != "survived":
                        raise SystemExit(f"the tests of {module} do not pass without a mutant: {outcome}")
            for worker in workers:
                idle.put(worker)

            def judge(mutant: Mutant) -> tuple[Mutant, str, float]:
                tests = TESTS[mutant.module]
                return mutant, *with_worker(lambda worker: worker.run_mutant(mutant.path, mutant.text, tests, marker))

            with open(options.output, "w", newline="") as file:
                writer = csv.writer(file, lineterminator="\n")
                writer.writerow(["module", "mutant", "outcome", "seconds"])
                counts: Counter[tuple[str, str]] = Counter()
                for mutant, outcome, seconds in pool.map(judge, mutants):
                    counts[mutant.module, outcome] += 1
                    writer.writerow([mutant.module, str(mutant), outcome, f"{seconds:.1f}"])
                    file.flush()
                    if outcome == "survived":
                        print("survived", mutant, flush=True)
        for worker in workers:
            worker.process.kill()
    print("| module | mutants | killed |\n|---|---:|---:|")
    for module in MODULES:
        of_module = {outcome: count for (name, outcome), count in counts.items() if name == module}
        if of_module:
            killed = sum(count for outcome, count in of_module.items() if outcome != "survived")
            print(f"| {module} | {sum(of_module.values())} | {killed} |")


if __name__ == "__main__":
    main()
