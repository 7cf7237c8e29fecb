"""Suites of tiny cells, and runners that run them without training."""

import os
import tempfile
from functools import cache
from pathlib import Path

from sqlalchemy import event

from fl_lightning.bench import load_suite
from fl_lightning.bench.driver import Driver
from fl_lightning.bench.study import open_database, open_study

TOY = """
title: Toy
base: {model: {class_path: Toy}, trainer: {max_rounds: 3}}
axes:
  method: {FedAvg: {}, FedProx: {method: [{class_path: FedProx}]}}
  lr: {key: model.init_args.lr, values: [0.1, 0.2]}
seeds: 1
"""


def toy_suite(folder, text=TOY):
    """A suite of 4 cells, in a file of its own."""
    path = folder / "toy.yaml"
    path.write_text(text)
    return load_suite(path)


def outcome(values=(0.25, 0.5), **other):
    """What a cell that is done tells of itself."""
    told = {"seconds": 0.5, "plan": "abc", "metrics": {"test/accuracy": values[-1]}, "machine": "toy", "run_dir": "run"}
    return {"done": {"values": dict(enumerate(values)), **told, **other}}


class FakeRunner:
    """Runs cells without training.

    Args:
        job: number of the runner.
        answer: gives the outcome of a cell; it takes the cell and what it may report to.
    """

    def __init__(self, job=0, answer=lambda cell, on_round: outcome()):
        self.answer, self.ran, self.closed = answer, [], False

    def run(self, cell, on_round):
        self.ran.append(cell["name"])
        return self.answer(cell, on_round)

    def interrupt(self):
        pass

    kill = interrupt

    def close(self):
        self.closed = True


@cache
def empty_database():
    """The bytes of a database without a study; to make its tables takes a second."""
    with tempfile.TemporaryDirectory() as folder:
        open_database(f"sqlite:///{folder}/study.db").engine.dispose()
        return Path(folder, "study.db").read_bytes()


def quick_database(url):
    """A connection to the database at a URL. A new file has its tables at once, and nothing waits for the disk."""
    path = Path(url.removeprefix("sqlite:///"))
    if url.startswith("sqlite:///") and not os.path.lexists(path):
        path.write_bytes(empty_database())
    backend = open_database(url)
    event.listen(backend.engine, "checkout", lambda connection, *_: connection.execute("PRAGMA synchronous=OFF"))
    return backend


def toy_database(folder):
    """The database of a folder."""
    return quick_database(f"sqlite:///{folder / 'study.db'}")


def toy_driver(suite, folder, cells=None, jobs=1, runner=FakeRunner):
    """A driver of a suite's cells, its study, and the lines that it says."""
    said = []
    backend = toy_database(folder)
    cells = suite.cells() if cells is None else cells
    study = open_study(suite, backend, cells)
    return Driver(suite, cells, backend, folder, jobs, said.append, runner), study, said
