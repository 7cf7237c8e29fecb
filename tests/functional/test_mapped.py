"""Inside ``torch.vmap``, the losses of clients side by side have the value and the gradient that each has alone.

Gradients are those of ordinary autograd outside of the map, of the sum over the clients.
"""

import warnings

import pytest
import torch
from cases import CASES, OF_LOGITS, beside, converted, draw, without_true_class

# relative to the norm
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5}
ALL = CASES | {"fedlc without the true class": without_true_class}
# more rows than columns, fewer, and of four dimensions; too few for some functions or for all
SHAPES = [(30, 4), (7, 30), (6, 3, 4, 4), (3, 5), (1, 5)]


def clients(*shape, seed=0):
    """Three clients' rows: with nothing special; with equal and nearly equal rows and a constant column; all equal."""
    z = draw(3, *shape, seed=seed)
    if shape[0] > 4:
        z[1, 1] = z[1, 0]
        z[1, 3] = z[1, 2] + 1e-3
    z[1, :, 0] = 0.5
    z[2] = z[2, :1].clone()
    return z


def inputs(x):
    """Inputs for all clients, who differ in labels, in missing classes and in which rows are equal."""
    given = [beside(own, seed=10 * number) for number, own in enumerate(x)]
    given = {name: torch.stack([one[name] for one in given]) for name in given[0]}
    given["other"] = clients(*x.shape[1:], seed=1).roll(1, 0)
    given["labels"][1], given["counts"][1, 0] = given["labels"][1].flip(0), 7
    given["known"] &= torch.tensor([[True], [True], [False]])
    return given


def gradients(values, x, given):
    """Of finite entries: the logits of missing classes may be minus infinity."""
    trained = [part for part in (x, *given.values()) if part.requires_grad]
    total = torch.where(values.isfinite(), values, 0).sum()
    return torch.autograd.grad(total, trained, materialize_grads=True)


def training(part):
    return part.detach().clone().requires_grad_(part.is_floating_point())


def alone(function, x, given):
    """Of each client by itself: the value, and the gradients by what has one."""
    results = []
    for number in range(len(x)):
        own, others = training(x[number]), {name: training(value[number]) for name, value in given.items()}
        value = function(own, others)
        results.append((value.detach(), *gradients(value, own, others)))
    return tuple(map(torch.stack, zip(*results, strict=True)))


def side_by_side(function, x, given):
    x, given = training(x), {name: training(value) for name, value in given.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # where torch.vmap has no rule, it warns, and goes through the clients in a loop
        values = torch.vmap(function)(x, given)
    return values.detach(), *gradients(values, x, given)


def assert_same(function, x, given=None, dtype=torch.float64):
    x, given = x.to(dtype), converted(given or {}, dtype)
    for quantity, other in zip(alone(function, x, given), side_by_side(function, x, given), strict=True):
        assert quantity.dtype == other.dtype and quantity.shape == other.shape
        for one, same in zip(quantity, other, strict=True):  # client by client
            infinite = one.isinf()
            assert torch.equal(one[infinite], same[infinite])
            one, same = one[~infinite], same[~infinite]
            assert (one - same).norm() <= TOLERANCES[dtype] * one.norm(), (one, same)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", ALL)
def test_each_client_has_the_value_and_gradient_that_it_has_alone(name, dtype):
    for shape in SHAPES:
        if len(shape) == 2 or not name.startswith((*OF_LOGITS, "fedlc")):
            x = clients(*shape)
            assert_same(ALL[name], x, inputs(x), dtype)


def test_rows_that_are_not_finite_spoil_no_other_client():
    z, uniformity = draw(3, 7, 5), CASES["rbf_uniformity"]
    z[0, 0, 0], z[1, 0, 0] = torch.nan, torch.inf
    (values, gradient), (wanted, gradient_alone) = side_by_side(uniformity, z, {}), alone(uniformity, z, {})
    assert values[:2].tolist() == wanted[:2].tolist() == [0, 0]
    assert not gradient[:2].any() and not gradient_alone[:2].any()
    torch.testing.assert_close((values[2], gradient[2]), (wanted[2], gradient_alone[2]), rtol=1e-12, atol=1e-15)


def test_activations_in_channels_last():
    x, y = (clients(6, 3, 4, 4, seed=seed).movedim(2, -1).contiguous().movedim(-1, 2) for seed in (0, 1))
    assert x[0].is_contiguous(memory_format=torch.channels_last)
    for name in ("linear_cka", "linear_cka debiased"):
        assert_same(CASES[name], x, {"other": y})
