"""How ranks and neural collapse relate: spectra of collapsed representations, and classes without examples.

python experiments/theory/neural_collapse.py [--output docs/collapse.png]

Representations are class means, on the vertices of a simplex, and the same noise in every direction. The covariance of
all examples is the sum of those between and within classes, so that its spectrum is known.

Classes without examples: the layer-peeled model of Fang et al., Exploring Deep Neural Networks via Layer-Peeled Model,
PNAS 2021 (https://arxiv.org/abs/2101.12699), trains the representation of each class as a free vector, along with the
classifier, by cross-entropy with weight decay. Here K of C classes have examples, the same number each. By symmetry,
with the vertices s_c of a simplex and a direction e orthogonal to it, the minimum has the form

    z_c = a s_c + b e,    w_c = p s_c + q e,    w_c = -r e for the classes without examples

in which the loss is minimised over five numbers. A test minimises it over all vectors.

Beside them stand the values of FedAvg in stored runs of experiments/papers/scaled/narrowing.yaml.

docs/collapse.md explains the figure.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.fft import dct
from scipy.optimize import minimize

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fl_lightning.functional import (
    cosines,
    covariance_spectrum,
    effective_rank,
    eigenvalues,
    neural_collapse,
    singular_values,
)

CLASSES, WIDTH, DECAY = 10, 64, 1e-3
# factor between the lengths of consecutive directions in which class means differ
RATIO = 0.5
NOISES = np.logspace(-3, 0.5, 50)
CELLS = Path(__file__).resolve().parents[1] / "papers" / "results" / "scaled-narrowing.cells.csv"


def simplex(classes: int, width: int = WIDTH) -> np.ndarray:
    """Return the vertices ``(K, d)`` of a simplex around 0, of norm 1, in the first K - 1 directions."""
    vertices = dct(np.eye(classes), norm="ortho")[:, 1:] / np.sqrt(1 - 1 / classes)
    return np.pad(vertices, ((0, 0), (0, width - classes + 1)))


def flattened(means: np.ndarray) -> np.ndarray:
    """Return the means, shortened by :data:`RATIO` from one of their directions to the next."""
    return means * RATIO ** np.arange(means.shape[1])


def spectrum(means: np.ndarray, noise: float) -> torch.Tensor:
    """Return the singular values ``(d,)`` of the covariance, with ``noise**2`` times I within each class."""
    between = np.cov(means.T, bias=True)
    return eigenvalues(torch.from_numpy(between + noise**2 * np.eye(len(between))))


def measured(means: np.ndarray, noise: float) -> dict[str, float]:
    """Return the values that the callbacks log of these representations."""
    within, centres = noise**2 * torch.eye(means.shape[1]), torch.from_numpy(means)
    found = neural_collapse(centres, within, centres)
    return {
        "effective rank": float(effective_rank(spectrum(means, noise))),
        **{f"nc/{name}": float(found[name]) for name in ("1", "1_quotient", "2_angle_means")},
    }


# ------------------------------------------------------------------ classes without examples
def loss(numbers: np.ndarray, classes: int) -> float:
    """Return the cross-entropy with weight decay for a, b, p, q and r, where K classes have examples."""
    a, b, p, q, r = numbers
    absent = CLASSES - classes
    others = (classes - 1) * np.exp(-a * p * classes / (classes - 1)) + absent * np.exp(-a * p - b * q - b * r)
    return np.log1p(others) + DECAY / 2 * (classes * (a * a + b * b + p * p + q * q) + absent * r * r)


def trained(classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the representations ``(K, d)`` and the classifier ``(C, d)`` of the least loss."""
    a, b, p, q, r = minimize(loss, np.full(5, 2.0), classes, tol=1e-12).x
    s, e = simplex(classes), np.eye(WIDTH)[-1]
    return a * s + b * e, np.concatenate([p * s + q * e, np.tile(-r * e, (CLASSES - classes, 1))])


def of_missing(classes: int) -> dict[str, float]:
    """Return the ranks and cosines of the minimum for K classes with examples."""
    z, w = map(torch.from_numpy, trained(classes))
    between = cosines(w).numpy()
    found = {
        "effective rank, representations": float(effective_rank(covariance_spectrum(z))),
        "effective rank, classifier": float(effective_rank(singular_values(w))),
        "cosine of two rows with examples": float(between[0, 1]),
    }
    if classes < CLASSES:
        found["cosine of a row with and a row without examples"] = float(between[0, -1])
    if classes < CLASSES - 1:
        found["cosine of two rows without examples"] = float(between[-2, -1])
    return found


