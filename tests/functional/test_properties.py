"""Properties for any shape, scale and degenerate batch: ranges, finiteness, invariances of value and gradient."""

import itertools
import math

import formulas
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from fl_lightning import functional as F

few = settings(max_examples=50, deadline=None, derandomize=True)
MISSING = ["floor", "mask", "clamp"]
MARGINS = ["fourth_root", "log_prior"]
HINGES = ["linear", "none", "square", "clamped_square"]


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


def another(x, width=None, seed=1):
    """Rows that are independent of ``x``, as many as it has."""
    generator = torch.Generator().manual_seed(seed + 100 * x.shape[0] + x.shape[1])
    return torch.randn(len(x), width or x.shape[1], generator=generator, dtype=torch.float64)


def rotation(d, seed=0):
    return torch.linalg.qr(another(torch.zeros(d, d), seed=seed))[0]


def order(number):
    return torch.from_numpy(np.random.default_rng(number).permutation(number))


def alike(first, second, **kwargs):
    torch.testing.assert_close(first, second, **{"rtol": 1e-6, "atol": 1e-9, **kwargs})


# ---------------------------------------------------------------- every loss: in its range, with a finite gradient
ANY = (-math.inf, math.inf)


def deviations(classes):
    """Standard deviation of a column of the identity, and the largest possible one of a column of probabilities."""
    return classes**-0.5, 0.5**0.5 if classes > 1 else 0


def fedlc(z, missing, margin="fourth_root"):
    counts = torch.arange(z.shape[1]).roll(-1)
    counts[0] = 5
    calibrated = F.calibrated_logits(z, counts, missing=missing, margin=margin)
    return cross_entropy(calibrated, torch.zeros(len(z), dtype=torch.long))


def fedrs(z, mode):
    counts = torch.arange(z.shape[1])
    return cross_entropy(F.restricted_logits(z, counts, mode=mode), torch.zeros(len(z), dtype=torch.long))


def fedproto(z):
    prototypes = another(torch.zeros(3, z.shape[1])).to(z)
    return F.prototype_distance(z, torch.arange(len(z)) % 3, prototypes, torch.tensor([True, False, True]))


