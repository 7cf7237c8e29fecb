"""Reading the arrays that callbacks leave in the folder of a run."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

# bytes that the arrays of a file may have together
LARGEST = 2**29


@dataclass(frozen=True)
class Arrays:
    """The arrays of a file of measurements.

    Args:
        rounds: the rounds of the measurements ``(R,)``.
        values: arrays of numbers by name, each with R entries along its first axis.
        names: names of what lies along an axis, such as those of layers, by their number.
    """

    rounds: np.ndarray
    values: dict[str, np.ndarray] = field(default_factory=dict)
    names: dict[int, list[str]] = field(default_factory=dict)


def load_arrays(path: Path) -> dict[str, np.ndarray]:
    """All arrays of a file.

    Raises:
        ValueError: it cannot be read, or its arrays are too large.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            claimed = sum(one.file_size for one in archive.infolist())
        if claimed > LARGEST:
            raise ValueError(f"its arrays have {claimed} bytes, more than {LARGEST}")
        with np.load(path, allow_pickle=False) as saved:
            return {name: saved[name] for name in saved.files}
    except (OSError, KeyError, EOFError, MemoryError, zipfile.BadZipFile, ValueError) as error:
        raise ValueError(str(error) or type(error).__name__) from error


def read_arrays(path: Path) -> Arrays | None:
    """The measurements in a file; None where it has no array ``rounds``, so that it holds something else.

    Raises:
        ValueError: it cannot be read.
    """
    loaded = load_arrays(path)
    rounds = loaded.pop("rounds", None)
    if rounds is None or rounds.ndim != 1 or not len(rounds):
        return None
    values, names = {}, {}
    for name, array in loaded.items():
        if array.dtype.kind in "US" and array.ndim == 1:
            names[len(array)] = [str(one) for one in array.tolist()]
        elif array.dtype.kind in "fiub" and array.ndim and len(array) == len(rounds):
            values[name] = array.astype(float)
    return Arrays(rounds, values, names)
