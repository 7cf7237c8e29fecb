"""Read the runs and studies of a report from folders, databases of ``bench``, suites and files of cells."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from fl_lightning.bench.cell import Cell
from fl_lightning.bench.cells_csv import stored_lines
from fl_lightning.bench.comparison import Comparison, suite_comparison
from fl_lightning.bench.protocol_variants import suites_in
from fl_lightning.bench.results import CellResult
from fl_lightning.bench.suite import Suite
from fl_lightning.bench.suite_file import load_suite
from fl_lightning.report.configs import deciding
from fl_lightning.report.reading import METRICS, find_runs, name_runs, natural, read_run, why
from fl_lightning.storage.results import FitResult, History, RunState
from fl_lightning.utilities.errors import UsageError, printable, require, truncate

DATABASE, CELLS = "study.db", ".cells.csv"
HINT = "pass a folder that contains runs, the output of bench, a database URL or a file of cells"
RUN_STATES: dict[str, RunState] = {"done": "finished", "running": "running", "failed": "failed"}
# a cell with its digest at the time of its run, and its result
StoredCell = tuple[Cell, CellResult]


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
        tables = self.suite.tables if self.suite else ()
        return [suite_comparison(self.suite, table, self.cells, self.results) for table in tables if self.suite]

    @property
    def title(self) -> str:
        """The title of its suite, or its name."""
        return self.suite.title if self.suite else self.name


def read_sources(given: Sequence[str], suites: Sequence[Path]) -> list[Study]:
    """Read the sources of a report: the runs outside studies, and the studies. Each run counts once.

    Raises:
        UsageError: a source contains neither runs nor studies.
    """
    single, studies, folders = Study(), list[Study](), dict[Path, Path]()
    known = [suite for path in suites for suite in suites_in(path)]
    for one in given:
        if "://" in one:
            studies += studies_in_database(one, known)
        elif Path(one).is_file():
            studies += studies_in_file(Path(one), known)
        else:
            found, runs = read_folder(Path(one), known, single.notes)
            studies += found
            folders |= {folder.resolve(): folder for folder in runs}
    of_studies = [run for study in studies for run in study.runs]
    in_studies = {run.run_dir.resolve() for run in of_studies if run.run_dir is not None}
    for resolved, folder in folders.items():
        if resolved not in in_studies:
            try:
                single.runs.append(read_run(folder))
            except ValueError as error:
                name = printable("/".join(resolved.parts[-2:]))
                single.notes.append(f"{name} cannot be read and is skipped: {why(error)}")
    if not (single.runs or studies):
        raise UsageError(f"{truncate('; '.join(single.notes), 200)}; {HINT}")
    name_runs([*single.runs, *of_studies])
    return [single, *studies]


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
    databases = sorted(Path(folder) / DATABASE for folder, _, files in os.walk(path) if DATABASE in files)
    studies, runs = list[Study](), find_runs(path, notes)
    for database in databases:
        try:
            studies += studies_in_database(f"sqlite:///{database}", suites, database.parent)
        except UsageError as error:
            if database.parent == path:
                raise
            notes.append(f"{printable(str(database))} is skipped, and its runs count as single runs: {error}")
    cells = [] if databases or runs else sorted(path.glob(f"*{CELLS}"))
    studies += [study for file in cells for study in studies_in_file(file, suites)]
    if not (databases or runs or cells):
        raise UsageError(f"{path}: no run in this folder or below it; {HINT}")
    return studies, runs


def studies_in_file(path: Path, suites: Sequence[Suite]) -> Iterator[Study]:
    """Yield the studies of a SQLite database, of a file of cells, or of a suite in its default folder.

    Raises:
        UsageError: the file has another type, or the suite has no study.
    """
    if path.suffix == ".db":
        yield from studies_in_database(f"sqlite:///{path}", suites, path.parent)
    elif path.suffix == ".csv":
        cells = [(replace(cell, stored_digest=result.digest), result) for cell, result in stored_lines(path)]
        name = path.name.removesuffix(".csv").removesuffix(".cells").split("_scale")[0]
        yield from studies_of(name, cells, "test/accuracy", suites, path.parent)
    elif path.suffix in (".yaml", ".yml"):
        suite = load_suite(path)
        output = Path("runs") / suite.name
        hint = f"no study {output / DATABASE}; pass the output folder of bench, and --suite {path}"
        require((output / DATABASE).is_file(), "SUITE", str(path), hint)
        yield from studies_in_database(f"sqlite:///{output / DATABASE}", [*suites, suite], output)
    else:
        raise UsageError(f"{path}: not a database, a file of cells or a suite; {HINT}")


def studies_in_database(url: str, suites: Sequence[Suite], root: Path | None = None) -> Iterator[Study]:
    """Yield the studies of suites in a database.

    Args:
        url: its address.
        suites: known suites.
        root: folder with the folders of the runs.

    Raises:
        UsageError: it cannot be used, or contains no study of a suite.
    """
    import optuna

    from fl_lightning.bench.study import by_digest, decisive, hidden, open_to_read, result_of_trial, trial_digest

    with open_to_read(url) as backend:
        summaries = optuna.get_all_study_summaries(backend, include_best_trial=False)
        # studies of tune have another name than their suite
        known = [summary for summary in summaries if summary.user_attrs.get("suite") == summary.study_name]
        require(len(known) > 0, "STUDY", hidden(url), "no study of a suite in it; pass the output of bench")
        for summary in known:
            study = optuna.load_study(study_name=summary.study_name, storage=backend)
            digests = filter(None, map(trial_digest, study.get_trials(deepcopy=False)))
            cells = list[StoredCell]()
            for digest, trials in by_digest(study, digests).items():
                noted = trials[-1].user_attrs
                cell = Cell(dict(noted["labels"]), int(noted["seed"]), ({},), noted.get("scale", 1.0), digest)
                cells.append((cell, result_of_trial(cell, decisive(trials))))
            noted, named = summary.user_attrs, list(suites)
            # the file of the suite may have moved, or contain an error
            with suppress(UsageError):
                named += suites_in(noted["file"]) if Path(noted.get("file", "")).is_file() else []
            yield from studies_of(noted["suite"], cells, noted.get("metric", "test/accuracy"), named, root)


def studies_of(
    name: str, stored: Sequence[StoredCell], metric: str, suites: Sequence[Suite], root: Path | None
) -> Iterator[Study]:
    """Yield a study for each scale of the cells; the cells of the suite that have not begun wait."""
    suite = next((suite for suite in suites if suite.name == name), None)

    def place(cell: Cell) -> object:
        return frozenset(cell.labels.items()), cell.seed

    for scale in sorted({cell.scale for cell, _ in stored}, reverse=True) or [1.0]:
        found = {place(cell): (cell, result) for cell, result in stored if cell.scale == scale}
        study = Study(name, suite.metric if suite else metric, suite)
        if suite is None:
            shown = f"its metric is shown as {metric}, without published numbers"
            study.notes.append(f"{name}: unknown suite: {shown}; pass --suite FILE")
            study.cells = [cell for cell, _ in found.values()]
        else:
            seeds = sorted({cell.seed for cell, _ in found.values()}) or suite.seeds
            cells = [suite.cell(labels, seed, scale) for seed in seeds for labels in suite.combinations()]
            now = {place(cell): cell for cell in cells}
            gone = found.keys() - now.keys()
            study.notes += [f"{name}: {len(gone)} cells have labels that the suite no longer has"] if gone else []
            found = {at: (replace(found[at][0], labels=now[at].labels), found[at][1]) for at in found if at in now}
            other = [result.digest for at, (_, result) in found.items() if result.digest != now[at].digest]
            text = "ran with another config than the suite has now (because of --config or an edit)"
            study.notes += [f"{name}: {len(other)} cells {text}"] if other else []
            waiting = [replace(cell, stored_digest=cell.name) for at, cell in now.items() if at not in found]
            study.cells = [*(cell for cell, _ in found.values()), *waiting]
        for cell, result in found.values():
            run = run_of(cell, result, study.metric, root)
            interrupted = run is not None and run.state == "stopped" and result.state == "running"
            study.results[result.digest] = replace(result, state="waiting") if interrupted else result
            study.runs += [run] if run is not None else []
        yield study


def run_of(cell: Cell, result: CellResult, metric: str, root: Path | None) -> FitResult | None:
    """Return the run of a cell, from its folder if it exists; None for a cell that has not started."""
    folder: Path | None = Path(result.run_dir)
    if not (result.run_dir and (Path(result.run_dir) / METRICS).is_file()):
        versions = [] if root is None else [path.parent for path in (root / cell.folder).glob(f"version_*/{METRICS}")]
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
    history = History({"round": round_, metric: value} for round_, value in sorted(result.values.items()))
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
