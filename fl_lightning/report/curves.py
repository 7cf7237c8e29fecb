"""The numbers that figures are drawn of, and the curves of them against the rounds: means over the seeds."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fl_lightning.plotting.drawing import CurveLine, curves, numbered_line
from fl_lightning.report.figures import Drawing
from fl_lightning.report.run import INFINITE, ReportedRun
from fl_lightning.report.sections import Group, Section

BYTES = ("bytes/down", "bytes/up")
SECONDS = ("time/round",)
# drawings of one figure, and bands of one drawing
PANELS, MOST_BANDS = 6, 8


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

    def line(self, x: np.ndarray, unit: float, number: int, label: str) -> CurveLine:
        """What is drawn of it over ``x`` as curve ``number``: the mean in a unit, and its deviation as a band."""
        band = (unit * (self.mean - self.deviation), unit * (self.mean + self.deviation))
        return replace(numbered_line(number, unit * self.mean, label, x), band=band)


def few_bands(lines: Sequence[CurveLine]) -> list[CurveLine]:
    """The lines, without bands where there are so many that these would hide them."""
    return list(lines) if len(lines) <= MOST_BANDS else [replace(line, band=None) for line in lines]


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
    """What some runs have spent on average up to the end of each round; None where that is not known.

    It is the sum of the mean of each round over the runs that have it: it rises where some runs have fewer rounds, too.
    """
    totals = [cumulative(run, tags) for run in runs]
    costs = [dict(zip(one, np.diff([0.0, *one.values()]).tolist(), strict=True)) for one in totals]
    mean = averaged(costs)
    if mean is None or not np.isin(rounds, mean.rounds).all():
        return None
    return np.cumsum(mean.mean)[np.searchsorted(mean.rounds, rounds)]


def averaged(values: Sequence[dict[int, float]]) -> Curve | None:
    """The mean of several values by round, of those that are finite; None without one.

    A value whose square is infinite counts as infinite, too.
    """
    by_round: dict[int, list[float]] = defaultdict(list)
    for of_run in values:
        for round_, value in of_run.items():
            if abs(value) < INFINITE:
                by_round[round_].append(value)
    if not by_round:
        return None
    columns = [
        (round_, math.fsum(some) / len(some), np.std(some, ddof=1) if len(some) > 1 else 0.0, len(some))
        for round_, some in sorted(by_round.items())
    ]
    return Curve(*map(np.array, zip(*columns, strict=True)))


def band(groups: Sequence[Group]) -> str:
    """What a band shows, where there is one."""
    if all(len(group.runs) == 1 for group in groups):
        return ""
    if len(groups) > MOST_BANDS:
        return "The lines are means over the seeds; the data below have the deviations, too many to be drawn as bands."
    return "The line is the mean over the seeds, the band one standard deviation on either side."


def number_of(section: Section, group: Group) -> int:
    """The number of a group's curve, which gives its colour and its strokes."""
    return section.lines.index(group.line)


def against_rounds(
    section: Section,
    setting: str,
    wanted: Mapping[str, tuple[str, float]],
    values_of: Callable[[ReportedRun, str], dict[int, float]],
) -> tuple[list[Drawing], list[list[Any]]]:
    """Curves of some quantities against the rounds.

    Args:
        section: the section.
        setting: the setting.
        wanted: of each quantity its label, and by what its values are multiplied in the drawing.
        values_of: the values of a quantity in a run, by round.

    Returns:
        A drawing for each, their data with the columns name, curve, round, mean, deviation and seeds.
    """
    drawings, rows = list[Drawing](), list[list[Any]]()
    for name, (label, unit) in wanted.items():
        lines = []
        for group in section.at(setting):
            curve = averaged([values_of(run, name) for run in group.runs.values()])
            if curve is None:
                continue
            lines.append(curve.line(curve.rounds, unit, number_of(section, group), group.line))
            columns = (curve.rounds, curve.mean, curve.deviation, curve.n)
            rows += [[name, group.line, *row] for row in zip(*(column.tolist() for column in columns), strict=True)]
        if lines:
            drawings.append(
                Drawing(curves(few_bands(lines), xlabel="round", ylabel=label), f"{label} against rounds", name=name)
            )
    return drawings, rows
