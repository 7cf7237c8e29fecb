"""Images of one's own from several sites, such as hospitals, in folders or in a table of files."""

from __future__ import annotations

import csv
import io
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lightning.fabric.utilities.rank_zero import rank_zero_warn

from fl_lightning.data.datamodule import Images
from fl_lightning.data.folders import FolderDataModule, ImageFile, is_image, read_utf8, subfolders, write_images
from fl_lightning.data.partitioners import Natural, Partitioner
from fl_lightning.data.source import cycled
from fl_lightning.errors import UsageError, require

SPLITS = ("train", "val", "test")
COLUMNS = ("path", "label", "site")
# names in a message that is about many
SHOWN = 5


class Found(NamedTuple):
    """An image file, with the names of its class, its site and its split; the split is empty where it is drawn."""

    path: Path
    label: str
    site: str
    split: str = ""


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
        return self.images_of(root, self._numbered(root, list(read_manifest(root))))

    def list_files(self, root: Path) -> list[ImageFile]:
        return self._numbered(root, list(files_of_sites(root, self.layout)))

    def write_offline(self, root: Path) -> None:
        for number, site in enumerate(("east", "north", "south", "west")):
            for split, size in (("train", 30 + 6 * number), ("test", 12)):
                names = [f"class_{c}" for c in range(3)]
                write_images(root / site / split, names, cycled(3, size), self.image_size)

    def _numbered(self, root: Path, found: list[Found]) -> list[ImageFile]:
        """The files with the numbers of their class and domain; sites that train come first."""
        require(len(found) > 0, "data.root", str(root), f"no image found; it must hold {self.layout}")
        if any(file.split for file in found) and not any(file.split == "test" for file in found):
            found = [file._replace(split="test" if file.split == "val" else file.split) for file in found]
        trains = {file.site for file in found if file.split in ("", "train")}
        sites = in_order(trains) + in_order({file.site for file in found} - trains)
        classes = in_order({file.label for file in found})
        check_splits(root, found, sites, classes)
        self.domain_names, self.class_names = tuple(sites), tuple(classes)
        if self._client_each:
            self.num_clients = len(trains)
        numbers = ({name: i for i, name in enumerate(classes)}, {name: i for i, name in enumerate(sites)})
        return [ImageFile(file.path, numbers[0][file.label], numbers[1][file.site], file.split) for file in found]


def files_of_sites(root: Path, layout: str) -> Iterator[Found]:
    """The images in the folders of the sites.

    Raises:
        UsageError: the folders are none of sites, some sites have splits and others have not, or a folder that has no
            images stands for a site.
    """
    sites = {site: subfolders(root / site) for site in subfolders(root)}
    hint = f"it holds {named(sites) or 'no folder'}, but must hold {layout}"
    require(len(sites) >= 2, "data.root", str(root), hint)
    hint = f"its folders {named(sites)} are splits and no sites: take ImageFolderImages, or give {layout}"
    require(not set(sites) <= set(SPLITS), "data.root", str(root), hint)
    split = [site for site, folders in sites.items() if set(folders) & set(SPLITS)]
    whole = [site for site in sites if site not in split]
    hint = f"{named(split)} have the folders train and test, {named(whole)} have not; give all sites the same layout"
    require(not split or not whole, "data.root", str(root), hint)
    left_out: Counter[str] = Counter()
    filled: dict[str, bool] = {}
    for site, folders in sites.items():
        others = [name for name in folders if split and name not in SPLITS]
        hint = f"its folders {named(others)} stand beside its splits; it may have {', '.join(SPLITS)}"
        require(not others, "data.root", str(root / site), hint)
        number = 0
        for part in folders if split else [""]:
            for name in subfolders(root / site / part):
                files = sorted(path for path in (root / site / part / name).rglob("*") if path.is_file())
                images = [path for path in files if is_image(path)]
                left_out.update(path.suffix or path.name for path in files if not is_image(path))
                number += len(images)
                filled[name] = filled.get(name, False) or bool(images)
                yield from (Found(path, name, site, part) for path in images)
        direct = not number and any(is_image(path) for path in (root / site).iterdir())
        deeper = f"; images lie in it directly: is {str(root)!r} one site, and data.root its parent?" if direct else ""
        hint = f"its folder {site!r} holds no image in a folder of a class{deeper or f'; give {layout}'}"
        require(number > 0, "data.root", str(root), hint)
    empty = [name for name, some in filled.items() if not some]
    hint = f"its classes {named(empty)} have no image at any site; add some, or remove their folders"
    require(not empty, "data.root", str(root), hint)
    if left_out:
        kinds = named(f"{number} {kind}" for kind, number in sorted(left_out.items()))
        rank_zero_warn(f"data.root={str(root)!r}: {left_out.total()} files are no images and are left out: {kinds}")


