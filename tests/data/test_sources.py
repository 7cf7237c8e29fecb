"""Data sets in files: read by the real readers from generated files, and clear about what is wrong with others."""

import gzip
import io
import json
import os
import shutil
import sys
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import small_trainer
from helpers.errors import refused
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning import data as sets
from fl_lightning.cli import main
from fl_lightning.data import (
    CIFAR10,
    CIFAR100,
    FEMNIST,
    HAM10000,
    MNIST,
    PACS,
    STL10,
    SVHN,
    ByDomain,
    Digits,
    Dirichlet,
    FashionMNIST,
    ImageFolderImages,
    Natural,
    NpyImages,
    OfficeHome,
    SiteImageFolders,
    Synthetic,
    SyntheticPerClass,
    TinyImageNet,
    datamodule,
    femnist,
)
from fl_lightning.data.cache import cache_folder, decoded
from fl_lightning.data.datamodule import Held, ImageDataModule, held_out, in_proportion
from fl_lightning.data.folders import FolderDataModule, stratified
from fl_lightning.data.source import FileDataModule, cycled, patterns
from fl_lightning.data.vision import read_idx, write_idx
from fl_lightning.models import MLP, ImageClassifier, Logistic

# class: channels, size, classes, training and test images of the offline data set
OFFLINE = {
    NpyImages: (3, 32, 10, 200, 100),
    MNIST: (1, 28, 10, 200, 100),
    FashionMNIST: (1, 28, 10, 200, 100),
    CIFAR10: (3, 32, 10, 200, 100),
    CIFAR100: (3, 32, 100, 200, 100),
    SVHN: (3, 32, 10, 200, 100),
    STL10: (3, 96, 10, 100, 50),
    TinyImageNet: (3, 64, 200, 200, 100),
    ImageFolderImages: (3, 64, 12, 120, 60),
    SiteImageFolders: (3, 64, 3, 156, 48),
    PACS: (3, 96, 7, 84, 56),
    OfficeHome: (3, 96, 65, 780, 260),
    HAM10000: (3, 96, 7, 136, 32),
    FEMNIST: (1, 28, 62, 240, 80),
}


def ready(data):
    data.prepare_data()
    data.setup()
    return data


@pytest.mark.parametrize("kind", OFFLINE)
def test_an_offline_data_set_has_the_shapes_of_the_real_one(kind):
    channels, size, classes, train, test = OFFLINE[kind]
    data = ready(kind(offline=True, num_clients=4))
    x, y = next(iter(data.train_dataloader(0)))
    assert x.shape[1:] == (channels, size, size) and x.dtype == torch.float32
    assert y.dtype == torch.int64
    assert data.num_classes == classes
    assert data.plan.sizes.sum() == train
    assert len(data.test_dataloader().rows) == test
    labels = torch.cat([y for k in range(4) for _, y in data.train_dataloader(k)])
    assert labels.min() >= 0 and labels.max() < classes
    if kind not in (FEMNIST, TinyImageNet, OfficeHome):
        assert len(labels.unique()) == classes
    assert abs(x.mean()) < 1.5 and 0.2 < x.std() < 3


@pytest.mark.parametrize("kind", [*OFFLINE, Digits])
def test_every_image_data_set_takes_the_statistics_to_normalise_by(kind, monkeypatch):
    monkeypatch.setattr(datamodule, "HELD", Held(1))  # the data set is written and read once
    channels = OFFLINE[kind][0] if kind in OFFLINE else 1
    offline = {} if kind is Digits else {"offline": True}
    if issubclass(kind, FolderDataModule):
        offline["image_size"] = 16
    published = ready(kind(num_clients=4, **offline))
    mean, std = [0.1 * (c + 1) for c in range(channels)], [0.2 * (c + 1) for c in range(channels)]
    given = ready(kind(num_clients=4, mean=mean, std=std, **offline))
    plain = ready(kind(num_clients=4, normalize=False, **offline))
    raw, own, usual = (next(iter(data.test_dataloader()))[0] for data in (plain, given, published))
    by_channel = torch.tensor([mean, std]).view(2, 1, channels, 1, 1)
    torch.testing.assert_close(own, (raw - by_channel[0]) / by_channel[1])
    by_channel = torch.tensor([published.mean, published.std]).view(2, 1, channels, 1, 1)
    torch.testing.assert_close(usual, (raw - by_channel[0]) / by_channel[1])
    if kind is not NpyImages:
        assert (published.mean, published.std) == (kind.mean, kind.std)
    # one of the two, or one number for all channels
    partly = ready(kind(num_clients=4, std=[0.5], **offline))
    assert partly.std == (0.5,) and partly.mean == published.mean


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mean": [0.1, 0.2]}, ("data.mean=[0.1, 0.2]",)),
        ({"std": []}, ("data.std=[]",)),
        ({"std": [0.0]}, ("data.std=[0.0]",)),
    ],
)
def test_statistics_that_do_not_fit_the_channels_are_refused(options, message):
    for kind in (Digits, MNIST):
        with refused(*message):
            ready(kind(**options, **({} if kind is Digits else {"offline": True})))


