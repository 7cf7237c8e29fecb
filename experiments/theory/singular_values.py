"""How fast the singular values of a deep linear network grow under label skew: simulated, and by FedDecorr's Theorem 1.

python experiments/theory/singular_values.py [--output docs/theory_singular_values.png]

A client trains a linear network of L + 1 layers by gradient flow (gradient descent in small steps) on the mean
cross-entropy. P = W_L ... W_1 gives its representations. Theorem 1 of Shi et al., Towards Understanding and Mitigating
Dimensional Collapse in Heterogeneous Federated Learning, ICLR 2023 (https://arxiv.org/abs/2210.00226), for the mean
instead of the sum over the examples:

    d sigma_k / dt = L sigma_k^(2 - 2/L) sqrt(sigma_k^(2/L) + M) u_k' G v_k,    G = sum_c mu_c (e_c - p_c) x_c'

sigma_k are the singular values of P and v_k its right singular vectors, u_k the left ones of the classifier W_(L+1),
and M is the constant sigma_k(W_(L+1))^2 - sigma_k^(2/L). mu_c is the share of class c in the client's examples, x_c
their mean and p_c their mean softmax output. It assumes that the first L layers are balanced (A1: W_(l+1)' W_(l+1) =
W_l W_l') and that the right singular vectors of the classifier are the left ones of P (A2).

docs/theory.md explains the figure.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

LAYERS, INPUTS, WIDTH, CLASSES, PER_CLASS = 2, 20, 8, 8, 20
START, STEP, STEPS = 0.05, 0.02, 3000
# factor between the shares of consecutive classes
SKEWS = {"balanced labels": 1.0, "skewed labels": 2.0}


@dataclass
class Client:
    """Examples ``x (n, p)`` with labels ``y (n,)``; ``weights (n,)`` add up to the shares of the classes ``(C,)``."""

    x: np.ndarray
    y: np.ndarray
    weights: np.ndarray
    shares: np.ndarray


def client(skew: float, noise: float = 0.3, seed: int = 0) -> Client:
    """The same examples for every skew: class means of norm 1, orthogonal to each other, and noise of this norm."""
    rng = np.random.default_rng(seed)
    means = np.linalg.qr(rng.normal(size=(INPUTS, INPUTS)))[0][:CLASSES]
    y = np.repeat(np.arange(CLASSES), PER_CLASS)
    x = means[y] + noise * rng.normal(size=(len(y), INPUTS)) / np.sqrt(INPUTS)
    shares = skew ** -np.arange(CLASSES)
    shares = shares / shares.sum()
    return Client(x, y, shares[y] / PER_CLASS, shares)


def product(weights: Sequence[np.ndarray], size: int) -> np.ndarray:
    """W_n ... W_1; the identity of this size for none."""
    result = np.eye(size)
    for one in weights:
        result = one @ result
    return result


def probabilities(weights: Sequence[np.ndarray], data: Client) -> np.ndarray:
    logits = data.x @ product(weights, INPUTS).T
    exponentials = np.exp(logits - logits.max(1, keepdims=True))
    return exponentials / exponentials.sum(1, keepdims=True)


def signal(weights: Sequence[np.ndarray], data: Client) -> np.ndarray:
    """Minus the gradient of the loss by the product of all layers ``(C, p)``."""
    gaps = np.eye(CLASSES)[data.y] - probabilities(weights, data)
    return (gaps * data.weights[:, None]).T @ data.x


def signal_of_means(weights: Sequence[np.ndarray], data: Client) -> np.ndarray:
    """G of the theorem, by the classes' mean inputs and mean outputs; :func:`signal` without their covariance."""
    one_hot = np.eye(CLASSES)[data.y] / PER_CLASS
    gaps = np.eye(CLASSES) - one_hot.T @ probabilities(weights, data)
    return (gaps * data.shares[:, None]).T @ (one_hot.T @ data.x)


def descend(weights: Sequence[np.ndarray], data: Client, step: float) -> list[np.ndarray]:
    """One step of gradient descent."""
    g = signal(weights, data)
    return [
        one + step * product(weights[i + 1 :], len(one)).T @ g @ product(weights[:i], INPUTS).T
        for i, one in enumerate(weights)
    ]


