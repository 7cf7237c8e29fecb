"""What data sets in files share: where they lie, and their offline twins."""

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

    Args:
        root: folder of the files.
        offline: use a small generated set instead, of the same shapes, written in the format of the files and read as
            they are: for tests and a first look, without the data.
        **kwargs: see :class:`ImageDataModule`.
    """

    def __init__(self, root: str = "data", offline: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.root, self.offline = root, offline

    def load(self) -> Images:
        """The data set.

        Raises:
            UsageError: something under ``root`` cannot be read.
        """
        if self.offline:
            return self._twin()
        try:
            return self.read(Path(self.root))
        except OSError as error:
            raise UsageError(f"data.root={self.root!r}: {error}; give a folder whose files can be read") from error

    def _twin(self) -> Images:
        with tempfile.TemporaryDirectory() as folder:
            self.write_twin(Path(folder))
            found = self.read(Path(folder))
            # out of the folder, which is about to go
            arrays = [np.array(array) for array in found[:4]]
            return Images(arrays[0], arrays[1], arrays[2], arrays[3], *found[4:])

    @abstractmethod
    def read(self, root: Path) -> Images:
        """The data set from its files under ``root``."""

    @abstractmethod
    def write_twin(self, root: Path) -> None:
        """A small generated set in the format of the files."""


def patterns(labels: np.ndarray, size: int, channels: int, seed: int) -> np.ndarray:
    """Images ``(N, size, size, channels)`` uint8 that can be told apart: a coarse pattern a class, and noise."""
    rng = np.random.default_rng(seed)
    coarse = np.random.default_rng(0).integers(0, 200, (int(labels.max()) + 1, 4, 4, channels))
    places = np.arange(size) * 4 // size
    clean = coarse[labels][:, places][:, :, places]
    return (clean + rng.integers(0, 56, clean.shape)).astype(np.uint8)


def cycled(classes: int, number: int) -> np.ndarray:
    """Labels ``(number,)``, every class in turn."""
    return np.arange(number, dtype=np.int64) % classes
