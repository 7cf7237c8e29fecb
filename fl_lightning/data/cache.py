"""A cache of decoded images: one memory-mapped array beside the data set."""

from __future__ import annotations

import hashlib
import math
import os
import stat
import tempfile
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image
from tqdm.contrib.concurrent import thread_map

from fl_lightning.errors import UsageError

VERSION = 1


def decoded(root: Path, paths: Sequence[Path], size: int) -> np.ndarray:
    """Image files as one uint8 array ``(N, size, size, 3)``, decoded once and then opened from the cache.

    The array is memory-mapped and copied on write, see :func:`cached`.

    Raises:
        UsageError: a file is not an image, or a part of it is missing.
    """
    return cached(root, fingerprint(root, paths, size), partial(decode, paths, size))[0]


def cached(
    root: Path, name: str, make: Callable[[Path], dict[str, np.ndarray]]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Images as one uint8 array, memory-mapped and copied on write, and smaller arrays that belong to them.

    The cache lies in ``root/.fl_lightning``, or if ``root`` cannot be written to in a folder of the user's own in the
    system's temporary folder. It has two files: ``name.images`` holds the bytes of the images, ``name.npz`` the smaller
    arrays and a checksum of those bytes. If one of them is missing or damaged, both are written again.

    Args:
        root: folder of the data set.
        name: a :func:`fingerprint` of the data set.
        make: writes the bytes of the images into the file at the given path, and returns the smaller arrays. Among
            them is ``shape``, that of the images.
    """
    path = cache_folder(root) / f"{name}.images"
    return open_intact(path) or write(path, make)


def fingerprint(root: Path, paths: Sequence[Path], made: object) -> str:
    """A hash of the files' names, sizes and times of change, and of a value that names what is ``made`` of them."""
    digest = hashlib.blake2b(f"{VERSION} {made}".encode(), digest_size=12)
    for path in paths:
        stat = path.stat()
        digest.update(f"{path.relative_to(root)} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def cache_folder(root: Path) -> Path:
    """The folder of the cache, created if necessary.

    Raises:
        UsageError: neither ``root`` nor the temporary folder can be written to.
    """
    user = os.geteuid() if hasattr(os, "geteuid") else None
    own = Path(tempfile.gettempdir()) / f"fl_lightning-{'cache' if user is None else user}"
    for folder, mode in ((root / ".fl_lightning", 0o777), (own, 0o700)):
        try:
            folder.mkdir(mode, exist_ok=True)
            state = folder.lstat()
        except OSError:
            continue
        # the folder of temporary files is everybody's: another user may have made one of that name, or a link
        private = user is None or (stat.S_ISDIR(state.st_mode) and state.st_uid == user and not state.st_mode & 0o077)
        if os.access(folder, os.W_OK) and (folder != own or private):
            return folder
    raise UsageError(
        f"data.root={str(root)!r}: neither it nor the temporary folder can be written to; make one of them writable"
    )


def open_intact(path: Path) -> tuple[np.ndarray, dict[str, np.ndarray]] | None:
    """The images in ``path`` and the arrays beside them; None if a file is missing or damaged."""
    try:
        with np.load(path.with_suffix(".npz"), allow_pickle=False) as file:
            others = dict(file)
        return open_images(path, others) if others["checksum"] == checksum(path) else None
    except Exception:  # a damaged zip file raises errors of many kinds
        return None


def open_images(path: Path, others: dict[str, np.ndarray]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The images in ``path``, in the shape that is among the other arrays, and those arrays."""
    return np.memmap(path, np.uint8, "c", shape=tuple(others["shape"].tolist())), others


def checksum(path: Path) -> int:
    """CRC-32 of a whole file.

    At 1 to 4 GB/s the largest of the data sets takes about a second, and training reads all of it anyway. The file is
    read in blocks, not mapped, so that it does not count as memory of the process.
    """
    value = 0
    with open(path, "rb") as file:
        while block := file.read(2**20):
            value = zlib.crc32(block, value)
    return value


def write(path: Path, make: Callable[[Path], dict[str, np.ndarray]]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Make the images and the arrays beside them, write each file atomically, and open them.

    Raises:
        UsageError: they cannot be written, for example because the disk is full.
    """
    images = path.with_suffix(f".{os.getpid()}.partial")
    beside = images.with_suffix(".npz")
    try:
        others = make(images)
        np.savez(beside, **others, checksum=checksum(images))  # type: ignore[arg-type]
        os.replace(images, path)
        # the checksum comes last: without it, or with that of other images, the images count as damaged
        os.replace(beside, path.with_suffix(".npz"))
    except OSError as error:
        raise UsageError(f"data.root: the cache {path} cannot be written: {error}; free some space there") from error
    finally:
        for file in (images, beside):
            file.unlink(missing_ok=True)
    return open_images(path, others)


def decode(paths: Sequence[Path], size: int, target: Path) -> dict[str, np.ndarray]:
    """Decode image files on all cores into the file ``target``; returns their ``shape``."""
    shape = (len(paths), size, size, 3)
    with open(target, "wb") as file:
        if hasattr(os, "posix_fallocate"):
            # a full disk raises an error here; later, a write into mapped memory would kill the process
            os.posix_fallocate(file.fileno(), 0, math.prod(shape))
    array = np.memmap(target, np.uint8, "r+", shape=shape)

    def decode_into(index: int) -> None:
        array[index] = decode_image(paths[index], size)

    shown = {"desc": "decoding", "unit": "image", "disable": None}
    thread_map(decode_into, range(len(paths)), max_workers=os.cpu_count(), **shown)
    array.flush()
    return {"shape": np.array(shape)}


def decode_image(path: Path, size: int) -> np.ndarray:
    """One image as uint8 ``(size, size, 3)``: converted to RGB and resized by bilinear interpolation.

    Raises:
        UsageError: it is not an image, or a part of it is missing.
    """
    try:
        with Image.open(path) as image:
            image.draft("RGB", (size, size))
            converted = image.convert("RGB")
            if converted.size != (size, size):
                converted = converted.resize((size, size), Image.Resampling.BILINEAR)
            return np.asarray(converted)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        hint = "download it again or remove it"
        raise UsageError(f"data.root: {path} is not a complete image: {error}; {hint}") from error
