"""A run, as its folder tells it."""

from __future__ import annotations

import csv
import io
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fl_lightning.errors import printable
from fl_lightning.records.temporary import is_locked
from fl_lightning.report.reading import (
    Arrays,
    RoundMetrics,
    check_config_values,
    check_environment,
    load_arrays,
    read_arrays,
    read_lines,
    read_metrics,
    read_plain,
    why,
)

RunState = Literal["finished", "running", "stopped", "failed"]
METRICS, ENVIRONMENT, CONFIG = "metrics.csv", "environment.json", "config.yaml"
PLAN, CHANGES, COST, LOCK = "plan.npz", "changes.yaml", "cost.csv", "lock"
# numbers of a partition that are drawn
MOST_COUNTS = 2_000_000
# without locks, a run still goes on, as far as one can see, while its last sign of life is younger than this many of
# its rounds ...
ROUNDS = 3
# ... or than so many seconds; the first round, which nobody has timed yet, has longer
SECONDS, FIRST = 120.0, 1800.0


@dataclass(frozen=True)
class ReportedRun:
    """A run.

    Args:
        name: what it is called in the report.
        folder: its folder; None where its numbers come from a study or a file of cells.
        config: its resolved config; empty where it has none.
        environment: what ``environment.json`` holds.
        rows: its metrics, a row for each round.
        state: what has become of it.
        notes: what was wrong with its files.
        labels: its labels in a study; empty for a run of its own.
        reason: why it failed.
        number: its seed, where ``config`` and ``environment`` do not tell it.
        plan: hash of its partition, where ``environment`` does not tell it.
        machine: what it ran on, where ``environment`` does not tell it.
        seconds_known: seconds of a round, where the rows do not tell them.
        cost: the last line of ``cost.csv``; empty where it has none.
    """

    name: str
    folder: Path | None = None
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    rows: list[RoundMetrics] = field(default_factory=list)
    state: RunState = "finished"
    notes: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""
    number: int | None = None
    plan: str = ""
    machine_known: str = ""
    seconds_known: float | None = None
    cost: dict[str, str] = field(default_factory=dict)
    _arrays: dict[str, Arrays] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def rounds(self) -> int:
        """How many rounds are done."""
        return int(self.rows[-1]["round"]) + 1 if self.rows else 0

    @property
    def seed(self) -> int:
        """Its seed; 0 where nothing tells it."""
        seeds = (self.number, self.config.get("seed_everything"), self.environment.get("seed"))
        return next((seed for seed in seeds if type(seed) is int), 0)

    @property
    def plan_hash(self) -> str:
        """Hash of the partition; empty where nothing tells it."""
        return printable(str(self.environment.get("plan_hash") or self.plan))

    @property
    def machine(self) -> str:
        """The processor or the GPUs, and the cores."""
        if self.machine_known or not self.environment:
            return self.machine_known
        gpus = self.environment.get("gpus")
        device = ", ".join(map(str, gpus)) if gpus else self.environment.get("processor", "")
        return printable(f"{device}, {self.environment.get('cores', '?')} cores")

    @property
    def told(self) -> str:
        """What has become of it, in words."""
        wanted = max_rounds(self.config)
        of = f" of {wanted}" if wanted not in (None, self.rounds) else ""
        done = f"{self.rounds}{of} round{'s' * (f'{self.rounds}{of}' != '1')}"
        words = {"finished": f"finished, {done}", "running": f"running, {done} so far", "stopped": f"stopped, {done}"}
        return words.get(self.state, f"failed, {done}")

    def values(self, tag: str) -> dict[int, float]:
        """A metric by round."""
        return {int(row["round"]): row[tag] for row in self.rows if tag in row}

    @property
    def seconds(self) -> float | None:
        """Median seconds of a round, without the first; None where there are too few rounds."""
        known = [row["time/round"] for row in self.rows[1:] if "time/round" in row]
        return statistics.median(known) if known else self.seconds_known

    def files(self, ending: str) -> list[str]:
        """The names of the files in its folder with an ending."""
        return sorted(path.name for path in self.folder.glob(f"*{ending}")) if self.folder is not None else []

    def arrays(self, name: str) -> Arrays:
        """The measurements of a file in its folder; empty where there is none, or it cannot be read."""
        if name not in self._arrays:
            try:
                self._arrays[name] = Arrays() if self.folder is None else read_arrays(self.folder / name)
            except ValueError:
                self._arrays[name] = Arrays()
        return self._arrays[name]

    @cached_property
    def label_counts(self) -> Any:
        """Number of samples of each class at each client ``(K, C)``; None where that is not known."""
        try:
            return None if self.folder is None else counts_of(self.folder / PLAN)
        except (OSError, ValueError):
            return None

    @cached_property
    def names_in_plan(self) -> dict[str, list[str]]:
        """The ``class_names`` (C,) and the ``domains`` of the clients (K,), where the plan has any."""
        try:
            arrays = {} if self.folder is None else load_arrays(self.folder / PLAN)
        except ValueError:
            arrays = {}
        texts = {name: arrays[name] for name in ("class_names", "domains") if name in arrays}
        return {
            name: [printable(str(text)) for text in array.tolist()]
            for name, array in texts.items()
            if array.ndim == 1 and array.dtype.kind == "U" and any(array.tolist())
        }


