"""CKA: its gradient, its two forms, its laws and where it vanishes."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from fl_lightning.errors import UsageError
from fl_lightning.functional import cosine_similarity, frobenius_similarity, linear_cka, rbf_cka


def draw(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def debiased(x, y):
    return linear_cka(x, y, debiased=True)


CKAS = [linear_cka, debiased, rbf_cka]


def np_gram_cka(x, y):
    h = np.eye(len(x)) - 1 / len(x)
    k, l = h @ x @ x.T @ h, h @ y @ y.T @ h  # noqa: E741 - K and L, as in the paper
    return np.sum(k * l) / np.sqrt(np.sum(k * k) * np.sum(l * l))


def np_unbiased_hsic(k, l):  # noqa: E741
    """The sum over distinct i, j, s, t that defines it, one by one."""
    n = len(k)
    distinct = itertools.permutations(range(n), 4)
    return np.mean([k[i, j] * (l[i, j] + l[s, t] - 2 * l[i, s]) for i, j, s, t in distinct])


def np_rbf_cka(x, y, bandwidth):
    def gram(rows):
        q = ((rows[:, None] - rows[None]) ** 2).sum(-1)
        return np.exp(-q / (2 * bandwidth**2 * np.median(q)))

    h = np.eye(len(x)) - 1 / len(x)
    k, l = h @ gram(x) @ h, h @ gram(y) @ h  # noqa: E741
    return np.sum(k * l) / np.sqrt(np.sum(k * k) * np.sum(l * l))


@pytest.mark.parametrize(("p", "q"), [(3, 2), (3, 20), (20, 20), (8, 8), (7, 7)])
def test_either_side_gives_the_gram_form(p, q):
    x, y = draw(8, p), draw(8, q, seed=1) + 100
    assert linear_cka(x, y).item() == pytest.approx(np_gram_cka(x.numpy(), y.numpy()), rel=1e-9)


def test_many_examples_in_few_dimensions_build_no_matrix_of_examples():
    x = torch.randn(200_000, 3)  # 160 GB as a Gram matrix
    assert linear_cka(x, x).item() == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("n", [4, 6])
def test_debiased_is_the_ratio_of_means_over_distinct_examples(n):
    x, y = draw(n, 3).numpy(), draw(n, 5, seed=1).numpy()
    k, l = x @ x.T, y @ y.T  # noqa: E741
    reference = np_unbiased_hsic(k, l) / np.sqrt(np_unbiased_hsic(k, k) * np_unbiased_hsic(l, l))
    assert debiased(torch.tensor(x), torch.tensor(y)).item() == pytest.approx(reference, rel=1e-9)


@pytest.mark.parametrize("n", [5, 6])
@pytest.mark.parametrize("bandwidth", [0.2, 0.5, 1.0])
def test_rbf_cka_takes_the_median_of_all_distances_odd_or_even(n, bandwidth):
    x, y = draw(n, 3), draw(n, 4, seed=1)
    reference = np_rbf_cka(x.numpy(), y.numpy(), bandwidth)
    assert rbf_cka(x, y, bandwidth).item() == pytest.approx(reference, rel=1e-9)


@pytest.mark.parametrize("cka", [linear_cka, debiased])
@pytest.mark.parametrize("p", [3, 12])
def test_gradient(cka, p):
    x, y = draw(6, p).requires_grad_(), draw(6, p, seed=1).requires_grad_()
    assert gradcheck(cka, (x, y))


def test_the_median_of_rbf_cka_is_a_constant():
    x, y = draw(6, 3).requires_grad_(), draw(6, 3, seed=1)
    (gradient,) = torch.autograd.grad(rbf_cka(x, y), x)
    # the value does not change with the scale; the gradient with a constant median has a part along x
    assert rbf_cka(3 * x, y).item() == pytest.approx(rbf_cka(x, y).item())
    assert abs((gradient * x).sum().item()) > 1e-3
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("cka", CKAS)
@pytest.mark.parametrize("scale", [1e-18, 1e-6, 1.0, 1e12])
def test_1_under_rotation_scaling_and_shift_in_float32(cka, scale):
    x = draw(10, 6)
    rotation = torch.linalg.qr(draw(6, 6, seed=2))[0]
    moved = scale * (x @ rotation + 3)
    assert cka(x.float(), moved.float()).item() == pytest.approx(1, abs=1e-4)
    assert cka(x, draw(10, 6, seed=3)).item() < 0.95


@pytest.mark.parametrize("cka", CKAS)
def test_symmetric(cka):
    x, y = draw(9, 4), draw(9, 7, seed=1)
    assert cka(x, y).item() == pytest.approx(cka(y, x).item())


@pytest.mark.parametrize("n", [2, 3])
def test_debiased_needs_four_examples(n):
    x = draw(n, 5).requires_grad_()
    value = debiased(x, draw(n, 5, seed=1))
    value.backward()
    assert value.item() == 0 and not x.grad.any()
    assert debiased(draw(4, 5), draw(4, 5)).item() == pytest.approx(1)


@pytest.mark.parametrize("cka", CKAS)
@pytest.mark.parametrize("shape", [(7, 3), (7, 40)])
def test_equal_rows_give_exactly_0_without_gradient(cka, shape):
    x, y = torch.full(shape, 0.1, requires_grad=True), torch.randn(shape, requires_grad=True)
    value = cka(x, y)
    value.backward()
    assert value.item() == 0
    assert not x.grad.any() and torch.isfinite(y.grad).all()


@pytest.mark.parametrize("cka", CKAS)
def test_mostly_equal_rows_give_a_finite_value_and_gradient(cka):
    x = torch.ones(8, 3)
    x[0] = 2
    x.requires_grad_()
    value = cka(x, torch.randn(8, 3))
    value.backward()
    assert torch.isfinite(value) and torch.isfinite(x.grad).all()
    assert value.item() != 0


@pytest.mark.parametrize("cka", CKAS)
def test_bf16_autocast_changes_nothing(cka):
    x, y = torch.randn(8, 5), torch.randn(8, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(cka(x, y), cka(x.clone(), y.clone()))
        inside = cka(x, y)
    assert torch.equal(inside, cka(x, y))


@pytest.mark.parametrize("cka", CKAS)
@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(0, 9),
    p=st.integers(1, 12),
    q=st.integers(1, 12),
    log=st.integers(-6, 6),
    seed=st.integers(0, 99),
)
def test_in_range_for_any_shape_and_scale(cka, n, p, q, log, seed):
    x = (draw(n, p, seed=seed).float() * 10.0**log).requires_grad_()
    value = cka(x, draw(n, q, seed=seed + 1).float())
    value.backward()
    assert (-1 if cka is debiased else 0) - 1e-5 <= value.item() <= 1 + 1e-5
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("cka", CKAS)
def test_different_examples_are_refused(cka):
    with pytest.raises(UsageError, match=r"rows=\(1, 6\)"):
        cka(draw(1, 3), draw(6, 3))


@pytest.mark.parametrize("similarity", [frobenius_similarity, cosine_similarity])
def test_other_similarities_are_largest_for_equal_tensors(similarity):
    x = draw(4, 2, 3)
    best = {frobenius_similarity: 0.0, cosine_similarity: 1.0}[similarity]
    assert similarity(x, x).item() == pytest.approx(best)
    assert similarity(x, x + 0.3 * draw(4, 2, 3, seed=1)).item() < best - 1e-3
    assert gradcheck(similarity, (x.requires_grad_(), draw(4, 2, 3, seed=1)))


def test_cosine_similarity_of_zeros_is_finite():
    x = torch.zeros(4, 3, requires_grad=True)
    value = cosine_similarity(x, torch.randn(4, 3))
    value.backward()
    assert value.item() == 0 and torch.isfinite(x.grad).all()
