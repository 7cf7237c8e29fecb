"""Folders for temporary files, which a process that is killed does not leave behind for good."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from fl_lightning.errors import UsageError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# seconds in which a new folder gets its lock
SECONDS_TO_LOCK = 60.0


class TemporaryFolder:
    """A new folder in the folder of temporary files. Those that killed processes have left there are removed.

    The folder is locked as long as the process lives, on whatever machine, or a process that was forked from it.

    Args:
        prefix: beginning of the name of the folder, and of those that are removed.

    Attributes:
        path: the folder, which no other user can open.

    Raises:
        UsageError: there can be none.
    """

    def __init__(self, prefix: str) -> None:
        remove_leftovers(prefix)
        try:
            self.path = Path(tempfile.mkdtemp(prefix=prefix))
            self._lock = (self.path / "lock").open("w")
        except OSError as error:
            hint = "give a folder with room that can be written to"
            raise UsageError(f"TMPDIR: no folder for temporary files: {error}; {hint}") from error
        lock(self._lock)

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def remove_leftovers(prefix: str) -> None:
    """Remove this user's folders whose process has ended. What others have put there is left alone, unopened."""
    with suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(prefix):
                with suppress(OSError):
                    _remove_leftover(Path(entry.path))


def _remove_leftover(folder: Path) -> None:
    state = folder.lstat()
    if not (stat.S_ISDIR(state.st_mode) and is_own(state) and time.time() > state.st_mtime + SECONDS_TO_LOCK):
        return
    # neither of the flags is known on Windows
    flags = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    with open(os.open(folder / "lock", os.O_RDWR | flags)) as file:
        state = os.fstat(file.fileno())
        if stat.S_ISREG(state.st_mode) and is_own(state) and lock(file):
            shutil.rmtree(folder, ignore_errors=True)


def is_own(state: os.stat_result) -> bool:
    """Whether a file or folder belongs to the user of this process; on Windows each does."""
    return not hasattr(os, "geteuid") or state.st_uid == os.geteuid()


def lock(file: IO[str], inherited: bool = True) -> bool | None:
    """Lock a file, unless another process holds its lock; None where there are no such locks.

    Args:
        file: the file, open for writing.
        inherited: whether processes that are forked from this one hold the lock, too.
    """
    if fcntl is None:
        return None
    try:
        (fcntl.flock if inherited else fcntl.lockf)(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:  # a file system without locks
        return None
    return True


def is_locked(path: Path) -> bool | None:
    """Whether a process holds the lock of a file, which is only read; None where that cannot be told.

    It is that of :func:`lock` with ``inherited=False``. Without the file there is none.
    """
    if fcntl is None:
        return None
    try:
        # not of a pipe: nobody may write to it
        opened = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        fcntl.lockf(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return True
    except OSError:  # a file system without locks
        return None
    finally:
        os.close(opened)
    return False
