"""The figures of a report, each with its caption and its data, and their drawings as SVG within a page."""

from __future__ import annotations

import io
import json
import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator

from fl_lightning.bench.cells_csv import csv_text
from fl_lightning.plotting.drawing import Draw
from fl_lightning.plotting.figures import laid_out
from fl_lightning.plotting.style import FONT, LIGHT, LINE_COLOURS

WIDTH, HEIGHT = 4.3, 3.0
# of a legend below a drawing
LEGEND_COLUMNS = 3
# inches of a column of a paper, and names of a legend side by side within it
COLUMN, COLUMN_LEGEND = 3.3, 2
# columns of the data of curves and bars; values of a map in a file of data at most
HEAD, MOST_CELLS = ("drawing", "curve", "x", "y"), 20_000
COLOURS = {LIGHT["ink"]: "ink", LIGHT["grid"]: "grid", LIGHT["quiet"]: "quiet", LIGHT["card"]: "card"}
COLOURS |= {colour: f"line-{at}" for at, colour in enumerate(LINE_COLOURS)}
OF_PAGE = re.compile("|".join(COLOURS))
# what matplotlib writes around the drawing itself
AROUND = re.compile(r"<metadata>.*?</metadata>|<style type=\"text/css\">.*?</style>|<!--.*?-->", re.DOTALL)
COORDINATES, NUMBERS = re.compile(r'(?<= d=")[^"]*|(?<= [xy]=")[^"]*'), re.compile(r"-?\d+\.\d{3,}")
CURVE_ID = re.compile(r' id="curve-(\d+)"')
SIZE = re.compile(r'<svg [^>]*?viewBox="([^"]+)"[^>]*>')


