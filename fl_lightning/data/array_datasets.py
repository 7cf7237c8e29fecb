"""Data sets of images: the base class of those in files, and embedded digits, NumPy files and torchvision's sets."""

from __future__ import annotations

import gzip
import pickle
from abc import abstractmethod
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fl_lightning.core.seeding import numpy_rng
from fl_lightning.data.datamodule import ImageDataModule, Images, check_images
from fl_lightning.utilities.errors import UsageError, require

# height and width to which images are resized: the whole data set lies in memory
LARGEST_IN_MEMORY = 512


class Digits(ImageDataModule):
    """The 1,797 handwritten digits that come with scikit-learn: 10 classes, 8 x 8 grey pixels.

    One fifth of each class is the test set, the same for every seed.

    Args:
        image_size: resize the images to this height and width; None leaves them at 8.
        channels: 1, or 3 to repeat the grey channel three times.
        **kwargs: see :class:`ImageDataModule`.
    """

    mean, std = (0.305,), (0.376,)

    def __init__(self, image_size: int | None = None, channels: int = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        hint = f"give 1 or more, up to {LARGEST_IN_MEMORY}, or null"
        require(image_size is None or 1 <= image_size <= LARGEST_IN_MEMORY, "data.image_size", image_size, hint)
        require(channels in (1, 3), "data.channels", channels, "give 1 or 3")
        self.image_size, self.channels = image_size, channels

    def load(self) -> Images:
        from sklearn.model_selection import train_test_split

        digits = embedded_digits()
        x = torch.from_numpy(digits.images)[:, None] * (255 / 16)  # the values are 0 to 16
        if self.image_size is not None:
            x = torch.nn.functional.interpolate(x, size=self.image_size, mode="bilinear", align_corners=False)
        images = x.round().to(torch.uint8).permute(0, 2, 3, 1).repeat(1, 1, 1, self.channels).numpy()
        labels = digits.target
        train, test, *split = train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=0)
        return Images(train, split[0], test, split[1])


