"""The numbers that figures are drawn of: means over the seeds of a configuration, by round."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fl_lightning.report.arrays import INFINITE
from fl_lightning.report.run import ReportedRun
from fl_lightning.report.sections import Group

BYTES = ("bytes/down", "bytes/up")
SECONDS = ("time/round",)


@dataclass(frozen=True)
class Curve:
    """A metric of a configuration by round.

    Args:
        rounds: rounds in which any of the runs has it ``(R,)``.
        mean: its mean over the runs that have it ``(R,)``.
        deviation: its standard deviation, with n - 1 in the denominator; 0 where one run has it ``(R,)``.
        n: number of runs that have it ``(R,)``.
    """

    rounds: np.ndarray
    mean: np.ndarray
    deviation: np.ndarray
    n: np.ndarray

    def band(self, unit: float) -> tuple[np.ndarray, np.ndarray]:
        """A standard deviation on either side of the mean, in a unit."""
        return unit * (self.mean - self.deviation), unit * (self.mean + self.deviation)


def curve(runs: Sequence[ReportedRun], tag: str) -> Curve | None:
    """A metric of some runs; None where none has a finite value of it."""
    return averaged([run.values(tag) for run in runs])


def cumulative(run: ReportedRun, tags: Sequence[str]) -> dict[int, float]:
    """The sum of some metrics over the rounds up to each one; empty where a round lacks one of them."""
    total, made = 0.0, {}
    for row in run.rows:
        if not all(tag in row for tag in tags):
            return {}
        total += sum(row[tag] for tag in tags)
        made[int(row["round"])] = total
    return made


def spent(runs: Sequence[ReportedRun], tags: Sequence[str], rounds: np.ndarray) -> np.ndarray | None:
    """What some runs have spent on average up to the end of each round; None where that is not known."""
    found = averaged([cumulative(run, tags) for run in runs])
    known = {} if found is None else dict(zip(found.rounds.tolist(), found.mean.tolist(), strict=True))
    if any(round_ not in known for round_ in rounds.tolist()):
        return None
    return np.array([known[round_] for round_ in rounds.tolist()])


def averaged(values: Sequence[dict[int, float]]) -> Curve | None:
    """The mean of several values by round, of those that are finite; None without one.

    A value whose square is infinite counts as infinite, too.
    """
    found: dict[int, list[float]] = defaultdict(list)
    for one in values:
        for round_, value in one.items():
            if abs(value) < INFINITE:
                found[round_].append(value)
    if not found:
        return None
    rounds = sorted(found)
    deviation = [float(np.std(found[one], ddof=1)) if len(found[one]) > 1 else 0.0 for one in rounds]
    mean = [math.fsum(found[one]) / len(found[one]) for one in rounds]
    return Curve(np.array(rounds), np.array(mean), np.array(deviation), np.array([len(found[one]) for one in rounds]))


def last_profile(
    group: Group, file: str, name: str, reduce: Callable[[np.ndarray], np.ndarray | None]
) -> tuple[int, np.ndarray] | None:
    """What is drawn of the last measurement that all runs of a group have in common, as the mean over the runs.

    Args:
        group: the group.
        file: the file of the measurements.
        name: the array.
        reduce: makes of a run's entry what is drawn, None where it cannot be drawn; before the mean, since clients of
            two seeds are not the same.

    Returns:
        The round and the mean, which leaves out what is nan; None where no run has the array, or shapes differ.
    """
    found = []
    for run in group.runs.values():
        arrays = run.arrays(file)
        if arrays is not None and name in arrays.values:
            found.append(dict(zip(arrays.rounds[name].tolist(), arrays.values[name], strict=True)))
    common = set.intersection(*(set(one) for one in found)) if found else set()
    entries = [entry for one in found if common and (entry := reduce(one[max(common)])) is not None]
    if len({entry.shape for entry in entries}) != 1:
        return None
    stacked = np.stack(entries)
    counted = np.isfinite(stacked).sum(0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return int(max(common)), np.where(np.isfinite(stacked), stacked, 0).sum(0) / counted
