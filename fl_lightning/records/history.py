"""The metrics of the rounds that are done, beside the checkpoints: a line of JSON for each round, appended."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from fl_lightning.records.files import DamagedFileError, Stamp, Stamping, flush, partial_of

MetricsRow = dict[str, float]
HISTORY = "history.jsonl"


class HistoryFile:
    """The file to which each checkpoint appends the rows since the last one, so that no checkpoint holds them all.

    The first bytes of the file are what an older checkpoint has: its stamp stays right.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows, self._stamping = 0, Stamping()

    def append(self, history: list[MetricsRow]) -> Stamp:
        """Write the rows that are not in the file yet; returns the stamp of all of them. The caller flushes the file.

        The first time the file is written anew, since it may hold rows of rounds that were lost.
        """
        text = "".join(map(json_line, history[self._rows :])).encode()
        first = self._rows == 0
        target = partial_of(self.path) if first else self.path
        with target.open("wb" if first else "ab") as file:
            file.write(text)
        if first:
            flush([target])
            target.replace(self.path)
        self._rows = len(history)
        self._stamping.write(text)
        return self._stamping.stamp()


def json_line(row: Mapping[str, float]) -> str:
    """A row as a line of JSON; the same line for the same values."""
    return json.dumps(row, sort_keys=True) + "\n"


def read_history(path: Path, stamp: Stamp) -> list[MetricsRow]:
    """The rows that a checkpoint had when it was written.

    Raises:
        DamagedFileError: the file does not begin with them.
    """
    if not path.is_file() or path.stat().st_size < stamp.size:
        raise DamagedFileError(f"{path.name} is missing or too short")
    with path.open("rb") as file:
        text = file.read(stamp.size)
    if hashlib.sha256(text).hexdigest() != stamp.sha256:
        raise DamagedFileError(f"{path.name} was altered")
    try:
        rows = [json.loads(line) for line in text.decode().splitlines()]
        # a hostile file with the right stamp
        if not all(type(row) is dict and type(row["round"]) is int for row in rows):
            raise ValueError("no rows of rounds")
    except (ValueError, KeyError, RecursionError) as error:
        raise DamagedFileError(f"{path.name} holds no rows of rounds") from error
    return rows


def read_table(path: Path, stamp: Stamp) -> list[MetricsRow]:
    """The same rows from the run's ``metrics.csv``, which has them, too.

    Raises:
        DamagedFileError: the table has others.
    """
    rows, stamping = list[MetricsRow](), Stamping()
    try:
        with path.open(newline="") as file:
            for cells in csv.DictReader(file):
                if stamping.size >= stamp.size:
                    break
                rows.append({tag: int_or_float(text) for tag, text in cells.items() if text and tag != "step"})
                stamping.write(json_line(rows[-1]).encode())
    except (OSError, ValueError, TypeError, AttributeError, csv.Error) as error:
        raise DamagedFileError(f"{path.name} cannot be read") from error
    if stamping.stamp().sha256 != stamp.sha256:
        raise DamagedFileError(f"{path.name} was altered")
    return rows


def int_or_float(text: str) -> float:
    """The number that a cell of a table holds, an integer as such."""
    try:
        return int(text)
    except ValueError:
        return float(text)
