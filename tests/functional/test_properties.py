"""What holds of a loss for any rows: its range, a finite gradient, and what changes of the rows do not matter."""

import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch
from cases import CASES, HINGES, MARGINS, MISSING, OF_LOGITS, beside, draw
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from fl_lightning import functional as F

few = settings(max_examples=20, deadline=None, derandomize=True)


@st.composite
def rows(draw, min_rows=1, max_rows=12, min_width=1, max_width=16, degenerate=True, scales=(-6, 6)):
    """Rows ``(B, d)`` in float64 of any scale; if ``degenerate``, some rows may repeat and some columns be 0."""
    batch, d = draw(st.integers(min_rows, max_rows)), draw(st.integers(min_width, max_width))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    z = torch.randn(batch, d, generator=generator, dtype=torch.float64)
    if degenerate and draw(st.booleans()):
        z = z[torch.randint(batch, (batch,), generator=generator)]
    if degenerate and draw(st.booleans()):
        z = z * (torch.rand(d, generator=generator) > 0.4)
    return z * 10.0 ** draw(st.integers(*scales))


def rotation(d, seed=0):
    return torch.linalg.qr(draw(d, d, seed=seed))[0]


def order(number):
    return torch.from_numpy(np.random.default_rng(number).permutation(number))


def alike(first, second, **kwargs):
    torch.testing.assert_close(first, second, **{"rtol": 1e-6, "atol": 1e-9, **kwargs})


# ---------------------------------------------------------------- every loss
# the range of a loss of B rows of d numbers; any finite number for the others
SPANS = {
    "linear_cka": lambda b, d: (0, 1),
    "linear_cka debiased": lambda b, d: (-1, 1),
    "linear_ckas": lambda b, d: (0, 4),
    "rbf_cka": lambda b, d: (0, 1),
    "frobenius_similarity": lambda b, d: (-math.inf, 0),
    "cosine_similarity": lambda b, d: (-1, 1),
    "model_contrastive_loss": lambda b, d: (0, math.log(1 + math.exp(2 / 0.3))),
    "rbf_uniformity": lambda b, d: (0, 1),
    "probability_variance_hinge linear": lambda b, d: (0, d**-0.5),
    "probability_variance_hinge clamped_square": lambda b, d: (0, 1 / d),
    "correlation_frobenius": lambda b, d: (0, (b - 1) ** 2 / b if d > 1 else 0),
    "correlation_frobenius paper": lambda b, d: (0, (b - 1) ** 2 / b**2),
    "singular_value_variance": lambda b, d: (0, math.inf if b > 1 and d > 1 else 0),
    "covariance_decorrelation": lambda b, d: (0, math.inf if b > 1 and d > 1 else 0),
}


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("structured")])
@few
@given(z=rows())
def test_float32_stays_in_range_with_a_finite_gradient(name, z):
    narrow = z.float().requires_grad_()
    value = CASES[name](narrow, beside(narrow.detach()))
    (gradient,) = torch.autograd.grad(value, narrow)
    assert torch.isfinite(value) and torch.isfinite(gradient).all()
    low, high = SPANS.get(name, lambda b, d: (-math.inf, math.inf))(*z.shape)
    assert low - 1e-5 <= value.item() <= high + 1e-5 * max(1, abs(high))


