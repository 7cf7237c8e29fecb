"""Read runs from their folders; a file that cannot be read is skipped, with a note of one line."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fl_lightning.report.configs import compact, data_set, deciding, max_rounds, method_names
from fl_lightning.storage.results import FitResult, History, RunState
from fl_lightning.storage.tempdirs import is_locked
from fl_lightning.utilities.errors import count, printable, text_of, truncate
from fl_lightning.utilities.yaml_files import parse_yaml

METRICS, ENVIRONMENT, CONFIG, PLAN = "metrics.csv", "environment.json", "config.yaml", "plan.npz"
MOST_ROUNDS = 2**31
STEPS = ("round", "step")
# larger values count as infinite, since their squares and sums would be
INFINITE = 1e100
# without locks, seconds after its last sign of life in which a run counts as running
PATIENCE = 1800.0


# ------------------------------------------------------------------ folders
def find_runs(root: Path, notes: list[str] | None = None) -> list[Path]:
    """Return the folders of runs at and below a folder, ordered by path.

    Args:
        root: the folder.
        notes: list to which a line is added for each folder that cannot be read.
    """
    unread: list[OSError] = []
    walked = os.walk(root, onerror=unread.append)
    folders = [Path(folder) for folder, _, files in walked if {METRICS, ENVIRONMENT} & {*files}]
    if notes is not None:
        for error in unread:
            notes.append(f"{printable(str(error.filename))} cannot be read: {why(error)}")
    return sorted(folders, key=natural)


def natural(path: Path) -> list[tuple[int, str]]:
    """Return a key that sorts version_10 after version_9."""
    key = []
    for part in path.parts:
        version = re.fullmatch("version_([0-9]+)", part)
        key.append((int(version[1]), "") if version else (-1, part))
    return key


def name_runs(runs: Sequence[FitResult]) -> None:
    """Name runs by their folders, relative to the deepest folder that contains all of them."""
    folders = {id(run): run.run_dir.resolve() for run in runs if run.run_dir is not None}
    if folders:
        common = os.path.commonpath([folder.parent.parent for folder in folders.values()])
        for run in runs:
            if id(run) in folders:
                run.name = printable(folders[id(run)].relative_to(common).as_posix())


def read_run(folder: Path) -> FitResult:
    """Read a run without changing its folder.

    Raises:
        ValueError: it has neither a config nor an environment nor a round that can be read.
    """
    notes: list[str] = []

    def read(file: str, by: Callable[[Path], Any], default: Any) -> Any:
        path = folder / file
        try:
            if not os.path.lexists(path):
                return default
            if path.is_file() or file == "failures":
                return by(path)
            raise ValueError("not a file")
        # a damaged file raises errors of a dozen kinds, of zlib, struct, tokenize and others
        except Exception as error:
            notes.append(f"{file} cannot be read and is skipped: {why(error)}")
            return default

    config = read(CONFIG, read_config, {})
    environment = read(ENVIRONMENT, read_environment, {})
    history, skipped = read(METRICS, read_metrics, (History(), 0))
    if skipped:
        notes.append(f"{METRICS}: {count(skipped, 'line')} cut or damaged, and skipped")
    if not (config or environment or history):
        raise ValueError("; ".join(notes) or "it is empty")
    notes += read("changes.yaml", read_changes, [])
    notes += read("failures", read_failures, [])
    read(PLAN, read_plan, None)
    num_rounds = max_rounds(config)
    state = state_of(folder, history, num_rounds)
    if skipped and state == "finished" and len(history) < (num_rounds or 0):
        state = "stopped"  # the last rounds are among the skipped lines
    settings, of_folder = deciding(config), folder.resolve().parts[-2:]
    # with their arguments, such as FedProx(mu=0.1)
    named = compact(settings)
    methods = filter(None, [named.get("method", "FedAvg"), named.get("trainer.server_optimizer")])
    # what the methods have cost up to the last round
    costs: list[dict[str, str]] = read("cost.csv", read_csv_by_round, ([], 0))[0]
    cost = {key: printable(text) for key, text in (costs[-1] if costs else {}).items() if text}
    seeds = [config.get("seed_everything"), environment.get("seed")]
    timed = [row["time/round"] for row in history[1:] if "time/round" in row]
    return FitResult(
        name=printable("/".join(of_folder)),
        history=history,
        run_dir=folder,
        seed=next((seed for seed in seeds if type(seed) is int), 0),
        state=state,
        method=", server ".join(methods) if config else of_folder[0],
        settings=settings,
        config=config,
        environment=environment,
        notes=notes,
        plan=printable(str(environment.get("plan_hash") or "")),
        machine=machine_of(environment),
        seconds=statistics.median(timed) if timed else None,
        cost={key: text for key, text in cost.items() if key not in STEPS},
    )


def why(error: BaseException) -> str:
    """Return the text of an error, on one line."""
    return truncate(getattr(error, "strerror", None) or text_of(error), 120)


def state_of(folder: Path, history: History, num_rounds: int | None) -> RunState:
    """Return the state of a run.

    A run is finished once it has all its rounds, or once its final model is newer than its last checkpoint, as after
    EarlyStopping. Otherwise it is running while a process holds its lock. Without locks, as on Windows, it is running
    if one of its files was changed within the last half hour.
    """

    def changed_at(name: str) -> float:
        path = folder / name
        return path.stat().st_mtime if path.exists() else 0.0

    model, checkpoint = changed_at("checkpoints/model.ckpt"), changed_at("checkpoints/last.ckpt")
    complete = num_rounds is not None and bool(history) and history[-1]["round"] + 1 >= num_rounds
    if complete or (model and model >= checkpoint):
        return "finished"
    running = is_locked(folder / "lock")
    if running is None:
        running = time.time() - max(checkpoint, *map(changed_at, (METRICS, ENVIRONMENT, CONFIG))) < PATIENCE
    return "running" if running else "stopped"


def machine_of(environment: Mapping[str, Any]) -> str:
    """Return the processor or the GPUs, and the number of cores."""
    device = ", ".join(environment.get("gpus") or [environment.get("processor", "")])
    return printable(f"{device}, {environment.get('cores', '?')} cores") if environment else ""


# ------------------------------------------------------------------ files
def read_config(path: Path) -> dict[str, Any]:
    """Return the config of a run, or raise any error if a report cannot use it."""
    config = parse_yaml(path.read_text(), path.name)
    if not isinstance(config, dict):
        raise ValueError("not a mapping")
    deciding(config), data_set(config), method_names(config), max_rounds(config)
    return config


def read_environment(path: Path) -> dict[str, Any]:
    """Return the environment of a run."""
    environment = json.loads(path.read_bytes())
    versions = environment.get("versions") or {}
    environment["versions"] = {str(key): str(value) for key, value in versions.items()}
    machine_of(environment)
    return environment


def read_csv_by_round(path: Path) -> tuple[list[dict[str, str]], int]:
    """Return the lines of a table by round, and the number of skipped lines."""
    # every complete line ends in a line break: a last line without one is cut, even if it ends in a number
    complete_lines, _, cut_line = path.read_text(errors="replace").rpartition("\n")
    head, *lines = csv.reader(io.StringIO(complete_lines)) if complete_lines else [[]]
    if not {"round", "step"} & set(head):
        raise ValueError("no column round")
    tags, num_skipped = list(map(printable, head)), 1 if cut_line else 0
    rows = []
    for line in lines:
        if len(line) == len(head):
            rows.append(dict(zip(tags, line, strict=True)))
        else:
            num_skipped += 1
    return rows, num_skipped


def read_metrics(path: Path) -> tuple[History, int]:
    """Return the metrics by round without empty cells, and the number of skipped lines."""
    lines, skipped = read_csv_by_round(path)
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


def read_changes(path: Path) -> list[str]:
    """Return a line for each time that a run resumed with changes."""
    lines = []
    for change in parse_yaml(path.read_text(), path.name) or []:
        keys = [f"{key} from {value['before']} to {value['now']}" for key, value in change["changes"].items()]
        lines.append(f"it resumed after {change['rounds_done']} rounds with changes: {', '.join(keys)}")
    return lines


def read_failures(folder: Path) -> list[str]:
    """Return a line about the clients that failed in a run, from the files that `replay` uses."""
    stems = [printable(path.stem) for path in sorted(folder.glob("*.pt"))]
    matches = filter(None, (re.fullmatch("round-(.+)-client-(.+)", stem) for stem in stems))
    clients = [f"client {client} in round {round_}" for round_, client in (match.groups() for match in matches)]
    and_more = f" and {len(clients) - 3} more" if len(clients) > 3 else ""
    return [f"failed: {', '.join(clients[:3])}{and_more}; see {folder.name}/"] if clients else []


def load_arrays(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a file by name: texts printable, and nan for numbers that are not finite."""
    with np.load(path, allow_pickle=False) as saved:
        loaded = {printable(name): saved[name] for name in saved.files}
    for name, array in loaded.items():
        if array.dtype.kind in "US":
            texts = [printable(str(text)) for text in array.ravel().tolist()]
            loaded[name] = np.array(texts, dtype=str).reshape(array.shape)
        elif array.dtype.kind == "f":
            loaded[name] = np.where(np.abs(array) < INFINITE, array, np.nan)
    return {name: array for name, array in loaded.items() if array.dtype.kind in "USfiub"}


def read_plan(path: Path) -> tuple[np.ndarray | None, dict[str, list[str]]]:
    """Return the samples of each class at each client (K, C), or None, and the names in a plan.

    The names are the ``class_names`` (C,) and the ``domains`` of the clients (K,).
    """
    loaded = load_arrays(path)
    counts = loaded.get("label_counts", np.zeros(0))
    if counts.size and (counts.ndim != 2 or not ((counts >= 0) & (counts < 2**53)).all()):
        raise ValueError(f"label_counts {counts.shape} of {counts.dtype} are not numbers of samples")
    names = {}
    for name in ("class_names", "domains"):
        if any(loaded.get(name, ())):
            names[name] = loaded[name].tolist()
    return counts if counts.size else None, names