# ------------------------------------------------------------------ stored runs
def of_runs() -> dict[str, float]:
    """Return the means over the seeds of FedAvg's accuracy, rank and angles with IID clients and under label skew."""
    cells = pd.read_csv(CELLS).query("network == 'CNN' and method == 'FedAvg'")
    metrics = pd.DataFrame([json.loads(row) for row in cells["metrics"]], index=cells["skew"])
    logged = {"test/accuracy": "accuracy", "rank/representation/effective": "effective rank"}
    means = metrics[[*logged, "nc/2_angle_means"]].rename(columns=logged).groupby(level=0).mean()
    return {f"{name}, {skew}": value for skew, row in means.iterrows() for name, value in row.items()}


# ------------------------------------------------------------------ the figure
def draw(figure: Figure) -> dict[str, float]:
    """Draw all, and return the numbers of docs/collapse.md."""
    panels = figure.subplots(1, 3)
    return {**draw_spectra(panels[0]), **draw_ranks(panels[1]), **of_runs(), **draw_missing(panels[2])}


def draw_spectra(axes: Axes) -> dict[str, float]:
    """Draw spectra of the covariance; return the values of their representations."""
    cases = {
        "before collapse": (simplex(CLASSES), 0.2),
        "neural collapse": (simplex(CLASSES), 0.005),
        "dimensional collapse": (flattened(simplex(CLASSES)), 0.005),
    }
    numbers = {}
    for (name, (means, noise)), marker in zip(cases.items(), "os^", strict=True):
        axes.semilogy(np.arange(1, 16), spectrum(means, noise)[:15], marker=marker, markersize=4, label=name)
        numbers |= {f"{what}, {name}": value for what, value in measured(means, noise).items()}
    axes.set(xlabel="index", ylabel="singular value of the covariance", title=f"representations of {CLASSES} classes")
    axes.legend()
    return numbers


def draw_ranks(axes: Axes) -> dict[str, float]:
    """Draw the effective rank against the variability within classes; return its limit without any."""
    numbers = {}
    for classes, colour in ((CLASSES, "tab:blue"), (4, "tab:orange")):
        for means, style, what in (
            (simplex(classes), "-", "simplex"),
            (flattened(simplex(classes)), "--", "flattened"),
        ):
            found = [measured(means, noise) for noise in NOISES * np.linalg.norm(means)]
            ranks = [one["effective rank"] for one in found]
            axes.loglog(
                [one["nc/1_quotient"] for one in found], ranks, style, color=colour, label=f"{classes} classes, {what}"
            )
            numbers[f"limit of the effective rank, {classes} classes, {what}"] = measured(means, 1e-6)["effective rank"]
    axes.set(xlabel="nc/1_quotient", ylabel="effective rank", title=f"representations of width {WIDTH}")
    axes.set_yticks([1, 3, 9, WIDTH], ["1", "3", "9", str(WIDTH)])
    axes.minorticks_off()
    axes.legend()
    return numbers


def draw_missing(axes: Axes) -> dict[str, float]:
    """Draw ranks and cosines against the number of classes with examples; return the values for 4 and for all."""
    some = range(2, CLASSES + 1)
    found = {classes: of_missing(classes) for classes in some}
    for what, marker in (("representations", "o"), ("classifier", "s")):
        axes.plot(some, [found[k][f"effective rank, {what}"] for k in some], marker=marker, label=what)
    axes.plot(some, [k - 1 for k in some], color="black", linestyle=":", linewidth=1, label="K - 1")
    axes.set(xlabel=f"classes with examples K, of {CLASSES}", ylabel="effective rank", title="classes without examples")
    axes.legend()
    return {f"{what}, K = {classes}": value for classes in (4, CLASSES) for what, value in found[classes].items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("collapse.png"))
    args = parser.parse_args()
    figure = Figure(figsize=(13, 4), layout="constrained")
    for name, value in draw(figure).items():
        print(f"| {name} | {round(value, 10) + 0.0:.3g} |")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.output, dpi=110)


if __name__ == "__main__":
    main()
