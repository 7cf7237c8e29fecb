"""The figures of a report, each with its caption and its data, and their drawings as SVG within a page."""

from __future__ import annotations

import io
import json
import math
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedFormatter

from fl_lightning.bench.cells_csv import csv_text
from fl_lightning.pictures.drawing import Draw, bar_style
from fl_lightning.pictures.style import FONT, LIGHT, LINE_COLOURS, line_style

WIDTH, HEIGHT = 4.3, 3.0
MARGINS = (0.72, 0.48, 0.12, 0.14)
# of a map, with room for its title and its scale
HEAT_MARGINS = (0.55, 0.48, 0.85, 0.3)
# of a legend below a drawing
LEGEND_COLUMNS = 3
# inches of a column of a paper, and names of a legend side by side within it
COLUMN, COLUMN_LEGEND = 3.3, 2
COLOURS = {LIGHT["ink"]: "ink", LIGHT["grid"]: "grid", LIGHT["quiet"]: "quiet", LIGHT["card"]: "card"}
COLOURS |= {colour: f"line-{at}" for at, colour in enumerate(LINE_COLOURS)}
OF_PAGE = re.compile("|".join(COLOURS))
# what matplotlib writes around the drawing itself
AROUND = re.compile(r"<metadata>.*?</metadata>|<style type=\"text/css\">.*?</style>|<!--.*?-->", re.DOTALL)
NUMBERS = re.compile(r"-?\d+\.\d{3,}")
CURVE_ID = re.compile(r' id="curve-(\d+)"')
SIZE = re.compile(r'<svg [^>]*?viewBox="([^"]+)"[^>]*>')