@pytest.mark.parametrize("kind", ["CIFAR10", "NpyImages", "FEMNIST", "TinyImageNet", "PACS", "Digits"])
def test_the_help_of_an_image_data_set_shows_its_statistics(kind, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["cli.py"])
    with pytest.raises(SystemExit):
        main(["fit", f"--data.help={kind}"])
    text = " ".join(capsys.readouterr().out.split())
    none = "None measures it" if kind == "NpyImages" else "None takes the value of the data set"
    assert f"--data.mean+ MEAN mean of each channel (or one for all), of values in [0, 1]; {none}" in text
    assert "--data.std+ STD standard deviation of each channel (or one for all), above 0;" in text


def test_every_data_set_in_files_has_an_offline_one():
    in_files = {one for one in vars(sets).values() if isinstance(one, type) and issubclass(one, FileDataModule)}
    assert in_files == set(OFFLINE)


@pytest.mark.parametrize("kind", [FashionMNIST, SVHN, STL10, CIFAR10, PACS])
def test_images_are_the_right_way_round_and_belong_to_their_labels(kind):
    """A pattern has its own place for every coarse block: transposed, flipped or shuffled ones differ."""
    data = ready(kind(offline=True, num_clients=1, normalize=False))
    channels, size, *_ = OFFLINE[kind]
    for x, y in data.train_dataloader(0):
        clean = patterns(y.numpy(), size, channels, 0).astype(float) / 255
        gap = np.abs(x.permute(0, 2, 3, 1).numpy() - clean).mean((1, 2, 3))
        assert gap.max() < 0.12


def test_a_model_learns_an_offline_data_set(tmp_path):
    model = ImageClassifier(MLP(784, [32]))
    trainer = small_trainer(tmp_path, max_rounds=6)
    trainer.fit(model, MNIST(offline=True, num_clients=2, batch_size=20))
    assert trainer.metrics["test/accuracy"] > 0.8


# ---------------------------------------------------------------- where they lie
@pytest.mark.parametrize(
    ("kind", "named"),
    [
        (CIFAR10, "cifar-10-batches-py"),
        (CIFAR100, "cifar-100-python"),
        (SVHN, "train_32x32.mat"),
        (STL10, "stl10_binary"),
        (MNIST, "train-images"),
    ],
)
def test_a_missing_data_set_names_the_files_and_a_hint(kind, named, tmp_path):
    with refused(f"data.root='{tmp_path}'", named, "data.download"):
        ready(kind(str(tmp_path)))


def test_a_file_with_another_checksum_is_refused(tmp_path):
    CIFAR10(offline=True).write_offline(tmp_path)
    with refused("data.root=", "cifar-10-batches-py", "data.download"):
        ready(CIFAR10(str(tmp_path)))


@pytest.mark.parametrize("where", ["", "FashionMNIST/raw"])
@pytest.mark.parametrize("compressed", [True, False])
def test_idx_files_are_found_compressed_or_not(tmp_path, where, compressed):
    folder = tmp_path / where
    folder.mkdir(parents=True, exist_ok=True)
    FashionMNIST(offline=True).write_offline(folder)
    if not compressed:
        for path in list(folder.glob("*.gz")):
            path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
            path.unlink()
    assert ready(FashionMNIST(str(tmp_path), num_clients=3)).plan.sizes.sum() == 200


@pytest.mark.parametrize("damage", [lambda b: b[:-20], lambda b: b"nothing", lambda b: b""])
def test_a_damaged_idx_file_is_named(tmp_path, damage):
    path = tmp_path / "x-idx3-ubyte.gz"
    write_idx(path, np.arange(60, dtype=np.uint8).reshape(3, 4, 5))
    assert read_idx(path).tolist() == np.arange(60).reshape(3, 4, 5).tolist()
    path.write_bytes(damage(path.read_bytes()))
    with refused("data.root=", "x-idx3-ubyte.gz"):
        read_idx(path)


# ---------------------------------------------------------------- folders and their cache
@pytest.fixture
def cache(tmp_path_factory, monkeypatch):
    """The folder of the cache, for one test."""
    base = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("XDG_CACHE_HOME", str(base))
    return base / "fl_lightning"


@pytest.fixture
def pacs(tmp_path, cache):
    PACS(offline=True).write_offline(tmp_path)
    return tmp_path


def make(root, **kwargs):
    return PACS(
        str(root), **{"image_size": 32, "test_per_class": 2, "num_clients": 4, "partitioner": ByDomain(), **kwargs}
    )


