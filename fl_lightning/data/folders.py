"""Data sets of image files in folders, published ones and your own. The images are decoded once, into a cache."""

from __future__ import annotations

import csv
import io
import math
import os
import re
import unicodedata
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from lightning.fabric.utilities.rank_zero import rank_zero_warn

from fl_lightning.core.seeding import numpy_rng
from fl_lightning.data.array_datasets import FileDataModule
from fl_lightning.data.cache import Range, cached, decode
from fl_lightning.data.datamodule import Images
from fl_lightning.data.partitioners import Natural, Partitioner
from fl_lightning.utilities.errors import UsageError, few, printable, require

# height and width to which images are resized
LARGEST_IMAGE = 2048
SUFFIXES = (".avif", ".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
# folders of copies and previews that tools add, as hidden ones
TOOLS = {"@eaDir", "__MACOSX"}
# the split that a folder or a cell of a table names, in any case
SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}
# columns of a table of several sites
COLUMNS = ("path", "label", "site")


class ImageFile(NamedTuple):
    """An image file with its class, domain and split; an empty domain or split is unknown."""

    path: Path
    label: str
    domain: str = ""
    split: str = ""


class FolderDataModule(FileDataModule):
    """Images in files, decoded and resized once, and then stored as uint8 in the user's cache.

    The cache is in ``$XDG_CACHE_HOME/fl_lightning``, or ``~/.cache/fl_lightning``, and may be removed at any time.
    Nothing is written into ``root``. Images are rotated by their EXIF orientation, and transparent pixels become white.

    Subclasses implement :meth:`list_files`.

    Args:
        root: folder of the files.
        image_size: height and width to which the images are resized.
        split_seed: seed for drawing the test images, if the data set does not define them. It is independent of the
            seed of the run.
        offline: use a small generated data set of the same shapes instead.
        value_range: values of black and white in grey images of 16 or 32 bits, such as ``[0, 4095]`` for 12 bits;
            ``auto`` takes none but images of 8 bits.
        **kwargs: see :class:`ImageDataModule`.
    """

    mean, std = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
    layout: str
    # share of each class of a domain that is drawn for test, if the data set has no split
    test_fraction = 0.0

    def __init__(
        self,
        root: str = "data",
        image_size: int = 96,
        split_seed: int = 0,
        offline: bool = False,
        value_range: list[float] | str = "auto",
        **kwargs: Any,
    ) -> None:
        super().__init__(root, offline, **kwargs)
        hint = f"give 1 or more, up to {LARGEST_IMAGE}"
        require(1 <= image_size <= LARGEST_IMAGE, "data.image_size", image_size, hint)
        low, high = value_range if not isinstance(value_range, str) and len(value_range) == 2 else (0.0, 0.0)
        ordered = value_range == "auto" or -math.inf < low < high < math.inf
        require(ordered, "data.value_range", value_range, "give auto, or [low, high]")
        self.image_size, self.shape = image_size, (image_size, 3)
        self.split_seed, self.value_range = split_seed, value_range
        self.given_range: Range | None = None if value_range == "auto" else (float(low), float(high))

    @abstractmethod
    def list_files(self, root: Path) -> list[ImageFile]:
        """List the files of the data set, in a fixed order.

        Their classes are among :attr:`class_names`, their domains among :attr:`domain_names`, which it may set.
        """

    def test_numbers(self, counts: np.ndarray) -> np.ndarray:
        """Number of test images of each class in one domain; their sum is ``test_fraction``, rounded down."""
        exact = counts * self.test_fraction
        numbers = np.floor(exact).astype(int)
        missing = int(counts.sum() * self.test_fraction + 1e-9) - numbers.sum()
        numbers[np.argsort(numbers - exact, kind="stable")[:missing]] += 1
        return numbers

    def read(self, root: Path) -> Images:
        require(root.is_dir(), "data.root", str(root), f"no such folder; it must contain {self.layout}")
        return self.images_of(root, self.list_files(root))

    def images_of(self, root: Path, files: list[ImageFile]) -> Images:
        """Read these files; test images are drawn where the first file has no split."""
        require(len(files) > 0, "data.root", str(root), f"no image found; it must hold {self.layout}")
        for kind, names in (("classes", self.class_names), ("domains", self.domain_names)):
            check_names(root, kind, names)
        label_of = {name: label for label, name in enumerate(self.class_names)}
        domain_of = {name: domain for domain, name in enumerate(self.domain_names)}
        labels = np.array([label_of[file.label] for file in files], np.int64)
        domains = np.array([domain_of.get(file.domain, 0) for file in files], np.int64)
        self.num_classes = max(self.num_classes, len(self.class_names))
        splits = np.array([file.split for file in files])
        test, val = splits == "test" if splits[0] else self._draw_test(labels, domains), splits == "val"
        file_domains = domains if self.domain_names else None
        rows = (np.flatnonzero(~test & ~val), np.flatnonzero(test), np.flatnonzero(val) if val.any() else None)
        paths = [file.path for file in files]
        how = (self.image_size, self.given_range)
        images, _ = cached(paths, how, partial(decode, paths, *how))
        return Images(images, labels, images, labels, file_domains, file_domains, self.domain_names, *rows)

    def inference_arguments(self) -> dict[str, Any]:
        scale = {} if self.given_range is None else {"value_range": list(self.given_range)}
        return super().inference_arguments() | {"image_size": self.image_size} | scale

    def _draw_test(self, labels: np.ndarray, domains: np.ndarray) -> np.ndarray:
        rng, test = numpy_rng(self.split_seed, "test split"), np.zeros(len(labels), bool)
        for domain in np.unique(domains):
            counts = np.bincount(labels[domains == domain], minlength=self.num_classes)
            for label, number in enumerate(self.test_numbers(counts)):
                test[rng.permutation(np.flatnonzero((domains == domain) & (labels == label)))[:number]] = True
        return test

    def folder(self, root: Path, *names: str) -> Path:
        """The first of the folders ``root/name`` that exists."""
        folders = subfolders(root)
        hint = f"it holds {', '.join([*folders][:8]) or 'no folder'}, but must hold {self.layout}"
        require(any(name in folders for name in names), "data.root", str(root), hint)
        return next(folders[name] for name in names if name in folders)