@dataclass(frozen=True)
class Drawing:
    """One drawing of a figure.

    Args:
        draw: draws it into axes.
        height: height in inches, without its legend.
        name: name among the drawings of its figure; empty for its number.
    """

    draw: Draw
    height: float = HEIGHT
    name: str = ""

    def alone(self) -> Figure:
        """Return the drawing alone. Its margins are estimated: to measure all texts takes as long as to draw them."""
        figure = Figure()
        axes = figure.add_axes((0.1, 0.1, 0.8, 0.8))
        self.draw(axes)
        bars = bar_legend(axes)
        below = 0.2 * -(-len(bars) // LEGEND_COLUMNS)
        left, bottom, right, top = margins(axes)
        whole, width, height = self.height + below, WIDTH - left - right, self.height - bottom - top
        figure.set_size_inches(WIDTH, whole)
        axes.set_position((left / WIDTH, (bottom + below) / whole, width / WIDTH, height / whole))
        add_legend(figure, bars, LEGEND_COLUMNS, "lower center")
        return figure


@dataclass
class Card:
    """A figure: drawings that belong together.

    Args:
        name: its name on the command line.
        title: its title.
        caption: how to read it.
        drawings: its drawings.
        table: its data; by default those of the drawn curves, bars and matrices.
    """

    name: str
    title: str
    caption: str
    drawings: Sequence[Drawing]
    table: pd.DataFrame | None = None

    @cached_property
    def figures(self) -> list[Figure]:
        """Each of its drawings alone."""
        return [drawing.alone() for drawing in self.drawings]

    @property
    def legend(self) -> dict[int, str]:
        """The label of each of its curves, by number."""
        found = [curve for figure in self.figures for curve in numbered_curves(figure.axes[0])]
        return {number: str(line.get_label()) for number, line in sorted(dict(found).items())}

    def elements(self) -> Iterator[str]:
        """Yield its drawings as elements of a page."""
        for at, figure in enumerate(self.figures):
            axes = figure.axes[0]
            told = ", ".join(filter(None, [self.title, " ".join(axes.get_title().split()), axes.get_ylabel()]))
            # names may be long, and a drawing has many ids
            yield inline(figure, f"f{zlib.crc32(self.name.encode(errors='backslashreplace')):x}-{at}", told)

    def csv(self) -> str:
        """Return its data as CSV, with six digits."""
        table = self.table
        if table is None:
            head = ("drawing", "row", "column", "value") if self.figures[0].axes[0].images else HEAD
            table = pd.DataFrame([row for figure in self.figures for row in data_of(figure.axes[0])], columns=head)
        rows = table.itertuples(index=False)
        digits = ([f"{one:.6g}" if isinstance(one, float) else one for one in row] for row in rows)
        return csv_text([list(table.columns), *digits])

    def printed(self) -> Iterator[tuple[str, Figure]]:
        """Yield the name of each of its drawings, and a figure as wide as a column of a paper, with its legend."""
        for at, drawing in enumerate(self.drawings, 1):
            figure = Figure(figsize=(COLUMN, drawing.height), layout="constrained")
            axes = figure.subplots()
            drawing.draw(axes)
            entries = {str(line.get_label()): line for _, line in numbered_curves(axes)} | bar_legend(axes)
            scale = COLUMN / WIDTH if drawing.height >= HEIGHT else 1.0
            figure.set_size_inches(COLUMN, drawing.height * scale + 0.2 * -(-len(entries) // COLUMN_LEGEND))
            add_legend(figure, entries, COLUMN_LEGEND)
            for artist in figure.findobj(lambda one: one.get_gid() is not None):
                artist.set_gid(None)  # ids for the script of the page
            own = re.sub(r"[^a-z0-9.]+", "-", (drawing.name or str(at)).lower()).strip("-")
            own = own.removeprefix(f"{self.name.rsplit('-', 1)[-1]}-")  # of drift-drift-client
            yield f"{self.name}-{own}" if len(self.drawings) > 1 else self.name, figure

    def figure(self) -> Figure:
        """Return all drawings side by side with their legend."""
        return laid_out([drawing.draw for drawing in self.drawings], columns=len(self.drawings))


def numbered_curves(axes: Axes) -> list[tuple[int, Line2D]]:
    """Return the numbered curves of some axes that have a label."""
    named = [(line, re.fullmatch(r"curve-(\d+)", str(line.get_gid()))) for line in axes.lines]
    return [(int(found[1]), line) for line, found in named if found and not str(line.get_label()).startswith("_")]


def bar_legend(axes: Axes) -> dict[str, Any]:
    """Return the bars of some axes by label."""
    return {str(one.get_label()): one for one in axes.containers if not str(one.get_label()).startswith("_")}


def margins(axes: Axes) -> tuple[float, float, float, float]:
    """Return the inches left of axes, below them, right of them and above them that their texts need."""
    x, y = (max(map(len, names_along(axis)), default=0) for axis in (axes.xaxis, axes.yaxis))
    title = len(axes.get_title().splitlines())
    if not (len(axes.get_xticks()) or axes.get_xlabel()):
        return 0.1, 0.1, 0.1, 0.14 + 0.16 * title
    below, left = (0.3 + 0.075 * min(longest, 24) for longest in (x, y))
    right = 0.85 if axes.child_axes else 0.12
    return max(left, 0.55) if y else 0.72, max(below, 0.48) if x > 4 else 0.48, right, 0.14 + 0.16 * title


def names_along(axis: Axis) -> list[str]:
    """Return the names along an axis; none of an axis of numbers."""
    fixed = isinstance(axis.get_major_locator(), FixedLocator)
    return [text.get_text() for text in axis.get_ticklabels()] if fixed else []


def namer(axis: Axis) -> Callable[[float], Any]:
    """Return what gives the name of a place along an axis, or the place where it has none."""
    formatter = axis.get_major_formatter()
    return (lambda at: formatter(at, 0)) if names_along(axis) else (lambda at: at)


def data_of(axes: Axes) -> Iterator[list[Any]]:
    """Yield the drawn data: of curves and bars the label, the place and the value, of maps row, column and value."""
    title = " ".join(axes.get_title().split()) or axes.get_ylabel() or axes.get_xlabel()
    along_x, along_y = namer(axes.xaxis), namer(axes.yaxis)
    for line in axes.lines:
        if not str(line.get_label()).startswith("_"):
            x, y = (np.asarray(data, float).tolist() for data in line.get_data())
            yield from ([title, line.get_label(), along_x(at), value] for at, value in zip(x, y, strict=True))
    for label, bars in bar_legend(axes).items():
        lying = bars.orientation == "horizontal"
        for at, bar in enumerate(bars):
            length = float(bar.get_width() if lying else bar.get_height())
            yield [title, label, along_y(at) if lying else along_x(at), length]
    for image in axes.images:
        values: np.ndarray = np.ma.filled(np.ma.asarray(image.get_array(), dtype=float), np.nan)
        places = np.argwhere(np.isfinite(values)).tolist()
        for row, column in places if len(places) <= MOST_CELLS else ():
            yield [title, along_y(row), along_x(column), float(values[row, column])]


def add_legend(figure: Figure, entries: Mapping[str, Any], columns: int, place: Any = "outside lower center") -> None:
    """Add a legend below the drawings, where there is something to tell apart."""
    if entries:
        how: dict[str, Any] = {"frameon": False, "fontsize": 8.5, "handlelength": 2.4, "borderpad": 0.1}
        figure.legend(entries.values(), entries.keys(), loc=place, ncols=min(len(entries), columns), **how)


# ------------------------------------------------------------------ SVG
def inline(figure: Figure, name: str, told: str) -> str:
    """Return a figure as an ``<svg>`` element, the same text for the same figure.

    Args:
        figure: the figure, drawn with :func:`fl_lightning.plotting.style.settings`.
        name: beginning of the ids within the drawing; each figure of a page has its own.
        told: description for readers who do not see it.
    """
    file = io.StringIO()
    figure.patch.set_visible(False)
    for axes in figure.axes:
        axes.patch.set_visible(False)
    # savefig would draw it twice, in order to lay it out
    FigureCanvasSVG(figure).print_svg(file, metadata={"Date": None})
    text = AROUND.sub("", file.getvalue()[file.getvalue().index("<svg") :])
    text = OF_PAGE.sub(lambda found: f"var(--{COLOURS[found[0]]})", text)
    text = text.replace(f"'{FONT}', sans-serif", "var(--font)")
    # a hundredth of a point
    text = COORDINATES.sub(lambda found: NUMBERS.sub(lambda one: f"{float(one[0]):.2f}", found[0]), text)
    text = own_ids(text, name)
    size = SIZE.search(text)[1]  # type: ignore[index]
    values = "".join(f" data-axes='{escape(json.dumps(one))}'" for one in curves_in(figure))
    head = f'<svg viewBox="{size}" role="img" aria-label="{escape(told)}"{values}>'
    return re.sub(r"\s*\n\s*", "\n", SIZE.sub(lambda _: head, text, count=1)).strip()


def curves_in(figure: Figure) -> Iterator[dict[str, Any]]:
    """Yield the curves of the first axes for the script of the page; nothing without curves.

    They have the ``box`` of the axes in the drawing (left, top, right, bottom), the ends of their scales ``x`` and
    ``y`` and whether these are logarithmic, their ``labels``, the ``names`` of places along x, and of each of the
    ``curves`` its number, its places and its values with five digits.
    """
    axes = figure.axes[0]
    curves = numbered_curves(axes)
    if not curves:
        return

    def five_digits(values: Any) -> list[float | None]:
        return [float(f"{value:.5g}") if math.isfinite(value) else None for value in np.asarray(values, float)]

    width, height = 72 * figure.get_size_inches()
    (left, bottom), (right, top) = axes.get_position().get_points()
    box = (left * width, (1 - top) * height, right * width, (1 - bottom) * height)
    scales = {
        axis.axis_name: [*map(float, axis.get_view_interval()), axis.get_scale() == "log"]
        for axis in (axes.xaxis, axes.yaxis)
    }
    yield {
        "box": [round(float(one), 2) for one in box],
        **scales,
        "labels": [axes.get_xlabel(), axes.get_ylabel()],
        "names": {f"{at:g}": name for at, name in zip(axes.get_xticks(), names_along(axes.xaxis), strict=False)},
        "curves": [[number, *map(five_digits, line.get_data())] for number, line in curves],
    }


def own_ids(text: str, name: str) -> str:
    """Return a drawing whose ids are a name and a number, without ids that nothing refers to."""
    used = dict.fromkeys(re.findall(r'(?:href="#|url\(#)([^")]+)', text))
    short = {one: f"{name}-{at}" for at, one in enumerate(used)}
    text = CURVE_ID.sub(r' data-curve="\1"', text)
    text = re.sub(r' id="([^"]+)"', lambda found: f' id="{short[found[1]]}"' if found[1] in short else "", text)
    text = re.sub(r'(?:xlink:)?href="#([^"]+)"', lambda found: f'href="#{short[found[1]]}"', text)
    text = re.sub(r"url\(#([^)]+)\)", lambda found: f"url(#{short[found[1]]})", text)
    return text.replace("xlink:href", "href")
