"""Reading files that may be anything: a run that was killed, a full disk or an editor may have left them."""

from __future__ import annotations

import csv
import json
import math
import stat
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fl_lightning.errors import clipped, printable, text_of
from fl_lightning.yaml_files import parse_yaml

RoundMetrics = dict[str, float]
# bytes of a table, and of a file of YAML or JSON
LARGEST, LARGEST_TEXT = 2**29, 2**22
# binary digits of a number; Python refuses to write one with very many
MOST_DIGITS = 1000
# no run has as many rounds
MOST_ROUNDS = 2**31
# values as large as this are no measurements, and their squares and sums would be infinite
INFINITE = 1e100


def why(error: BaseException) -> str:
    """What is wrong with a file, on one line."""
    return clipped(getattr(error, "strerror", None) or text_of(error), 120)


def read_bounded(path: Path, largest: int = LARGEST) -> bytes:
    """The contents of a file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no file, such as a pipe that would be waited for, or is too large.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is no file")
    if status.st_size > largest:
        raise ValueError(f"it has {status.st_size} bytes, more than {largest}")
    return path.read_bytes()


def read_lines(path: Path) -> str:
    """The text of a file of lines.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no such file, or is cut: the beginning of a table or of YAML would be taken for the whole.
    """
    text = read_bounded(path, LARGEST_TEXT).decode()
    if text and not text.endswith("\n"):
        raise ValueError("its last line is cut")
    return text


def read_plain(path: Path) -> Any:
    """What a file of YAML or JSON holds.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no such file, or holds a number that takes too long to write.
    """
    if path.suffix == ".json":
        try:
            loaded = json.loads(read_bounded(path, LARGEST_TEXT))
        except RecursionError as error:
            raise ValueError(text_of(error)) from error
    else:
        loaded = parse_yaml(read_lines(path), path.name)
    for value in all_within(loaded):
        if isinstance(value, int) and value.bit_length() > MOST_DIGITS:
            raise ValueError("a number has too many digits")
    return loaded


def all_within(value: Any) -> Iterator[Any]:
    """A value, and all that its lists and mappings hold, however deep they are."""
    left = [value]
    while left:
        value = left.pop()
        yield value
        left += value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()


def check_config_values(config: Mapping[str, Any]) -> None:
    """Refuse a config whose parts are not what they are in a config.

    Raises:
        ValueError: a part is something else; names it.
    """
    check_parts(config, {"trainer": Mapping, "model": Mapping, "data": Mapping, "method": (Mapping, list)})
    for value in all_within(config):
        if isinstance(value, Mapping) and "class_path" in value:
            check_parts(value, {"class_path": str, "init_args": Mapping, "dict_kwargs": Mapping})


def check_environment(environment: Mapping[str, Any]) -> None:
    """Refuse an environment whose parts are not what a run writes.

    Raises:
        ValueError: a part is something else; names it.
    """
    check_parts(
        environment, {"versions": Mapping, "gpus": list, "processor": str, "git_revision": str, "plan_hash": str}
    )
    versions = environment.get("versions") or {}
    check_parts(versions, dict.fromkeys(versions, str))


def check_parts(values: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    """Refuse an entry that is there and not of its kind.

    Raises:
        ValueError: it is not.
    """
    for key, kind in kinds.items():
        value = values.get(key)
        if not (value is None or isinstance(value, kind)):
            raise ValueError(f"{key} is {clipped(repr(value), 40)}")


# ------------------------------------------------------------------ metrics.csv
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


# ------------------------------------------------------------------ what callbacks have measured
@dataclass(frozen=True)
class Arrays:
    """The arrays of a file of measurements.

    Args:
        values: arrays of numbers by name, each with an entry for each of its rounds along the first axis.
        rounds: the rounds of each array.
        names: lists of names, such as those of layers.
        others: the shapes of arrays that have no entry for each round, or no numbers.
    """

    values: dict[str, np.ndarray] = field(default_factory=dict)
    rounds: dict[str, np.ndarray] = field(default_factory=dict)
    names: dict[str, list[str]] = field(default_factory=dict)
    others: dict[str, tuple[int, ...]] = field(default_factory=dict)


def load_arrays(path: Path) -> dict[str, np.ndarray]:
    """All arrays of a file.

    Raises:
        ValueError: it cannot be read, or its arrays are too large.
    """
    try:
        if not path.is_file():
            raise ValueError("it is no file")
        with zipfile.ZipFile(path) as archive:
            members = [member for member in archive.infolist() if member.filename.endswith(".npy")]
            claimed = sum(check_member(archive, member) for member in members)
        if claimed > LARGEST:
            raise ValueError(f"its arrays have {claimed} bytes, more than {LARGEST}")
        with np.load(path, allow_pickle=False) as saved:
            return {printable(name): saved[name] for name in (member.filename[:-4] for member in members)}
    # what is wrong with an archive is told by a dozen kinds of errors, of zlib, struct, tokenize and others
    except Exception as error:
        raise ValueError(str(error) or type(error).__name__) from error


def check_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> int:
    """Refuse an array that is larger than what is there of it; nothing is allocated.

    Returns:
        Its bytes, as the numbers of 8 bytes that become of it.

    Raises:
        ValueError: it is larger, or its header cannot be read.
    """
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
        entries = math.prod(shape)
        if not dtype.hasobject and entries * dtype.itemsize != member.file_size - file.tell():
            raise ValueError(f"{member.filename} has not the size that it claims")
        return entries * max(dtype.itemsize, 8)


def read_arrays(path: Path) -> Arrays:
    """The measurements in a file; none where it has no array ``rounds``, so that it holds something else.

    Raises:
        ValueError: it cannot be read, or its rounds are none.
    """
    loaded = load_arrays(path)
    if "rounds" not in loaded:
        return Arrays()
    whole = {name: array for name, array in loaded.items() if array.ndim == 1 and array.dtype.kind in "iu"}
    clocks = {name: array for name, array in whole.items() if name == "rounds" or name.endswith("_rounds")}
    if "rounds" not in clocks or any(((clock < 0) | (clock >= MOST_ROUNDS)).any() for clock in clocks.values()):
        raise ValueError("its rounds are no whole numbers from 0")
    made = Arrays()
    for name, array in loaded.items():
        # local_classifier has the rounds of local_rounds
        own = clocks.get(f"{name.split('_')[0]}_rounds", loaded["rounds"])
        fitting = next(
            (clock for clock in (own, *clocks.values()) if array.ndim and len(clock) == len(array) > 0), None
        )
        if array.dtype.kind in "US":
            # names are the same in every measurement; those of pairs are one
            last = array[-1] if array.ndim > 1 and len(array) else np.atleast_1d(array)
            texts = (" to ".join(map(str, entry)) if isinstance(entry, list) else str(entry) for entry in last.tolist())
            made.names[name] = list(map(printable, texts))
        elif array.dtype.kind not in "fiub" or fitting is None:
            made.others[name] = array.shape
        elif name not in clocks:
            made.values[name] = np.where(np.abs(array) < INFINITE, array, np.nan)
            made.rounds[name] = fitting.astype(int)
    return made
