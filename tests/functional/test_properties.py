"""What holds for any shape, scale and degenerate batch: invariances, ranges, finiteness."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_lightning import functional as F

few = settings(max_examples=30, deadline=None, derandomize=True)


@st.composite
def rows(draw, min_rows=1, max_rows=12, min_width=1, max_width=16, degenerate=True, scales=(-6, 6)):
    """Rows ``(B, d)`` in float64 of any scale; now and then some are repeated, and some columns are dead."""
    batch, d = draw(st.integers(min_rows, max_rows)), draw(st.integers(min_width, max_width))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    found = torch.randn(batch, d, generator=generator, dtype=torch.float64)
    if degenerate and draw(st.booleans()):
        found = found[torch.randint(batch, (batch,), generator=generator)]
    if degenerate and draw(st.booleans()):
        found = found * (torch.rand(d, generator=generator) > 0.4)
    return found * 10.0 ** draw(st.integers(*scales))


def another(x, width=None, seed=1):
    """Independent rows beside ``x``."""
    generator = torch.Generator().manual_seed(seed + 100 * x.shape[0] + x.shape[1])
    return torch.randn(len(x), width or x.shape[1], generator=generator, dtype=torch.float64)


def rotation(d, seed=0):
    return torch.linalg.qr(another(torch.zeros(d, d), seed=seed))[0]


def order(number):
    return torch.from_numpy(np.random.default_rng(number).permutation(number))


def alike(first, second, **kwargs):
    torch.testing.assert_close(first, second, **{"rtol": 1e-6, "atol": 1e-9, **kwargs})


# ---------------------------------------------------------------- every loss: finite, with a finite gradient
LOSSES = {
    "linear_cka": lambda z: F.linear_cka(z, another(z, 4).to(z)),
    "linear_cka debiased": lambda z: F.linear_cka(z, another(z, 4).to(z), debiased=True),
    "linear_ckas": lambda z: F.linear_ckas(z, another(z).to(z), another(z, 3).to(z)).sum(),
    "rbf_cka": lambda z: F.rbf_cka(z, another(z, 4).to(z)),
    "frobenius_similarity": lambda z: F.frobenius_similarity(z, another(z).to(z)),
    "cosine_similarity": lambda z: F.cosine_similarity(z, another(z).to(z)),
    "representation_contrast": lambda z: F.representation_contrast(z.sum(), z[0, 0]),
    "model_contrastive_loss": lambda z: F.model_contrastive_loss(z, another(z).to(z), [another(z, seed=2).to(z)]),
    "model_contrastive_loss alone": lambda z: F.model_contrastive_loss(z, another(z).to(z)),
    "rbf_uniformity": F.rbf_uniformity,
    "rbf_uniformity detached": lambda z: F.rbf_uniformity(z, detach_bandwidth=True),
    "probability_variance_hinge": F.probability_variance_hinge,
    "correlation_frobenius": F.correlation_frobenius,
    "correlation_frobenius paper": lambda z: F.correlation_frobenius(z, "paper"),
    "covariance_decorrelation": F.covariance_decorrelation,
    "structured_covariance_decorrelation": lambda z: F.structured_covariance_decorrelation(z, 1 + z.shape[1] // 2),
    "prototype_distance": lambda z: F.prototype_distance(
        z, torch.arange(len(z)) % 3, another(torch.zeros(3, z.shape[1])).to(z), torch.tensor([True, False, True])
    ),
    "calibrated_logits": lambda z: F.calibrated_logits(z, torch.arange(z.shape[1])).logsumexp(1).sum(),
    "restricted_logits": lambda z: F.restricted_logits(z, torch.arange(z.shape[1])).logsumexp(1).sum(),
}
OTHERS = {"class_sums", "covariance_spectrum", "effective_rank", "eigenvalues", "singular_values", "stable_rank"}


def test_every_function_is_among_the_losses_or_has_properties_of_its_own():
    assert {name.split()[0] for name in LOSSES} | OTHERS == set(F.__all__)


@pytest.mark.parametrize("name", LOSSES)
@few
@given(z=rows())
def test_value_and_gradient_are_finite(name, z):
    narrow = z.float().requires_grad_()
    value = LOSSES[name](narrow)
    (gradient,) = torch.autograd.grad(value, narrow, allow_unused=name.endswith("alone"))
    assert torch.isfinite(value)
    assert gradient is None or torch.isfinite(gradient).all()


# ---------------------------------------------------------------- similarities
@pytest.mark.parametrize("cka", [F.linear_cka, lambda x, y: F.linear_cka(x, y, debiased=True), F.rbf_cka])
@few
@given(x=rows(min_rows=4, min_width=2, degenerate=False), exponent=st.integers(-3, 3))
def test_cka_does_not_see_rotation_isotropic_scale_or_shift(cka, x, exponent):
    y = another(x, 5)
    plain = cka(x, y)
    alike(cka(x @ rotation(x.shape[1]), y), plain)
    alike(cka(10.0**exponent * x, y), plain)
    alike(cka(x + 3 * x[0], y), plain, rtol=1e-4, atol=1e-6)
    alike(cka(y, x), plain)
    alike(cka(x[order(len(x))], y[order(len(x))]), plain)


@few
@given(x=rows(min_rows=2, min_width=2, degenerate=False))
def test_biased_ckas_lie_in_0_to_1_and_are_1_with_themselves(x):
    for cka in (F.linear_cka, F.rbf_cka):
        assert -1e-9 <= cka(x, another(x, 3)).item() <= 1 + 1e-9
        assert cka(x, x).item() == pytest.approx(1)


@few
@given(x=rows(degenerate=False))
def test_the_other_similarities_are_symmetric_and_largest_for_equals(x):
    y = another(x)
    for similarity in (F.frobenius_similarity, F.cosine_similarity):
        alike(similarity(x, y), similarity(y, x))
        assert similarity(x, y) <= similarity(x, x) + 1e-12
    assert F.frobenius_similarity(x, x).item() == 0
    assert F.cosine_similarity(x, 7 * x).item() == pytest.approx(1)
    assert -1 - 1e-9 <= F.cosine_similarity(x, y).item() <= 1 + 1e-9


# ---------------------------------------------------------------- contrasts
@few
@given(z=rows(degenerate=False, scales=(-3, 3)), factor=st.floats(0.1, 10), temperature=st.floats(0.1, 2))
def test_moon_sees_directions_only_and_orders_of_examples_and_models_do_not_matter(z, factor, temperature):
    near, far, third = another(z), another(z, seed=2), another(z, seed=3)
    plain = F.model_contrastive_loss(z, near, [far, third], temperature)
    alike(F.model_contrastive_loss(factor * z, near, [far, 3 * third], temperature), plain)
    alike(F.model_contrastive_loss(z, near, [third, far], temperature), plain)
    alike(F.model_contrastive_loss(z @ (r := rotation(z.shape[1])), near @ r, [far @ r, third @ r], temperature), plain)
    chosen = order(len(z))
    alike(F.model_contrastive_loss(z[chosen], near[chosen], [far[chosen], third[chosen]], temperature), plain)
    assert 0 <= plain.item() <= np.log(1 + 2 * np.exp(2 / temperature)) + 1e-9
    assert F.model_contrastive_loss(z, near, [near] * 2, temperature).item() == pytest.approx(np.log(3))


@few
@given(to_global=st.floats(-1, 1), to_previous=st.floats(-1, 1), shift=st.floats(-5, 5))
def test_fedckas_contrast_depends_on_the_difference_alone_and_rises_with_the_previous(to_global, to_previous, shift):
    first, second = torch.tensor([to_global, to_previous], dtype=torch.float64)
    value = F.representation_contrast(first, second)
    alike(F.representation_contrast(first + shift, second + shift), value)
    assert F.representation_contrast(first, second + 0.1) > value > F.representation_contrast(first + 0.1, second) > 0


# ---------------------------------------------------------------- uniformity and variance
@few
@given(z=rows(min_rows=2, degenerate=False), exponent=st.integers(-3, 3))
def test_uniformity_does_not_see_rotation_shift_order_or_scale(z, exponent):
    plain = F.rbf_uniformity(z)
    alike(F.rbf_uniformity(z @ rotation(z.shape[1])), plain)
    alike(F.rbf_uniformity(z + z[0]), plain, rtol=1e-4)
    alike(F.rbf_uniformity(z[order(len(z))]), plain)
    alike(F.rbf_uniformity(10.0**exponent * z), plain)
    assert 0 < plain.item() < 1
    assert F.rbf_uniformity(z, 2.0) > plain


@few
@given(o=rows(min_rows=2, min_width=2, scales=(-2, 2)), shift=st.floats(-5, 5))
def test_variance_does_not_see_order_or_a_shift_of_a_row_and_lies_in_its_range(o, shift):
    c = o.shape[1] ** -0.5
    for hinge, low, high in (("linear", 0, c), ("none", -1, c), ("square", 0, 1), ("clamped_square", 0, c**2)):
        plain = F.probability_variance_hinge(o, hinge)
        alike(F.probability_variance_hinge(o[order(len(o))][:, order(o.shape[1])], hinge), plain)
        alike(F.probability_variance_hinge(o + shift * torch.arange(len(o))[:, None], hinge), plain)
        assert low - 1e-9 <= plain.item() <= high + 1e-9


# ---------------------------------------------------------------- decorrelation
@few
@given(z=rows(min_rows=3, min_width=2, degenerate=False, scales=(0, 2)), factor=st.floats(0.5, 5))
def test_correlation_does_not_see_scale_sign_or_shift_of_a_column_or_order(z, factor):
    columns = factor * torch.where(torch.arange(z.shape[1]) % 2 == 0, 1.0, -2.0)
    for form in ("official", "paper"):
        plain = F.correlation_frobenius(z, form)
        alike(F.correlation_frobenius(z * columns, form), plain, rtol=1e-5)
        alike(F.correlation_frobenius(z + columns, form), plain, rtol=1e-5)
        alike(F.correlation_frobenius(z[order(len(z))][:, order(z.shape[1])], form), plain)
        assert plain.item() >= 0


@few
@given(z=rows(min_rows=2, min_width=2, scales=(-1, 1)), factor=st.floats(0.5, 3))
def test_covariance_does_not_see_shift_or_order_and_grows_with_the_fourth_power(z, factor):
    plain, groups = F.covariance_decorrelation(z), 1 + z.shape[1] // 2
    alike(F.covariance_decorrelation(z + z[0]), plain, rtol=1e-5)
    alike(F.covariance_decorrelation(z[order(len(z))][:, order(z.shape[1])]), plain)
    alike(F.covariance_decorrelation(factor * z), factor**4 * plain)
    between = F.structured_covariance_decorrelation(z, groups)
    assert -1e-9 <= between.item() <= plain.item() * (1 + 1e-9) + 1e-9
    # what gamma = 1 takes off is what groups leave out of DeCov
    inside = between - F.structured_covariance_decorrelation(z, groups, gamma=1.0)
    alike(between + inside, plain)
    assert F.structured_covariance_decorrelation(z, 1).item() == 0


# ---------------------------------------------------------------- prototypes
@few
@given(z=rows(scales=(-2, 2)), classes=st.integers(1, 5), seed=st.integers(0, 99))
def test_class_sums_add_up_and_prototypes_are_where_the_distance_is_least(z, classes, seed):
    targets = torch.randint(classes, (len(z),), generator=torch.Generator().manual_seed(seed))
    sums, counts = F.class_sums(z, targets, classes)
    alike(sums.sum(0), z.sum(0))
    assert counts.sum().item() == len(z)
    means, known = sums / counts.clamp_min(1), counts[:, 0] > 0
    least = F.prototype_distance(z, targets, means, known)
    moved = F.prototype_distance(z, targets, means + 0.1 * another(means), known)
    assert 0 <= least.item() <= moved.item() + 1e-12
    assert F.prototype_distance(means[targets], targets, means, known).item() == 0
    alike(F.prototype_distance(z + z[0], targets, means + z[0], known), least, rtol=1e-5)


# ---------------------------------------------------------------- logits
@few
@given(o=rows(scales=(-2, 2)), counts=st.lists(st.integers(1, 1000), min_size=16, max_size=16), alpha=st.floats(0, 1))
def test_logits_of_clients_that_lack_nothing(o, counts, alpha):
    n = torch.tensor(counts[: o.shape[1]])
    assert torch.equal(F.restricted_logits(o, n, alpha), o)
    alike(F.restricted_logits(o, n, 1.0, "frequency"), o)
    found = [F.calibrated_logits(o, n, 0.5, missing) for missing in ("floor", "mask", "clamp")]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    shift = o - found[0]
    alike(shift, shift[:1].expand_as(shift), atol=1e-7)  # one margin a class, whatever the example
    assert (shift[0][n.argsort()].diff() <= 1e-7).all()


# ---------------------------------------------------------------- spectra
@few
@given(m=rows(scales=(-3, 3)))
def test_singular_values_descend_and_do_not_see_rotation(m):
    found = F.singular_values(m)
    assert found.shape == (min(m.shape),)
    assert (found >= 0).all() and (found.diff() <= 0).all()
    turned = rotation(len(m)) @ m @ rotation(m.shape[1], seed=1)
    alike(F.singular_values(turned), found, atol=1e-9 * float(m.abs().max()) + 1e-12)
    alike(found.square().sum(), m.square().sum(), rtol=1e-8)


@few
@given(z=rows(scales=(-2, 2)), exponent=st.integers(-2, 2))
def test_the_spectrum_of_a_covariance_descends_and_grows_with_the_square(z, exponent):
    found, loose = F.covariance_spectrum(z), 1e-9 * float(z.square().max()) + 1e-15
    assert found.shape == (z.shape[1],)
    assert (found >= 0).all() and (found.diff() <= loose).all()
    alike(found.sum(), z.var(0, unbiased=False).sum(), rtol=1e-6, atol=loose)
    scale = 10.0**exponent
    alike(F.covariance_spectrum(scale * z), scale**2 * found, rtol=1e-5, atol=scale**2 * loose)
    alike(F.covariance_spectrum(z @ rotation(z.shape[1])), found, rtol=1e-5, atol=loose)
    centered = z - z.mean(0)
    alike(F.eigenvalues(centered.T @ centered / len(z)), found, rtol=1e-5, atol=loose)


@few
@given(values=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=20), exponent=st.integers(-9, 9))
def test_ranks_count_directions_whatever_the_scale(values, exponent):
    s = torch.tensor(sorted(values, reverse=True), dtype=torch.float64)
    for rank in (F.effective_rank, F.stable_rank):
        found = rank(s)
        assert 1 - 1e-9 <= found.item() <= len(s) + 1e-9
        alike(rank(10.0**exponent * s), found)
        alike(rank(torch.cat([s, torch.zeros(3, dtype=s.dtype)])), found)
        assert rank(torch.full_like(s, 2.5)).item() == pytest.approx(len(s))