def test_pacs_is_split_by_class_and_domain_whatever_the_seed(pacs, monkeypatch):
    data = ready(make(pacs))
    assert [data.info(k).domain for k in range(4)] == ["art_painting", "cartoon", "photo", "sketch"]
    assert data.plan.label_counts.tolist() == [[3] * 7] * 4
    by_domain = data.test_dataloaders_by_domain()
    assert {name: len(loader.rows) for name, loader in by_domain.items()} == dict.fromkeys(data.domain_names, 14)
    assert torch.equal(data.test_dataloader(2).rows, by_domain["photo"].rows)
    rows = data.test_dataloader().rows
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    assert torch.equal(ready(make(pacs)).test_dataloader().rows, rows)
    assert not torch.equal(ready(make(pacs, split_seed=1)).test_dataloader().rows, rows)


def caches(folder, ending="images"):
    files = sorted(folder.glob("*"))
    assert {path.suffix for path in files} <= {".images", ".npz"}
    return [path for path in files if path.suffix == f".{ending}"]


def test_images_are_decoded_once_and_again_when_something_changed(pacs, cache, monkeypatch):
    seen, before = [], sorted(pacs.rglob("*"))
    real = Image.open
    monkeypatch.setattr(Image, "open", lambda path: seen.append(path) or real(path))
    ready(make(pacs))
    assert len(seen) == 140
    (kept,) = caches(cache)
    ready(make(pacs))
    assert len(seen) == 140
    ready(make(pacs, image_size=16))
    assert len(seen) == 280 and len(caches(cache)) == 2
    assert sorted(pacs.rglob("*")) == before  # nothing is written beside the data
    first = next(pacs.rglob("*.jpg"))
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(first)
    ready(make(pacs))
    assert len(seen) == 420
    kept.write_bytes(kept.read_bytes()[:500])
    os.utime(first, ns=(1, 1))
    shutil.rmtree(cache)
    ready(make(pacs))
    assert len(seen) == 560


def test_a_cache_in_the_folder_of_everybody_is_the_users_own(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "a file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a file"))  # cannot be written to
    folder = cache_folder()
    assert folder.parent == tmp_path and folder.stat().st_mode & 0o777 == 0o700
    assert cache_folder() == folder
    folder.chmod(0o777)
    with refused("a file/fl_lightning", "XDG_CACHE_HOME"):
        cache_folder()
    folder.rename(tmp_path / "theirs")
    folder.symlink_to(tmp_path / "theirs")
    with refused("a file/fl_lightning", "XDG_CACHE_HOME"):
        cache_folder()


def test_without_the_variable_the_cache_is_in_the_users_home(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "fl_lightning"


def flipped(content):
    return content[:300] + bytes([content[300] ^ 1]) + content[301:]


DAMAGES = {
    "one bit": flipped,
    "cut off": lambda b: b[:500],
    "cut off and padded": lambda b: b[:500] + bytes(len(b) - 500),
    "longer": lambda b: b + b"0",
    "another file": lambda b: b"nothing",
    "empty": lambda b: b"",
    "zeros": lambda b: bytes(len(b)),
}


@pytest.mark.parametrize("ending", ["images", "npz"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_is_made_anew(pacs, cache, damage, ending):
    before = ready(make(pacs)).train_dataloader(0).images.clone()
    (kept,) = caches(cache, ending)
    content = kept.read_bytes()
    kept.write_bytes(DAMAGES[damage](content))
    assert torch.equal(ready(make(pacs)).train_dataloader(0).images, before)
    if ending == "images":
        assert kept.read_bytes() == content


def test_a_cache_whose_checksum_is_missing_or_of_other_images_is_made_anew(pacs, cache):
    """What a crash between the two files leaves."""
    before = ready(make(pacs)).train_dataloader(0).images.clone()
    (kept,), (beside,) = caches(cache), caches(cache, "npz")
    content = kept.read_bytes()
    for left in (None, beside.read_bytes()):
        kept.write_bytes(bytes(len(content)))
        beside.unlink() if left is None else beside.write_bytes(left)
        assert torch.equal(ready(make(pacs)).train_dataloader(0).images, before)
        assert kept.read_bytes() == content


def test_the_checksum_is_written_after_the_images(pacs, monkeypatch):
    order, real = [], os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: order.append(Path(b).suffix) or real(a, b))
    ready(make(pacs))
    assert order == [".images", ".npz"]


def test_all_files_that_are_no_images_are_named_at_once_and_leave_no_cache(pacs, cache):
    files = sorted(pacs.rglob("*.jpg"))
    for file in (files[5], files[90]):
        file.write_bytes(file.read_bytes()[:300])
    with refused("data.root", "2 of 140 files", str(files[5]), str(files[90])):
        ready(make(pacs))
    assert caches(cache) == []


def test_where_the_folder_cannot_be_written_the_cache_lies_elsewhere(pacs, cache, monkeypatch, tmp_path_factory):
    other = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr("tempfile.tempdir", str(other))
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != cache)
    ready(make(pacs))
    assert caches(cache) == []
    assert len(list(other.rglob("*.images"))) == 1


def test_images_of_16_bits_keep_their_shades_and_those_of_32_are_refused(tmp_path):
    shades = np.arange(256, dtype=np.uint16).reshape(16, 16) * 257
    Image.fromarray(shades).save(tmp_path / "deep.png")
    images = decoded(tmp_path, [tmp_path / "deep.png"], 16)
    assert np.array_equal(images[0, ..., 0], np.arange(256).reshape(16, 16))
    Image.fromarray(shades.astype(np.float32)).save(tmp_path / "deeper.tif")
    with refused("data.root", "deeper.tif", "store 8 or 16 bits"):
        decoded(tmp_path, [tmp_path / "deeper.tif"], 16)


def test_grey_transparent_and_large_images_are_converted(tmp_path):
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 255, (40, 60), dtype=np.uint8)).save(tmp_path / "grey.png")
    Image.fromarray(rng.integers(0, 255, (8, 8, 4), dtype=np.uint8)).save(tmp_path / "alpha.png")
    Image.fromarray(np.full((200, 100, 3), 77, np.uint8)).save(tmp_path / "plain.jpg")
    images = decoded(tmp_path, sorted(tmp_path.glob("*.*g")), 16)
    assert images.shape == (3, 16, 16, 3)
    grey, plain = images[1], images[2]
    assert np.array_equal(grey[..., 0], grey[..., 1]) and grey.std() > 0
    assert np.abs(plain.astype(int) - 77).max() <= 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda root: shutil.rmtree(root / "photo"),
            ("data.root=", "art_painting", "cartoon", "sketch", "art_painting/dog/"),
        ),
        (
            lambda root: shutil.rmtree(root / "sketch" / "dog"),
            ("data.root=", "/sketch", "elephant", "art_painting/dog/"),
        ),
        (lambda root: [p.unlink() for p in (root / "photo" / "dog").iterdir()], ("data.root=", "photo/dog")),
        (lambda root: shutil.rmtree(root), ("data.root=", "art_painting/dog/")),
    ],
)
def test_a_wrong_layout_shows_what_is_expected_and_what_is_there(pacs, change, message):
    change(pacs)
    with refused(*message):
        ready(make(pacs))


