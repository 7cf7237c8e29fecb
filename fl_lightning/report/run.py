"""A run, read from its folder. A file that cannot be read is left out, with a note of one line."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fl_lightning.errors import clipped, count, printable, text_of
from fl_lightning.records.temporary import is_locked
from fl_lightning.report.configs import data_set, flat_config, max_rounds, method_names
from fl_lightning.results import History
from fl_lightning.yaml_files import parse_yaml

RunState = Literal["finished", "running", "stopped", "failed"]
METRICS, ENVIRONMENT, CONFIG = "metrics.csv", "environment.json", "config.yaml"
PLAN, CHANGES, COST, LOCK = "plan.npz", "changes.yaml", "cost.csv", "lock"
# bytes of a table or of arrays, and of a file of YAML or JSON
LARGEST, LARGEST_TEXT = 2**29, 2**22
# entries of a partition that are drawn
MOST_COUNTS = 2_000_000
# no run has as many rounds
MOST_ROUNDS = 2**31
# larger values are no measurements, and their squares and sums would be infinite
INFINITE = 1e100
# without locks, seconds after its last sign of life in which a run counts as running
PATIENCE = 1800.0


@dataclass(frozen=True)
class Arrays:
    """The arrays of a file of measurements.

    Args:
        values: arrays of numbers by name, each with an entry for each of its rounds along the first axis.
        rounds: the rounds of each array.
        names: lists of names, such as those of layers.
        others: the shapes of arrays that have no entry for each round, or no numbers.
        problem: why the file cannot be read; empty where it can.
    """

    values: dict[str, np.ndarray] = field(default_factory=dict)
    rounds: dict[str, np.ndarray] = field(default_factory=dict)
    names: dict[str, list[str]] = field(default_factory=dict)
    others: dict[str, tuple[int, ...]] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True, eq=False)
class ReportedRun:
    """A run.

    Args:
        name: its name in the report.
        folder: its folder; None where its numbers come from a study or a file of cells.
        config: its resolved config; empty where it has none.
        environment: the contents of ``environment.json``.
        rows: its metrics by round.
        state: whether it is ``finished``, ``running``, ``stopped`` or ``failed``.
        seed: its seed; 0 where nothing tells it.
        notes: what could not be read, and what else is to be said of it.
        labels: its labels in a study; empty for a run of its own.
        reason: why it failed.
        plan_hash: hash of its partition; empty where nothing tells it.
        machine: the processor or the GPUs, and the cores.
        seconds: median seconds of a round, without the first; None where there are too few rounds.
        cost: the last line of ``cost.csv``; empty where it has none.
        label_counts: number of samples of each class at each client ``(K, C)``; None where nothing tells it.
        names_in_plan: the ``class_names`` (C,) and the ``domains`` of the clients (K,), where the plan has any.
    """

    name: str
    folder: Path | None = None
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    rows: History = field(default_factory=History)
    state: RunState = "finished"
    seed: int = 0
    notes: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""
    plan_hash: str = ""
    machine: str = ""
    seconds: float | None = None
    cost: dict[str, str] = field(default_factory=dict)
    label_counts: Any = None
    names_in_plan: dict[str, list[str]] = field(default_factory=dict)
    _arrays: dict[str, Arrays] = field(default_factory=dict, init=False, repr=False)

    @property
    def rounds(self) -> int:
        """How many rounds are done."""
        return int(self.rows[-1]["round"]) + 1 if self.rows else 0

    @property
    def told(self) -> str:
        """Its state and its rounds, in words."""
        wanted = max_rounds(self.config)
        of = f" of {wanted}" if wanted not in (None, self.rounds) else ""
        done = f"{self.rounds}{of} round{'s' * (f'{self.rounds}{of}' != '1')}"
        return f"{self.state}, {done}{' so far' * (self.state == 'running')}"

    def values(self, tag: str) -> dict[int, float]:
        """A metric by round."""
        return {int(row["round"]): row[tag] for row in self.rows if tag in row}

    def files(self, ending: str) -> list[str]:
        """The names of the files in its folder with an ending."""
        return sorted(path.name for path in self.folder.glob(f"*{ending}")) if self.folder is not None else []

    def arrays(self, name: str) -> Arrays:
        """The measurements of a file in its folder; empty where there is none, or it cannot be read."""
        if name not in self._arrays:
            try:
                self._arrays[name] = Arrays() if self.folder is None else read_arrays(self.folder / name)
            # a damaged archive raises errors of a dozen kinds, of zlib, struct, tokenize and others
            except Exception as error:
                self._arrays[name] = Arrays(problem=f"cannot be read and is left out: {why(error)}")
        return self._arrays[name]


def find_runs(root: Path, notes: list[str] | None = None) -> list[Path]:
    """The folders of runs at and below a folder, in the order of their paths.

    Args:
        root: the folder.
        notes: gets a line for each folder that cannot be looked into.
    """
    unread: list[OSError] = []
    walked = os.walk(root, onerror=unread.append)
    folders = [Path(folder) for folder, _, files in walked if METRICS in files or ENVIRONMENT in files]
    if notes is not None:
        notes += [f"{printable(str(error.filename))} cannot be looked into: {why(error)}" for error in unread]
    return sorted(folders, key=natural)


def natural(path: Path) -> list[tuple[int, str]]:
    """What sorts paths so that version_10 comes after version_9."""
    versions = [re.fullmatch("version_([0-9]+)", part) for part in path.parts]
    return [(int(one[1]), "") if one else (-1, part) for one, part in zip(versions, path.parts, strict=True)]


def read_run(folder: Path, name: str = "") -> ReportedRun:
    """Read the folder of a run; nothing in it is changed.

    Args:
        folder: the folder.
        name: its name in the report, by default the end of its path.

    Raises:
        ValueError: it has neither a config nor an environment nor a round that can be read.
    """
    notes: list[str] = []

    def read(file: str, by: Callable[[Path], Any], default: Any) -> Any:
        path = folder / file
        try:
            return by(path) if os.path.lexists(path) else default
        # as for arrays; and each reader takes from a file what a report asks of it, which may be of another kind
        except Exception as error:
            notes.append(f"{file} cannot be read and is left out: {why(error)}")
            return default

    config = read(CONFIG, read_config, {})
    environment = read(ENVIRONMENT, read_environment, {})
    rows, skipped = read(METRICS, read_metrics, (History(), 0))
    if skipped:
        notes.append(f"{METRICS}: {count(skipped, 'line')} cut or damaged, and left out")
    if not (config or environment or rows):
        raise ValueError("; ".join(notes) or "it is empty")
    notes += read(CHANGES, told_changes, [])
    notes += told_failures(folder / "failures")
    counts, names = read(PLAN, read_plan, (None, {}))
    if counts is not None and counts.size > MOST_COUNTS:
        notes.append(f"{PLAN}: label_counts has {counts.size} entries, more than {MOST_COUNTS}, and is not drawn")
        counts = None
    cost = read(COST, read_cost, {})
    timed = [row["time/round"] for row in rows[1:] if "time/round" in row]
    return ReportedRun(
        name=name or printable("/".join(folder.parts[-2:])),
        folder=folder,
        config=config,
        environment=environment,
        rows=rows,
        state=state_of(folder, rows, max_rounds(config)),
        seed=next((one for one in (config.get("seed_everything"), environment.get("seed")) if type(one) is int), 0),
        notes=tuple(notes),
        plan_hash=printable(str(environment.get("plan_hash") or "")),
        machine=machine_of(environment),
        seconds=statistics.median(timed) if timed else None,
        cost=cost,
        label_counts=counts,
        names_in_plan=names,
    )


def why(error: BaseException) -> str:
    """What is wrong with a file, on one line."""
    return clipped(getattr(error, "strerror", None) or text_of(error), 120)


def state_of(folder: Path, rows: History, wanted: int | None) -> RunState:
    """What has become of a run.

    It is finished once it has all its rounds, or once its final model was written after its last checkpoint, as where
    EarlyStopping ends it. Otherwise it is running as long as a process holds its lock, and stopped after that. Where
    locks cannot be asked for, as on Windows, it is running as long as one of its files was changed a short while ago.
    """

    def changed_at(name: str) -> float:
        path = folder / name
        return path.stat().st_mtime if path.exists() else 0.0

    model, last = changed_at("checkpoints/model.ckpt"), changed_at("checkpoints/last.ckpt")
    all_done = wanted is not None and bool(rows) and rows[-1]["round"] + 1 >= wanted
    if all_done or (model and model >= last):
        return "finished"
    held = is_locked(folder / LOCK)
    if held is None:
        held = time.time() - max(last, *map(changed_at, (METRICS, ENVIRONMENT, CONFIG))) < PATIENCE
    return "running" if held else "stopped"


def machine_of(environment: Mapping[str, Any]) -> str:
    """The processor or the GPUs, and the cores; empty where nothing tells them."""
    device = ", ".join(environment.get("gpus") or [environment.get("processor", "")])
    return printable(f"{device}, {environment.get('cores', '?')} cores") if environment else ""


# ------------------------------------------------------------------ readers of files; they raise any error
def read_file(path: Path, largest: int = LARGEST_TEXT) -> bytes:
    """The contents of a file; a pipe would be waited for."""
    if not path.is_file() or path.stat().st_size > largest:
        raise ValueError(f"it is no file of at most {largest} bytes")
    return path.read_bytes()


def read_config(path: Path) -> dict[str, Any]:
    """The config of a run, of which a report can be made."""
    config = parse_yaml(read_file(path).decode(), path.name)
    # what a report asks of a config, so that one of another shape is left out here
    flat_config(config), data_set(config), method_names(config), max_rounds(config)
    return config


def read_environment(path: Path) -> dict[str, Any]:
    """What a run ran on."""
    environment = json.loads(read_file(path))
    versions = environment.get("versions") or {}
    environment["versions"] = {str(key): str(value) for key, value in versions.items()}
    machine_of(environment)
    return environment


def read_table(path: Path) -> tuple[list[dict[str, str]], int]:
    """The lines of a table by round, and how many are left out."""
    # whoever writes ends each line: what comes after the last end is cut, however much it looks like a number
    whole, _, rest = read_file(path, LARGEST).decode(errors="replace").rpartition("\n")
    head, *lines = csv.reader(io.StringIO(whole)) if whole else [[]]
    if not {"round", "step"} & set(head):
        raise ValueError("it has no column round")
    tags, complete = list(map(printable, head)), [line for line in lines if len(line) == len(head)]
    return [dict(zip(tags, line, strict=True)) for line in complete], len(lines) - len(complete) + bool(rest)


def read_metrics(path: Path) -> tuple[History, int]:
    """The metrics by round, without the cells that are empty, and how many lines are left out."""
    lines, skipped = read_table(path)
    rows: dict[int, dict[str, float]] = {}
    for line in lines:
        try:
            row = {tag: float(cell) for tag, cell in line.items() if cell}
            step = row.pop("step", math.nan)
            round_ = int(row.setdefault("round", step))
            if round_ != row["round"] or not 0 <= round_ < MOST_ROUNDS:
                raise ValueError("no run has such a round")
            row["round"] = round_
            rows[round_] = row
        except (ValueError, OverflowError):
            skipped += 1
    return History(rows.values()), skipped


def read_cost(path: Path) -> dict[str, str]:
    """The last line of a ``cost.csv``."""
    lines, _ = read_table(path)
    last = lines[-1] if lines else {}
    return {key: printable(value) for key, value in last.items() if key and value and key not in ("round", "step")}


def told_changes(path: Path) -> list[str]:
    """The changes with which a run resumed, a line for each time."""
    return [
        f"it resumed after {change['rounds_done']} rounds with changes: "
        + ", ".join(f"{key} from {value['before']} to {value['now']}" for key, value in change["changes"].items())
        for change in parse_yaml(read_file(path).decode(), path.name) or []
    ]


def told_failures(folder: Path) -> list[str]:
    """The clients that failed in a run, by the files that repeat their visits."""
    parts = [re.fullmatch("round-(.+)-client-(.+)", printable(path.stem)) for path in sorted(folder.glob("*.pt"))]
    named = [f"client {one[2]} in round {one[1]}" for one in parts if one]
    more = f" and {len(named) - 3} more" if len(named) > 3 else ""
    return [f"failed: {', '.join(named[:3])}{more}; see {folder.name}/"] if named else []


def load_arrays(path: Path, *wanted: str) -> dict[str, np.ndarray]:
    """The arrays of a file by name: all, or those that are wanted."""
    if not path.is_file():
        raise ValueError("it is no file")
    with np.load(path, allow_pickle=False) as saved:
        if sum(member.file_size for member in saved.zip.infolist()) > LARGEST:
            raise ValueError(f"its arrays have more than {LARGEST} bytes")
        return {printable(name): saved[name] for name in saved.files if not wanted or name in wanted}


def read_plan(path: Path) -> tuple[np.ndarray | None, dict[str, list[str]]]:
    """Samples of each class at each client ``(K, C)``, where a plan tells them, and the names in it."""
    loaded = load_arrays(path, "label_counts", "class_names", "domains")
    counts = loaded.pop("label_counts", np.zeros(0))
    if counts.size and (counts.ndim != 2 or not ((counts >= 0) & (counts < 2**53)).all()):
        raise ValueError(f"label_counts {counts.shape} of {counts.dtype} are no numbers of samples")
    texts = {name: array for name, array in loaded.items() if array.ndim == 1 and array.dtype.kind == "U"}
    names = {name: [printable(str(text)) for text in array.tolist()] for name, array in texts.items() if any(array)}
    return counts if counts.size else None, names


def read_arrays(path: Path) -> Arrays:
    """The measurements in a file; none where it has no array ``rounds``, so that it holds something else."""
    made, loaded = Arrays(), load_arrays(path)
    if "rounds" not in loaded:
        return made
    whole = {name: array for name, array in loaded.items() if array.ndim == 1 and array.dtype.kind in "iu"}
    clocks = {name: array for name, array in whole.items() if name == "rounds" or name.endswith("_rounds")}
    if "rounds" not in clocks or any(((one < 0) | (one >= MOST_ROUNDS)).any() for one in clocks.values()):
        raise ValueError("its rounds are no whole numbers from 0")
    for name, array in loaded.items():
        # local_classifier has the rounds of local_rounds
        own = clocks.get(f"{name.split('_')[0]}_rounds", clocks["rounds"])
        fitting = next((one for one in (own, *clocks.values()) if array.ndim and len(one) == len(array) > 0), None)
        if array.dtype.kind in "US":
            # names are the same in every measurement; those of pairs are one
            last = array[-1] if array.ndim > 1 and len(array) else np.atleast_1d(array)
            texts = (" to ".join(map(str, entry)) if isinstance(entry, list) else str(entry) for entry in last.tolist())
            made.names[name] = list(map(printable, texts))
        elif array.dtype.kind not in "fiub" or fitting is None:
            made.others[name] = array.shape
        elif name not in clocks:
            made.values[name] = np.where(np.abs(array) < INFINITE, array, np.nan)
            made.rounds[name] = fitting.astype(int)
    return made
