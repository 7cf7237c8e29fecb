"""Functions that draw curves, bars, maps and points into axes, so that they can be read without colour.

Importing this module imports matplotlib, which takes a while.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colorbar import Colorbar
from matplotlib.colors import LogNorm, Normalize
from matplotlib.font_manager import fontManager
from matplotlib.ticker import AutoLocator, Formatter, LogLocator, MaxNLocator, NullLocator

from fl_lightning.plotting.style import FALLBACKS, HATCHES, LIGHT, LINE_COLOURS, SETTINGS, line_style
from fl_lightning.plotting.values import VISIBLE
from fl_lightning.utilities.errors import printable

# names along an axis at most, and long ones below it
MOST_NAMES, MOST_LONG = 24, 12
# letters of a name along an axis
LONGEST_NAME = 24
MARKS = "os^Dv<>Pp*hX"
Draw = Callable[[Axes], None]


@dataclass(frozen=True)
class Curve:
    """A curve.

    Args:
        number: determines its colour, stroke and markers.
        y: values ``(n,)``.
        label: name in a legend; empty for none.
        x: places ``(n,)``; None for 0, 1, ...
        band: lower and upper edge ``(n,)`` of a band around it; None for no band.
        style: arguments of matplotlib in addition to the style of its number.
    """

    number: int
    y: np.ndarray
    label: str = ""
    x: np.ndarray | None = None
    band: tuple[np.ndarray, np.ndarray] | None = None
    style: Mapping[str, Any] = field(default_factory=dict)


# ------------------------------------------------------------------ style and texts
@contextmanager
def in_style() -> Iterator[None]:
    """Draw and save figures in the style of the package, in which ``$`` and ``^`` are ordinary characters."""
    installed = set(fontManager.get_font_names())
    fallbacks = [name for name in FALLBACKS if name in installed]
    settings: Any = {**SETTINGS, "font.family": ["sans-serif", *fallbacks]}
    with matplotlib.rc_context(settings):
        yield


def cut(name: str, longest: int = LONGEST_NAME) -> str:
    """Return a name on one line; the middle of a long name is replaced by dots."""
    line, half = printable(name), longest // 2
    return line if len(line) <= longest else f"{line[:half]}...{line[3 - half :]}"


class NameFormatter(Formatter):
    """Names of the places 0, 1, ...: complete in the data of a figure, shortened along an axis."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def __call__(self, x: float, pos: int | None = None) -> str:
        """Return a name."""
        return self.names[round(x)]

    def format_ticks(self, values: Sequence[float]) -> list[str]:
        """Return the names along an axis."""
        return [cut(self(value)) for value in values]


def name_ticks(axis: Any, names: Sequence[str]) -> None:
    """Name the places 0, 1, ..., or every second, third, ... of many; long names below an axis are turned."""
    letters = [len(cut(name)) for name in names]
    long = axis.axis_name == "x" and max(letters, default=0) > 4 and sum(letters) > 30
    step = math.ceil(len(names) / (MOST_LONG if long else MOST_NAMES)) or 1
    turned: dict[str, Any] = {"rotation": 60, "ha": "right", "rotation_mode": "anchor"} if long else {}
    axis.set_ticks(np.arange(0, len(names), step), names[::step], **turned)
    axis.set_major_formatter(NameFormatter(names))


def logarithmic(axes: Axes, which: str) -> None:
    """Make the axes in ``which``, such as ``xy``, logarithmic, with plain numbers instead of formulas."""
    for axis, set_scale in ((axes.xaxis, axes.set_xscale), (axes.yaxis, axes.set_yscale)):
        if axis.axis_name in which:
            set_scale("log")
            low, high = axis.get_view_interval()
            axis.set_major_locator(LogLocator(subs=(1.0,) if high > 300 * low else (1.0, 2.0, 5.0), numticks=7))
            axis.set_minor_locator(NullLocator())
            axis.set_major_formatter("{x:g}")


