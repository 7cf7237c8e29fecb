"""What figures are called, and what stands beside all of them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fl_lightning.report.sections import Group, Section

# drawings of one figure
PANELS = 6


def named(prefix: str, setting: str, what: str) -> str:
    """The name of a figure."""
    parts = [prefix, setting, what]
    return "-".join(re.sub(r"[^a-zA-Z0-9.]+", "-", one).strip("-").lower() for one in parts if one)


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
