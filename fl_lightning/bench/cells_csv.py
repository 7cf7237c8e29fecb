"""The cells of a suite and their results as a CSV file, from which the tables can be made again."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from fl_lightning.bench.fragments import of_result
from fl_lightning.bench.results import CellResult, CellState, waiting
from fl_lightning.bench.suite import Cell, Suite
from fl_lightning.errors import LONGEST_VALUE, UsageError, clipped, require, text_of

Parsed = TypeVar("Parsed")
# the columns beside the labels; ``value`` is for the reader, it is the last of ``values``
FIRST = ("cell", "seed", "digest", "state", "reason", "value", "seconds", "scale", "machine", "plan", "run_dir")
LAST = ("values", "metrics", "config", "code")
# columns that files of former versions lack
ADDED_COLUMNS = {"code"}
# what a spreadsheet takes for the begin of a formula, or strips before it looks for one
FORMULA = re.compile(r"'*[=+@\t\r\n-]")


def number_in(text: str) -> float:
    """The number that a text is; nan, which is in no range, where it is none."""
    try:
        return float(text)
    except ValueError:
        return float("nan")


def is_number(value: Any) -> bool:
    """Whether a value is a number that a float can be; nan and infinities are, as of a run that diverged."""
    return type(value) is float or (type(value) is int and abs(value) < 2**1000)


# what a column holds, as far as it is a text or a number, and the remedy
COLUMN_CHECKS: dict[str, tuple[Callable[[str], object], str]] = {
    "state": (lambda text: text in get_args(CellState), f"give one of {', '.join(get_args(CellState))}"),
    "digest": (re.compile("[0-9a-f]{8,}").fullmatch, "give 8 or more hexadecimal digits"),
    "scale": (lambda text: 0 < number_in(text) <= 1, "give a share above 0, up to 1"),
    "seconds": (lambda text: not text or 0 <= number_in(text) < 1e9, "give the seconds of a round, or nothing"),
}
# what the entries of a column of JSON are, and the remedy
ENTRY_CHECKS: dict[str, tuple[Callable[[str, Any], bool], str]] = {
    "values": (
        lambda round_, value: re.fullmatch("0|[1-9][0-9]{0,8}", round_) is not None and is_number(value),
        "give a number for each round, which are 0 to 999999999",
    ),
    "metrics": (lambda tag, value: is_number(value), "give a number for each metric"),
    "code": (lambda module, digest: isinstance(digest, str), "give the digest of each module, or nothing"),
}


def cells_csv(suite: Suite, cells: Sequence[Cell], results: Mapping[str, CellResult]) -> str:
    """One line a cell: its labels, what has become of it, its numbers by round, and its config as JSON.

    Args:
        suite: the suite.
        cells: the cells.
        results: results by the digest of the cell; a cell without one waits.
    """
    columns = ["cell", *map(column, suite.axes), *FIRST[1:], *LAST]
    return in_columns(columns, (_cell_line(cell, results.get(cell.digest, waiting(cell))) for cell in cells))


def in_columns(columns: Sequence[str], lines: Iterable[Mapping[str, Any]]) -> str:
    """Lines by the names of their columns as CSV."""
    return csv_text([columns, *([line.get(name) for name in columns] for line in lines)])


def csv_text(rows: Iterable[Iterable[Any]]) -> str:
    """A table as CSV, of which a spreadsheet takes no text for a formula."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(map(inert, row) for row in rows)
    return file.getvalue()


def inert(value: Any) -> Any:
    """A text that begins like a formula and is no number, after an apostrophe; everything else as it is."""
    return f"'{value}" if isinstance(value, str) and like_formula(value) else value


def alive(text: str) -> str:
    """The text of which :func:`inert` has made this one."""
    return text[1:] if text.startswith("'") and like_formula(text) else text


def like_formula(text: str) -> bool:
    """Whether a text, without apostrophes before it, begins like a formula and is no number."""
    try:
        return FORMULA.match(text) is not None and float(text.lstrip("'")) is None
    except ValueError:
        return True


def column(axis: str) -> str:
    """The name of an axis as that of a column."""
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
    }


def read_cells(path: str | Path, axes: Collection[str] = ()) -> dict[str, CellResult]:
    """The results that a file of cells has, by digest.

    Args:
        path: the file.
        axes: the axes that its cells must have.

    Raises:
        UsageError: it cannot be read, is no such file or of other axes, or a line holds what bench does not write.
    """
    return {result.digest: result for result in parsed_cells(Path(path), result_in, axes)}


