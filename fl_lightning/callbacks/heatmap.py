"""Heat maps that can be read without colour."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
        for (row, column), value in np.ndenumerate(matrix):
            if np.isfinite(value):
                colour = "white" if value < 0.6 else "black"
                text = axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=colour, fontsize=7)
                text.set_in_layout(False)  # hundreds of them take seconds, and they lie within their cells
    return image


def grid(number: int, side: float) -> tuple[Figure, list[Axes]]:
    """A figure with ``number`` panels, each ``side`` inches wide and high."""
    from matplotlib.figure import Figure

    columns = number if number <= 3 else math.ceil(math.sqrt(number))
    lines = math.ceil(number / columns)
    figure = Figure(figsize=(side * columns + 1.2, side * lines + 0.6), layout="constrained")
    return figure, [figure.add_subplot(lines, columns, place + 1) for place in range(number)]
