"""A cache of decoded images: one memory-mapped array for a data set, in the user's own folder of caches."""

from __future__ import annotations

import hashlib
import math
import os
import stat
import tempfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps
from tqdm.contrib.concurrent import thread_map

from fl_lightning.errors import UsageError

VERSION = 3
# names in a message that is about many
SHOWN = 5
# the smallest and the largest number of 16 bits
FULL_RANGE = (0.0, 65535.0)

Range = tuple[float, float]


def decoded(
    folder: Path | None, paths: Sequence[Path], size: int, value_range: Range | None, training: np.ndarray
) -> tuple[np.ndarray, Range | None]:
    """Decode image files once to uint8 ``(N, size, size, 3)``; also returns the value range used by 16-bit images."""
    make = partial(decode, paths, size, value_range, training)
    images, others = cached(folder, paths, (size, value_range), make)
    if not others["bits"].any():
        return images, None
    used = value_range or measured_range(others["bits"][training])
    if used != tuple(others["value_range"].tolist()):  # it was measured on other training images
        return decoded(folder, paths, size, used, training)
    return images, used


def measured_range(bits: np.ndarray) -> Range:
    """Return 0 and the largest number of the bits that images ``(n,)`` use; 16 bits where none uses any."""
    return (0.0, 2.0 ** int(bits.max()) - 1) if bits.any() else FULL_RANGE


