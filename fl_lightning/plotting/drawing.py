"""What is drawn into axes: curves, bars, maps and points, each of which can be read without colour.

Importing this takes a while, so what may never draw does so where it draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.ticker import AutoLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from fl_lightning.plotting.style import HATCHES, LIGHT, LINE_COLOURS, VISIBLE, line_style, settings

# names along an axis, and long ones below it, beyond which they could not be read
MOST_NAMES, MOST_LONG = 24, 12
MARKS = "os^Dv<>Pp*hX"
Draw = Callable[[Axes], None]


@dataclass(frozen=True)
class CurveLine:
    """A curve.

    Args:
        x: its places ``(n,)``.
        y: its values ``(n,)``.
        style: arguments of matplotlib.
        band: the lower and the upper edge of a band around it ``(n,)``; None for no band.
        label: its name in a legend of the axes; empty for none.
    """

    x: np.ndarray
    y: np.ndarray
    style: dict[str, Any]
    band: tuple[np.ndarray, np.ndarray] | None = None
    label: str = ""


def in_style() -> Any:
    """The context in which figures are drawn and saved."""
    wanted: Any = settings()
    return matplotlib.rc_context(wanted)


def bar_style(at: int) -> dict[str, Any]:
    """The arguments of matplotlib for bar number ``at``: a colour, and a hatch in the colour of the card.

    Where the colours begin again, each has the next hatch: the first 64 pairs differ.
    """
    return {
        "facecolor": LINE_COLOURS[at % len(LINE_COLOURS)],
        "hatch": HATCHES[(at + at // len(LINE_COLOURS)) % len(HATCHES)],
        "edgecolor": LIGHT["card"],
    }


def visible(values: np.ndarray) -> np.ndarray:
    """Singular values without rounding errors of the largest, of which one of 1e-100 would flatten the curves."""
    return np.where(values > VISIBLE * np.nanmax(values, initial=0.0), values, np.nan)


def curves(lines: Sequence[CurveLine], log: str = "", ticks: Sequence[str] | None = None, **labels: str) -> Draw:
    """Curves with bands.

    Args:
        lines: the curves.
        log: the axes that are logarithmic, of ``xy``.
        ticks: the names of the places along x, if they have some.
        labels: ``xlabel``, ``ylabel``, ``title``.
    """

    def draw(axes: Axes) -> None:
        for number, line in enumerate(lines):
            every = max(1, len(line.x) // 8)
            style = line.style | ({"marker": "o"} if len(line.x) == 1 else {})
            axes.plot(line.x, line.y, markevery=(number % every, every), label=line.label or None, **style)
            if line.band is not None and (line.band[0] != line.band[1]).any():
                axes.fill_between(line.x, *line.band, alpha=0.18, linewidth=0, color=line.style["color"])
        logarithmic(axes, log)
        few_numbers(axes)
        if ticks is not None:
            name_ticks(axes.xaxis, ticks)
        axes.set(**labels)
        axes.margins(x=0.02)

    return draw


def bars(heights: Sequence[tuple[int, np.ndarray, str]], names: Sequence[str], **labels: str) -> Draw:
    """Groups of bars side by side: of each its number, its heights ``(n,)`` and its name in a legend of the axes."""

    def draw(axes: Axes) -> None:
        width = 0.84 / max(len(heights), 1)
        for place, (at, values, label) in enumerate(heights):
            x = np.arange(len(values)) + (place - (len(heights) - 1) / 2) * width
            axes.bar(x, values, width, linewidth=0, label=label or None, **bar_style(at))
        name_ticks(axes.xaxis, names)
        few_numbers(axes)
        axes.grid(axis="x", visible=False)
        axes.set(**labels)

    return draw


def stacked(parts: Sequence[tuple[str, np.ndarray]], names: Sequence[str], xlabel: str) -> Draw:
    """Horizontal bars of parts: of each part its name and its length in each bar ``(n,)``."""

    def draw(axes: Axes) -> None:
        begin = np.zeros(len(names))
        for at, (part, lengths) in enumerate(parts):
            label = part.replace("_", " and ")
            axes.barh(np.arange(len(names)), lengths, 0.7, begin, linewidth=0, label=label, **bar_style(at))
            begin = begin + lengths
        axes.set_yticks(np.arange(len(names)), names)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        few_numbers(axes)
        axes.set_xlabel(xlabel)

    return draw


def heat(
    values: np.ndarray,
    unit: str,
    names: tuple[Sequence[str] | None, Sequence[str] | None] = (None, None),
    log: bool = False,
    limits: tuple[float, float] | None = None,
    **labels: str,
) -> Draw:
    """A map of values ``(n, m)``; what is nan, or 0 on a logarithmic scale, stays empty.

    Args:
        values: the values.
        unit: what they are.
        names: of the rows and of the columns, if they have some.
        log: whether the scale is logarithmic.
        limits: its ends; None takes the least and the largest value.
        labels: ``xlabel``, ``ylabel``, ``title``.
    """

    def draw(axes: Axes) -> None:
        known = np.ma.masked_array(values, ~np.isfinite(values) | (log & (values <= 0)))
        low, high = limits or ((float(known.min()), float(known.max())) if known.count() else (0.0, 1.0))
        ends = (max(low, 1e-12), max(high, 2 * low)) if log else (low, high if high > low else low + 1)
        norm = LogNorm(*ends) if log else Normalize(*ends)
        colours = "RdBu" if limits is not None and low < 0 else "viridis"  # white at 0
        image = axes.imshow(known, aspect="auto", interpolation="none", cmap=colours, norm=norm)
        bar = axes.figure.colorbar(image, cax=axes.inset_axes((1.03, 0, 0.045, 1)), label=unit)
        if log:
            bar.ax.yaxis.set_minor_locator(NullLocator())
            bar.ax.yaxis.set_major_formatter(plain_number)
            # a narrow scale has one power of ten within it, or none
            if sum(ends[0] <= tick <= ends[1] for tick in bar.get_ticks()) < 2:
                bar.set_ticks(ends)
        for shades in bar.ax.collections:
            shades.set_rasterized(True)  # they would be 256 elements
        bar.outline.set_visible(False)
        axes.grid(visible=False)
        for axis, along in zip((axes.yaxis, axes.xaxis), names, strict=True):
            if along is None:
                axis.set_major_locator(MaxNLocator(6, integer=True))
            else:
                name_ticks(axis, along)
        axes.set(**labels)

    return draw


def points(groups: Sequence[tuple[str, np.ndarray]], bare: bool, log: str = "", **labels: str) -> Draw:
    """Points in the plane, with a colour and a marker for each group.

    Args:
        groups: of each its name in a legend of the axes and its points ``(n, 2)``.
        bare: whether the axes have no numbers, as where the coordinates have no meaning.
        log: the axes that are logarithmic, of ``xy``.
        labels: ``xlabel``, ``ylabel``, ``title``.
    """

    def draw(axes: Axes) -> None:
        for at, (name, places) in enumerate(groups):
            style: dict[str, Any] = {
                "color": LINE_COLOURS[at % len(LINE_COLOURS)],
                "marker": MARKS[at % len(MARKS)],
                "markersize": 3 + 0.5 * bare,
            }
            axes.plot(*places.T, linestyle="none", markeredgewidth=0, label=name or None, **style)
        if bare:
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
        logarithmic(axes, log)
        axes.set(**labels)

    return draw


def logarithmic(axes: Axes, which: str) -> None:
    """Give some of the axes a logarithmic scale, with plain numbers; matplotlib's would be formulas."""
    for axis, limits in ((axes.xaxis, axes.set_xscale), (axes.yaxis, axes.set_yscale)):
        if axis.axis_name in which:
            limits("log")
            low, high = axis.get_view_interval()
            subs = (1.0,) if high > 300 * low else (1.0, 2.0, 5.0)
            axis.set_major_locator(LogLocator(subs=subs, numticks=7))
            axis.set_minor_locator(NullLocator())
            axis.set_major_formatter(plain_number)


