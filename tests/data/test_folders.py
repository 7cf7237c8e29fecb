"""Images in folders: what a folder means, how images are decoded, and the cache of what was decoded."""

import os
import shutil

import numpy as np
import pytest
import torch
from helpers.errors import refused
from helpers.image_files import write_ham10000, write_pacs, write_tiny_imagenet
from helpers.runs import ready
from PIL import Image

from fl_lightning.data import HAM10000, PACS, ByDomain, ImageFolderImages, TinyImageNet


@pytest.fixture
def cache(tmp_path_factory, monkeypatch):
    """The folder of the cache, for one test."""
    base = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("XDG_CACHE_HOME", str(base))
    return base / "fl_lightning"


def written(root, **images):
    """Write ``CLASS/NUMBER.png`` for each class: random images for a number, or the given arrays."""
    draw = np.random.default_rng(0)
    for name, given in images.items():
        (root / name).mkdir(parents=True)
        arrays = given if isinstance(given, list) else draw.integers(0, 256, (given, 4, 4, 3), dtype=np.uint8)
        for number, array in enumerate(arrays):
            Image.fromarray(array).save(root / name / f"{number}.png")
    return root


def pooled(root, **kwargs):
    """The images under a folder, at one client."""
    given = {"image_size": 4, "num_clients": 1, "normalize": False, **kwargs}
    return ready(ImageFolderImages(str(root), **given))


def shown(data):
    """All training images ``(N, H, W, C)``, as bytes, in the order of the files."""
    loader = data.train_dataloader(0)
    return loader.images[loader.rows.sort().values]


# ---------------------------------------------------------------- decoding, and the cache
@pytest.fixture
def some(tmp_path, cache):
    return written(tmp_path / "some", cat=4, dog=6)


@pytest.fixture
def opened(monkeypatch):
    """The image files that were opened."""
    seen, real = [], Image.open
    monkeypatch.setattr(Image, "open", lambda path: seen.append(path) or real(path))
    return seen


def test_images_are_decoded_once_and_again_when_something_changed(some, opened):
    before = sorted(some.rglob("*"))
    pooled(some)
    assert len(opened) == 10
    pooled(some)
    assert len(opened) == 10
    pooled(some, image_size=2)
    assert len(opened) == 20
    assert sorted(some.rglob("*")) == before  # nothing is written beside the data
    first = some / "cat" / "0.png"
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(first)
    assert not shown(pooled(some, test_fraction=0.1))[0].any()
    assert len(opened) == 30
    os.utime(first, ns=(1, 1))
    pooled(some)
    assert len(opened) == 40