def test_more_test_images_than_there_are_is_refused(pacs):
    with refused("data.test_per_class=5"):
        ready(make(pacs, test_per_class=5))


def test_any_image_folder_with_and_without_a_test_folder(tmp_path):
    ImageFolderImages(offline=True, image_size=16).write_offline(tmp_path / "both")
    data = ready(ImageFolderImages(str(tmp_path / "both"), image_size=16, num_clients=2))
    assert data.plan.sizes.sum() == 120 and len(data.test_dataloader().rows) == 60
    (tmp_path / "both" / "test").rename(tmp_path / "both" / "val")
    assert len(ready(ImageFolderImages(str(tmp_path / "both"), image_size=16)).test_dataloader().rows) == 60
    alone = ready(ImageFolderImages(str(tmp_path / "both" / "train"), image_size=16, test_fraction=0.3))
    assert len(alone.test_dataloader().rows) == 36
    with refused("data.root=", "train/CLASS"):
        ready(ImageFolderImages(str(tmp_path / "both" / "train" / "class_00")))


def test_a_folder_may_lack_a_class_whose_name_is_given(tmp_path):
    ImageFolderImages(offline=True, image_size=16).write_offline(tmp_path)
    names = [f"class_{number:02}" for number in range(12)]
    whole = ready(ImageFolderImages(str(tmp_path), image_size=16, num_clients=1, classes=names[::-1]))
    assert whole.class_names == tuple(names[::-1]) and whole.info(0).label_counts.tolist() == [10] * 12
    for split in ("train", "test"):
        shutil.rmtree(tmp_path / split / "class_11")
    less = ready(ImageFolderImages(str(tmp_path), image_size=16, num_clients=1, classes=names))
    assert less.num_classes == 12 and less.info(0).label_counts.tolist() == [10] * 11 + [0]
    with refused("data.root=", "classes class_00", "data.classes"):
        ready(ImageFolderImages(str(tmp_path), image_size=16, num_clients=1, classes=names[1:]))
    with refused("data.classes=", "each once"):
        ImageFolderImages(classes=["a", "a"])


def test_tinyimagenet_reads_validation_as_published_or_sorted_into_classes(tmp_path):
    TinyImageNet(offline=True, image_size=16).write_offline(tmp_path)
    published = ready(TinyImageNet(str(tmp_path), image_size=16))
    labels = [y for _, y in published.test_dataloader()]
    assert torch.equal(torch.cat(labels), torch.arange(100))
    lines = (tmp_path / "val" / "val_annotations.txt").read_text().splitlines()
    for line in lines:
        file, name = line.split("\t")[:2]
        (tmp_path / "val" / name).mkdir()
        (tmp_path / "val" / "images" / file).rename(tmp_path / "val" / name / file)
    for name in sorted(
        {p.name for p in (tmp_path / "train").iterdir()} - {p.name for p in (tmp_path / "val").iterdir()}
    ):
        shutil.copytree(tmp_path / "train" / name / "images", tmp_path / "val" / name)
    with refused("data.root=", "00000.jpg", "val_annotations.txt"):
        ready(TinyImageNet(str(tmp_path), image_size=16))
    (tmp_path / "val" / "val_annotations.txt").unlink()
    assert len(ready(TinyImageNet(str(tmp_path), image_size=16)).test_dataloader().rows) == 200


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"00000.jpg\n", ("data.root=", "val_annotations.txt", "''")),
        (b"00000.jpg\tn99\t0\n", ("data.root=", "val_annotations.txt", "'n99'")),
        (b"\xff\xfe\0", ("data.root=", "val_annotations.txt", "utf-8")),
        (b"\n\n", ("test_labels=0",)),
    ],
)
def test_bad_annotations_are_named(tmp_path, content, message):
    TinyImageNet(offline=True, image_size=8).write_offline(tmp_path)
    (tmp_path / "val" / "val_annotations.txt").write_bytes(content)
    with refused(*message):
        ready(TinyImageNet(str(tmp_path), image_size=8))


