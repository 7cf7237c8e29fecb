"""Data sets of images that need no download: embedded digits, and NumPy files of one's own."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fl_lightning.data.datamodule import ImageDataModule, Images, check_images
from fl_lightning.data.file_dataset import FileDataModule, cycled, patterns
from fl_lightning.errors import UsageError, require
from fl_lightning.seeding import numpy_rng

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
        names = [f"{split}_{what}.npy" for split in ("train", "test") for what in ("images", "labels")]
        missing = [name for name in names if not (root / name).is_file()]
        hint = f"{', '.join(missing)} not found there; give a folder that holds {', '.join(names)}"
        require(not missing, "data.root", str(root), hint)
        images, labels, test_images, test_labels = (open_array(root / name) for name in names)
        images, test_images = (array[..., None] if array.ndim == 3 else array for array in (images, test_images))
        data = check_images(Images(images, labels, test_images, test_labels))
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
        self.measured = tuple(n for n, given in zip(("mean", "std"), self._own_scale, strict=True) if given is None)
        return data

    def write_offline(self, root: Path) -> None:
        for split, number in (("train", 200), ("test", 100)):
            labels = cycled(10, number)
            np.save(root / f"{split}_images.npy", patterns(labels, 32, 3, number))
            np.save(root / f"{split}_labels.npy", labels)


@cache
def embedded_digits() -> Any:
    """scikit-learn's digits; parsing its file takes longer than a round on them."""
    from sklearn.datasets import load_digits

    return load_digits()


def open_array(path: Path) -> np.ndarray:
    """Open a .npy file of numbers, memory-mapped and copied on write; objects are refused and never unpickled."""
    try:
        return np.lib.format.open_memmap(path, mode="c")
    except (ValueError, OSError, EOFError) as error:
        why = f"{path.name} is not a .npy file of numbers: {error}"
        raise UsageError(f"data.root={str(path.parent)!r}: {why}") from error