# name to (loss, its range given B and d)
LOSSES = {
    "linear_cka": (lambda z: F.linear_cka(z, another(z, 4).to(z)), lambda b, d: (0, 1)),
    "linear_cka debiased": (lambda z: F.linear_cka(z, another(z, 4).to(z), debiased=True), lambda b, d: (-1, 1)),
    "linear_ckas": (lambda z: F.linear_ckas(z, another(z).to(z), another(z, 3).to(z)).sum(), lambda b, d: (0, 2)),
    "rbf_cka": (lambda z: F.rbf_cka(z, another(z, 4).to(z)), lambda b, d: (0, 1)),
    "frobenius_similarity": (lambda z: F.frobenius_similarity(z, another(z).to(z)), lambda b, d: (-math.inf, 0)),
    "cosine_similarity": (lambda z: F.cosine_similarity(z, another(z).to(z)), lambda b, d: (-1, 1)),
    "representation_contrast": (
        lambda z: F.representation_contrast(z.sum(), z[0, 0]),
        lambda b, d: (0, math.inf),
    ),
    "model_contrastive_loss": (
        lambda z: F.model_contrastive_loss(z, another(z).to(z), [another(z, seed=2).to(z)]),
        lambda b, d: (0, math.log(1 + math.exp(4))),
    ),
    "model_contrastive_loss alone": (lambda z: F.model_contrastive_loss(z, another(z).to(z)), lambda b, d: (0, 0)),
    "rbf_uniformity": (F.rbf_uniformity, lambda b, d: (0, 1)),
    "rbf_uniformity detached": (lambda z: F.rbf_uniformity(z, 2.0, detach_bandwidth=True), lambda b, d: (0, 1)),
    "probability_variance_hinge linear": (F.probability_variance_hinge, lambda b, d: (0, deviations(d)[0])),
    "probability_variance_hinge none": (
        lambda z: F.probability_variance_hinge(z, "none"),
        lambda b, d: (min(0, deviations(d)[0] - deviations(d)[1]), deviations(d)[0]),
    ),
    "probability_variance_hinge square": (
        lambda z: F.probability_variance_hinge(z, "square"),
        lambda b, d: (0, max(deviations(d)[0], deviations(d)[1] - deviations(d)[0]) ** 2),
    ),
    "probability_variance_hinge clamped_square": (
        lambda z: F.probability_variance_hinge(z, "clamped_square"),
        lambda b, d: (0, deviations(d)[0] ** 2),
    ),
    "correlation_frobenius": (F.correlation_frobenius, lambda b, d: (0, (b - 1) ** 2 / b if d > 1 else 0)),
    "correlation_frobenius paper": (
        lambda z: F.correlation_frobenius(z, "paper"),
        lambda b, d: (0, (b - 1) ** 2 / b**2),
    ),
    "singular_value_variance": (
        F.singular_value_variance,
        lambda b, d: (0, math.inf if b > 1 and d > 1 else 0),
    ),
    "covariance_decorrelation": (F.covariance_decorrelation, lambda b, d: (0, math.inf if b > 1 and d > 1 else 0)),
    "structured_covariance_decorrelation": (
        lambda z: F.structured_covariance_decorrelation(z, 1 + z.shape[1] // 2),
        lambda b, d: (0, math.inf if b > 1 and d > 1 else 0),
    ),
    "structured_covariance_decorrelation inside": (
        lambda z: F.structured_covariance_decorrelation(z, 1, gamma=0.5),
        lambda b, d: (-math.inf, 0),
    ),
    "prototype_distance": (fedproto, lambda b, d: (0, math.inf)),
    **{f"calibrated_logits {missing}": (lambda z, m=missing: fedlc(z, m), lambda b, d: ANY) for missing in MISSING},
    **{
        f"calibrated_logits {missing} log_prior": (lambda z, m=missing: fedlc(z, m, "log_prior"), lambda b, d: ANY)
        for missing in MISSING
    },
    **{
        f"restricted_logits {mode}": (lambda z, m=mode: fedrs(z, m), lambda b, d: ANY)
        for mode in ("binary", "frequency")
    },
}


def test_every_function_is_among_the_losses_or_has_properties_of_its_own():
    assert {name.split()[0] for name in LOSSES} | formulas.ELSEWHERE == set(F.__all__)


OF_REPRESENTATIONS = {
    "model_contrastive_loss": lambda z: F.model_contrastive_loss(z, z.roll(1, 0), [z.flip(0)]),
    "rbf_uniformity": F.rbf_uniformity,
    "correlation_frobenius": F.correlation_frobenius,
    "correlation_frobenius paper": lambda z: F.correlation_frobenius(z, "paper"),
    "singular_value_variance": F.singular_value_variance,
    "covariance_decorrelation": F.covariance_decorrelation,
    "structured_covariance_decorrelation": lambda z: F.structured_covariance_decorrelation(z, 4, 0.5),
    "prototype_distance": lambda z: F.prototype_distance(
        z, torch.tensor([0, 1, 0, 1, 1]), torch.ones(2, 12), torch.tensor([True, False])
    ),
    "class_sums": lambda z: F.class_sums(z, torch.tensor([0, 1, 0, 1, 1]), 2)[0],
    "linear_cka": lambda z: F.linear_cka(z, z.flip(0)),
    "rbf_cka": lambda z: F.rbf_cka(z, z.flip(0)),
    "covariance_spectrum": F.covariance_spectrum,
}


@pytest.mark.parametrize("name", OF_REPRESENTATIONS)
@pytest.mark.parametrize("shape", [(5, 3, 4), (5, 3, 2, 2)], ids=["tokens", "maps"])
def test_representations_of_more_dimensions_are_flattened(name, shape):
    function, z = OF_REPRESENTATIONS[name], torch.randn(*shape)
    assert torch.equal(function(z), function(z.reshape(5, 12)))
    assert torch.equal(F.as_rows(z), z.reshape(5, 12))


def test_a_number_for_each_example_is_a_row_of_one():
    assert torch.equal(F.as_rows(torch.arange(3.0)), torch.tensor([[0.0], [1.0], [2.0]]))
    assert F.correlation_frobenius(torch.randn(5)) == 0


@pytest.mark.parametrize("name", LOSSES)
@few
@given(z=rows())
def test_float32_stays_in_range_with_a_finite_gradient(name, z):
    loss, span = LOSSES[name]
    narrow = z.float().requires_grad_()
    value = loss(narrow)
    (gradient,) = torch.autograd.grad(value, narrow)
    assert torch.isfinite(value) and torch.isfinite(gradient).all()
    low, high = span(*z.shape)
    assert low - 1e-5 <= value.item() <= high + 1e-5 * max(1, abs(high))


def slope(loss, x):
    """The gradient times the largest entry of x, so that its size does not depend on the scale of x."""
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(x), x)
    return gradient * x.detach().abs().max()


