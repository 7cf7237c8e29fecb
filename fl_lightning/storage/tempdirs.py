"""Temporary folders that are removed even after a kill, and file locks."""

from __future__ import annotations

import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from fl_lightning.utilities.errors import UsageError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# seconds within which a new folder is locked
SECONDS_TO_LOCK = 60.0


class TemporaryFolder:
    """A new temporary folder. Creating it removes the temporary folders of killed processes.

    The folder stays locked while the process, or a process forked from it, lives.

    Args:
        prefix: prefix of the folder's name, and of the folders to remove.

    Attributes:
        path: the folder, which only this user can open.

    Raises:
        UsageError: the folder cannot be created.
    """

    def __init__(self, prefix: str) -> None:
        for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            with suppress(OSError), (folder / "lock").open("r+") as file:
                if time.time() > folder.stat().st_mtime + SECONDS_TO_LOCK and lock(file):
                    shutil.rmtree(folder, ignore_errors=True)
        try:
            self.path = Path(tempfile.mkdtemp(prefix=prefix))
            self._lock = (self.path / "lock").open("w")
        except OSError as error:
            hint = "set it to a writable folder with free space"
            raise UsageError(f"TMPDIR: no folder for temporary files: {error}; {hint}") from error
        lock(self._lock)

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def lock(file: IO[str], inherited: bool = True, shared: bool = False) -> bool | None:
    """Lock a file unless another process holds its lock; None if the system does not support locks.

    Args:
        file: the file, open for writing, or for reading if the lock is shared.
        inherited: whether forked processes hold the lock as well.
        shared: whether several processes may hold the lock.
    """
    if fcntl is None:
        return None
    try:
        (fcntl.flock if inherited else fcntl.lockf)(file, fcntl.LOCK_NB | (fcntl.LOCK_SH if shared else fcntl.LOCK_EX))
    except (BlockingIOError, PermissionError):
        return False
    except OSError:  # a file system without locks
        return None
    return True


def is_locked(path: Path) -> bool | None:
    """Return whether a process holds the lock of a file, if not inherited; None if unknown."""
    try:
        with path.open() as file:
            free = lock(file, inherited=False, shared=True)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    return None if free is None else not free
