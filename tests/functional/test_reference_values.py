"""Every loss and transform against NumPy in float64: the value by its formula, the gradient by central differences.

The formulas are written out here as loops and sums; nothing of the package computes what is expected.
"""

import itertools

import numpy as np
import pytest
import torch

from fl_lightning import functional as F

# (B, d): more examples than dimensions, fewer, one, two, a small odd last batch
SHAPES = [(8, 3), (4, 9), (1, 4), (2, 5), (3, 4)]


def softmax(o):
    e = np.exp(o - o.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def cross_entropy(o, y):
    return -np.mean([np.log(row[label]) for row, label in zip(softmax(o), y, strict=True)])


def gram(x, kernel):
    return np.array([[kernel(a, b) for b in x] for a in x])


def alignment(k, m):
    """CKA of two matrices ``(n, n)``; 0 where there is nothing to align."""
    h = np.eye(len(k)) - 1 / len(k)
    k, m = h @ k @ h, h @ m @ h
    return (k * m).sum() / (np.linalg.norm(k) * np.linalg.norm(m)) if len(k) > 1 else 0.0


def linear_cka(x, y):
    return alignment(gram(x, np.dot), gram(y, np.dot))


def debiased_cka(x, y):
    """Ratio of the unbiased estimators of Song et al., 2007."""

    def estimate(k, m):
        n = len(k)
        cross = k.sum(0) @ m.sum(0) / (n - 2)
        return ((k * m).sum() + k.sum() * m.sum() / ((n - 1) * (n - 2)) - 2 * cross) / (n * (n - 3))

    if len(x) < 4:
        return 0.0
    k, m = (gram(rows, np.dot) for rows in (x, y))
    np.fill_diagonal(k, 0), np.fill_diagonal(m, 0)
    return estimate(k, m) / np.sqrt(estimate(k, k) * estimate(m, m))


def rbf_cka(t, medians):
    """With the medians held, which carry no gradient."""

    def kernel(rows, median):
        return gram(rows, lambda a, b: np.exp(-((a - b) ** 2).sum() / (2 * t**2 * median)))

    return lambda x, y: alignment(kernel(x, medians[0]), kernel(y, medians[1])) if len(x) > 1 else 0.0


def median_of_all(x):
    return np.median(gram(x, lambda a, b: ((a - b) ** 2).sum()))


def pairs(z):
    return np.array([((a - b) ** 2).sum() for a, b in itertools.combinations(z, 2)])


def width(z):
    """The lower median of the distances that are not 0."""
    apart = np.sort(pairs(z)[pairs(z) > 0])
    return apart[(len(apart) - 1) // 2]


def uniformity(factor, sigma=None):
    return lambda z: np.exp(-pairs(z) / (factor * (sigma or width(z)))).mean() if len(z) > 1 else 0.0


def variance(hinge):
    def loss(o):
        if len(o) < 2:
            return 0.0
        c = np.eye(o.shape[1]).std(0, ddof=1).mean()
        gap = c - softmax(o).std(0, ddof=1)
        gap = np.maximum(gap, 0) if hinge in ("linear", "clamped_square") else gap
        return (gap**2 if "square" in hinge else gap).mean()

    return loss


def decorrelation(form):
    def loss(z):
        batch, d = z.shape
        if batch < 2:
            return 0.0
        normal = (z - z.mean(0)) / np.sqrt(1e-8 + z.var(0, ddof=1))
        k = normal.T @ normal / batch
        apart = [k[i, j] ** 2 for i in range(d) for j in range(d) if i != j]
        return (k**2).sum() / d**2 if form == "paper" else batch * np.mean(apart)

    return loss


def covariance(groups, gamma=0.0):
    def loss(z):
        c, d = np.cov(z.T, bias=True), z.shape[1]
        total = 0.0
        for i, j in itertools.permutations(range(d), 2):
            total += c[i, j] ** 2 * (0.5 if i * groups // d != j * groups // d else -0.5 * gamma)
        return total

    return loss


def cosine(a, b):
    return a @ b / (np.linalg.norm(a) * np.linalg.norm(b))


def contrast(others, temperature):
    def loss(z):
        terms = []
        for b, row in enumerate(z):
            e = [np.exp(cosine(row, other[b]) / temperature) for other in others]
            terms.append(-np.log(e[0] / sum(e)))
        return np.mean(terms)

    return loss


def prototypes(y, t, known):
    return lambda z: sum(((z[b] - t[c]) ** 2).sum() for b, c in enumerate(y) if known[c]) / z.size


def calibrated(counts, tau, missing, y):
    def loss(o):
        n = counts.astype(float)
        if missing == "mask":
            kept = np.flatnonzero(n)
            return cross_entropy((o - tau * np.maximum(n, 1) ** -0.25)[:, kept], np.searchsorted(kept, y))
        return cross_entropy(o - tau * np.where(n > 0, n, 1e-8 if missing == "floor" else 1) ** -0.25, y)

    return loss


def restricted(counts, alpha, mode, y):
    shares = (counts > 0) if mode == "binary" else counts / counts.max()
    return lambda o: cross_entropy(o * (alpha + (1 - alpha) * shares), y)


def cases(batch, d):
    """Name to (ours, NumPy's, input); where the input has dead units they are dead in both."""
    rng = np.random.default_rng(batch * 100 + d)
    # numbers that bf16 holds exactly, so that the second arguments are the same in every precision
    x, other, third = torch.from_numpy(rng.normal(size=(3, batch, d))).bfloat16().double().numpy()
    y, counts = rng.choice([0, 2], batch), np.array([3, 0, 40, 1, 0, 7, 2, 9, 30])[:d]
    t, known = rng.normal(size=(d, d)), np.arange(d) % 3 != 2
    labels, n = torch.from_numpy(y), torch.from_numpy(counts)
    near, far = ((lambda x, value=value: torch.from_numpy(value).to(x)) for value in (other, third))
    ce = torch.nn.functional.cross_entropy
    found = {
        "linear_cka": (lambda x: F.linear_cka(x, near(x)), lambda x: linear_cka(x, other)),
        "linear_ckas": (lambda x: F.linear_ckas(x, near(x), far(x))[1], lambda x: linear_cka(x, third)),
        "debiased": (lambda x: F.linear_cka(x, near(x), debiased=True), lambda x: debiased_cka(x, other)),
        "rbf_cka": (
            lambda x: F.rbf_cka(x, near(x), 0.7),
            lambda v: rbf_cka(0.7, (median_of_all(x), median_of_all(other)))(v, other),
        ),
        "frobenius": (lambda x: F.frobenius_similarity(x, near(x)), lambda x: -((x - other) ** 2).mean()),
        "cosine": (lambda x: F.cosine_similarity(x, near(x)), lambda x: cosine(x.ravel(), other.ravel())),
        "contrast": (
            lambda x: F.representation_contrast(x[0, 0], x[0, 1]),
            lambda x: -np.log(np.exp(x[0, 0]) / (np.exp(x[0, 0]) + np.exp(x[0, 1]))),
        ),
        "moon": (lambda x: F.model_contrastive_loss(x, near(x), [far(x)], 0.3), contrast([other, third], 0.3)),
        "moon, two previous": (
            lambda x: F.model_contrastive_loss(x, near(x), [far(x), near(x)]),
            contrast([other, third, other], 0.5),
        ),
        "decov": (F.covariance_decorrelation, covariance(d)),
        "structured": (lambda x: F.structured_covariance_decorrelation(x, 2, 0.3), covariance(2, 0.3)),
        "fedproto": (
            lambda x: F.prototype_distance(x, labels, torch.from_numpy(t), torch.from_numpy(known)),
            prototypes(y, t, known),
        ),
    }
    for form in ("official", "paper"):
        found[f"feddecorr {form}"] = (lambda x, form=form: F.correlation_frobenius(x, form), decorrelation(form))
    for hinge in ("linear", "none", "square", "clamped_square"):
        found[f"variance {hinge}"] = (lambda x, h=hinge: F.probability_variance_hinge(x, h), variance(hinge))
    for factor, detach in ((1.0, False), (2.0, False), (1.0, True)):
        ours = lambda x, f=factor, d=detach: F.rbf_uniformity(x, f, d)  # noqa: E731
        found[f"uniformity {factor} {detach}"] = (ours, uniformity(factor, width(x) if detach and batch > 1 else None))
    for missing in ("floor", "mask", "clamp"):
        ours = lambda x, m=missing: ce(F.calibrated_logits(x, n, 0.4, m), labels)  # noqa: E731
        found[f"fedlc {missing}"] = (ours, calibrated(counts, 0.4, missing, y))
    for mode in ("binary", "frequency"):
        ours = lambda x, m=mode: ce(F.restricted_logits(x, n, 0.3, m), labels)  # noqa: E731
        found[f"fedrs {mode}"] = (ours, restricted(counts, 0.3, mode, y))
    return {name: (*pair, x) for name, pair in found.items()}


def differences(loss, x, h=1e-6):
    found = np.empty_like(x)
    for index in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[index] += h
        down[index] -= h
        found[index] = (loss(up) - loss(down)) / (2 * h)
    return found


@pytest.mark.parametrize("name", cases(8, 3))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_value_and_gradient(name, shape):
    ours, theirs, x = cases(*shape)[name]
    tensor = torch.from_numpy(x).requires_grad_()
    value = ours(tensor)
    (gradient,) = torch.autograd.grad(value, tensor)
    assert value.item() == pytest.approx(theirs(x), rel=1e-8, abs=1e-9)
    np.testing.assert_allclose(gradient.numpy(), differences(theirs, x), rtol=1e-5, atol=2e-8)


@pytest.mark.parametrize("name", cases(8, 3))
@pytest.mark.parametrize("shape", [(8, 3), (4, 9)], ids=str)
def test_bf16_autocast_computes_in_float32_and_bf16_is_widened_first(name, shape):
    ours, theirs, x = cases(*shape)[name]
    wide = torch.from_numpy(x).float()
    plain = ours(wide)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(ours(wide), plain)
        narrow = ours(wide.bfloat16())
    assert torch.equal(narrow, ours(wide.bfloat16().float()))
    assert plain.item() == pytest.approx(theirs(x.astype(np.float32).astype(float)), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moon_widens_the_representations_of_its_references_too(dtype):
    z, near, far = (torch.randn(6, 5).to(dtype) for _ in range(3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = F.model_contrastive_loss(z, near, [far])
    expected = contrast([near.double().numpy(), far.double().numpy()], 0.5)(z.double().numpy())
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(expected, rel=1e-6)


# ---------------------------------------------------------------- dead units and missing classes
@pytest.mark.parametrize(
    "name",
    ["feddecorr official", "feddecorr paper", "decov", "structured", "uniformity 1.0 False", "linear_cka", "moon"],
)
@pytest.mark.parametrize("shape", [(8, 3), (4, 9)], ids=str)
def test_dead_units_change_nothing_else_and_are_finite(name, shape):
    ours, theirs, x = cases(*shape)[name]
    x[:, 1] = 0
    tensor = torch.from_numpy(x).requires_grad_()
    value = ours(tensor)
    (gradient,) = torch.autograd.grad(value, tensor)
    assert value.item() == pytest.approx(theirs(x), rel=1e-7, abs=1e-9)
    assert torch.isfinite(gradient).all()
    alive = [i for i in range(shape[1]) if i != 1]
    np.testing.assert_allclose(gradient.numpy()[:, alive], differences(theirs, x)[:, alive], rtol=1e-4, atol=2e-8)
    if name.startswith(("feddecorr", "decov", "structured")):
        assert not gradient[:, 1].any()


def test_a_missing_class_gets_no_gradient_from_fedlc_and_a_fraction_from_fedrs():
    logits = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    labels, counts = torch.tensor([0, 2, 0, 3, 2, 0]), torch.tensor([3, 0, 2, 1])
    ce = torch.nn.functional.cross_entropy
    for missing, share in (("mask", 0.0), ("floor", 0.0), ("clamp", None)):
        (gradient,) = torch.autograd.grad(ce(F.calibrated_logits(logits, counts, 1.0, missing), labels), logits)
        assert (gradient[:, 1].abs().max() < 1e-30) == (share == 0.0)
    (gradient,) = torch.autograd.grad(ce(F.restricted_logits(logits, counts, 0.25), labels), logits)
    restricted_ = logits.detach() * torch.tensor([1, 0.25, 1, 1])
    torch.testing.assert_close(gradient[:, 1], 0.25 * restricted_.softmax(1)[:, 1] / 6)


def test_class_sums_and_prototypes_with_missing_classes():
    z, y = np.random.default_rng(0).normal(size=(5, 2, 2)), np.array([3, 1, 3, 3, 1])
    sums, counts = F.class_sums(torch.from_numpy(z).float(), torch.from_numpy(y), 5)
    assert sums.dtype == counts.dtype == torch.float64
    assert counts[:, 0].tolist() == [0, 2, 0, 3, 0]
    for c in range(5):
        np.testing.assert_allclose(sums[c].numpy(), z[y == c].reshape(-1, 4).sum(0), rtol=1e-6, atol=1e-7)
    nothing = torch.zeros(5, dtype=torch.bool)
    rows = torch.from_numpy(z).requires_grad_()
    value = F.prototype_distance(rows, torch.from_numpy(y), torch.full((5, 4), torch.nan), nothing)
    value.backward()
    assert value.item() == 0