def cached(
    folder: Path | None, paths: Iterable[Path], made: object, make: Callable[[Path], dict[str, np.ndarray]]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Open images and smaller arrays from the cache, or ``make`` both; ``made`` names the recipe in its key."""
    digest = hashlib.blake2b(f"{VERSION} {made}".encode(), digest_size=12)
    for path in paths:
        status = path.stat()
        digest.update(f"{path.absolute()} {status.st_size} {status.st_mtime_ns}\n".encode())
    images = (folder or cache_folder()) / f"{digest.hexdigest()}.images"
    beside, others = images.with_suffix(".npz"), dict[str, np.ndarray]()
    with suppress(Exception):  # a file is missing, or damaged, for which NumPy raises errors of many kinds
        with np.load(beside, allow_pickle=False) as file:
            stored = dict(file)
        others = stored if stored["checksum"] == checksum(images) else {}
    if not others:
        others = written(images, beside, make)
    return np.memmap(images, np.uint8, "c", shape=tuple(others["shape"].tolist())), others


def written(images: Path, beside: Path, make: Callable[[Path], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Write both files of a cache, each atomically; returns the smaller arrays."""
    new_images = images.with_suffix(f".{os.getpid()}.partial")
    new_beside = new_images.with_suffix(".npz")
    try:
        others = make(new_images)
        np.savez(new_beside, **others, checksum=checksum(new_images))  # type: ignore[arg-type]
        os.replace(new_images, images)
        # the checksum comes last: without it, or with that of other images, the images count as damaged
        os.replace(new_beside, beside)
    except OSError as error:
        hint = "free some space there, or set XDG_CACHE_HOME to another folder"
        raise UsageError(f"the cache {images} cannot be written: {error}; {hint}") from error
    finally:
        for file in (new_images, new_beside):
            file.unlink(missing_ok=True)
    return others


def cache_folder() -> Path:
    """Return ``$XDG_CACHE_HOME/fl_lightning``, else ``~/.cache/fl_lightning``, else a private temporary folder."""
    user = os.geteuid() if hasattr(os, "geteuid") else None
    usual = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fl_lightning"
    own = Path(tempfile.gettempdir()) / f"fl_lightning-{'cache' if user is None else user}"
    for folder in (usual, own):
        try:
            folder.mkdir(0o700, parents=folder == usual, exist_ok=True)
            state = folder.lstat()
        except OSError:
            continue
        # the folder of temporary files is everybody's: another user may have made one of that name, or a link
        private = user is None or (stat.S_ISDIR(state.st_mode) and state.st_uid == user and not state.st_mode & 0o077)
        if os.access(folder, os.W_OK) and (folder != own or private):
            return folder
    hint = "neither it nor the temporary folder can be written to; set XDG_CACHE_HOME to a folder that can"
    raise UsageError(f"the cache of decoded images {str(usual)!r}: {hint}")


def checksum(path: Path) -> int:
    """CRC-32 of a file, read in blocks so that it does not count as memory of the process."""
    value = 0
    with open(path, "rb") as file:
        while block := file.read(2**20):
            value = zlib.crc32(block, value)
    return value


def decode(
    paths: Sequence[Path], size: int, value_range: Range | None, training: np.ndarray, target: Path
) -> dict[str, np.ndarray]:
    """Decode image files on all cores into ``target``; returns ``shape``, ``bits`` and ``value_range``."""
    shape = (len(paths), size, size, 3)
    with open(target, "wb") as file:
        if hasattr(os, "posix_fallocate"):
            # a full disk raises an error here; later, a write into mapped memory would kill the process
            os.posix_fallocate(file.fileno(), 0, math.prod(shape))
    array, bits = np.memmap(target, np.uint8, "r+", shape=shape), np.zeros(len(paths), np.uint8)

    def decode_into(index: int) -> str:
        try:
            array[index], bits[index] = decode_image(paths[index], size, used)
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            return f"{paths[index]} ({error})"
        return ""

    def decode_all(indices: Iterable[int]) -> list[str]:
        shown = {"desc": "decoding", "unit": "image", "disable": None}
        return list(filter(None, thread_map(decode_into, indices, max_workers=os.cpu_count(), **shown)))

    used = value_range
    faults = decode_all(range(len(paths)))
    if used is None:
        used = measured_range(bits[training])
        faults += decode_all(np.flatnonzero(bits).tolist() if used != FULL_RANGE else [])
    if faults:
        which = f"{len(faults)} of {len(paths)} files cannot be read as images: {listed(faults)}"
        raise UsageError(f"data.root: {which}; replace or remove them")
    array.flush()
    return {"shape": np.array(shape), "bits": bits, "value_range": np.array(used)}


def decode_image(path: Path, size: int, value_range: Range | None = None) -> tuple[np.ndarray, int]:
    """One image as uint8 ``(size, size, 3)``, and the number of bits that its values use, 0 for an image of 8 bits.

    The image is turned by its EXIF orientation, put on white where it is transparent, converted to RGB, and resized by
    bilinear interpolation. In a grey image of more than 8 bits, the first value of ``value_range`` becomes black and
    the second one white; None is the range of 16 bits.

    Raises:
        OSError: it is not an image, or a part of it is missing.
        ValueError: the range of its values is not known, or Pillow would lose too much of them.
    """
    with Image.open(path) as opened:
        image: Image.Image = opened
        opened.draft("RGB", (size, size))
        wide, deep = image.mode in ("I", "F"), image.mode.startswith("I;16")
        if wide and (value_range is None or not np.isfinite(np.asarray(image)).all()):
            hint = "store finite ones, and give data.value_range: [LOW, HIGH]"
            raise ValueError(f"its pixels are numbers of 32 bits, mode {image.mode}; {hint}")
        halved, bits = not wide and not deep and ";16" in str(opened.tile), 0
        opened.load()
        with suppress(Exception):  # damaged EXIF data count as none
            image = ImageOps.exif_transpose(image)
        if wide or deep:
            values, (low, high) = np.asarray(image).astype(np.float64), value_range or FULL_RANGE
            bits = 32 if wide else int(values.max()).bit_length()
            # Pillow would cut all values above 255
            image = Image.fromarray(np.rint((values.clip(low, high) - low) * (255 / (high - low))).astype(np.uint8))
        elif image.mode.endswith(("A", "a")) or "transparency" in image.info:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        converted = image.convert("RGB")
        if halved and (value_range or 0 < np.asarray(converted).max() < 16):
            raise ValueError("of its 16 bits a colour, only the upper 8 are read; store 8 bits a colour")
        if converted.size != (size, size):
            converted = converted.resize((size, size), Image.Resampling.BILINEAR)
        return np.asarray(converted), bits


def listed(names: Iterable[str]) -> str:
    """Join the first names, and count the others."""
    given = list(names)
    return ", ".join(given[:SHOWN]) + (f" and {len(given) - SHOWN} more" if len(given) > SHOWN else "")
