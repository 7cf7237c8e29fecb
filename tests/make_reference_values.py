"""Compute tests/reference_values.json from the papers' formulas, in NumPy and float64, with loops and sums.

    python tests/make_reference_values.py

Nothing of the package is used here. A loss of rows x has a value and two slopes: central differences along two random
directions. Server optimizers and SCAFFOLD have the end of their published recurrences.
"""

import itertools
import json
import re
from functools import partial
from pathlib import Path

import numpy as np

FILE = Path(__file__).with_name("reference_values.json")
# rows and columns; in those marked dead, a column is 0
SHAPES = {"8x3": (8, 3), "4x9": (4, 9), "2x5": (2, 5), "3x4": (3, 4), "8x3 dead": (8, 3), "4x9 dead": (4, 9)}


def inputs(shape):
    """Rows x and all that losses take beside them: only two classes have labels, and some have no examples."""
    batch, d = SHAPES[shape]
    rng = np.random.default_rng(batch * 100 + d)
    # multiples of 1/64 are exact in bfloat16
    x, other, third = np.clip(np.round(rng.normal(size=(3, batch, d)) * 64), -255, 255) / 64
    directions = rng.normal(size=(2, batch, d))
    if shape.endswith("dead"):
        x[:, 1] = directions[:, :, 1] = 0
    return {
        "x": x,
        "other": other,
        "third": third,
        "labels": rng.choice([0, 2], batch),
        "counts": np.array([3, 0, 40, 1, 0, 7, 2, 9, 30])[:d],
        "prototypes": rng.normal(size=(d, d)),
        "known": np.arange(d) % 3 != 2,
        "directions": directions,
    }