@pytest.mark.parametrize("in_place", [True, False])
def test_an_image_replaced_by_another_of_the_same_size_and_time_is_decoded_again(tmp_path, cache, in_place):
    """As ``cp -p`` replaces one in place, and ``rsync -t`` by a new file."""
    for split in ("train", "test"):
        written(tmp_path / split, cat=[np.zeros((4, 4), np.uint8)], dog=[np.full((4, 4), 255, np.uint8)])
    old, other = (tmp_path / "train" / name / "0.png" for name in ("cat", "dog"))
    black, white = (path.read_bytes().ljust(200, b"\0") for path in (old, other))
    old.write_bytes(black)
    assert not shown(pooled(tmp_path))[0].any()
    before = old.stat()
    new = old if in_place else tmp_path / "new.png"
    new.write_bytes(white)
    os.replace(new, old)
    os.utime(old, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert shown(pooled(tmp_path))[0].eq(255).all()


def test_a_cache_that_lacks_a_file_is_made_anew(some, cache):
    before = shown(pooled(some)).clone()
    files = [path for path in cache.rglob("*") if path.is_file()]
    assert len(files) == 2
    for path in files:
        path.unlink()
        assert torch.equal(shown(pooled(some)), before)


def test_all_files_that_are_no_images_are_named_at_once_and_leave_no_cache(some, cache):
    for name in ("cat/1.png", "dog/5.png"):
        (some / name).write_bytes((some / name).read_bytes()[:30])
    with refused("data.root", "2 of 10 files", "cat/1.png", "dog/5.png"):
        pooled(some)
    assert not [path for path in cache.rglob("*") if path.is_file()]


def test_the_cache_is_the_users_own(some, tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    pooled(some)
    assert list((tmp_path / "home" / ".cache" / "fl_lightning").iterdir())
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with refused("file/fl_lightning", "XDG_CACHE_HOME"):
        pooled(some)


def test_images_of_any_size_and_mode_become_rgb(tmp_path):
    draw = np.random.default_rng(0)
    grey, alpha = draw.integers(0, 255, (40, 60), dtype=np.uint8), draw.integers(0, 255, (8, 8, 4), dtype=np.uint8)
    plain = np.full((200, 100, 3), 77, np.uint8)
    for split in ("train", "test"):
        written(tmp_path / split, grey=[grey], other=[alpha, plain])
    grey, alpha, plain = shown(pooled(tmp_path, image_size=16))
    assert torch.equal(grey[..., 0], grey[..., 1]) and grey.float().std() > 0
    assert alpha.shape == (16, 16, 3) and plain.eq(77).all()


def test_grey_images_of_more_than_8_bits_are_scaled_by_the_given_range(tmp_path):
    shades = np.arange(64, dtype=np.uint16).reshape(8, 8) * 64
    for split in ("train", "test"):
        written(tmp_path / split, ill=[shades], well=[shades * 8])
    Image.fromarray(shades.astype(np.float32)).save(tmp_path / "train" / "well" / "float.tif")
    with refused("data.root", "float.tif", "data.value_range", "12 bits"):
        pooled(tmp_path)
    for low, high in ((0, 4095), (1000, 2008), (-4096, 4096)):
        data = pooled(tmp_path, image_size=8, value_range=[low, high])
        expected = np.rint((shades.astype(float).clip(low, high) - low) * 255 / (high - low))
        assert np.array_equal(shown(data)[0, ..., 0], expected) and np.array_equal(shown(data)[-1, ..., 0], expected)
        assert data.inference_arguments()["value_range"] == [low, high]
    Image.fromarray(np.full((8, 8), np.nan, np.float32)).save(tmp_path / "test" / "well" / "nan.tif")
    with refused("1 of 6 files", "nan.tif", "finite"):
        pooled(tmp_path, value_range=[0, 1])
    for wrong in ([5, 5], [4], [float("nan"), 1], [0, float("inf")], "12"):
        with refused("data.value_range"):
            pooled(tmp_path, value_range=wrong)


def test_an_image_is_turned_by_its_orientation_and_put_on_white(tmp_path, cache):
    left = np.zeros((8, 8, 3), np.uint8)
    left[:, :4] = 255
    clear = np.zeros((8, 8, 4), np.uint8)
    clear[:4] = (200, 100, 0, 255)
    written(tmp_path / "train", turned=[], clear=[clear, clear])
    written(tmp_path / "test", turned=[left], clear=[clear])
    exif = Image.Exif()
    exif[0x0112] = 6  # turn it right by 90 degrees
    Image.fromarray(left).save(tmp_path / "train" / "turned" / "0.png", exif=exif)
    Image.fromarray(clear).quantize(8).save(tmp_path / "train" / "clear" / "1.png")
    *transparent, turned = shown(pooled(tmp_path, image_size=8))
    assert turned[:4].eq(255).all() and turned[4:].eq(0).all()
    for image in transparent:
        assert image[0, 0].tolist() == [200, 100, 0] and image[4:].eq(255).all()


# ---------------------------------------------------------------- any folder of images
def test_any_image_folder_with_and_without_a_test_folder(tmp_path):
    for split, number in (("train", 5), ("test", 3)):
        written(tmp_path / split, cat=number, dog=2 * number)
    data = pooled(tmp_path)
    assert data.class_names == ("cat", "dog") and data.plan.label_counts.tolist() == [[5, 10]]
    assert len(data.test_dataloader().rows) == 9
    (tmp_path / "test").rename(tmp_path / "val")
    assert len(pooled(tmp_path).test_dataloader().rows) == 9
    assert len(pooled(tmp_path / "train", test_fraction=0.4).test_dataloader().rows) == 6
    (tmp_path / "val" / "zebra").mkdir()
    with refused("data.root=", "/val", "zebra"):
        pooled(tmp_path)
    with refused("data.root=", "train/CLASS"):
        pooled(tmp_path / "train" / "cat")


@pytest.mark.parametrize(
    ("counts", "fraction", "test"), [((10, 3, 1), 0.2, [2, 0, 0]), ((7, 7, 7), 0.5, [4, 3, 3]), ((5, 8), 0.4, [2, 3])]
)
def test_the_test_images_of_the_classes_add_up_to_the_share_of_all(tmp_path, counts, fraction, test):
    data = pooled(written(tmp_path, **{f"class_{c}": n for c, n in enumerate(counts)}), test_fraction=fraction)
    labels = torch.cat([y for _, y in data.test_dataloader()])
    assert torch.bincount(labels, minlength=len(counts)).tolist() == test


def test_a_folder_may_lack_a_class_whose_name_is_given(tmp_path):
    for split in ("train", "test"):
        written(tmp_path / split, ant=2, bee=3)
    whole = pooled(tmp_path, classes=["bee", "cow", "ant"])
    assert whole.class_names == ("bee", "cow", "ant") and whole.info(0).label_counts.tolist() == [3, 0, 2]
    with refused("data.root=", "classes 'ant'", "data.classes"):
        pooled(tmp_path, classes=["bee", "cow"])
    with refused("data.classes=", "each once"):
        ImageFolderImages(classes=["a", "a"])


# ---------------------------------------------------------------- TinyImageNet
def test_tinyimagenet_reads_validation_as_published_or_sorted_into_classes(tmp_path):
    write_tiny_imagenet(tmp_path)
    published = ready(TinyImageNet(str(tmp_path), image_size=8))
    assert torch.equal(torch.cat([y for _, y in published.test_dataloader()]), torch.arange(100))
    annotations = tmp_path / "val" / "val_annotations.txt"
    bad = {
        "0.jpg\tn99\n": ("val_annotations.txt", "'n99'"),
        "1.jpg\tn00000000\n": ("1.jpg", "val_annotations.txt"),
        "\xff": ("val_annotations.txt", "'utf-8'"),
    }
    for content, named in bad.items():
        annotations.write_text(content, encoding="latin-1")
        with refused("data.root=", *named):
            ready(TinyImageNet(str(tmp_path), image_size=8))
    shutil.rmtree(tmp_path / "val")
    for folder in (tmp_path / "train").iterdir():
        shutil.copytree(folder / "images", tmp_path / "val" / folder.name)
    assert len(ready(TinyImageNet(str(tmp_path), image_size=8)).test_dataloader().rows) == 200


# ---------------------------------------------------------------- domains
@pytest.fixture(scope="module")
def shared_pacs(tmp_path_factory):
    root = tmp_path_factory.mktemp("pacs")
    write_pacs(root)
    return root


@pytest.fixture
def pacs(shared_pacs, tmp_path):
    """A copy that a test may change."""
    return shutil.copytree(shared_pacs, tmp_path / "pacs")


class SmallPACS(PACS):
    """PACS with five images of each class and domain, instead of about 357."""

    test_per_class = 2


def of_pacs(root, **kwargs):
    given = {"image_size": 8, "num_clients": 4, "partitioner": ByDomain(), **kwargs}
    return ready(SmallPACS(str(root), **given))


def test_pacs_is_split_by_class_and_domain_whatever_the_seed(shared_pacs, monkeypatch):
    data = of_pacs(shared_pacs)
    assert [data.info(k).domain for k in range(4)] == ["art_painting", "cartoon", "photo", "sketch"]
    assert data.plan.label_counts.tolist() == [[3] * 7] * 4
    by_domain = data.test_dataloaders_by_domain()
    assert {name: len(loader.rows) for name, loader in by_domain.items()} == dict.fromkeys(data.domain_names, 14)
    assert torch.equal(data.test_dataloader(2).rows, by_domain["photo"].rows)
    rows = data.test_dataloader().rows
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    assert torch.equal(of_pacs(shared_pacs).test_dataloader().rows, rows)
    assert not torch.equal(of_pacs(shared_pacs, split_seed=1).test_dataloader().rows, rows)


def test_an_incomplete_copy_without_enough_images_for_test_is_refused(shared_pacs):
    with refused("a class of a domain has only 5 images, of which 40 are for test"):
        PACS(str(shared_pacs)).setup()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda root: shutil.rmtree(root / "photo"), ("art_painting", "cartoon", "sketch", "art_painting/dog/")),
        (lambda root: shutil.rmtree(root / "sketch" / "dog"), ("/sketch", "elephant", "art_painting/dog/")),
        (lambda root: [p.unlink() for p in (root / "photo" / "dog").iterdir()], ("photo/dog",)),
    ],
)
def test_a_wrong_layout_shows_what_is_expected_and_what_is_there(pacs, change, named):
    change(pacs)
    with refused("data.root=", *named):
        of_pacs(pacs)