class FileDataModule(ImageDataModule):
    """A data set in files under ``root``.

    Subclasses implement :meth:`read`.

    Args:
        root: folder of the files.
        offline: use a small generated data set of the same shapes instead, for tests and a first look.
        **kwargs: see :class:`ImageDataModule`.

    Attributes:
        shape: height and width, and channels, of the images of the offline data set.
        numbers: its training and test images.
        domain_names: names of the domains; empty without domains.
    """

    shape = (32, 3)
    numbers = (200, 100)
    domain_names: tuple[str, ...] = ()

    def __init__(self, root: str = "data", offline: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.root, self.offline = root, offline

    def load(self) -> Images:
        """Read the data set from its files; with ``offline``, generate a small one instead.

        Raises:
            UsageError: a file under ``root`` cannot be read.
        """
        if self.offline:
            return self.generate()
        try:
            return self.read(Path(self.root))
        except OSError as error:
            raise UsageError(f"data.root={self.root!r}: {error}; use a folder with readable files") from error

    @abstractmethod
    def read(self, root: Path) -> Images:
        """Read the data set from its files under ``root``."""

    def generate(self) -> Images:
        """Return the offline data set, whose domains follow each other."""
        labels = [cycled(self.num_classes, number) for number in self.numbers]
        train, test = (patterns(part, *self.shape, seed=len(part)) for part in labels)
        if not self.domain_names:
            return Images(train, labels[0], test, labels[1])
        count = len(self.domain_names)
        domain, test_domain = (np.arange(number) * count // number for number in self.numbers)
        return Images(train, labels[0], test, labels[1], domain, test_domain, self.domain_names)


class NpyImages(FileDataModule):
    """A folder with ``train_images.npy``, ``train_labels.npy``, ``test_images.npy`` and ``test_labels.npy``.

    Images are uint8, ``(N, H, W, C)`` or grey ``(N, H, W)``; labels are integers ``(N,)`` from 0. The files are
    memory-mapped.

    Args:
        root: the folder.
        mean: mean of each channel (or one for all), of values in [0, 1]; None measures it on 10,000 training images.
        std: standard deviation of each channel (or one for all), above 0; None measures it on the same images.
        offline: use a small generated data set instead: 32 x 32 pixels, 10 classes.
        **kwargs: see :class:`ImageDataModule`.
    """

    def __init__(
        self,
        root: str = "data",
        mean: list[float] | None = None,
        std: list[float] | None = None,
        offline: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(root, offline, mean=mean, std=std, **kwargs)
        self._own_scale = (mean, std)

    def read(self, root: Path) -> Images:
        names = ["train_images.npy", "train_labels.npy", "test_images.npy", "test_labels.npy"]
        missing = [name for name in names if not (root / name).is_file()]
        hint = f"{', '.join(missing)} not found there; use a folder that contains {', '.join(names)}"
        require(not missing, "data.root", str(root), hint)
        arrays = []
        for name in names:
            try:  # copied on write; objects are refused and never unpickled
                array: np.ndarray = np.lib.format.open_memmap(root / name, mode="c")
            except (ValueError, OSError, EOFError) as error:
                raise UsageError(f"data.root={str(root)!r}: {name} is not a .npy file of numbers: {error}") from error
            arrays.append(array[..., None] if array.ndim == 3 else array)
        images, labels, test_images, test_labels = arrays
        return self.measured_on(check_images(Images(images, labels, test_images, test_labels)))

    def generate(self) -> Images:
        return self.measured_on(super().generate())

    def measured_on(self, dataset: Images) -> Images:
        """Set the number of classes, and the statistics that were not given; returns the data."""
        images, labels, test_labels = dataset.train_images, dataset.train_labels, dataset.test_labels
        largest, number = int(max(labels.max(), test_labels.max())), len(labels) + len(test_labels)
        hint = f"labels count the classes from 0, and there are only {number} examples; give smaller labels"
        require(largest < number, "data: labels", largest, hint)
        self.num_classes = largest + 1
        mean, std = self._own_scale
        if mean is None or std is None:
            rows = numpy_rng(0, "statistics").choice(len(images), min(len(images), 10_000), replace=False)
            pixels = images[np.sort(rows)].reshape(-1, images.shape[-1])
            mean = (pixels.mean(0) / 255).tolist() if mean is None else mean
            std = (pixels.std(0) / 255).clip(1e-3).tolist() if std is None else std
        self.mean, self.std = tuple(mean), tuple(std)
        arguments = zip(("mean", "std"), self._own_scale, strict=True)
        self.measured = tuple(name for name, value in arguments if value is None)
        return dataset


class TorchvisionDataModule(FileDataModule):
    """A data set that torchvision can download.

    Args:
        root: folder of torchvision's copy.
        download: download the data set into ``root`` if it is not there.
        offline: use a small generated data set instead.
        **kwargs: see :class:`ImageDataModule`.
    """

    original: str
    layout: str
    # arguments of torchvision's class for the training set and for the test set
    splits: tuple[dict[str, Any], dict[str, Any]] = ({"train": True}, {"train": False})

    def __init__(self, root: str = "data", download: bool = False, offline: bool = False, **kwargs: Any) -> None:
        super().__init__(root, offline, **kwargs)
        self.download = download

    def prepare_data(self) -> None:
        """Download the data set if ``download`` is set.

        Raises:
            UsageError: the download failed.
        """
        if self.download and not self.offline:
            try:
                for split in self.splits:
                    self.source(self.root, download=True, **split)
            except (OSError, RuntimeError) as error:
                hint = f"the download into {self.root} failed: {error}; put {self.layout} there yourself"
                raise UsageError(f"data.download=True: {hint}") from error

    @property
    def source(self) -> Any:
        """Torchvision's class, imported on first use."""
        from torchvision import datasets

        return getattr(datasets, self.original)

    def read(self, root: Path) -> Images:
        try:
            train, test = (self.source(str(root), **split) for split in self.splits)
        except (RuntimeError, OSError, EOFError, ValueError, pickle.UnpicklingError) as error:
            hint = f"{self.layout} not found there, or damaged; set data.root to its folder, or set data.download: true"
            raise UsageError(f"data.root={str(root)!r}: {hint}") from error
        return Images(*arrays_of(train), *arrays_of(test))


class CIFAR10(TorchvisionDataModule):
    """CIFAR-10: 50,000 training and 10,000 test images of 32 x 32 pixels, 10 classes."""

    original = "CIFAR10"
    layout = "cifar-10-batches-py"
    mean, std = (125.3 / 255, 123.0 / 255, 113.9 / 255), (63.0 / 255, 62.1 / 255, 66.7 / 255)


class CIFAR100(CIFAR10):
    """CIFAR-100: 50,000 training and 10,000 test images of 32 x 32 pixels, 100 classes."""

    original = "CIFAR100"
    layout = "cifar-100-python"
    mean, std = (0.507, 0.487, 0.441), (0.267, 0.256, 0.276)
    num_classes = 100


class MNIST(TorchvisionDataModule):
    """MNIST: 60,000 training and 10,000 test images of 28 x 28 grey pixels, 10 digits.

    The four idx files may be in ``root`` or where torchvision puts them, compressed (``.gz``) or not.
    """

    original = "MNIST"
    layout = "train-images-idx3-ubyte(.gz) and its three companions"
    mean, std = (0.1307,), (0.3081,)
    shape = (28, 1)

    def prepare_data(self) -> None:
        """Download the data set if ``download`` is set and its files are not there.

        Raises:
            UsageError: the download failed.
        """
        if self.download and not self.offline:
            try:
                self.read(Path(self.root))
            except UsageError:
                super().prepare_data()

    def read(self, root: Path) -> Images:
        folders = [root, root / self.original / "raw", root / self.original]
        arrays = []
        for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
            file_names = (f"{name}-ubyte", f"{name}-ubyte.gz")
            paths = (folder / file_name for folder in folders for file_name in file_names)
            path = next(filter(Path.is_file, paths), None)
            hint = f"{self.layout} not found there; set data.root to its folder, or set data.download: true"
            require(path is not None, "data.root", str(root), hint)
            arrays.append(read_idx(path))  # type: ignore[arg-type]
        images, labels, test_images, test_labels = arrays
        return Images(images[..., None], labels.astype(np.int64), test_images[..., None], test_labels.astype(np.int64))


class FashionMNIST(MNIST):
    """Fashion-MNIST: 60,000 training and 10,000 test images of 28 x 28 grey pixels, 10 kinds of clothes.

    The four idx files may be in ``root`` or where torchvision puts them, compressed (``.gz``) or not.
    """

    original = "FashionMNIST"
    mean, std = (0.2860,), (0.3530,)


class SVHN(TorchvisionDataModule):
    """SVHN: 73,257 training and 26,032 test images of 32 x 32 pixels, 10 digits of house numbers."""

    original = "SVHN"
    splits = ({"split": "train"}, {"split": "test"})
    layout = "train_32x32.mat and test_32x32.mat"
    mean, std = (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)


class STL10(TorchvisionDataModule):
    """STL-10: 5,000 training and 8,000 test images of 96 x 96 pixels, 10 classes; without the unlabelled images."""

    original = "STL10"
    splits = ({"split": "train"}, {"split": "test"})
    layout = "stl10_binary"
    mean, std = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
    shape, numbers = (96, 3), (100, 50)

    @property
    def source(self) -> Any:
        labelled = super().source
        return type("STL10", (labelled,), {"train_list": labelled.train_list[:2]})


def arrays_of(dataset: Any) -> tuple[np.ndarray, np.ndarray]:
    """Images ``(N, H, W, C)`` and labels ``(N,)`` of one of torchvision's data sets."""
    if hasattr(dataset, "targets"):
        return dataset.data, np.asarray(dataset.targets)
    return np.ascontiguousarray(dataset.data.transpose(0, 2, 3, 1)), dataset.labels.astype(np.int64)


def read_idx(path: Path) -> np.ndarray:
    """Read an idx file of bytes, compressed or not."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            head = file.read(4)
            shape = np.frombuffer(file.read(4 * head[3]), ">i4")
            values = np.frombuffer(bytearray(file.read()), np.uint8)
        complete = head[:3] == b"\x00\x00\x08" and len(values) == shape.prod(dtype=np.int64)
    except (OSError, EOFError, IndexError, ValueError):
        complete = False
    hint = f"{path.name} is not a complete idx file of bytes; download it again"
    require(complete, "data.root", str(path.parent), hint)
    return values.reshape(shape)


@cache
def embedded_digits() -> Any:
    """scikit-learn's digits; parsing its file takes longer than a round on them."""
    from sklearn.datasets import load_digits

    return load_digits()


def patterns(labels: np.ndarray, size: int, channels: int, seed: int) -> np.ndarray:
    """Generated uint8 images ``(N, size, size, channels)``: a coarse pattern for each class, and noise."""
    rng = np.random.default_rng(seed)
    coarse = np.random.default_rng(0).integers(0, 200, (int(labels.max()) + 1, 4, 4, channels))
    places = np.arange(size) * 4 // size
    noiseless = coarse[labels][:, places][:, :, places]
    return (noiseless + rng.integers(0, 56, noiseless.shape)).astype(np.uint8)


def cycled(classes: int, number: int) -> np.ndarray:
    """Labels ``(number,)`` that run through the classes again and again."""
    return np.arange(number, dtype=np.int64) % classes