def find_runs(root: Path, notes: list[str] | None = None) -> list[Path]:
    """The folders of runs at and below a folder, in the order of their paths.

    Args:
        root: the folder.
        notes: gets a line for each folder that cannot be looked into.
    """
    unread: list[OSError] = []
    walked = os.walk(root, onerror=unread.append)
    found = [Path(folder) for folder, folders, files in walked if {METRICS, ENVIRONMENT} & {*folders, *files}]
    if notes is not None:
        notes += [f"{printable(str(error.filename))} cannot be looked into: {why(error)}" for error in unread]
    return sorted(found, key=natural)


def natural(path: Path) -> list[tuple[int, str]]:
    """What sorts paths so that version_10 comes after version_9."""
    parts: list[tuple[int, str]] = []
    for part in path.parts:
        head = part.rstrip("0123456789")
        parts.append((int(part[len(head) :] or -1), "") if head == "version_" else (-1, part))
    return parts


def read_run(folder: Path, name: str = "", now: float | None = None) -> ReportedRun:
    """Read the folder of a run; nothing in it is changed. What cannot be read is left out, and is a note.

    Args:
        folder: the folder.
        name: what the run is called in the report, by default the end of its path.
        now: seconds since the epoch, by default the present ones.

    Raises:
        OSError: the folder is gone.
        ValueError: none of its files can be read.
    """
    notes: list[str] = []

    def read(file: str, by: Callable[[Path], Any], default: Any) -> Any:
        try:
            return by(folder / file) if os.path.lexists(folder / file) else default
        except (OSError, ValueError) as error:
            notes.append(f"{printable(file)} cannot be read and is left out: {why(error)}")
            return default

    config = read(CONFIG, partial(read_mapping, check=check_config_values), {})
    environment = read(ENVIRONMENT, partial(read_mapping, check=check_environment), {})
    rows, torn = read(METRICS, read_metrics, ([], ""))
    if torn:
        notes.append(f"{METRICS}: {torn}; it is read up to there, {len(rows)} rounds")
    notes += read(CHANGES, told_changes, [])
    notes += told_failures(folder / "failures")
    cost = read(COST, cost_of, {})
    for path in sorted(folder.glob("*.npz")):
        read(path.name, counts_of if path.name == PLAN else read_arrays, None)
    if not os.listdir(folder) or (notes and not (config or environment or rows)):
        raise ValueError("; ".join(notes) or "it is empty")
    how = state_of(folder, rows, max_rounds(config), time.time() if now is None else now)
    called = name or printable("/".join(folder.parts[-2:]))
    return ReportedRun(called, folder, config, environment, rows, how, tuple(notes), cost=cost)