def softmax(o):
    e = np.exp(o - o.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def cross_entropy(o, y):
    return -np.mean([np.log(row[label]) for row, label in zip(softmax(o), y, strict=True)])


# ---------------------------------------------------------------- similarities
def gram(x, kernel=np.dot):
    return np.array([[kernel(a, b) for b in x] for a in x])


def alignment(k, m):
    """CKA of two kernel matrices ``(n, n)``."""
    h = np.eye(len(k)) - 1 / len(k)
    k, m = h @ k @ h, h @ m @ h
    return (k * m).sum() / (np.linalg.norm(k) * np.linalg.norm(m))


def linear_cka(x, y):
    return alignment(gram(x), gram(y))


def hsic(x, y):
    """The unbiased estimate HSIC_1 as Nguyen et al. (2021) print it in Eq. 3."""
    k, m = (a - np.diag(np.diag(a)) for a in (gram(x), gram(y)))
    n, ones = len(k), np.ones(len(k))
    sums = (ones @ k @ ones) * (ones @ m @ ones) / ((n - 1) * (n - 2))
    return (np.trace(k @ m) + sums - 2 / (n - 2) * (ones @ k @ m @ ones)) / (n * (n - 3))


def debiased_cka(x, y):
    return hsic(x, y) / np.sqrt(hsic(x, x) * hsic(y, y)) if len(x) > 3 else 0.0


def squared_distance(a, b):
    return ((a - b) ** 2).sum()


def median_of_all(x):
    """Median of the squared distances of all n^2 pairs; their mean if it is 0."""
    q = gram(x, squared_distance)
    return np.median(q) or q.mean()


def rbf_cka(x, y, t, medians=None):
    """``medians``, those of x and y, are constants in differences of the loss; None computes them."""
    medians = medians or (median_of_all(x), median_of_all(y))
    kernels = [
        gram(rows, lambda a, b, m=m: np.exp(-squared_distance(a, b) / (2 * t**2 * m)))
        for rows, m in zip((x, y), medians, strict=True)
    ]
    return alignment(*kernels)


def cosine(a, b):
    return a @ b / (np.linalg.norm(a) * np.linalg.norm(b))


def moon(z, others, temperature):
    """``others`` are the global model's representations and those of previous ones."""
    terms = []
    for b, row in enumerate(z):
        e = [np.exp(cosine(row, other[b]) / temperature) for other in others]
        terms.append(-np.log(e[0] / sum(e)))
    return np.mean(terms)


# ---------------------------------------------------------------- uniformity and variance
def pairs(z):
    return np.array([squared_distance(a, b) for a, b in itertools.combinations(z, 2)])


def width(z):
    """The lower median of the distances that are not 0."""
    apart = np.sort(pairs(z)[pairs(z) > 0])
    return apart[(len(apart) - 1) // 2]


def uniformity(z, factor=1.0, sigma=None):
    return np.exp(-pairs(z) / (factor * (sigma or width(z)))).mean()


def variance(o, hinge):
    gap = np.eye(o.shape[1]).std(0, ddof=1).mean() - softmax(o).std(0, ddof=1)
    if hinge in ("linear", "clamped_square"):
        gap = np.maximum(gap, 0)
    return (gap**2 if "square" in hinge else gap).mean()


# ---------------------------------------------------------------- decorrelation
def decorrelation(z, form="official"):
    batch, d = z.shape
    normal = (z - z.mean(0)) / np.sqrt(1e-8 + z.var(0, ddof=1))
    k = normal.T @ normal / batch
    if form == "paper":
        return (k**2).sum() / d**2
    return batch * np.mean([k[i, j] ** 2 for i, j in itertools.permutations(range(d), 2)] or [0.0])


def spread_of_singular_values(z):
    """Variance of the singular values of the covariance, which are computed one by one."""
    return np.linalg.svd(np.atleast_2d(np.cov(z.T, bias=True)), compute_uv=False).var()


def covariance_penalty(z, groups, gamma=0.0):
    d = z.shape[1]
    c = np.cov(z.T, bias=True)
    total = 0.0
    for i, j in itertools.permutations(range(d), 2):
        total += c[i, j] ** 2 * (0.5 if i * groups // d != j * groups // d else -0.5 * gamma)
    return total


# ---------------------------------------------------------------- prototypes and logits
def prototype_distance(z, y, prototypes, known):
    return sum(squared_distance(z[b], prototypes[c]) for b, c in enumerate(y) if known[c]) / z.size


def fedlc(o, counts, tau, missing, y, margin="fourth_root"):
    """Cross-entropy of calibrated logits; ``mask`` leaves missing classes out of the sum over classes."""
    counts = counts.astype(float)
    counted = np.where(counts > 0, counts, 1e-8 if missing == "floor" else 1)
    margins = counted**-0.25 if margin == "fourth_root" else -np.log(counted / counts.sum())
    if missing == "mask":
        kept = np.flatnonzero(counts)
        return cross_entropy((o - tau * margins)[:, kept], np.searchsorted(kept, y))
    return cross_entropy(o - tau * margins, y)


def adjusted(o, counts, tau, floor, y):
    """Cross-entropy of adjusted logits; without a floor, the sum over classes omits missing classes."""
    kept = np.arange(len(counts)) if floor else np.flatnonzero(counts)
    added = np.log((counts[kept] / counts.sum()) ** tau + floor)
    return cross_entropy(o[:, kept] + added, np.searchsorted(kept, y))


def not_true(o, reference, y, temperature):
    """Mean over the rows of the divergence of their softmax over the classes except the label."""
    terms = []
    for row, other, label in zip(o, reference, y, strict=True):
        p, q = (softmax(np.delete(values, label)[None] / temperature)[0] for values in (row, other))
        terms.append(temperature**2 * sum(q * np.log(q / p)))
    return np.mean(terms)


def suppression(o, y, counts):
    """FedVLS's second term, class by class; one without examples has weight 0."""
    shares, total = counts / sum(counts), 0.0
    for c, share in enumerate(shares):
        terms = [
            1.0 if label == c else np.exp(row[c]) * (1 / len(row) + 1e-9) / (share + 1e-9)
            for row, label in zip(o, y, strict=True)
        ]
        total += share * np.log(np.mean(terms))
    return total


def vacant(o, reference, counts):
    """Mean over the rows of the divergence of their softmax over the classes without examples."""
    missing = np.flatnonzero(counts == 0)
    if not len(missing):
        return 0.0
    p, q = (softmax(values[:, missing]) for values in (o, reference))
    return np.mean((q * np.log(q / p)).sum(1))


def restricted(o, counts, alpha, mode):
    factors = [alpha + (1 - alpha) * ((n > 0) if mode == "binary" else n / max(counts)) for n in counts]
    return o * np.array(factors)


# ---------------------------------------------------------------- all losses of rows x, given inputs i
LOSSES = {
    "linear_cka": lambda x, i: linear_cka(x, i["other"]),
    "linear_cka debiased": lambda x, i: debiased_cka(x, i["other"]),
    "linear_ckas": lambda x, i: linear_cka(x, i["other"]) + 3 * linear_cka(x, i["third"]),
    "rbf_cka": lambda x, i: rbf_cka(x, i["other"], 0.7, (median_of_all(i["x"]), median_of_all(i["other"]))),
    "frobenius_similarity": lambda x, i: -((x - i["other"]) ** 2).mean(),
    "cosine_similarity": lambda x, i: cosine(x.ravel(), i["other"].ravel()),
    "representation_contrast": lambda x, i: -np.log(np.exp(x[0, 0]) / (np.exp(x[0, 0]) + np.exp(x[0, -1]))),
    "model_contrastive_loss": lambda x, i: moon(x, [i["other"], i["third"]], 0.3),
    "model_contrastive_loss of two": lambda x, i: moon(x, [i["other"], i["third"], i["other"]], 0.5),
    "rbf_uniformity": lambda x, i: uniformity(x),
    "rbf_uniformity 2": lambda x, i: uniformity(x, 2.0),
    "rbf_uniformity detached": lambda x, i: uniformity(x, 1.0, width(i["x"])),
    "correlation_frobenius": lambda x, i: decorrelation(x),
    "correlation_frobenius paper": lambda x, i: decorrelation(x, "paper"),
    # variances as small as the constant that is added to them
    "correlation_frobenius faint": lambda x, i: decorrelation(2**-13 * x),
    "singular_value_variance": lambda x, i: spread_of_singular_values(x),
    "covariance_decorrelation": lambda x, i: covariance_penalty(x, x.shape[1]),
    "structured_covariance_decorrelation": lambda x, i: covariance_penalty(x, 2, 0.3),
    **{f"not_true_distillation {t}": lambda x, i, t=t: not_true(x, i["other"], i["labels"], t) for t in (1, 3)},
    "logit_suppression": lambda x, i: suppression(x, i["labels"], i["counts"]),
    "vacant_class_distillation": lambda x, i: vacant(x, i["other"], i["counts"]),
    "prototype_distance": lambda x, i: prototype_distance(x, i["labels"], i["prototypes"], i["known"]),
    **{
        f"probability_variance_hinge {hinge}": lambda x, i, hinge=hinge: variance(x, hinge)
        for hinge in ("linear", "none", "square", "clamped_square")
    },
    **{
        f"calibrated_logits {missing} {margin}": lambda x, i, how=missing, by=margin: fedlc(
            x, i["counts"], 0.4, how, i["labels"], by
        )
        for missing in ("floor", "mask", "clamp")
        for margin in ("fourth_root", "log_prior")
    },
    **{
        f"adjusted_logits {floor}": lambda x, i, floor=floor: adjusted(x, i["counts"], 0.4, floor, i["labels"])
        for floor in (0, 1e-3)
    },
    **{
        f"restricted_logits {mode}": lambda x, i, mode=mode: cross_entropy(
            restricted(x, i["counts"], 0.3, mode), i["labels"]
        )
        for mode in ("binary", "frequency")
    },
}


def differences(loss, x, directions, h=1e-6):
    """The slopes of ``loss`` at x along some directions, by central differences."""
    return [(loss(x + h * along) - loss(x - h * along)) / (2 * h) for along in directions]


# ---------------------------------------------------------------- server optimizers
DELTAS = np.random.default_rng(0).normal(scale=0.1, size=(12, 5))


def recurrence(kind, lr=0.1, beta1=0.9, beta2=0.99, tau=1e-3, v=0.0, correct="none", dampening=0.0):
    """The server's parameters after the changes :data:`DELTAS`: Reddi et al. (2021) and Hsu et al. (2019)."""
    w, m, v = np.zeros(5), np.zeros(5), np.full(5, v)
    for t, delta in enumerate(DELTAS, 1):
        if kind == "avgm":
            m = beta1 * m + (1 - dampening) * delta
            w = w + lr * m
            continue
        m, square = beta1 * m + (1 - beta1) * delta, delta**2
        v = {
            "adagrad": v + square,
            "adam": beta2 * v + (1 - beta2) * square,
            "yogi": v - (1 - beta2) * square * np.sign(v - square),
        }[kind]
        power = t + (correct == "flower")
        factor = 1 if correct == "none" else np.sqrt(1 - beta2**power) / (1 - beta1**power)
        w = w + lr * factor * m / (np.sqrt(v) + tau)
    return w


OPTIMIZERS = {
    "FedAvgM": partial(recurrence, "avgm"),
    "FedAvgM dampened": partial(recurrence, "avgm", dampening=0.9),
    "FedAdagrad": partial(recurrence, "adagrad", beta1=0.0),
    "FedAdagrad with momentum": partial(recurrence, "adagrad", v=1e-6),
    "FedAdam": partial(recurrence, "adam"),
    "FedAdam corrected": partial(recurrence, "adam", correct="adam"),
    "FedAdam as in Flower": partial(recurrence, "adam", correct="flower", tau=1e-9),
    "FedYogi": partial(recurrence, "yogi"),
    "FedYogi corrected": partial(recurrence, "yogi", v=1e-6, correct="adam"),
}

# ---------------------------------------------------------------- SCAFFOLD on f_k(y) = a_k / 2 (y - b_k)^2
A, B = np.array([1.0, 4.0, 0.5]), np.array([-1.0, 2.0, 5.0])


def scaffold(rounds, rates, sizes=(1, 1, 1), scaled=False, by="displacement", rho=None):
    """x, c and all c_k after some rounds of a step for each rate; ``rho`` of SGD corrects after the step."""
    omega = 3 * np.array(sizes) / sum(sizes) if scaled else np.ones(3)
    x, c, own = 0.0, 0.0, np.zeros(3)
    for _ in range(rounds):
        y, buffer, gradients = np.full(3, x), np.zeros(3), []
        for rate in rates:
            gradients.append(A * (y - B))
            buffer = (rho or 0) * buffer + gradients[-1]
            y = y - rate * (buffer + c / omega - own)
        mean = np.mean(gradients, 0) if by == "gradients" else own - c + (x - y) / sum(rates)
        c = c + np.sum(omega * (mean - own)) / 3
        x, own = y.mean(), mean
    return [x, c, *own]


SCAFFOLDS = {
    "plain": partial(scaffold, 3, [0.1] * 2),
    "by gradients": partial(scaffold, 3, [0.1] * 2, by="gradients"),
    "scaled": partial(scaffold, 3, [0.1] * 2, sizes=(2, 1, 6), scaled=True),
    "after momentum": partial(scaffold, 2, [0.1] * 2, rho=0.5),
    "falling rate": partial(scaffold, 1, [0.2, 0.1, 0.05]),
    "falling rate, by gradients": partial(scaffold, 1, [0.2, 0.1, 0.05], by="gradients"),
}


def rounded(numbers):
    return [float(f"{number:.12g}") for number in numbers]


def compute():
    """All reference values by part, name and shape."""
    losses = {}
    for name, loss in LOSSES.items():
        losses[name] = {}
        for shape in SHAPES:
            given = inputs(shape)
            of_rows = partial(loss, i=given)
            slopes = differences(of_rows, given["x"], given["directions"])
            losses[name][shape] = rounded([of_rows(given["x"]), *slopes])
    return {
        "losses": losses,
        "optimizers": {name: rounded(end()) for name, end in OPTIMIZERS.items()},
        "scaffold": {name: rounded(end()) for name, end in SCAFFOLDS.items()},
    }


def load(part):
    """The values of a part, as they are in the file."""
    return json.loads(FILE.read_text())[part]


if __name__ == "__main__":
    text = json.dumps(compute(), indent=1)
    FILE.write_text(re.sub(r"\[[^\]]*\]", lambda row: " ".join(row[0].split()), text) + "\n")  # a list on one line
