"""FEMNIST in LEAF's files (Caldas et al., LEAF: A Benchmark for Federated Settings, 2018)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import ijson
import numpy as np

from fl_lightning.data.array_datasets import FileDataModule
from fl_lightning.data.cache import cached
from fl_lightning.data.datamodule import Images
from fl_lightning.data.partitioners import Natural, Partitioner
from fl_lightning.utilities.errors import UsageError, require

BLOCK = 2**14  # bytes


class FEMNIST(FileDataModule):
    """FEMNIST: handwritten digits and letters of 28 x 28 grey pixels, 62 classes, by about 3,500 writers.

    ``root`` holds ``train/*.json`` and ``test/*.json`` as LEAF's ``preprocess.sh`` writes them. Each writer is a
    domain and, by default, a client: set ``num_clients`` to the number of writers, or fewer. The files are read once,
    one writer at a time; the images are then kept as uint8 in the user's cache.

    Args:
        root: folder of the files.
        offline: use a small generated data set of 20 writers instead.
        num_clients: K, at least 1.
        partitioner: assigns the training samples to clients; None is ``Natural``.
        **kwargs: see :class:`ImageDataModule`.
    """

    mean, std = (0.9637,), (0.1597,)
    num_classes, shape, numbers = 62, (28, 1), (240, 80)

    def __init__(
        self,
        root: str = "data",
        offline: bool = False,
        num_clients: int = 10,
        partitioner: Partitioner | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(root, offline, num_clients=num_clients, partitioner=partitioner or Natural(), **kwargs)

    def generate(self) -> Images:
        self.domain_names = tuple(f"f{writer:04}_00" for writer in range(20))
        return super().generate()

    def read(self, root: Path) -> Images:
        splits = [sorted((root / split).glob("*.json")) for split in ("train", "test")]
        for split, files in zip(("train", "test"), splits, strict=True):
            hint = "it must hold all_data_*.json, as LEAF's preprocess.sh writes them"
            require(len(files) > 0, "data.root", str(root / split), hint)
        images, arrays = cached(chain(*splits), "FEMNIST", partial(convert, splits))
        labels, writers = arrays["labels"], arrays["writers"]
        rows = np.split(np.arange(len(labels)), [int(arrays["train"])])
        return Images(images, labels, images, labels, writers, writers, tuple(arrays["names"].tolist()), *rows)


def convert(splits: Sequence[Sequence[Path]], target: Path) -> dict[str, np.ndarray]:
    """Write all images into ``target`` as uint8 ``(N, 28, 28, 1)``, training images first; returns the other arrays."""
    names: dict[str, int] = {}
    labels, writers, ends = [], [], [0]
    with open(target, "wb") as images:
        for files in splits:
            for pixels, classes, name in chain.from_iterable(map(read_writers, files)):
                images.write(pixels.tobytes())
                labels.append(classes)
                writers.append(np.full(len(classes), names.setdefault(name, len(names))))
            ends.append(images.tell() // 784)
            require(ends[-1] > ends[-2], "data.root", str(files[0].parent), "its files hold no images")
    return {
        "labels": np.concatenate(labels),
        "writers": np.concatenate(writers),
        "names": np.array(list(names)),
        "train": np.array(ends[1]),
        "shape": np.array((ends[-1], 28, 28, 1)),
    }


def read_writers(file: Path) -> Iterator[tuple[np.ndarray, np.ndarray, str]]:
    """Yield images ``(n, 784)`` uint8, labels ``(n,)`` and name of each writer; one writer is in memory at a time."""
    try:
        with open(file, "rb") as stream:
            empty = True
            for name, user in ijson.kvitems(stream, "user_data", buf_size=BLOCK, use_float=True):
                labels, pixels = np.array(user["y"], np.int64), np.array(user["x"], np.float32)
                if any(type(label) is not int for label in user["y"]):
                    raise ValueError("labels must be integers")
                if not ((pixels >= 0) & (pixels <= 1)).all():
                    raise ValueError("pixels must lie in [0, 1]")
                yield (pixels.reshape(len(labels), 784) * 255).round().astype(np.uint8), labels, name
                empty = False
        if empty:
            raise ValueError("it has no writers under user_data")
    except (ijson.JSONError, ValueError, KeyError, TypeError, OverflowError, OSError) as error:
        # the parser of JSON appends an excerpt of the file
        first_line = str(error).partition("\n")[0]
        raise UsageError(f"data.root={str(file)!r}: not one of LEAF's files of FEMNIST: {first_line}") from error