# changes of the rows that leave a loss as it is
MOVES = {
    "turned": lambda z: z @ rotation(z.shape[1]),
    "scaled": lambda z: 50 * z,
    "negative": lambda z: -z,
    "shifted": lambda z: z + 3 * draw(1, z.shape[1], seed=7),
    "columns": lambda z: z[:, order(z.shape[1])],
    "each column scaled": lambda z: z * (-2.0) ** (torch.arange(z.shape[1]) % 3),
    "each row shifted": lambda z: z + torch.arange(len(z))[:, None],
}
CKA = ("turned", "scaled", "negative", "shifted", "columns")
OF_ONE = {
    **dict.fromkeys(["linear_cka", "linear_cka debiased", "linear_ckas", "rbf_cka"], CKA),
    **dict.fromkeys(["rbf_uniformity", "rbf_uniformity 2", "rbf_uniformity detached"], CKA),
    **dict.fromkeys(["cosine_similarity", "model_contrastive_loss", "model_contrastive_loss of two"], ("scaled",)),
    **dict.fromkeys(["correlation_frobenius", "correlation_frobenius paper"], ("shifted", "each column scaled")),
    **{f"probability_variance_hinge {hinge}": ("columns", "each row shifted") for hinge in HINGES},
    "singular_value_variance": ("turned", "negative", "shifted"),
    "covariance_decorrelation": ("negative", "shifted", "columns"),
    "structured_covariance_decorrelation": ("negative", "shifted"),
}
# changes of these rows and of what they are compared with
OF_ALL = {
    "frobenius_similarity": ("turned", "negative", "shifted", "columns"),
    "cosine_similarity": ("turned", "scaled", "negative"),
    "model_contrastive_loss": ("turned", "columns"),
    "prototype_distance": ("turned", "negative", "shifted"),
}


@pytest.mark.parametrize("name", OF_ONE)
@few
@given(z=rows(min_rows=4, min_width=3, degenerate=False, scales=(0, 2)))
def test_a_loss_does_not_change_with_the_rows(name, z):
    plain = CASES[name](z, beside(z))
    for move in OF_ONE[name]:
        alike(CASES[name](MOVES[move](z), beside(z)), plain, rtol=1e-5 if "correlation" in name else 1e-6)


@pytest.mark.parametrize("name", OF_ALL)
@few
@given(z=rows(min_rows=4, min_width=3, degenerate=False, scales=(0, 2)))
def test_a_comparison_does_not_change_with_both_sides(name, z):
    i = beside(z)
    for move in OF_ALL[name]:
        moved = {key: MOVES[move](i[key]) for key in ("other", "third", "prototypes")}
        alike(CASES[name](MOVES[move](z), i | moved), CASES[name](z, i))


@pytest.mark.parametrize("name", [name for name in CASES if name != "representation_contrast"])
@few
@given(z=rows(min_rows=2, min_width=2, scales=(-1, 1)))
def test_the_order_of_examples_does_not_matter(name, z):
    i, chosen = beside(z), order(len(z))
    moved = {key: i[key][chosen] for key in ("other", "third", "labels")}
    alike(CASES[name](z[chosen], i | moved), CASES[name](z, i))


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith(OF_LOGITS)])
@pytest.mark.parametrize("shape", [(5, 3, 4), (5, 3, 2, 2)], ids=["tokens", "maps"])
def test_representations_of_more_dimensions_are_flattened(name, shape):
    z = draw(*shape)
    z = z.to(memory_format=torch.channels_last) if z.ndim == 4 else z
    parts = [part.detach().requires_grad_() for part in (z, z.reshape(5, 12))]
    values = [CASES[name](part, beside(part.detach())) for part in parts]
    gradients = [torch.autograd.grad(value, part)[0] for value, part in zip(values, parts, strict=True)]
    alike(*values, rtol=1e-12)
    alike(gradients[0].reshape(5, 12), gradients[1], rtol=1e-9)
    assert torch.equal(F.covariance_spectrum(z), F.covariance_spectrum(z.reshape(5, 12)))


def test_a_number_for_each_example_is_a_row_of_one():
    assert torch.equal(F.as_rows(torch.arange(3.0)), torch.tensor([[0.0], [1.0], [2.0]]))
    assert F.correlation_frobenius(torch.randn(5)) == 0
    x, y = torch.randn(2, 5)
    for similarity in (F.linear_cka, partial(F.linear_cka, debiased=True), F.rbf_cka):
        assert torch.equal(similarity(x, y), similarity(x[:, None], y[:, None]))


