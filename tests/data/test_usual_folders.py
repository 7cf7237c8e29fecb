"""Folders and tables of images as people have them: how many images each is read as, or the keys of the one line."""

import os
import warnings
from collections import Counter

import numpy as np
import pytest
from helpers.errors import refused, warned
from PIL import Image

from fl_lightning.data import ImageFolderImages, SiteImageFolders

LATIN_1 = os.fsdecode("é".encode("latin-1"))
COMPOSED, DECOMPOSED = "caf\u00e9", "cafe\u0301"


def write(root, *paths):
    """Write a small image for each path, in the format of its ending, or an empty file where it has another."""
    for number, path in enumerate(paths):
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (4, 4, 3), dtype=np.uint8)
        kind = Image.registered_extensions().get(file.suffix.lower())
        if kind is None or file.suffix == ".psd":
            file.touch()
        else:
            with open(file, "wb") as opened:
                Image.fromarray(pixels).save(opened, kind)


def images(*paths):
    """Writes these images into a folder."""
    return lambda root: write(root, *paths)


def classes(*folders, names="cat dog", files="0.png 1.png"):
    return [f"{folder}/{name}/{file}" for folder in folders for name in names.split() for file in files.split()]


def pages(path, **options):
    """Write an image of three pages."""
    frames = [Image.fromarray(np.full((4, 4), shade, np.uint8)) for shade in (0, 100, 200)]
    path.parent.mkdir(parents=True, exist_ok=True)
    frames[0].save(path, save_all=True, append_images=frames[1:], **options)


def cut(path, share):
    """Keep this share of the bytes of a file."""
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])


def table(root, *rows):
    write(root, *classes("east", "west", files="0.png 1.png 2.png"))
    plain = [f"{path},{path.split('/')[1]},{path.split('/')[0]},train" for path in classes("east", "west")]
    held = [f"{path},{path.split('/')[1]},{path.split('/')[0]},Test" for path in classes("east", "west", files="2.png")]
    (root / "images.csv").write_text("\n".join(["path,label,site,split", *plain, *held, *rows]) + "\n")
    return root / "images.csv"


def link(root, path, target):
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).symlink_to(target, target_is_directory=True)


def counts(data):
    """``training validation test`` images of each class, by its name."""
    loaders = (data.val_dataloader(), data.test_dataloader())
    held = [Counter(np.asarray(loader.labels[loader.rows]).tolist()) if len(loader) else {} for loader in loaders]
    trained = data.plan.label_counts.sum(0).tolist()
    return {
        name: (trained[label], *(part.get(label, 0) for part in held)) for label, name in enumerate(data.class_names)
    }


def setup(kind, root):
    data = kind(str(root), image_size=4, **({"num_clients": 1} if kind is ImageFolderImages else {}))
    data.setup()
    return data


TWO = {"cat": (2, 0, 2), "dog": (2, 0, 2)}
THREE = {"cat": (2, 2, 2), "dog": (2, 2, 2)}
SITES = {"cat": (4, 0, 4), "dog": (4, 0, 4)}
FOLDERS, OF_SITES = ImageFolderImages, SiteImageFolders
# what is written, how it is read, and which images it has, or the words of the error, or both and those of the warning
READ = {
    "splits in capitals": (FOLDERS, images(*classes("Training", "Testing")), TWO),
    "all caps": (FOLDERS, images(*classes("TRAIN", "VAL")), TWO),
    "validation": (FOLDERS, images(*classes("train", "Validation", "test")), THREE),
    "splits of sites": (
        OF_SITES,
        images(*classes("a/Training", "b/train", "a/testing", "b/TEST", "a/dev")),
        {"cat": (4, 2, 4), "dog": (4, 2, 4)},
    ),
    "folders of patients": (
        OF_SITES,
        images(*classes("a/train", "b/train", "a/test", "b/test", files="p1/0.png p1/left/1.png")),
        SITES,
    ),
    "hidden copies": (
        FOLDERS,
        images(
            *classes("train", "test"),
            *classes("train", files=".ipynb_checkpoints/0-checkpoint.png @eaDir/0.png/S.png __MACOSX/0.png ._0.png"),
            *classes("__MACOSX/train", "@eaDir", ".cache"),
        ),
        TWO,
    ),
    "endings": (
        FOLDERS,
        images(*classes("train", "test", files="0.JPG 1.jfif 2.gif 3.avif 4.jpe 5.PNG 6.tif 7.webp 8.pgm 9.bmp")),
        {"cat": (10, 0, 10), "dog": (10, 0, 10)},
    ),
    "a linked folder": (
        FOLDERS,
        lambda root: [
            write(root, *classes("train", "test"), "../elsewhere/a/2.png"),
            link(root, "train/cat/more", "../../../elsewhere"),
        ],
        {"cat": (3, 0, 2), "dog": (2, 0, 2)},
    ),
    "a linked class": (
        FOLDERS,
        lambda root: [
            write(root, *classes("train", "test"), "../elsewhere/2.png"),
            *(link(root, f"{split}/cow", "../../elsewhere") for split in ("train", "test")),
        ],
        {"cat": (2, 0, 2), "cow": (1, 0, 1), "dog": (2, 0, 2)},
    ),
    "forms of Unicode": (
        OF_SITES,
        images(
            *classes("a/train", "a/test", names=f"{COMPOSED} dog"),
            *classes("b/train", "b/test", names=f"{DECOMPOSED} dog"),
        ),
        {COMPOSED: (4, 0, 4), "dog": (4, 0, 4)},
    ),
    "file names in Latin-1": (FOLDERS, images(*classes("train", "test", files=f"caf{LATIN_1}.png 1.png")), TWO),
    "a table": (OF_SITES, table, {"cat": (4, 0, 2), "dog": (4, 0, 2)}),
}


