"""Measure the power of the tests: change one place of the package at a time, and check whether a test fails.

    python tests/mutants.py                                 # 300 mutants against the default tier
    python tests/mutants.py --tier all --survivors FILE     # those that survived in FILE, against all tests
    python tests/mutants.py --faults                        # the deliberate faults of tests/faults.yaml

A mutant changes one operator, constant, name, condition or statement of one file. It runs in a copy of the repository,
against the tests that ``TESTS`` names for its module, until the first failure. It is killed if a test fails, or if the
tests use a minute of processor time, which is more than they need without it. The libraries are imported once, and a
process is forked for each mutant.
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
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "fl_lightning"
# seconds of processor time that the tests of a mutant may use, in both tiers or for a fault, and seconds of the clock
PROCESSOR_LIMIT, LONG_LIMIT, CLOCK_LIMIT = 60, 300, 600
MODULES = {
    "sums": "core/weighted.py",
    "method": "core/method.py",
    "server": "core/server.py",
    "rounds": "engine/rounds.py",
    "cohort_training": "engine/cohort_training.py",
    "local_training": "training/local_training.py",
    "functional": "functional",
    "partitioners": "data/partitioners.py",
    "statistics": "bench/statistics.py",
}
SAME_BITS = "tests/engine/test_same_bits.py"
TESTS = {
    "sums": ["tests/core/test_weighted.py", "tests/core/test_exact_sum.py", "tests/engine/test_rounds.py"],
    "method": [
        *("tests/core/test_method.py", "tests/core/test_composition.py", "tests/methods/test_common.py"),
        SAME_BITS,
    ],
    "server": [
        *("tests/core/test_server.py", "tests/methods/test_fedavg.py", "tests/engine/test_rounds.py"),
        SAME_BITS,
    ],
    "rounds": ["tests/engine/test_rounds.py", "tests/core/test_systems.py", "tests/test_trainer.py", SAME_BITS],
    "cohort_training": [
        "tests/engine/test_rounds.py",
        "tests/core/test_systems.py",
        "tests/test_trainer.py",
        SAME_BITS,
    ],
    "local_training": [
        *(f"tests/conformance/test_{name}.py" for name in ("fit", "hook_order", "fit_logging")),
        "tests/engine/test_rounds.py",
    ],
    "functional": ["tests/functional", "fl_lightning/functional"],
    "partitioners": ["tests/data/test_partitioners.py"],
    "statistics": ["tests/bench/test_statistics.py"],
    "fault": [
        *(f"tests/{name}.py" for name in ("engine/test_rounds", "conformance/test_fit")),
        SAME_BITS,
        *(f"tests/{name}" for name in ("methods", "client", "conformance", "test_trainer.py", "core/test_server.py")),
    ],
}
OPERATORS: dict[type, type] = {
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
# calls that only make a message
MESSAGES = ("require", "UsageError", "warn", "warnings.warn")
# fields of a node that hold no code that runs, or the operator that its node replaces
IGNORED_FIELDS = ("annotation", "returns", "decorator_list", "op", "ops", "type_params")


@dataclass
class Mutant:
    """A changed file.

    Args:
        module: the key of its tests.
        path: the file, from the root of the repository.
        text: its changed text.
        name: the changed place, for people.
    """

    module: str
    path: str
    text: str
    name: str


def replacement(node: ast.AST) -> tuple[ast.AST, str] | None:
    """Return the part of a node that a mutant replaces, and its new code; None for a node without mutants."""
    unparse = ast.unparse
    match node:
        case ast.BinOp(left, op, right) if type(op) in OPERATORS:
            return node, f"({unparse(ast.BinOp(left, OPERATORS[type(op)](), right))})"
        case ast.BoolOp(op, values):
            return node, f"({unparse(ast.BoolOp(OPERATORS[type(op)](), values))})"
        case ast.Compare(left, [op, *ops], comparators):
            return node, f"({unparse(ast.Compare(left, [OPERATORS[type(op)](), *ops], comparators))})"
        case ast.UnaryOp(ast.Not() | ast.USub(), operand):
            return node, f"({unparse(operand)})"
        case ast.Constant(bool() as value):
            return node, str(not value)
        case ast.Constant(int() | float() as value):
            return node, repr(value + 1)
        case ast.Name(name) if name in NAMES:
            return node, NAMES[name]
        case ast.IfExp(test, body, orelse):
            return node, f"({unparse(ast.IfExp(test, orelse, body))})"
        case ast.If(test) | ast.While(test):
            return test, f"not ({unparse(test)})"
        case ast.Return(value) if value is not None:
            return node, "return None"
        case ast.Break() | ast.Continue():
            return node, "pass"
        case ast.Expr(value) | ast.AugAssign(value=value) if not isinstance(value, ast.Constant):
            return node, "pass"
    return None


def nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Walk over the code that runs, without imports, messages, annotations and decorators."""
    if isinstance(node, (ast.Import, ast.ImportFrom, ast.JoinedStr)):
        return
    if isinstance(node, ast.Call) and ast.unparse(node.func) in MESSAGES:
        return
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    yield node
    for field, value in ast.iter_fields(node):
        for child in () if field in IGNORED_FIELDS else value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from nodes(child)


