"""CKA: both ways to compute it, the debiased form, feature maps, and degenerate input."""

import itertools

import formulas
import numpy as np
import pytest
import torch
from formulas import draw
from torch.autograd import gradcheck

from fl_lightning.functional import cosine_similarity, linear_cka, linear_ckas, rbf_cka


def debiased(x, y):
    return linear_cka(x, y, debiased=True)


CKAS = [linear_cka, debiased, rbf_cka]


@pytest.mark.parametrize(("p", "q"), [(3, 2), (3, 20), (20, 20), (8, 8), (7, 7)])
def test_the_forms_by_columns_and_by_rows_are_equal(p, q):
    x, y = draw(8, p), draw(8, q, seed=1) + 100
    assert linear_cka(x, y).item() == pytest.approx(formulas.linear_cka(x.numpy(), y.numpy()), rel=1e-9)


def test_many_examples_in_few_dimensions_need_no_gram_matrix():
    x = torch.randn(200_000, 3)  # 160 GB as a Gram matrix
    assert linear_cka(x, x).item() == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("debiased", [False, True])
@pytest.mark.parametrize("widths", [(3, 2, 4), (3, 2, 12)])
def test_linear_ckas_is_linear_cka_with_each(debiased, widths):
    x, *ys = (draw(8, width, seed=width).requires_grad_() for width in widths)
    values = linear_ckas(x, *ys, debiased=debiased)
    assert values.shape == (2,)
    for value, y in zip(values, ys, strict=True):
        torch.testing.assert_close(value, linear_cka(x, y, debiased=debiased))
    assert gradcheck(lambda *rows: linear_ckas(*rows, debiased=debiased), (x, *ys))


@pytest.mark.parametrize("n", [4, 6])
def test_debiased_is_the_ratio_of_means_over_distinct_examples(n):
    def mean(k, l):  # noqa: E741 - K and L, as in the paper
        distinct = itertools.permutations(range(n), 4)
        return np.mean([k[i, j] * (l[i, j] + l[s, t] - 2 * l[i, s]) for i, j, s, t in distinct])

    x, y = draw(n, 3).numpy(), draw(n, 5, seed=1).numpy()
    k, l = x @ x.T, y @ y.T  # noqa: E741
    expected = mean(k, l) / np.sqrt(mean(k, k) * mean(l, l))
    assert debiased(torch.tensor(x), torch.tensor(y)).item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("n", [5, 6])
@pytest.mark.parametrize("bandwidth", [0.2, 0.5, 1.0])
def test_rbf_cka_takes_the_median_of_an_odd_or_even_number_of_distances(n, bandwidth):
    x, y = draw(n, 3), draw(n, 4, seed=1)
    expected = formulas.rbf_cka(x.numpy(), y.numpy(), bandwidth)
    assert rbf_cka(x, y, bandwidth).item() == pytest.approx(expected, rel=1e-9)


def test_rbf_cka_takes_the_mean_distance_if_most_rows_are_equal():
    x, y = torch.ones(8, 3).double(), draw(8, 4)
    x[0], x[1] = 2, 4
    x.requires_grad_()
    value = rbf_cka(x, y)
    value.backward()
    assert value.item() == pytest.approx(formulas.rbf_cka(x.detach().numpy(), y.numpy(), 0.5), rel=1e-9)
    assert torch.isfinite(x.grad).all() and x.grad.any()


@pytest.mark.parametrize("cka", CKAS)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_feature_maps_are_flattened_whatever_their_layout(cka, layout):
    x, y = draw(6, 2, 3, 3), draw(6, 4, 2, 2, seed=1)
    flat, maps = x.flatten(1).requires_grad_(), x.to(memory_format=layout).requires_grad_()
    expected, value = cka(flat, y.flatten(1)), cka(maps, y.to(memory_format=layout))
    torch.testing.assert_close(value, expected)
    (gradient,), (plain,) = torch.autograd.grad(value, maps), torch.autograd.grad(expected, flat)
    torch.testing.assert_close(gradient.reshape(6, -1), plain)


@pytest.mark.parametrize("cka", CKAS)
@pytest.mark.parametrize("scale", [1e-18, 1e-6, 1.0, 1e12])
def test_cka_is_1_after_rotation_scaling_and_shift_in_float32(cka, scale):
    x = draw(10, 6)
    rotation = torch.linalg.qr(draw(6, 6, seed=2))[0]
    moved = scale * (x @ rotation + 3)
    assert cka(x.float(), moved.float()).item() == pytest.approx(1, abs=1e-4)
    assert cka(x, draw(10, 6, seed=3)).item() < 0.95


@pytest.mark.parametrize("cka", [linear_cka, rbf_cka])
@pytest.mark.parametrize("p", [1, 5])
def test_two_examples_have_cka_1(cka, p):
    x = draw(2, p).requires_grad_()
    value = cka(x, draw(2, 4, seed=1))
    value.backward()
    assert value.item() == pytest.approx(1) and x.grad.abs().max() < 1e-9


@pytest.mark.parametrize("n", [2, 3])
def test_debiased_cka_needs_four_examples(n):
    x = draw(n, 5).requires_grad_()
    value = debiased(x, draw(n, 5, seed=1))
    value.backward()
    assert value.item() == 0 and not x.grad.any()
    assert debiased(draw(4, 5), draw(4, 5)).item() == pytest.approx(1)


def test_unrelated_activations_in_many_dimensions_look_alike_unless_debiased():
    x, y = draw(16, 2000), draw(16, 2000, seed=1)
    assert linear_cka(x, y).item() > 0.9
    assert abs(debiased(x, y).item()) < 0.2


@pytest.mark.parametrize("cka", CKAS)
@pytest.mark.parametrize("shape", [(7, 3), (7, 40)])
def test_equal_rows_give_exactly_0_without_gradient(cka, shape):
    x, y = torch.full(shape, 0.1, requires_grad=True), torch.randn(shape, requires_grad=True)
    value = cka(x, y)
    value.backward()
    assert value.item() == 0
    assert not x.grad.any() and torch.isfinite(y.grad).all()


@pytest.mark.parametrize("cka", CKAS)
def test_mostly_equal_rows_give_a_finite_value_and_gradient_in_float32(cka):
    x = torch.ones(8, 3)
    x[0] = 2
    x.requires_grad_()
    value = cka(x, torch.randn(8, 3))
    value.backward()
    assert torch.isfinite(value) and torch.isfinite(x.grad).all()
    assert value.item() != 0


def test_cosine_similarity_of_zeros_is_0_and_finite():
    x = torch.zeros(4, 3, requires_grad=True)
    value = cosine_similarity(x, torch.randn(4, 3))
    value.backward()
    assert value.item() == 0 and torch.isfinite(x.grad).all()
