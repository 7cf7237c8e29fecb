"""Data sets, their batches and their refusals."""

import os
from collections import Counter
from urllib.error import URLError

import numpy as np
import pytest
import torch
from helpers.errors import refused

from fl_lightning.data import (
    CIFAR10,
    AutoAugment,
    Batches,
    Digits,
    NpyImages,
    RandomCrop,
    RandomFlip,
    RandomRotation,
    augmentation,
    datamodule,
)
from fl_lightning.data.augmentation import rotated


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    for split, number in (("train", 60), ("test", 20)):
        np.save(tmp_path / f"{split}_images.npy", rng.integers(0, 256, (number, 6, 6, 3), dtype=np.uint8))
        np.save(tmp_path / f"{split}_labels.npy", np.arange(number) % 4)
    return tmp_path


def ready(data):
    data.setup()
    return data


def test_digits_are_split_80_20_in_every_class():
    data = ready(Digits())
    train, test = data._train[1], data._test[1]
    assert (len(train), len(test)) == (1437, 360)
    share = torch.bincount(test) / (torch.bincount(test) + torch.bincount(train))
    assert share.min() > 0.19
    assert share.max() < 0.21


def test_digits_test_set_is_the_same_for_every_seed(monkeypatch):
    first = ready(Digits())._test[0]
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    assert torch.equal(ready(Digits())._test[0], first)


def test_digits_keep_their_values_and_resize_and_repeat():
    from sklearn.datasets import load_digits

    data = ready(Digits())
    values = torch.cat([data._train[0], data._test[0]]).float() * 16 / 255
    assert values.sum().item() == pytest.approx(load_digits().images.sum(), rel=1e-3)
    assert ready(Digits(image_size=20, channels=3))._train[0].shape == (1437, 20, 20, 3)
    x, _ = next(iter(ready(Digits(image_size=20, channels=3)).train_dataloader(0)))
    assert torch.equal(x[:, 0], x[:, 2])


@pytest.mark.parametrize("options", [{}, {"image_size": 24}])
def test_normalised_digits_have_mean_0_and_deviation_1(options):
    data = ready(Digits(num_clients=1, **options))
    x = torch.cat([x for x, _ in data.train_dataloader(0)])
    assert abs(x.mean()) < 0.1
    assert x.std() == pytest.approx(1, abs=0.15)


def test_a_subset_is_balanced_seeded_and_of_the_size_asked_for(monkeypatch):
    data = ready(Digits(train_size=205, test_size=50, num_clients=3))
    counts = data.plan.label_counts.sum(0)
    assert counts.sum() == 205
    assert counts.max() - counts.min() <= 1
    assert sum(len(y) for _, y in data.test_dataloader()) == 50
    rows = torch.cat(data._rows).sort().values
    assert torch.equal(torch.cat(ready(Digits(train_size=205, num_clients=3))._rows).sort().values, rows)
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    assert not torch.equal(torch.cat(ready(Digits(train_size=205, num_clients=3))._rows).sort().values, rows)


def test_a_share_is_drawn_of_each_class_and_seeded(monkeypatch):
    every, some = (ready(Digits(num_clients=1, **size)) for size in ({}, {"train_size": 0.25}))
    expected = np.round(0.25 * every.plan.label_counts[0])
    assert some.plan.label_counts[0].tolist() == expected.tolist()
    assert torch.equal(ready(Digits(num_clients=1, train_size=0.25))._rows[0], some._rows[0])
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    assert not torch.equal(ready(Digits(num_clients=1, train_size=0.25))._rows[0].sort().values, some._rows[0])


def test_a_share_keeps_the_proportions_of_unbalanced_classes_and_at_least_one_sample():
    labels = np.repeat([0, 2, 5], [1000, 100, 3])
    assert np.bincount(labels[datamodule.balanced_subset(labels, 0.1, "train_size")]).tolist() == [100, 0, 10]
    rows = np.arange(900, len(labels))
    drawn = datamodule.balanced_subset(labels, 0.5, "train_size", rows)
    assert np.bincount(labels[drawn]).tolist() == [50, 0, 50, 0, 0, 2] and set(drawn) <= set(rows)
    assert np.array_equal(drawn, np.unique(drawn))
    assert len(datamodule.balanced_subset(labels, 1e-9, "train_size")) == 1