@dataclass(frozen=True)
class Drawing:
    """One drawing of a figure.

    Args:
        draw: draws it into axes.
        told: what it shows, in words.
        height: in inches, without its legend.
        legend: number and label of each of its bars.
        margins: left, bottom, right and top of its axes, in inches.
        name: what tells it from the others of its figure; empty for its number.
    """

    draw: Draw
    told: str
    height: float = HEIGHT
    legend: Sequence[tuple[int, str]] = ()
    margins: tuple[float, float, float, float] = MARGINS
    name: str = ""

    def alone(self) -> Figure:
        """The drawing alone; its margins are given, since to measure all texts takes as long as to draw them."""
        below = 0.2 * -(-len(self.legend) // LEGEND_COLUMNS)
        left, bottom, right, top = self.margins
        whole, width, height = self.height + below, WIDTH - left - right, self.height - bottom - top
        figure = Figure(figsize=(WIDTH, whole))
        self.draw(figure.add_axes((left / WIDTH, (bottom + below) / whole, width / WIDTH, height / whole)))
        add_legend(figure, self.legend, LEGEND_COLUMNS, bar_handle, "lower center")
        return figure


@dataclass(frozen=True)
class Card:
    """A figure: drawings that belong together.

    Args:
        name: its name on the command line.
        title: what it shows.
        caption: how to read it.
        drawings: its drawings.
        legend: number and label of each of its curves.
        head: names of the columns of its data.
        rows: its data.
    """

    name: str
    title: str
    caption: str
    drawings: Sequence[Drawing]
    legend: Sequence[tuple[int, str]] = ()
    head: Sequence[str] = ()
    rows: Sequence[Sequence[Any]] = field(default_factory=list)

    def elements(self) -> Iterator[str]:
        """Its drawings as elements of a page."""
        for at, drawing in enumerate(self.drawings):
            # names may be long, and a drawing has many ids
            yield inline(
                drawing.alone(), f"f{zlib.crc32(self.name.encode(errors='backslashreplace')):x}-{at}", drawing.told
            )

    def csv(self) -> str:
        """Its data as CSV, with six digits."""
        rows = ([f"{one:.6g}" if isinstance(one, float) else one for one in row] for row in self.rows)
        return csv_text([self.head, *rows])

    def printed(self) -> Iterator[tuple[str, Figure]]:
        """Each of its drawings as a figure of its own that is as wide as a column, with its legend; and its name."""
        for at, drawing in enumerate(self.drawings, 1):
            entries = (*self.legend, *drawing.legend)
            rows = -(-len(entries) // COLUMN_LEGEND)
            scale = COLUMN / WIDTH if drawing.height >= HEIGHT else 1.0
            size = (COLUMN, drawing.height * scale + 0.2 * rows)
            figure = Figure(figsize=size, layout="constrained")
            drawing.draw(figure.subplots())
            add_legend(figure, self.legend, COLUMN_LEGEND, lambda at: Line2D([], [], **line_style(at)))
            add_legend(figure, drawing.legend, COLUMN_LEGEND, bar_handle)
            for artist in figure.findobj(lambda one: one.get_gid() is not None):
                artist.set_gid(None)  # what a script looks for
            own = re.sub(r"[^a-z0-9.]+", "-", (drawing.name or str(at)).lower()).strip("-")
            own = own.removeprefix(f"{self.name.rsplit('-', 1)[-1]}-")  # of drift-drift-client
            yield f"{self.name}-{own}" if len(self.drawings) > 1 else self.name, figure

    def figure(self) -> Figure:
        """All of it as one figure with its legend, as for a paper."""
        size = (WIDTH * len(self.drawings), max(drawing.height for drawing in self.drawings))
        figure = Figure(figsize=size, layout="constrained")
        for axes, drawing in zip(figure.subplots(1, len(self.drawings), squeeze=False)[0], self.drawings, strict=True):
            drawing.draw(axes)
        add_legend(figure, self.legend, 3 * len(self.drawings), lambda at: Line2D([], [], **line_style(at)))
        of_bars = dict.fromkeys(entry for drawing in self.drawings for entry in drawing.legend)
        add_legend(figure, list(of_bars), 3 * len(self.drawings), bar_handle)
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


def bar_handle(at: int) -> Any:
    """What stands for a bar in a legend."""
    return Patch(**bar_style(at))


def room(names: Sequence[str]) -> float:
    """The inches that names along an axis and its label take."""
    longest = max(map(len, names), default=0)
    return 0.3 + 0.075 * min(longest, 24)


# ------------------------------------------------------------------ SVG
def inline(figure: Figure, name: str, told: str) -> str:
    """A figure as an ``<svg>`` element; the same text for the same figure.

    Args:
        figure: the figure, drawn with :func:`fl_lightning.pictures.style.settings`.
        name: what the ids within the drawing begin with; of one page, each figure has its own.
        told: what the figure shows, for those who do not see it.
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
    text = re.sub(r'(?<= d=")[^"]*|(?<= x=")[^"]*|(?<= y=")[^"]*', lambda one: rounded(one[0]), text)
    text = own_ids(text, name)
    size = SIZE.search(text)[1]  # type: ignore[index]
    values = "".join(f" data-axes='{escape(json.dumps(one))}'" for one in curves_in(figure))
    head = f'<svg viewBox="{size}" role="img" aria-label="{escape(told)}"{values}>'
    return re.sub(r"\s*\n\s*", "\n", SIZE.sub(lambda _: head, text, count=1)).strip()


def curve_id(number: int) -> str:
    """What marks the parts of curve ``number`` in a drawing."""
    return f"curve-{number}"


def curves_in(figure: Figure) -> Iterator[dict[str, Any]]:
    """The curves of the first axes with what a script needs to tell their values; nothing without curves.

    It is the ``box`` of the axes in the drawing (left, top, right, bottom), the ends of their scales ``x`` and ``y``
    and whether these are logarithmic, their ``labels``, the ``names`` of places along x, and of each of the ``curves``
    its number, its places and its values with five digits.
    """
    axes = figure.axes[0]
    curves = [line for line in axes.lines if CURVE_ID.fullmatch(f' id="{line.get_gid()}"')]
    if not curves:
        return
    width, height = 72 * figure.get_size_inches()
    (left, bottom), (right, top) = axes.get_position().get_points()
    scales = {
        axis.axis_name: [*map(float, axis.get_view_interval()), axis.get_scale() == "log"]
        for axis in (axes.xaxis, axes.yaxis)
    }
    ticks = zip(axes.get_xticks(), axes.get_xticklabels(), strict=False)
    named = isinstance(axes.xaxis.get_major_formatter(), FixedFormatter)
    yield {
        "box": [
            round(float(one), 2) for one in (left * width, (1 - top) * height, right * width, (1 - bottom) * height)
        ],
        **scales,
        "labels": [axes.get_xlabel(), axes.get_ylabel()],
        "names": {f"{place:g}": text.get_text() for place, text in ticks} if named else {},
        "curves": [
            [
                int(str(line.get_gid()).split("-")[1]),
                *([five_digits(one) for one in np.asarray(data, float)] for data in line.get_data()),
            ]
            for line in curves
        ],
    }


def five_digits(value: float) -> float | None:
    """A number with five digits, for the script of the page; None for one that is not finite."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


def rounded(numbers: str) -> str:
    """Coordinates with two decimals, which is a hundredth of a point."""
    return NUMBERS.sub(lambda found: f"{float(found[0]):.2f}", numbers)


def own_ids(text: str, name: str) -> str:
    """A drawing whose ids are a name and a number; those that nothing refers to are dropped."""
    used = dict.fromkeys(re.findall(r'(?:href="#|url\(#)([^")]+)', text))
    short = {one: f"{name}-{at}" for at, one in enumerate(used)}
    text = CURVE_ID.sub(r' data-curve="\1"', text)
    text = re.sub(r' id="([^"]+)"', lambda found: f' id="{short[found[1]]}"' if found[1] in short else "", text)
    text = re.sub(r'(?:xlink:)?href="#([^"]+)"', lambda found: f'href="#{short[found[1]]}"', text)
    text = re.sub(r"url\(#([^)]+)\)", lambda found: f"url(#{short[found[1]]})", text)
    return text.replace("xlink:href", "href")
