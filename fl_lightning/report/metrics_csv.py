"""Reading the ``metrics.csv`` of a run, even of one that is writing it or that was killed while it did."""

from __future__ import annotations

import csv
from pathlib import Path

from fl_lightning.errors import printable
from fl_lightning.report.reading import read_bounded

RoundMetrics = dict[str, float]
# no run has as many rounds
MOST_ROUNDS = 2**31


def read_metrics(path: Path) -> tuple[list[RoundMetrics], str]:
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
    whole, _, rest = read_bounded(path).decode("utf-8", errors="replace").rpartition("\n")
    lines = [line for line in whole.replace("\0", "�").splitlines() if line]
    if not lines:
        return [], "line 1 is cut" if rest else "it is empty"
    try:
        tags = [printable(tag) for tag in next(csv.reader(lines[:1]))]
    except csv.Error as error:
        raise ValueError(str(error)) from error
    if not {"round", "step"} & set(tags):
        raise ValueError("it has no column round")
    rows: dict[int, RoundMetrics] = {}
    for number, line in enumerate(lines[1:], 2):
        row = metric_row(line, tags)
        if row is None:
            return list(rows.values()), f"line {number} is damaged"
        rows[int(row["round"])] = row
    return list(rows.values()), f"line {len(lines) + 1} is cut" if rest else ""


def metric_row(line: str, tags: list[str]) -> RoundMetrics | None:
    """The numbers of a line by tag; None where it has other cells than these, or no round that a run can have."""
    try:
        cells = next(csv.reader([line], strict=True))
        row = {tag: float(cell) for tag, cell in zip(tags, cells, strict=True) if cell}
    except (ValueError, csv.Error):
        return None
    row.setdefault("round", row.get("step", float("nan")))
    round_ = row["round"]
    return row if 0 <= round_ < MOST_ROUNDS and round_ == int(round_) else None
