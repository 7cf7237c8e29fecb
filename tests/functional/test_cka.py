"""CKA: both ways to compute it, the debiased form, feature maps, and degenerate input."""

import math

import make_reference_values as reference
import numpy as np
import pytest
import torch
from cases import draw
from torch.autograd import gradcheck

from fl_lightning.functional import (
    cosine_similarity,
    linear_cka,
    linear_ckas,
    rbf_cka,
    representation_contrast,
    similarities,
    unbiased_gram,
)


def debiased(x, y):
    return linear_cka(x, y, debiased=True)


def minibatch_cka(xs, ys):
    return similarities(torch.stack([torch.cat([unbiased_gram(x) for x in batches]) for batches in (xs, ys)]))[0, 1]


def in_minibatches(x, y):
    return minibatch_cka(x.split(5), y.split(5))


CKAS = [linear_cka, debiased, rbf_cka]


@pytest.mark.parametrize(("p", "q"), [(3, 2), (3, 20), (20, 20), (8, 8), (7, 7)])
def test_the_forms_by_columns_and_by_rows_are_equal(p, q):
    x, y = draw(8, p), draw(8, q, seed=1) + 100
    assert linear_cka(x, y).item() == pytest.approx(reference.linear_cka(x.numpy(), y.numpy()), rel=1e-9)


@pytest.mark.parametrize("debiased", [False, True])
@pytest.mark.parametrize("widths", [(3, 2, 4), (3, 2, 12)])
def test_linear_ckas_is_linear_cka_with_each(debiased, widths):
    x, *ys = (draw(8, width, seed=width).requires_grad_() for width in widths)
    values = linear_ckas(x, *ys, debiased=debiased)
    assert values.shape == (2,)
    for value, y in zip(values, ys, strict=True):
        torch.testing.assert_close(value, linear_cka(x, y, debiased=debiased))
    assert gradcheck(lambda *rows: linear_ckas(*rows, debiased=debiased), (x, *ys))


def test_rbf_cka_takes_the_mean_distance_if_most_rows_are_equal():
    x, y = torch.ones(8, 3).double(), draw(8, 4)
    x[0], x[1] = 2, 4
    x.requires_grad_()
    value = rbf_cka(x, y)
    value.backward()
    assert value.item() == pytest.approx(reference.rbf_cka(x.detach().numpy(), y.numpy(), 0.5), rel=1e-9)
    assert torch.isfinite(x.grad).all() and x.grad.any()


@pytest.mark.parametrize("cka", [*CKAS, in_minibatches])
@pytest.mark.parametrize("scale", [1e-18, 1e-6, 1e12])
def test_cka_is_1_after_rotation_scaling_and_shift_in_float32(cka, scale):
    x = draw(10, 6)
    rotation = torch.linalg.qr(draw(6, 6, seed=2))[0]
    moved = scale * (x @ rotation + 3)
    assert cka(x.float(), moved.float()).item() == pytest.approx(1, abs=1e-4)
    assert cka(x, draw(10, 6, seed=3)).item() < 0.95


def test_unrelated_activations_in_many_dimensions_look_alike_unless_debiased():
    x, y = draw(16, 2000), draw(16, 2000, seed=1)
    assert linear_cka(x, y).item() > 0.9
    assert abs(debiased(x, y).item()) < 0.2


def test_cosine_similarity_of_zeros_is_0_and_finite():
    x = torch.zeros(4, 3, requires_grad=True)
    value = cosine_similarity(x, torch.randn(4, 3))
    value.backward()
    assert value.item() == 0 and torch.isfinite(x.grad).all()


# ---------------------------------------------------------------- half precision
def related(n, p, away=0.0, after=lambda x: x):
    """Activations in bfloat16 of three models that have much in common, ``away`` from the origin."""
    common = draw(n, 30) @ draw(30, p, seed=1) / 5
    return [after(common + draw(n, p, seed=seed)).add(away).bfloat16() for seed in (2, 3, 4)]


def contrast(x, others, autocast=True):
    """FedCKA's term, the two similarities in it and its gradient by x, in float64."""
    x = x.detach().clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        values = linear_ckas(x, *others)
        term = representation_contrast(*values)
    assert values.dtype == (torch.float32 if x.dtype == torch.bfloat16 else x.dtype)
    return values.detach().double(), torch.autograd.grad(term, x)[0].double()


def errors(x, others, autocast=True):
    """Largest error of the similarities, relative error of the gradient, both to float64; the largest similarity."""
    values, gradient = contrast(x, others, autocast)
    exact, wanted = contrast(x.double(), [other.double() for other in others], autocast=False)
    return (values - exact).abs().max().item(), ((gradient - wanted).norm() / wanted.norm()).item(), exact.max().item()


