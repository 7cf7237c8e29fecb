"""The arrays in the folders of runs: partitions, and measurements of callbacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import numpy as np

from fl_lightning.plotting.figures import Plot, Runs
from fl_lightning.plotting.plots import PLOTS, by_shape
from fl_lightning.report.reading import PLAN, load_arrays, read_plan, why
from fl_lightning.storage.results import FitResult
from fl_lightning.utilities.errors import printable

Arrays = dict[str, np.ndarray]


@lru_cache(maxsize=1000)
def plan_of(run: FitResult) -> tuple[np.ndarray | None, dict[str, list[str]]]:
    """Return samples and names of a run's plan; None and no names without a readable plan."""
    try:
        return (None, {}) if run.run_dir is None else read_plan(run.run_dir / PLAN)
    except Exception:  # read_run made a note
        return None, {}


def array_files(run: FitResult) -> list[str]:
    """Return the names of the files of measurements in the folder of a run."""
    paths = run.run_dir.glob("*.npz") if run.run_dir is not None else ()
    return sorted(path.name for path in paths if path.name != PLAN)


def plot_of(file: str) -> tuple[str, Callable[[Runs], Iterator[Plot]]]:
    """Return the heading and the plot function for a file."""
    return PLOTS.get(file, (f"Measured in {printable(file)}", by_shape))


@lru_cache(maxsize=1000)
def measured(run: FitResult, file: str) -> tuple[Arrays, str]:
    """Return the measurements in a file; none, and the reason, if it cannot be drawn.

    A file without an array ``rounds`` has no measurements.
    """
    if file not in array_files(run):
        return {}, ""
    try:
        assert run.run_dir is not None
        arrays = load_arrays(run.run_dir / file)
        if "rounds" not in arrays:
            return {}, ""
        if arrays["rounds"].dtype.kind not in "iu":
            raise ValueError("rounds are not whole numbers")
        list(plot_of(file)[1]({"run": up_to_common_round([arrays])}))
    except Exception as error:  # a damaged file raises errors of many kinds
        return {}, f"{printable(file)} is skipped: {why(error)}"
    return arrays, ""


def rounds_of(arrays: Arrays, name: str) -> list[int]:
    """Return the rounds of an array, which for ``local_classifier`` are in ``local_rounds``; none if none fit."""
    for of_rounds in (f"{name.split('_')[0]}_rounds", "rounds"):
        if of_rounds in arrays and arrays[of_rounds].shape == arrays[name].shape[:1]:
            rounds: list[int] = arrays[of_rounds].tolist()
            return rounds
    return []


def up_to_common_round(seeds: Sequence[Arrays]) -> list[Arrays]:
    """Return the arrays of each seed up to the last round that all seeds measured; empty without such a round."""
    common_parts = [string_arrays(arrays) for arrays in seeds]
    for name in dict.fromkeys(name for arrays in seeds for name in arrays):
        pairs = zip(common_parts, seeds, strict=True)
        lacking = [(part, arrays) for part, arrays in pairs if name not in part]
        pairs_with_array = [(part, arrays) for part, arrays in lacking if name in arrays]
        rounds_of_seeds = [set(rounds_of(arrays, name)) for _, arrays in pairs_with_array]
        common = set.intersection(*rounds_of_seeds) if rounds_of_seeds else set()
        for part, arrays in pairs_with_array if common else ():
            rounds = rounds_of(arrays, name)
            end = rounds.index(max(common)) + 1
            part |= {name: arrays[name][:end], "rounds": np.array(rounds[:end])}
    return [part for part in common_parts if "rounds" in part]


def string_arrays(arrays: Arrays) -> Arrays:
    """Return the arrays of texts."""
    return {name: array for name, array in arrays.items() if array.dtype.kind in "US"}
