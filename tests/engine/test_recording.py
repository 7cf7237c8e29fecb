"""Programs as lists of operations: what may be shared in them, and what must stay apart."""

from itertools import combinations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fl_lightning.engine.recorder import Recorder, native
from fl_lightning.engine.recording import Recording

aten = torch.ops.aten


class Called(TorchDispatchMode):
    """Notes the operations that are called in this block."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.__dict__.setdefault("names", []).append(func)
        return func(*args, **(kwargs or {}))


def recorded(program, *inputs):
    """A program of tensors, to be repeated, and what it gave."""
    with Recorder(inputs) as recorder:
        outputs = program(*inputs)
    again = Recording(recorder, len(inputs), outputs, None)
    again.write(recorder, outputs)
    return again, outputs


def gradients(loss):
    """The gradients of a loss, as ``backward`` leaves them."""

    def program(*inputs):
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        loss(*leaves).backward()
        return [leaf.grad for leaf in leaves]

    return program


@pytest.mark.parametrize(
    "loss",
    [
        lambda a, b: (a @ b.t()).square().sum(),
        lambda a, b: (a + b).square().sum(),  # one gradient for both
        lambda a, b: (a.sum() + b.sum()) * 2,  # expanded from one number
        lambda a, b: (a * b).sum(),  # each is the other leaf
        lambda a, b: a[:1].sum() + b.t()[:1].square().sum(),
    ],
)
def test_gradients_that_are_given_away_share_no_memory(loss):
    one, two, three, four = (torch.randn(5, 5) for _ in range(4))
    again, _ = recorded(gradients(loss), one, two)
    usual = gradients(loss)(three, four)
    for _ in range(2):
        given = again.repeat([three, four])
        assert all(torch.equal(mine, its) for mine, its in zip(given, usual, strict=True))
        places = [tensor.untyped_storage().data_ptr() for tensor in (*given, three, four)]
        assert all(a != b for a, b in combinations(places, 2))
        for tensor in given:
            tensor.fill_(torch.nan)  # as an optimizer or a clip by value may write to it


def test_a_gradient_is_not_copied_when_it_is_repeated():
    again, _ = recorded(gradients(lambda a, b: (a @ b.t()).square().sum()), *torch.randn(2, 5, 5))
    copied = [one.target for one in again.operations if one.target is aten.copy_.default]
    with Called() as called:
        again.repeat(torch.randn(2, 5, 5).unbind())
    assert copied and aten.copy_.default not in called.names


def test_a_copy_whose_memory_is_read_before_stays_one():
    def program(a):
        held = torch.zeros_like(a)
        first = held + 1
        held.copy_(a * 2)
        return [first, held]

    again, _ = recorded(program, torch.randn(3))
    assert [out.tolist() for out in again.repeat([torch.ones(3)])] == [[1.0] * 3, [2.0] * 3]


def test_a_native_function_is_the_operation_itself(monkeypatch):
    monkeypatch.setattr("fl_lightning.engine.recorder.NATIVE", {})
    a, b = torch.randn(2, 3, 3)
    assert native(aten.mm.default, [a, b], {}) is torch.mm
    assert native(aten.view.default, [a, [9]], {}) is torch.Tensor.view
    # another operation, one of others, and one that writes
    assert native(aten.mul.Scalar, [a, 2.0], {}) is aten.mul.Scalar
    assert native(aten._to_copy.default, [a], {"dtype": torch.float64}) is aten._to_copy.default
    assert native(aten.add_.Tensor, [a, b], {}) is aten.add_.Tensor


def test_batch_norm_counts_a_batch_once(monkeypatch):
    monkeypatch.setattr("fl_lightning.engine.recorder.NATIVE", {})
    mean, variance, ones = torch.zeros(4), torch.ones(4), torch.ones(4)

    def program(x, mean, variance):
        return list(aten.native_batch_norm.default(x, ones, ones, mean, variance, True, 0.5, 1e-5)[:1])

    recorded(program, torch.ones(8, 4), mean, variance)
    assert mean.tolist() == [0.5] * 4
