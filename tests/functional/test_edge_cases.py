"""Losses of few, equal, huge and tiny rows; bad arguments, which are refused before anything is computed."""

import doctest
import math
import sys

import numpy as np
import pytest
import torch
from cases import CASES, HINGES, beside, draw
from helpers.errors import refused

from fl_lightning import functional as F

ZERO_FOR_ONE_ROW = [
    *("linear_cka", "linear_ckas", "rbf_cka", "rbf_uniformity", "rbf_uniformity detached", "correlation_frobenius"),
    *("correlation_frobenius paper", "singular_value_variance", "probability_variance_hinge linear"),
]


@pytest.mark.parametrize(
    ("name", "batches"), [("linear_cka debiased", (0, 1, 2, 3)), *((name, (0, 1)) for name in ZERO_FOR_ONE_ROW)]
)
def test_a_batch_too_small_gives_a_zero_in_the_graph(name, batches):
    for batch in batches:
        z = torch.full((batch, 4), torch.inf, requires_grad=True)
        others = {key: draw(batch, 6).requires_grad_() for key in ("other", "third")}
        value = CASES[name](z, others)
        value.backward()
        assert value.item() == 0
        assert torch.equal(z.grad, torch.zeros_like(z))
        assert all(other.grad is None or not other.grad.any() for other in others.values())


@pytest.mark.parametrize("name", [name for name in ZERO_FOR_ONE_ROW if "variance" not in name or "hinge" in name])
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1e15])
def test_value_and_gradient_are_finite_at_any_scale(name, scale):
    for shape in ((9, 5), (4, 30)):
        z = (torch.randn(shape) * scale).requires_grad_()
        value = CASES[name](z, beside(z.detach()))
        value.backward()
        assert torch.isfinite(value) and torch.isfinite(z.grad).all()


@pytest.mark.parametrize(
    "name", ["linear_cka", "linear_cka debiased", "rbf_cka", "rbf_uniformity", "rbf_uniformity detached"]
)
def test_equal_rows_give_exactly_0_without_gradient(name):
    for shape in ((7, 3), (7, 40)):
        x = torch.full(shape, 0.1, requires_grad=True)
        others = {"other": torch.randn(shape, requires_grad=True)}
        value = CASES[name](x, others)
        value.backward()
        assert value.item() == 0 and not x.grad.any()
        assert others["other"].grad is None or torch.isfinite(others["other"].grad).all()


