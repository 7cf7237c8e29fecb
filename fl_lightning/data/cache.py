"""Images decoded once, into one memory-mapped array beside the data."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError
from tqdm import tqdm

from fl_lightning.errors import UsageError

VERSION = 1


def decoded(root: Path, paths: Sequence[Path], size: int) -> np.ndarray:
    """Images as one array ``(N, size, size, 3)`` uint8, memory-mapped and copied on write.

    It is kept in ``root/.fl_lightning`` (in the folder of temporary files where ``root`` cannot be written), under the
    names, sizes and times of the files: a changed file, another size or a damaged array make a new one.

    Raises:
        UsageError: a file is no whole image.
    """
    path = place(root) / f"{fingerprint(root, paths, size)}.npy"
    found = open_whole(path, (len(paths), size, size, 3))
    if found is None:
        decode(paths, size, path)
        found = np.load(path, mmap_mode="c", allow_pickle=False)
    return found


def fingerprint(root: Path, paths: Sequence[Path], size: int) -> str:
    """Names, sizes and times of the files, and what is made of them."""
    text = hashlib.blake2b(f"{VERSION} {size}".encode(), digest_size=12)
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


def open_whole(path: Path, shape: tuple[int, ...]) -> np.ndarray | None:
    """The array in ``path``; None where it is not there, damaged or of another shape."""
    try:
        found = np.load(path, mmap_mode="c", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return found if found.shape == shape and found.dtype == np.uint8 else None


def decode(paths: Sequence[Path], size: int, target: Path) -> None:
    """Decode on all cores into ``target``, which is whole or not there."""
    partial = target.with_suffix(f".{os.getpid()}.partial")
    array = np.lib.format.open_memmap(partial, "w+", np.uint8, (len(paths), size, size, 3))

    def one(index: int) -> None:
        array[index] = decode_image(paths[index], size)

    try:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for _ in tqdm(pool.map(one, range(len(paths))), "decoding", len(paths), unit="image", disable=None):
                pass
        array.flush()
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def decode_image(path: Path, size: int) -> np.ndarray:
    """One image ``(size, size, 3)`` uint8, grey or transparent ones converted, resized by bilinear interpolation."""
    try:
        with Image.open(path) as image:
            image.draft("RGB", (size, size))
            converted = image.convert("RGB")
            resized = converted if converted.size == (size, size) else converted.resize((size, size), RESAMPLE)
            return np.asarray(resized)
    except (OSError, UnidentifiedImageError, SyntaxError, ValueError) as error:
        raise UsageError(f"data.root: {path} is no whole image: {error}; fetch it again or take it out") from error


RESAMPLE = Image.Resampling.BILINEAR
