"""The embedded digits, NumPy files of one's own, subsets, and what is refused."""

import os
from urllib.error import URLError

import numpy as np
import pytest
import torch
from helpers.errors import refused
from helpers.runs import ready
from sklearn.datasets import load_digits

from fl_lightning.data import CIFAR10, MNIST, Digits, FashionMNIST, NpyImages


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    for split, number in (("train", 60), ("test", 20)):
        np.save(tmp_path / f"{split}_images.npy", rng.integers(0, 256, (number, 6, 6, 3), dtype=np.uint8))
        np.save(tmp_path / f"{split}_labels.npy", np.arange(number) % 4)
    return tmp_path


def rows_of(**kwargs):
    """The training rows of all clients, in order."""
    data = ready(Digits(num_clients=3, **kwargs))
    return torch.cat([data.train_dataloader(k).rows for k in range(3)]).sort().values


# ---------------------------------------------------------------- Digits
def test_digits_are_split_80_20_in_every_class_the_same_for_every_seed(monkeypatch):
    data = ready(Digits())
    train, test = data.plan.label_counts.sum(0), np.bincount(data.test_dataloader().labels)
    assert (train.sum(), test.sum()) == (1437, 360)
    assert np.abs(test / (train + test) - 0.2).max() < 0.01
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    assert torch.equal(ready(Digits()).test_dataloader().images, data.test_dataloader().images)


def test_digits_keep_their_values_and_resize_and_repeat():
    data = ready(Digits())
    values = torch.cat([data.train_dataloader(0).images, data.test_dataloader().images]).float() * 16 / 255
    assert values.sum().item() == pytest.approx(load_digits().images.sum(), rel=1e-3)
    x, _ = next(iter(ready(Digits(image_size=20, channels=3)).train_dataloader(0)))
    assert x.shape[1:] == (3, 20, 20) and torch.equal(x[:, 0], x[:, 2])


# ---------------------------------------------------------------- subsets
def test_a_subset_is_balanced_and_of_the_size_asked_for():
    data = ready(Digits(train_size=205, test_size=50, num_clients=3))
    counts = data.plan.label_counts.sum(0)
    assert counts.sum() == 205 and counts.max() - counts.min() <= 1
    assert sum(len(y) for _, y in data.test_dataloader()) == 50


def test_a_share_is_drawn_of_each_class():
    every, some = (ready(Digits(num_clients=1, **size)) for size in ({}, {"train_size": 0.25}))
    assert some.plan.label_counts[0].tolist() == np.round(0.25 * every.plan.label_counts[0]).tolist()


@pytest.mark.parametrize("size", [205, 0.25])
def test_a_subset_and_a_share_are_drawn_by_the_seed(monkeypatch, size):
    rows = rows_of(train_size=size)
    assert torch.equal(rows_of(train_size=size), rows)
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    assert len(rows_of(train_size=size)) == len(rows) and not torch.equal(rows_of(train_size=size), rows)


def test_a_share_keeps_the_proportions_of_unbalanced_classes_and_at_least_one_sample(folder):
    np.save(folder / "train_labels.npy", np.repeat([0, 2, 3], [40, 19, 1]))
    shares = {0.1: [4, 0, 2, 0], 0.5: [20, 0, 10, 0], 0.6: [24, 0, 11, 1]}
    for share, counts in shares.items():
        data = ready(NpyImages(str(folder), num_clients=1, train_size=share))
        assert data.plan.label_counts[0].tolist() == counts
    assert ready(NpyImages(str(folder), num_clients=1, train_size=1e-9)).plan.sizes.tolist() == [1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *(({"train_size": size}, ("data.train_size=",)) for size in (0, 1438, 0.0, 1.0, float("nan"))),
        ({"test_size": 0}, ("data.test_size=0",)),
        ({"num_clients": 0}, ("data.num_clients=0",)),
        ({"num_clients": 1438}, ("data.num_clients=1438",)),
        ({"num_clients": 20, "train_size": 10}, ("data.num_clients=20",)),
        ({"batch_size": 0}, ("data.batch_size=0",)),
        ({"eval_batch_size": 0}, ("data.eval_batch_size=0",)),
        ({"image_size": 0}, ("data.image_size=0",)),
        ({"channels": 2}, ("data.channels=2",)),
        ({"val_fraction": 1.0}, ("data.val_fraction=1.0",)),
        ({"val_fraction": 0.1, "train_size": 30}, ("data.val_fraction=0.1",)),
        ({"client_noise": -0.1}, ("data.client_noise=-0.1",)),
        ({"mean": [0.1, 0.2]}, ("data.mean=[0.1, 0.2]",)),
        ({"std": []}, ("data.std=[]",)),
        ({"std": [0.0]}, ("data.std=[0.0]",)),
    ],
)
def test_options_out_of_range_are_refused(options, words):
    with refused(*words):
        ready(Digits(**options))