def mutants_of(module: str, file: Path) -> Iterator[Mutant]:
    """All mutants of a file."""
    source, path = file.read_text(), str(file.relative_to(ROOT))
    lines = source.splitlines(keepends=True)

    def offset(line: int, column: int) -> int:
        return sum(map(len, lines[: line - 1])) + len(lines[line - 1].encode()[:column].decode())

    for node in nodes(ast.parse(source)):
        if (replaced := replacement(node)) is None:
            continue
        place, code = replaced
        start, end = offset(place.lineno, place.col_offset), offset(place.end_lineno, place.end_col_offset)
        if source[start:end] == code:
            continue
        before, after = (" ".join(text.split())[:60] for text in (source[start:end], code))
        text = source[:start] + code + source[end:]
        yield Mutant(module, path, text, f"{path}:{place.lineno}: {before} -> {after}")


def draw(number: int, seed: int) -> list[Mutant]:
    """Draw mutants without replacement, the same number from each module."""
    rng, chosen = random.Random(seed), list[Mutant]()
    for index, (module, name) in enumerate(MODULES.items()):
        place = PACKAGE / name
        files = sorted(place.rglob("*.py")) if place.is_dir() else [place]
        known = [mutant for file in files for mutant in mutants_of(module, file)]
        share = number * (index + 1) // len(MODULES) - number * index // len(MODULES)
        chosen += rng.sample(known, min(share, len(known)))
    return chosen


def faults() -> list[Mutant]:
    """Return the deliberate faults; each replaces a text that occurs once in its file."""
    found = []
    for fault in yaml.safe_load((ROOT / "tests" / "faults.yaml").read_text()):
        source = (PACKAGE / fault["file"]).read_text()
        if source.count(fault["before"]) != 1:
            raise SystemExit(f"tests/faults.yaml: {fault['name']}: its text stands not once in {fault['file']}")
        text = source.replace(fault["before"], fault["after"])
        found.append(Mutant("fault", f"fl_lightning/{fault['file']}", text, fault["name"]))
    return found


def start_tests(folder: Path, module: str, tier: str, keeps_bytecode: bool = False) -> int:
    """Run the tests of a module in a forked process, in a copy of the repository; returns the id of the process."""
    child = os.fork()
    if child:
        return child
    os.setpgid(0, 0)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    limit = LONG_LIMIT if module == "fault" or tier == "all" else PROCESSOR_LIMIT
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    signal.alarm(CLOCK_LIMIT)
    sys.dont_write_bytecode = not keeps_bytecode
    os.environ |= {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "" if keeps_bytecode else "1"}
    log = os.open("tests.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    marker = ["-m", ""] if tier == "all" else []
    tests = [test for test in TESTS[module] if (folder / test).exists()]
    os._exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *marker, *tests]))


def wait_for_tests() -> tuple[int, str]:
    """Wait until the tests of a process end, and end all processes that they started; returns id and outcome."""
    child, code = os.wait()
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(code)
    return child, "survived" if status == 0 else "killed" if status > 0 else "out of time"