SHIFTED = ["linear_cka", "linear_cka debiased", "rbf_cka", "rbf_uniformity", "correlation_frobenius"]
SCALED = ["linear_cka", "linear_cka debiased", "cosine_similarity", "model_contrastive_loss", "rbf_uniformity"]


@pytest.mark.parametrize("name", SHIFTED)
@few
@given(z=rows(min_rows=4, min_width=2, degenerate=False, scales=(-1, 1)))
def test_gradients_of_shift_invariant_losses_sum_to_0_over_the_examples(name, z):
    gradients = slope(LOSSES[name][0], z)
    alike(gradients.sum(0), torch.zeros_like(gradients[0]), atol=1e-9 * max(1.0, float(gradients.abs().max())))
    assert gradients.any()


@pytest.mark.parametrize("name", SCALED)
@few
@given(z=rows(min_rows=4, min_width=2, degenerate=False))
def test_gradients_of_scale_invariant_losses_are_orthogonal_to_the_input(name, z):
    gradients = slope(LOSSES[name][0], z)
    along = (gradients * z).sum() / z.abs().max()
    assert abs(along.item()) <= 1e-9 * max(1.0, float(gradients.abs().max()))
    assert gradients.any()


@few
@given(z=rows(min_rows=2, min_width=2, scales=(-1, 1)))
def test_homogeneous_losses_satisfy_eulers_identity(z):
    for degree, loss in (
        (4, F.covariance_decorrelation),
        (4, F.singular_value_variance),
        (4, lambda z: F.structured_covariance_decorrelation(z, 2, 0.7)),
        (2, lambda z: F.frobenius_similarity(z, torch.zeros_like(z))),
    ):
        x = z.clone().requires_grad_()
        value = loss(x)
        (gradient,) = torch.autograd.grad(value, x)
        alike((gradient * z).sum(), degree * value.detach(), rtol=1e-8, atol=1e-12)


@few
@given(o=rows(min_rows=2, min_width=2, scales=(-2, 1)), hinge=st.sampled_from(HINGES))
def test_gradients_of_the_variance_hinge_sum_to_0_over_the_logits_of_an_example(o, hinge):
    gradients = slope(lambda o: F.probability_variance_hinge(o, hinge), o)
    alike(gradients.sum(1), torch.zeros(len(o)).double())


# ---------------------------------------------------------------- similarities
@pytest.mark.parametrize(
    "cka", [F.linear_cka, lambda x, y: F.linear_cka(x, y, debiased=True), F.rbf_cka], ids=["linear", "debiased", "rbf"]
)
@few
@given(
    x=rows(min_rows=4, min_width=2, degenerate=False), exponent=st.integers(-3, 3), width=st.sampled_from([1, 5, 20])
)
def test_cka_is_invariant_to_rotation_isotropic_scale_shift_and_order(cka, x, exponent, width):
    y = another(x, width)
    plain = cka(x, y)
    alike(cka(x @ rotation(x.shape[1]), y), plain)
    alike(cka(-(10.0**exponent) * x, y), plain)
    alike(cka(x + 3 * x[0], y), plain, rtol=1e-4, atol=1e-6)
    alike(cka(x[:, order(x.shape[1])], y), plain)
    alike(cka(x[order(len(x))], y[order(len(x))]), plain)
    alike(cka(y, x), plain)
    assert cka(x, x).item() == pytest.approx(1)


@few
@given(x=rows(min_rows=2, min_width=2, degenerate=False))
def test_biased_cka_of_activations_with_themselves_is_1(x):
    for cka in (F.linear_cka, F.rbf_cka):
        assert cka(x, 7 * x).item() == pytest.approx(1)


