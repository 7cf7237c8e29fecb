"""The figures of a report, each with its caption and its data."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from fl_lightning.bench.cells_csv import csv_text
from fl_lightning.report.style import HATCHES, LIGHT, LINES, line_style, settings
from fl_lightning.report.svg import inline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 4.3, 3.0
MARGINS = (0.72, 0.48, 0.12, 0.14)
# of a legend below a drawing
COLUMNS = 3
Draw = Callable[["Axes"], None]


@dataclass(frozen=True)
class Panel:
    """One drawing of a figure.

    Args:
        draw: draws it into axes.
        told: what it shows, in words.
        height: in inches, without its legend.
        legend: number and label of each of its bars.
        margins: left, bottom, right and top of its axes, in inches.
    """

    draw: Draw
    told: str
    height: float = HEIGHT
    legend: Sequence[tuple[int, str]] = ()
    margins: tuple[float, float, float, float] = MARGINS

    def drawing(self) -> Figure:
        """The drawing alone; its margins are given, since to measure all texts takes as long as to draw them."""
        from matplotlib.figure import Figure

        below = 0.2 * -(-len(self.legend) // COLUMNS)
        left, bottom, right, top = self.margins
        whole, width, height = self.height + below, WIDTH - left - right, self.height - bottom - top
        figure = Figure(figsize=(WIDTH, whole))
        self.draw(figure.add_axes((left / WIDTH, (bottom + below) / whole, width / WIDTH, height / whole)))
        add_legend(figure, self.legend, COLUMNS, bar_handle, "lower center")
        return figure


@dataclass(frozen=True)
class Card:
    """A figure: drawings that belong together.

    Args:
        name: its name on the command line.
        title: what it shows.
        caption: how to read it.
        panels: its drawings.
        legend: number and label of each of its curves.
        head: names of the columns of its data.
        rows: its data.
    """

    name: str
    title: str
    caption: str
    panels: Sequence[Panel]
    legend: Sequence[tuple[int, str]] = ()
    head: Sequence[str] = ()
    rows: Sequence[Sequence[Any]] = field(default_factory=list)

    def drawings(self) -> Iterator[str]:
        """Its drawings as elements of a page."""
        for at, panel in enumerate(self.panels):
            # names may be long, and a drawing has many ids
            yield inline(
                panel.drawing(), f"f{zlib.crc32(self.name.encode(errors='backslashreplace')):x}-{at}", panel.told
            )

    def csv(self) -> str:
        """Its data as CSV, with six digits."""
        rows = ([f"{one:.6g}" if isinstance(one, float) else one for one in row] for row in self.rows)
        return csv_text([self.head, *rows])

    def figure(self) -> Figure:
        """All of it as one figure with its legend, as for a paper."""
        from matplotlib.figure import Figure

        size = (WIDTH * len(self.panels), max(panel.height for panel in self.panels))
        figure = Figure(figsize=size, layout="constrained")
        for axes, panel in zip(figure.subplots(1, len(self.panels), squeeze=False)[0], self.panels, strict=True):
            panel.draw(axes)
        add_legend(figure, self.legend, 3 * len(self.panels), line_handle)
        of_bars = dict.fromkeys(one for panel in self.panels for one in panel.legend)
        add_legend(figure, list(of_bars), 3 * len(self.panels), bar_handle)
        return figure


def add_legend(
    figure: Figure,
    entries: Sequence[tuple[int, str]],
    columns: int,
    handle: Callable[[int], Any],
    place: Any = "outside lower center",
) -> None:
    """Add a legend below the drawings, where there is something to tell apart."""
    if entries:
        handles, labels = [handle(at) for at, _ in entries], [label for _, label in entries]
        how: dict[str, Any] = {"frameon": False, "fontsize": 8.5, "handlelength": 2.4, "borderpad": 0.1}
        figure.legend(handles, labels, loc=place, ncols=min(len(labels), columns), **how)


def line_handle(at: int) -> Any:
    """What stands for a curve in a legend."""
    from matplotlib.lines import Line2D

    return Line2D([], [], **line_style(at))


def bar_handle(at: int) -> Any:
    """What stands for a bar in a legend."""
    from matplotlib.patches import Patch

    return Patch(**bar_style(at))


def bar_style(at: int) -> dict[str, Any]:
    """The arguments of matplotlib for bar number ``at``: a colour, and a hatch in the colour of the card."""
    return {"facecolor": LINES[at % len(LINES)], "hatch": HATCHES[at % len(HATCHES)], "edgecolor": LIGHT["card"]}


def in_style() -> Any:
    """The context in which figures are drawn and saved."""
    import matplotlib

    wanted: Any = settings()
    return matplotlib.rc_context(wanted)


# ------------------------------------------------------------------ drawings
def curves(
    lines: Sequence[tuple[int, np.ndarray, np.ndarray, np.ndarray | None]],
    log: bool = False,
    ticks: Sequence[str] | None = None,
    **labels: str,
) -> Draw:
    """Curves with bands.

    Args:
        lines: of each curve its number, x ``(R,)``, y ``(R,)`` and half the height of its band ``(R,)``, or None.
        log: whether y is on a logarithmic scale.
        ticks: the names of the places along x, if they have some.
        labels: ``xlabel``, ``ylabel``, ``title``.
    """

    def draw(axes: Axes) -> None:
        from matplotlib.ticker import LogLocator, NullLocator

        for at, x, y, half in lines:
            style = line_style(at)
            every = max(1, len(x) // 8)
            axes.plot(x, y, markevery=(at % every, every), **(style | ({"marker": "o"} if len(x) == 1 else {})))
            if half is not None and half.any():
                axes.fill_between(x, y - half, y + half, color=style["color"], alpha=0.18, linewidth=0)
        if log:
            axes.set_yscale("log")
            low, high = axes.get_ylim()
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0,) if high > 300 * low else (1.0, 2.0, 5.0), numticks=7))
            axes.yaxis.set_minor_locator(NullLocator())
            axes.yaxis.set_major_formatter(plain_number)
        few(axes)
        if ticks is not None and len(ticks) <= 24:
            axes.set_xticks(np.arange(len(ticks)), ticks, rotation=60, ha="right", rotation_mode="anchor")
        axes.set(**labels)
        axes.margins(x=0.02)

    return draw


def bars(
    heights: Sequence[tuple[int, np.ndarray]], names: Sequence[str], errors: Sequence[np.ndarray] = (), **labels: str
) -> Draw:
    """Groups of bars side by side: of each its number and its heights ``(n,)``."""

    def draw(axes: Axes) -> None:
        width = 0.84 / max(len(heights), 1)
        for place, (at, values) in enumerate(heights):
            x = np.arange(len(values)) + (place - (len(heights) - 1) / 2) * width
            axes.bar(x, values, width, linewidth=0, **bar_style(at))
        rotated: dict[str, Any] = {"rotation": 60, "ha": "right", "rotation_mode": "anchor"}
        rotated = rotated if max(map(len, names), default=0) > 4 else {}
        axes.set_xticks(np.arange(len(names)), names, **rotated)
        few(axes)
        axes.grid(axis="x", visible=False)
        axes.set(**labels)

    return draw


def plain_number(value: float, place: float = 0) -> str:
    """A number along an axis; those of matplotlib's logarithmic axes would be formulas."""
    return f"{value:g}"