def stored_cells(path: str | Path, suite: Suite) -> list[Cell]:
    """The cells of a file, with the labels, seeds and configs that they were run with.

    Args:
        path: the file.
        suite: the suite that they are of.

    Raises:
        UsageError: the file cannot be read, is no such file, or is of a suite with other axes or labels.
    """

    def cell_in(line: Mapping[str, str]) -> Cell:
        labels = {axis: line[column(axis)] for axis in suite.axes}
        for axis, label in labels.items():
            hint = f"{suite.path.name} has no label {label} on this axis; give a suite that has it"
            require(label in suite.axes[axis], axis, label, hint)
        return Cell(labels, seed_of(line), (mapping_of(line, "config"),), result_in(line).scale)

    return list(parsed_cells(Path(path), cell_in, suite.axes))


def result_in(line: Mapping[str, str]) -> CellResult:
    """The result of one line.

    Raises:
        UsageError: a column holds what bench does not write there; names the column and the value.
    """
    for name, (fits, hint) in COLUMN_CHECKS.items():
        require(bool(fits(line[name])), name, line[name], hint)
    seed_of(line)
    held: dict[str, Any] = {name: mapping_of(line, name) for name in ("values", "metrics", "config")}
    held["code"] = mapping_of(line, "code") if line.get("code") else None
    for name, (good, hint) in ENTRY_CHECKS.items():
        for key, value in (held[name] or {}).items():
            require(good(key, value), name, {key: value}, hint)
    done_with_none = line["state"] == "done" and not held["values"]
    require(not done_with_none, "values", line["values"], "give a finished cell one round or more")
    return CellResult(
        **{key: line[key] for key in ("cell", "digest", "reason", "plan", "machine", "run_dir")},
        state=line["state"],  # type: ignore[arg-type]
        values={int(round_): float(value) for round_, value in held["values"].items()},
        seconds=float(line["seconds"]) if line["seconds"] else None,
        metrics=held["metrics"],
        scale=float(line["scale"]),
        code=held["code"],
    )


def seed_of(line: Mapping[str, str]) -> int:
    """The seed of one line."""
    require(re.fullmatch("-?[0-9]{1,18}", line["seed"]) is not None, "seed", line["seed"], "give an integer")
    return int(line["seed"])


def mapping_of(line: Mapping[str, str], name: str) -> dict[str, Any]:
    """The JSON object in a column."""
    try:
        value = json.loads(line[name])
    except (ValueError, RecursionError):
        value = None
    require(isinstance(value, dict), name, line[name], "give a JSON object, as bench writes it")
    return value


def parsed_cells(
    path: Path, parse: Callable[[Mapping[str, str]], Parsed], axes: Collection[str] = ()
) -> Iterator[Parsed]:
    """What ``parse`` makes of each line of a file of cells.

    Raises:
        UsageError: it cannot be read, is no such file, has other axes, or ``parse`` refuses a line; names the line.
    """
    before = csv.field_size_limit(sys.maxsize)  # the values of many rounds are one field
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = csv.reader(file)
            columns = [alive(name) for name in next(lines, [])]
            for name in (*FIRST, *LAST, *map(column, axes)):
                if columns.count(name) != 1 and name not in ADDED_COLUMNS - {*columns}:
                    raise ValueError(f"its header has the column {name} {columns.count(name)} times")
            first: dict[str, Mapping[str, str]] = {}
            for fields in filter(None, lines):
                if len(fields) != len(columns):
                    raise ValueError(f"line {lines.line_num} has {len(fields)} fields of {len(columns)}")
                line = dict(zip(columns, map(alive, fields), strict=True))
                where = f"{path}: line {lines.line_num}, {clipped(line['cell'], LONGEST_VALUE)}"
                try:
                    made = parse(line)
                except UsageError as error:
                    raise UsageError(f"{where}: {error}") from error
                other = first.setdefault(line["digest"], line)
                # cells with different labels may have one config, and then they have one result
                twice = other is not line and other["cell"] == line["cell"]
                unlike = any(other[name] != line[name] for name in ("state", "values"))
                if twice or unlike:
                    hint = "another line has this digest, too; keep the one that holds"
                    raise UsageError(f"{where}: digest={line['digest']!r}: {hint}")
                yield made
            if not first:
                raise ValueError("it has no cells")
    except UsageError:
        raise
    except (OSError, ValueError, csv.Error) as error:
        raise UsageError(f"{path}: is no file of cells: {text_of(error)}; give one that bench has written") from error
    finally:
        csv.field_size_limit(before)  # it is the whole process's