def test_classes_of_the_test_folder_are_those_of_the_training_folder(tmp_path):
    ImageFolderImages(offline=True, image_size=8).write_offline(tmp_path)
    (tmp_path / "test" / "zebra").mkdir()
    with refused("data.root=", "/test", "zebra"):
        ready(ImageFolderImages(str(tmp_path), image_size=8))


def test_a_share_that_leaves_no_test_image_is_refused(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        Image.new("RGB", (4, 4)).save(tmp_path / name / "one.png")
    with refused("test_labels=0"):
        ready(ImageFolderImages(str(tmp_path), image_size=4))


@pytest.mark.parametrize("number", [0, -1])
def test_a_number_of_test_images_below_one_is_refused(number):
    with refused(f"data.test_per_class={number}"):
        PACS(test_per_class=number)


@pytest.mark.parametrize("kind", OFFLINE)
def test_a_root_that_is_a_file_or_empty_or_no_path_is_named(kind, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for root in (tmp_path / "file", tmp_path / "empty", tmp_path / ("long" * 2000), "a\0b"):
        with refused("data.root="):
            ready(kind(str(root)))


@pytest.mark.parametrize("kind", OFFLINE)
@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
        lambda path: path.write_bytes(bytes(range(128, 256)) * 3),
        lambda path: (path.unlink(), path.mkdir()),
        lambda path: (path.unlink(), path.symlink_to("/nowhere")),
    ],
    ids=["empty", "half", "another", "folder", "dangling link"],
)
def test_spoiled_files_are_refused_in_one_line(kind, spoil, tmp_path):
    (kind(offline=True, image_size=8) if issubclass(kind, FolderDataModule) else kind(offline=True)).write_offline(
        tmp_path
    )
    for path in [path for path in tmp_path.rglob("*") if path.is_file()]:
        spoil(path)
    with refused("data") as caught:
        ready(kind(str(tmp_path)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [HAM10000, TinyImageNet, PACS, FEMNIST, MNIST, NpyImages, SVHN])
def test_files_without_permission_are_refused(kind, tmp_path, monkeypatch):
    root = tmp_path / "files"
    root.mkdir()
    kind(offline=True).write_offline(root)
    real = io.open

    def refuse(path, *args, **kwargs):
        if root in Path(str(path)).parents:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(io, "open", refuse)
    monkeypatch.setattr("builtins.open", refuse)
    monkeypatch.setattr("fl_lightning.data.cache.cache_folder", lambda root: tmp_path)
    with refused("data.root"):
        ready(kind(str(root)))


def test_a_folder_that_cannot_be_listed_is_refused(pacs, monkeypatch):
    def refuse(self):
        raise PermissionError(13, "Permission denied", str(self))

    shutil.rmtree(pacs / "photo")
    monkeypatch.setattr(Path, "iterdir", refuse)
    with refused("data.root=", "Errno 13"):
        ready(make(pacs))


def test_a_full_disk_is_one_line_and_leaves_no_cache(pacs, cache, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with refused(".images", "No space left"):
        ready(make(pacs))
    assert caches(cache) == []


def test_an_image_too_large_to_be_one_is_refused(pacs, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with refused("data.root", "00000.jpg", "Image size"):
        ready(make(pacs))


# ---------------------------------------------------------------- HAM10000
@pytest.fixture
def ham(tmp_path):
    HAM10000(offline=True, image_size=16).write_offline(tmp_path)
    return tmp_path


def test_ham10000_has_a_fifth_of_each_source_for_test_in_several_folders(ham):
    some = sorted((ham / "HAM10000_images_part_1").iterdir())[:50]
    (ham / "HAM10000_images_part_2").mkdir()
    for path in some:
        path.rename(ham / "HAM10000_images_part_2" / path.name)
    data = ready(HAM10000(str(ham), image_size=16, num_clients=4, partitioner=ByDomain()))
    assert [len(loader.rows) for loader in data.test_dataloaders_by_domain().values()] == [8] * 4
    assert data.plan.sizes.tolist() == [34] * 4
    assert data.info(3).domain == "vidir_molemax"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("nv,", "mole,", 1), ("dx='mole'",)),
        (lambda text: text.replace("rosendahl", "elsewhere", 1), ("dataset='elsewhere'",)),
        (
            lambda text: text + "H,99999,nv,histo,5,male,back,rosendahl\n",
            ("data.root=", "99999", "data.missing"),
        ),
        (
            lambda text: text.replace("dataset", "source"),
            ("data.root=", "HAM10000_metadata.csv", "dataset", "lesion_id"),
        ),
        (lambda text: text.replace("dx", "class"), ("data.root=", "HAM10000_metadata.csv", "dx", "lesion_id")),
        (lambda text: "", ("data.root=", "HAM10000_metadata.csv", "image_id, dx, dataset")),
        (lambda text: text + "H,00001\n", ("dataset=None",)),
        (lambda text: text.splitlines()[0], ("data.root=", "HAM10000_metadata.csv")),
        (lambda text: text + '"' + "a" * 200_000, ("data.root=", "HAM10000_metadata.csv", "131072")),
        (
            lambda text: text.replace("image_id", "picture"),
            ("data.root=", "HAM10000_metadata.csv", "image_id", "lesion_id"),
        ),
    ],
)
def test_a_bad_row_of_the_metadata_is_named(ham, change, message):
    table = ham / "HAM10000_metadata.csv"
    table.write_text(change(table.read_text()))
    with refused(*message):
        ready(HAM10000(str(ham), image_size=16))


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_metadata_of_another_encoding_is_refused(ham, encoding):
    table = ham / "HAM10000_metadata.csv"
    text = table.read_text().replace("back", "Rücken")
    table.write_text(text, encoding=encoding)
    with refused("HAM10000_metadata.csv", "'utf-8'"):
        ready(HAM10000(str(ham), image_size=16))
    table.write_text(text.replace("lesion_id,image_id", "image_id,lesion_id"), encoding="utf-8-sig")
    with refused("data.root=", "HAM_0000000"):
        ready(HAM10000(str(ham), image_size=16))


