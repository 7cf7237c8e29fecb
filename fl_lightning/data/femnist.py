"""FEMNIST in LEAF's files (Caldas et al., LEAF: A Benchmark for Federated Settings, 2018)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import ijson
import numpy as np

from fl_lightning.data.cache import fingerprint, kept
from fl_lightning.data.datamodule import Images
from fl_lightning.data.partitioners import Natural, Partitioner
from fl_lightning.data.source import FileDataModule, cycled, patterns
from fl_lightning.errors import UsageError, require

BLOCK = 2**14  # bytes
DEEPEST = 1000


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
    """Images ``(n, 784)`` uint8, labels ``(n,)`` and name of each writer in a file; one writer is in memory at a time.

    Raises:
        UsageError: the file is not one of LEAF's.
    """
    try:
        with open(file, "rb") as stream:
            empty = True
            for name, user in ijson.kvitems(ShallowFile(stream), "user_data", buf_size=BLOCK, use_float=True):
                yield *as_arrays(user), name
                empty = False
        if empty:
            raise ValueError("it has no writers under user_data")
    except (ijson.JSONError, ValueError, KeyError, TypeError, OverflowError, OSError) as error:
        raise UsageError(f"data.root={str(file)!r}: not one of LEAF's files of FEMNIST: {first_line(error)}") from error


class ShallowFile:
    """A JSON file that may not be nested deeply: the parser's memory grows with the square of the depth.

    Args:
        file: the file, opened in binary mode.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._depth = file, 0

    def read(self, size: int) -> bytes:
        """The next ``size`` bytes.

        Raises:
            ValueError: more than 1,000 objects and arrays are open at the end of these bytes.
        """
        block = self._file.read(size)
        # brackets within strings count as well; LEAF's names of writers have none
        self._depth += block.count(b"{") + block.count(b"[") - block.count(b"}") - block.count(b"]")
        if self._depth > DEEPEST:
            raise ValueError(f"objects and arrays are nested more than {DEEPEST} deep")
        return block


def first_line(error: Exception) -> str:
    """What an error says, without the excerpt of the file that the parser of JSON appends."""
    message = error.args[0] if isinstance(error, ijson.JSONError) else str(error)
    # an excerpt that is not UTF-8 turns the whole message into bytes
    text = message.decode(errors="replace") if isinstance(message, bytes) else str(message)
    return text.partition("\n")[0]


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
