"""Suites: a grid of runs as one study, resumable cell by cell, and the table that comes of it.

Nothing in this package imports torch: the process that talks to the study starts others that train.
"""

from fl_lightning.bench.cell import Cell
from fl_lightning.bench.suite import Suite, Table
from fl_lightning.bench.suite_file import load_suite

__all__ = ["Cell", "Suite", "Table", "load_suite"]
