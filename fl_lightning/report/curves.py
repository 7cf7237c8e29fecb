"""The numbers that figures are drawn of, and the curves of them against the rounds: means over the seeds."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fl_lightning.pictures.drawing import CurveLine, curves
from fl_lightning.pictures.style import line_style
from fl_lightning.report.figures import Drawing, curve_id
from fl_lightning.report.reading import INFINITE
from fl_lightning.report.run import ReportedRun
from fl_lightning.report.sections import Group, Section

BYTES = ("bytes/down", "bytes/up")
SECONDS = ("time/round",)
# drawings of one figure
PANELS = 6


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

    def line(self, x: np.ndarray, unit: float, number: int) -> CurveLine:
        """What is drawn of it over ``x`` as curve ``number``: the mean in a unit, and its deviation as a band."""
        band = (unit * (self.mean - self.deviation), unit * (self.mean + self.deviation))
        return CurveLine(x, unit * self.mean, {**line_style(number), "gid": curve_id(number)}, band)


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
    total = averaged([cumulative(run, tags) for run in runs])
    if total is None or not np.isin(rounds, total.rounds).all():
        return None
    return total.mean[np.searchsorted(total.rounds, rounds)]


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


def legend_of(section: Section, groups: Sequence[Group]) -> list[tuple[int, str]]:
    """The number and the label of each curve."""
    return [(number_of(section, group), group.line) for group in groups]


def band(groups: Sequence[Group]) -> str:
    """What a band shows, where there is one."""
    many = any(len(group.runs) > 1 for group in groups)
    return "The line is the mean over the seeds, the band one standard deviation on either side." if many else ""


def number_of(section: Section, group: Group) -> int:
    """The number of a group's curve, which gives its colour and its strokes."""
    return section.lines.index(group.line)


def against_rounds(
    section: Section,
    setting: str,
    wanted: Mapping[str, tuple[str, float]],
    values_of: Callable[[ReportedRun, str], dict[int, float]],
) -> tuple[list[Drawing], list[list[Any]], list[tuple[int, str]]]:
    """Curves of some quantities against the rounds.

    Args:
        section: the section.
        setting: the setting.
        wanted: of each quantity its label, and by what its values are multiplied in the drawing.
        values_of: the values of a quantity in a run, by round.

    Returns:
        A drawing for each, their data with the columns name, curve, round, mean, deviation and seeds, and the legend.
    """
    drawings, rows = list[Drawing](), list[list[Any]]()
    groups: dict[str, Group] = {}
    for name, (label, unit) in wanted.items():
        lines = []
        for group in section.at(setting):
            curve = averaged([values_of(run, name) for run in group.runs.values()])
            if curve is None:
                continue
            lines.append(curve.line(curve.rounds, unit, number_of(section, group)))
            columns = (curve.rounds, curve.mean, curve.deviation, curve.n)
            rows += [[name, group.line, *row] for row in zip(*(column.tolist() for column in columns), strict=True)]
            groups[group.line] = group
        if lines:
            drawings.append(Drawing(curves(lines, xlabel="round", ylabel=label), f"{label} against rounds", name=name))
    return drawings, rows, legend_of(section, list(groups.values()))
