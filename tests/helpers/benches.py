"""Suites of tiny cells, cells that a function answers instead of a training run, and tables from their numbers."""

import os
import tempfile
import threading
from collections import namedtuple
from functools import cache, partial
from pathlib import Path

import yaml
from sqlalchemy import event

from fl_lightning.bench import cells_csv, load_suite, scheduler, table
from fl_lightning.bench.results import CellResult
from fl_lightning.bench.study import open_database
from fl_lightning.bench.worker_client import PROGRAM, Interrupt, answer_of
from fl_lightning.cli import bench as command
from fl_lightning.cli import main

TOY = """
title: Toy
base: {model: {class_path: Toy}, trainer: {max_rounds: 3}}
axes:
  method: {FedAvg: {}, FedProx: {method: [{class_path: FedProx}]}}
  lr: {key: model.init_args.lr, values: [0.1, 0.2]}
seeds: 1
"""
# the exit status of a command, its output, and the names of the cells that ran
Ended = namedtuple("Ended", "status out err ran")


def toy_suite(folder, text=TOY):
    """Write a suite to a file, by default with 4 cells."""
    path = folder / "toy.yaml"
    path.write_text(text if isinstance(text, str) else yaml.safe_dump(text, sort_keys=False))
    return load_suite(path)


def outcome(values=(0.25, 0.5), **other):
    """Return the message of a finished cell."""
    told = {"seconds": 0.5, "plan": "abc", "metrics": {"test/accuracy": values[-1]}, "machine": "toy", "run_dir": "run"}
    return {"done": {"values": dict(enumerate(values)), **told, **other}}


def train(cell, on_round):
    """Train a cell in this process: another one takes seconds to import torch."""
    return answer_of(PROGRAM, "run_cell", cell, on_round)


# ---------------------------------------------------------------- commands
class FakeWorkerClient:
    """Runs cells without training.

    Args:
        job: number of the job.
        answer: maps a cell and the function that takes its rounds to its outcome; None lets the cell run until it is
            interrupted.
    """

    def __init__(self, job=0, answer=lambda cell, on_round: outcome()):
        self.answer, self.ran, self.interrupted = answer, [], threading.Event()

    def run(self, cell, on_round):
        self.ran.append(cell["name"])
        told = self.answer(cell, on_round)
        if told is None:
            assert self.interrupted.wait(60)
            raise Interrupt
        return told

    def interrupt(self):
        self.interrupted.set()

    kill = interrupt

    def check(self, metric, configs):
        return {}


def run_command(patch, capsys, args, answer=lambda cell, on_round: outcome()):
    """Run ``bench`` or ``tune`` with cells that ``answer`` runs; returns how it has ended."""
    ran = []

    def noted(cell, on_round):
        ran.append(cell["name"])
        return answer(cell, on_round)

    client = partial(FakeWorkerClient, answer=noted)
    with patch.context() as patched:
        patched.setattr(command, "Scheduler", partial(scheduler.Scheduler, client=client))
        patched.setattr(command, "WorkerClient", FakeWorkerClient)
        patched.setattr(command, "open_database", quick_database)
        patched.setattr(command, "cpu_count", lambda: 4)
        patched.setattr(scheduler, "POLL", 0.05)
        patched.setattr(scheduler, "PACE", 0.0)
        try:
            main([str(arg) for arg in args])
            status = 0
        except SystemExit as ended:
            status = ended.code or 0
    said = capsys.readouterr()
    return Ended(status, said.out, said.err, ran)


# ---------------------------------------------------------------- tables
def result(cell, values=(0.25, 0.5), state="done", **other):
    """The result of a cell."""
    values = values if isinstance(values, dict) else dict(enumerate(values))
    told = {"seconds": 1.0, "plan": f"plan{cell.seed}", "machine": "cpu", "scale": cell.scale, **other}
    return CellResult(cell.name, cell.digest, state, values=values, **told)


def tables_of(suite, cells, results, form="md"):
    """The tables of a suite from results by the digest of their cells: ``md``, ``tex`` or ``csv``."""
    return table.render(suite, cells, results, form)


def save(suite, cells, results, folder):
    """Write the tables of a suite and its file of cells; return their paths, the cells last."""
    return table.write_tables(suite, cells, results, folder)


def stored(path, suite):
    """The cells of a file of cells, and their results by digest."""
    return cells_csv.stored_cells(path, suite)


# ---------------------------------------------------------------- databases
@cache
def empty_database():
    """The bytes of a database without a study; to make its tables takes a second."""
    with tempfile.TemporaryDirectory() as folder:
        open_database(f"sqlite:///{folder}/study.db").engine.dispose()
        return Path(folder, "study.db").read_bytes()


def quick_database(url):
    """A connection to the database at a URL. A new file has its tables at once, and nothing waits for the disk."""
    path = Path(url.removeprefix("sqlite:///"))
    if url.startswith("sqlite:///") and path.parent.is_dir() and not os.path.lexists(path):
        path.write_bytes(empty_database())
    backend = open_database(url)
    event.listen(backend.engine, "checkout", lambda connection, *_: connection.execute("PRAGMA synchronous=OFF"))
    return backend


def toy_scheduler(suite, folder, client=FakeWorkerClient):
    """A scheduler of a suite's cells, its study, and the lines that it says."""
    said, backend, cells = [], quick_database(f"sqlite:///{folder / 'study.db'}"), suite.cells()
    study = scheduler.SuiteStudy(suite, backend, cells)
    return scheduler.Scheduler([study], suite.metric, folder, 1, said.append, client), study, said
