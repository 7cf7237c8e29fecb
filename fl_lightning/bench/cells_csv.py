"""The cells of a suite and their results as a CSV file, from which the tables can be made again."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from fl_lightning.bench.fragments import of_result
from fl_lightning.bench.results import CellResult, CellState, waiting
from fl_lightning.bench.suite import Cell, Suite
from fl_lightning.errors import LONGEST_VALUE, UsageError, clipped, require, text_of

# the columns beside the labels; ``value`` repeats the last number of ``values`` for the reader
FIRST = ("cell", "seed", "digest", "state", "reason", "value", "seconds", "scale", "machine", "plan", "run_dir")
LAST = ("values", "metrics", "config", "code", "warnings")
# columns that files of former versions lack
ADDED_COLUMNS = {"code", "warnings"}
# the begin of a formula for a spreadsheet, or characters that it strips before it looks for one
FORMULA = re.compile(r"'*[=+@\t\r\n-]")


def cells_csv(suite: Suite, cells: Sequence[Cell], results: Mapping[str, CellResult]) -> str:
    """One line a cell: its labels, its state, its numbers by round, and its config as JSON."""
    warned = any(results[cell.digest].warnings for cell in cells if cell.digest in results)
    columns = ["cell", *map(column, suite.axes), *FIRST[1:], *(LAST if warned else LAST[:-1])]
    return in_columns(columns, (_cell_line(cell, results.get(cell.digest, waiting(cell))) for cell in cells))


def in_columns(columns: Sequence[str], lines: Iterable[Mapping[str, Any]]) -> str:
    """Lines by the names of their columns as CSV."""
    return csv_text([columns, *([line.get(name) for name in columns] for line in lines)])


def csv_text(rows: Iterable[Iterable[Any]]) -> str:
    """A table as CSV, without texts that a spreadsheet would take for a formula."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(map(inert, row) for row in rows)
    return file.getvalue()


def inert(value: Any) -> Any:
    """Put an apostrophe before a text that begins like a formula and is no number."""
    return f"'{value}" if isinstance(value, str) and like_formula(value) else value


def alive(text: str) -> str:
    """Undo :func:`inert`."""
    return text[1:] if text.startswith("'") and like_formula(text) else text


def like_formula(text: str) -> bool:
    """Whether a text, without apostrophes before it, begins like a formula and is no number."""
    try:
        return FORMULA.match(text) is not None and float(text.lstrip("'")) is None
    except ValueError:
        return True


def column(axis: str) -> str:
    """The column of an axis."""
    return f"axis {axis}" if axis in (*FIRST, *LAST) else axis


def _cell_line(cell: Cell, result: CellResult) -> dict[str, Any]:
    """The line of one cell. Of the run's folder it has the name alone, and the config is without paths."""
    return {
        **{"cell": cell.name, **{column(axis): label for axis, label in cell.labels.items()}, "seed": cell.seed},
        **{"digest": cell.digest, "state": result.state, "reason": clipped(result.reason)},
        "value": result.values[max(result.values)] if result.values else None,
        **{"seconds": result.seconds, "scale": result.scale, "machine": result.machine, "plan": result.plan},
        "run_dir": Path(result.run_dir).name,
        "values": json.dumps(dict(result.values)),
        "metrics": json.dumps(dict(result.metrics)),
        "config": json.dumps(of_result(cell.config), default=str),
        "code": "" if result.code is None else json.dumps(dict(result.code)),
        "warnings": json.dumps(list(result.warnings)) if result.warnings else "",
    }


def read_cells(path: str | Path, axes: Collection[str] = ()) -> dict[str, CellResult]:
    """The results that a file of cells has, by digest.

    Args:
        path: the file.
        axes: the axes that its cells must have.

    Raises:
        UsageError: it cannot be read, is no such file or of other axes, or a line holds what bench does not write.
    """
    return {result.digest: result for _, result in stored_lines(Path(path), axes)}


def stored_cells(path: str | Path, suite: Suite) -> list[Cell]:
    """The cells of a file, with the labels, seeds and configs that they were run with.

    Args:
        path: the file.
        suite: the suite that they are of.

    Raises:
        UsageError: the file cannot be read, is no such file, or is of a suite with other axes or labels.
    """
    cells = [cell for cell, _ in stored_lines(Path(path), suite.axes)]
    for axis, label in ((axis, label) for cell in cells for axis, label in cell.labels.items()):
        hint = f"{suite.path.name} has no label {label} on this axis; give a suite that has it"
        require(label in suite.axes[axis], f"{path}: {axis}", label, hint)
    return cells