def plain_number(value: float, place: float = 0) -> str:
    """A number along an axis."""
    return f"{value:g}"


def few_numbers(axes: Axes) -> None:
    """Have few numbers along the axes: each costs time, and there is little room on a phone."""
    for axis in (axes.xaxis, axes.yaxis):
        if isinstance(axis.get_major_locator(), AutoLocator):
            axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))


def name_ticks(axis: Any, names: Sequence[str]) -> None:
    """Names at 0, 1, ..., or at every second, third, ... where they are many; long ones are turned below an axis."""
    long = axis.axis_name == "x" and max(map(len, names), default=0) > 4
    step = math.ceil(len(names) / (MOST_LONG if long else MOST_NAMES)) or 1
    turned: dict[str, Any] = {"rotation": 60, "ha": "right", "rotation_mode": "anchor"} if long else {}
    axis.set_ticks(np.arange(0, len(names), step), names[::step], **turned)
    # the data of a figure have all names
    axis.set_major_formatter(FuncFormatter(lambda at, place: names[round(at)]))


def numbered_line(at: int, y: np.ndarray, label: str = "", x: np.ndarray | None = None, **style: Any) -> CurveLine:
    """Return curve number ``at`` over ``x``, by default the index of its values."""
    return CurveLine(np.arange(len(y)) if x is None else x, y, line_style(at) | style, label=label)