def test_keyword_arguments_leave_autocast_too():
    z = torch.randn(8, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(F.correlation_frobenius(z=z), F.correlation_frobenius(z))


# ---------------------------------------------------------------- contrasts
def test_moon_without_previous_models_is_a_zero_in_the_graph():
    z = torch.full((3, 4), torch.inf, requires_grad=True)
    value = F.model_contrastive_loss(z, z.detach())
    value.backward()
    assert value.item() == 0 and torch.equal(z.grad, torch.zeros_like(z))


# ---------------------------------------------------------------- variance
def test_hinges_differ_where_a_class_varies_more_than_the_identity():
    # two classes alternate and deviate by 1/sqrt(2), more than the identity's 1/sqrt(3); the third stays at 0
    logits = 100 * torch.tensor([[1.0, 0, 0], [0, 1, 0]]).double()
    gap = torch.tensor([1 / math.sqrt(3) - math.sqrt(0.5)] * 2 + [1 / math.sqrt(3)]).double()
    expected = [gap.relu().mean(), gap.mean(), gap.square().mean(), gap.relu().square().mean()]
    for hinge, value in zip(HINGES, expected, strict=True):
        assert F.probability_variance_hinge(logits, hinge).item() == pytest.approx(value.item(), rel=1e-6)


@pytest.mark.parametrize("hinge", HINGES)
def test_equal_predictions_give_c_without_gradient_and_those_near_underflow_a_finite_one(hinge):
    power = 2 if "square" in hinge else 1
    for row in ([200.0, 0, -200], [0.1] * 7, [0.1] * 65):
        logits = torch.tensor([row] * 4, dtype=torch.float64, requires_grad=True)
        value = F.probability_variance_hinge(logits, hinge)
        value.backward()
        assert value.item() == pytest.approx(len(row) ** (-0.5 * power))
        assert not logits.grad.any()
    logits = torch.tensor([[0.0, -95.0, -40.0], [0.0, -99.0, -41.0]], requires_grad=True)
    F.probability_variance_hinge(logits, hinge).backward()
    assert torch.isfinite(logits.grad).all()


# ---------------------------------------------------------------- prototypes
TARGETS = torch.tensor([3, 1, 3, 3, 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_classes_in_float64_with_zeros_for_missing_ones(dtype):
    z = draw(5, 2, 2).to(dtype).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sums, counts = F.class_sums(z, TARGETS, 5)
    assert sums.dtype == counts.dtype == torch.float64
    assert not sums.requires_grad
    assert counts.shape == (5, 1) and counts[:, 0].tolist() == [0, 2, 0, 3, 0]
    rows = z.detach().double().reshape(5, 4)
    for c in range(5):
        torch.testing.assert_close(sums[c], rows[c == TARGETS].sum(0), rtol=1e-12, atol=0)


def test_an_example_of_a_class_without_prototype_counts_and_has_no_gradient():
    z = draw(5, 4).requires_grad_()
    prototypes = torch.full((4, 4), torch.nan).double()
    prototypes[3] = 0
    value = F.prototype_distance(z, TARGETS, prototypes, torch.tensor([False, False, False, True]))
    value.backward()
    assert value.item() == pytest.approx((z[TARGETS == 3] ** 2).sum().item() / 20)
    np.testing.assert_allclose(z.grad[TARGETS == 3].numpy(), z[TARGETS == 3].detach().numpy() / 10, rtol=1e-12)
    assert not z.grad[TARGETS == 1].any()


# one row, from which most functions return early
Z, N = torch.zeros(1, 4), torch.ones(4)
X, Y = torch.zeros(1, 3), torch.zeros(6, 3)

REFUSED = [
    (lambda: F.calibrated_logits(Z, N, missing="drop"), "missing='drop'"),
    (lambda: F.calibrated_logits(Z, N, margin="none"), "margin='none'"),
    (lambda: F.restricted_logits(Z, N, alpha=1.5), "alpha=1.5"),
    (lambda: F.restricted_logits(Z, N, alpha=-0.1), "alpha=-0.1"),
    (lambda: F.restricted_logits(Z, N, alpha=math.nan), "alpha=nan"),
    (lambda: F.restricted_logits(Z, N, mode="rare"), "mode='rare'"),
    (lambda: F.correlation_frobenius(Z, form="other"), "form='other'"),
    (lambda: F.structured_covariance_decorrelation(Z, groups=0), "groups=0"),
    (lambda: F.structured_covariance_decorrelation(Z, groups=5), "groups=5"),
    (lambda: F.structured_covariance_decorrelation(Z), "groups=8"),
    (lambda: F.structured_covariance_decorrelation(Z, 2, gamma=-1.0), "gamma=-1.0"),
    (lambda: F.rbf_uniformity(Z, 0), "bandwidth_factor=0"),
    (lambda: F.probability_variance_hinge(Z, hinge="cubic"), "hinge='cubic'"),
    (lambda: F.model_contrastive_loss(Z, Z, temperature=0), "temperature=0"),
    (lambda: F.rbf_cka(Z, Z, bandwidth=0), "bandwidth=0"),
    (lambda: F.rbf_cka(X, Y), "rows=(1, 6)"),
    (lambda: F.linear_cka(Y, X, debiased=True), "rows=(6, 1)"),
    (lambda: F.linear_ckas(Y, Y, X), "rows=(6, 1)"),
    (lambda: F.numerical_rank(N, -1), "tolerance=-1"),
]


@pytest.mark.parametrize(("call", "given"), REFUSED, ids=[given for _, given in REFUSED])
def test_the_error_names_key_and_value(call, given):
    with refused(given):
        call()


def test_the_ends_of_a_range_belong_to_it():
    F.restricted_logits(Z, N, alpha=0), F.restricted_logits(Z, N, alpha=1)
    F.structured_covariance_decorrelation(Z, 1, 0.0), F.structured_covariance_decorrelation(Z, 4)


def test_every_function_has_an_example_its_arguments_and_a_source():
    for name in F.__all__:
        function = getattr(F, name)
        module = sys.modules[function.__module__]
        (test,) = doctest.DocTestFinder(recurse=False).find(function, name, module)
        assert test.examples, name  # which --doctest-modules runs
        assert "Args:" in function.__doc__ and "Returns:" in function.__doc__, name
        assert "https://" in module.__doc__, name