@few
@given(x=rows(degenerate=False), factor=st.floats(0.1, 10))
def test_other_similarities_are_symmetric_and_largest_for_equal_arguments(x, factor):
    y = another(x)
    for similarity in (F.frobenius_similarity, F.cosine_similarity):
        alike(similarity(x, y), similarity(y, x))
        alike(similarity(x @ rotation(x.shape[1]), y @ rotation(x.shape[1])), similarity(x, y))
        assert similarity(x, y) <= similarity(x, x) + 1e-12
    alike(F.frobenius_similarity(x + factor, y + factor), F.frobenius_similarity(x, y))
    alike(F.frobenius_similarity(factor * x, factor * y), factor**2 * F.frobenius_similarity(x, y))
    assert F.frobenius_similarity(x, x).item() == 0
    alike(F.cosine_similarity(factor * x, y), F.cosine_similarity(x, y))
    alike(F.cosine_similarity(-x, y), -F.cosine_similarity(x, y))
    assert F.cosine_similarity(x, factor * x).item() == pytest.approx(1)


# ---------------------------------------------------------------- contrasts
@few
@given(
    z=rows(degenerate=False, scales=(-3, 3)),
    factor=st.floats(0.1, 10),
    temperature=st.floats(0.1, 2),
    previous=st.integers(1, 4),
)
def test_moon_depends_on_directions_alone_and_not_on_the_order_of_examples_or_models(z, factor, temperature, previous):
    near, *far = (another(z, seed=seed) for seed in range(1, 2 + previous))
    turn, chosen = rotation(z.shape[1]), order(len(z))
    plain = F.model_contrastive_loss(z, near, far, temperature)
    for ours, theirs, others in (
        (factor * z, near, far),
        (z, factor * near, far),
        (z, near, [*far[:-1], factor * far[-1]]),
        (z, near, far[::-1]),
        (z @ turn, near @ turn, [other @ turn for other in far]),
        (z[chosen], near[chosen], [other[chosen] for other in far]),
    ):
        alike(F.model_contrastive_loss(ours, theirs, others, temperature), plain)
    assert 0 <= plain.item() <= math.log(1 + previous * math.exp(2 / temperature)) + 1e-9
    assert F.model_contrastive_loss(z, near, far[:-1], temperature) < plain
    assert F.model_contrastive_loss(z, near, [near] * previous).item() == pytest.approx(math.log(1 + previous))


@few
@given(to_global=st.floats(0, 1), to_previous=st.floats(0, 1), shift=st.floats(-5, 5))
def test_fedckas_contrast_depends_on_the_difference_and_rises_with_similarity_to_previous(
    to_global, to_previous, shift
):
    first, second = torch.tensor([to_global, to_previous], dtype=torch.float64)
    value = F.representation_contrast(first, second)
    alike(F.representation_contrast(first + shift, second + shift), value)
    assert F.representation_contrast(first, second + 0.1) > value > F.representation_contrast(first + 0.1, second)
    # the softmax of the two similarities sums to 1
    alike(torch.exp(-value) + torch.exp(-F.representation_contrast(second, first)), torch.ones_like(value))
    assert 0.3132 < value.item() < 1.3133


# ---------------------------------------------------------------- uniformity and variance
@few
@given(z=rows(min_rows=2, degenerate=False), exponent=st.integers(-3, 3), detach=st.booleans())
def test_uniformity_is_invariant_to_rotation_shift_order_and_scale(z, exponent, detach):
    plain = F.rbf_uniformity(z, 1.0, detach)
    for moved in (
        z @ rotation(z.shape[1]),
        z[order(len(z))],
        z[:, order(z.shape[1])],
        -(10.0**exponent) * z,
    ):
        alike(F.rbf_uniformity(moved, 1.0, detach), plain)
    alike(F.rbf_uniformity(z + z[0], 1.0, detach), plain, rtol=1e-4)
    # at least half of the pairs are at most the median apart
    assert math.exp(-1) / 2 <= plain.item() < 1
    assert F.rbf_uniformity(z, 2.0, detach) > plain


