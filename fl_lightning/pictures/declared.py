"""How a callback declares what the pictures of its arrays show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

Reduce = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Shown:
    """An array of a file of measurements, or one that :meth:`Measurement.shown` adds, in a picture.

    Args:
        array: its name; its first axis is that of the measurements.
        label: what its values are.
        reduce: makes of a measurement's entry what is drawn of it; None leaves it as it is.
        spread: the axis of an entry along which each has a faint curve of its own, in the figure of a run.
    """

    array: str
    label: str
    reduce: Reduce | None = None
    spread: int | None = None


@dataclass(frozen=True)
class Panel:
    """Arrays that are drawn together.

    In the figure of a run they share the axes; a report draws each of them by itself, with a curve for each method.

    Args:
        kind: ``course``: numbers against the rounds; or, of the last measurement, ``curves`` over an axis, a
            ``spectrum`` (curves on a logarithmic scale, without rounding errors), ``bars`` over an axis, a ``map`` for
            each array, or ``points`` in the plane.
        shown: the arrays.
        axis: what lies along the axis; of a map ``rows, columns``; of points the first coordinate, empty where neither
            has a meaning.
        names: the arrays that have the names along the axis, or of a map along the rows and the columns.
        places: the names themselves, where they are always the same.
        values: what the values of all arrays are, where the labels alone do not say it.
        percent: whether they are shares, which are shown in percent.
        title: title of the drawing.
        limits: the ends of the scale of the values, of a map or of curves; None takes those that are there.
        log: the axes that are logarithmic, of ``xy``.
        rounds: in the figure of a run, the curves are of the ``last`` measurement, of ``all``, later ones darker, or of
            ``some``: the first, the middle and the last.
        each: an array of names; the figure of a run has a drawing for each of them, of as many entries of the arrays.
        most: most drawings that ``each`` makes.
        beside: curves over the same axis, with a scale of their own on the right.
        kinds: the array that has the kind of each point.
        lines: where lines cross the drawing, at x and at y; a name is that of an array with the place.
        note: the array that has a line of text for the title.
    """

    kind: Literal["course", "curves", "spectrum", "bars", "map", "points"]
    shown: tuple[Shown, ...]
    axis: str = "index"
    names: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    values: str = ""
    percent: bool = False
    title: str = ""
    limits: tuple[float, float] | None = None
    log: str = ""
    rounds: Literal["last", "some", "all"] = "last"
    each: str = ""
    most: int | None = None
    beside: Panel | None = None
    kinds: str = ""
    lines: tuple[float | None, float | str | None] = (None, None)
    note: str = ""


@dataclass(frozen=True)
class Picture:
    """Panels that belong together.

    Args:
        name: of the figure of a run, such as ``drift/layers``; empty where it is in a report alone.
        title: what it shows.
        panels: its parts.
        compared: whether a report compares runs by it.
    """

    name: str
    title: str
    panels: tuple[Panel, ...]
    compared: bool = True


@dataclass(frozen=True)
class Measured:
    """The pictures of a file of measurements.

    Args:
        file: its name in the folder of a run.
        heading: what a report calls them.
        pictures: the pictures.
    """

    file: str
    heading: str
    pictures: tuple[Picture, ...]


def over(axis: int) -> Reduce:
    """The mean over an axis, of what is finite; nan where nothing is."""

    def reduce(values: np.ndarray) -> np.ndarray:
        finite = np.isfinite(values)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(finite, values, 0).sum(axis) / finite.sum(axis)

    return reduce


def off_diagonal(values: np.ndarray) -> np.ndarray:
    """The mean of the values ``(L, m, m)`` between two, without those of one with itself."""
    apart = ~np.eye(values.shape[-1], dtype=bool)
    return over(1)(values[:, apart])


def diagonal(values: np.ndarray) -> np.ndarray:
    """The mean of the diagonals of ``(P, k, k)``."""
    return over(1)(np.diagonal(values, axis1=1, axis2=2))


def descending(values: np.ndarray) -> np.ndarray:
    """Values from the largest to the smallest; nan comes last."""
    return -np.sort(-values)


def row_shares(values: np.ndarray) -> np.ndarray:
    """Numbers ``(n, m)`` as shares of their row's sum; nan in a row without any."""
    totals = values.sum(1, keepdims=True)
    return values / np.where(totals > 0, totals, np.nan)