# ---------------------------------------------------------------- similarities and contrasts
@few
@given(x=rows(min_rows=4, min_width=2, degenerate=False), factor=st.floats(0.1, 10))
def test_similarities_are_symmetric_and_largest_for_equal_arguments(x, factor):
    y = beside(x)["other"]
    for similarity in (F.linear_cka, F.rbf_cka, F.frobenius_similarity, F.cosine_similarity):
        alike(similarity(x, y), similarity(y, x))
        assert similarity(x, y) <= similarity(x, x) + 1e-12
    for similarity in (F.linear_cka, lambda x, y: F.linear_cka(x, y, debiased=True), F.rbf_cka, F.cosine_similarity):
        assert similarity(x, factor * x).item() == pytest.approx(1)
    assert F.frobenius_similarity(x, x).item() == 0
    alike(F.cosine_similarity(-x, y), -F.cosine_similarity(x, y))


@few
@given(z=rows(degenerate=False, scales=(-3, 3)), temperature=st.floats(0.1, 2), previous=st.integers(1, 4))
def test_moon_is_a_softmax_over_models_in_any_order(z, temperature, previous):
    near, *far = (draw(*z.shape, seed=seed) for seed in range(1, 2 + previous))
    plain = F.model_contrastive_loss(z, near, far, temperature)
    alike(F.model_contrastive_loss(z, near, far[::-1], temperature), plain)
    assert 0 <= plain.item() <= math.log(1 + previous * math.exp(2 / temperature)) + 1e-9
    assert F.model_contrastive_loss(z, near, far[:-1], temperature) < plain
    assert F.model_contrastive_loss(z, near, [near] * previous).item() == pytest.approx(math.log(1 + previous))


# ---------------------------------------------------------------- decorrelation and prototypes
@few
@given(z=rows(scales=(-2, 2)), classes=st.integers(1, 5), seed=st.integers(0, 99))
def test_class_sums_add_up_and_class_means_minimise_the_prototype_distance(z, classes, seed):
    targets = torch.randint(classes, (len(z),), generator=torch.Generator().manual_seed(seed))
    sums, counts = F.class_sums(z, targets, classes)
    alike(sums.sum(0), z.sum(0))
    assert counts.sum().item() == len(z)
    means, known = sums / counts.clamp_min(1), counts[:, 0] > 0
    least = F.prototype_distance(z, targets, means, known)
    assert 0 <= least < F.prototype_distance(z, targets, means + 0.1 * draw(*means.shape, seed=1), known)
    assert F.prototype_distance(means[targets], targets, means, known).item() == 0
    assert F.prototype_distance(z, targets, means, torch.zeros_like(known)).item() == 0


# ---------------------------------------------------------------- logits
@few
@given(o=rows(scales=(-2, 2)), counts=st.lists(st.integers(1, 1000), min_size=16, max_size=16), alpha=st.floats(0, 1))
def test_clients_with_all_classes_have_unrestricted_logits_and_the_same_margins(o, counts, alpha):
    n = torch.tensor(counts[: o.shape[1]])
    assert torch.equal(F.restricted_logits(o, n, alpha), o)
    alike(F.restricted_logits(o, n, 1.0, "frequency"), o)
    for margin in MARGINS:
        calibrated = [F.calibrated_logits(o, n, 0.5, missing, margin) for missing in MISSING]
        assert torch.equal(calibrated[0], calibrated[1]) and torch.equal(calibrated[0], calibrated[2])


@few
@given(o=rows(scales=(-2, 2)), count=st.integers(1, 1000), tau=st.floats(0, 5), alpha=st.floats(0, 1))
def test_equal_counts_leave_cross_entropy_unchanged(o, count, tau, alpha):
    n, labels = torch.full((o.shape[1],), count), torch.arange(len(o)) % o.shape[1]
    plain = cross_entropy(o, labels)
    for missing, margin in itertools.product(MISSING, MARGINS):
        alike(cross_entropy(F.calibrated_logits(o, n, tau, missing, margin), labels), plain)
    alike(F.restricted_logits(o, n, alpha, "frequency"), o)
