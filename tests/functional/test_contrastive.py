"""FedCKA's contrast of two similarities."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from fl_lightning.functional import linear_cka, representation_contrast


@settings(max_examples=25, deadline=None)
@given(to_global=st.floats(0, 1), to_previous=st.floats(0, 1))
def test_the_papers_fraction_and_its_range(to_global, to_previous):
    found = representation_contrast(*torch.tensor([to_global, to_previous], dtype=torch.float64)).item()
    fraction = math.exp(to_global) / (math.exp(to_global) + math.exp(to_previous))
    assert found == pytest.approx(-math.log(fraction))
    assert math.log(1 + math.exp(-1)) - 1e-9 <= found <= math.log(1 + math.e) + 1e-9


def test_equal_similarities_give_log_2_and_large_ones_no_overflow():
    assert representation_contrast(torch.tensor(0.3), torch.tensor(0.3)).item() == pytest.approx(math.log(2))
    assert representation_contrast(torch.tensor(0.0), torch.tensor(1e4)).item() == 1e4
    assert representation_contrast(torch.tensor(1e4), torch.tensor(0.0)).item() == 0


def test_gradient():
    similarities = torch.tensor([0.9, 0.2], dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda s: representation_contrast(s[0], s[1]), similarities)


def test_descent_moves_towards_global_and_away_from_previous():
    generator = torch.Generator().manual_seed(0)
    x, near, far = (torch.randn(16, 4, generator=generator) for _ in range(3))
    x.requires_grad_()
    representation_contrast(linear_cka(x, near), linear_cka(x, far)).backward()
    moved = x.detach() - 0.5 * x.grad
    assert linear_cka(moved, near) > linear_cka(x, near)
    assert linear_cka(moved, far) < linear_cka(x, far)
