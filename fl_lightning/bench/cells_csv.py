"""The cells of a suite and their results as a CSV file, from which the tables can be made again."""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from fl_lightning.bench.cell import Cell
from fl_lightning.bench.config_fragments import of_result
from fl_lightning.bench.results import CellResult, CellState, StoredCell, waiting
from fl_lightning.bench.suite import Suite
from fl_lightning.utilities.errors import LONGEST_VALUE, UsageError, require, text_of, truncate

# columns except labels; ``value`` repeats the last number of ``values`` for readers
FIRST = ("cell", "seed", "digest", "state", "reason", "value", "seconds", "scale", "machine", "plan", "run_dir")
LAST = ("values", "metrics", "config", "code", "warnings")
# columns that files of former versions lack
ADDED_COLUMNS = {"code", "warnings"}


def cells_csv(suite: Suite, cells: Sequence[Cell], results: Mapping[str, CellResult]) -> str:
    """One line a cell: its labels, its state, its numbers by round, and its config as JSON."""
    lines = [_cell_line(cell, results.get(cell.digest, waiting(cell))) for cell in cells]
    warned = any(line["warnings"] for line in lines)
    return in_columns(["cell", *map(column, suite.axes), *FIRST[1:], *(LAST if warned else LAST[:-1])], lines)


def in_columns(columns: Sequence[str], lines: Iterable[Mapping[str, Any]]) -> str:
    """Lines by the names of their columns as CSV."""
    file = io.StringIO()
    rows = ([line.get(name) for name in columns] for line in lines)
    csv.writer(file, lineterminator="\n").writerows([columns, *rows])
    return file.getvalue()


def column(axis: str) -> str:
    """The column of an axis."""
    return f"axis {axis}" if axis in (*FIRST, *LAST) else axis


def _cell_line(cell: Cell, result: CellResult) -> dict[str, Any]:
    """The line of one cell. It has the name of the run's folder alone, and a config without paths."""
    labels = {column(axis): label for axis, label in cell.labels.items()}
    return {
        **{"cell": cell.name, **labels, "seed": cell.seed},
        **{"digest": cell.digest, "state": result.state, "reason": truncate(result.reason)},
        "value": result.values[max(result.values)] if result.values else None,
        **{"seconds": result.seconds, "scale": result.scale, "machine": result.machine, "plan": result.plan},
        "run_dir": Path(result.run_dir).name,
        "values": json.dumps(dict(result.values)),
        "metrics": json.dumps(dict(result.metrics)),
        "config": json.dumps(of_result(cell.config), default=str),
        "code": "" if result.code is None else json.dumps(dict(result.code)),
        "warnings": json.dumps(list(result.warnings)) if result.warnings else "",
    }


def stored_cells(path: Path, suite: Suite) -> tuple[list[Cell], dict[str, CellResult]]:
    """Return the cells of a file, with the labels, seeds and configs of their runs, and their results by digest.

    Args:
        path: the file.
        suite: their suite.

    Raises:
        UsageError: the file cannot be read, is not a file of cells, or has other axes or labels than the suite.
    """
    cells, results = list[Cell](), dict[str, CellResult]()
    for cell, result in read_cells(path, suite.axes):
        for axis, label in cell.labels.items():
            hint = f"{suite.path.name} has no label {label} on this axis; use a suite with this label"
            require(label in suite.axes[axis], f"{path}: {axis}", label, hint)
        cells.append(cell)
        results[result.digest] = result
    return cells, results


def read_cells(path: Path, axes: Collection[str] = ()) -> Iterator[StoredCell]:
    """Yield the cells of a file, with the labels, seeds and configs that they were run with, and their results.

    Args:
        path: the file.
        axes: axes that its cells must have.

    Raises:
        UsageError: it cannot be read, is not a file of cells, has other axes, or has an invalid line.
    """
    before = csv.field_size_limit(sys.maxsize)  # the values of many rounds are one field
    by_digest: dict[str, CellResult] = {}
    try:
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", newline="", encoding="utf-8-sig") as file:
            lines = csv.DictReader(file)
            missing = {*FIRST, *LAST, *map(column, axes)} - ADDED_COLUMNS - {*(lines.fieldnames or ())}
            if missing:
                raise ValueError(f"its header lacks {', '.join(sorted(missing))}")
            for line in lines:
                try:
                    cell, result = stored_cell(line)
                    check_repeated(result, by_digest.setdefault(result.digest, result))
                except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
                    raise ValueError(f"line {lines.line_num}: {text_of(error)}") from error
                yield cell, result
            if not by_digest:
                raise ValueError("it has no cells")
    except (OSError, ValueError, csv.Error) as error:
        raise UsageError(f"{path}: not a file of cells: {text_of(error)}; use a file from bench") from error
    finally:
        csv.field_size_limit(before)  # it is the whole process's


def check_repeated(result: CellResult, earlier: CellResult) -> None:
    """Refuse two results with one digest, unless they are equal: cells with different labels may have one config."""
    equal = (earlier.state, str(earlier.values)) == (result.state, str(result.values))
    if earlier is not result and (earlier.cell == result.cell or not equal):
        raise ValueError(f"another line has the digest {result.digest}, too")


def stored_cell(line: Mapping[str, str]) -> StoredCell:
    """The cell and the result of a line, from its columns."""
    if None in line or None in line.values():
        raise ValueError("it has another number of fields than the header")
    values = {int(round_): float(value) for round_, value in json.loads(line["values"]).items()}
    if line["state"] not in get_args(CellState) or (line["state"] == "done" and not values):
        raise ValueError(f"state={truncate(line['state'], LONGEST_VALUE)!r}: has {len(values)} rounds")
    result = CellResult(
        **{key: line[key] for key in ("cell", "digest", "reason", "plan", "machine", "run_dir")},
        state=line["state"],  # type: ignore[arg-type]
        values=values,
        seconds=float(line["seconds"]) if line["seconds"] else None,
        metrics=dict(json.loads(line["metrics"])),
        scale=float(line["scale"]),
        code=dict(json.loads(line["code"])) if line.get("code") else None,
        warnings=tuple(json.loads(line["warnings"])) if line.get("warnings") else (),
    )
    axes = {column(name): name for name in (*FIRST, *LAST)}
    labels = {axes.get(key, key): text for key, text in line.items() if key not in (*FIRST, *LAST)}
    config = dict(json.loads(line["config"]))
    return Cell(labels, int(line["seed"]), (config,), result.scale, result.digest), result