# ---------------------------------------------------------------- HAM10000
@pytest.fixture
def ham(tmp_path):
    write_ham10000(tmp_path)
    return tmp_path


def of_ham(root, **kwargs):
    return ready(HAM10000(str(root), image_size=8, num_clients=4, **kwargs))


def test_ham10000_has_a_fifth_of_each_source_for_test_in_several_folders(ham):
    some = sorted((ham / "HAM10000_images_part_1").iterdir())[:50]
    (ham / "HAM10000_images_part_2").mkdir()
    for path in some:
        path.rename(ham / "HAM10000_images_part_2" / path.name)
    data = of_ham(ham, partitioner=ByDomain())
    assert [len(loader.rows) for loader in data.test_dataloaders_by_domain().values()] == [8] * 4
    assert data.plan.sizes.tolist() == [34] * 4
    assert data.info(3).domain == "vidir_molemax"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda text: text.replace("nv,", "mole,", 1), ("dx='mole'",)),
        (lambda text: text.replace("rosendahl", "elsewhere", 1), ("dataset='elsewhere'",)),
        (lambda text: text + "H,99999,nv,histo,5,male,back,rosendahl\n", ("data.root=", "99999")),
        (
            lambda text: text.replace("dataset", "source"),
            ("data.root=", "HAM10000_metadata.csv", "lesion_id", "dataset"),
        ),
        (lambda text: text + "H,00001\n", ("dataset=None",)),
        (lambda text: text.replace("back", "R\xfccken"), ("HAM10000_metadata.csv", "'utf-8'")),
    ],
)
def test_a_bad_row_of_the_metadata_is_named(ham, change, named):
    table = ham / "HAM10000_metadata.csv"
    table.write_text(change(table.read_text()), encoding="latin-1")
    with refused(*named):
        of_ham(ham)
