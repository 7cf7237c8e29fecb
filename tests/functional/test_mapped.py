"""Losses inside ``torch.vmap``: of clients side by side, each has the value and the gradient that it has alone.

Gradients are those of ordinary autograd outside of the map, of the sum over the clients.
"""

import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from formulas import draw

from fl_lightning import functional as F
from fl_lightning.functional._mapped import is_mapped, needs_gradient
from fl_lightning.method import Step
from fl_lightning.methods import FedLC

# relative to the norm
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5}
TARGETS = torch.tensor([[0, 1, 2, 3, 0, 1, 2], [0, 0, 0, 0, 2, 2, 2], [3, 3, 3, 3, 3, 3, 3]])
# no class, one and all but one missing
COUNTS = torch.tensor([[4, 5, 60, 1], [7, 0, 2, 30], [0, 0, 0, 9]])


def clients(*shape, seed=0):
    """Three clients' rows: with nothing special; with equal and nearly equal rows and a constant column; all equal."""
    z = draw(3, *shape, seed=seed)
    if shape[0] > 4:
        z[1, 1] = z[1, 0]
        z[1, 3] = z[1, 2] + 1e-3
    z[1, :, 0] = 0.5
    z[2] = z[2, :1].clone()
    return z


ONE = {
    **{
        f"rbf_uniformity {factor} {detach}": partial(F.rbf_uniformity, bandwidth_factor=factor, detach_bandwidth=detach)
        for factor in (1.0, 2.0)
        for detach in (False, True)
    },
    "correlation_frobenius official": F.correlation_frobenius,
    "correlation_frobenius paper": partial(F.correlation_frobenius, form="paper"),
    "singular_value_variance": F.singular_value_variance,
    "covariance_decorrelation": F.covariance_decorrelation,
    "structured_covariance_decorrelation": partial(F.structured_covariance_decorrelation, groups=3, gamma=0.5),
    **{
        f"probability_variance_hinge {hinge}": partial(F.probability_variance_hinge, hinge=hinge)
        for hinge in ("linear", "none", "square", "clamped_square")
    },
    "model_contrastive_loss alone": lambda z: F.model_contrastive_loss(z, z.detach() + 1),
    "spectral norm": lambda z: torch.linalg.matrix_norm(z.flatten(1), 2),
}
PAIRS = {
    "linear_cka": F.linear_cka,
    "linear_cka debiased": partial(F.linear_cka, debiased=True),
    "linear_ckas": lambda x, y: F.linear_ckas(x, y, y.roll(1, 0)),
    "rbf_cka": F.rbf_cka,
    "frobenius_similarity": F.frobenius_similarity,
    "cosine_similarity": F.cosine_similarity,
    "model_contrastive_loss": lambda x, y: F.model_contrastive_loss(x, y, [y + 1, 2 * y - x]),
    "representation_contrast": lambda x, y: F.representation_contrast(x.mean(), y.mean()),
}
# more rows than columns, fewer, and of four dimensions; too few for some functions or for all
SHAPES = [(30, 4), (7, 30), (6, 3, 4, 4), (3, 5), (1, 5)]


def penalty_of_fedlc(logits, targets, counts):
    client = SimpleNamespace(info=SimpleNamespace(label_counts=counts))
    step = Step(None, targets, {"logits": logits})
    return FedLC(tau=0.5, denominator="exclude_true").penalty(client, step)


def alone(function, *tensors):
    """Of each client by itself: the value, and the gradients by what has one."""
    results = []
    for own in zip(*tensors, strict=True):
        own = [part.clone().requires_grad_(part.is_floating_point()) for part in own]
        value = function(*own)
        results.append((value.detach(), *gradients(value, own)))
    return tuple(map(torch.stack, zip(*results, strict=True)))


def side_by_side(function, *tensors):
    tensors = [part.clone().requires_grad_(part.is_floating_point()) for part in tensors]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # where torch.vmap has no rule, it warns, and goes through the clients in a loop
        values = torch.vmap(function)(*tensors)
    return values.detach(), *gradients(values, tensors)


