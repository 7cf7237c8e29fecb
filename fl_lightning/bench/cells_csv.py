"""The cells of a suite and their results as a CSV file, from which the tables can be made again."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fl_lightning.bench.fragments import of_result
from fl_lightning.bench.numbers import waiting
from fl_lightning.bench.results import Result
from fl_lightning.bench.suite import Cell, Suite
from fl_lightning.errors import UsageError, text_of

T = TypeVar("T")
# the columns beside the labels; ``value`` is for the reader, it is the last of ``values``
FIRST = ("cell", "seed", "digest", "state", "reason", "value", "seconds", "scale", "machine", "plan", "run_dir")
LAST = ("values", "metrics", "config", "code")
# columns that files of former versions lack
NEW = {"code"}


def cells_csv(suite: Suite, cells: Sequence[Cell], results: Mapping[str, Result]) -> str:
    """One line a cell: its labels, what has become of it, its numbers by round, and its config as JSON.

    Args:
        suite: the suite.
        cells: the cells.
        results: results by the digest of the cell; a cell without one waits.
    """
    file = io.StringIO()
    axes = [column(axis) for axis in suite.axes]
    writer = csv.DictWriter(file, ["cell", *axes, *FIRST[1:], *LAST], lineterminator="\n")
    writer.writeheader()
    for cell in cells:
        writer.writerow(line_of(cell, results.get(cell.digest, waiting(cell))))
    return file.getvalue()


def column(axis: str) -> str:
    """The name of an axis as that of a column."""
    return f"axis {axis}" if axis in (*FIRST, *LAST) else axis


def line_of(cell: Cell, result: Result) -> dict[str, Any]:
    """The line of one cell. Of the run's folder it has the name alone, and the config is without paths."""
    return {
        **{"cell": cell.name, **{column(axis): label for axis, label in cell.labels.items()}, "seed": cell.seed},
        **{"digest": cell.digest, "state": result.state, "reason": " ".join(result.reason.split())},
        "value": result.values[max(result.values)] if result.values else None,
        **{"seconds": result.seconds, "scale": result.scale, "machine": result.machine, "plan": result.plan},
        "run_dir": Path(result.run_dir).name,
        "values": json.dumps(dict(result.values)),
        "metrics": json.dumps(dict(result.metrics)),
        "config": json.dumps(of_result(cell.config), default=str),
        "code": "" if result.code is None else json.dumps(dict(result.code)),
    }


def read_cells(path: str | Path) -> dict[str, Result]:
    """The results that a file of cells has, by digest.

    Raises:
        UsageError: it cannot be read, or is no such file.
    """
    return {result.digest: result for result in parsed(Path(path), result_of)}


def stored_cells(path: str | Path, suite: Suite) -> list[Cell]:
    """The cells of a file, with the labels, seeds and configs that they were run with.

    Args:
        path: the file.
        suite: the suite that they are of.

    Raises:
        UsageError: the file cannot be read, is no such file, or is of a suite with other axes or labels.
    """

    def cell_of(line: Mapping[str, str]) -> Cell:
        labels = {axis: line[column(axis)] for axis in suite.axes}
        for axis, label in labels.items():
            if label not in suite.axes[axis]:
                raise ValueError(f"axis {axis} of {suite.path.name} has no label {label}")
        return Cell(labels, int(line["seed"]), (json.loads(line["config"]),), float(line["scale"]))

    return list(parsed(Path(path), cell_of))


def result_of(line: Mapping[str, str]) -> Result:
    """The result of one line."""
    return Result(
        **{key: line[key] for key in ("cell", "digest", "reason", "plan", "machine", "run_dir")},
        state=line["state"],  # type: ignore[arg-type]
        values={int(round_): value for round_, value in json.loads(line["values"]).items()},
        seconds=float(line["seconds"]) if line["seconds"] else None,
        metrics=json.loads(line["metrics"]),
        scale=float(line["scale"]),
        code=json.loads(line["code"]) if line.get("code") else None,
    )


def parsed(path: Path, parse: Callable[[Mapping[str, str]], T]) -> Iterator[T]:
    """What ``parse`` makes of each line of a file of cells."""
    before = csv.field_size_limit(sys.maxsize)  # the values of many rounds are one field
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = csv.DictReader(file)
            for name in {*FIRST, *LAST} - NEW - {*(lines.fieldnames or ())}:
                raise ValueError(f"it lacks the column {name}")
            yield from map(parse, lines)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path}: is no file of cells: {text_of(error)}; give one that bench has written") from error
    finally:
        csv.field_size_limit(before)  # it is the whole process's
