"""Data sets, their batches and their refusals."""

import numpy as np
import pytest
import torch

from fl_lightning.data import CIFAR10, Batches, Digits, NpyImages, RandomCrop, RandomFlip
from fl_lightning.errors import UsageError


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
    found = []
    for before, after in zip(padded, cropped, strict=True):
        places = [(i, j) for i in range(5) for j in range(5) if torch.equal(before[:, i : i + 6, j : j + 6], after)]
        assert len(places) == 1
        found += places
    assert len(set(found)) > 10
    reflected = RandomCrop(2, "reflect")(images, torch.Generator().manual_seed(0))
    assert reflected.min() > 0 == cropped.min()


def test_flips_are_exact_and_as_frequent_as_asked_for():
    images = torch.randint(0, 255, (400, 1, 4, 4), dtype=torch.uint8)
    flipped = RandomFlip(0.3)(images, torch.Generator().manual_seed(0))
    turned = (flipped != images).flatten(1).any(1)
    assert torch.equal(flipped[turned], images[turned].flip(-1))
    assert 0.2 < turned.float().mean() < 0.4


def test_npy_images_are_memory_mapped_and_measured(folder):
    data = NpyImages(str(folder), num_clients=3)
    found = data.load()
    assert isinstance(found.train_images, np.memmap)
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
    "length": ("train_labels.npy", np.arange(7), "60 images, 7 labels"),
    "dtype": ("train_images.npy", np.zeros((60, 6, 6, 3)), "give uint8"),
    "shape": ("test_images.npy", np.zeros((20, 6), np.uint8), "give uint8"),
    "negative": ("train_labels.npy", np.arange(60) - 1, "labels count from 0"),
    "floats": ("test_labels.npy", np.zeros(20), "give integers"),
    "objects": ("train_labels.npy", np.array([{}] * 60), "no .npy file of numbers"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arrays_are_refused_with_the_mend(folder, case):
    name, array, message = BAD[case]
    spoil(folder, name, array)
    with pytest.raises(UsageError, match=message):
        ready(NpyImages(str(folder)))


def test_a_file_that_is_no_npy_is_refused(folder):
    (folder / "test_labels.npy").write_text("not numbers")
    with pytest.raises(UsageError, match=r"test_labels.npy is no .npy file"):
        ready(NpyImages(str(folder)))


def test_missing_folders_name_the_key_and_the_files(tmp_path):
    with pytest.raises(UsageError, match=r"data.root='.*nowhere': train_images.npy.*not found"):
        ready(NpyImages(str(tmp_path / "nowhere")))
    with pytest.raises(UsageError, match=r"data.root=.*data.download: true"):
        ready(CIFAR10(str(tmp_path / "nowhere")))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_clients": 0}, "data.num_clients=0"),
        ({"num_clients": 1438}, r"data.num_clients=1438: there are 1437 training samples"),
        ({"batch_size": 0}, "data.batch_size=0"),
        ({"train_size": 2000}, "data.train_size=2000"),
        ({"test_size": 0}, "data.test_size=0"),
        ({"channels": 2}, "data.channels=2"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        ready(Digits(**options))
