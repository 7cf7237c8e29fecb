"""Figures of arrays that runs have saved: drawings of one run or of several, and their layout."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator

from fl_lightning.plotting.drawing import MARKS, MOST_NAMES, Curve, Draw, bars, curves, cut, heat, in_style
from fl_lightning.plotting.values import Reduce, over
from fl_lightning.utilities.errors import printable

Arrays = Mapping[str, np.ndarray]
# arrays of each seed by the label of the run; the label of a single run is ""
Runs = Mapping[str, Sequence[Arrays]]
# width and height in inches of a single drawing, and of one of several
ALONE, SIDE = (5.0, 3.8), (4.4, 3.3)
# labels at most in a legend right of the axes and in one below the figure; letters of a label
BESIDE, BELOW, LONGEST_LABEL = 12, 40, 44
# labels as bars in one drawing at most; values of a drawing at most
MOST_BARS, LARGEST = 4, 1_000_000


@dataclass(frozen=True)
class Plot:
    """One figure.

    Args:
        name: tag of the figure, such as ``drift/layers``.
        title: title of the figure.
        drawings: functions that draw into axes, one for each panel.
    """

    name: str
    title: str
    drawings: Sequence[Draw]


class ShownFigure(Figure):
    """A figure that is always drawn in the style of the package, and that a notebook displays."""

    def draw(self, renderer: Any) -> None:
        """Draw the figure."""
        with in_style():
            super().draw(renderer)

    def savefig(self, fname: Any, **kwargs: Any) -> None:
        """Save the figure, with the arguments of matplotlib."""
        kwargs.setdefault("transparent", matplotlib.rcParams["savefig.transparent"])
        # equal figures are equal files
        with in_style(), matplotlib.rc_context({"svg.hashsalt": "fl_lightning"}):
            super().savefig(fname, **kwargs)

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png", dpi=90)
        return file.getvalue()


# ------------------------------------------------------------------ values
def single(runs: Runs) -> Arrays | None:
    """Return the arrays of a single run; None where several labels are compared."""
    return runs[""][0] if list(runs) == [""] else None


def of_round(runs: Runs, fit_progress: str = "rounds") -> str:
    """Return ``, round 3`` for the last measurement of a single run, and nothing for several runs."""
    arrays = single(runs)
    return "" if arrays is None else f", round {arrays[fit_progress][-1]}"


def last(seeds: Iterable[Arrays], name: str, reduce: Reduce = np.asarray, axes: int = 1) -> np.ndarray | None:
    """Return the mean over the seeds of the last entry of an array, ignoring nan.

    Args:
        seeds: arrays of each seed, with the measurements along the first axis.
        name: name of the array.
        reduce: applied to each entry before the mean, since clients of different seeds do not correspond.
        axes: number of axes of the mean.

    Returns:
        The mean; None without finite values, or if the shapes differ between seeds.

    Raises:
        ValueError: the entries have another number of axes, or too many values.
    """
    measured = [arrays[name] for arrays in seeds if name in arrays and len(arrays[name])]
    entries = [reduce(array[-1]) for array in measured]
    for entry in entries:
        if entry.ndim != axes or entry.size > LARGEST:
            raise ValueError(f"{name} has entries of shape {entry.shape}")
    if len({entry.shape for entry in entries}) != 1:
        return None
    mean = entries[0] if len(entries) == 1 else over(0)(np.stack(entries))
    return mean if np.isfinite(mean).any() else None


def names_in(runs: Runs, name: str) -> list[str] | None:
    """Return the names in an array, pairs joined by "to" and ids of -1 removed; None if no run has the array."""
    arrays_of_runs = [arrays for seeds in runs.values() for arrays in seeds]
    array = next((arrays[name] for arrays in arrays_of_runs if name in arrays), None)
    if array is None or not array.ndim:
        return None
    entry = array[-1] if array.ndim > 1 and len(array) else array
    if entry.dtype.kind in "iu":
        entry = entry[entry >= 0]
    names = entry.tolist()
    return [" to ".join(map(str, pair)) for pair in names] if entry.ndim > 1 else [*map(str, names)]


# ------------------------------------------------------------------ drawings
def curve_panels(
    runs: Runs,
    arrays: Mapping[str, str],
    reduce: Reduce = np.asarray,
    names: Sequence[str] | str = (),
    spread: Mapping[str, int] | None = None,
    log: str = "",
    as_bars: bool = False,
    **labels: Any,
) -> list[Draw]:
    """Return drawings of the last measurement as curves, or bars, over an axis.

    A single run has one drawing with a curve for each array; several runs have a drawing for each array, with a curve
    for each label.

    Args:
        runs: arrays of each seed by label.
        arrays: label of each array by its name; arrays that no run has are skipped.
        reduce: maps an entry to (n,).
        names: names along the axis, or the name of their array; numbers by default.
        spread: axis of an array's entries for a mean in place of ``reduce``; a single run has a faint curve for each
            index along this axis.
        log: axes with a logarithmic scale, such as ``xy``.
        as_bars: whether to draw bars in place of curves, unless there are too many.
        labels: ``xlabel``, ``ylabel``, ``title``.
    """
    run, panels = single(runs), dict[str, list[Curve]]()
    for at, (name, text) in enumerate(arrays.items()):
        axis = (spread or {}).get(name)
        for number, (label, seeds) in enumerate(runs.items()):
            values = last(seeds, name, reduce if axis is None else over(axis))
            if values is None:
                continue
            if run is None:
                panels.setdefault(text, []).append(Curve(number, values, label))
                continue
            lines = panels.setdefault("", [])
            if axis is not None and not as_bars:
                lines += faint_curves(at, np.moveaxis(run[name][-1], axis, 0))
            marked = not log and len(values) <= MOST_NAMES
            marker: dict[str, Any] = {"marker": MARKS[at % len(MARKS)]} if marked else {}
            lines.append(Curve(at, values, text, style=marker))
    along, drawings = names_in(runs, names) if isinstance(names, str) else names, list[Draw]()
    for title, panel in panels.items():
        length = max(len(line.y) for line in panel)
        ticks = along if along and len(along) == length else None
        of_panel = {"ylabel": panel[-1].label if run is not None and len(arrays) == 1 else "", **labels}
        of_panel["title"] = "\n".join(filter(None, [labels.get("title"), title]))
        if as_bars and length <= MOST_NAMES:
            heights = [(line.number, line.y, line.label) for line in panel]
            for start in range(0, len(panel), MOST_BARS):
                bar_names = ticks or [*map(str, range(length))]
                drawings.append(bars(heights[start : start + MOST_BARS], bar_names, **of_panel))
        else:
            drawings.append(curves(panel, log, ticks, **of_panel))
    return drawings


def faint_curves(number: int, entries: np.ndarray) -> list[Curve]:
    """Return a faint curve for each client with finite values, the first one with a label."""
    thin: dict[str, Any] = {"alpha": 0.3, "linewidth": 0.8, "linestyle": "solid", "marker": None}
    finite = [entry for entry in entries if np.isfinite(entry).any()]
    labels = ["each client", *[""] * len(finite)]
    return [Curve(number, y, label, style=thin) for y, label in zip(finite, labels, strict=False)]


def maps(
    runs: Runs,
    arrays: Mapping[str, str],
    unit: str,
    reduce: Reduce = np.asarray,
    limits: tuple[float, float] | None = None,
    names: Sequence[str] = ("", ""),
    **labels: Any,
) -> list[Draw]:
    """Return drawings of the last measurement as maps, one for each label and array, with a common colour scale.

    Args:
        runs: arrays of each seed by label.
        arrays: label of each array by its name.
        unit: meaning of the values, shown next to the colour scale.
        reduce: converts an entry to a matrix (n, m).
        limits: ends of the colour scale; by default the least and the greatest value.
        names: names of the arrays that hold the names of the rows and of the columns; empty for numbers.
        labels: ``xlabel``, ``ylabel``.
    """
    matrices = []
    for label, seeds in runs.items():
        for name, text in arrays.items():
            values = last(seeds, name, reduce, axes=2)
            if values is not None:
                title = ", ".join(filter(None, [label, text if len(arrays) > 1 else ""]))
                matrices.append((title, values))
    finite = [values[np.isfinite(values)] for _, values in matrices]
    scale = np.concatenate(finite) if finite else np.zeros(1)
    limits = limits or (float(scale.min()), float(scale.max()))
    row_name, column_name = names if single(runs) is not None else ("", "")
    rows = names_in(runs, row_name) if row_name else None
    columns = names_in(runs, column_name) if column_name else None
    drawings = []
    for title, values in matrices:
        inner = values[: len(rows) if rows else None, : len(columns) if columns else None]
        drawings.append(heat(inner, unit, (rows, columns), limits=limits, **{"title": title, **labels}))
    return drawings


# ------------------------------------------------------------------ layout
def laid_out(
    drawings: Sequence[Draw], title: str = "", columns: int = 0, size: tuple[float, float] | None = None
) -> ShownFigure:
    """Return a figure of drawings in a grid, with one legend below it where the panels can share one.

    Args:
        drawings: functions that draw into axes, one for each panel.
        title: title of the figure.
        columns: number of panels in a row; 0 makes the grid about square.
        size: width and height of a panel in inches, without title and legend.
    """
    columns = columns or (len(drawings) if len(drawings) <= 3 else math.ceil(math.sqrt(len(drawings))))
    rows, (width, height) = math.ceil(len(drawings) / columns), size or (ALONE if len(drawings) == 1 else SIDE)
    with in_style():
        figure = ShownFigure(layout="constrained")
        panels = [figure.add_subplot(rows, columns, place + 1) for place in range(len(drawings))]
        for axes, draw in zip(panels, drawings, strict=True):
            draw(axes)
            lines = axes.get_title().split("\n")
            axes.set_title("\n".join(fill(printable(line), int(11 * width)) for line in lines))
        legends, below = [legend_entries(axes) for axes in panels], 0.0
        shared = {label: handle for entries in legends for label, handle in entries.items()}
        if not all(not entries or list(entries) == list(shared) for entries in legends):
            for axes, entries in zip(panels, legends, strict=True):
                if 0 < len(entries) <= BESIDE:
                    beside: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1, 0.5), "frameon": False}
                    axes.legend(entries.values(), entries.keys(), fontsize=8, handletextpad=0.4, **beside)
        elif 0 < len(shared) <= BELOW:
            across = max(1, int(width * columns / (0.6 + 0.07 * max(map(len, shared)))))
            below = 0.2 * math.ceil(len(shared) / across)
            how: dict[str, Any] = {"frameon": False, "fontsize": 8.5, "handlelength": 2.4, "borderpad": 0.1}
            figure.legend(shared.values(), shared.keys(), loc="outside lower center", ncols=across, **how)
        title = fill(printable(title), int(11 * width * columns))
        if title:
            figure.suptitle(title, fontsize=11)
        ticks = [text for axes in panels for text in axes.get_xticklabels()]
        longest_turned = max((len(text.get_text()) for text in ticks if text.get_rotation()), default=0)
        high = (height + 0.05 * longest_turned) * rows + 0.25 * len(title.splitlines()) + below
        figure.set_size_inches(width * columns, high)
    return figure


def figures(plots: Iterable[Plot]) -> Iterator[tuple[str, Figure]]:
    """Yield the name and the figure of each plot that has drawings, in one or two columns, as TensorBoard is narrow."""
    for plot in plots:
        if plot.drawings:
            yield plot.name, laid_out(plot.drawings, plot.title, 1 if len(plot.drawings) <= 3 else 2)


def legend_entries(axes: Axes) -> dict[str, Any]:
    """Return the legend handles by label, of axes and of their twins."""
    entries = {}
    for twin in axes.figure.axes:
        if twin.bbox.bounds == axes.bbox.bounds:
            for handle, label in zip(*twin.get_legend_handles_labels(), strict=True):
                entries[cut(label, LONGEST_LABEL)] = handle
    return entries


def names_along(axis: Axis) -> list[str]:
    """Return the names along an axis; none for an axis of numbers."""
    fixed = isinstance(axis.get_major_locator(), FixedLocator)
    return [text.get_text() for text in axis.get_ticklabels()] if fixed else []
