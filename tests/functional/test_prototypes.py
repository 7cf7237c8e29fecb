"""FedProto's sums and distances: missing classes, feature maps, precision."""

import formulas
import numpy as np
import pytest
import torch
from formulas import draw

from fl_lightning.functional import class_sums, prototype_distance

TARGETS = torch.tensor([3, 1, 3, 3, 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_classes_in_float64_with_zeros_for_missing_ones(dtype):
    z = draw(5, 2, 2).to(dtype).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sums, counts = class_sums(z, TARGETS, 5)
    assert sums.dtype == counts.dtype == torch.float64
    assert not sums.requires_grad
    assert counts.shape == (5, 1) and counts[:, 0].tolist() == [0, 2, 0, 3, 0]
    rows = z.detach().double().numpy().reshape(5, 4)
    for c in range(5):
        expected = sum((rows[b] for b in range(5) if TARGETS[b] == c), np.zeros(4))
        np.testing.assert_allclose(sums[c].numpy(), expected, rtol=1e-12)


def test_feature_maps_are_flattened_for_the_prototype_distance():
    z, prototypes = draw(5, 2, 3), draw(4, 6, seed=1)
    known = torch.tensor([True, False, True, True])
    expected = formulas.prototype_distance(z.flatten(1).numpy(), TARGETS.tolist(), prototypes.numpy(), known.numpy())
    assert prototype_distance(z, TARGETS, prototypes, known).item() == pytest.approx(expected, rel=1e-9)


def test_an_example_of_a_class_without_prototype_counts_and_has_no_gradient():
    z = draw(5, 4).requires_grad_()
    prototypes = torch.full((4, 4), torch.nan).double()
    prototypes[3] = 0
    value = prototype_distance(z, TARGETS, prototypes, torch.tensor([False, False, False, True]))
    value.backward()
    assert value.item() == pytest.approx((z[TARGETS == 3] ** 2).sum().item() / 20)
    np.testing.assert_allclose(z.grad[TARGETS == 3].numpy(), z[TARGETS == 3].detach().numpy() / 10, rtol=1e-12)
    assert not z.grad[TARGETS == 1].any()