@pytest.mark.parametrize("size", [0.0, 1.0, 1.5, -0.5, float("nan"), 0, 1438])
def test_a_size_that_is_neither_a_number_of_images_nor_a_share_is_refused(size):
    with refused("data.train_size="):
        ready(Digits(train_size=size))


def batches(n=10, size=4, **kwargs):
    images = torch.arange(n * 12, dtype=torch.uint8).reshape(n, 2, 2, 3)
    return Batches(images, torch.arange(n), torch.arange(n), size, **kwargs)


def test_batches_are_normalised_per_channel():
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    loader = batches(mean=mean, std=std)
    x, y = next(iter(loader))
    plain = loader.images[:4].permute(0, 3, 1, 2).double() / 255
    plain = (plain - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    torch.testing.assert_close(x.double(), plain, atol=1e-6, rtol=1e-5)
    assert x.is_contiguous()
    assert y.tolist() == [0, 1, 2, 3]


def test_an_epoch_holds_every_row_once_and_drop_last_drops_the_rest():
    labels = [y for _, y in batches(shuffle=True)]
    assert [len(y) for y in labels] == [4, 4, 2] and len(batches()) == 3
    assert torch.cat(labels).sort().values.tolist() == list(range(10))
    assert [[len(y) for _, y in batches(n)] for n in (3, 8, 9)] == [[3], [4, 4], [4, 4, 1]]
    assert [len(y) for _, y in batches(drop_last=True)] == [4, 4] and len(batches(drop_last=True)) == 2


def test_the_order_comes_from_the_loaders_own_generator_only():
    loader = batches(shuffle=True)

    def order(seed):
        loader.generator.manual_seed(seed)
        return torch.cat([y for _, y in loader]).tolist()

    first = order(1)
    torch.manual_seed(5)
    assert order(1) == first != order(2)


def test_a_crop_is_one_of_the_possible_crops_and_each_image_has_its_own():
    images = torch.randint(1, 255, (40, 3, 6, 6), dtype=torch.uint8)
    cropped = RandomCrop(2)(images, torch.Generator().manual_seed(0))
    padded = torch.nn.functional.pad(images, [2] * 4)
    places_taken = []
    for before, after in zip(padded, cropped, strict=True):
        places = [(i, j) for i in range(5) for j in range(5) if torch.equal(before[:, i : i + 6, j : j + 6], after)]
        assert len(places) == 1
        places_taken += places
    assert len(set(places_taken)) > 10
    reflected = RandomCrop(2, "reflect")(images, torch.Generator().manual_seed(0))
    assert reflected.min() > 0 == cropped.min()


def test_a_crop_that_reflects_more_than_the_image_is_refused():
    with refused("RandomCrop.padding=6"):
        RandomCrop(6, "reflect")(torch.zeros(2, 1, 6, 8, dtype=torch.uint8), torch.Generator())


def test_augmented_batches_are_a_function_of_the_loaders_generator():
    loader = batches(shuffle=True, augment=[RandomCrop(1), RandomFlip()])

    def values(seed):
        loader.generator.manual_seed(seed)
        return torch.cat([x for x, _ in loader])

    first = values(1)
    torch.manual_seed(5)
    assert torch.equal(values(1), first)
    assert not torch.equal(values(2), first)
    assert first.shape == (10, 3, 2, 2)


def test_a_batch_is_no_longer_touched_once_it_is_given():
    loader = batches()
    given = list(loader)
    for (x, _), (y, _) in zip(given, loader, strict=True):
        assert torch.equal(x, y)
    given[0][0].zero_()
    assert torch.equal(next(iter(loader))[0], next(iter(batches()))[0])


def test_flips_are_exact_and_as_frequent_as_asked_for():
    images = torch.randint(0, 255, (400, 1, 4, 4), dtype=torch.uint8)
    before = images.clone()
    flipped = RandomFlip(0.3)(images, torch.Generator().manual_seed(0))
    assert torch.equal(images, before)
    turned = (flipped != images).flatten(1).any(1)
    assert torch.equal(flipped[turned], images[turned].flip(-1))
    assert 0.2 < turned.float().mean() < 0.4


def test_npy_images_are_memory_mapped_and_measured(folder):
    data = NpyImages(str(folder), num_clients=3)
    images = data.load()
    assert isinstance(images.train_images, np.memmap)
    ready(data)
    images = np.load(folder / "train_images.npy") / 255
    np.testing.assert_allclose(data.mean, images.mean((0, 1, 2)), rtol=1e-6)
    np.testing.assert_allclose(data.std, images.std((0, 1, 2)), rtol=1e-6)
    assert data.num_classes == 4
    assert data.info(1).label_counts.sum() == data.info(1).num_examples == 20


def test_grey_npy_images_get_a_channel(folder):
    for split in ("train", "test"):
        np.save(folder / f"{split}_images.npy", np.load(folder / f"{split}_images.npy")[..., 0])
    x, _ = next(iter(ready(NpyImages(str(folder))).test_dataloader()))
    assert x.shape == (20, 1, 6, 6)


def spoil(folder, name, array):
    np.save(folder / name, array, allow_pickle=True)


BAD = {
    "length": ("train_labels.npy", np.arange(7), ("train_labels=", "60", "7")),
    "dtype": ("train_images.npy", np.zeros((60, 6, 6, 3)), ("train_images='float64 (60, 6, 6, 3)'", "uint8")),
    "shape": ("test_images.npy", np.zeros((20, 6), np.uint8), ("test_images='uint8 (20, 6)'", "uint8")),
    "negative": ("train_labels.npy", np.arange(60) - 1, ("train_labels=-1",)),
    "height": ("test_images.npy", np.zeros((20, 8, 6, 3), np.uint8), ("test_images='8 x 6 x 3'", "6 x 6 x 3")),
    "stray label": ("test_labels.npy", np.full(20, 10**9), ("labels=1000000000", "80")),
    "float pixels": (
        "train_images.npy",
        np.zeros((60, 6, 6, 3), np.float32),
        ("train_images='float32 (60,", "uint8"),
    ),
    "object pixels": ("train_images.npy", np.array([{}] * 60), ("data.root=", "train_images.npy")),
    "records": ("train_images.npy", np.zeros(60, [("a", "u1")]), ("train_images=", "uint8")),
    "no test": ("test_labels.npy", np.arange(0), ("test_labels=", "20", "0")),
    "number": ("train_images.npy", np.uint8(3), ("train_images='uint8 ()'", "uint8")),
    "empty pixels": (
        "train_images.npy",
        np.zeros((60, 0, 6, 3), np.uint8),
        ("train_images='uint8 (60, 0,", "uint8"),
    ),
    "channels": ("test_images.npy", np.zeros((20, 6, 6, 1), np.uint8), ("test_images='6 x 6 x 1'", "6 x 6 x 3")),
    "one label": ("train_labels.npy", np.int64(1), ("train_labels='int64 ()'", "integers")),
    "words": ("train_labels.npy", np.array(["cat"] * 60), ("train_labels=", "integers")),
    "none": ("train_images.npy", np.zeros((0, 6, 6, 3), np.uint8), ("train_labels=", "0", "60")),
    "floats": ("test_labels.npy", np.zeros(20), ("test_labels='float64 (20,)'", "integers")),
    "objects": ("train_labels.npy", np.array([{}] * 60), ("data.root=", "train_labels.npy")),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arrays_are_refused_with_a_hint(folder, case):
    name, array, words = BAD[case]
    spoil(folder, name, array)
    with refused(*words):
        ready(NpyImages(str(folder)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mean": [0.5, 0.5]}, ("data.mean=[0.5, 0.5]",)),
        ({"std": [0.5, 0.5]}, ("data.std=[0.5, 0.5]",)),
        ({"std": [0.5, 0.0, 0.5]}, ("data.std=",)),
    ],
)
def test_statistics_that_do_not_fit_are_refused(folder, options, message):
    with refused(*message):
        ready(NpyImages(str(folder), **options))


def test_given_statistics_are_used_and_the_other_is_measured(folder):
    data = ready(NpyImages(str(folder), mean=[0.1, 0.2, 0.3]))
    assert data.mean == (0.1, 0.2, 0.3)
    images = np.load(folder / "train_images.npy") / 255
    np.testing.assert_allclose(data.std, images.std((0, 1, 2)), rtol=1e-6)


def test_objects_are_never_unpickled(folder):
    class Opened:
        def __reduce__(self):
            return os.mkdir, (str(folder / "opened"),)

    spoil(folder, "train_labels.npy", np.array([Opened()]))
    with refused("data.root=", "train_labels.npy"):
        ready(NpyImages(str(folder)))
    assert not (folder / "opened").exists()
    np.load(folder / "train_labels.npy", allow_pickle=True)
    assert (folder / "opened").exists()


class _FakeCIFAR10:
    calls: list = []  # noqa: RUF012

    def __init__(self, root, train=True, download=False):
        self.calls.append((train, download))
        number = 40 if train else 10
        self.data, self.targets = np.zeros((number, 32, 32, 3), np.uint8), [i % 10 for i in range(number)]


def test_cifar10_is_downloaded_by_prepare_data_only(monkeypatch):
    monkeypatch.setattr(CIFAR10, "source", _FakeCIFAR10)
    monkeypatch.setattr(_FakeCIFAR10, "calls", [])
    CIFAR10("there").prepare_data()
    assert _FakeCIFAR10.calls == []
    data = CIFAR10("there", download=True, num_clients=2)
    data.prepare_data()
    assert _FakeCIFAR10.calls == [(True, True), (False, True)]
    ready(data)
    assert _FakeCIFAR10.calls[2:] == [(True, False), (False, False)]
    black, _ = next(iter(data.train_dataloader(0)))
    expected = torch.tensor([-125.3 / 63.0, -123.0 / 62.1, -113.9 / 66.7])
    torch.testing.assert_close(black.amax((0, 2, 3)), expected)


def test_a_file_that_is_no_npy_is_refused(folder):
    (folder / "test_labels.npy").write_text("not numbers")
    with refused("data.root=", "test_labels.npy"):
        ready(NpyImages(str(folder)))


def test_several_arrays_in_one_file_are_refused(folder):
    np.savez(folder / "both.npz", np.arange(60))
    (folder / "both.npz").rename(folder / "train_labels.npy")
    with refused("data.root=", "train_labels.npy"):
        ready(NpyImages(str(folder)))


def test_a_failed_download_names_the_key_and_a_hint(monkeypatch, tmp_path):
    def fail(self, root, train=True, download=False):
        raise URLError("no network")

    monkeypatch.setattr(CIFAR10, "source", type("Source", (), {"__init__": fail}))
    with refused("data.download=True", "no network", "cifar-10-batches-py"):
        CIFAR10(str(tmp_path), download=True).prepare_data()


def test_an_unknown_policy_is_refused():
    with refused("AutoAugment.policy='mnist'", "cifar10"):
        AutoAugment("mnist")


def test_missing_folders_name_the_key_and_the_files(tmp_path):
    with refused("data.root=", "train_images.npy"):
        ready(NpyImages(str(tmp_path / "nowhere")))
    with refused("data.root=", "data.download"):
        ready(CIFAR10(str(tmp_path / "nowhere")))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_clients": 0}, ("data.num_clients=0",)),
        ({"num_clients": 1438}, ("data.num_clients=1438",)),
        ({"batch_size": 0}, ("data.batch_size=0",)),
        ({"eval_batch_size": 0}, ("data.eval_batch_size=0",)),
        ({"image_size": 0}, ("data.image_size=0",)),
        ({"num_clients": 20, "train_size": 10}, ("data.num_clients=20",)),
        ({"train_size": 2000}, ("data.train_size=2000",)),
        ({"test_size": 0}, ("data.test_size=0",)),
        ({"channels": 2}, ("data.channels=2",)),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with refused(*message):
        ready(Digits(**options))


@pytest.mark.parametrize("change", [RandomRotation(30), AutoAugment()])
def test_rotation_and_autoaugment_draw_for_each_image_from_the_loaders_generator_alone(change):
    one = np.random.default_rng(0).integers(0, 255, (1, 3, 16, 16), dtype=np.uint8)
    images = torch.from_numpy(one).repeat(8, 1, 1, 1)
    before = torch.random.get_rng_state()
    first, second, other = (change(images, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert first.dtype == torch.uint8 and first.shape == images.shape
    assert torch.equal(first, second) and not torch.equal(first, other)
    assert len({image.numpy().tobytes() for image in first}) > 4


@pytest.mark.parametrize("shape", [(40, 3, 32, 32), (40, 1, 28, 28), (40, 3, 20, 33)])
@pytest.mark.parametrize("largest", [15, 180])
def test_a_batch_is_rotated_as_torchvision_rotates_each_image(shape, largest):
    from torchvision.transforms.v2.functional import rotate

    images = torch.randint(1, 256, shape, dtype=torch.uint8)
    degrees = torch.linspace(-largest, largest, 41)[:-1] + 0.1
    expected = torch.stack([rotate(image, float(angle)) for image, angle in zip(images, degrees, strict=True)])
    # pixels halfway between two may fall on either
    assert (rotated(images, degrees) != expected).float().mean() < 2e-3
    assert torch.equal(rotated(images, torch.zeros(40)), images)


def test_a_batch_is_rotated_at_once(monkeypatch):
    calls = []
    monkeypatch.setattr(augmentation, "grid_sample", lambda x, *a, **k: calls.append(len(x)) or x)
    RandomRotation()(torch.zeros(64, 3, 32, 32, dtype=torch.uint8), torch.Generator())
    assert calls == [64]


def test_rotation_stays_within_its_angle():
    images = torch.zeros(200, 1, 33, 33, dtype=torch.uint8)
    images[:, :, :16, 16] = 255
    rotated_rows = RandomRotation(20)(images, torch.Generator().manual_seed(0))[:, 0, 2].float()
    angles = torch.rad2deg(torch.atan((rotated_rows.argmax(1) - 16) / 14.0))
    assert angles.abs().max() < 24 and angles.max() > 14 and angles.min() < -14
    with refused("RandomRotation.degrees=200"):
        RandomRotation(200)


# ---------------------------------------------------------------- AutoAugment
POLICIES = ("cifar10", "imagenet", "svhn")


def torchvisions(policy, image, pair, chances, signs, monkeypatch):
    """What torchvision's AutoAugment makes of one image when it draws these numbers."""
    from torchvision.transforms import v2

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


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((250, 3, 32, 32), torch.contiguous_format),
        ((100, 3, 21, 34), torch.channels_last),
        ((100, 1, 28, 28), torch.contiguous_format),
    ],
    ids=["RGB", "channels_last", "grey"],
)
def test_autoaugment_gives_what_torchvision_gives_for_each_image_alone(policy, shape, layout, monkeypatch):
    coarse = torch.randint(0, 256, (*shape[:2], 4, 4), generator=torch.Generator().manual_seed(0)).float()
    images = torch.nn.functional.interpolate(coarse, shape[2:], mode="bilinear").to(torch.uint8)
    images[:2] = torch.tensor([0, 255]).view(2, 1, 1, 1)
    images = images.contiguous(memory_format=layout)
    before = images.clone()
    changed = AutoAugment(policy)(images, torch.Generator().manual_seed(3))
    assert torch.equal(images, before) and changed.is_contiguous()
    generator = torch.Generator().manual_seed(3)
    pairs = torch.randint(25, (shape[0],), generator=generator).tolist()
    chances, signs = torch.rand(2, shape[0], 2, generator=generator).tolist()
    for image, after, *draws in zip(images, changed, pairs, chances, signs, strict=True):
        assert torch.equal(after, torchvisions(policy, image.contiguous(), *draws, monkeypatch))


def test_autoaugment_changes_the_images_of_one_operation_together(monkeypatch):
    calls, real = [], augmentation.apply_operation
    monkeypatch.setattr(
        augmentation, "apply_operation", lambda x, *args: calls.append((len(x), *args)) or real(x, *args)
    )
    AutoAugment()(torch.zeros(500, 3, 8, 8, dtype=torch.uint8), torch.Generator().manual_seed(0))
    # once among the first operations of the images, once among the second
    assert max(Counter(tuple(operation) for _, *operation in calls).values()) <= 2
    assert len(calls) < 100 < sum(number for number, *_ in calls)


def test_autoaugment_draws_every_pair_equally_often(monkeypatch):
    pairs = [(augmentation.Operation(str(i), 1.0, 0.0, False),) * 2 for i in range(25)]
    monkeypatch.setattr(augmentation, "operation_pairs", lambda *args: pairs)
    drawn = AutoAugment().draw(torch.zeros(50_000, 1, 1, 1), torch.Generator().manual_seed(0))
    counts = np.bincount([int(name) for (name, _), _ in drawn], minlength=25)
    # chi-squared with 24 degrees of freedom exceeds 51 once in 1,000 times
    assert len(counts) == 25 and ((counts - 2000) ** 2 / 2000).sum() < 51


def test_autoaugment_applies_and_negates_as_often_as_the_policy_says(monkeypatch):
    pair = (augmentation.Operation("a", 0.3, 2.0, True), augmentation.Operation("b", 0.8, 3.0, False))
    monkeypatch.setattr(augmentation, "operation_pairs", lambda *args: [pair])
    drawn = AutoAugment().draw(torch.zeros(20_000, 1, 1, 1), torch.Generator().manual_seed(0))
    first = [magnitude for operations in drawn for name, magnitude in operations if name == "a"]
    second = [magnitude for operations in drawn for name, magnitude in operations if name == "b"]
    assert len(first) / 20_000 == pytest.approx(0.3, abs=0.015) and set(first) == {2.0, -2.0}
    assert np.mean(np.sign(first)) == pytest.approx(0, abs=0.06)
    assert len(second) / 20_000 == pytest.approx(0.8, abs=0.015) and set(second) == {3.0}
    both = sum(len(operations) == 2 for operations in drawn) / 20_000
    assert both == pytest.approx(0.24, abs=0.015)


def test_the_private_names_of_torchvision_are_where_they_were():
    """Of torchvision 0.21 and 0.29; the only other place is augmentation.py."""
    from torchvision.transforms import v2

    transform = v2.AutoAugment(v2.AutoAugmentPolicy.CIFAR10)
    assert len(transform._policies) == 25
    assert {len(one) for pair in transform._policies for one in pair} == {3}
    assert all(name in transform._AUGMENTATION_SPACE for pair in transform._policies for name, *_ in pair)
    assert (
        transform._AUGMENTATION_SPACE["Rotate"][0](10, 32, 32)[3] == 10 and transform._AUGMENTATION_SPACE["Rotate"][1]
    )
    image = torch.arange(48, dtype=torch.uint8).view(1, 3, 4, 4)
    inverted = transform._apply_image_or_video_transform(
        image, "Invert", 0.0, interpolation=transform.interpolation, fill=transform._fill
    )
    assert torch.equal(inverted, 255 - image)
    for policy in POLICIES:
        assert len(augmentation.operation_pairs(policy, 32, 32)) == 25
