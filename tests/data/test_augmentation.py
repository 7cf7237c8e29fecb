"""Augmentations of a batch, each image by itself, drawn from the loader's generator."""

import numpy as np
import pytest
import torch
from helpers.errors import refused
from helpers.tiers import sample
from torchvision.transforms import v2
from torchvision.transforms.v2.functional import rotate

from fl_lightning.data import AutoAugment, RandomCrop, RandomFlip, RandomRotation


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("change", [RandomCrop(3), RandomFlip(), RandomRotation(30), AutoAugment()])
def test_each_image_is_changed_by_itself_and_by_the_loaders_generator_alone(change):
    one = np.random.default_rng(0).integers(0, 255, (1, 3, 16, 16), dtype=np.uint8)
    images = torch.from_numpy(one).repeat(8, 1, 1, 1)
    before = torch.random.get_rng_state()
    first, second, other = (change(images, seeded(seed)) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(images, torch.from_numpy(one).repeat(8, 1, 1, 1))
    assert first.dtype == torch.uint8 and first.shape == images.shape
    assert torch.equal(first, second) and not torch.equal(first, other)
    assert len({image.numpy().tobytes() for image in first}) > 1


def test_a_crop_is_one_of_the_possible_crops_and_each_image_has_its_own():
    images = torch.randint(1, 255, (40, 3, 6, 6), dtype=torch.uint8)
    cropped = RandomCrop(2)(images, seeded())
    padded = torch.nn.functional.pad(images, [2] * 4)
    places_taken = []
    for before, after in zip(padded, cropped, strict=True):
        places = [(i, j) for i in range(5) for j in range(5) if torch.equal(before[:, i : i + 6, j : j + 6], after)]
        assert len(places) == 1
        places_taken += places
    assert len(set(places_taken)) > 10 and {i for i, _ in places_taken} == {j for _, j in places_taken} == set(range(5))
    reflected = RandomCrop(2, "reflect")(images, seeded())
    assert reflected.min() > 0 == cropped.min()


def test_flips_are_exact_and_as_frequent_as_asked_for():
    images = torch.randint(0, 255, (400, 1, 4, 4), dtype=torch.uint8)
    flipped = RandomFlip(0.3)(images, seeded())
    turned = (flipped != images).flatten(1).any(1)
    assert torch.equal(flipped[turned], images[turned].flip(-1))
    assert 0.2 < turned.float().mean() < 0.4


@pytest.mark.parametrize("shape", [(40, 3, 32, 32), (40, 1, 28, 28), (40, 3, 20, 33)])
@pytest.mark.parametrize("largest", [15, 180])
def test_a_batch_is_rotated_as_torchvision_rotates_each_image(shape, largest):
    images = torch.randint(1, 256, shape, dtype=torch.uint8)
    degrees = largest * (2 * torch.rand(40, generator=seeded()) - 1)
    expected = torch.stack([rotate(image, float(angle)) for image, angle in zip(images, degrees, strict=True)])
    # pixels halfway between two may fall on either
    assert (RandomRotation(largest)(images, seeded()) != expected).float().mean() < 2e-3
    assert torch.equal(RandomRotation(0)(images, seeded()), images)


def test_a_reflection_of_more_pixels_than_there_are_is_refused():
    with refused("RandomCrop.padding=6"):
        RandomCrop(6, "reflect")(torch.zeros(2, 1, 6, 8), seeded())


def torchvisions(policy, image, pair, chances, signs, monkeypatch):
    """What torchvision's AutoAugment makes of one image when it draws these numbers."""
    transform = v2.AutoAugment(v2.AutoAugmentPolicy(policy))
    signed = {name for name, (_, has_sign) in transform._AUGMENTATION_SPACE.items() if has_sign}
    numbers = []
    for (name, probability, _), chance, sign in zip(transform._policies[pair], chances, signs, strict=True):
        numbers += [chance, sign] if chance <= probability and name in signed else [chance]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "randint", lambda high, size: pair)
        patch.setattr(torch, "rand", lambda size: numbers.pop(0))
        changed = transform(image)
    assert numbers == []
    return changed


CASES = [(policy, shape) for policy in ("cifar10", "imagenet", "svhn") for shape in ("square", "channels last", "grey")]
SHAPES = {"square": (250, 3, 32, 32), "channels last": (100, 3, 21, 34), "grey": (100, 1, 28, 28)}


@pytest.mark.parametrize("case", sample(CASES, ("cifar10", "channels last"), ("imagenet", "square"), ("svhn", "grey")))
def test_autoaugment_gives_what_torchvision_gives_for_each_image_alone(case, monkeypatch):
    (policy, name), shape = case, SHAPES[case[1]]
    coarse = torch.randint(0, 256, (*shape[:2], 4, 4), generator=seeded()).float()
    images = torch.nn.functional.interpolate(coarse, shape[2:], mode="bilinear").to(torch.uint8)
    images[:2] = torch.tensor([0, 255]).view(2, 1, 1, 1)
    layout = torch.channels_last if name == "channels last" else torch.contiguous_format
    images = images.contiguous(memory_format=layout)
    before = images.clone()
    changed = AutoAugment(policy)(images, seeded(3))
    assert torch.equal(images, before) and changed.is_contiguous()
    generator = seeded(3)
    pairs = torch.randint(25, (shape[0],), generator=generator).tolist()
    chances, signs = torch.rand(2, shape[0], 2, generator=generator).tolist()
    for image, after, *draws in zip(images, changed, pairs, chances, signs, strict=True):
        assert torch.equal(after, torchvisions(policy, image.contiguous(), *draws, monkeypatch))
