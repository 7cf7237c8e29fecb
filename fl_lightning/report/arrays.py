"""Reading the arrays that callbacks leave in the folder of a run."""

from __future__ import annotations

import math
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fl_lightning.errors import printable
from fl_lightning.report.metrics_csv import MOST_ROUNDS
from fl_lightning.report.reading import LARGEST

# values as large as this are no measurements, and their squares and sums would be infinite
INFINITE = 1e100


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
            members = [one for one in archive.infolist() if one.filename.endswith(".npy")]
            claimed = sum(check_member(archive, one) for one in members)
        if claimed > LARGEST:
            raise ValueError(f"its arrays have {claimed} bytes, more than {LARGEST}")
        with np.load(path, allow_pickle=False) as saved:
            return {printable(name): saved[name] for name in (one.filename[:-4] for one in members)}
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


def read_arrays(path: Path) -> Arrays | None:
    """The measurements in a file; None where it has no array ``rounds``, so that it holds something else.

    Raises:
        ValueError: it cannot be read, or its rounds are none.
    """
    loaded = load_arrays(path)
    if "rounds" not in loaded:
        return None
    whole = {name: array for name, array in loaded.items() if array.ndim == 1 and array.dtype.kind in "iu"}
    clocks = {name: array for name, array in whole.items() if name == "rounds" or name.endswith("_rounds")}
    if "rounds" not in clocks or any(((one < 0) | (one >= MOST_ROUNDS)).any() for one in clocks.values()):
        raise ValueError("its rounds are no whole numbers from 0")
    made = Arrays()
    for name, array in loaded.items():
        # local_classifier has the rounds of local_rounds
        own = clocks.get(f"{name.split('_')[0]}_rounds", loaded["rounds"])
        fitting = next((one for one in (own, *clocks.values()) if array.ndim and len(one) == len(array) > 0), None)
        if array.dtype.kind in "US":
            made.names[name] = texts_of(array)
        elif array.dtype.kind not in "fiub" or fitting is None:
            made.others[name] = array.shape
        elif name not in clocks:
            made.values[name] = values = array.astype(float)
            values[~(np.abs(values) < INFINITE)] = np.nan
            made.rounds[name] = fitting.astype(int)
    return made


def texts_of(array: np.ndarray) -> list[str]:
    """Names, which are the same in every measurement; those of pairs as one."""
    last = array[-1] if array.ndim > 1 and len(array) else np.atleast_1d(array)
    return [printable(" to ".join(map(str, one)) if isinstance(one, list) else str(one)) for one in last.tolist()]
