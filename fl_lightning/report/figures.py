"""The figures of a report, with captions and data, and their drawings as SVG of a page."""

from __future__ import annotations

import base64
import io
import json
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from fl_lightning.plotting.drawing import Draw
from fl_lightning.plotting.figures import laid_out, names_along
from fl_lightning.plotting.style import FONT, LIGHT, LINE_COLOURS

# inches of a drawing on the page, and in a column of a paper
ON_PAGE, COLUMN = (4.3, 3.0), (3.3, 2.3)
# values of a map in a CSV file at most
MOST_CELLS = 20_000
COLOURS = {LIGHT["ink"]: "ink", LIGHT["grid"]: "grid", LIGHT["quiet"]: "quiet", LIGHT["card"]: "card"}
COLOURS |= {colour: f"line-{at}" for at, colour in enumerate(LINE_COLOURS)}
OF_PAGE = re.compile("|".join(COLOURS))
# matplotlib's frame around the drawing, and ids without a reference
AROUND = re.compile(
    r' id="[\w.]+_\d+"|<metadata>.*?</metadata>|<style type="text/css">.*?</style>|<!--.*?-->', re.DOTALL
)
COORDINATES, NUMBERS = re.compile(r'(?<= d=")[^"]*|(?<= [xy]=")[^"]*'), re.compile(r"-?\d+\.\d{3,}")
OF_TEXT = re.compile(rf"'{FONT}', sans-serif(, '[^']*')*")
SIZE = re.compile(r'<svg [^>]*?viewBox="([^"]+)"[^>]*>')


@dataclass
class Card:
    """A figure: drawings that belong together.

    Args:
        name: name on the command line.
        title: title.
        caption: how to read it.
        drawings: functions that draw into axes, by name of the file.
        table: data; by default the values of the drawn curves, bars and maps.
        heading: heading above it on the page.
        setting: setting of its runs.
    """

    name: str
    title: str
    caption: str
    drawings: Mapping[str, Draw]
    table: pd.DataFrame | None = None
    heading: str = ""
    setting: str = ""

    @cached_property
    def figures(self) -> list[Figure]:
        """Each drawing as a figure of the page."""
        return [laid_out([draw], size=ON_PAGE) for draw in self.drawings.values()]

    def elements(self) -> Iterator[str]:
        """Yield the drawings as elements of a page."""
        for at, figure in enumerate(self.figures):
            axes = figure.axes[0]
            about = ", ".join(filter(None, [self.title, " ".join(axes.get_title().split()), axes.get_ylabel()]))
            yield inline(figure, f"{self.name}-{at}", about)

    def csv(self) -> str:
        """Return the data as CSV, with six digits."""
        table = self.table
        if table is None:
            of_map = bool(self.figures[0].axes[0].images)
            head = ("drawing", "row", "column", "value") if of_map else ("drawing", "curve", "x", "y")
            rows = [row for figure in self.figures for row in data_of(figure.axes[0])]
            table = pd.DataFrame(rows, columns=head)
        return table.to_csv(index=False, float_format="%.6g", na_rep="nan", lineterminator="\n")

    def csv_address(self) -> str:
        """Return the data as an address that a browser saves."""
        encoded = base64.b64encode(self.csv().encode(errors="backslashreplace"))
        return f"data:text/csv;charset=utf-8;base64,{encoded.decode()}"

    def printed(self) -> Iterator[tuple[str, Figure]]:
        """Yield the file name of each drawing, and a figure as wide as a column of a paper."""
        for name, draw in self.drawings.items():
            ending = re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")
            ending = ending.removeprefix(f"{self.name.rsplit('-', 1)[-1]}-")  # drift-client, not drift-drift-client
            yield f"{self.name}-{ending}" if len(self.drawings) > 1 else self.name, laid_out([draw], size=COLUMN)


# ------------------------------------------------------------------ data
def namer(axis: Axis) -> Callable[[float], Any]:
    """Return a function from a place along an axis to its name, or to the place itself without names."""
    formatter = axis.get_major_formatter()
    return (lambda at: formatter(at, 0)) if names_along(axis) else (lambda at: at)


