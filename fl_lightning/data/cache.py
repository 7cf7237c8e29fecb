"""A cache of decoded images: one memory-mapped array for a data set, in the user's own folder of caches."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps
from tqdm.contrib.concurrent import thread_map

from fl_lightning.utilities.errors import UsageError, few, printable, text_of

VERSION = 4

Range = tuple[float, float]


def cached(
    paths: Iterable[Path], recipe: object, make: Callable[[Path], dict[str, np.ndarray]]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Open images and smaller arrays from the cache, or ``make`` both; ``recipe`` is part of its key."""
    digest = hashlib.blake2b(f"{VERSION} {recipe}".encode(), digest_size=12)
    for path in paths:
        status = path.stat()
        # a file copied by `cp -p` or `rsync -t` may have the size and time of the one that it replaces
        version = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
        digest.update(os.fsencode(path.absolute()) + f" {version}\n".encode())
    images = cache_folder() / f"{digest.hexdigest()}.images"
    beside = images.with_suffix(".npz")
    if not (images.is_file() and beside.is_file()):
        new_images = images.with_suffix(f".{os.getpid()}.partial")
        new_beside = new_images.with_suffix(".npz")
        try:
            np.savez(new_beside, **make(new_images))  # type: ignore[arg-type]
            for partial, file in ((new_images, images), (new_beside, beside)):
                with open(partial, "rb+") as stream:
                    os.fsync(stream.fileno())
                os.replace(partial, file)
        except OSError as error:
            hint = "free some space there, or set XDG_CACHE_HOME to another folder"
            raise UsageError(f"the cache {images} cannot be written: {error}; {hint}") from error
        finally:
            for partial in (new_images, new_beside):
                partial.unlink(missing_ok=True)
    with np.load(beside, allow_pickle=False) as file:
        arrays = dict(file)
    return np.memmap(images, np.uint8, "c", shape=tuple(arrays["shape"].tolist())), arrays


def cache_folder() -> Path:
    """Return ``$XDG_CACHE_HOME/fl_lightning``, else ``~/.cache/fl_lightning``."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fl_lightning"
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
    except OSError as error:
        hint = f"{error}; set XDG_CACHE_HOME to a folder that can be written to"
        raise UsageError(f"the cache of decoded images {str(folder)!r}: {hint}") from error
    return folder


def decode(paths: Sequence[Path], size: int, value_range: Range | None, target: Path) -> dict[str, np.ndarray]:
    """Decode image files on all cores into ``target``; returns its ``shape``."""
    shape = (len(paths), size, size, 3)
    with open(target, "wb") as file:
        if hasattr(os, "posix_fallocate"):
            # a full disk raises an error here; later, a write into mapped memory would kill the process
            os.posix_fallocate(file.fileno(), 0, math.prod(shape))
    array = np.memmap(target, np.uint8, "r+", shape=shape)

    def decode_into(index: int) -> str:
        try:
            array[index] = decode_image(paths[index], size, value_range)
        except Exception as error:  # Pillow raises errors of many kinds for damaged files
            return printable(f"{paths[index]} ({text_of(error)})")
        return ""

    progress = {"desc": "decoding", "unit": "image", "disable": None}
    texts = thread_map(decode_into, range(len(paths)), max_workers=os.cpu_count(), **progress)
    faults = [text for text in texts if text]
    if faults:
        which = f"{len(faults)} of {len(paths)} files cannot be read as images: {few(faults)}"
        raise UsageError(f"data.root: {which}; replace or remove them")
    array.flush()
    return {"shape": np.array(shape)}


def decode_image(path: Path, size: int, value_range: Range | None = None) -> np.ndarray:
    """One image as uint8 ``(size, size, 3)``.

    The image is turned by its EXIF orientation, put on white where it is transparent, converted to RGB, and resized by
    bilinear interpolation. In a grey image of more than 8 bits, the first value of ``value_range`` becomes black and
    the second one white.

    Raises:
        OSError: it is not an image, or a part of it is missing.
        ValueError: it has several pages, or it is grey, of more than 8 bits, and has no range or a value that is not
            finite.
    """
    with Image.open(path) as opened:
        image: Image.Image = opened
        pages = getattr(opened, "n_frames", 1)
        # the second image of an MPO is a preview, or a depth map, of the first
        if pages > 1 and opened.format != "MPO":
            raise ValueError(f"it has {pages} pages; save each as a file")
        opened.draft("RGB", (size, size))
        opened.load()
        with suppress(Exception):  # damaged EXIF data count as none
            image = ImageOps.exif_transpose(image)
        if image.mode in ("I", "F") or image.mode.startswith("I;16"):
            values = np.asarray(image).astype(np.float64)
            if value_range is None or not np.isfinite(values).all():
                hint = "give finite ones, and data.value_range: [LOW, HIGH], such as [0, 4095] for 12 bits"
                raise ValueError(f"its pixels have more than 8 bits; {hint}")
            low, high = value_range
            # Pillow would cut all values above 255
            image = Image.fromarray(np.rint((values.clip(low, high) - low) * (255 / (high - low))).astype(np.uint8))
        elif image.mode.endswith(("A", "a")) or "transparency" in image.info:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        converted = image.convert("RGB")
        if converted.size != (size, size):
            converted = converted.resize((size, size), Image.Resampling.BILINEAR)
        return np.asarray(converted)
