"""The folder of a run: its version, table of metrics and loggers."""

from __future__ import annotations

import errno
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import yaml
from lightning.fabric.loggers import CSVLogger, Logger, TensorBoardLogger

from fl_lightning.storage import loggers
from fl_lightning.storage.checkpoint import CheckpointFolder, in_place, resumes_in_place
from fl_lightning.storage.tempdirs import lock
from fl_lightning.utilities.errors import ClientError, require, text_of, writing_into

# errors of a full disk, an exceeded quota and an exceeded file size
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class RunFolder:
    """The folder of one version of a run, and the loggers that write there.

    Args:
        root: folder of all versions of the run.
        logger: True for TensorBoard events in the folder, False for no logger; or loggers.
        writes: whether this process writes.

    Attributes:
        path: the folder; None before :meth:`open` and where nothing is written.
        shared: the folder, on every worker; None where the run writes nothing.
        loggers: the open loggers, beside the table of metrics.
        checkpoints: the folder of its checkpoints; None without :attr:`path`.
        source: folder of the run from whose checkpoint this one resumes, on the process that writes; None without one.
        resumed: whether the run resumes in the folder of its checkpoint.
        changed: whether the run differs from its checkpoint's, and therefore continues in a new version.
        changes: all changes of the run, each with time and checkpoint, as listed in ``changes.yaml``.
    """

    def __init__(self, root: Path, logger: Logger | list[Logger] | bool, writes: bool) -> None:
        self.root, self.logger, self.writes = root, logger, writes
        self.path: Path | None = None
        self.checkpoints: CheckpointFolder | None = None
        self.source: Path | None = None
        self.shared: Path | None = None
        self.loggers: list[Logger] = []
        self._table: CSVLogger | None = None
        self.resumed = self.changed = False
        self.changes: list[dict[str, Any]] = []
        self._failed: set[int] = set()
        self._lock: IO[str] | None = None
        self._holder = ""

    def hold(self, folder: Path) -> None:
        """Lock the folder of a version until :meth:`close`, so that other processes cannot resume the run.

        If another process holds the lock, :meth:`open` raises an error.
        """
        if not self.writes:
            return
        self.release()
        # a folder may be read-only
        with suppress(OSError):
            self._lock = (folder / "lock").open("a+")
            # forked processes may outlive this one
            locked = lock(self._lock, inherited=False)
            if locked is False:
                self._lock.seek(0)
                self._holder = self._lock.read().strip() or "another process"
            elif locked:
                self._lock.truncate(0)
                self._lock.write(f"process {os.getpid()} on {socket.gethostname()}")
                self._lock.flush()

    def release(self) -> None:
        """Unlock the folder that :meth:`hold` has locked."""
        if self._lock is not None:
            self._lock.close()

    def open(self, checkpoint: Path | None, history: list[dict[str, float]]) -> None:
        """Create a new version, or continue the version of a checkpoint with the rows of its completed rounds.

        Raises:
            UsageError: another process has locked this folder.
        """
        self.resumed = checkpoint is not None and resumes_in_place(checkpoint) and not self.changed
        if not self.writes:
            return
        hint = f"{self._holder} runs in this folder; wait for its end, or begin a new run without ckpt_path"
        require(not (self.resumed and self._holder), "ckpt_path", str(checkpoint), hint)
        self.source = checkpoint.parents[1] if checkpoint is not None and in_place(checkpoint) else None
        table = self._table_of(checkpoint.parents[1], history) if self.resumed and checkpoint else self._new_table()
        self._table, self.path = table, Path(table.log_dir)
        if not self.resumed:
            self.hold(self.path)
        self.checkpoints = CheckpointFolder(self.path / "checkpoints")
        if self.changes and not self.resumed:
            (self.path / "changes.yaml").write_text(yaml.safe_dump(self.changes, sort_keys=False), encoding="utf-8")
        if self.logger is True:
            # TensorBoard reads files of events in the order of their names, which contain the second of creation, then
            # a counter as text: within one second, it would read file 10 before file 9
            files = self.path.glob("events.out.tfevents.[0-9]*.*")
            seconds = [int(file.name.split(".")[3]) for file in files]
            time.sleep(min(max(max(seconds, default=0) + 1 - time.time(), 0), 1))
            where = (self.path.parents[1], self.path.parent.name, self.path.name)
            self.loggers = [TensorBoardLogger(*where, purge_step=len(history) or None)]
        elif self.logger is not False:
            self.loggers = [*self.logger] if isinstance(self.logger, list) else [self.logger]

    def log(self, metrics: Mapping[str, float], round_: int) -> None:
        """Write the metrics of a round.

        Raises:
            ClientError: the table cannot be written.
        """
        if self._table is not None:
            with naming_the_file(Path(self._table.log_dir) / "metrics.csv", round_):
                self._table.log_metrics(dict(metrics), step=round_)
        self.each(lambda logger: logger.log_metrics(dict(metrics), step=round_))

    def log_figure(self, name: str, figure: Any, round_: int) -> None:
        """Save a Matplotlib figure as ``figures/<name>.png``, with _ for /, and log it to loggers of images."""
        if self.path is None:
            return
        (self.path / "figures").mkdir(exist_ok=True)
        figure.savefig(self.path / "figures" / f"{name.replace('/', '_')}.png", dpi=120)
        figure.set_layout_engine("none")  # else each logger computes the layout again, which is slow
        self.each(lambda logger: loggers.log_figure(logger, name, figure, round_))

    @contextmanager
    def needing_room(self, server: Any) -> Iterator[None]:
        """Within this context, name the file, or else the folder, and the round in errors of a full disk.

        Raises:
            ClientError: the disk is full, or a limit of the file system is reached.
        """
        try:
            yield
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            raise _not_written(error, self.path or self.root, server.round) from None

    def close(self, status: str) -> None:
        """Finish the loggers; ``status`` is ``success`` or ``failed``."""
        self.each(lambda logger: logger.finalize(status))
        self.release()

    def each(self, call: Callable[[Logger], object]) -> None:
        """Call a function with each logger except the table; a failing logger only causes a warning."""
        for logger in self.loggers:
            try:
                call(logger)
            except Exception as error:
                if id(logger) not in self._failed:
                    text = f"{type(logger).__name__} fails, and the run continues: {text_of(error)}"
                    warnings.warn(f"logger: {text}", stacklevel=2)
                self._failed.add(id(logger))

    @property
    def summary_writers(self) -> list[Any]:
        """Return the TensorBoard writers of the loggers."""
        writers: list[Any] = []
        self.each(lambda logger: writers.extend([loggers.experiment(logger)] * loggers.is_tensorboard(logger)))
        return writers

    def _new_table(self) -> CSVLogger:
        while True:
            table = CSVLogger(self.root.parent, self.root.name, flush_logs_every_n_steps=1)
            # another process may begin a run at the same time, and choose the same version
            folder = Path(table.log_dir)
            with writing_into("trainer.default_root_dir", self.root.parent, "pass another folder"):
                folder.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                folder.mkdir()
                _ = table.experiment  # created now, since it warns about a folder with other files
                return table

    def _table_of(self, folder: Path, history: list[dict[str, float]]) -> CSVLogger:
        table = CSVLogger(folder.parents[1], folder.parent.name, folder.name, flush_logs_every_n_steps=1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns about the non-empty folder
            for metrics in history:
                table.log_metrics(dict(metrics), step=int(metrics["round"]))
        return table


@contextmanager
def naming_the_file(path: Path, round_: int) -> Iterator[None]:
    """Within this context, name the file and the round in errors of writing.

    Raises:
        ClientError: the file cannot be opened or written.
    """
    try:
        yield
    except OSError as error:
        raise _not_written(error, path, round_) from None


def _not_written(error: OSError, path: Path, round_: int) -> ClientError:
    text = f"round {round_}: {error.filename or path} cannot be written: {error.strerror or text_of(error)}"
    return ClientError(f"{text}; free some space, and resume from the last checkpoint")
