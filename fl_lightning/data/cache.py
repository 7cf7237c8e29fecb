"""Images decoded once, into one memory-mapped array beside the data."""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image
from tqdm import tqdm

from fl_lightning.errors import UsageError

VERSION = 1


def decoded(root: Path, paths: Sequence[Path], size: int) -> np.ndarray:
    """Images as one array ``(N, size, size, 3)`` uint8, memory-mapped and copied on write, as :func:`kept` keeps it.

    Raises:
        UsageError: a file is no whole image.
    """
    return kept(root, fingerprint(root, paths, size), partial(decode, paths, size))[0]


def kept(
    root: Path, name: str, make: Callable[[Path], dict[str, np.ndarray]]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Images as one uint8 array, memory-mapped and copied on write, and the smaller arrays that belong to them.

    They are kept in ``root/.fl_lightning`` (in the folder of temporary files where ``root`` cannot be written): the
    bytes of the images in ``name.images``, the others and a checksum of those bytes in ``name.npz``. Where a file is
    missing or damaged, both are made anew.

    Args:
        root: folder of the data set.
        name: a :func:`fingerprint`.
        make: writes the bytes into the file it is given, and gives the other arrays, with the images' ``shape``.
    """
    path = place(root) / f"{name}.images"
    return open_whole(path) or write(path, make)


def fingerprint(root: Path, paths: Sequence[Path], made: object) -> str:
    """Names, sizes and times of the files, and what is ``made`` of them."""
    text = hashlib.blake2b(f"{VERSION} {made}".encode(), digest_size=12)
    for path in paths:
        stat = path.stat()
        text.update(f"{path.relative_to(root)} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return text.hexdigest()


def place(root: Path) -> Path:
    """The folder of the cache."""
    for folder in (root / ".fl_lightning", Path(tempfile.gettempdir()) / "fl_lightning"):
        try:
            folder.mkdir(exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    raise UsageError(f"data.root={str(root)!r}: neither it nor the folder of temporary files can be written")


def open_whole(path: Path) -> tuple[np.ndarray, dict[str, np.ndarray]] | None:
    """The images in ``path`` and what belongs to them; None where something is not there or damaged."""
    try:
        with np.load(path.with_suffix(".npz"), allow_pickle=False) as file:
            others = dict(file)
        return open_images(path, others) if others["checksum"] == checksum(path) else None
    except Exception:  # a damaged zip file raises nearly anything
        return None


def open_images(path: Path, others: dict[str, np.ndarray]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The images in ``path``, of the shape that was kept with them, and what was kept with them."""
    return np.memmap(path, np.uint8, "c", shape=tuple(others["shape"].tolist())), others


def checksum(path: Path) -> int:
    """CRC-32 of a file.

    Of all of it: at 1 to 4 GB/s the largest of the data sets takes about a second, and training is to read it anyway.
    It is read, not mapped, so that it does not count as memory of the process.
    """
    found = 0
    with open(path, "rb") as file:
        while block := file.read(2**20):
            found = zlib.crc32(block, found)
    return found


def write(path: Path, make: Callable[[Path], dict[str, np.ndarray]]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Make the images and what belongs to them, both whole or not there, and open them.

    Raises:
        UsageError: there is no room for them.
    """
    images = path.with_suffix(f".{os.getpid()}.partial")
    beside = images.with_suffix(".npz")
    try:
        others = make(images)
        np.savez(beside, **others, checksum=checksum(images))  # type: ignore[arg-type]
        os.replace(images, path)
        # the checksum comes last: until then the images have none, or one of others, and are not accepted
        os.replace(beside, path.with_suffix(".npz"))
    except OSError as error:
        raise UsageError(f"data.root: the cache {path} cannot be written: {error}; make room there") from error
    finally:
        for file in (images, beside):
            file.unlink(missing_ok=True)
    return open_images(path, others)


def decode(paths: Sequence[Path], size: int, target: Path) -> dict[str, np.ndarray]:
    """Decode on all cores into ``target``; gives the ``shape``."""
    shape = (len(paths), size, size, 3)
    with open(target, "wb") as file:
        if hasattr(os, "posix_fallocate"):
            # a full disk is an error here; on a write into mapped memory it would end the process
            os.posix_fallocate(file.fileno(), 0, math.prod(shape))
    array = np.memmap(target, np.uint8, "r+", shape=shape)

    def one(index: int) -> None:
        array[index] = decode_image(paths[index], size)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in tqdm(pool.map(one, range(len(paths))), "decoding", len(paths), unit="image", disable=None):
            pass
    array.flush()
    return {"shape": np.array(shape)}


def decode_image(path: Path, size: int) -> np.ndarray:
    """One image ``(size, size, 3)`` uint8, grey or transparent ones converted, resized by bilinear interpolation."""
    try:
        with Image.open(path) as image:
            image.draft("RGB", (size, size))
            converted = image.convert("RGB")
            resized = converted if converted.size == (size, size) else converted.resize((size, size), RESAMPLE)
            return np.asarray(resized)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UsageError(f"data.root: {path} is no whole image: {error}; fetch it again or take it out") from error


RESAMPLE = Image.Resampling.BILINEAR