class ImageFolderImages(FolderDataModule):
    """Any folder of images: ``train/CLASS/*``, ``test/CLASS/*`` and, if you like, ``val/CLASS/*``, or only ``CLASS/*``.

    The classes are the names of the folders in alphabetical order, unless ``classes`` is set. Without ``test``, the
    images in ``val`` are the test images. :func:`split_folders` has the other names of a split.

    Args:
        root: folder of the files.
        image_size: height and width to which the images are resized.
        test_fraction: share of each class that is drawn for test if there is no test folder, in (0, 1).
        classes: names of the classes in the order of their labels; some may have no folder, as at a site of a
            federation. None takes the names of the folders.
        **kwargs: see :class:`FolderDataModule`.
    """

    layout = "train/CLASS/*.jpg and test/CLASS/*.jpg, or CLASS/*.jpg"

    def __init__(
        self,
        root: str = "data",
        image_size: int = 64,
        test_fraction: float = 0.2,
        classes: list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(root, image_size, **kwargs)
        require(0 < test_fraction < 1, "data.test_fraction", test_fraction, "use a share in (0, 1)")
        hint = "give two or more names, each once and in quotes, or null"
        if classes is not None:
            texts = all(isinstance(name, str) for name in classes)
            require(texts and len({*classes}) == len(classes) >= 2, "data.classes", classes, hint)
        self.test_fraction, self.num_classes, self.classes = test_fraction, len(classes or ()), classes

    def generate(self) -> Images:
        self.class_names = tuple(self.classes or ())
        self.num_classes = len(self.class_names) or 12
        return super().generate()

    def list_files(self, root: Path) -> list[ImageFile]:
        splits = split_folders(root)
        hint = f"its folders are {few(subfolders(root)) or 'none'}, but it must hold {self.layout}"
        require(not splits or {"train"} < {*splits}, "data.root", str(root), hint)
        if "test" not in splits and "val" in splits:
            splits["test"] = splits.pop("val")
        folder_names = [*subfolders(splits.get("train", root))]
        require(len(folder_names) >= (1 if self.classes else 2), "data.root", str(root), hint)
        names = self.classes or folder_names
        self.class_names = tuple(unicodedata.normalize("NFC", name) for name in names)
        files = []
        for split, folder in (splits or {"": root}).items():
            classes = subfolders(folder)
            unknown, where = {*classes} - {*self.class_names}, "data.classes" if self.classes else "train"
            hint = f"its classes {few(map(repr, sorted(unknown)))} are not in {where}"
            require(not unknown, "data.root", str(folder), hint)
            absent = [repr(name) for name in self.class_names if name not in classes]
            hint = f"it lacks the classes {few(absent)} of train; add them, or name all classes in data.classes"
            require(bool(self.classes) or not absent, "data.root", str(folder), hint)
            for name in self.class_names:
                paths = images_in(classes[name]) if name in classes else ()
                files += [ImageFile(path, name, "", split) for path in paths]
        warn_of_others(root, files)
        return files


class TinyImageNet(FolderDataModule):
    """Tiny ImageNet: 100,000 training images of 64 x 64 pixels, 200 classes; tested on the 10,000 validation images.

    The validation images may be stored as published, with ``val_annotations.txt``, or in one folder for each class.

    Args:
        root: folder that holds ``tiny-imagenet-200``, or that folder itself.
        image_size: height and width to which the images are resized.
        **kwargs: see :class:`FolderDataModule`.
    """

    layout = "train/CLASS/images/*.JPEG and val (cs231n.stanford.edu/tiny-imagenet-200.zip)"
    num_classes, numbers = 200, (200, 100)

    def __init__(self, root: str = "data", image_size: int = 64, **kwargs: Any) -> None:
        super().__init__(root, image_size, **kwargs)

    def list_files(self, root: Path) -> list[ImageFile]:
        root = root / "tiny-imagenet-200" if (root / "tiny-imagenet-200").is_dir() else root
        train, val = self.folder(root, "train"), self.folder(root, "val")
        classes = subfolders(train)
        self.class_names = tuple(classes)
        files = []
        for name, folder in classes.items():
            files += [ImageFile(path, name, "", "train") for path in images_in(folder)]
        annotations = val / "val_annotations.txt"
        if annotations.is_file():
            for line in filter(None, read_utf8(annotations).splitlines()):
                file, name, *_ = [*line.split("\t"), ""]
                hint = f"its class {name!r} is not in train"
                require(name in self.class_names, "data.root", str(annotations), hint)
                path = val / "images" / file
                hint = f"{annotations.name} names it, but it does not exist; download the data set again"
                require(path.is_file(), "data.root", str(path), hint)
                files.append(ImageFile(path, name, "", "test"))
        else:
            for name in self.class_names:
                folder = self.folder(val, name)
                files += [ImageFile(path, name, "", "test") for path in images_in(folder)]
        return files


class _DomainFolders(FolderDataModule):
    """Images in ``DOMAIN/CLASS/*``; ``other_folders`` are further names of a domain's folder."""

    other_folders: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    # test images of each class and domain
    test_per_class: int

    def list_files(self, root: Path) -> list[ImageFile]:
        folders = {}
        for domain in self.domain_names:
            folders[domain] = self.folder(root, domain, *self.other_folders.get(domain, ()))
        self.class_names = self.class_names or tuple(subfolders(folders[self.domain_names[0]]))
        return [
            ImageFile(path, name, domain)
            for domain, folder in folders.items()
            for name in self.class_names
            for path in images_in(self.folder(folder, name))
        ]

    def test_numbers(self, counts: np.ndarray) -> np.ndarray:
        fewest = counts.min()
        hint = f"a class of a domain has only {fewest} images, of which {self.test_per_class} are for test"
        require(self.test_per_class < fewest, "data.root", self.root, f"{hint}; download the data set again")
        return np.full_like(counts, self.test_per_class)


class PACS(_DomainFolders):
    """PACS: 9,991 images of 7 classes in 4 domains; 40 of each class and domain are for test, as in FedUV (CVPR 2024).

    Args:
        root: folder of ``art_painting``, ``cartoon``, ``photo`` and ``sketch``.
        **kwargs: see :class:`FolderDataModule`; FedUV resizes to ``image_size`` 96, too.
    """

    layout = "art_painting/dog/*.jpg, ..., sketch/person/*.jpg (Li et al., ICCV 2017)"
    domain_names = ("art_painting", "cartoon", "photo", "sketch")
    class_names = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
    num_classes, numbers, test_per_class = 7, (84, 56), 40


class OfficeHome(_DomainFolders):
    """Office-Home: 15,588 images of 65 classes in 4 domains; 7 of each class and domain are for test, as in FedUV.

    Args:
        root: folder of ``Art``, ``Clipart``, ``Product`` and ``Real World`` (or ``Real``).
        **kwargs: see :class:`FolderDataModule`; FedUV resizes to ``image_size`` 96, too.
    """

    layout = "Art/CLASS/*.jpg, Clipart, Product and Real World (hemanthdv.org/officeHomeDataset.html)"
    domain_names = ("Art", "Clipart", "Product", "Real World")
    other_folders: ClassVar = {"Real World": ("Real", "RealWorld")}
    num_classes, numbers, test_per_class = 65, (780, 260), 7


class HAM10000(FolderDataModule):
    """HAM10000: 10,015 images of skin lesions, 7 classes, from 4 sources; a fifth of each source is for test.

    The column ``dataset`` of the metadata is the domain, the column ``dx`` the class. The test images are drawn class
    by class within each domain. The sizes of the test sets differ from the paper: FedUV (CVPR 2024) uses "about 20 %",
    1,955 images in all, without the number for each source; a fifth of each source is 2,000. Images are drawn, not
    lesions (``lesion_id``): test and training images may show the same one.

    Args:
        root: folder of ``HAM10000_metadata.csv`` (or another ``*metadata*.csv``) and of the images or their folders.
        **kwargs: see :class:`FolderDataModule`; FedUV resizes to ``image_size`` 96, too.
    """

    layout = "HAM10000_metadata.csv and the images, in one or several folders (doi.org/10.7910/DVN/DBW86T)"
    domain_names = ("vidir_modern", "rosendahl", "vienna_dias", "vidir_molemax")
    class_names = ("akiec", "bcc", "bkl", "df", "mel", "nv", "vasc")
    num_classes, numbers, test_fraction = 7, (112, 56), 0.2

    def list_files(self, root: Path) -> list[ImageFile]:
        table = next(iter(sorted(root.glob("*metadata*.csv"))), None)
        require(table is not None, "data.root", str(root), f"it must hold {self.layout}")
        images = {path.stem: path for path in images_in(root)}
        files = []
        _, rows = read_csv_table(table, ("image_id", "dx", "dataset"))  # type: ignore[arg-type]
        for row in rows:
            name = row["image_id"]
            require(name in images, "data.root", str(table), f"image {name} has no file; download it")
            for column, allowed in (("dataset", self.domain_names), ("dx", self.class_names)):
                hint = f"image {name} has none of {', '.join(allowed)} there; correct the table"
                require(row[column] in allowed, f"data: column {column}", row[column], hint)
            files.append(ImageFile(images[name], row["dx"], row["dataset"]))
        return files


class SiteImageFolders(FolderDataModule):
    """Your own images from several sites: ``SITE/CLASS/*``, ``SITE/{train,val,test}/CLASS/*``, or a CSV table.

    Each site is a domain and, by default, a client. Sites and classes have the names of their folders, in alphabetical
    order, or in numerical order if all names are numbers. A site may lack a class. A site with only test images is
    tested but does not train. If no site has a folder ``test``, the images in ``val`` are the test images.
    :func:`split_folders` has the other names of a split.

    A table has the columns ``path``, ``label``, ``site`` and, optionally, ``split`` (train, val or test). Its paths are
    relative to its folder.

    Args:
        root: folder of the sites, or the CSV file.
        image_size: height and width to which the images are resized.
        test_fraction: share of each site's images, class by class, that is drawn for test if there are no splits, in
            (0, 1).
        num_clients: K, at least 1; None is one client for each site.
        partitioner: assigns the training samples to clients; None is ``Natural``: a client for each site or, with
            fewer clients, several sites for each client.
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
        require(0 < test_fraction < 1, "data.test_fraction", test_fraction, "use a share in (0, 1)")
        self.test_fraction, self.num_classes, self._client_each = test_fraction, 0, num_clients is None

    def generate(self) -> Images:
        self.num_classes, self.domain_names = 3, ("east", "north", "south", "west")
        self.num_clients = len(self.domain_names) if self._client_each else self.num_clients
        return super().generate()

    def read(self, root: Path) -> Images:
        if root.suffix.lower() != ".csv":
            return super().read(root)
        require(root.is_file(), "data.root", str(root), "no such file; use a folder of sites, or a CSV table")
        return self.images_of(root, self.list_files(root))

    def list_files(self, root: Path) -> list[ImageFile]:
        files = [*read_manifest(root)] if root.suffix.lower() == ".csv" else files_of_sites(root, self.layout)
        require(len(files) > 0, "data.root", str(root), "no rows; add one for each image")
        splits = {file.split for file in files}
        if splits != {""} and "test" not in splits:
            new_names = {"val": "test"}
            files = [file._replace(split=new_names.get(file.split, file.split)) for file in files]
        trains = {file.domain for file in files if file.split in ("", "train")}
        # sites that train come first
        sites = natural_order(trains) + natural_order({file.domain for file in files} - trains)
        classes = natural_order({file.label for file in files})
        check_splits(root, files, sites, classes)
        self.domain_names, self.class_names = tuple(sites), tuple(classes)
        if self._client_each:
            self.num_clients = len(trains)
        return files


def files_of_sites(root: Path, layout: str) -> list[ImageFile]:
    """Return the images in the folders of the sites."""
    sites, files, classes = subfolders(root), list[ImageFile](), set[str]()
    hint = f"its folders are {few(sites) or 'none'}, but it must hold {layout}"
    require(len(sites) >= 2 and not split_folders(root), "data.root", str(root), hint)
    splits = {site: split_folders(folder) for site, folder in sites.items()}
    for site, folder in sites.items():
        hint = f"its folders {few(subfolders(folder))} are none of train, val, test; give all sites the same layout"
        require(bool(splits[site]) or not any(splits.values()), "data.root", str(folder), hint)
        number = len(files)
        for split, part in (splits[site] or {"": folder}).items():
            for name, place in subfolders(part).items():
                classes.add(name)
                # an empty folder says that the site lacks the class
                images = images_in(place) if any(files_below(place)) else []
                files += [ImageFile(path, name, site, split) for path in images]
        require(len(files) > number, "data.root", str(root), f"its folder {site!r} holds no image; give {layout}")
    empty = sorted(classes - {file.label for file in files})
    require(not empty, "data.root", str(root), f"its classes {few(empty)} have no image; add some, or remove them")
    warn_of_others(root, files)
    return files


def read_manifest(path: Path) -> Iterator[ImageFile]:
    """Yield the images that a CSV table names."""
    key = ("data.root", str(path))
    columns, rows = read_csv_table(path, COLUMNS)
    unknown = [name for name in columns if name not in (*COLUMNS, "split")]
    hint = f"its columns {few(map(repr, unknown))} are not read; rename them, or take them out: it may have "
    require(not unknown, *key, hint + f"{', '.join(COLUMNS)} and split")
    incomplete = []
    for line, row in enumerate(rows, 2):
        if None in row or not all(row[name] for name in columns):
            incomplete.append(str(line))
    hint = f"lines {few(incomplete)} have an empty cell, or other cells than the head; complete them"
    require(not incomplete, *key, hint)
    splits = {row["split"] for row in rows} if "split" in columns else set()
    wrong = sorted(split for split in splits if split.lower() not in SPLITS)
    require(not wrong, *key, f"its splits {few(wrong)} are not known; give train, val, test")
    files = [Path(os.path.normpath(path.parent / row["path"])) for row in rows]
    absent = [str(file) for file in files if not file.is_file()]
    hint = f"{len(absent)} of its {len(files)} files do not exist, such as {few(absent)}; give paths relative to it"
    require(not absent, *key, hint)
    lines: dict[str, int] = {}
    for line, (file, row) in enumerate(zip(files, rows, strict=True), 2):
        first_line = lines.setdefault(os.path.realpath(file), line)
        require(first_line == line, *key, f"its lines {first_line} and {line} both name {row['path']!r}; keep one")
        label, site = (unicodedata.normalize("NFC", row[name]) for name in ("label", "site"))
        yield ImageFile(file, label, site, SPLITS.get(row.get("split", "").lower(), ""))


def check_splits(root: Path, files: list[ImageFile], sites: list[str], classes: list[str]) -> None:
    """Refuse classes without training images and no test image at all; warn of sites without test images."""
    tested = {file.domain for file in files if file.split in ("", "test")}
    require(bool(tested), "data.root", str(root), "it has no image for test; give some, or no splits at all")
    require(len(classes) >= 2, "data.root", str(root), f"it has the class {classes[0]} alone; give two or more")
    trained = {file.label for file in files if file.split in ("", "train")}
    untrained = [name for name in classes if name not in trained]
    hint = f"its classes {few(untrained)} have no training image at any site; add some, or take their images out"
    require(not untrained, "data.root", str(root), hint)
    without = [site for site in sites if site not in tested]
    if without:
        text = f"the sites {few(without)} have no test images: they train, but have no accuracy"
        rank_zero_warn(f"data.root={str(root)!r}: {text}")


def natural_order(names: set[str]) -> list[str]:
    """Sort names alphabetically, or by value where all are whole numbers."""
    return sorted(sorted(names), key=int) if all(map(str.isdecimal, names)) else sorted(names)  # 01 before 1


def read_csv_table(path: Path, columns: tuple[str, ...]) -> tuple[list[str], list[dict[str, str]]]:
    """Read the column names and the rows of a CSV table, which must have ``columns``."""
    try:
        reader = csv.DictReader(io.StringIO(read_utf8(path)), strict=True)
        header, rows = list(reader.fieldnames or ()), list(reader)
    except csv.Error as error:
        raise UsageError(f"data.root={str(path)!r}: {error}; use a CSV file with commas") from error
    missing = [name for name in columns if name not in header]
    hint = f"it has the columns {few(header) or 'none'}, without {few(missing)}; give {', '.join(columns)}"
    require(not missing, "data.root", str(path), f"{hint}, separated by commas")
    return header, rows


def read_utf8(path: Path) -> str:
    """Read a UTF-8 file, with or without a BOM."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"data.root={str(path)!r}: {error}; use a readable UTF-8 file") from error


def split_folders(root: Path) -> dict[str, Path]:
    """The folders ``train``, ``val`` and ``test`` in ``root``, in any case; empty if it has none of them.

    ``training``, ``valid``, ``validation``, ``dev`` and ``testing`` name them, too. Other folders beside them are
    refused, and so are two of one split.
    """
    folders = subfolders(root)
    named = [name for name in folders if name.lower() in SPLITS]
    unnamed = [name for name in folders if named and name not in named]
    hint = f"its folders {few(unnamed)} are none of train, val, test, but {few(named)} are; "
    hint += "move or rename the former, or rename the latter if they are classes"
    require(not unnamed, "data.root", str(root), hint)
    twice = alike(named, lambda name: SPLITS[name.lower()])
    require(not twice, "data.root", str(root), f"its folders {few(twice)} are one split; join them")
    return {SPLITS[name.lower()]: folders[name] for name in named}


def subfolders(root: Path) -> dict[str, Path]:
    """Visible folders in ``root`` by their names in Unicode's form NFC, in alphabetical order."""
    entries = [entry for entry in visible_entries(root) if entry.is_dir()]
    folders = [(unicodedata.normalize("NFC", entry.name), Path(entry)) for entry in entries]
    names = [name for name, _ in folders]
    unreadable = [ascii(name) for name in names if re.search("[\ud800-\udfff]", name)]
    require(not unreadable, "data.root", str(root), f"its names {few(unreadable)} are not UTF-8; rename them")
    twice = alike(names, str)
    require(not twice, "data.root", str(root), f"its folders {few(twice)} differ in the form of Unicode; join them")
    return dict(sorted(folders))


def visible_entries(folder: Path) -> list[os.DirEntry]:
    """The entries of a folder in alphabetical order, without hidden ones and those of tools."""
    with os.scandir(folder) as entries:
        by_name = {entry.name: entry for entry in entries}
    names = sorted(by_name.keys() - TOOLS)
    return [by_name[name] for name in names if not name.startswith(".")]


def files_below(folder: Path, above: frozenset[Path] | None = None) -> Iterator[Path]:
    """Yield the visible files below a folder, and below folders to which it links, in alphabetical order."""
    real = folder.resolve()
    above = frozenset(real.parents) if above is None else above
    require(real not in above, "data.root", str(folder), "it links to a folder in which it lies; remove the link")
    for entry in visible_entries(folder):
        if entry.is_dir():
            yield from files_below(Path(entry), above | {real})
        else:
            yield Path(entry)


def images_in(root: Path) -> list[Path]:
    """Image files below a folder, in alphabetical order; at least one."""
    files = [*files_below(root)]
    images = [path for path in files if path.suffix.lower() in SUFFIXES]
    require(len(images) > 0, "data.root", str(root), f"it holds no image, but {endings(files) or 'nothing'}; add some")
    return images


def warn_of_others(root: Path, files: list[ImageFile]) -> None:
    """Name the endings of the files below ``root`` that are not read."""
    paths_read = {file.path for file in files}
    ignored = [path for path in files_below(root) if path not in paths_read]
    if ignored:
        hint = f"images lie in the folder of a class and end in {', '.join(SUFFIXES)}"
        rank_zero_warn(f"data.root={str(root)!r}: files left out: {endings(ignored)}; {hint}")


def endings(files: Iterable[Path]) -> str:
    """Return the endings of files with their numbers, such as ``3 .txt, 1 .heic``."""
    numbers = Counter(printable(path.suffix.lower()) or "without ending" for path in files)
    return few(f"{number} {ending}" for ending, number in numbers.most_common())


def check_names(root: Path, kind: str, names: Sequence[str]) -> None:
    """Refuse names that differ only in spaces at their ends; warn of those that differ only in case."""
    spaced, cased = (alike(names, form) for form in (str.strip, str.casefold))
    hint = f"its {kind} {few(spaced)} differ only in spaces at their ends; give them one name"
    require(not spaced, "data.root", str(root), hint)
    if cased:
        rank_zero_warn(f"data.root={str(root)!r}: its {kind} {few(cased)} differ only in case, and are counted apart")


def alike(names: Sequence[str], form: Callable[[str], str]) -> list[str]:
    """Return those of the names, in quotes, that have a form in common with others."""
    numbers = Counter(map(form, names))
    return [repr(name) for name in names if numbers[form(name)] > 1]
