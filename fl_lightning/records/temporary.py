"""Folders for temporary files, which a process that is killed does not leave behind for good."""

from __future__ import annotations

import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# seconds in which a new folder gets its lock
NEW = 60.0


class TemporaryFolder:
    """A new folder in the folder of temporary files. Those that killed processes have left there are removed.

    The folder is locked as long as the process lives, on whatever machine.

    Args:
        prefix: beginning of the name of the folder, and of those that are removed.

    Attributes:
        path: the folder.
    """

    def __init__(self, prefix: str) -> None:
        remove_leftovers(prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        self._lock = (self.path / "lock").open("w")
        lock(self._lock)

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def remove_leftovers(prefix: str) -> None:
    """Remove the folders whose process has ended."""
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError), (folder / "lock").open() as file:
            if time.time() > folder.stat().st_mtime + NEW and lock(file):
                shutil.rmtree(folder, ignore_errors=True)


def lock(file: IO[str]) -> bool | None:
    """Lock a file, unless another process holds its lock; None where there are no such locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
