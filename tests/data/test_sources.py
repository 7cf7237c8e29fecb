"""Data sets in files: each format is read as it is, and damaged files are named."""

import gzip
import json
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.errors import refused
from helpers.image_files import write_femnist, write_ham10000, write_pacs
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning import data as sets
from fl_lightning.data.folders import FolderDataModule

RGB, GREY = (80, 167, 167), (153, 215, 180)
# channels, size, classes, training and test images of the offline data set; three corners of class 1; a file it needs
FORMATS = {
    sets.NpyImages: (3, 32, 10, 200, 100, RGB, "train_images.npy"),
    sets.MNIST: (1, 28, 10, 200, 100, GREY, "train-images-idx3"),
    sets.FashionMNIST: (1, 28, 10, 200, 100, GREY, "train-images-idx3"),
    sets.CIFAR10: (3, 32, 10, 200, 100, RGB, "cifar-10-batches-py"),
    sets.CIFAR100: (3, 32, 100, 200, 100, RGB, "cifar-100-python"),
    sets.SVHN: (3, 32, 10, 200, 100, RGB, "train_32x32.mat"),
    sets.STL10: (3, 96, 10, 100, 50, RGB, "stl10_binary"),
    sets.TinyImageNet: (3, 64, 200, 200, 100, RGB, "train/CLASS/images"),
    sets.ImageFolderImages: (3, 64, 12, 200, 100, RGB, "train/CLASS"),
    sets.SiteImageFolders: (3, 64, 3, 200, 100, RGB, "SITE/train/CLASS"),
    sets.PACS: (3, 96, 7, 84, 56, RGB, "art_painting/dog"),
    sets.OfficeHome: (3, 96, 65, 780, 260, RGB, "Art/CLASS"),
    sets.HAM10000: (3, 96, 7, 112, 56, RGB, "HAM10000_metadata.csv"),
    sets.FEMNIST: (1, 28, 62, 240, 80, GREY, "all_data_"),
}


def ready(data):
    data.prepare_data()
    data.setup()
    return data


def offline(kind, **kwargs):
    """The offline data set of a kind; the images of folders are small."""
    small = {"image_size": 16} if issubclass(kind, FolderDataModule) else {}
    return kind(offline=True, **small, **kwargs)


def all_of(loaders):
    batches = [batch for loader in loaders for batch in loader]
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


