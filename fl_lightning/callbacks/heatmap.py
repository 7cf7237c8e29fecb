"""Heat maps that can be read without colour."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# rows or columns beyond which numbers in the cells, or names at all of them, could not be read
MOST_NUMBERS, MOST_NAMES = 16, 24


def draw_matrix(
    axes: Axes, matrix: np.ndarray, rows: Sequence[Any], columns: Sequence[Any], numbers: bool = True
) -> Any:
    """Draw values of 0 to 1 as an image, with the names of its rows and columns; returns the image.

    Args:
        axes: where.
        matrix: ``(rows, columns)``; nan stays white.
        rows: their names.
        columns: their names.
        numbers: write the values into the cells, where they are few.
    """
    image = axes.imshow(matrix, cmap="viridis", vmin=0, vmax=1, aspect="auto")
    for axis, names in ((axes.yaxis, rows), (axes.xaxis, columns)):
        step = math.ceil(len(names) / MOST_NAMES)
        axis.set_ticks(np.arange(len(names))[::step], [str(name) for name in names][::step])
    axes.tick_params(labelsize=8)
    if numbers and max(matrix.shape) <= MOST_NUMBERS:
        write_numbers(axes, matrix, ".2f")
    return image


def write_numbers(axes: Axes, matrix: np.ndarray, form: str) -> None:
    """Write the values into the cells of the last image, but nan; white where the cell is dark."""
    for (row, column), value in np.ndenumerate(matrix):
        if np.isfinite(value):
            light = np.dot(axes.images[-1].to_rgba(value)[:3], (0.3, 0.6, 0.1))
            colour = "white" if light < 0.5 else "black"
            text = axes.text(column, row, format(value, form), ha="center", va="center", color=colour, fontsize=7)
            text.set_in_layout(False)  # hundreds of them take seconds, and they lie within their cells


def grid(number: int, side: float) -> tuple[Figure, list[Axes]]:
    """A figure with ``number`` panels, each ``side`` inches wide and high."""
    from matplotlib.figure import Figure

    columns = number if number <= 3 else math.ceil(math.sqrt(number))
    lines = math.ceil(number / columns)
    figure = Figure(figsize=(side * columns + 1.2, side * lines + 0.6), layout="constrained")
    return figure, [figure.add_subplot(lines, columns, place + 1) for place in range(number)]


def heat_map(axes: Any, table: np.ndarray, label: str, low: float, high: float, write: str = "") -> None:
    """Draw a matrix as shades with a scale, and its numbers in the format ``write`` where there is room for them."""
    colours = "RdBu" if low < 0 else "viridis"  # white at 0
    image = axes.imshow(table, vmin=low, vmax=high, cmap=colours)
    axes.figure.colorbar(image, ax=axes, label=label)
    if write and len(table) <= 12:
        write_numbers(axes, table, write)


def integer_ticks(set_ticks: Callable[..., Any], labels: Sequence[Any], most: int = 20) -> None:
    """Ticks at 0, 1, ... with these labels, or with every second, third, ... of them where they are many."""
    step = -(-len(labels) // most)
    set_ticks(range(0, len(labels), step), [str(one) for one in labels[::step]])
