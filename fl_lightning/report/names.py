"""What figures have in common: their names, their legends, and how curves against the rounds are drawn."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fl_lightning.pictures.drawing import CurveLine, curves
from fl_lightning.pictures.style import line_style
from fl_lightning.report.curves import averaged
from fl_lightning.report.figures import Drawing
from fl_lightning.report.run import ReportedRun
from fl_lightning.report.sections import Group, Section

# drawings of one figure
PANELS = 6


def figure_name(prefix: str, setting: str, what: str) -> str:
    """The name of a figure."""
    parts = [prefix, setting, what]
    return "-".join(re.sub(r"[^a-zA-Z0-9.]+", "-", part).strip("-").lower() for part in parts if part)


def titled(title: str, setting: str) -> str:
    """A title with the setting."""
    return f"{title}, {setting}" if setting else title


def legend_of(section: Section, groups: Sequence[Group]) -> list[tuple[int, str]]:
    """The number and the label of each curve."""
    return [(section.lines.index(group.line), group.line) for group in groups]


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
            style = line_style(number_of(section, group))
            lines.append(CurveLine(curve.rounds, unit * curve.mean, style, curve.band(unit)))
            columns = (curve.rounds, curve.mean, curve.deviation, curve.n)
            rows += [[name, group.line, *row] for row in zip(*(column.tolist() for column in columns), strict=True)]
            groups[group.line] = group
        if lines:
            drawings.append(Drawing(curves(lines, xlabel="round", ylabel=label), f"{label} against rounds"))
    return drawings, rows, legend_of(section, list(groups.values()))