@few
@given(o=rows(min_rows=2, scales=(-2, 2)), shift=st.floats(-5, 5))
def test_variance_is_invariant_to_order_and_to_a_shift_of_a_row(o, shift):
    for hinge in HINGES:
        plain = F.probability_variance_hinge(o, hinge)
        alike(F.probability_variance_hinge(o[order(len(o))][:, order(o.shape[1])], hinge), plain)
        alike(F.probability_variance_hinge(o + shift * torch.arange(len(o))[:, None], hinge), plain)


# ---------------------------------------------------------------- decorrelation
@few
@given(z=rows(min_rows=2, min_width=2, degenerate=False, scales=(2, 4)), factor=st.floats(0.5, 5))
def test_correlation_is_invariant_to_scale_sign_and_shift_of_a_column_and_to_order(z, factor):
    columns = factor * another(z[:1]).sign() * torch.linspace(1, 3, z.shape[1])
    for form in ("official", "paper"):
        plain = F.correlation_frobenius(z, form)
        # at this scale, variances are far above the constant that is added to them
        alike(F.correlation_frobenius(z * columns, form), plain, rtol=1e-5)
        alike(F.correlation_frobenius(z + columns, form), plain, rtol=1e-5)
        alike(F.correlation_frobenius(z[order(len(z))][:, order(z.shape[1])], form), plain)


@few
@given(z=rows(min_rows=2, min_width=2, scales=(-1, 1)), factor=st.floats(0.5, 3))
def test_covariance_is_invariant_to_shift_and_order_and_grows_with_the_fourth_power(z, factor):
    plain, groups = F.covariance_decorrelation(z), 1 + z.shape[1] // 2
    alike(F.covariance_decorrelation(z + z[0]), plain, rtol=1e-5)
    alike(F.covariance_decorrelation(z[order(len(z))][:, order(z.shape[1])]), plain)
    alike(F.covariance_decorrelation(factor * z), factor**4 * plain)
    between = F.structured_covariance_decorrelation(z, groups)
    assert between.item() <= plain.item() * (1 + 1e-9)
    # what gamma = 1 subtracts is what grouping leaves out of DeCov
    inside = between - F.structured_covariance_decorrelation(z, groups, gamma=1.0)
    alike(between + inside, plain)
    assert F.structured_covariance_decorrelation(z, 1).item() == 0


# ---------------------------------------------------------------- prototypes
@few
@given(z=rows(scales=(-2, 2)), classes=st.integers(1, 5), seed=st.integers(0, 99))
def test_class_sums_add_up_and_class_means_minimise_the_prototype_distance(z, classes, seed):
    targets = torch.randint(classes, (len(z),), generator=torch.Generator().manual_seed(seed))
    sums, counts = F.class_sums(z, targets, classes)
    alike(sums.sum(0), z.sum(0))
    assert counts.sum().item() == len(z)
    chosen = order(len(z))
    for value, expected in zip(F.class_sums(z[chosen], targets[chosen], classes), (sums, counts), strict=True):
        alike(value, expected)
    means, known = sums / counts.clamp_min(1), counts[:, 0] > 0
    least = F.prototype_distance(z, targets, means, known)
    moved = F.prototype_distance(z, targets, means + 0.1 * another(means), known)
    assert 0 <= least < moved
    alike(F.prototype_distance(z + z[0], targets, means + z[0], known), least, rtol=1e-5)
    alike(F.prototype_distance(z[chosen], targets[chosen], means, known), least)
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


@few
@given(
    o=rows(max_width=12, scales=(-2, 2)),
    counts=st.lists(st.integers(0, 10**6), min_size=12, max_size=12),
    tau=st.floats(0.01, 10),
    missing=st.sampled_from(MISSING),
    margin=st.sampled_from(MARGINS),
)
def test_rarer_classes_have_larger_margins_for_every_example(o, counts, tau, missing, margin):
    n = torch.tensor(counts[: o.shape[1]])
    lowered = o - F.calibrated_logits(o, n, tau, missing, margin)
    present = n > 0
    alike(lowered[:, present], lowered[:1, present].expand(len(o), -1))
    margins = lowered[0][n.argsort()]
    assert (margins[:-1] >= margins[1:] - 1e-9).all()
    assert (margins > (0 if margin == "fourth_root" else -1e-9)).all()  # a class of share 1 has no margin
    assert torch.isfinite(lowered[:, present]).all() and torch.isinf(lowered[:, ~present]).all() == (
        missing == "mask" or bool(present.all())
    )


