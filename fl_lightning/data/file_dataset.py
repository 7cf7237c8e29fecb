"""The base class of data sets in files, which also generates offline data sets."""

from __future__ import annotations

import tempfile
from abc import abstractmethod
from pathlib import Path
from typing import Any

import numpy as np

from fl_lightning.data.datamodule import ImageDataModule, Images
from fl_lightning.errors import UsageError


class FileDataModule(ImageDataModule):
    """A data set in files under ``root``.

    Subclasses implement :meth:`read`, and :meth:`generate` or :meth:`write_offline`.

    Args:
        root: folder of the files.
        offline: use a small generated data set of the same shapes instead, for tests and a first look.
        **kwargs: see :class:`ImageDataModule`.

    Attributes:
        cache_folder: folder of decoded images; None is :func:`~fl_lightning.data.cache.cache_folder`.
    """

    cache_folder: Path | None = None

    def __init__(self, root: str = "data", offline: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.root, self.offline = root, offline

    def load(self) -> Images:
        """Read the data set, or generate the offline data set and read that.

        Raises:
            UsageError: a file under ``root`` cannot be read.
        """
        if self.offline:
            return self.generate()
        try:
            return self.read(Path(self.root))
        except OSError as error:
            raise UsageError(f"data.root={self.root!r}: {error}; give a folder whose files can be read") from error

    @abstractmethod
    def read(self, root: Path) -> Images:
        """Read the data set from its files under ``root``."""

    def generate(self) -> Images:
        """Make the offline data set: from files that :meth:`write_offline` writes, in memory."""
        with tempfile.TemporaryDirectory() as folder:
            root, self.cache_folder = Path(folder, "data"), Path(folder)
            root.mkdir()
            self.write_offline(root)
            data = self.read(root)
            # copies in memory: the folder is deleted on return
            train, train_labels, test, test_labels = (np.array(array) for array in data[:4])
            return Images(train, train_labels, test, test_labels, *data[4:])

    def write_offline(self, root: Path) -> None:
        """Write the offline data set into ``root``, in the format of the real files."""
        raise NotImplementedError


def patterns(labels: np.ndarray, size: int, channels: int, seed: int) -> np.ndarray:
    """Generated uint8 images ``(N, size, size, channels)``: a coarse pattern for each class, and noise."""
    rng = np.random.default_rng(seed)
    coarse = np.random.default_rng(0).integers(0, 200, (int(labels.max()) + 1, 4, 4, channels))
    places = np.arange(size) * 4 // size
    clean = coarse[labels][:, places][:, :, places]
    return (clean + rng.integers(0, 56, clean.shape)).astype(np.uint8)


def cycled(classes: int, number: int) -> np.ndarray:
    """Labels ``(number,)`` that run through the classes again and again."""
    return np.arange(number, dtype=np.int64) % classes