# ---------------------------------------------------------------- NpyImages
def test_npy_images_are_memory_mapped_and_measured(folder):
    data = NpyImages(str(folder), num_clients=3)
    assert isinstance(data.load().train_images, np.memmap)
    ready(data)
    images = np.load(folder / "train_images.npy") / 255
    np.testing.assert_allclose(data.mean, images.mean((0, 1, 2)), rtol=1e-6)
    np.testing.assert_allclose(data.std, images.std((0, 1, 2)), rtol=1e-6)
    assert data.inference_arguments() == {"mean": list(data.mean), "std": list(data.std)}
    given = ready(NpyImages(str(folder), mean=[0.1, 0.2, 0.3]))
    assert given.mean == (0.1, 0.2, 0.3) and given.std == data.std
    with refused("data.std=[0.5, 0.5]"):
        ready(NpyImages(str(folder), std=[0.5, 0.5]))
    assert data.num_classes == 4
    assert data.info(1).label_counts.sum() == data.info(1).num_examples == 20


def test_grey_npy_images_get_a_channel(folder):
    for split in ("train", "test"):
        np.save(folder / f"{split}_images.npy", np.load(folder / f"{split}_images.npy")[..., 0])
    x, _ = next(iter(ready(NpyImages(str(folder))).test_dataloader()))
    assert x.shape == (20, 1, 6, 6)


BAD = {
    "length": ("train_labels.npy", np.arange(7), ("train_labels=", "60", "7")),
    "dtype": ("train_images.npy", np.zeros((60, 6, 6, 3)), ("train_images='float64 (60, 6, 6, 3)'", "uint8")),
    "shape": ("test_images.npy", np.zeros((20, 6), np.uint8), ("test_images='uint8 (20, 6)'", "uint8")),
    "height": ("test_images.npy", np.zeros((20, 8, 6, 3), np.uint8), ("test_images='8 x 6 x 3'", "6 x 6 x 3")),
    "channels first": (
        "train_images.npy",
        np.zeros((60, 3, 6, 6), np.uint8),
        ("train_images='uint8 (60, 3, 6, 6)'", "N, C, H, W", "images.transpose(0, 2, 3, 1)"),
    ),
    "one channel first": ("test_images.npy", np.zeros((20, 1, 6, 6), np.uint8), ("test_images=", "N, C, H, W")),
    "negative": ("train_labels.npy", np.arange(60) - 1, ("train_labels=-1",)),
    "stray label": ("test_labels.npy", np.full(20, 10**9), ("labels=1000000000", "80")),
    "floats": ("test_labels.npy", np.zeros(20), ("test_labels='float64 (20,)'", "integers")),
    "no test": ("test_labels.npy", np.arange(0), ("test_labels=", "20", "0")),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arrays_are_refused_with_a_hint(folder, case):
    name, array, words = BAD[case]
    np.save(folder / name, array)
    with refused(*words):
        ready(NpyImages(str(folder)))


def test_objects_are_never_unpickled(folder):
    class Opened:
        def __reduce__(self):
            return os.mkdir, (str(folder / "opened"),)

    np.save(folder / "train_labels.npy", np.array([Opened()]), allow_pickle=True)
    with refused("data.root=", "train_labels.npy"):
        ready(NpyImages(str(folder)))
    assert not (folder / "opened").exists()


# ---------------------------------------------------------------- downloads
def test_cifar10_is_downloaded_by_prepare_data_only(monkeypatch):
    calls = []

    def source(root, train=True, download=False):
        calls.append((train, download))
        number = 40 if train else 10
        arrays = {"data": np.zeros((number, 32, 32, 3), np.uint8), "targets": [i % 10 for i in range(number)]}
        return type("Source", (), arrays)

    monkeypatch.setattr("torchvision.datasets.CIFAR10", source)
    CIFAR10("there").prepare_data()
    assert calls == []
    data = CIFAR10("there", download=True, num_clients=2)
    data.prepare_data()
    assert calls == [(True, True), (False, True)]
    ready(data)
    assert calls[2:] == [(True, False), (False, False)]
    black, _ = next(iter(data.train_dataloader(0)))
    torch.testing.assert_close(black.amax((0, 2, 3)), torch.tensor([-125.3 / 63.0, -123.0 / 62.1, -113.9 / 66.7]))


def test_files_that_are_there_are_not_downloaded(monkeypatch, tmp_path):
    monkeypatch.setattr("torchvision.datasets.FashionMNIST", None)
    monkeypatch.setattr(FashionMNIST, "read", lambda self, root: root)
    FashionMNIST(str(tmp_path), download=True).prepare_data()


def test_a_failed_download_names_the_key_and_a_hint(monkeypatch, tmp_path):
    def fail(root, **options):
        raise URLError("no network")

    monkeypatch.setattr("torchvision.datasets.CIFAR10", fail)
    monkeypatch.setattr("torchvision.datasets.MNIST", fail)
    for kind, layout in ((CIFAR10, "cifar-10-batches-py"), (MNIST, "train-images-idx3")):
        with refused("data.download=True", "no network", layout):
            kind(str(tmp_path), download=True).prepare_data()
