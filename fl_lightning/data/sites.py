"""Images of one's own from several sites, such as hospitals, in folders or in a table of files."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_warn

from fl_lightning.data.cache import listed
from fl_lightning.data.datamodule import Images
from fl_lightning.data.file_dataset import cycled
from fl_lightning.data.folders import FolderDataModule, ImageFile, is_image, read_table, subfolders, write_images
from fl_lightning.data.partitioners import Natural, Partitioner
from fl_lightning.errors import require

SPLITS = ("train", "val", "test")
COLUMNS = ("path", "label", "site")


class SiteImageFolders(FolderDataModule):
    """Images of your own from several sites: ``SITE/CLASS/*``, ``SITE/{train,val,test}/CLASS/*``, or a CSV table.

    Each site is a domain and, by default, a client. Sites and classes keep the names of their folders, in alphabetical
    order; names that are all numbers are in the order of numbers. A site may lack a class. A site that has test images
    alone trains nothing, and is tested. Where no site has a folder ``test``, the images in ``val`` are the test images.

    A table has the columns ``path``, ``label``, ``site`` and, if it says so, ``split`` (train, val or test). Its paths
    are relative to its own folder.

    Args:
        root: folder of the sites, or the CSV file.
        image_size: height and width to which the images are resized.
        test_fraction: share of each site's images, class by class, that is drawn for test where there are no splits, in
            (0, 1).
        num_clients: K, at least 1; None is one client for each site.
        partitioner: assigns the training samples to clients; None is ``Natural``: a client for each site, or, with
            fewer clients, several sites a client.
        **kwargs: see :class:`FolderDataModule`.
    """

    layout = "SITE/CLASS/*.jpg, or SITE/train/CLASS/*.jpg and SITE/test/CLASS/*.jpg, for two or more sites"

    def __init__(
        self,
        root: str = "data",
        image_size: int = 64,
        test_fraction: float = 0.2,
        num_clients: int | None = None,
        partitioner: Partitioner | None = None,
        **kwargs: Any,
    ) -> None:
        clients = 1 if num_clients is None else num_clients
        super().__init__(root, image_size, num_clients=clients, partitioner=partitioner or Natural(), **kwargs)
        require(0 < test_fraction < 1, "data.test_fraction", test_fraction, "give a share in (0, 1)")
        self.test_fraction, self.num_classes, self._client_each = test_fraction, 0, num_clients is None

    def read(self, root: Path) -> Images:
        if root.suffix.lower() != ".csv":
            return super().read(root)
        require(root.is_file(), "data.root", str(root), "there is no such file; give a folder of sites, or a CSV table")
        return self.images_of(root, self.list_files(root))

    def list_files(self, root: Path) -> list[ImageFile]:
        files = list(read_manifest(root) if root.suffix.lower() == ".csv" else files_of_sites(root, self.layout))
        if any(file.split for file in files) and not any(file.split == "test" for file in files):
            files = [file._replace(split="test" if file.split == "val" else file.split) for file in files]
        trains = {file.domain for file in files if file.split in ("", "train")}
        # sites that train come first
        sites = in_order(trains) + in_order({file.domain for file in files} - trains)
        classes = in_order({file.label for file in files})
        check_splits(root, files, sites, classes)
        self.domain_names, self.class_names = tuple(sites), tuple(classes)
        if self._client_each:
            self.num_clients = len(trains)
        return files

    def write_offline(self, root: Path) -> None:
        for number, site in enumerate(("east", "north", "south", "west")):
            for split, size in (("train", 30 + 6 * number), ("test", 12)):
                labels = cycled(3, size)
                write_images(root / site / split, [f"class_{c}" for c in labels], labels, self.image_size)


def files_of_sites(root: Path, layout: str) -> Iterator[ImageFile]:
    """Yield the images in the folders of the sites."""
    sites = {site: subfolders(root / site) for site in subfolders(root)}
    hint = f"it holds {listed(sites) or 'no folder'}, but must hold {layout}"
    require(len(sites) >= 2, "data.root", str(root), hint)
    hint = f"its folders {listed(sites)} are splits and no sites: take ImageFolderImages, or give {layout}"
    require(not set(sites) <= set(SPLITS), "data.root", str(root), hint)
    split = [site for site, folders in sites.items() if set(folders) & set(SPLITS)]
    whole = [site for site in sites if site not in split]
    hint = f"{listed(split)} have the folders train and test, {listed(whole)} have not; give all sites the same layout"
    require(not split or not whole, "data.root", str(root), hint)
    left_out: Counter[str] = Counter()
    filled: dict[str, bool] = {}
    for site, folders in sites.items():
        others = [name for name in folders if split and name not in SPLITS]
        hint = f"its folders {listed(others)} stand beside its splits; it may have {', '.join(SPLITS)}"
        require(not others, "data.root", str(root / site), hint)
        number = 0
        for part in folders if split else [""]:
            for name in subfolders(root / site / part):
                files = sorted(path for path in (root / site / part / name).rglob("*") if path.is_file())
                images = [path for path in files if is_image(path)]
                left_out.update(path.suffix or path.name for path in files if not is_image(path))
                number += len(images)
                filled[name] = filled.get(name, False) or bool(images)
                yield from (ImageFile(path, name, site, part) for path in images)
        direct = not number and any(is_image(path) for path in (root / site).iterdir())
        deeper = f"; images lie in it directly: is {str(root)!r} one site, and data.root its parent?" if direct else ""
        hint = f"its folder {site!r} holds no image in a folder of a class{deeper or f'; give {layout}'}"
        require(number > 0, "data.root", str(root), hint)
    empty = [name for name, some in filled.items() if not some]
    hint = f"its classes {listed(empty)} have no image at any site; add some, or remove their folders"
    require(not empty, "data.root", str(root), hint)
    if left_out:
        kinds = listed(f"{number} {kind}" for kind, number in sorted(left_out.items()))
        rank_zero_warn(f"data.root={str(root)!r}: {left_out.total()} files are no images and are left out: {kinds}")


def read_manifest(path: Path) -> Iterator[ImageFile]:
    """Yield the images that a CSV table names."""
    key = ("data.root", str(path))
    present, rows = read_table(path, COLUMNS)
    unknown = [name for name in present if name not in (*COLUMNS, "split")]
    hint = f"its columns {listed(map(repr, unknown))} are not read; rename them, or take them out: it may have "
    require(not unknown and len(set(present)) == len(present), *key, hint + f"{', '.join(COLUMNS)} and split")
    require(len(rows) > 0, *key, "it has no row; give one for each image")
    short = [str(line) for line, row in enumerate(rows, 2) if None in row or not all(row[name] for name in present)]
    require(not short, *key, f"lines {listed(short)} have an empty cell, or other cells than the head; complete them")
    splits = sorted({row["split"] for row in rows} - set(SPLITS)) if "split" in present else []
    require(not splits, *key, f"its splits {listed(splits)} are not known; give {', '.join(SPLITS)}")
    files = [Path(os.path.normpath(path.parent / row["path"])) for row in rows]
    twice = [str(file) for file, number in Counter(files).items() if number > 1]
    hint = f"{listed(twice)} stand in several rows; a file has one class, one site and one split: take the others out"
    require(not twice, *key, hint)
    absent = [str(file) for file in files if not file.is_file()]
    hint = f"{len(absent)} of its {len(files)} files do not exist, such as {listed(absent)}; give paths relative to it"
    require(not absent, *key, hint)
    for file, row in zip(files, rows, strict=True):
        yield ImageFile(file, row["label"], row["site"], row.get("split", ""))


def check_splits(root: Path, files: list[ImageFile], sites: list[str], classes: list[str]) -> None:
    """Refuse classes without training images and sets without a split; warn of sites without test images."""
    drawn = not files[0].split
    for split in ("train", "test"):
        some = drawn or any(file.split == split for file in files)
        require(some, "data.root", str(root), f"it has no image for {split}; give some, or no splits at all")
    require(len(classes) >= 2, "data.root", str(root), f"it has the class {classes[0]} alone; give two or more")
    first: dict[str, str] = {}
    alike = [f"{first[n.lower()]} and {n}" for n in classes if first.setdefault(n.lower(), n) != n]
    require(not alike, "data.root", str(root), f"its classes {listed(alike)} differ in case alone; give them one name")
    trained = {file.label for file in files if file.split in ("", "train")}
    untrained = [name for name in classes if name not in trained]
    hint = f"its classes {listed(untrained)} have no training image at any site; add some, or take their images out"
    require(not untrained, "data.root", str(root), hint)
    tested = {file.domain for file in files if drawn or file.split == "test"}
    without = [site for site in sites if site not in tested]
    if without:
        text = f"the sites {listed(without)} have no test images: they train, and have no accuracy of their own"
        rank_zero_warn(f"data.root={str(root)!r}: {text}")


def in_order(names: set[str]) -> list[str]:
    """Sort names alphabetically, or by value where all are whole numbers."""
    return sorted(names, key=int) if all(map(str.isdecimal, names)) else sorted(names)