@pytest.mark.parametrize("kind", FORMATS)
def test_images_are_the_right_way_round_and_belong_to_their_labels(kind):
    """Each class has a pattern of 4 x 4 blocks: transposed, flipped or shuffled images have other corners."""
    channels, size, classes, train, test, corners, _ = FORMATS[kind]
    data = ready(offline(kind, num_clients=4, normalize=False))
    assert data.num_classes == classes and data.plan.label_counts.shape == (4, classes)
    size = getattr(data, "image_size", size)
    loaders = [data.train_dataloader(k) for k in range(4)], [data.test_dataloader()]
    for (x, y), number in zip(map(all_of, loaders), (train, test), strict=True):
        assert x.shape == (number, channels, size, size) and x.dtype == torch.float32 and y.dtype == torch.int64
        assert y.min() >= 0 and y.max() < classes
        blocks = 255 * x[y == 1][:, 0].mean(0).reshape(4, size // 4, 4, size // 4).mean((1, 3))
        assert [blocks[0, 0], blocks[0, 3], blocks[3, 0]] == pytest.approx(corners, abs=12)


@pytest.mark.parametrize("kind", [sets.Digits, sets.NpyImages, sets.MNIST, sets.PACS])
def test_images_are_normalised_by_the_statistics_of_the_data_set_or_by_given_ones(kind):
    channels = FORMATS[kind][0] if kind in FORMATS else 1
    make = offline if kind in FORMATS else lambda kind, **kwargs: kind(**kwargs)
    mean, std = [0.1 * (c + 1) for c in range(channels)], [0.2 * (c + 1) for c in range(channels)]
    plain = ready(make(kind, normalize=False))
    raw, _ = next(iter(plain.test_dataloader()))
    for given in ({}, {"mean": mean, "std": std}, {"std": [0.5]}):
        data = ready(make(kind, **given))
        x, _ = next(iter(data.test_dataloader()))
        by_channel = [torch.tensor(given.get(name, getattr(plain, name))).view(-1, 1, 1) for name in ("mean", "std")]
        torch.testing.assert_close(x, (raw - by_channel[0]) / by_channel[1])


# ---------------------------------------------------------------- files that are missing or damaged
@pytest.mark.parametrize("kind", FORMATS)
def test_missing_files_are_named(kind, tmp_path):
    file = tmp_path / "file"
    file.touch()
    with refused("data.root=", FORMATS[kind][-1]):
        ready(kind(str(tmp_path / "nowhere")))
    for root in (tmp_path, file, "a\0b"):
        with refused("data.root="):
            ready(kind(str(root)))


@pytest.mark.parametrize(
    ("kind", "write"), [(sets.PACS, write_pacs), (sets.HAM10000, write_ham10000), (sets.FEMNIST, write_femnist)]
)
def test_files_that_are_cut_off_are_refused_in_one_line(kind, write, tmp_path):
    write(tmp_path)
    for path in [path for path in tmp_path.rglob("*") if path.is_file()]:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with refused("data") as caught:
        ready(kind(str(tmp_path)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [sets.CIFAR10, sets.CIFAR100, sets.SVHN, sets.STL10])
def test_torchvisions_images_are_read_as_they_are_stored(kind, monkeypatch):
    known = offline(kind).load()

    def source(root, train=None, split=None):
        here = slice(2) if train or split == "train" else slice(2, 4)
        images, labels = known[here]
        if train is None:
            return SimpleNamespace(data=images.transpose(0, 3, 1, 2), labels=labels.astype(np.int16))
        return SimpleNamespace(data=images, targets=labels.tolist())

    monkeypatch.setattr(kind, "source", staticmethod(source))
    for ours, theirs in zip(kind().load()[:4], known, strict=False):
        assert np.array_equal(ours, theirs) and ours.flags.c_contiguous


IDX_FILES = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
IDX = [array.squeeze() for array in sets.MNIST(offline=True).load()[:4]]


def write_idx(folder, compressed=True):
    """The offline data set in the files of MNIST, whose heads say that they are of bytes, and their shape."""
    for name, array in zip(IDX_FILES, IDX, strict=True):
        head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
        contents = head + array.astype(np.uint8).tobytes()
        file = folder / f"{name}-ubyte{'.gz' if compressed else ''}"
        file.write_bytes(gzip.compress(contents) if compressed else contents)


@pytest.mark.parametrize("where", ["", "FashionMNIST/raw"])
@pytest.mark.parametrize("compressed", [True, False])
def test_idx_files_are_found_compressed_or_not(tmp_path, where, compressed):
    folder = tmp_path / where
    folder.mkdir(parents=True, exist_ok=True)
    write_idx(folder, compressed)
    data = ready(sets.FashionMNIST(str(tmp_path), num_clients=3))
    assert data.plan.sizes.sum() == 200 and np.array_equal(data.test_dataloader().images.squeeze(), IDX[2])


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b + b"0", lambda b: b"nothing"])
def test_an_idx_file_of_another_size_is_named(tmp_path, damage):
    write_idx(tmp_path)
    packed = tmp_path / "t10k-images-idx3-ubyte.gz"
    packed.with_suffix("").write_bytes(damage(gzip.decompress(packed.read_bytes())))
    with refused("data.root=", "t10k-images-idx3-ubyte"):
        ready(sets.MNIST(str(tmp_path)))


def test_labels_outside_the_classes_are_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(sets.MNIST, "num_classes", 9)
    write_idx(tmp_path)
    with refused("train_labels=9"):
        ready(sets.MNIST(str(tmp_path)))