@few
@given(o=rows(scales=(-2, 2)), counts=st.lists(st.integers(0, 50), min_size=16, max_size=16), alpha=st.floats(0, 1))
def test_restricted_logits_are_scaled_by_factors_between_alpha_and_1(o, counts, alpha):
    n = torch.tensor(counts[: o.shape[1]])
    for mode in ("binary", "frequency"):
        restricted = F.restricted_logits(o, n, alpha, mode)
        assert (restricted * o >= 0).all()
        assert (restricted.abs() <= o.abs() * (1 + 1e-12)).all() and (
            restricted.abs() >= alpha * o.abs() * (1 - 1e-12)
        ).all()
        alike(restricted[:, n == 0], alpha * o[:, n == 0])
        if n.any():
            assert torch.equal(restricted[:, n.argmax()], o[:, n.argmax()])


# ---------------------------------------------------------------- spectra
@few
@given(m=rows(scales=(-3, 3)), exponent=st.integers(-3, 3))
def test_singular_values_descend_and_are_invariant_to_rotation(m, exponent):
    values, loose = F.singular_values(m), 1e-9 * float(m.abs().max())
    assert values.shape == (min(m.shape),)
    assert (values >= 0).all() and (values.diff() <= 0).all()
    alike(F.singular_values(rotation(len(m)) @ m @ rotation(m.shape[1], seed=1)), values, atol=loose)
    alike(F.singular_values(m.T), values, atol=loose)
    alike(F.singular_values(-(10.0**exponent) * m), 10.0**exponent * values, atol=10.0**exponent * loose)
    alike(values.square().sum(), m.square().sum(), rtol=1e-8)


@few
@given(z=rows(scales=(-2, 2)), exponent=st.integers(-2, 2))
def test_the_spectrum_of_a_covariance_descends_and_grows_with_the_square(z, exponent):
    spectrum, loose = F.covariance_spectrum(z), 1e-9 * float(z.square().max())
    assert spectrum.shape == (z.shape[1],)
    assert (spectrum >= 0).all() and (spectrum.diff() <= 0).all()
    alike(spectrum.sum(), z.var(0, unbiased=False).sum(), atol=loose)
    scale = 10.0**exponent
    alike(F.covariance_spectrum(scale * z), scale**2 * spectrum, atol=scale**2 * loose)
    alike(F.covariance_spectrum(z @ rotation(z.shape[1])), spectrum, atol=loose)
    alike(F.covariance_spectrum(z + z[0]), spectrum, atol=loose)
    alike(F.covariance_spectrum(z[order(len(z))]), spectrum, atol=loose)


@few
@given(values=st.lists(st.floats(0, 1e6), min_size=1, max_size=12))
def test_eigenvalues_of_a_rotated_diagonal_are_its_entries_sorted(values):
    s = torch.tensor(values, dtype=torch.float64)
    turn = rotation(len(s))
    computed = F.eigenvalues(turn @ torch.diag(s) @ turn.T)
    assert (computed >= 0).all()
    alike(computed, s.sort(descending=True).values, atol=1e-9 * max(values) + 1e-30)


@few
@given(
    values=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=20),
    exponent=st.integers(-9, 9),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_ranks_are_invariant_to_scale_order_and_zeros(values, exponent, dtype):
    s = torch.tensor(values, dtype=dtype)
    near = {"rtol": 1e-9 if dtype == torch.float64 else 1e-4}
    effective, stable = F.effective_rank(s), F.stable_rank(s)
    for rank, count in ((F.effective_rank, effective), (F.stable_rank, stable)):
        assert 1 - near["rtol"] <= count.item() <= len(s) * (1 + near["rtol"])
        alike(rank(10.0**exponent * s), count, **near)
        alike(rank(s[order(len(s))]), count, **near)
        alike(rank(torch.cat([s, torch.zeros(3, dtype=dtype)])), count, **near)
        assert rank(torch.full_like(s, 2.5)).item() == pytest.approx(len(s), rel=near["rtol"])