def gradients(values, tensors):
    """Of finite entries: the logits of missing classes may be minus infinity."""
    trained = [part for part in tensors if part.requires_grad]
    total = torch.where(values.isfinite(), values, 0).sum()
    return torch.autograd.grad(total, trained, materialize_grads=True)


def assert_same(function, *tensors, dtype):
    tensors = [part.to(dtype) if part.is_floating_point() else part for part in tensors]
    wanted, mapped = alone(function, *tensors), side_by_side(function, *tensors)
    for quantity, other in zip(wanted, mapped, strict=True):
        assert quantity.dtype == other.dtype and quantity.shape == other.shape
        for one, same in zip(quantity, other, strict=True):  # client by client
            infinite = one.isinf()
            assert torch.equal(one[infinite], same[infinite])
            one, same = one[~infinite], same[~infinite]
            assert (one - same).norm() <= TOLERANCES[dtype] * one.norm(), (one, same)


both = pytest.mark.parametrize("dtype", TOLERANCES)


@both
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ONE)
def test_losses_of_one_tensor(name, shape, dtype):
    assert_same(ONE[name], clients(*shape), dtype=dtype)


@both
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", PAIRS)
def test_losses_of_two_tensors(name, shape, dtype):
    x = clients(*shape)
    # clients differ in which of the two has equal rows
    y = clients(*shape, seed=1).roll(1, 0)
    assert_same(PAIRS[name], x, y, dtype=dtype)


@both
@pytest.mark.parametrize("missing", ["floor", "mask", "clamp"])
@pytest.mark.parametrize("margin", ["fourth_root", "log_prior"])
def test_calibrated_logits(missing, margin, dtype):
    assert_same(
        partial(F.calibrated_logits, tau=0.5, missing=missing, margin=margin), draw(3, 7, 4), COUNTS, dtype=dtype
    )


@both
@pytest.mark.parametrize("mode", ["binary", "frequency"])
def test_restricted_logits(mode, dtype):
    assert_same(partial(F.restricted_logits, mode=mode), draw(3, 7, 4), COUNTS, dtype=dtype)


@both
def test_the_penalty_of_fedlc_without_the_true_class(dtype):
    assert_same(penalty_of_fedlc, draw(3, 7, 4), TARGETS, COUNTS, dtype=dtype)


@both
def test_prototype_distance(dtype):
    known = torch.tensor([[True, True, True, True], [True, False, False, True], [False, False, False, False]])
    assert_same(F.prototype_distance, draw(3, 7, 5), TARGETS, draw(3, 4, 5, seed=1), known, dtype=dtype)


@both
def test_class_sums(dtype):
    z = draw(3, 7, 5).to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sums, numbers = torch.vmap(partial(F.class_sums, num_classes=4))(z, TARGETS)
    for own, targets, total, number in zip(z, TARGETS, sums, numbers, strict=True):
        wanted = F.class_sums(own, targets, 4)
        torch.testing.assert_close(total, wanted[0], rtol=1e-12, atol=0)
        assert torch.equal(number, wanted[1])


@pytest.mark.parametrize("name", [name for name in ONE if "uniformity" in name])
@pytest.mark.parametrize("scale", [1e-21, 1e18])
def test_uniformity_at_extreme_scales(name, scale):
    z = (scale * clients(7, 5)).float()
    for one, same in zip(alone(ONE[name], z), side_by_side(ONE[name], z), strict=True):
        assert torch.equal(one, same)


def test_uniformity_far_from_the_origin():
    """Distances by products of matrices would lose digits there."""
    assert_same(F.rbf_uniformity, 1e3 + clients(30, 4), dtype=torch.float64)


def test_uniformity_of_clients_in_another_dimension():
    z = clients(7, 5).float()
    mapped = torch.vmap(F.rbf_uniformity, in_dims=1)(z.movedim(0, 1))
    assert torch.equal(mapped, torch.stack([F.rbf_uniformity(own) for own in z]))