def data_of(axes: Axes) -> Iterator[list[Any]]:
    """Yield the drawn data: label, place and value for curves and bars, row, column and value for maps."""
    title = " ".join(axes.get_title().split()) or axes.get_ylabel() or axes.get_xlabel()
    along_x, along_y = namer(axes.xaxis), namer(axes.yaxis)
    for line in axes.lines:
        if not str(line.get_label()).startswith("_"):
            x, y = (np.asarray(values, float).tolist() for values in line.get_data())
            for at, value in zip(x, y, strict=True):
                yield [title, line.get_label(), along_x(at), value]
    bars: Any
    for bars in axes.containers:
        lying = bars.orientation == "horizontal"
        for at, bar in enumerate(bars):
            length = float(bar.get_width() if lying else bar.get_height())
            yield [title, bars.get_label(), along_y(at) if lying else along_x(at), length]
    for image in axes.images:
        values: np.ndarray = np.ma.filled(np.ma.asarray(image.get_array(), dtype=float), np.nan)
        places = np.argwhere(np.isfinite(values)).tolist()
        for row, column in places if len(places) <= MOST_CELLS else ():
            yield [title, along_y(row), along_x(column), float(values[row, column])]


# ------------------------------------------------------------------ SVG
def inline(figure: Figure, name: str, description: str) -> str:
    """Return a figure as an ``<svg>`` element; equal figures have equal texts.

    Args:
        figure: the figure.
        name: beginning of the ids within the drawing, unique on a page.
        description: description for readers who do not see it.
    """
    file = io.StringIO()
    figure.patch.set_visible(False)
    for axes in figure.axes:
        axes.patch.set_visible(False)
    with matplotlib.rc_context({"svg.hashsalt": name}), warnings.catch_warnings():
        # a browser has its own fonts
        warnings.filterwarnings("ignore", "Glyph")
        FigureCanvasSVG(figure).print_svg(file, metadata={"Date": None})
    text = AROUND.sub("", file.getvalue()[file.getvalue().index("<svg") :])
    text = OF_PAGE.sub(lambda colour: f"var(--{COLOURS[colour[0]]})", text)
    text = OF_TEXT.sub("var(--font)", text).replace("xlink:href", "href")
    # a hundredth of a point
    text = COORDINATES.sub(lambda places: NUMBERS.sub(lambda number: f"{float(number[0]):.2f}", places[0]), text)
    values = "".join(f" data-axes='{escape(json.dumps(axes_data))}'" for axes_data in curves_in(figure))
    about = f'role="img" aria-label="{escape(description)}"{values}'
    text = SIZE.sub(lambda start: f'<svg viewBox="{start[1]}" {about}>', text, count=1)
    return re.sub(r"\s*\n\s*", "\n", text).strip()


def curves_in(figure: Figure) -> Iterator[dict[str, Any]]:
    """Yield the curves of the first axes for the script of the page, if there are any.

    The keys are the ``box`` of the axes in the drawing (left, top, right, bottom), ``x`` and ``y`` with the ends of the
    scale and whether it is logarithmic, ``labels``, the ``names`` of places along x, and ``curves`` with the label, the
    places and the values of each, with five digits.
    """
    axes = figure.axes[0]
    curves = [line for line in axes.lines if not str(line.get_label()).startswith("_")]
    if not curves:
        return

    def five_digits(values: Any) -> list[float | None]:
        numbers = np.asarray(values, float).tolist()
        return [float(f"{number:.5g}") if math.isfinite(number) else None for number in numbers]

    width, height = 72 * figure.get_size_inches()
    position = axes.get_position()
    box = (position.x0 * width, (1 - position.y1) * height, position.x1 * width, (1 - position.y0) * height)
    names = zip(axes.get_xticks(), names_along(axes.xaxis), strict=False)
    scales = {
        axis.axis_name: [*map(float, axis.get_view_interval()), axis.get_scale() == "log"]
        for axis in (axes.xaxis, axes.yaxis)
    }
    yield {
        "box": [round(float(side), 2) for side in box],
        **scales,
        "labels": [axes.get_xlabel(), axes.get_ylabel()],
        "names": {f"{at:g}": name for at, name in names},
        "curves": [[line.get_label(), *map(five_digits, line.get_data())] for line in curves],
    }