def read_mapping(path: Path, check: Callable[[Mapping[str, Any]], None]) -> dict[str, Any]:
    """What a file of YAML or JSON holds.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no mapping, or ``check`` refuses it.
    """
    loaded = read_plain(path)
    if not isinstance(loaded, dict):
        raise ValueError("it holds no mapping")
    check(loaded)
    return loaded


def counts_of(path: Path) -> np.ndarray | None:
    """Number of samples of each class at each client ``(K, C)`` by a plan; None where it does not tell.

    Raises:
        ValueError: it cannot be read, or its numbers are none of samples.
    """
    counts = load_arrays(path).get("label_counts")
    if counts is None or not counts.size:
        return None
    if counts.ndim != 2 or counts.dtype.kind not in "iuf" or not ((counts >= 0) & (counts < 2**53)).all():
        raise ValueError(f"label_counts {counts.shape} of {counts.dtype} are no numbers of samples")
    if counts.size > MOST_COUNTS:
        raise ValueError(f"label_counts has {counts.size} entries, more than {MOST_COUNTS}")
    return counts


def cost_of(path: Path) -> dict[str, str]:
    """The last line of a ``cost.csv``.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no table of rounds.
    """
    try:
        head, *lines = csv.reader(io.StringIO(read_lines(path), newline=""), strict=True)
    except csv.Error as error:
        raise ValueError(str(error)) from error
    if "round" not in head or any(len(line) != len(head) for line in lines):
        raise ValueError("it is no table of rounds")
    last = zip(map(printable, head), map(printable, lines[-1]), strict=True) if lines else ()
    return {key: value for key, value in last if key and value and key not in ("round", "step")}


def told_changes(path: Path) -> list[str]:
    """What the ``changes.yaml`` of a run that resumed as another one says.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no list of changes.
    """
    try:
        return [
            f"it resumed after {change['rounds_done']} rounds with changes: "
            + ", ".join(f"{key} from {value['before']} to {value['now']}" for key, value in change["changes"].items())
            for change in read_plain(path) or []
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError("it is no list of changes") from error


def told_failures(folder: Path) -> list[str]:
    """The clients that failed in a run, as the files that repeat their visits tell them."""
    names = [printable(path.stem).split("-") for path in sorted(folder.glob("round-*-client-*.pt"))]
    named = [f"client {parts[3]} in round {parts[1]}" for parts in names if len(parts) == 4]
    more = f" and {len(named) - 3} more" if len(named) > 3 else ""
    return [f"failed: {', '.join(named[:3])}{more}; see {folder.name}/"] if named else []


def max_rounds(config: Mapping[str, Any]) -> int | None:
    """How many rounds a config asks for; None where it does not say."""
    number = (config.get("trainer") or {}).get("max_rounds")
    return number if type(number) is int and number >= 0 else None


def state_of(folder: Path, rows: list[RoundMetrics], wanted: int | None, now: float) -> RunState:
    """What has become of a run.

    It is finished once it has all its rounds, or once its final model was written after its last checkpoint, as where
    EarlyStopping ends it. Otherwise it is running as long as a process holds its lock, and stopped after that. Where
    locks cannot be asked for, as on Windows, it is running as long as one of its files was changed a short while ago,
    measured by its own rounds.
    """
    if wanted is not None and rows and int(rows[-1]["round"]) + 1 >= wanted:
        return "finished"
    last, model = changed_at(folder / "checkpoints" / "last.ckpt"), changed_at(folder / "checkpoints" / "model.ckpt")
    if model and model >= last:
        return "finished"
    held = is_locked(folder / LOCK)
    if held is not None:
        return "running" if held else "stopped"
    signs = [changed_at(folder / name) for name in (METRICS, ENVIRONMENT, CONFIG, "checkpoints")]
    longest = max((row.get("time/round", 0.0) for row in rows), default=None)
    patience = FIRST if longest is None else max(SECONDS, ROUNDS * longest)
    return "running" if now - max(*signs, last) < patience else "stopped"


def changed_at(path: Path) -> float:
    """When a file was changed last, in seconds since the epoch; 0 where there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
