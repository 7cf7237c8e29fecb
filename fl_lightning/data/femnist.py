"""FEMNIST in LEAF's files (Caldas et al., LEAF: A Benchmark for Federated Settings, 2018)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fl_lightning.data.datamodule import Images
from fl_lightning.data.partitioners import Natural, Partitioner
from fl_lightning.data.source import FileDataModule, cycled, patterns
from fl_lightning.errors import UsageError, require


class FEMNIST(FileDataModule):
    """FEMNIST: handwritten digits and letters of 28 x 28 grey pixels, 62 classes, by about 3,500 writers.

    ``root`` holds ``train/*.json`` and ``test/*.json`` as LEAF's ``preprocess.sh`` writes them. A writer is a domain,
    and without another partitioner a client: give ``num_clients`` the number of writers, or fewer. The files are read
    one after another, so that only one of them is held as numbers of Python at a time.

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
        writers: dict[str, int] = {}
        train, test = (read_split(root / split, writers) for split in ("train", "test"))
        return Images(*train[:2], *test[:2], train[2], test[2], tuple(writers))

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


def read_split(folder: Path, writers: dict[str, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Images ``(N, 28, 28, 1)``, labels and writers ``(N,)`` of all files of a split; new writers are numbered.

    Raises:
        UsageError: no file, or one that is not LEAF's.
    """
    files = sorted(folder.glob("*.json")) if folder.is_dir() else []
    mend = "it is to hold all_data_*.json, as LEAF's preprocess.sh writes them"
    require(len(files) > 0, "data.root", str(folder), mend)
    images, labels, domains = bytearray(), [], []  # grows in place: joining arrays would hold all of it twice
    for pixels, classes, writer in (part for file in files for part in read_file(file, writers)):
        images += pixels.tobytes()
        labels.append(classes)
        domains.append(np.full(len(classes), writer))
    return np.frombuffer(images, np.uint8).reshape(-1, 28, 28, 1), np.concatenate(labels), np.concatenate(domains)


def read_file(file: Path, writers: dict[str, int]) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """Images ``(n, 784)`` uint8, labels ``(n,)`` and number of each writer in a file."""
    try:
        users = json.loads(file.read_bytes())["user_data"]
        for name in list(users):
            yield *as_arrays(users.pop(name)), writers.setdefault(name, len(writers))
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise UsageError(f"data.root={str(file)!r}: not one of LEAF's files of FEMNIST: {error}") from error


def as_arrays(user: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """One writer's images ``(n, 784)`` uint8, of values in [0, 1], and labels ``(n,)``."""
    labels = np.array(user["y"], np.int64)
    images = (np.array(user["x"], np.float32).reshape(len(labels), 784) * 255).round().clip(0, 255)
    return images.astype(np.uint8), labels