def test_uniformity_of_maps_inside_maps():
    z = torch.stack([clients(7, 5), clients(7, 5, seed=1)]).float().requires_grad_()
    values = torch.vmap(torch.vmap(F.rbf_uniformity))(z)
    wanted = torch.stack([F.rbf_uniformity(own) for own in z.flatten(0, 1)])
    assert torch.equal(values.flatten(), wanted)
    assert torch.equal(*(torch.autograd.grad(each.sum(), z)[0] for each in (values, wanted)))


def test_rows_that_are_not_finite_spoil_no_other_client():
    z = draw(3, 7, 5)
    z[0, 0, 0], z[1, 0, 0] = torch.nan, torch.inf
    values, gradient = side_by_side(F.rbf_uniformity, z)
    wanted, gradient_alone = alone(F.rbf_uniformity, z)
    assert values[:2].tolist() == wanted[:2].tolist() == [0, 0]
    assert not gradient[:2].any() and not gradient_alone[:2].any()
    torch.testing.assert_close((values[2], gradient[2]), (wanted[2], gradient_alone[2]), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", ["linear_cka", "linear_cka debiased"])
def test_activations_in_channels_last(name):
    x, y = (clients(6, 3, 4, 4, seed=seed) for seed in (0, 1))
    x, y = (maps.movedim(2, -1).contiguous().movedim(-1, 2) for maps in (x, y))
    assert x[0].is_contiguous(memory_format=torch.channels_last)
    assert_same(PAIRS[name], x, y, dtype=torch.float64)


@pytest.mark.parametrize("name", [name for name in (*ONE, *PAIRS) if name != "spectral norm"])
def test_half_precision_is_left_under_autocast(name):
    function = {**ONE, **PAIRS}[name]
    tensors = [clients(6, 8, seed=seed).bfloat16() for seed in range(1 if name in ONE else 2)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted, mapped = alone(function, *tensors), side_by_side(function, *tensors)
    assert mapped[0].dtype == torch.float32
    for one, same in zip(wanted, mapped, strict=True):
        # gradients are themselves rounded to bfloat16
        assert (one - same).float().norm() <= (1e-5 if one.dtype == torch.float32 else 2**-8) * one.float().norm()


def half_ckas(x, *ys):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.linear_ckas(x, *ys)


def test_half_precision_products_of_cka():
    tensors = [clients(6, 1200, seed=seed).bfloat16() for seed in range(3)]
    tensors[1:] = [tensors[0] + other for other in tensors[1:]]

    def by_first(function, x, *ys):
        x = x.clone().requires_grad_()
        values = function(x, *ys)
        return values.detach(), torch.autograd.grad(values.sum(), x)[0].float()

    values, gradient = by_first(torch.vmap(half_ckas), *tensors)
    exact, _ = by_first(torch.vmap(F.linear_ckas), *tensors)
    assert not torch.equal(values, exact)
    for k, own in enumerate(zip(*tensors, strict=True)):
        wanted, wanted_gradient = by_first(half_ckas, *own)
        assert (values[k] - wanted).abs().max() < 1e-4
        assert (gradient[k] - wanted_gradient).norm() <= 0.005 * wanted_gradient.norm()


def test_half_precision_products_are_not_taken_where_others_need_a_gradient_outside_of_the_map():
    x, y = (clients(6, 1200, seed=seed).bfloat16().requires_grad_() for seed in range(2))
    values = torch.vmap(half_ckas)(x, y)
    assert torch.equal(values, torch.vmap(F.linear_ckas)(x, y))
    assert all(part.any() for part in torch.autograd.grad(values.sum(), (x, y)))


def test_what_is_mapped_and_what_needs_a_gradient():
    x, y = draw(3, 4), draw(3, 4).requires_grad_()
    seen = []

    def look(x, y):
        seen.append([(is_mapped(part), needs_gradient(part)) for part in (x, y, x * y, constant)])
        return x.sum()

    constant = draw(2)
    look(x, y)
    torch.vmap(look)(x, y)
    torch.vmap(torch.vmap(look))(x, y)
    inside = [(True, False), (True, True), (True, True), (False, False)]
    assert seen == [[(False, needed) for _, needed in inside], inside, inside]