def test_what_to_do_with_rows_without_image_is_raise_or_skip(ham):
    with refused("data.missing='drop'"):
        HAM10000(missing="drop")
    shutil.rmtree(ham / "HAM10000_images_part_1")
    with refused("data.root=", "HAM10000_metadata.csv"):
        ready(HAM10000(str(ham), image_size=16, missing="skip"))


def test_rows_without_image_can_be_skipped(ham):
    next((ham / "HAM10000_images_part_1").iterdir()).unlink()
    data = ready(HAM10000(str(ham), image_size=16, missing="skip"))
    assert data.plan.sizes.sum() + len(data.test_dataloader().rows) == 167


def test_numbers_by_class_add_up_to_the_share_of_all():
    assert stratified(np.array([10, 3, 1, 0]), 0.2).tolist() == [2, 0, 0, 0]
    assert stratified(np.array([7, 7, 7]), 0.5).sum() == 10
    counts = np.array([327, 514, 1099, 115, 1113, 6705, 142])
    numbers = stratified(counts, 0.2)
    assert numbers.sum() == 2003 and (np.abs(numbers - 0.2 * counts) < 1).all()


# ---------------------------------------------------------------- FEMNIST and Synthetic
def test_femnist_writers_are_clients(tmp_path):
    FEMNIST(offline=True).write_offline(tmp_path)
    data = ready(FEMNIST(str(tmp_path), num_clients=20))
    assert isinstance(data.partitioner, Natural)
    assert [data.info(k).domain for k in (0, 19)] == ["f0000_00", "f0019_00"]
    user = json.loads((tmp_path / "train" / "all_data_0.json").read_text())["user_data"]["f0003_00"]
    loader = data.train_dataloader(3)
    assert sorted(loader.labels[loader.rows].tolist()) == sorted(user["y"])
    image = loader.images[loader.rows[0]].flatten() / 255
    np.testing.assert_allclose(image, user["x"][0], atol=0.003)
    assert len(data.test_dataloader(3).rows) == 4
    assert ready(FEMNIST(str(tmp_path), num_clients=6)).plan.sizes.sum() == 240


def test_femnist_is_parsed_a_writer_at_a_time_and_once(tmp_path, monkeypatch):
    """1,200 images: 1 MB as uint8, 7 MB as JSON, more than 30 MB as numbers of Python."""
    user = json.dumps({"x": np.random.default_rng(0).random((100, 784)).round(3).tolist(), "y": [7] * 100})
    for split, number in (("train", 10), ("test", 2)):
        (tmp_path / split).mkdir()
        users = ",\n".join(f'"writer {u}" : {user}' for u in range(number))
        text = '{"users": ["é"], "user_data": {' + users + '}, "num_samples": [100]}'
        (tmp_path / split / "all_data_0.json").write_text(text, encoding="utf-8")
    tracemalloc.start()
    data = ready(FEMNIST(str(tmp_path), num_clients=10))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1e6 + 12e6
    monkeypatch.setattr(femnist, "read_writers", None)
    again = ready(FEMNIST(str(tmp_path), num_clients=10))
    assert isinstance(again.load().train_images, np.memmap)
    assert torch.equal(again._train[0], data._train[0]) and torch.equal(again._train[1], data._train[1])
    assert again.plan.hash == data.plan.hash and again.plan.domain(9) == "writer 9"
    assert (data.plan.sizes.sum(), len(data.test_dataloader().rows)) == (1000, 200)
    image = data._train[0][data._rows[9][99]].flatten() / 255
    np.testing.assert_allclose(image, json.loads(user)["x"][99], atol=0.003)


