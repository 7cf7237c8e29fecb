"""What callbacks share that measure every few rounds and keep their numbers in a file of the run."""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from lightning.fabric.utilities.rank_zero import rank_zero_warn

from fl_lightning.callbacks.access import RunAccess
from fl_lightning.callbacks.base import Callback
from fl_lightning.errors import UsageError, require
from fl_lightning.storage.atomic_io import set_aside, write_atomically

if TYPE_CHECKING:
    from fl_lightning.plotting.figures import Plot, Runs

# what reading a file that was altered, cut or removed may raise
UNREADABLE = (
    *(OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, EOFError, MemoryError, RuntimeError),
    *(zipfile.BadZipFile, zlib.error),
)


class Series:
    """Arrays by name that grow by an entry a measurement, kept in an ``.npz`` file.

    A checkpoint must not grow with the rounds: it holds the length and the digest of each array, by which a run that
    resumes knows whether the file is still that of its checkpoint.
    """

    def __init__(self) -> None:
        self.values: dict[str, list[np.ndarray]] = {}
        self._digests: dict[str, Any] = {}

    def __bool__(self) -> bool:
        return bool(self.values)

    def append(self, name: str, value: Any) -> None:
        """Add an entry; the entries of a name are all of one shape."""
        array = np.asarray(value)
        self.values.setdefault(name, []).append(array)
        self._digests.setdefault(name, hashlib.sha256()).update(array.tobytes())

    def arrays(self) -> dict[str, np.ndarray]:
        """Each name's entries as one array ``(R, ...)``."""
        return {name: np.stack(values) for name, values in self.values.items()}

    def save(self, path: Path) -> None:
        """Write the file atomically."""
        arrays: dict[str, Any] = self.arrays()
        write_atomically(path, partial(np.savez, **arrays))

    def stamps(self) -> dict[str, list[Any]]:
        """The length and the digest of each array."""
        return {name: [len(self.values[name]), one.hexdigest()] for name, one in self._digests.items()}

    def read(self, path: Path, stamps: dict[str, Any]) -> None:
        """Append the entries of the rounds before a checkpoint; none, with a warning, where the file is not theirs."""
        if not stamps:
            return
        try:
            with np.load(path, allow_pickle=False) as saved:
                known = {name: saved[name][:number] for name, (number, _) in stamps.items()}
            same = all(hashlib.sha256(known[name].tobytes()).hexdigest() == one for name, (_, one) in stamps.items())
        except UNREADABLE:
            same = False
        if not same:
            rank_zero_warn(f"{path} was altered or is missing: it begins anew with the rounds after the checkpoint")
            return
        for name, entry in ((name, entry) for name, entries in known.items() for entry in entries):
            self.append(name, entry)


class Periodic(Callback):
    """A callback that acts every few rounds and in the last one.

    Args:
        every_n_rounds: rounds from one time to the next, at least 1; the last round is one too.
    """

    def __init__(self, every_n_rounds: int = 10) -> None:
        require(every_n_rounds >= 1, f"{type(self).__name__}.every_n_rounds", every_n_rounds, "give 1 or more")
        self.every_n_rounds = every_n_rounds

    def on_fit_start(self, trainer: RunAccess) -> None:
        self._last_round = trainer.max_rounds - 1

    def due(self, round_: int) -> bool:
        """Whether it acts in this round."""
        return round_ % self.every_n_rounds == 0 or round_ == self._last_round


class Measurement(Periodic):
    """A callback that measures every few rounds and in the last one, and keeps its numbers in a file of the run.

    A subclass names its :attr:`file`, asks :meth:`due`, and gives :meth:`keep` its arrays at the end of a round
    in which it has measured; those that it appends to :attr:`series` before are of that round, too.

    Args:
        every_n_rounds: rounds from one measurement to the next, at least 1; the last round has one too.

    Attributes:
        file: name of the ``.npz`` file in the run's folder.
        series: what has been measured so far: ``rounds`` (R,), and arrays of the subclass whose first axis is R.
    """

    file: ClassVar[str]

    def on_fit_start(self, trainer: RunAccess) -> None:
        super().on_fit_start(trainer)
        self.series, self._source, self._continues = Series(), trainer.resumed_from, False

    def on_fit_end(self, trainer: RunAccess) -> None:
        if self.series:
            self.draw(trainer)

    def plot(self, runs: Runs) -> Iterable[Plot]:
        """Yield the figures of the run, drawn at its end; none by default for a file of your own.

        Args:
            runs: the arrays of the file, as ``{"": [arrays]}``; a report gives the plot functions of this package the
                arrays of each seed by the label of the runs.
        """
        from fl_lightning.plotting.plots import PLOTS

        return PLOTS[self.file][1](runs) if self.file in PLOTS else ()

    def draw(self, trainer: RunAccess, more: Mapping[str, np.ndarray] | None = None) -> None:
        """Log the figures, on the worker that writes; ``more`` are arrays for the figures that the file lacks."""
        if trainer.run_dir is not None:
            from fl_lightning.plotting.figures import figures

            for name, figure in figures(self.plot({"": [{**self.series.arrays(), **(more or {})}]})):
                trainer.log_figure(name, figure)

    def keep(self, trainer: RunAccess, measured: Mapping[str, Any] | None = None) -> None:
        """Append what was ``measured``, by name, note the round of all that was appended, and write the file."""
        for name, value in {**(measured or {}), "rounds": np.array(trainer.server.round)}.items():
            self.series.append(name, value)
        self.save(trainer)

    def save(self, trainer: RunAccess) -> None:
        """Write the file, on the worker that writes."""
        if trainer.run_dir is None:
            return
        if not self._continues:
            keep_other(trainer.run_dir / self.file)
            self._continues = True
        self.series.save(trainer.run_dir / self.file)

    def state_dict(self) -> dict[str, Any]:
        return {"stamps": self.series.stamps()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._source is not None:
            self.series.read(self._source / self.file, state.get("stamps", {}))
            self._continues = bool(self.series)


def keep_other(path: Path) -> None:
    """Rename a file that another callback, or an earlier part of the run, has written under the name of a new one."""
    kept = set_aside(path)
    if kept is not None:
        rank_zero_warn(f"{path} has numbers that this callback does not continue: it is now {kept.name}")


def require_test_data(trainer: RunAccess, callback: Callback) -> None:
    """Refuse a callback that measures on test data, where there are none.

    Raises:
        UsageError: there are none.
    """
    hint = "it has no test data, on which the models are compared; give it a test_dataloader"
    key = f"{type(callback).__name__} with the data"
    require(trainer.has_data("test"), key, type(trainer.data).__name__, hint)


def has_test_data_of(trainer: RunAccess, callback: Callback, client: int) -> bool:
    """Whether a client has test examples of its own.

    Raises:
        UsageError: the data module gives no client test data of its own; names the callback that needs them.
    """
    try:
        return trainer.has_data("test", client)
    except UsageError as error:
        who = f"{type(callback).__name__} needs the test data of each client"
        raise UsageError(f"{who}: {error}, or take the callback out") from error
