"""Read the runs and studies of a report from folders, databases of ``bench``, suites and files of cells."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from fl_lightning.bench.cell import Cell
from fl_lightning.bench.cells_csv import read_cells
from fl_lightning.bench.comparison import Comparison, suite_comparison
from fl_lightning.bench.results import CellResult, StoredCell
from fl_lightning.bench.suite import Suite
from fl_lightning.bench.suite_file import load_suite, suites_in
from fl_lightning.report.configs import deciding
from fl_lightning.report.reading import METRICS, find_runs, name_runs, natural, read_run, why
from fl_lightning.storage.results import FitResult, History, RunState
from fl_lightning.utilities.errors import UsageError, printable, require, truncate

DATABASE, CELLS = "study.db", ".cells.csv"
HINT = "pass a folder that contains runs, the output of bench, a database URL or a file of cells"
# the labels and the seed of a cell
Place = tuple[frozenset[tuple[str, str]], int]
RUN_STATES: dict[str, RunState] = {"done": "finished", "running": "running", "failed": "failed"}


@dataclass
class Study:
    """A study at one scale, or the runs outside studies.

    Args:
        name: its name; empty for runs outside studies.
        metric: tag of its metric.
        suite: the suite; None if its file is unknown.
        cells: the cells.
        results: results by digest.
        runs: the runs of the cells that have started.
        notes: warnings about it, such as skipped runs with reasons.
    """

    name: str = ""
    metric: str = ""
    suite: Suite | None = None
    cells: Sequence[Cell] = ()
    results: dict[str, CellResult] = field(default_factory=dict)
    runs: list[FitResult] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @cached_property
    def comparisons(self) -> list[Comparison]:
        """The tables of its suite."""
        suite = self.suite
        if suite is None:
            return []
        return [suite_comparison(suite, table, self.cells, self.results) for table in suite.tables]

    @property
    def title(self) -> str:
        """The title of its suite, or its name."""
        return self.suite.title if self.suite else self.name


def read_sources(sources: Sequence[str], suite_files: Sequence[Path]) -> list[Study]:
    """Read the sources of a report: the runs outside studies, and the studies. Each run counts once.

    Raises:
        UsageError: a source contains neither runs nor studies.
    """
    outside, studies, folders = Study(), list[Study](), dict[Path, Path]()
    suites = [suite for path in suite_files for suite in suites_in(path)]
    for source in sources:
        if "://" in source:
            studies += read_database(source, suites)
        elif Path(source).is_file():
            studies += read_file(Path(source), suites)
        else:
            studies_below, runs_below = read_folder(Path(source), suites, outside.notes)
            studies += studies_below
            folders |= {folder.resolve(): folder for folder in runs_below}
    runs_of_studies = [run for study in studies for run in study.runs]
    in_studies = {run.run_dir.resolve() for run in runs_of_studies if run.run_dir is not None}
    for resolved, folder in folders.items():
        if resolved not in in_studies:
            try:
                outside.runs.append(read_run(folder))
            except ValueError as error:
                name = printable("/".join(resolved.parts[-2:]))
                outside.notes.append(f"{name} cannot be read and is skipped: {why(error)}")
    if not (outside.runs or studies):
        raise UsageError(f"{truncate('; '.join(outside.notes), 200)}; {HINT}")
    name_runs([*outside.runs, *runs_of_studies])
    return [outside, *studies]


def read_folder(path: Path, suites: Sequence[Suite], notes: list[str]) -> tuple[list[Study], list[Path]]:
    """Return the studies at and below a folder and the folders of the runs there; ``notes`` gets what is skipped.

    Raises:
        UsageError: it cannot be read, or contains neither runs nor studies.
    """
    try:
        os.listdir(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}; {HINT}") from error
    # outputs of bench may be anywhere below
    folders = [Path(folder) for folder, _, files in os.walk(path) if DATABASE in files]
    databases = sorted(folder / DATABASE for folder in folders)
    studies, runs = list[Study](), find_runs(path, notes)
    for database in databases:
        try:
            studies += read_database(f"sqlite:///{database}", suites, database.parent)
        except UsageError as error:
            if database.parent == path:
                raise
            notes.append(f"{printable(str(database))} is skipped, and its runs count as single runs: {error}")
    cells = [] if databases or runs else sorted(path.glob(f"*{CELLS}"))
    for file in cells:
        studies += read_cells_file(file, suites)
    if not (databases or runs or cells):
        raise UsageError(f"{path}: no run in this folder or below it; {HINT}")
    return studies, runs


def read_file(path: Path, suites: Sequence[Suite]) -> Iterator[Study]:
    """Return the studies of a SQLite database, of a file of cells, or of a suite in its default folder.

    Raises:
        UsageError: the file has another type, or the suite has no study.
    """
    if path.suffix == ".db":
        return read_database(f"sqlite:///{path}", suites, path.parent)
    if path.suffix == ".csv":
        return read_cells_file(path, suites)
    if path.suffix not in (".yaml", ".yml"):
        raise UsageError(f"{path}: not a database, a file of cells or a suite; {HINT}")
    suite = load_suite(path)
    output = Path("runs") / suite.name
    hint = f"no study {output / DATABASE}; pass the output folder of bench, and --suite {path}"
    require((output / DATABASE).is_file(), "SUITE", str(path), hint)
    return read_database(f"sqlite:///{output / DATABASE}", [*suites, suite], output)


def read_cells_file(path: Path, suites: Sequence[Suite]) -> Iterator[Study]:
    """Yield the studies of a file of cells."""
    name = path.name.removesuffix(".csv").removesuffix(".cells").split("_scale")[0]
    yield from studies_of(name, list(read_cells(path)), "test/accuracy", suites, path.parent)


def read_database(url: str, suites: Sequence[Suite], root: Path | None = None) -> Iterator[Study]:
    """Yield the studies of suites in a database.

    Args:
        url: its address.
        suites: suites of which it may have studies.
        root: folder with the folders of the runs.

    Raises:
        UsageError: it cannot be used, or contains no study of a suite.
    """
    import optuna

    from fl_lightning.bench.study import hidden, open_to_read, read_study

    with open_to_read(url) as backend:
        summaries = optuna.get_all_study_summaries(backend, include_best_trial=False)
        # studies of tune have another name than their suite
        of_suites = [study for study in summaries if study.user_attrs.get("suite") == study.study_name]
        require(len(of_suites) > 0, "STUDY", hidden(url), "no study of a suite in it; pass the output of bench")
        for summary in of_suites:
            cells = list(read_study(optuna.load_study(study_name=summary.study_name, storage=backend)))
            attributes, candidates = summary.user_attrs, list(suites)
            # the file of the suite may have moved, or contain an error
            with suppress(UsageError):
                candidates += suites_in(attributes["file"]) if Path(attributes.get("file", "")).is_file() else []
            metric = attributes.get("metric", "test/accuracy")
            yield from studies_of(attributes["suite"], cells, metric, candidates, root)


def studies_of(
    name: str, stored: Sequence[StoredCell], metric: str, suites: Sequence[Suite], root: Path | None
) -> Iterator[Study]:
    """Yield a study for each scale of the cells; the cells of the suite that have not begun wait."""
    suite = next((suite for suite in suites if suite.name == name), None)
    for scale in sorted({cell.scale for cell, _ in stored}, reverse=True) or [1.0]:
        cells = {place_of(cell): (cell, result) for cell, result in stored if cell.scale == scale}
        not_begun = list[Cell]()
        study = Study(name, suite.metric if suite else metric, suite)
        if suite is None:
            text = f"its metric is shown as {metric}, without published numbers"
            study.notes.append(f"{name}: unknown suite: {text}; pass --suite FILE")
        else:
            cells, not_begun, notes = split_by_suite(cells, suite, scale)
            study.notes += [f"{name}: {note}" for note in notes]
        study.cells = [*(cell for cell, _ in cells.values()), *not_begun]
        for cell, result in cells.values():
            run = run_of(cell, result, study.metric, root)
            interrupted = run is not None and run.state == "stopped" and result.state == "running"
            study.results[result.digest] = replace(result, state="waiting") if interrupted else result
            if run is not None:
                study.runs.append(run)
        yield study


def place_of(cell: Cell) -> Place:
    """Return the labels of a cell, in any order, and its seed."""
    return frozenset(cell.labels.items()), cell.seed


def split_by_suite(
    stored: Mapping[Place, StoredCell], suite: Suite, scale: float
) -> tuple[dict[Place, StoredCell], list[Cell], list[str]]:
    """Return the stored cells that a suite has now, its cells that are not stored, and notes on what has changed."""
    seeds = sorted({cell.seed for cell, _ in stored.values()}) or suite.seeds
    cells = [suite.cell(labels, seed, scale) for seed in seeds for labels in suite.combinations()]
    by_place = {place_of(cell): cell for cell in cells}
    in_suite, notes, changed = dict[Place, StoredCell](), list[str](), 0
    for place, (cell, result) in stored.items():
        if place in by_place:
            # with the labels in the order of the suite
            in_suite[place] = replace(cell, labels=by_place[place].labels), result
            changed += result.digest != by_place[place].digest
    if len(in_suite) < len(stored):
        notes.append(f"{len(stored) - len(in_suite)} cells have labels that the suite no longer has")
    if changed:
        text = "ran with another config than the suite has now (because of --config or an edit)"
        notes.append(f"{changed} cells {text}")
    not_begun = [cell for place, cell in by_place.items() if place not in in_suite]
    return in_suite, [replace(cell, stored_digest=cell.name) for cell in not_begun], notes


def run_of(cell: Cell, result: CellResult, metric: str, root: Path | None) -> FitResult | None:
    """Return the run of a cell, from its folder if it exists; None for a cell that has not started."""
    folder: Path | None = Path(result.run_dir)
    if not (result.run_dir and (Path(result.run_dir) / METRICS).is_file()):
        paths = () if root is None else (root / cell.folder).glob(f"version_*/{METRICS}")
        versions = [path.parent for path in paths]
        folder = max(versions, key=natural, default=None)
    if folder is None and result.state == "waiting" and not result.values:
        return None
    state = RUN_STATES.get(result.state, "stopped")
    notes: tuple[str, ...] = ()
    if folder is not None:
        try:
            run = read_run(folder)
            # a killed process leaves its cell running
            state = "stopped" if state == "running" and run.state == "stopped" else state
            return replace(run, state=state, labels=cell.labels, seed=cell.seed, reason=result.reason)
        except ValueError as error:
            notes = (f"its folder cannot be read, so its numbers come from the study: {why(error)}",)
    history = History()
    for round_, value in sorted(result.values.items()):
        history.append({"round": round_, metric: value})
    if history:
        history[-1] = {**result.metrics, **history[-1]}
    config = dict(next(iter(cell.fragments), {}))
    return FitResult(
        name=result.cell,
        history=history,
        run_dir=None,
        seed=cell.seed,
        state=state,
        settings=deciding(config),
        config=config,
        notes=notes,
        labels=cell.labels,
        reason=result.reason,
        plan=printable(result.plan),
        machine=result.machine,
        seconds=result.seconds,
    )
