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
        values: arrays of numbers by name, each with an entry for each of its rounds along the first axis.
        rounds: the rounds of each array.
        names: lists of names, such as those of layers.
    """

    values: dict[str, np.ndarray] = field(default_factory=dict)
    rounds: dict[str, np.ndarray] = field(default_factory=dict)
    names: dict[str, list[str]] = field(default_factory=dict)


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
    if loaded.get("rounds", np.zeros(())).ndim != 1:
        return None
    whole = {name: array for name, array in loaded.items() if array.ndim == 1 and array.dtype.kind in "iu"}
    clocks = {name: array for name, array in whole.items() if name == "rounds" or name.endswith("_rounds")}
    made = Arrays()
    for name, array in loaded.items():
        if array.dtype.kind in "US":
            made.names[name] = texts_of(array)
        elif name not in clocks and array.dtype.kind in "fiub" and array.ndim:
            # local_classifier has the rounds of local_rounds
            own = clocks.get(f"{name.split('_')[0]}_rounds", loaded["rounds"])
            fitting = next((one for one in (own, *clocks.values()) if len(one) == len(array) > 0), None)
            if fitting is not None:
                made.values[name], made.rounds[name] = array.astype(float), fitting.astype(int)
    return made


def texts_of(array: np.ndarray) -> list[str]:
    """Names, which are the same in every measurement; those of pairs as one."""
    last = array[-1] if array.ndim > 1 and len(array) else array
    return [" to ".join(one) if isinstance(one, list) else str(one) for one in last.tolist()]
