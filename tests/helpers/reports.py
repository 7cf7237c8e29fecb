"""Run folders written without training, and reports of them."""

import base64
import csv
import importlib.util
import os
import re
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from fl_lightning.cli import main
from fl_lightning.report.figures import Card

SPEED = Path(__file__).resolve().parents[2] / "experiments" / "speed" / "report.py"
_spec = importlib.util.spec_from_file_location("report_benchmark", SPEED)
benchmark = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(benchmark)
write_run = benchmark.write_run


def report_of(folder, *sources, arguments=(), drawn=True):
    """Write a report to a folder; return its files by their endings, such as ``md``, which lists all warnings."""
    with pytest.MonkeyPatch.context() as patch:
        if not drawn:
            undraw(patch)
        main(["report", *map(str, sources), "--output", str(folder / "page.html"), *map(str, arguments)])
    return {path.name.removeprefix("page."): path.read_text(encoding="utf-8") for path in folder.glob("page.*")}


def warnings_of(files):
    """The warnings of a report."""
    start = "- Warning: "
    return [line.removeprefix(start) for line in files["md"].splitlines() if line.startswith(start)]


def figures_of(files):
    """The figures of a report by name: the text of the element, and the rows of the data after their head."""
    found = {}
    for name, text in re.findall(r'<figure id="([^"]+)"(.*?)</figure>', files["html"], re.DOTALL):
        (data,) = re.findall(r'href="data:text/csv;charset=utf-8;base64,([^"]+)"', text)
        found[name] = text, list(csv.reader(base64.b64decode(data).decode().splitlines()))
    return found


def undraw(patch):
    """Leave out the drawings of a report, which take most of its time."""
    patch.setattr(Card, "elements", lambda self: iter(["<svg></svg>"]))


def make_old(folder, seconds=86_400):
    """Let a folder look as if nothing had happened there for some time."""
    then = time.time() - seconds
    for path in [folder, *folder.rglob("*")]:
        os.utime(path, (then, then))


HOLDER = """
import sys
from fl_lightning.storage.tempdirs import lock
with open(sys.argv[1], "a+") as file:
    print(lock(file, inherited=False), flush=True)
    sys.stdin.read()
"""


@contextmanager
def held(folder):
    """Have another process hold the lock of a run, as one that trains does."""
    args, pipe = [sys.executable, "-c", HOLDER, folder / "lock"], subprocess.PIPE
    with subprocess.Popen(args, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout.readline().strip() == "True"
        yield
        process.stdin.close()


def accuracies(folder, tag="test/accuracy"):
    """The accuracies of the rounds in a folder's metrics.csv."""
    header, *lines = (folder / "metrics.csv").read_text().splitlines()
    at = header.split(",").index(tag)
    return [float(line.split(",")[at]) for line in lines]


def snapshot(root):
    """Every file below a folder with its contents and the time of its last change."""
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in root.rglob("*") if path.is_file()}
