"""What the arguments of a report name: folders of runs, studies, and files of cells."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fl_lightning.bench.readings import suites_in
from fl_lightning.bench.suite import Suite
from fl_lightning.bench.suite_file import load_suite
from fl_lightning.errors import UsageError, clipped, printable, require
from fl_lightning.report.reading import why
from fl_lightning.report.run import ReportedRun, find_runs, read_run
from fl_lightning.report.studies import Study, of_cells_file, of_database

DATABASE, CELLS = "study.db", ".cells.csv"
HINT = "give a folder that has runs below it, the output of bench, a URL of a database or a file of cells"


@dataclass
class Found:
    """What the arguments name.

    Args:
        runs: runs of their own.
        studies: studies of suites, with their runs.
        notes: what was left out, and why.
    """

    runs: list[ReportedRun] = field(default_factory=list)
    studies: list[Study] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_sources(given: Sequence[str], suites: Sequence[Path]) -> Found:
    """Read what some arguments name; each run is taken once.

    Raises:
        UsageError: one names nothing that a report can be made of.
    """
    found, known = Found(), [suite for path in suites for suite in suites_in(path)]
    folders: dict[Path, Path] = {}
    for one in given:
        if "://" in one:
            found.studies += of_database(one, known)
        else:
            read_path(Path(one), known, found, folders)
    in_studies = {run.folder.resolve() for study in found.studies for run in study.runs if run.folder is not None}
    several = len({root.resolve() for root in folders.values()}) > 1
    for folder, root in folders.items():
        if folder.resolve() not in in_studies:
            name = printable(name_of(folder, root, several))
            try:
                found.runs.append(read_run(folder, name))
            except (OSError, ValueError) as error:
                found.notes.append(f"{name} cannot be read and is left out: {why(error)}")
    if not (found.runs or found.studies):
        raise UsageError(f"{clipped('; '.join(found.notes), 200)}; {HINT}")
    return found


def read_path(path: Path, suites: Sequence[Suite], found: Found, folders: dict[Path, Path]) -> None:
    """Read what a path names: studies at once, while folders of runs are collected, each with where it was found.

    Raises:
        UsageError: it names nothing, or a folder that cannot be read.
    """
    if path.is_file():
        found.studies += studies_of_file(path, suites)
        return
    try:
        os.listdir(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}; {HINT}") from error
    # of a folder with all that one has, the outputs of bench within it are studies, too
    databases = sorted(Path(folder) / DATABASE for folder, _, files in os.walk(path) if DATABASE in files)
    for database in databases:
        try:
            found.studies += of_database(f"sqlite:///{database}", suites, database.parent)
        except UsageError as error:
            if database.parent == path:
                raise
            found.notes.append(f"{printable(str(database))} is left out, and its runs count by themselves: {error}")
    runs = find_runs(path, found.notes)
    cells = [] if databases or runs else sorted(path.glob(f"*{CELLS}"))
    for file in cells:
        found.studies += of_cells_file(file, suites)
    if not (databases or runs or cells):
        raise UsageError(f"{path}: there is no run in this folder or below it; {HINT}")
    known = {one.resolve() for one in folders}
    folders.update({one: path for one in runs if one.resolve() not in known})


def studies_of_file(path: Path, suites: Sequence[Suite]) -> list[Study]:
    """The studies of a database of SQLite, of a file of cells, or of a suite at its usual place.

    Raises:
        UsageError: it is none of these.
    """
    if path.suffix == ".db":
        return list(of_database(f"sqlite:///{path}", suites, path.parent))
    if path.suffix == ".csv":
        return list(of_cells_file(path, suites))
    if path.suffix in (".yaml", ".yml"):
        suite = load_suite(path)
        output = Path("runs") / suite.name
        hint = f"its study {output / DATABASE} is not there; give the folder that bench wrote, with --suite {path}"
        require((output / DATABASE).is_file(), "SUITE", str(path), hint)
        return list(of_database(f"sqlite:///{output / DATABASE}", [*suites, suite], output))
    raise UsageError(f"{path}: is neither a database, a file of cells nor a suite; {HINT}")


def name_of(folder: Path, root: Path, several: bool) -> str:
    """What a run is called: its path below the argument that names it."""
    below = folder.relative_to(root)
    if not below.parts:
        return "/".join(folder.resolve().parts[-2:])
    return str(root / below if several else below)