@pytest.mark.parametrize("case", READ)
def test_folders_as_people_have_them_are_read(tmp_path, case):
    kind, make, expected = READ[case]
    root = make(tmp_path / "root")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert counts(setup(kind, root if case == "a table" else tmp_path / "root")) == expected


WARNED = {
    "files left out": (
        FOLDERS,
        images(*classes("train", "test"), *classes("train", files="2.HEIC notes.txt"), "README.txt", "train/5.png"),
        TWO,
        ("3 .txt", "2 .heic", "1 .png"),
    ),
    "upper and lower case": (
        OF_SITES,
        images(*classes("a/train", "a/test", names="Cat dog"), *classes("b/train", "b/test")),
        {"Cat": (2, 0, 2), "cat": (2, 0, 2), "dog": (4, 0, 4)},
        ("'Cat'", "'cat'"),
    ),
}


@pytest.mark.parametrize("case", WARNED)
def test_what_is_not_read_or_looks_alike_is_named(tmp_path, case):
    kind, make, expected, words = WARNED[case]
    make(tmp_path)
    with warned("data.root=", *words):
        data = setup(kind, tmp_path)
    assert counts(data) == expected


REFUSED = {
    "a folder beside train": (FOLDERS, images(*classes("train", "test", "unlabelled")), "unlabelled"),
    "a class named test": (FOLDERS, images(*classes(".", names="control test")), "control", "test"),
    "a class without test images": (
        FOLDERS,
        images(*classes("train", "test"), "train/cow/0.png"),
        "test",
        "'cow'",
        "data.classes",
    ),
    "two names of a split": (FOLDERS, images(*classes("train", "Training", "test")), "'Training', 'train'"),
    "train alone": (FOLDERS, images(*classes("Train")), "Train"),
    "splits of one site alone": (OF_SITES, images(*classes("a/Train", "a/Test", "b")), "b", "cat, dog"),
    "a class without images": (OF_SITES, images(*classes("a", "b"), "a/cow/0.psd"), "a/cow", ".psd"),
    "a class of empty folders": (
        OF_SITES,
        lambda root: [write(root, *classes("a", "b")), (root / "a" / "cow").mkdir()],
        "cow",
    ),
    "a path twice": (OF_SITES, lambda root: table(root, "east/cat/0.png,cat,east,train"), "images.csv", "2", "14"),
    "a path in train and test": (
        OF_SITES,
        lambda root: table(root, "./east/cat/1.png,cat,east,test"),
        "images.csv",
        "3",
        "14",
    ),
    "a path with two labels": (
        OF_SITES,
        lambda root: table(root, f"{root}/west/../east/dog/0.png,cat,east,train"),
        "images.csv",
        "4",
        "14",
    ),
    "forms of Unicode side by side": (
        FOLDERS,
        images(*classes("train", "test", names=f"{COMPOSED} {DECOMPOSED} dog")),
        "train",
        repr(COMPOSED),
    ),
    "a space at an end": (OF_SITES, images(*classes("a", "b"), "b/cat /0.png"), "'cat'", "'cat '"),
    "a circle of links": (
        FOLDERS,
        lambda root: [write(root, *classes("train", "test")), link(root, "train/cat/all", "../..")],
        "train/cat/all",
    ),
    "several pages": (
        FOLDERS,
        lambda root: [
            write(root, *classes("train", "test")),
            pages(root / "train" / "cat" / "stack.tif"),
            pages(root / "test" / "dog" / "clip.gif"),
        ],
        "2 of 10 files",
        "clip.gif",
        "3 pages",
        "stack.tif",
        "3 pages",
    ),
    "pages cut off": (
        FOLDERS,
        lambda root: [
            write(root, *classes("train", "test")),
            pages(root / "train" / "cat" / "stack.tif"),
            cut(root / "train" / "cat" / "stack.tif", 0.3),
        ],
        "1 of 9 files",
        "stack.tif",
    ),
    "class names in Latin-1": (FOLDERS, images(*classes("train", "test", names=f"caf{LATIN_1} dog")), "caf", "UTF-8"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_folders_that_would_be_miscounted_are_refused_in_one_line(tmp_path, case):
    kind, make, *words = REFUSED[case]
    root = make(tmp_path / "root")
    table_of = root if kind is OF_SITES and "path" in case else tmp_path / "root"
    with refused("data.root", *words) as caught:
        setup(kind, table_of)
    text = str(caught.value)
    assert "\n" not in text and text.encode()


def test_a_photograph_with_a_second_view_in_its_file_is_one_image(tmp_path):
    """Telephones write a preview or a depth map behind the photograph (MPO), in files that end in ``.jpg``."""
    write(tmp_path, *classes("train", "test"))
    pages(tmp_path / "train" / "cat" / "2.jpg", format="MPO")
    assert counts(setup(FOLDERS, tmp_path))["cat"] == (3, 0, 2)