def few_numbers(axes: Axes, integers: bool = False) -> None:
    """Limit the numbers along the axes, which cost time and room on a phone."""
    for axis in (axes.xaxis, axes.yaxis):
        if isinstance(axis.get_major_locator(), AutoLocator):
            integer = integers and axis.axis_name == "x"
            axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10], integer=integer))


def in_legend(label: str) -> str | None:
    """Return a label that matplotlib shows even if it begins with ``_``."""
    return f" {label}" if label.startswith("_") else label or None


def visible(values: np.ndarray) -> np.ndarray:
    """Return singular values ``(..., n)`` with nan in place of values at the level of rounding errors.

    They would stretch the logarithmic axis, and flatten the curves.
    """
    return np.where(values > VISIBLE * np.fmax.reduce(values, -1, keepdims=True, initial=0.0), values, np.nan)


def colour_scale(axes: Axes, colours: ScalarMappable, label: str) -> Colorbar:
    """Add a colour bar right of the axes."""
    bar = axes.figure.colorbar(colours, cax=axes.inset_axes((1.03, 0, 0.045, 1)), label=label)
    for shades in bar.ax.collections:
        shades.set_rasterized(True)  # instead of 256 elements
    bar.outline.set_visible(False)
    return bar


# ------------------------------------------------------------------ drawings
def curves(lines: Sequence[Curve], log: str = "", ticks: Sequence[str] | None = None, **labels: Any) -> Draw:
    """Draw curves, each with its band if it has one.

    Args:
        lines: the curves.
        log: axes with a logarithmic scale, such as ``xy``.
        ticks: labels of the points along x; None for numbers.
        labels: ``xlabel``, ``ylabel``, ``title``.
    """

    def draw(axes: Axes) -> None:
        all_integers = True
        for place, line in enumerate(lines):
            x = np.arange(len(line.y)) if line.x is None else line.x
            all_integers = all_integers and bool((x == np.round(x)).all())
            style = line_style(line.number) | dict(line.style) | ({"marker": "o"} if len(x) == 1 else {})
            every = max(1, len(x) // 8)
            axes.plot(x, line.y, markevery=(place % every, every), label=in_legend(line.label), **style)
            if line.band is not None and (line.band[0] != line.band[1]).any():
                axes.fill_between(x, *line.band, alpha=0.18, linewidth=0, color=style["color"])
        logarithmic(axes, log)
        few_numbers(axes, all_integers)
        if ticks is not None:
            name_ticks(axes.xaxis, ticks)
        axes.set(**labels)
        axes.margins(x=0.02)

    return draw


def bar_style(at: int) -> dict[str, Any]:
    """Return matplotlib's arguments for bar number ``at``: a colour, and a hatch in the colour of the card.

    Each repetition of the colours has other hatches: the first 64 pairs differ.
    """
    turn, colour = divmod(at, len(LINE_COLOURS))
    hatch = HATCHES[(at + turn) % len(HATCHES)]
    return {"facecolor": LINE_COLOURS[colour], "hatch": hatch, "edgecolor": LIGHT["card"], "linewidth": 0}


def bars(heights: Sequence[tuple[int, np.ndarray, str]], names: Sequence[str], **labels: Any) -> Draw:
    """Draw groups of bars from numbers (for colours), heights ``(n,)`` and names in a legend."""

    def draw(axes: Axes) -> None:
        width = 0.84 / max(len(heights), 1)
        for place, (at, values, label) in enumerate(heights):
            x = np.arange(len(values)) + (place - (len(heights) - 1) / 2) * width
            axes.bar(x, values, width, label=in_legend(label), **bar_style(at))
        name_ticks(axes.xaxis, names)
        few_numbers(axes)
        axes.grid(axis="x", visible=False)
        axes.set(**labels)

    return draw


def heat(
    values: np.ndarray,
    unit: str,
    names: tuple[Sequence[str] | None, Sequence[str] | None] = (None, None),
    log: bool = False,
    limits: tuple[float, float] | None = None,
    **labels: Any,
) -> Draw:
    """Draw a map of values ``(n, m)``; nan, and 0 on a logarithmic scale, are empty.

    Args:
        values: the values.
        unit: meaning of the values, shown at the scale.
        names: names of the rows and of the columns, if they have names.
        log: whether the scale is logarithmic.
        limits: ends of the scale; None for the least and the greatest value.
        labels: ``xlabel``, ``ylabel``, ``title``.
    """

    def draw(axes: Axes) -> None:
        drawable = np.ma.masked_array(values, ~np.isfinite(values) | (log & (values <= 0)))
        low, high = limits or ((float(drawable.min()), float(drawable.max())) if drawable.count() else (0.0, 1.0))
        ends = (max(low, 1e-12), max(high, 2 * low)) if log else (low, high if high > low else low + 1)
        norm = LogNorm(*ends) if log else Normalize(*ends)
        colours = "RdBu" if limits is not None and low < 0 else "viridis"  # white at 0
        image = axes.imshow(drawable, aspect="auto", interpolation="none", cmap=colours, norm=norm)
        bar = colour_scale(axes, image, unit)
        if log:
            bar.ax.yaxis.set_minor_locator(NullLocator())
            bar.ax.yaxis.set_major_formatter("{x:g}")
            # a narrow scale contains at most one power of ten
            if sum(ends[0] <= tick <= ends[1] for tick in bar.get_ticks()) < 2:
                bar.set_ticks(ends)
        axes.grid(visible=False)
        for axis, along in zip((axes.yaxis, axes.xaxis), names, strict=True):
            if along is None:
                axis.set_major_locator(MaxNLocator(6, integer=True))
            else:
                name_ticks(axis, along)
        axes.set(**labels)

    return draw


def points(groups: Sequence[tuple[str, np.ndarray]], bare: bool, log: str = "", **labels: Any) -> Draw:
    """Draw points in the plane, with a colour and a marker for each group.

    Args:
        groups: names in a legend, and points ``(n, 2)``.
        bare: whether to omit the axes, because the coordinates have no meaning.
        log: axes with a logarithmic scale, such as ``xy``.
        labels: ``xlabel``, ``ylabel``, ``title``.
    """

    def draw(axes: Axes) -> None:
        for at, (name, places) in enumerate(groups):
            colour, marker = LINE_COLOURS[at % len(LINE_COLOURS)], MARKS[at % len(MARKS)]
            (group,) = axes.plot(*places.T, linestyle="none", color=colour, marker=marker, label=in_legend(name))
            group.set(markeredgewidth=0, markersize=3 + 0.5 * bare)
        if bare:
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
        logarithmic(axes, log)
        axes.set(**labels)

    return draw


def forest(
    names: Sequence[str], estimates: Sequence[tuple[float, float, float] | None], shown: Collection[str], **labels: Any
) -> Draw:
    """Draw estimates with their intervals, one row for each name, from top to bottom, and a line at 0.

    Args:
        names: names of the rows.
        estimates: mean, lower and upper end of each row; None leaves a row empty.
        shown: names of the rows whose mark is filled, such as significant ones.
        labels: ``xlabel``, ``ylabel``, ``title``, and ``xlim`` for equal axes of several panels.
    """

    def draw(axes: Axes) -> None:
        axes.axvline(0, color=LIGHT["quiet"], linewidth=0.8)
        for place, estimate in enumerate(estimates):
            if estimate is not None:
                mean, low, high = estimate
                fill = LINE_COLOURS[0] if names[place] in shown else LIGHT["card"]
                axes.plot((low, high), (place, place), color=LINE_COLOURS[0], linewidth=1.4)
                axes.plot(mean, place, "o", color=LINE_COLOURS[0], markerfacecolor=fill, markersize=4.5)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_yticks(range(len(names)), [*map(cut, names)])
        few_numbers(axes)
        axes.grid(axis="y", visible=False)
        axes.set(**labels)

    return draw
