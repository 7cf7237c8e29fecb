"""Reading the ``metrics.csv`` of a run, even of one that is writing it or that was killed while it did."""

from __future__ import annotations

import csv
from pathlib import Path

Row = dict[str, float]


def read_metrics(path: Path) -> tuple[list[Row], str]:
    """The rows of a table of metrics by round, in their order, without the cells that are empty.

    Args:
        path: the file.

    Returns:
        The rows up to the first line that is cut or is not of numbers, and what is wrong with that line; an empty text
        where all lines are whole.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no table of rounds.
    """
    # whoever writes ends each line: what comes after the last end is cut, however much it looks like a number
    whole, _, rest = path.read_bytes().decode("utf-8", errors="replace").rpartition("\n")
    lines = [line for line in whole.replace("\0", "�").splitlines() if line]
    if not lines and rest:
        return [], "line 1 is cut"
    tags = next(csv.reader(lines[:1]), [])
    if lines and not {"round", "step"} & set(tags):
        raise ValueError("it has no column round")
    rows: dict[int, Row] = {}
    for number, line in enumerate(lines[1:], 2):
        row = parsed(line, tags)
        if row is None:
            return list(rows.values()), f"line {number} is damaged"
        rows[int(row["round"])] = row
    return list(rows.values()), f"line {len(lines) + 1} is cut" if rest else ""


def parsed(line: str, tags: list[str]) -> Row | None:
    """The numbers of a line by tag; None where it has another number of cells, or one that is no number."""
    try:
        cells = next(csv.reader([line], strict=True))
        row = {tag: float(cell) for tag, cell in zip(tags, cells, strict=True) if cell}
    except (ValueError, csv.Error):
        return None
    row.setdefault("round", row.get("step", float("nan")))
    return row if row["round"] == row["round"] else None
