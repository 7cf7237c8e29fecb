"""Studies of ``bench`` and files of cells, as runs and as the tables of their suite."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fl_lightning.bench.cells_csv import stored_lines
from fl_lightning.bench.readings import suites_in
from fl_lightning.bench.results import CellResult
from fl_lightning.bench.suite import Cell, Suite, Table
from fl_lightning.errors import UsageError, printable, require
from fl_lightning.report.reading import why
from fl_lightning.report.run import METRICS, ReportedRun, RunState, natural, read_run


@dataclass(frozen=True)
class StoredCell(Cell):
    """A cell that is known by the digest that it had when it was run.

    Args:
        known: the digest; empty for that of its config.
    """

    known: str = ""

    @cached_property
    def digest(self) -> str:
        """The digest."""
        return self.known or super().digest


@dataclass(frozen=True)
class Study:
    """A study, at one scale.

    Args:
        suite: the suite, or what the cells themselves tell of it.
        cells: the cells.
        results: results by digest.
        runs: the runs of the cells that have begun.
        notes: what is to be said of it.
    """

    suite: Suite
    cells: list[Cell]
    results: dict[str, CellResult]
    runs: list[ReportedRun]
    notes: tuple[str, ...] = ()


# what a study or a file keeps of a cell
KeptCell = tuple[StoredCell, CellResult]


def of_cells_file(path: Path, suites: Sequence[Suite]) -> Iterator[Study]:
    """The studies of a file of cells, one for each scale.

    Raises:
        UsageError: it cannot be read, or is no such file.
    """
    cells = [
        (StoredCell(cell.labels, cell.seed, cell.fragments, cell.scale, result.digest), result)
        for cell, result in stored_lines(path)
    ]
    name = path.name.removesuffix(".csv").removesuffix(".cells").split("_scale")[0]
    yield from studies_of(name, cells, "test/accuracy", suites, path.parent)


def of_database(url: str, suites: Sequence[Suite], root: Path | None = None) -> Iterator[Study]:
    """The studies of suites in a database.

    Args:
        url: where it is.
        suites: suites that are known.
        root: folder that has the folders of the runs.

    Raises:
        UsageError: it cannot be used, or has no study of a suite.
    """
    import optuna

    from fl_lightning.bench.study import decisive, digest_of, exists, hidden, open_database, result_of_trial

    require(exists(url), "STUDY", hidden(url), "there is no such database")
    with snapshot(url) as copied:
        backend = open_database(copied)
        summaries = optuna.get_all_study_summaries(backend, include_best_trial=False)
        # those that tune have other names than their suite
        known = [summary for summary in summaries if summary.user_attrs.get("suite") == summary.study_name]
        require(len(known) > 0, "STUDY", hidden(url), "it has no study of a suite; give the output of bench")
        for summary in known:
            by_cell: dict[str, list[Any]] = {}
            for trial in optuna.load_study(study_name=summary.study_name, storage=backend).get_trials(deepcopy=False):
                if (digest := digest_of(trial)) is not None:
                    by_cell.setdefault(digest, []).append(trial)
            cells = list[KeptCell]()
            for digest, trials in by_cell.items():
                noted = trials[-1].user_attrs
                cell = StoredCell(dict(noted["labels"]), int(noted["seed"]), ({},), noted.get("scale", 1.0), digest)
                cells.append((cell, result_of_trial(cell, decisive(trials))))
            attributes = summary.user_attrs
            named = [*suites, *suite_at(attributes.get("file"))]
            yield from studies_of(attributes["suite"], cells, attributes.get("metric", "test/accuracy"), named, root)


@contextmanager
def snapshot(url: str) -> Iterator[str]:
    """The URL of a copy of a SQLite database, so that a report writes nothing beside it; of others the URL itself.

    Raises:
        UsageError: it is no database.
    """
    from fl_lightning.bench.study import SQLITE, hidden

    if not url.startswith(SQLITE):
        yield url
        return
    path = Path(url.removeprefix(SQLITE).split("?")[0])
    # while nobody writes, there is nothing beside it, and nothing is to be put there
    still = "" if path.with_name(f"{path.name}-wal").exists() else "&immutable=1"
    with tempfile.TemporaryDirectory(prefix="fl-report-") as folder:
        copy = Path(folder) / path.name
        try:
            address = f"{path.resolve().as_uri()}?mode=ro{still}"
            with closing(sqlite3.connect(address, uri=True)) as source, closing(sqlite3.connect(copy)) as target:
                source.backup(target)
        except sqlite3.Error as error:
            raise UsageError(f"STUDY={hidden(url)!r}: cannot be read: {error}; give the output of bench") from error
        yield f"{SQLITE}{copy}"


def suite_at(path: Any) -> list[Suite]:
    """The suite that a study names, if it is still where it was, and that of its readings."""
    try:
        return suites_in(path) if isinstance(path, str) and Path(path).is_file() else []
    except UsageError:
        return []


def studies_of(
    name: str, kept: Sequence[KeptCell], metric: str, suites: Sequence[Suite], root: Path | None
) -> Iterator[Study]:
    """The studies of some cells, one for each scale."""
    known = next((suite for suite in suites if suite.name == name), None)
    for scale in sorted({cell.scale for cell, _ in kept}, reverse=True) or [1.0]:
        some = [(cell, result) for cell, result in kept if cell.scale == scale]
        suite = known or suite_of(name, [cell for cell, _ in some], metric)
        text = "its suite is not known, so that it has no published numbers; give its file with --suite"
        notes = [f"{name}: {text}"] if known is None else []
        fitting = []
        for cell, result in some:
            labels = {axis: cell.labels.get(axis, "") for axis in suite.axes}
            if cell.labels == labels and all(label in suite.axes[axis] for axis, label in labels.items()):
                fitting.append((replace(cell, labels=labels), result))
        if len(fitting) < len(some):
            notes.append(f"{name}: {len(some) - len(fitting)} cells have labels that the suite has no longer")
        begun = {(tuple(cell.labels.values()), cell.seed): cell for cell, _ in fitting}
        cells: list[Cell] = list(begun.values())
        if known is not None:
            by_file = {suite.cell(cell.labels, cell.seed, scale).digest for cell, _ in fitting}
            other = {result.digest for _, result in fitting} - by_file
            text = "were run with another config than the suite's file says now (--config, or an edit)"
            notes += [f"{name}: {len(other)} cells {text}"] if other else []
            # those that have not begun
            for seed in sorted({cell.seed for cell, _ in fitting}) or suite.seeds:
                for labels in suite.combinations():
                    address = (tuple(labels.values()), seed)
                    if address not in begun:
                        cells.append(StoredCell(labels, seed, (), scale, f"{seed} {address[0]}"))
        results, runs = {}, list[ReportedRun]()
        for cell, result in fitting:
            run = run_of(cell, result, suite.metric, root)
            interrupted = run is not None and run.state == "stopped" and result.state == "running"
            results[result.digest] = replace(result, state="waiting") if interrupted else result
            runs += [run] if run is not None else []
        yield Study(suite, cells, results, runs, tuple(notes))


def suite_of(name: str, cells: Sequence[Cell], metric: str) -> Suite:
    """A suite as far as its cells tell it: its axes, and one table."""
    axes: dict[str, dict[str, tuple[Any, ...]]] = {}
    for axis, label in (pair for cell in cells for pair in cell.labels.items()):
        axes.setdefault(axis, {})[label] = ()
    rows = ("method",) if "method" in axes else tuple(axes)[:1]
    table = Table("final", rows, tuple(axis for axis in axes if axis not in rows))
    baseline = {"method": "FedAvg"} if "FedAvg" in axes.get("method", {}) else {}
    how: dict[str, Any] = {"minimize": "loss" in metric, "percent": "accuracy" in metric}
    tables = (table,) if axes else ()
    return Suite(Path(f"{name}.yaml"), name, (), axes, (), tables, metric=metric, baseline=baseline, **how)


def run_of(cell: Cell, result: CellResult, metric: str, root: Path | None) -> ReportedRun | None:
    """The run of a cell, from its folder where that is there; None for a cell that has not begun."""
    states: dict[str, RunState] = {"done": "finished", "running": "running", "failed": "failed"}
    folder = folder_of(result, root)
    if folder is None and result.state == "waiting" and not result.values:
        return None
    known: dict[str, Any] = {"labels": cell.labels, "number": cell.seed, "reason": result.reason}
    known["state"] = states.get(result.state, "stopped")
    notes: tuple[str, ...] = ()
    if folder is not None:
        try:
            run = read_run(folder, printable(f"{folder.parent.name}/{folder.name}"))
            # a process that was killed has not told the study of its end
            interrupted = known["state"] == "running" and run.state == "stopped"
            return replace(run, **{**known, "state": "stopped"} if interrupted else known)
        except (OSError, ValueError) as error:
            notes = (f"its folder cannot be read, and the numbers are those of the study: {why(error)}",)
    rows = [{"round": float(round_), metric: value} for round_, value in sorted(result.values.items())]
    if rows:
        rows[-1] = {**result.metrics, **rows[-1]}
    known |= {"plan": result.plan, "machine_known": result.machine, "seconds_known": result.seconds}
    config = dict(next(iter(cell.fragments), {}))
    return ReportedRun(result.cell, rows=rows, notes=notes, config=config, **known)


def folder_of(result: CellResult, root: Path | None) -> Path | None:
    """The folder of the run of a cell; None where it is not here."""
    if result.run_dir and (Path(result.run_dir) / METRICS).is_file():
        return Path(result.run_dir)
    if root is None:
        return None
    versions = [path.parent for path in (root / f"{result.cell[:200]}-{result.digest}").glob(f"version_*/{METRICS}")]
    return max(versions, key=natural, default=None)
