"""A run, as its folder tells it."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from fl_lightning.report.arrays import Arrays, load_arrays, read_arrays
from fl_lightning.report.metrics_csv import Row, read_metrics
from fl_lightning.yaml_files import read_yaml

State = Literal["finished", "running", "stopped", "failed"]
METRICS, ENVIRONMENT, CONFIG, PLAN, CHANGES = (
    *("metrics.csv", "environment.json", "config.yaml", "plan.npz"),
    "changes.yaml",
)
# a run still goes on, as far as one can see, while its last sign of life is younger than this many of its rounds ...
ROUNDS = 3
# ... or than so many seconds; the first round, which nobody has timed yet, has longer
SECONDS, FIRST = 120.0, 1800.0


@dataclass(frozen=True)
class Run:
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
    """

    name: str
    folder: Path | None = None
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    state: State = "finished"
    notes: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""
    number: int | None = None
    plan: str = ""
    machine_known: str = ""
    seconds_known: float | None = None

    @property
    def rounds(self) -> int:
        """How many rounds are done."""
        return int(self.rows[-1]["round"]) + 1 if self.rows else 0

    @property
    def max_rounds(self) -> int | None:
        """How many rounds it is to have; None where no config tells it."""
        return max_rounds(self.config)

    @property
    def seed(self) -> int:
        """Its seed; 0 where nothing tells it."""
        given = (self.number, self.config.get("seed_everything"), self.environment.get("seed"))
        return next((int(one) for one in given if isinstance(one, int) and not isinstance(one, bool)), 0)

    @property
    def plan_hash(self) -> str:
        """Hash of the partition; empty where nothing tells it."""
        return str(self.environment.get("plan_hash") or self.plan)

    @property
    def machine(self) -> str:
        """The processor or the GPUs, and the cores."""
        if self.machine_known or not self.environment:
            return self.machine_known
        gpus = self.environment.get("gpus")
        device = ", ".join(map(str, gpus)) if gpus else self.environment.get("processor", "")
        return f"{device}, {self.environment.get('cores', '?')} cores"

    @property
    def told(self) -> str:
        """What has become of it, in words."""
        of = f" of {self.max_rounds}" if self.max_rounds is not None and self.max_rounds != self.rounds else ""
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

    @cached_property
    def _arrays(self) -> dict[str, Arrays | None]:
        return {}

    def arrays(self, name: str) -> Arrays | None:
        """The measurements of a file in its folder; None where there is none, or it cannot be read."""
        if name not in self._arrays:
            path = None if self.folder is None else self.folder / name
            try:
                self._arrays[name] = read_arrays(path) if path is not None and path.is_file() else None
            except ValueError:
                self._arrays[name] = None
        return self._arrays[name]

    @cached_property
    def label_counts(self) -> Any:
        """Number of samples of each class at each client ``(K, C)``; None where that is not known."""
        path = None if self.folder is None else self.folder / PLAN
        try:
            counts = load_arrays(path).get("label_counts") if path is not None and path.is_file() else None
        except ValueError:
            return None
        return counts if counts is not None and counts.ndim == 2 and counts.size else None


def find_runs(root: Path) -> Iterator[Path]:
    """The folders of runs at and below a folder, in the order of their paths."""
    found = {path.parent for name in (METRICS, ENVIRONMENT) for path in root.rglob(name)}
    yield from sorted(found, key=natural)


def natural(path: Path) -> list[tuple[int, str]]:
    """What sorts paths so that version_10 comes after version_9."""
    parts: list[tuple[int, str]] = []
    for part in path.parts:
        head = part.rstrip("0123456789")
        parts.append((int(part[len(head) :] or -1), "") if head == "version_" else (-1, part))
    return parts


def read_run(folder: Path, name: str = "", now: float | None = None) -> Run:
    """Read the folder of a run; nothing in it is changed.

    Args:
        folder: the folder.
        name: what the run is called in the report, by default the end of its path.
        now: seconds since the epoch, by default the present ones.
    """
    notes: list[str] = []
    config = read_mapping(folder / CONFIG, notes)
    environment = read_mapping(folder / ENVIRONMENT, notes)
    rows, torn = rows_of(folder / METRICS, notes)
    if torn:
        notes.append(f"{METRICS}: {torn}; it is read up to there, {len(rows)} rounds")
    if (folder / CHANGES).is_file():
        notes += told_changes(folder / CHANGES)
    notes += told_failures(folder / "failures")
    for path in sorted(folder.glob("*.npz")):
        try:
            load_arrays(path)
        except ValueError as error:
            notes.append(f"{path.name} cannot be read and is left out: {error}")
    how = state_of(folder, rows, max_rounds(config), time.time() if now is None else now)
    called = name or "/".join(folder.parts[-2:])
    return Run(called, folder, config, environment, rows, how, tuple(notes))


def rows_of(path: Path, notes: list[str]) -> tuple[list[Row], str]:
    """The rows of a table of metrics, and where it is cut; none of a run that has not ended a round."""
    if not path.is_file():
        return [], ""
    try:
        return read_metrics(path)
    except (OSError, ValueError) as error:
        notes.append(f"{path.name} cannot be read: {getattr(error, 'strerror', None) or error}")
        return [], ""


def read_mapping(path: Path, notes: list[str]) -> dict[str, Any]:
    """What a file of YAML or JSON holds; empty, with a note, where it cannot be read."""
    if not path.is_file():
        return {}
    try:
        loaded = json.loads(path.read_text()) if path.suffix == ".json" else read_yaml(path)
    except (OSError, ValueError, RecursionError) as error:
        notes.append(f"{path.name} cannot be read: {' '.join(str(error).split())[:120]}")
        return {}
    return loaded if isinstance(loaded, dict) else {}


def told_changes(path: Path) -> list[str]:
    """What the ``changes.yaml`` of a run that resumed as another one says."""
    try:
        loaded = read_yaml(path) or []
        return [
            f"it resumed after {one['rounds_done']} rounds with changes: "
            + ", ".join(f"{key} from {value['before']} to {value['now']}" for key, value in one["changes"].items())
            for one in loaded
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return [f"{path.name} cannot be read: what was changed when it resumed is not known"]


def told_failures(folder: Path) -> list[str]:
    """The clients that failed in a run, as the files that repeat their visits tell them."""
    found = [path.stem.split("-") for path in sorted(folder.glob("round-*-client-*.pt"))]
    named = [f"client {client} in round {round_}" for _, round_, _, client in (one for one in found if len(one) == 4)]
    more = f" and {len(named) - 3} more" if len(named) > 3 else ""
    return [f"failed: {', '.join(named[:3])}{more}; see {folder.name}/"] if named else []


def max_rounds(config: Mapping[str, Any]) -> int | None:
    """How many rounds a config asks for; None where it does not say."""
    given = (config.get("trainer") or {}).get("max_rounds")
    return given if isinstance(given, int) else None


def state_of(folder: Path, rows: list[Row], wanted: int | None, now: float) -> State:
    """What has become of a run.

    It is finished once it has all its rounds, or once its final model was written after its last checkpoint, as where
    EarlyStopping ends it. Otherwise it is running as long as one of its files was changed a short while ago, measured
    by its own rounds, and stopped after that.
    """
    if wanted is not None and rows and int(rows[-1]["round"]) + 1 >= wanted:
        return "finished"
    last, model = changed_at(folder / "checkpoints" / "last.ckpt"), changed_at(folder / "checkpoints" / "model.ckpt")
    if model and model >= last:
        return "finished"
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