def few(axes: Axes) -> None:
    """Have few numbers along the axes: each costs time, and there is little room on a phone."""
    from matplotlib.ticker import AutoLocator, MaxNLocator

    for axis in (axes.xaxis, axes.yaxis):
        if isinstance(axis.get_major_locator(), AutoLocator):
            axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))


def stacked(parts: Sequence[tuple[str, np.ndarray]], names: Sequence[str], xlabel: str) -> Draw:
    """Horizontal bars of parts: of each part its name and its length in each bar ``(n,)``."""

    def draw(axes: Axes) -> None:
        begin = np.zeros(len(names))
        for at, (_, lengths) in enumerate(parts):
            axes.barh(np.arange(len(names)), lengths, 0.7, begin, linewidth=0, **bar_style(at))
            begin = begin + lengths
        axes.set_yticks(np.arange(len(names)), names)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        few(axes)
        axes.set_xlabel(xlabel)

    return draw


def heat(
    values: np.ndarray,
    unit: str,
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    log: bool = False,
    limits: tuple[float, float] | None = None,
    **labels: str,
) -> Draw:
    """A map of values ``(n, m)``; what is nan, or 0 on a logarithmic scale, stays empty."""

    def draw(axes: Axes) -> None:
        from matplotlib.colors import LogNorm, Normalize
        from matplotlib.ticker import MaxNLocator, NullLocator

        hidden = ~np.isfinite(values) | (log & (values <= 0))
        shown = np.ma.masked_array(values, hidden)
        low, high = limits or ((float(shown.min()), float(shown.max())) if shown.count() else (0.0, 1.0))
        norm = LogNorm(max(low, 1e-12), max(high, 2 * low)) if log else Normalize(low, high if high > low else low + 1)
        drawn = axes.imshow(shown, aspect="auto", interpolation="none", cmap="viridis", norm=norm)
        bar = axes.figure.colorbar(drawn, cax=axes.inset_axes((1.03, 0, 0.045, 1)), label=unit)
        if log:
            bar.ax.yaxis.set_minor_locator(NullLocator())
            bar.ax.yaxis.set_major_formatter(plain_number)
        for shades in bar.ax.collections:
            shades.set_rasterized(True)  # they would be 256 elements
        bar.outline.set_visible(False)
        axes.grid(visible=False)
        for axis, names in ((axes.xaxis, columns), (axes.yaxis, rows)):
            if names is not None and len(names) <= 24:
                axis.set_ticks(np.arange(len(names)), names)
            else:
                axis.set_major_locator(MaxNLocator(6, integer=True))
        if columns is not None and len(columns) <= 24 and max(map(len, columns), default=0) > 4:
            axes.tick_params(axis="x", rotation=60)
        axes.set(**labels)

    return draw


def heat_margins(rows: Sequence[str] | None = None, columns: Sequence[str] | None = None) -> Any:
    """The margins of a map: room for the names along it, for its title and for its scale."""
    left = room(rows) if rows is not None and len(rows) <= 24 else 0.55
    below = room(columns) if columns is not None and len(columns) <= 24 else 0.48
    return (max(left, 0.55), max(below, 0.48), 0.85, 0.3)


def room(names: Sequence[str]) -> float:
    """The inches that names along an axis and its label take."""
    longest = max(map(len, names), default=0)
    return 0.3 + 0.075 * min(longest, 24)


def points(places: np.ndarray, kinds: np.ndarray | None, **labels: str) -> Draw:
    """Points ``(n, 2)``, each with the colour and the marker of its kind ``(n,)``."""

    def draw(axes: Axes) -> None:
        marks = "os^Dv<>Pp*hX"
        for at, kind in enumerate(np.unique(kinds) if kinds is not None else [None]):
            chosen = places if kind is None else places[kinds == kind]
            colour, mark = LINES[at % len(LINES)], marks[at % len(marks)]
            axes.plot(*chosen.T, linestyle="none", marker=mark, markersize=2.5, color=colour, markeredgewidth=0)
        axes.set(xticks=[], yticks=[], **labels)

    return draw