# ---------------------------------------------------------------- FEMNIST
def test_femnist_writers_are_clients(tmp_path):
    write_femnist(tmp_path)
    data = ready(sets.FEMNIST(str(tmp_path), num_clients=20))
    assert [data.info(k).domain for k in (0, 19)] == ["f0000_00", "f0019_00"]
    user = json.loads((tmp_path / "train" / "all_data_0.json").read_text())["user_data"]["f0003_00"]
    loader = data.train_dataloader(3)
    assert sorted(loader.labels[loader.rows].tolist()) == sorted(user["y"])
    np.testing.assert_allclose(loader.images[loader.rows[0]].flatten() / 255, user["x"][0], atol=0.003)
    assert len(data.test_dataloader(3).rows) == 4
    assert ready(sets.FEMNIST(str(tmp_path), num_clients=6)).plan.sizes.sum() == 240
    # the files are parsed again where they change
    (tmp_path / "train" / "all_data_1.json").unlink()
    assert ready(sets.FEMNIST(str(tmp_path))).plan.sizes.sum() == 120


def test_femnist_is_parsed_a_writer_at_a_time_and_once(tmp_path, monkeypatch):
    """720 images: 0.6 MB as uint8, 4 MB as JSON, more than 18 MB as numbers of Python."""
    user = json.dumps({"x": np.random.default_rng(0).random((60, 784)).round(3).tolist(), "y": [7] * 60})
    for split, number in (("train", 10), ("test", 2)):
        (tmp_path / split).mkdir()
        users = ",\n".join(f'"writer {u}" : {user}' for u in range(number))
        text = '{"users": ["é"], "user_data": {' + users + '}, "num_samples": [60]}'
        (tmp_path / split / "all_data_0.json").write_text(text, encoding="utf-8")
    tracemalloc.start()
    data = ready(sets.FEMNIST(str(tmp_path), num_clients=10))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8e6
    monkeypatch.setattr("ijson.kvitems", None)
    again = ready(sets.FEMNIST(str(tmp_path), num_clients=10))
    ours, theirs = data.train_dataloader(9), again.train_dataloader(9)
    assert torch.equal(ours.images, theirs.images) and torch.equal(ours.labels, theirs.labels)
    assert again.plan.hash == data.plan.hash and again.plan.domain(9) == "writer 9"
    assert (data.plan.sizes.sum(), len(data.test_dataloader().rows)) == (600, 120)


USER = {"x": [[0.5] * 784], "y": [3]}


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"users": []}, ("user_data",)),
        ({"user_data": {"a": {"y": [1]}}}, ("'x'",)),
        ({"user_data": {"a": {"x": [[1, 0]], "y": [0]}}}, ("reshape",)),
        ({"user_data": {"a": {**USER, "y": [1.5]}}}, ("labels",)),
        ({"user_data": {"a": {**USER, "x": [[255.0] * 784]}}}, ("pixels", "[0, 1]")),
        (json.dumps({"user_data": {"a": USER}})[:-9], ("premature EOF",)),
    ],
)
def test_a_file_that_is_not_leafs_is_named(tmp_path, content, named):
    write_femnist(tmp_path)
    file = tmp_path / "train" / "all_data_1.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    with refused("data.root=", "all_data_1.json", "FEMNIST", *named):
        ready(sets.FEMNIST(str(tmp_path)))


# ---------------------------------------------------------------- Synthetic
def examples(data, k):
    """Training examples of a client, in the order of its part."""
    batches = [batch for _, batch in data.train_dataloader(k).share(0, 1)]
    return [torch.cat(column) for column in zip(*batches, strict=True)]


def test_synthetic_clients_differ_as_alpha_and_beta_say():
    data = ready(sets.Synthetic(0.0, 0.0, num_clients=200, largest=400))
    x = [torch.cat([x for x, _ in data.train_dataloader(k)]) for k in range(200)]
    pooled = torch.stack([rows.var(0) for rows in x if len(rows) > 300]).mean(0)
    np.testing.assert_allclose(pooled, np.arange(1, 61) ** -1.2, rtol=0.15)
    centers = torch.stack([rows.mean(0) for rows in x if len(rows) > 300])
    assert centers.std(0).mean().item() == pytest.approx(1, rel=0.15)
    wide = ready(sets.Synthetic(0.0, 3.0, num_clients=200, largest=400))
    middles = torch.tensor([torch.cat([x for x, _ in wide.train_dataloader(k)]).mean() for k in range(200)])
    assert middles.std().item() == pytest.approx(3, rel=0.2)
    assert data.plan.sizes.min() >= 45 and data.plan.sizes.max() == 360


