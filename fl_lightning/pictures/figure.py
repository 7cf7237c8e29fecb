"""The figures of one run, drawn from what its callbacks declare."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fl_lightning.pictures.declared import Panel, Picture, Shown
from fl_lightning.pictures.drawing import (
    MARKS,
    MOST_NAMES,
    Draw,
    bars,
    curves,
    heat,
    in_style,
    numbered_line,
    points,
    visible,
)

# arrays by name, whose first axis is that of the measurements
SeriesByName = Mapping[str, np.ndarray]
# the inches of a drawing, alone and among others, and how many names a legend has at most: in axes, and below them
ALONE, SIDE, IN_AXES, BELOW = (5.0, 3.8), (4.4, 3.3), 12, 20
# TensorBoard shows a figure of a run as wide as a thumb: so many drawings are one below the other, more in two columns
STACKED = 3


class ShownFigure(Figure):
    """A figure that a notebook shows where it is a cell's last value; of others it shows those of pyplot alone."""

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png", dpi=90)
        return file.getvalue()


def figure_of(picture: Picture, arrays: SeriesByName) -> Figure | None:
    """The figure of a run, of its last measurement; None where it has nothing of what is shown.

    Args:
        picture: what it shows.
        arrays: the measurements, and what :meth:`Measurement.shown` adds to them.
    """
    drawings = [drawing for panel in picture.panels for drawing in drawings_of(panel, arrays)]
    if not drawings:
        return None
    first = next(shown.array for panel in picture.panels for shown in panel.shown if shown.array in arrays)
    # local_classifier has the rounds of local_rounds
    own = f"{first.split('_')[0]}_rounds"
    rounds = arrays[own if own in arrays and arrays[own].ndim == 1 else "rounds"]
    from_all = any(panel.rounds != "last" for panel in picture.panels)
    title = picture.title if from_all else f"{picture.title}, round {rounds[-1]}".removeprefix(", ")
    return laid_out(drawings, title, 1 if len(drawings) <= STACKED else 2)


def laid_out(drawings: Sequence[Draw], title: str = "", columns: int = 0) -> ShownFigure:
    """A figure of some drawings in rows of ``columns``, with one legend where that serves all of them."""
    columns = columns or (len(drawings) if len(drawings) <= 3 else math.ceil(math.sqrt(len(drawings))))
    rows, (width, height) = math.ceil(len(drawings) / columns), ALONE if len(drawings) == 1 else SIDE
    with in_style():
        figure = ShownFigure(figsize=(width * columns, height * rows + 0.5), layout="constrained")
        panels = [figure.add_subplot(rows, columns, place + 1) for place in range(len(drawings))]
        for axes, draw in zip(panels, drawings, strict=True):
            draw(axes)
        legends = [legend_entries(axes) for axes in panels]
        shared = {label: handle for entries in legends for label, handle in entries.items()}
        if all(not entries or list(entries) == list(shared) for entries in legends):
            if 0 < len(shared) <= BELOW:
                across = max(1, int(14 * width * columns / (8 + max(map(len, shared)))))
                how: dict[str, Any] = {"ncols": min(across, len(shared)), "fontsize": 9, "frameon": False}
                figure.legend(shared.values(), shared.keys(), loc="outside lower center", handlelength=3, **how)
        else:
            for axes, entries in zip(panels, legends, strict=True):
                if 0 < len(entries) <= IN_AXES:
                    axes.legend(entries.values(), entries.keys(), fontsize=8, framealpha=0.6, handletextpad=0.4)
        figure.suptitle(fill(title, int(11 * width * columns)), fontsize=11)
    return figure


def legend_entries(axes: Axes) -> dict[str, Any]:
    """What a legend of the axes, and of those that share their place, tells apart: handles by label."""
    twins = [other for other in axes.figure.axes if other.bbox.bounds == axes.bbox.bounds]
    pairs = [zip(*reversed(other.get_legend_handles_labels()), strict=True) for other in twins]
    return {label: handle for of_axes in pairs for label, handle in of_axes}


def drawings_of(panel: Panel, arrays: SeriesByName) -> Iterator[Draw]:
    """The drawings of a panel: one, or one for each of some names, or of each array where it is a map."""
    present = [shown for shown in panel.shown if shown.array in arrays and np.isfinite(arrays[shown.array]).any()]
    if not present:
        return
    if not panel.each:
        yield from drawn_together(panel, present, arrays, panel.title)
        return
    of_each = [shown.array for shown in (*panel.shown, *(panel.beside.shown if panel.beside else ()))]
    for place, name in list(enumerate(names_along(arrays, panel.each)))[: panel.most]:
        entries = {array: arrays[array][:, place] for array in (*of_each, panel.kinds) if array in arrays}
        yield from drawn_together(panel, present, {**arrays, **entries}, name)


