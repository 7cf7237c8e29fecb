"""Every loss and transform against NumPy: its value by the formula, its gradient by central differences."""

import itertools

import formulas
import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from fl_lightning import functional as F

# (B, d): more examples than dimensions, fewer, one, two, a small odd last batch
SHAPES = [(8, 3), (4, 9), (1, 4), (2, 5), (3, 4)]
HINGES = ["linear", "none", "square", "clamped_square"]


def cases(batch, d, dead=False):
    """Name to (our function, NumPy's, input); only two classes have labels, and some have no examples or prototype."""
    rng = np.random.default_rng(batch * 100 + d)
    # numbers that bf16 represents exactly, so that the other arguments are the same in every precision
    x, other, third = torch.from_numpy(rng.normal(size=(3, batch, d))).bfloat16().double().numpy()
    if dead:
        x[:, 1] = 0
    y, counts = rng.choice([0, 2], batch), np.array([3, 0, 40, 1, 0, 7, 2, 9, 30])[:d]
    t, known = rng.normal(size=(d, d)), np.arange(d) % 3 != 2
    labels, n = torch.from_numpy(y), torch.from_numpy(counts)
    near, far = ((lambda x, value=value: torch.from_numpy(value).to(x)) for value in (other, third))
    medians = [formulas.median_of_all(rows) for rows in (x, other)]
    pairs = {
        "linear_cka": (lambda x: F.linear_cka(x, near(x)), lambda x: formulas.linear_cka(x, other)),
        "linear_ckas": (
            lambda x: (F.linear_ckas(x, near(x), far(x)) * torch.tensor([1, 3])).sum(),
            lambda x: formulas.linear_cka(x, other) + 3 * formulas.linear_cka(x, third),
        ),
        "linear_cka debiased": (
            lambda x: F.linear_cka(x, near(x), debiased=True),
            lambda x: formulas.debiased_cka(x, other),
        ),
        "rbf_cka": (
            lambda x: F.rbf_cka(x, near(x), 0.7),
            lambda x: formulas.rbf_cka(x, other, 0.7, medians) if batch > 1 else 0.0,
        ),
        "frobenius_similarity": (
            lambda x: F.frobenius_similarity(x, near(x)),
            lambda x: -((x - other) ** 2).mean(),
        ),
        "cosine_similarity": (
            lambda x: F.cosine_similarity(x, near(x)),
            lambda x: formulas.cosine(x.ravel(), other.ravel()),
        ),
        "representation_contrast": (
            lambda x: F.representation_contrast(x[0, 0], x[0, 1]),
            lambda x: -np.log(np.exp(x[0, 0]) / (np.exp(x[0, 0]) + np.exp(x[0, 1]))),
        ),
        "model_contrastive_loss": (
            lambda x: F.model_contrastive_loss(x, near(x), [far(x)], 0.3),
            lambda x: formulas.moon(x, [other, third], 0.3),
        ),
        "model_contrastive_loss two previous": (
            lambda x: F.model_contrastive_loss(x, near(x), (far(x), near(x))),
            lambda x: formulas.moon(x, [other, third, other], 0.5),
        ),
        "singular_value_variance": (F.singular_value_variance, formulas.spread_of_singular_values),
        "covariance_decorrelation": (F.covariance_decorrelation, lambda x: formulas.covariance_penalty(x, d)),
        "structured_covariance_decorrelation": (
            lambda x: F.structured_covariance_decorrelation(x, 2, 0.3),
            lambda x: formulas.covariance_penalty(x, 2, 0.3),
        ),
        "prototype_distance": (
            lambda x: F.prototype_distance(x, labels, torch.from_numpy(t), torch.from_numpy(known)),
            lambda x: formulas.prototype_distance(x, y, t, known),
        ),
        # variances as small as the constant that is added to them
        "correlation_frobenius faint": (
            lambda x: F.correlation_frobenius(2**-13 * x),
            lambda x: formulas.decorrelation(2**-13 * x),
        ),
    }
    for form in ("official", "paper"):
        pairs[f"correlation_frobenius {form}"] = (
            lambda x, form=form: F.correlation_frobenius(x, form),
            lambda x, form=form: formulas.decorrelation(x, form),
        )
    for hinge in HINGES:
        pairs[f"probability_variance_hinge {hinge}"] = (
            lambda x, hinge=hinge: F.probability_variance_hinge(x, hinge),
            lambda x, hinge=hinge: formulas.variance(x, hinge),
        )
    for factor, detach in ((1.0, False), (2.0, False), (1.0, True)):
        sigma = formulas.width(x) if detach and batch > 1 else None
        pairs[f"rbf_uniformity {factor}{' detached' * detach}"] = (
            lambda x, factor=factor, detach=detach: F.rbf_uniformity(x, factor, detach),
            lambda x, factor=factor, sigma=sigma: formulas.uniformity(x, factor, sigma),
        )
    for missing, margin in itertools.product(("floor", "mask", "clamp"), ("fourth_root", "log_prior")):
        how = (missing, margin)
        pairs[f"calibrated_logits {missing} {margin}"] = (
            lambda x, how=how: cross_entropy(F.calibrated_logits(x, n, 0.4, *how), labels),
            lambda x, how=how: formulas.fedlc(x, counts, 0.4, how[0], y, how[1]),
        )
    for mode in ("binary", "frequency"):
        pairs[f"restricted_logits {mode}"] = (
            lambda x, mode=mode: cross_entropy(F.restricted_logits(x, n, 0.3, mode), labels),
            lambda x, mode=mode: formulas.cross_entropy(formulas.restricted(x, counts, 0.3, mode), y),
        )
    return {name: (*pair, x) for name, pair in pairs.items()}


NAMES = list(cases(8, 3))


def test_every_function_has_a_reference():
    assert {name.split()[0] for name in NAMES} | formulas.ELSEWHERE == set(F.__all__)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("shape", "dead"), [(shape, False) for shape in SHAPES] + [((8, 3), True), ((4, 9), True)], ids=str
)
def test_value_and_gradient(name, shape, dead):
    ours, theirs, x = cases(*shape, dead)[name]
    rows = torch.from_numpy(x).requires_grad_()
    value = ours(rows)
    (gradient,) = torch.autograd.grad(value, rows)
    assert value.dtype == torch.float64
    assert value.item() == pytest.approx(theirs(x), rel=1e-8, abs=1e-9)
    np.testing.assert_allclose(gradient.numpy(), formulas.differences(theirs, x), rtol=1e-5, atol=2e-8)


def value_and_gradient(loss, rows, autocast):
    """Only the forward pass runs under autocast, as in training."""
    rows = rows.detach().clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        value = loss(rows)
    return value.detach(), torch.autograd.grad(value, rows)[0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(8, 3), (4, 9), (3, 4)], ids=str)
def test_bf16_autocast_converts_to_float32_and_computes_in_it(name, shape):
    ours, theirs, x = cases(*shape)[name]
    wide = torch.from_numpy(x).float()
    value, gradient = value_and_gradient(ours, wide, autocast=False)
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(theirs(x), rel=1e-4, abs=1e-5)
    # the input is exact in bf16, so that all bits of the results must agree
    for rows in (wide, wide.bfloat16()):
        narrow_value, narrowed = value_and_gradient(ours, rows, autocast=True)
        assert narrow_value.dtype == torch.float32 and torch.equal(narrow_value, value)
        assert torch.equal(narrowed, gradient.to(rows.dtype))