def test_alpha_changes_no_label_of_synthetic_and_those_of_synthetic_per_class():
    def drawn(kind, alpha):
        data = ready(kind(alpha, 0.0, num_clients=20, largest=400))
        return [torch.cat(column) for column in zip(*(examples(data, k) for k in range(20)), strict=True)]

    x, labels = drawn(sets.Synthetic, 0.0)
    same_x, same_labels = drawn(sets.Synthetic, 3.0)
    assert torch.equal(x, same_x)
    # but where two logits are equal up to rounding
    assert (labels != same_labels).sum() <= 1
    plain_x, plain = drawn(sets.SyntheticPerClass, 0.0)
    other_x, other = drawn(sets.SyntheticPerClass, 3.0)
    assert torch.equal(plain_x, other_x)
    assert (plain != other).float().mean() > 0.3


def test_synthetic_iid_shares_one_model_and_the_others_do_not():
    skews = {
        iid: ready(sets.Synthetic(1.0, 1.0, num_clients=20, largest=500, iid=iid)).plan.skew() for iid in (True, False)
    }
    assert skews[True] < 0.4 < skews[False]


def test_one_seed_gives_one_synthetic_data_set_in_the_batches_that_torch_collates():
    data, again = (ready(sets.Synthetic(num_clients=2, largest=99, batch_size=16)) for _ in range(2))
    loader, columns = again.train_dataloader(1), examples(data, 1)
    plain = TensorDataset(*columns)
    reference = DataLoader(plain, batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(3))
    loader.generator.manual_seed(3)
    for batch, expected in zip(loader, reference, strict=True):
        assert all(torch.equal(*pair) for pair in zip(batch, expected, strict=True))


# ---------------------------------------------------------------- validation, clients' tests, noise
def test_validation_is_a_share_of_each_class_and_is_not_trained_on():
    data, whole = ready(sets.Digits(num_clients=3, val_fraction=0.1)), ready(sets.Digits(num_clients=3))
    val, train = data.val_dataloader().rows, torch.cat([data.train_dataloader(k).rows for k in range(3)])
    assert not set(val.tolist()) & set(train.tolist())
    assert len(val) + len(train) == whole.plan.sizes.sum()
    counts = np.bincount(all_of([data.val_dataloader()])[1], minlength=10)
    np.testing.assert_allclose(counts, 0.1 * whole.plan.label_counts.sum(0), atol=0.5)
    assert whole.val_dataloader() == []


def test_a_clients_test_is_as_large_as_the_proportions_of_its_labels_allow():
    data = ready(sets.Digits(num_clients=5, partitioner=sets.Dirichlet(0.2)))
    everything = np.bincount(all_of([data.test_dataloader()])[1], minlength=10)
    for k in range(5):
        here = np.bincount(all_of([data.test_dataloader(k)])[1], minlength=10)
        there = data.plan.label_counts[k]
        most = min(everything[there > 0] / there[there > 0])
        assert here.tolist() == np.floor(most * there + 1e-9).tolist()


def test_noise_rises_from_the_first_client_to_the_last_and_leaves_the_pooled_test_alone():
    data = ready(sets.Digits(num_clients=3, client_noise=0.2, normalize=False))
    plain = ready(sets.Digits(num_clients=3, normalize=False))
    for k, deviation in enumerate((0.0, 0.1, 0.2)):
        for ours, theirs in (
            (data.train_dataloader(k), plain.train_dataloader(k)),
            (data.test_dataloader(k), plain.test_dataloader(k)),
        ):
            for loader in (ours, theirs):
                loader.generator.manual_seed(1)
                loader.shuffle = False
            gap = next(iter(ours))[0] - next(iter(theirs))[0]
            assert gap.std().item() == pytest.approx(deviation, rel=0.05)
        assert data.train_dataloader(k).deterministic == (k == 0)
    assert torch.equal(next(iter(data.test_dataloader()))[0], next(iter(plain.test_dataloader()))[0])