def drawn_together(panel: Panel, present: Sequence[Shown], arrays: SeriesByName, title: str) -> Iterator[Draw]:
    """The drawings of some arrays of a panel."""
    note = str(arrays[panel.note][-1]) if panel.note in arrays else ""
    values = panel.values or (present[0].label if len(present) == 1 else "")
    labels = {"xlabel": panel.axis, "ylabel": f"{values} in %" if panel.percent else values}
    labels["title"] = "\n".join(filter(None, [title, note]))
    unit = 100.0 if panel.percent else 1.0
    entries = [unit * entry_shown(shown, arrays[shown.array][-1]) for shown in present]
    draw: Draw
    if panel.kind == "map":
        rows, columns = panel.axis.split(", ")
        form = ".0f" if panel.percent else ".2f"
        for shown, entry in zip(present, entries, strict=True):
            numbers = [[str(at) for at in range(size)] for size in entry.shape]
            names = [names_along(arrays, name) for name in panel.names] or numbers
            inner = entry[: len(names[0]), : len(names[1])]
            of_map: dict[str, Any] = {
                "xlabel": columns,
                "ylabel": rows,
                "title": labels["title"] or shown.label * (len(present) > 1),
            }
            yield heat(inner, labels["ylabel"], (names[0], names[1]), limits=panel.limits, numbers=form, **of_map)
        return
    if panel.kind == "points":
        groups = points_by_kind(entries[0], arrays[panel.kinds][-1] if panel.kinds in arrays else None)
        draw = points(groups, not panel.axis, panel.log, **labels)
    elif panel.kind == "bars":
        heights = [
            (number, entry, shown.label) for number, (shown, entry) in enumerate(zip(present, entries, strict=True))
        ]
        draw = bars(heights, panel.places or along_axis(panel, arrays, entries[0]), **labels)
        if panel.beside is not None:
            draw = with_beside(draw, panel.beside, arrays)
    else:
        spectrum = panel.kind == "spectrum"
        if spectrum:
            labels["ylabel"] = "singular value"
        lines = [line for number, shown in enumerate(present) for line in lines_of(panel, number, shown, arrays)]
        ticks = along_axis(panel, arrays, entries[0]) if panel.names else None
        draw = curves(lines, "y" if spectrum else panel.log, ticks, **labels)
    yield lambda axes: add_marks(axes, draw, panel, arrays)


def lines_of(panel: Panel, number: int, shown: Shown, arrays: SeriesByName) -> Iterator[Any]:
    """The curves of an array: of one measurement or of several, and those of each client."""
    unit = 100.0 if panel.percent else 1.0
    entries, rounds = arrays[shown.array] * unit, arrays["rounds"]
    clean = visible if panel.kind == "spectrum" else np.asarray
    if panel.rounds == "all":
        shades = colormaps["viridis_r"](np.linspace(0, 1, len(entries)) if len(entries) > 1 else [1.0])
        for place, (entry, shade) in enumerate(zip(entries, shades, strict=True)):
            label = f"round {rounds[place]}" if place in some_of(len(entries)) else ""
            yield numbered_line(0, clean(entry_shown(shown, entry)), label, color=shade, marker=None, linewidth=1)
    elif panel.rounds == "some":
        for place, index in enumerate(some_of(len(entries))):
            label = f"round {rounds[index]}"
            yield numbered_line(place, clean(entry_shown(shown, entries[index])), label, marker="o^s"[place])
    else:
        if shown.spread is not None:
            faint = {"alpha": 0.3, "linewidth": 0.8, "linestyle": "solid", "marker": None}
            for place, values in enumerate(np.moveaxis(entries[-1], shown.spread, 0)):
                if np.isfinite(values).any():
                    yield numbered_line(number, clean(values), "" if place else "each client", **faint)
        values = clean(entry_shown(shown, entries[-1]))
        marked = panel.kind == "curves" and len(values) <= MOST_NAMES
        mark = {"marker": MARKS[number % len(MARKS)]} if marked else {}
        yield numbered_line(number, values, shown.label, **mark)


def some_of(number: int) -> list[int]:
    """The first, the middle and the last of some measurements."""
    return sorted({0, (number - 1) // 2, number - 1})


def with_beside(draw: Draw, beside: Panel, arrays: SeriesByName) -> Draw:
    """Bars in grey, and curves over the same axis with a scale of their own."""

    def both(axes: Axes) -> None:
        draw(axes)
        for bar in axes.patches:
            bar.set(facecolor="0.8", hatch=None)
        right = axes.twinx()
        for line_axes in drawn_together(beside, beside.shown, arrays, ""):
            line_axes(right)
        right.grid(visible=False)
        right.spines["right"].set_visible(True)

    return both


def add_marks(axes: Axes, draw: Draw, panel: Panel, arrays: SeriesByName) -> None:
    """Draw, and then the lines that cross the drawing; a level only where the drawing reaches it."""
    draw(axes)
    if panel.limits is not None:
        axes.set_ylim(*panel.limits)
    at, level = panel.lines
    if at is not None:
        axes.axvline(at, color="black", linewidth=0.8, linestyle="--")
    if isinstance(level, str):
        level, label = (float(arrays[level][-1]), level) if level in arrays else (None, "")
        if level is not None and axes.get_ylim()[0] <= level <= axes.get_ylim()[1]:
            axes.axhline(level, color="grey", linestyle=":", linewidth=1, label=f"{label} {level:g}")
    elif level is not None:
        axes.axhline(level, color="black", linewidth=0.8)


def points_by_kind(places: np.ndarray, kinds: np.ndarray | None) -> list[tuple[str, np.ndarray]]:
    """Points ``(n, 2)`` by their kind ``(n,)``, in the order of the kinds' first words where these are numbers."""
    if kinds is None:
        return [("", places.reshape(-1, 2))]
    names = sorted(set(kinds.tolist()), key=lambda kind: (str(kind).split(" ")[0].zfill(9), str(kind)))
    return [(str(name), places[kinds == name]) for name in names]


def entry_shown(shown: Shown, entry: np.ndarray) -> np.ndarray:
    """What is drawn of an entry."""
    return entry if shown.reduce is None else shown.reduce(entry)


def names_along(arrays: SeriesByName, name: str) -> list[str]:
    """Names along an axis, without the ids -1 of those that are not there."""
    last = arrays[name][-1]
    return [str(name) for name in (last[last >= 0] if last.dtype.kind in "iu" else last).tolist()]


def along_axis(panel: Panel, arrays: SeriesByName, entry: np.ndarray) -> list[str]:
    """The names along the axis, or numbers."""
    return names_along(arrays, panel.names[0]) if panel.names else [str(place) for place in range(len(entry))]
