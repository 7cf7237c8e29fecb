"""The contrasts of FedCKA and MOON: values, extremes, and the direction of descent."""

import math

import formulas
import pytest
import torch
from formulas import draw
from torch.nn.functional import cosine_similarity

from fl_lightning.functional import linear_cka, model_contrastive_loss, representation_contrast


def test_equal_similarities_give_log_2_and_large_ones_no_overflow():
    assert representation_contrast(torch.tensor(0.3), torch.tensor(0.3)).item() == pytest.approx(math.log(2))
    assert representation_contrast(torch.tensor(0.0), torch.tensor(1e4)).item() == 1e4
    assert representation_contrast(torch.tensor(1e4), torch.tensor(0.0)).item() == 0


def test_fedcka_descends_towards_global_and_away_from_previous():
    x, near, far = (draw(16, 4, seed=seed) for seed in range(3))
    x.requires_grad_()
    representation_contrast(linear_cka(x, near), linear_cka(x, far)).backward()
    moved = x.detach() - 0.5 * x.grad
    assert linear_cka(moved, near) > linear_cka(x, near)
    assert linear_cka(moved, far) < linear_cka(x, far)


def test_moon_descends_towards_global_and_away_from_previous():
    z, near, far = (draw(16, 4, seed=seed) for seed in range(3))
    z.requires_grad_()
    model_contrastive_loss(z, near, [far]).backward()
    moved = z.detach() - 0.5 * z.grad
    assert (cosine_similarity(moved, near) - cosine_similarity(moved, far)).mean() > (
        cosine_similarity(z, near) - cosine_similarity(z, far)
    ).mean()


def test_moon_without_previous_models_is_a_zero_in_the_graph():
    z = torch.full((3, 4), torch.inf, requires_grad=True)
    value = model_contrastive_loss(z, z.detach())
    value.backward()
    assert value.item() == 0 and torch.equal(z.grad, torch.zeros_like(z))


def test_moon_lies_between_0_and_two_over_the_temperature():
    z = draw(4, 3)
    # opposite directions differ by 2 in cosine, 200 in the logits
    assert model_contrastive_loss(z, z, [-z], 0.01).item() == pytest.approx(0, abs=1e-12)
    assert model_contrastive_loss(z, -z, [z], 0.01).item() == pytest.approx(200)


def test_moon_flattens_feature_maps():
    z, near, far = (draw(4, 2, 3, seed=seed) for seed in range(3))
    expected = formulas.moon(z.flatten(1).numpy(), [near.flatten(1).numpy(), far.flatten(1).numpy()], 0.5)
    assert model_contrastive_loss(z, near, [far]).item() == pytest.approx(expected, rel=1e-9)


def test_moon_converts_every_representation_to_float32():
    z, near, far = (draw(6, 5, seed=seed).bfloat16() for seed in range(3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        narrow = model_contrastive_loss(z, near, [far])
        mixed = model_contrastive_loss(z.float(), near, z_previous=(far,))
    expected = formulas.moon(z.double().numpy(), [near.double().numpy(), far.double().numpy()], 0.5)
    assert narrow.dtype == torch.float32
    assert narrow.item() == mixed.item() == pytest.approx(expected, rel=1e-6)