def judge_all(mutants: list[Mutant], tier: str, jobs: int) -> Iterator[tuple[Mutant, str, float]]:
    """Run each mutant, after the tests have passed without one."""
    with tempfile.TemporaryDirectory() as root:
        first, waiting = Path(root, "0"), mutants[::-1]
        tracked = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.run(tracked, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines():
            if (ROOT / name).is_file():
                (first / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, first / name)
        for module in dict.fromkeys(mutant.module for mutant in mutants):
            started = time.monotonic()
            start_tests(first, module, tier, keeps_bytecode=True)
            _, outcome = wait_for_tests()
            print(f"{module}: {time.monotonic() - started:.0f} s without a mutant", flush=True)
            if outcome != "survived":
                log = (first / "tests.log").read_text()
                raise SystemExit(f"{log[-3000:]}\nthe tests of {module} do not pass without a mutant: {outcome}")
        folders = [first, *(shutil.copytree(first, Path(root, str(number))) for number in range(1, jobs))]
        running: dict[int, tuple[Mutant, Path, float]] = {}
        while waiting or running:
            while waiting and folders:
                mutant, folder = waiting.pop(), folders.pop()
                file = folder / mutant.path
                for cached in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
                    cached.unlink()  # bytecode of the same second would hide the change
                file.write_text(mutant.text)
                running[start_tests(folder, mutant.module, tier)] = mutant, folder, time.monotonic()
            child, outcome = wait_for_tests()
            mutant, folder, started = running.pop(child)
            shutil.copyfile(ROOT / mutant.path, folder / mutant.path)
            folders.append(folder)
            yield mutant, outcome, time.monotonic() - started


def import_libraries() -> None:
    """Import the libraries that forked processes use, with one thread each."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import lightning.pytorch  # noqa: F401
    import optuna  # noqa: F401
    import scipy.stats  # noqa: F401
    import sklearn.datasets  # noqa: F401
    import torch._dynamo
    import torchmetrics  # noqa: F401
    import torchvision  # noqa: F401

    torch.set_num_threads(1)


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=300, help="number of mutants (300)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw (0)")
    parser.add_argument("--module", choices=MODULES, nargs="+", default=[*MODULES], help="modules (all)")
    parser.add_argument("--tier", choices=["default", "all"], default="default", help="tests to run (default)")
    parser.add_argument("--survivors", type=Path, help="only mutants that survived in this CSV")
    parser.add_argument("--faults", action="store_true", help="the faults of tests/faults.yaml instead of mutants")
    parser.add_argument("--jobs", type=int, default=2, help="processes (2)")
    parser.add_argument("--output", type=Path, help="CSV with a row for each mutant")
    parser.add_argument("--list", action="store_true", help="print the mutants, and run nothing")
    options = parser.parse_args()
    mutants = faults() if options.faults else draw(options.number, options.seed)
    mutants = [mutant for mutant in mutants if mutant.module in (*options.module, "fault")]
    if options.survivors:
        rows = csv.DictReader(options.survivors.read_text().splitlines())
        survived = {row["mutant"] for row in rows if row["outcome"] == "survived"}
        mutants = [mutant for mutant in mutants if mutant.name in survived]
    if options.list:
        return print(*(mutant.name for mutant in mutants), sep="\n")
    import_libraries()
    rows, counts = [], Counter[tuple[str, str]]()
    for mutant, outcome, seconds in judge_all(mutants, options.tier, options.jobs):
        counts[mutant.module, outcome] += 1
        rows.append([mutant.module, mutant.name, outcome, f"{seconds:.1f}"])
        if outcome != "killed" or options.faults:
            print(f"{outcome}: {mutant.name}", flush=True)
        if options.output:
            with options.output.open("w", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows([["module", "mutant", "outcome", "seconds"], *rows])
    print("| module | mutants | killed | out of time | survived |\n|---|---:|---:|---:|---:|")
    for module in dict.fromkeys(mutant.module for mutant in mutants):
        found = [counts[module, outcome] for outcome in ("killed", "out of time", "survived")]
        print(f"| {module} |", " | ".join(map(str, [sum(found), *found])), "|")
    return None


if __name__ == "__main__":
    main()
