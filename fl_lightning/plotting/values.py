"""Reductions that callbacks log and figures show: means over axes, means of matrices, and shares."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Reduce = Callable[[np.ndarray], np.ndarray]
# singular values below this share of the largest are rounding errors
VISIBLE = 1e-12
CLASS_GROUPS = ("majority", "minority", "missing")
SPECTRUM_TITLES = {"classifier": "classifier weight", "representation": "covariance of the test representations"}
MODELS = {"own": "own model", "tuned": "fine-tuned", "prototype": "nearest prototype"}
BOUNDS = {"ratio": "standard softmax (Definition 3)", "ratio_calibrated": "calibrated softmax (Theorem 3)"}


def over(axis: int) -> Reduce:
    """Return a function for the mean of the finite values over an axis; nan without finite values."""

    def mean(values: np.ndarray) -> np.ndarray:
        finite = np.isfinite(values)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(finite, values, 0).sum(axis) / finite.sum(axis)

    return mean


def off_diagonal(values: np.ndarray) -> np.ndarray:
    """Return the means (L,) of matrices (L, m, m) without their diagonals."""
    return over(1)(values[:, ~np.eye(values.shape[-1], dtype=bool)])


def by_layer(values: np.ndarray) -> np.ndarray:
    """Return the means (L,) over clients (L, m) or pairs of clients (L, m, m); values (L,) are returned unchanged."""
    if values.ndim == 1:
        return values
    return over(1)(values) if values.ndim == 2 else off_diagonal(values)


def diagonal(values: np.ndarray) -> np.ndarray:
    """Return the means (P,) of the diagonals of (P, k, k)."""
    return over(1)(np.diagonal(values, axis1=1, axis2=2))


def descending(values: np.ndarray) -> np.ndarray:
    """Return values in descending order, nan last."""
    return -np.sort(-values)


def row_shares(values: np.ndarray) -> np.ndarray:
    """Return (n, m) divided by the sums of the rows; nan for a row of zeros."""
    totals = values.sum(1, keepdims=True)
    return values / np.where(totals > 0, totals, np.nan)
