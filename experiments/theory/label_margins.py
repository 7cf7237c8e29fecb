"""Which margins of the classes are best where their numbers of examples differ: FedLC's Theorem 2, checked by numbers.

python experiments/theory/label_margins.py [--draws 50]

Theorem 2 of Zhang et al., Federated Learning with Label Distribution Skew via Logits Calibration, ICML 2022
(https://arxiv.org/abs/2209.00189), follows Cao et al., Learning Imbalanced Datasets with Label-Distribution-Aware
Margin Loss, NeurIPS 2019 (https://arxiv.org/abs/1906.07413). With d_c the distance of class c to the decision boundary
and n_c its number of examples, it bounds the test error by

    1 / (d_y sqrt(n_y)) + 1 / (d_i sqrt(n_i))

and says that the optimal difference of the margins is tau (n_y^(-1/4) - n_i^(-1/4)). Both distances can be large at
once, so that something must be held: here, as in LDAM, their sum, as where a boundary is moved between two classes.

First the bound is minimised by numbers, which gives the exponent and tau. Then the boundary between two Gaussian
classes is moved, after a linear classifier of largest margin has been trained on few examples of one and many of the
other. Of such a boundary the error with equal shares of both classes is known in closed form.
"""

from __future__ import annotations

import argparse

import numpy as np
from scipy.optimize import minimize, minimize_scalar
from scipy.stats import norm
from sklearn.svm import SVC

PAIR, SEVERAL = (20, 320), (10, 30, 100, 300, 1000)
DIMENSIONS, DISTANCE = 500, 6.0
EXPONENTS = np.linspace(0, 1.5, 61)


def bound(margins: np.ndarray, counts: np.ndarray) -> float:
    """The sum of 1 / (d_c sqrt(n_c)) over the classes, for margins and counts ``(C,)``."""
    return float((1 / (margins * np.sqrt(counts))).sum())


def best_margins(counts: np.ndarray) -> np.ndarray:
    """The margins ``(C,)`` of sum 1 with the least bound, found by numbers."""

    def shares(x: np.ndarray) -> np.ndarray:
        exponentials = np.exp(np.append(x, 0.0))
        return exponentials / exponentials.sum()

    found = minimize(lambda x: np.log(bound(shares(x), counts)), np.zeros(len(counts) - 1), options={"gtol": 1e-9})
    return shares(found.x)


def exponent(margins: np.ndarray, counts: np.ndarray) -> float:
    """p of the power law n^(-p) that is nearest to the margins, by least squares of the logarithms."""
    return float(-np.polyfit(np.log(counts), np.log(margins), 1)[0])


def best_tau(counts: tuple[int, int]) -> float:
    """The factor tau with which Eq. 6 is the difference of the two best margins of sum 1."""
    few, many = (float(n) ** -0.25 for n in counts)
    difference = minimize_scalar(
        lambda share: bound(np.array([share, 1 - share]), np.array(counts)), bounds=(1e-6, 1 - 1e-6), method="bounded"
    )
    return (2 * float(difference.x) - 1) / (few - many)


def errors(counts: tuple[int, int], seed: int) -> np.ndarray:
    """The error with equal shares of both classes for each of :data:`EXPONENTS`, after training on ``counts``.

    The classes are Gaussian with unit covariance, their means :data:`DISTANCE` apart in :data:`DIMENSIONS` dimensions.
    The gap between them on the training data is divided like the margins n^(-p) of the classes.
    """
    rng = np.random.default_rng(seed)
    means = np.zeros((2, DIMENSIONS))
    means[:, 0] = -DISTANCE / 2, DISTANCE / 2
    labels = np.repeat([0, 1], counts)
    x = means[labels] + rng.normal(size=(len(labels), DIMENSIONS))
    machine = SVC(kernel="linear", C=1e6).fit(x, labels)
    normal = machine.coef_[0] / np.linalg.norm(machine.coef_[0])
    along, centers = x @ normal, means @ normal
    lowest, highest = along[labels == 0].max(), along[labels == 1].min()
    few, many = (float(n) ** -EXPONENTS for n in counts)
    boundary = lowest + (highest - lowest) * few / (few + many)
    return (norm.sf(boundary - centers[0]) + norm.cdf(boundary - centers[1])) / 2


def numbers(draws: int) -> dict[str, float]:
    """The numbers of docs/theory.md."""
    pair, several = np.array(PAIR), np.array(SEVERAL)
    found = {
        "exponent of the least bound, two classes": exponent(best_margins(pair), pair),
        "exponent of the least bound, five classes": exponent(best_margins(several), several),
        "tau of 20 and 320 examples, for margins of sum 1": best_tau(PAIR),
        "tau of 20 and 40 examples, for margins of sum 1": best_tau((20, 40)),
    }
    for counts in (PAIR, (100, 400)):
        mean = 100 * np.mean([errors(counts, seed) for seed in range(draws)], 0)
        of_pair = f"of {counts[0]} and {counts[1]} examples"
        for name, power in {"equal margins": 0.0, "the exponent 1/4": 0.25, "the exponent 1": 1.0}.items():
            found[f"error in % {of_pair}, {name}"] = float(mean[np.abs(EXPONENTS - power).argmin()])
        found[f"exponent of the least error {of_pair}"] = float(EXPONENTS[mean.argmin()])
        found[f"that error in %, {of_pair}"] = float(mean.min())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=50, help="of the training data")
    for name, value in numbers(parser.parse_args().draws).items():
        print(f"{name}: {value:.3g}")


if __name__ == "__main__":
    main()
