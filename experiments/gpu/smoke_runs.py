"""Runs through the command line, in this process or another one, and comparisons of their results."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from parts import Program  # next to this file

sys.path.insert(0, str(Path.cwd() / "experiments/speed"))

import torch
from overhead import generate  # in experiments/speed

from fl_lightning.cli import main

# metrics that are equal in no two runs
MEASURED = ("time/", "memory/", "cost/")


def folder(program: Program, name: str) -> Path:
    """The folder of a run of this part."""
    return program.scratch / program.part.replace(":", "-") / name


def fit_command(program: Program, config: str, root: Path, **trainer: object) -> list[str]:
    """The arguments of a fit with one worker on the device of the program."""
    options = {"accelerator": program.accelerator, "devices": 1, "default_root_dir": root, **trainer}
    options["enable_progress_bar"] = "false"
    arguments = [part for key, value in options.items() for part in (f"--trainer.{key}", str(value))]
    return ["fit", "--config", f"experiments/{config}.yaml", *arguments]


def images(program: Program, number: int) -> Path:
    """A folder of generated images of 32 px, made once for all parts."""
    place = program.scratch / f"images-{number}"
    if not place.exists():
        partial = Path(tempfile.mkdtemp(dir=program.scratch))
        generate(partial, number, max(64, number // 4))
        with suppress(OSError):  # another part was faster
            partial.rename(place)
    return place


def run_here(arguments: list[str]) -> None:
    """Call the command line in this process."""
    try:
        main(arguments)
    except SystemExit as error:
        if error.code:
            raise RuntimeError(f"status {error.code} of {' '.join(arguments)}") from error


def start(arguments: list[str], **env: str) -> subprocess.Popen[bytes]:
    """Start the command line in another process, whose output is that of this one."""
    return subprocess.Popen([sys.executable, "cli.py", *arguments], env={**os.environ, **env})


def newest(root: Path) -> Path:
    """The newest version of the only run in a folder."""
    return max(root.glob("*/version_*"), key=lambda path: int(path.name.removeprefix("version_")))


def state(root: Path) -> dict[str, torch.Tensor]:
    path = newest(root) / "checkpoints" / "last.ckpt"
    return torch.load(path, map_location="cpu", weights_only=True)["state_dict"]


def metrics(root: Path) -> list[dict[str, float]]:
    with (newest(root) / "metrics.csv").open() as file:
        return [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]


def compare(first: Path, second: Path) -> dict[str, Any]:
    """Whether the last global models have the same bits, and the largest differences of weights and metrics."""
    a, b = state(first), state(second)
    gap_of_weights = max((a[name].double() - b[name].double()).abs().max().item() for name in a if a[name].numel())
    rows = list(zip(metrics(first), metrics(second), strict=True))
    gaps = [
        (abs(row[key] - other[key]), key)
        for row, other in rows
        for key in row.keys() & other.keys()
        if not key.startswith(MEASURED)
    ]
    gap, metric = max(gaps, default=(0.0, ""))
    return {
        "same_bits": a.keys() == b.keys() and all(map(same_bits, a.values(), b.values())),
        "gap_of_weights": gap_of_weights,
        "gap_of_metrics": gap,
        "metric": metric if gap else None,
        "accuracies": [row.get("test/accuracy") for row in rows[-1]],
    }


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    same_kind = a.dtype == b.dtype and a.shape == b.shape
    return same_kind and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