USER = {"x": [[0.5] * 784], "y": [3]}


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("{}", ("user_data",)),
        ("nothing", ("lexical error",)),
        ("", ("premature EOF",)),
        ('{"users": []}', ("user_data",)),
        ('{"user_data": [1]}', ("user_data",)),
        ('{"user_data": {}}', ("user_data",)),
        ('{"user_data": {"a": [1]}}', ("indices",)),
        ('{"user_data": {"a": {"y": [1]}}}', ("'x'",)),
        ("[" * 100_000, ("1000",)),
        ('{"user_data": {"a": ' + "[" * 100_000, ("1000",)),
        ('{"user_data": ' + '{"a": ' * 100_000, ("1000",)),
        (json.dumps({"user_data": {"a": {"x": [[1, 0]], "y": [0]}}}), ("reshape",)),
        (json.dumps({"user_data": {"a": {**USER, "y": [1.5]}}}), ("labels",)),
        (json.dumps({"user_data": {"a": {**USER, "y": [10**30]}}}), ("integer overflow",)),
        (json.dumps({"user_data": {"a": {**USER, "x": [[255.0] * 784]}}}), ("pixels", "[0, 1]")),
        (json.dumps({"user_data": {"a": {**USER, "x": [[float("nan")] * 784]}}}), ("invalid char",)),
        (json.dumps({"user_data": {"a": {**USER, "x": [["ink"] * 784]}}}), ("convert",)),
        (json.dumps({"user_data": {"a": USER}})[:-9], ("premature EOF",)),
        (json.dumps({"user_data": {"a": USER}}) + "]", ("trailing garbage",)),
        (
            json.dumps({"user_data": {"a": USER}}).replace("a", "\xe9").encode("latin-1"),
            ("UTF8",),
        ),
        (b"\xff\xfe", ("invalid char",)),
    ],
)
def test_a_file_that_is_not_leafs_is_named(tmp_path, cache, content, named):
    FEMNIST(offline=True).write_offline(tmp_path)
    (tmp_path / "train" / "all_data_1.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with refused("data.root=", "all_data_1.json", "FEMNIST", *named):
        ready(FEMNIST(str(tmp_path)))
    assert caches(cache) == []


def test_leafs_files_are_to_be_there_with_images(tmp_path):
    with refused("data.root=", "all_data_*.json"):
        ready(FEMNIST(str(tmp_path / "nowhere")))
    FEMNIST(offline=True).write_offline(tmp_path)
    for file in (tmp_path / "test").iterdir():
        file.write_text('{"user_data": {"a": {"x": [], "y": []}}}')
    with refused("data.root=", "/test"):
        ready(FEMNIST(str(tmp_path)))


def test_other_files_of_leaf_are_parsed_again(tmp_path):
    FEMNIST(offline=True).write_offline(tmp_path)
    assert ready(FEMNIST(str(tmp_path))).plan.sizes.sum() == 240
    (tmp_path / "train" / "all_data_1.json").unlink()
    assert ready(FEMNIST(str(tmp_path))).plan.sizes.sum() == 120


def test_synthetic_clients_differ_as_alpha_and_beta_say():
    data = ready(Synthetic(0.0, 0.0, num_clients=200, largest=400))
    x = [torch.cat([x for x, _ in data.train_dataloader(k)]) for k in range(200)]
    pooled = torch.stack([rows.var(0) for rows in x if len(rows) > 300]).mean(0)
    np.testing.assert_allclose(pooled, np.arange(1, 61) ** -1.2, rtol=0.15)
    centers = torch.stack([rows.mean(0) for rows in x if len(rows) > 300])
    assert centers.std(0).mean().item() == pytest.approx(1, rel=0.15)
    wide = ready(Synthetic(0.0, 3.0, num_clients=200, largest=400))
    middles = torch.tensor([torch.cat([x for x, _ in wide.train_dataloader(k)]).mean() for k in range(200)])
    assert middles.std().item() == pytest.approx(3, rel=0.2)
    assert data.plan.sizes.min() >= 45 and data.plan.sizes.max() == 360


def rows_and_labels(data):
    return ready(data)._train


def test_alpha_changes_no_label_of_synthetic_and_those_of_synthetic_per_class():
    def drawn(kind, alpha):
        return rows_and_labels(kind(alpha, 0.0, num_clients=20, largest=400))

    x, labels = drawn(Synthetic, 0.0)
    same_x, same_labels = drawn(Synthetic, 3.0)
    assert torch.equal(x, same_x)
    # but where two logits are equal up to rounding
    assert (labels != same_labels).sum() <= 1
    plain_x, plain = drawn(SyntheticPerClass, 0.0)
    other_x, other = drawn(SyntheticPerClass, 3.0)
    assert torch.equal(plain_x, other_x)
    assert (plain != other).float().mean() > 0.3


def test_synthetic_iid_shares_one_model_and_the_others_do_not():
    skews = {iid: ready(Synthetic(1.0, 1.0, num_clients=20, largest=500, iid=iid)).plan.skew() for iid in (True, False)}
    assert skews[True] < 0.4 < skews[False]


def test_synthetic_trains_and_one_seed_gives_one_data_set(tmp_path, monkeypatch):
    trainer = small_trainer(tmp_path, max_rounds=3)
    trainer.fit(ImageClassifier(Logistic(60)), Synthetic(0.5, 0.5, num_clients=5, largest=200))
    assert trainer.metrics["test/accuracy"] > 0.2
    first, second = (ready(Synthetic(num_clients=3, largest=99)) for _ in range(2))
    assert torch.equal(first._train[0][0], second._train[0][0])
    assert len(first.test_dataloader(1).dataset) == len(first._test[1][1])


def test_synthetic_batches_are_those_that_torch_collates():
    data = ready(Synthetic(num_clients=2, largest=99, batch_size=16))
    rows = torch.from_numpy(data.plan.parts[1])
    loader, plain = data.train_dataloader(1), TensorDataset(*(column[rows] for column in data._train))
    reference = DataLoader(plain, batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(3))
    loader.generator.manual_seed(3)
    for batch, expected in zip(loader, reference, strict=True):
        assert all(torch.equal(*pair) for pair in zip(batch, expected, strict=True))


# ---------------------------------------------------------------- validation, clients' tests, noise
def test_validation_is_a_share_of_each_class_and_is_not_trained_on():
    data = ready(Digits(num_clients=3, val_fraction=0.1))
    val, train = data.val_dataloader().rows, torch.cat(data._rows)
    assert not set(val.tolist()) & set(train.tolist())
    whole = ready(Digits(num_clients=3))
    assert len(val) + len(train) == whole.plan.sizes.sum()
    counts = np.bincount(torch.cat([y for _, y in data.val_dataloader()]), minlength=10)
    np.testing.assert_allclose(counts, 0.1 * whole.plan.label_counts.sum(0), atol=0.5)
    assert whole.val_dataloader() == []
    rows, kept = held_out(np.arange(10), np.zeros(10, int), 0.3)
    assert len(rows) == 7 and len(kept) == 3


def test_validation_is_evaluated_and_logged(tmp_path):
    trainer = small_trainer(tmp_path, max_rounds=1)
    trainer.fit(ImageClassifier(MLP(64, [16])), Digits(num_clients=2, val_fraction=0.2))
    assert {"val/accuracy", "test/accuracy"} <= set(trainer.metrics)


def test_a_clients_test_has_the_proportions_of_its_labels():
    data = ready(Digits(num_clients=5, partitioner=Dirichlet(0.2)))
    everything = len(data.test_dataloader().rows)
    for k in range(5):
        labels = torch.cat([y for _, y in data.test_dataloader(k)])
        here, there = np.bincount(labels, minlength=10), data.plan.label_counts[k]
        assert 0 < len(labels) < everything
        largest = there.argmax()
        np.testing.assert_allclose(here / here[largest], there / there[largest], atol=1 / here[largest])


def test_in_proportion_takes_as_many_as_there_are():
    labels = np.repeat([0, 1, 2], [10, 10, 10])
    chosen = in_proportion(labels, np.array([4, 2, 0]), np.random.default_rng(0))
    assert np.bincount(labels[chosen], minlength=3).tolist() == [10, 5, 0]
    assert len(in_proportion(labels, np.zeros(3, int), np.random.default_rng(0))) == 0


def test_noise_rises_from_the_first_client_to_the_last_and_leaves_the_pooled_test_alone():
    data = ready(Digits(num_clients=3, client_noise=0.2, normalize=False))
    plain = ready(Digits(num_clients=3, normalize=False))
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


def test_labels_outside_the_classes_are_refused(monkeypatch):
    data = MNIST(offline=True)
    monkeypatch.setattr(MNIST, "num_classes", 9)
    with refused("train_labels=9"):
        ready(data)


def test_patterns_are_told_apart_by_class():
    labels = cycled(5, 10)
    images = patterns(labels, 8, 3, 0).astype(float)
    same = np.abs(images[0] - images[5]).mean()
    assert all(np.abs(images[0] - images[c]).mean() > 1.5 * same for c in range(1, 5))


@pytest.mark.parametrize(("argument", "value"), [("val_fraction", 1.0), ("client_noise", -0.1)])
def test_arguments_out_of_range_are_named(argument, value):
    with refused(f"data.{argument}={value}"):
        Digits(**{argument: value})
    assert issubclass(Digits, ImageDataModule)