def finished_cells(path: Path, suite: Suite, cells: Sequence[Cell]) -> dict[str, CellResult]:
    """The finished results of a file, by digest, for ``--load``.

    Raises:
        UsageError: a line has the digest of one of the suite's cells, but not its labels, seed or metric; or no
            finished one has.
    """
    own, done = dict[str, list[Cell]](), dict[str, CellResult]()
    for cell in cells:
        own.setdefault(cell.digest, []).append(cell)
    for stored, result in stored_lines(path, suite.axes):
        where, alike = f"{path}: {clipped(result.cell, LONGEST_VALUE)}", own.get(result.digest, [])
        # cells with different labels may have one config
        same = not alike or any((cell.labels, cell.seed) == (stored.labels, stored.seed) for cell in alike)
        hint = f"is the digest of {' or '.join(cell.name for cell in alike)}; give the file as it was written"
        require(same, where, result.digest, hint)
        if result.state == "done":
            last = result.values[max(result.values)]
            logged = result.metrics.get(suite.metric, last)
            hint = f"its last value is {last}; give the file as it was written"
            require(not alike or equal(logged, last), f"{where}: {suite.metric}", logged, hint)
            done[result.digest] = result
    hint = f"none of its {len(done)} finished cells is one of this suite with this --scale, --seeds and --config; "
    hint += "leave the file out, or give those that it was made with"
    require(not own.keys().isdisjoint(done), "--load", str(path), hint)
    return done


def stored_lines(path: Path, axes: Collection[str] = ()) -> Iterator[tuple[Cell, CellResult]]:
    """The cells of a file, with the labels, seeds and configs that they were run with, and their results.

    Raises:
        UsageError: it cannot be read, is no such file, has other axes, or a line is not as bench writes it.
    """
    before = csv.field_size_limit(sys.maxsize)  # the values of many rounds are one field
    first: dict[str, CellResult] = {}
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.reader(file)
            columns = [alive(name) for name in next(rows, [])]
            for name in {*FIRST, *LAST, *map(column, axes)} - ADDED_COLUMNS:
                if columns.count(name) != 1:
                    raise ValueError(f"its header has the column {name} {columns.count(name)} times")
            for fields in filter(None, rows):
                try:
                    cell, result = line_of(dict(zip(columns, map(alive, fields), strict=True)))
                except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
                    raise ValueError(f"line {rows.line_num}: {text_of(error)}") from error
                # cells with different labels may have one config, and then they have one result
                other = first.setdefault(result.digest, result)
                same = other.state == result.state and str(other.values) == str(result.values)
                if other is not result and (other.cell == result.cell or not same):
                    raise ValueError(f"line {rows.line_num}: another line has the digest {result.digest}, too")
                yield cell, result
            if not first:
                raise ValueError("it has no cells")
    except (OSError, ValueError, csv.Error) as error:
        raise UsageError(f"{path}: is no file of cells: {text_of(error)}; give one that bench has written") from error
    finally:
        csv.field_size_limit(before)  # it is the whole process's


def line_of(line: Mapping[str, str]) -> tuple[Cell, CellResult]:
    """The cell and the result of a line, from its columns.

    Raises:
        ValueError: it is not as bench writes it.
    """
    values = {int(round_): float(value) for round_, value in json.loads(line["values"]).items()}
    last = values[max(values)] if values else None
    shown = float(line["value"]) if line["value"] else None
    if line["state"] not in get_args(CellState) or (line["state"] == "done" and not values):
        raise ValueError(f"state={clipped(line['state'], LONGEST_VALUE)!r}: has {len(values)} rounds")
    if not equal(shown, last):
        raise ValueError(f"value={shown}: the last of its rounds has {last}")
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
    return Cell(labels, int(line["seed"]), (dict(json.loads(line["config"])),), result.scale), result


def equal(one: float | None, other: float | None) -> bool:
    """Whether two numbers are equal, or both nan."""
    return one == other or (one is not None and other is not None and math.isnan(one) and math.isnan(other))
