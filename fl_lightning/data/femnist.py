"""FEMNIST in LEAF's files (Caldas et al., LEAF: A Benchmark for Federated Settings, 2018)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fl_lightning.data.cache import fingerprint, kept
from fl_lightning.data.datamodule import Images
from fl_lightning.data.json_window import Window
from fl_lightning.data.partitioners import Natural, Partitioner
from fl_lightning.data.source import FileDataModule, cycled, patterns
from fl_lightning.errors import UsageError, require


class FEMNIST(FileDataModule):
    """FEMNIST: handwritten digits and letters of 28 x 28 grey pixels, 62 classes, by about 3,500 writers.

    ``root`` holds ``train/*.json`` and ``test/*.json`` as LEAF's ``preprocess.sh`` writes them. A writer is a domain,
    and without another partitioner a client: give ``num_clients`` the number of writers, or fewer. The files are read
    once, a writer at a time; the images are then kept as uint8 in a cache beside them.

    Args:
        root: folder of the files.
        offline: use a small generated set of 20 writers instead, in the format of the files.
        num_clients: K, at least 1.
        partitioner: deals the training samples out; None is ``Natural``.
        **kwargs: see :class:`ImageDataModule`.
    """

    mean, std = (0.9637,), (0.1597,)
    num_classes = 62

    def __init__(
        self,
        root: str = "data",
        offline: bool = False,
        num_clients: int = 10,
        partitioner: Partitioner | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(root, offline, num_clients=num_clients, partitioner=partitioner or Natural(), **kwargs)

    def read(self, root: Path) -> Images:
        splits = [files_of(root / split) for split in ("train", "test")]
        name = fingerprint(root, [file for files in splits for file in files], "FEMNIST")
        images, found = kept(root, name, partial(convert, splits))
        labels, writers = found["labels"], found["writers"]
        rows = np.split(np.arange(len(labels)), [int(found["train"])])
        return Images(images, labels, images, labels, writers, writers, tuple(found["names"].tolist()), *rows)

    def write_twin(self, root: Path) -> None:
        for split, each in (("train", 12), ("test", 4)):
            (root / split).mkdir()
            for part in range(2):
                users = {f"f{10 * part + i:04}_00": self._user(each, 10 * part + i) for i in range(10)}
                sizes = [each] * len(users)
                found = {"users": list(users), "num_samples": sizes, "user_data": users}
                (root / split / f"all_data_{part}.json").write_text(json.dumps(found))

    def _user(self, number: int, writer: int) -> dict[str, Any]:
        labels = (cycled(62, number) + 3 * writer) % 62
        images = patterns(np.append(labels, 61), 28, 1, writer)[:-1]
        # the paper is 1 and the ink less
        return {"x": (1 - images.reshape(number, -1) / 1275).round(3).tolist(), "y": labels.tolist()}


def files_of(folder: Path) -> list[Path]:
    """The files of a split, in alphabetical order.

    Raises:
        UsageError: there is none.
    """
    files = sorted(folder.glob("*.json")) if folder.is_dir() else []
    mend = "it is to hold all_data_*.json, as LEAF's preprocess.sh writes them"
    require(len(files) > 0, "data.root", str(folder), mend)
    return files


def convert(splits: Sequence[Sequence[Path]], target: Path) -> dict[str, np.ndarray]:
    """Write the images ``(N, 28, 28, 1)`` of all files into ``target``, those of the first split first.

    Gives their ``shape``, ``labels`` and ``writers`` ``(N,)``, the ``names`` of the writers, and the number of images
    in the first split, ``train``.

    Raises:
        UsageError: a file that is not LEAF's, or a split without images.
    """
    names: dict[str, int] = {}
    labels, writers, ends = [], [], [0]
    with open(target, "wb") as images:
        for files in splits:
            for pixels, classes, name in (user for file in files for user in read_file(file)):
                images.write(pixels.tobytes())
                labels.append(classes)
                writers.append(np.full(len(classes), names.setdefault(name, len(names))))
            ends.append(images.tell() // 784)
            require(ends[-1] > ends[-2], "data.root", str(files[0].parent), "its files hold not one image")
    found = {"labels": np.concatenate(labels), "writers": np.concatenate(writers), "names": np.array(list(names))}
    return {**found, "train": np.array(ends[1]), "shape": np.array((ends[-1], 28, 28, 1))}


def read_file(file: Path) -> Iterator[tuple[np.ndarray, np.ndarray, str]]:
    """Images ``(n, 784)`` uint8, labels ``(n,)`` and name of each writer in a file."""
    try:
        with open(file, encoding="utf-8") as text:
            for name, user in users_in(Window(text)):
                yield *as_arrays(user), name
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError, OSError) as error:
        raise UsageError(f"data.root={str(file)!r}: not one of LEAF's files of FEMNIST: {error}") from error


def users_in(window: Window) -> Iterator[tuple[str, Any]]:
    """Name and data of each writer, decoded one after another.

    Raises:
        KeyError: there is no ``user_data``.
    """
    keys = []
    for key in window.members():
        keys.append(key)
        if key != "user_data":
            window.value()
            continue
        for name in window.members():
            yield name, window.value()
    if "user_data" not in keys:
        raise KeyError("user_data")


def as_arrays(user: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """One writer's images ``(n, 784)`` uint8 and labels ``(n,)``.

    Raises:
        ValueError: not 784 values in [0, 1] an image, or a label that is no integer.
    """
    labels, pixels = np.array(user["y"], np.int64), np.array(user["x"], np.float32)
    if any(type(label) is not int for label in user["y"]):
        raise ValueError("labels are to be integers")
    if not ((pixels >= 0) & (pixels <= 1)).all():
        raise ValueError("pixels are to lie in [0, 1]")
    return (pixels.reshape(len(labels), 784) * 255).round().astype(np.uint8), labels