def read_manifest(path: Path) -> Iterator[Found]:
    """The images that a CSV table names.

    Raises:
        UsageError: it lacks a column, or has another one; a row has an empty cell, an unknown split, or a path that is
            no file or that another row has, too.
    """
    key = ("data.root", str(path))
    try:
        reader = csv.DictReader(io.StringIO(read_utf8(path)), strict=True)
        present, rows = list(reader.fieldnames or ()), list(reader)
    except csv.Error as error:
        raise UsageError(f"data.root={str(path)!r}: {error}; give a CSV file with commas") from error
    missing = [name for name in COLUMNS if name not in present]
    hint = f"it has the columns {named(present) or 'none'}, without {named(missing)}; give {', '.join(COLUMNS)} and, "
    require(not missing, *key, hint + "if it says which images are for test, split, separated by commas")
    unknown = [name for name in present if name not in (*COLUMNS, "split")]
    hint = f"its columns {named(map(repr, unknown))} are not read; rename them, or take them out: it may have "
    require(not unknown and len(set(present)) == len(present), *key, hint + f"{', '.join(COLUMNS)} and split")
    require(len(rows) > 0, *key, "it has no row; give one for each image")
    short = [str(line) for line, row in enumerate(rows, 2) if None in row or not all(row[name] for name in present)]
    require(not short, *key, f"lines {named(short)} have an empty cell, or other cells than the head; complete them")
    splits = sorted({row["split"] for row in rows} - set(SPLITS)) if "split" in present else []
    require(not splits, *key, f"its splits {named(splits)} are not known; give {', '.join(SPLITS)}")
    files = [Path(os.path.normpath(path.parent / row["path"])) for row in rows]
    twice = [str(file) for file, number in Counter(files).items() if number > 1]
    hint = f"{named(twice)} stand in several rows; a file has one class, one site and one split: take the others out"
    require(not twice, *key, hint)
    absent = [str(file) for file in files if not file.is_file()]
    hint = f"{len(absent)} of its {len(files)} files do not exist, such as {named(absent)}; give paths relative to it"
    require(not absent, *key, hint)
    for file, row in zip(files, rows, strict=True):
        yield Found(file, row["label"], row["site"], row.get("split", ""))


def check_splits(root: Path, found: list[Found], sites: list[str], classes: list[str]) -> None:
    """Refuse classes that nobody trains, and a data set without training or test images; warn of sites without a test.

    Raises:
        UsageError: there are such classes, or no such images.
    """
    drawn = not found[0].split
    for split in ("train", "test"):
        some = drawn or any(file.split == split for file in found)
        require(some, "data.root", str(root), f"it has no image for {split}; give some, or no splits at all")
    require(len(classes) >= 2, "data.root", str(root), f"it has the class {classes[0]} alone; give two or more")
    first: dict[str, str] = {}
    alike = [f"{first[n.lower()]} and {n}" for n in classes if first.setdefault(n.lower(), n) != n]
    require(not alike, "data.root", str(root), f"its classes {named(alike)} differ in case alone; give them one name")
    trained = {file.label for file in found if file.split in ("", "train")}
    untrained = [name for name in classes if name not in trained]
    hint = f"its classes {named(untrained)} have no training image at any site; add some, or take their images out"
    require(not untrained, "data.root", str(root), hint)
    tested = {file.site for file in found if drawn or file.split == "test"}
    without = [site for site in sites if site not in tested]
    if without:
        text = f"the sites {named(without)} have no test images: they train, and have no accuracy of their own"
        rank_zero_warn(f"data.root={str(root)!r}: {text}")


def in_order(names: set[str]) -> list[str]:
    """Names in alphabetical order, or, where all of them are whole numbers, in the order of numbers."""
    return sorted(names, key=int) if all(map(str.isdecimal, names)) else sorted(names)


def named(names: Iterable[str]) -> str:
    """The first names, and how many more there are."""
    given = list(names)
    return ", ".join(given[:SHOWN]) + (f" and {len(given) - SHOWN} more" if len(given) > SHOWN else "")