def unrelated(n, p):
    return [draw(n, p, seed=seed).bfloat16() for seed in (2, 3, 4)]


HALVES = {
    "unrelated, few": unrelated(6, 1024),
    "several blocks of columns": related(32, 20000),
    "after ReLU, a smaller batch": related(37, 1500, after=torch.relu),
    "far from the origin": related(64, 2000, away=50.0),
    "maps": [a.view(64, 10, 20, 10).contiguous(memory_format=torch.channels_last) for a in related(64, 2000)],
}


@pytest.mark.parametrize("name", HALVES)
def test_half_precision_products_are_close_to_float64(name):
    """Measured: values 2e-5, gradients up to 0.0026 / sqrt(1 - s^2).

    With float32 products the error of the gradient is 0.002, since it is itself in bfloat16.
    """
    x, *others = HALVES[name]
    value, gradient, similarity = errors(x, others)
    assert value < 1e-4
    assert gradient < 3e-3 / math.sqrt(1 - similarity**2)
    assert errors(x, others, autocast=False)[1] < 2e-3


def test_half_precision_products_are_taken_under_autocast_of_wide_bfloat16_alone():
    x, *others = related(16, 1100)
    wide = [a.float() for a in (x, *others)]
    exact, half = contrast(wide[0], wide[1:], autocast=False), contrast(x, others)
    assert not torch.equal(half[0], exact[0])
    narrow, long = [a[:, :1000] for a in (x, *others)], [a.repeat(80, 1) for a in (x, *others)]
    for given, autocast in (((x, *others), False), (wide, True), (narrow, True), (long, True)):
        values, gradient = contrast(given[0], given[1:], autocast)
        floats = [a.float() for a in given]
        wanted, exact_gradient = contrast(floats[0], floats[1:], autocast=False)
        assert torch.equal(values, wanted)
        assert torch.equal(gradient, exact_gradient.to(given[0].dtype).double())
    halves = [a.half() for a in (x, *others)]
    with torch.autocast("cpu", dtype=torch.float16):
        assert torch.equal(linear_ckas(*halves), linear_ckas(*(a.float() for a in halves)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(linear_ckas(x, *others, debiased=True), linear_ckas(*wide, debiased=True))


@pytest.mark.parametrize("n", [2, 5, 100])
@pytest.mark.parametrize("value", [0.1, 1000.0])
def test_equal_rows_in_half_precision_give_exactly_0_without_gradient(n, value):
    x = torch.full((n, 1200), value, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cka = linear_cka(x, torch.randn(n, 1200).bfloat16())
    cka.backward()
    assert cka.item() == 0 and not x.grad.any()


# ---------------------------------------------------------------- minibatches


def test_minibatch_cka_is_the_ratio_of_mean_estimates():
    x, y = draw(30, 3), draw(30, 5, seed=1)
    xs, ys = (rows.split([4, 5, 21]) for rows in (x, y))
    xy, xx, yy = (
        sum(len(a) * reference.hsic(a.numpy(), b.numpy()) for a, b in zip(first, second, strict=True))
        for first, second in ((xs, ys), (xs, xs), (ys, ys))
    )
    assert minibatch_cka(xs, ys).item() == pytest.approx(xy / np.sqrt(xx * yy), rel=1e-9)


@pytest.mark.parametrize(("size", "mean", "largest"), [(64, 0.0002, 0.008)])
def test_minibatch_cka_is_near_the_debiased_value_of_all_examples(size, mean, largest):
    """Over these 20 draws; those with batches of 64 are the numbers of docs/callbacks.md."""
    gaps = []
    for seed in range(20):
        common = draw(512, 10, seed=seed)
        x = common @ draw(10, 60, seed=seed + 100) + draw(512, 60, seed=seed + 200)
        y = common @ draw(10, 60, seed=seed + 300) + draw(512, 60, seed=seed + 400)
        gaps.append((minibatch_cka(x.split(size), y.split(size)) - debiased(x, y)).item())
    assert round(abs(np.mean(gaps)), 4) == mean
    assert round(max(map(abs, gaps)), 3) == largest


def test_small_batches_do_not_count_and_equal_rows_have_no_similarity():
    x, y = draw(11, 4), draw(11, 4, seed=1)
    assert torch.equal(minibatch_cka(x.split(8), y.split(8)), minibatch_cka([x[:8]], [y[:8]]))
    assert minibatch_cka([x[:3]], [y[:3]]).isnan()
    assert minibatch_cka([torch.full((8, 3), 0.1)], [y[:8]]).isnan()
    maps = x.view(11, 1, 2, 2).to(memory_format=torch.channels_last)
    assert torch.equal(unbiased_gram(maps), unbiased_gram(x))