def train(weights: Sequence[np.ndarray], data: Client, steps: int, step: float) -> list[list[np.ndarray]]:
    """The weights before each step and after the last."""
    course = [list(weights)]
    for _ in range(steps):
        course.append(descend(course[-1], data, step))
    return course


# ------------------------------------------------------------------ where training begins
def rotation(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Orthonormal columns in a random direction."""
    return np.linalg.qr(rng.normal(size=(rows, columns)))[0]


def balanced(left: np.ndarray, right: np.ndarray, values: np.ndarray, gap: float, seed: int) -> list[np.ndarray]:
    """Weights for which A1 and A2 hold: P has these singular values and right singular vectors ``(p, d)``.

    The classifier has the left singular vectors ``left (C, d)``, and M is ``gap``.
    """
    rng = np.random.default_rng(seed)
    root, before, layers = values ** (1 / LAYERS), right, []
    for _ in range(LAYERS):
        after = rotation(rng, WIDTH, WIDTH)
        layers.append(after * root @ before.T)
        before = after
    return [*layers, left * np.sqrt(root**2 + gap) @ before.T]


def along_the_signal(data: Client) -> list[np.ndarray]:
    """A balanced start of equal singular values along the singular vectors of the first signal, with M = 0."""
    nothing = [np.zeros((WIDTH, INPUTS)), *(np.zeros((WIDTH, WIDTH)),) * (LAYERS - 1), np.zeros((CLASSES, WIDTH))]
    left, _, right = np.linalg.svd(signal(nothing, data), full_matrices=False)
    return balanced(left, right.T, np.full(WIDTH, START), gap=0.0, seed=1)


def anywhere(seed: int = 2, gap: float = 0.05) -> list[np.ndarray]:
    """A balanced start in random directions."""
    rng = np.random.default_rng(seed)
    values = START * np.linspace(2, 0.5, WIDTH)
    return balanced(rotation(rng, CLASSES, WIDTH), rotation(rng, INPUTS, WIDTH), values, gap, seed)


def usual(scale: float = 1.0, seed: int = 3) -> list[np.ndarray]:
    """Independent normal weights that keep the size of activations, times a scale; neither assumption holds."""
    rng = np.random.default_rng(seed)
    shapes = [(WIDTH, INPUTS), *[(WIDTH, WIDTH)] * (LAYERS - 1), (CLASSES, WIDTH)]
    return [scale * rng.normal(size=shape) / np.sqrt(shape[1]) for shape in shapes]


# ------------------------------------------------------------------ the theorem
def spectrum(weights: Sequence[np.ndarray]) -> np.ndarray:
    """Singular values of P, descending."""
    return np.linalg.svd(product(weights[:LAYERS], INPUTS), compute_uv=False)[:WIDTH]


def constants(weights: Sequence[np.ndarray]) -> np.ndarray:
    """M, for each pair of singular values of P and of the classifier."""
    return np.linalg.svd(weights[-1], compute_uv=False)[:WIDTH] ** 2 - spectrum(weights) ** (2 / LAYERS)


def theorem(weights: Sequence[np.ndarray], data: Client, gap: np.ndarray, of_means: bool = False) -> np.ndarray:
    """The rates of Theorem 1 at these weights, with the constants ``gap`` of the start."""
    left, values, right = np.linalg.svd(product(weights[:LAYERS], INPUTS), full_matrices=False)
    u, _, v = np.linalg.svd(weights[-1], full_matrices=False)
    u = u * np.sign(np.sum(v.T * left, 0))  # A2 fixes the sign that a decomposition leaves open
    g = (signal_of_means if of_means else signal)(weights, data)
    along = np.einsum("ck,cp,kp->k", u, g, right)
    return LAYERS * values ** (2 - 2 / LAYERS) * np.sqrt(np.maximum(values ** (2 / LAYERS) + gap, 0)) * along


def early(data: Client, start: Sequence[np.ndarray], times: np.ndarray) -> np.ndarray:
    """Integrate the theorem for M = 0 with the initial G, ``(times, d)``; nan where the solution is infinite."""
    rates = np.linalg.svd(signal(start, data), compute_uv=False)[:WIDTH]
    power = (LAYERS - 1) / LAYERS
    left = START**-power - (LAYERS - 1) * rates * times[:, None]
    return np.where(left > 0, np.abs(left) ** (-1 / power), np.nan)


def rates(course: list[list[np.ndarray]], data: Client, step: float, of_means: bool = False) -> np.ndarray:
    """Return rates by central differences of the simulation, and rates by the theorem: ``(2, times, d)``."""
    gap, chosen = constants(course[0]), range(1, len(course) - 1, 10)
    measured = [(spectrum(course[i + 1]) - spectrum(course[i - 1])) / (2 * step) for i in chosen]
    return np.array([measured, [theorem(course[i], data, gap, of_means) for i in chosen]])


def error(found: np.ndarray) -> float:
    """Return the root mean square of the difference, relative to the root mean square of the measured rates."""
    measured, predicted = found
    return float(np.sqrt(np.square(measured - predicted).sum() / np.square(measured).sum()))


# ------------------------------------------------------------------ the figure
def draw(figure: Figure, steps: int = STEPS) -> dict[str, float]:
    """Draw all, and return the numbers of docs/theory.md."""
    panels, numbers = figure.subplots(1, 3), {}
    for axes, name in zip(panels, SKEWS, strict=False):
        numbers |= draw_growth(axes, name, steps)
    numbers |= draw_rates(panels[2], client(SKEWS["skewed labels"]), steps // 2)
    panels[0].set_ylabel("singular value of the representation map P")
    return numbers


def draw_growth(axes: Axes, name: str, steps: int) -> dict[str, float]:
    """The singular values over time, and their closed form while G is as at the start."""
    data = client(SKEWS[name])
    start = along_the_signal(data)
    values = np.array([spectrum(one) for one in train(start, data, steps, STEP)])
    times = STEP * np.arange(len(values))
    closed = early(data, start, times)
    axes.semilogy(times, values, color="tab:blue", linewidth=1.5)
    axes.semilogy(times, closed, color="black", linewidth=1, linestyle=":")
    axes.set(xlabel="time (step size times number of steps)", title=name, ylim=(START / 10, 10))
    axes.legend([axes.lines[0], axes.lines[-1]], ["simulated", "closed form, G as at the start"], loc="lower right")
    soon = values[:, 0] < 5 * START
    return {
        f"singular values that grew tenfold, {name}": int((values[-1] > 10 * START).sum()),
        f"error of the closed form until the largest grew fivefold, {name}": float(
            np.abs(closed / values - 1)[soon].max()
        ),
    }


def draw_rates(axes: Axes, data: Client, steps: int) -> dict[str, float]:
    """Rates of growth, measured and by the theorem, from several starts."""
    starts = {
        "A1 and A2 hold": (anywhere(), "o"),
        "normal weights, 0.3 of the usual": (usual(0.3), "+"),
        "normal weights, usual size": (usual(), "x"),
    }
    numbers = {}
    for name, (start, marker) in starts.items():
        course = train(start, data, steps, STEP)
        found = rates(course, data, STEP)
        numbers[f"error of the rates, {name}"] = error(found)
        numbers[f"the same with G of class means, {name}"] = error(rates(course, data, STEP, of_means=True))
        axes.plot(*found[:, ::8].reshape(2, -1), marker, markersize=5, fillstyle="none", label=name)
    axes.axline((0, 0), slope=1, color="black", linewidth=0.8)
    axes.set(xlabel="measured rate of growth", ylabel="rate by Theorem 1", title="skewed labels: rates")
    axes.legend(loc="upper left")
    return numbers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("theory_singular_values.png"))
    parser.add_argument("--steps", type=int, default=STEPS, help="of gradient descent")
    args = parser.parse_args()
    figure = Figure(figsize=(13, 4), layout="constrained")
    for name, value in draw(figure, args.steps).items():
        print(f"{name}: {value:.3g}")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.output, dpi=110)


if __name__ == "__main__":
    main()
