"""Figures of arrays that runs have saved: drawings for one run or for several, and their layout."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fl_lightning.plotting.drawing import (
    MARKS,
    MOST_NAMES,
    Draw,
    bars,
    curves,
    heat,
    in_style,
    numbered_line,
    visible,
)
from fl_lightning.plotting.values import Reduce, over

Arrays = Mapping[str, np.ndarray]
# arrays of each seed, by the label of the run; a run of its own has the label ""
Runs = Mapping[str, Sequence[Arrays]]
# width and height in inches of a drawing, alone and beside others; names in a legend at most, in axes and below them
ALONE, SIDE, IN_AXES, BELOW = (5.0, 3.8), (4.4, 3.3), 12, 20
# values of a drawing at most
LARGEST = 1_000_000


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
    """A figure that a notebook shows as the value of a cell, as it does with figures of pyplot."""

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png", dpi=90)
        return file.getvalue()


# ------------------------------------------------------------------ values
def single(runs: Runs) -> Arrays | None:
    """Return the arrays of a run of its own; None where several labels are compared."""
    return runs[""][0] if list(runs) == [""] else None


def of_round(runs: Runs, clock: str = "rounds") -> str:
    """Return ``, round 3`` for the last measurement of a run of its own, and nothing for several runs."""
    arrays = single(runs)
    return "" if arrays is None else f", round {arrays[clock][-1]}"


def last(seeds: Iterable[Arrays], name: str, reduce: Reduce | None = None, axes: int = 1) -> np.ndarray | None:
    """Return the mean over the seeds of the last entry of an array, ignoring nan.

    Args:
        seeds: arrays of each seed, whose first axis is that of the measurements.
        name: name of the array.
        reduce: applied to each entry before the mean, since clients of different seeds have nothing in common.
        axes: number of axes of the mean.

    Returns:
        The mean; None where no seed has finite values, or where their shapes differ.

    Raises:
        ValueError: the entries have another number of axes, or too many values to be drawn.
    """
    entries = [arrays[name][-1] for arrays in seeds if name in arrays]
    entries = [entry if reduce is None else reduce(entry) for entry in entries]
    for entry in entries:
        if entry.ndim != axes or entry.size > LARGEST:
            raise ValueError(f"{name} has entries of shape {entry.shape}")
    if len({entry.shape for entry in entries}) != 1:
        return None
    mean = entries[0] if len(entries) == 1 else over(0)(np.stack(entries))
    return mean if np.isfinite(mean).any() else None


def names_in(runs: Runs, name: str) -> list[str] | None:
    """Return the names that an array holds, without ids of -1 and names joined by "to"; None where no run has them."""
    known = next((arrays[name] for seeds in runs.values() for arrays in seeds if name in arrays), None)
    if known is None or not known.ndim:
        return None
    entry = known[-1] if known.ndim > 1 and len(known) else known
    entry = entry[entry >= 0] if entry.dtype.kind in "iu" else entry
    return [" to ".join(map(str, one)) if isinstance(one, list) else str(one) for one in entry.tolist()]


# ------------------------------------------------------------------ drawings
def curve_panels(
    runs: Runs,
    shown: Mapping[str, str],
    reduce: Reduce | Mapping[str, Reduce] | None = None,
    names: str = "",
    spread: Mapping[str, int] | None = None,
    spectrum: bool = False,
    log: str = "",
    unit: float = 1.0,
    **labels: Any,
) -> list[Draw]:
    """Return drawings of the last measurement as curves over an axis.

    A run of its own has one drawing with a curve for each array; several runs have a drawing for each array, with a
    curve for each label.

    Args:
        runs: arrays of each seed by label.
        shown: label of each array by its name; arrays that no run has are left out.
        reduce: makes (n,) of an entry; or a function for each array that needs one.
        names: array with the names along the axis, where they have names.
        spread: axis of an array's entries along which a run of its own has a faint curve for each index.
        spectrum: singular values on a logarithmic scale, without those that are rounding errors.
        log: logarithmic axes, of ``xy``.
        unit: factor of all values, such as 100 for percent.
        labels: ``xlabel``, ``ylabel``, ``title``.
    """
    clean = visible if spectrum else np.asarray
    found: dict[str, list[tuple[str, np.ndarray]]] = {}
    for name in shown:
        how = reduce.get(name) if isinstance(reduce, Mapping) else reduce
        means = [(label, last(seeds, name, how)) for label, seeds in runs.items()]
        if known := [(label, clean(unit * mean)) for label, mean in means if mean is not None]:
            found[name] = known
    ticks = names_in(runs, names) if names else None
    longest = max((len(values) for known in found.values() for _, values in known), default=0)
    ticks = ticks if ticks and len(ticks) == longest else None
    log = "y" if spectrum else log
    alone, numbers = single(runs), {label: number for number, label in enumerate(runs)}
    if alone is None:
        made = []
        for name, known in found.items():
            lines = [numbered_line(numbers[label], values, label) for label, values in known]
            title = "\n".join(filter(None, [labels.get("title"), labels.get("ylabel"), shown[name]]))
            made.append(curves(lines, log, ticks, **{**labels, "title": title, "ylabel": "singular value" * spectrum}))
        return made
    lines = []
    for number, (name, ((_, values),)) in enumerate(found.items()):
        if spread and name in spread:
            faint: dict[str, Any] = {"alpha": 0.3, "linewidth": 0.8, "linestyle": "solid", "marker": None}
            each = [unit * entry for entry in np.moveaxis(alone[name][-1], spread[name], 0) if np.isfinite(entry).any()]
            lines += [
                numbered_line(number, clean(entry), "" if at else "each client", **faint)
                for at, entry in enumerate(each)
            ]
        marker: dict[str, Any] = (
            {"marker": MARKS[number % len(MARKS)]} if not spectrum and len(values) <= MOST_NAMES else {}
        )
        lines.append(numbered_line(number, values, shown[name], **marker))
    labels = {"ylabel": "singular value" if spectrum else next(iter(shown.values())), **labels}
    return [curves(lines, log, ticks, **labels)] if lines else []


def bar_panels(
    runs: Runs,
    shown: Mapping[str, str],
    reduce: Reduce | None = None,
    names: Sequence[str] | str | None = None,
    unit: float = 1.0,
    most: int = 4,
    **labels: Any,
) -> list[Draw]:
    """Return drawings of the last measurement as bars, with the same panels as :func:`curve_panels`.

    Args:
        runs: arrays of each seed by label.
        shown: label of each array by its name.
        reduce: makes (n,) of an entry.
        names: names along the axis, or the array that holds them; numbers by default.
        unit: factor of all values, such as 100 for percent.
        most: labels in a drawing; of more there are several drawings.
        labels: ``xlabel``, ``ylabel``, ``title``.
    """
    if isinstance(names, str):
        names = names_in(runs, names)
    groups: dict[str, list[tuple[int, np.ndarray, str]]] = {}
    for at, (name, told) in enumerate(shown.items()):
        for number, (label, seeds) in enumerate(runs.items()):
            values = last(seeds, name, reduce)
            if values is not None:
                alone = not label
                entry = (at if alone else number, unit * values, told if alone else label)
                groups.setdefault("" if alone else told, []).append(entry)
    made = []
    for told, heights in groups.items():
        length = max(len(values) for _, values, _ in heights)
        ticks = names if names and len(names) == length else [str(at) for at in range(length)]
        if length > MOST_NAMES:  # bars would be too thin
            lines = [numbered_line(number, values, label) for number, values, label in heights]
            made.append(curves(lines, **{**labels, "title": told or labels.get("title", "")}))
            continue
        for start in range(0, len(heights), most):
            made.append(bars(heights[start : start + most], ticks, **{"title": told, **labels}))
    return made


def maps(
    runs: Runs,
    shown: Mapping[str, str],
    unit: str,
    reduce: Reduce | None = None,
    limits: tuple[float, float] | None = None,
    names: Sequence[str] = ("", ""),
    **labels: Any,
) -> list[Draw]:
    """Return a drawing of the last measurement as a matrix, for each label and each array, on one scale.

    Args:
        runs: arrays of each seed by label.
        shown: label of each array by its name.
        unit: meaning of the values, which stands beside the scale.
        reduce: makes (n, m) of an entry.
        limits: ends of the scale; the least and the largest value by default.
        names: arrays that hold the names of rows and of columns, where they have names.
        labels: ``xlabel``, ``ylabel``.
    """
    found = []
    for label, seeds in runs.items():
        for name, told in shown.items():
            values = last(seeds, name, reduce, axes=2)
            if values is not None:
                found.append((", ".join(filter(None, [label, told * (len(shown) > 1)])), values))
    if not found:
        return []
    finite = np.concatenate([values[np.isfinite(values)] for _, values in found])
    limits = limits or (float(finite.min()), float(finite.max()))
    rows, columns = (names_in(runs, name) if name and single(runs) is not None else None for name in names)
    made = []
    for title, values in found:
        inner = values[: len(rows) if rows else None, : len(columns) if columns else None]
        made.append(heat(inner, unit, (rows, columns), limits=limits, **{"title": title, **labels}))
    return made


# ------------------------------------------------------------------ layout
def laid_out(drawings: Sequence[Draw], title: str = "", columns: int = 0) -> ShownFigure:
    """Return a figure of some drawings in rows of ``columns``, with one legend where that serves all of them."""
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


def figures(plots: Iterable[Plot]) -> Iterator[tuple[str, Figure]]:
    """Yield the name and the figure of each plot that has drawings, in one or two columns, as TensorBoard is narrow."""
    for plot in plots:
        if plot.drawings:
            yield plot.name, laid_out(plot.drawings, plot.title, 1 if len(plot.drawings) <= 3 else 2)


def legend_entries(axes: Axes) -> dict[str, Any]:
    """Return the legend handles by label, of axes and of those that share their place."""
    twins = [other for other in axes.figure.axes if other.bbox.bounds == axes.bbox.bounds]
    pairs = [zip(*reversed(other.get_legend_handles_labels()), strict=True) for other in twins]
    return {label: handle for of_axes in pairs for label, handle in of_axes}
