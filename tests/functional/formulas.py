"""Reference implementations of the losses: NumPy, float64, loops and sums as in the formulas; and random input."""

import itertools

import numpy as np
import torch

# functions without gradient or scalar value have tests of their own
ELSEWHERE = {
    "as_rows",
    "class_sums",
    "condition_number",
    "covariance_spectrum",
    "effective_rank",
    "eigenvalues",
    "minibatch_cka",
    "numerical_rank",
    "similarities",
    "singular_alignment",
    "singular_values",
    "stable_rank",
    "unbiased_gram",
}


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def softmax(o):
    e = np.exp(o - o.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def cross_entropy(o, y):
    return -np.mean([np.log(row[label]) for row, label in zip(softmax(o), y, strict=True)])


# ---------------------------------------------------------------- similarities
def gram(x, kernel=np.dot):
    return np.array([[kernel(a, b) for b in x] for a in x])


def alignment(k, m):
    """CKA of two kernel matrices ``(n, n)``; 0 for a single example."""
    h = np.eye(len(k)) - 1 / len(k)
    k, m = h @ k @ h, h @ m @ h
    return (k * m).sum() / (np.linalg.norm(k) * np.linalg.norm(m)) if len(k) > 1 else 0.0


def linear_cka(x, y):
    return alignment(gram(x), gram(y))


def debiased_cka(x, y):
    """CKA with the unbiased estimator of HSIC in closed form."""

    def hsic(k, m):
        n = len(k)
        cross = k.sum(0) @ m.sum(0) / (n - 2)
        return ((k * m).sum() + k.sum() * m.sum() / ((n - 1) * (n - 2)) - 2 * cross) / (n * (n - 3))

    if len(x) < 4:
        return 0.0
    k, m = (a - np.diag(np.diag(a)) for a in (gram(x), gram(y)))
    return hsic(k, m) / np.sqrt(hsic(k, k) * hsic(m, m))


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
    return np.exp(-pairs(z) / (factor * (sigma or width(z)))).mean() if len(z) > 1 else 0.0


def variance(o, hinge):
    if len(o) < 2:
        return 0.0
    gap = np.eye(o.shape[1]).std(0, ddof=1).mean() - softmax(o).std(0, ddof=1)
    if hinge in ("linear", "clamped_square"):
        gap = np.maximum(gap, 0)
    return (gap**2 if "square" in hinge else gap).mean()


# ---------------------------------------------------------------- decorrelation
def decorrelation(z, form="official"):
    batch, d = z.shape
    if batch < 2:
        return 0.0
    normal = (z - z.mean(0)) / np.sqrt(1e-8 + z.var(0, ddof=1))
    k = normal.T @ normal / batch
    if form == "paper":
        return (k**2).sum() / d**2
    return batch * np.mean([k[i, j] ** 2 for i, j in itertools.permutations(range(d), 2)] or [0.0])


def spread_of_singular_values(z):
    """Variance of the singular values of the covariance, which are computed one by one."""
    return np.linalg.svd(np.atleast_2d(np.cov(z.T, bias=True)), compute_uv=False).var() if len(z) > 1 else 0.0


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


def restricted(o, counts, alpha, mode):
    factors = [alpha + (1 - alpha) * ((n > 0) if mode == "binary" else n / max(counts)) for n in counts]
    return o * np.array(factors)


# ---------------------------------------------------------------- spectra
def effective_rank(s):
    p = s[s > 0] / s.sum()
    return np.prod(p**-p)


def stable_rank(s):
    return (s**2).sum() / s.max() ** 2


def differences(loss, x, h=1e-6):
    """The gradient by central differences."""
    gradient = np.empty_like(x)
    for index in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[index] += h
        down[index] -= h
        gradient[index] = (loss(up) - loss(down)) / (2 * h)
    return gradient
