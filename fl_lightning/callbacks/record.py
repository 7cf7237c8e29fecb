"""Records a run beside its metrics and checkpoints: the plan, the environment, the layout of TensorBoard's panels."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info

from fl_lightning.callbacks.base import Callback
from fl_lightning.records.checkpoint import sha256

if TYPE_CHECKING:
    from fl_lightning.trainer import FederatedTrainer

PACKAGES = ("fl-lightning", "torch", "torchvision", "lightning", "torchmetrics", "jsonargparse", "numpy")
LAYOUT = {
    "Spectra": {
        "classifier": ["Multiline", [r"spectrum/classifier/.*"]],
        "representation": ["Multiline", [r"spectrum/representation/.*"]],
    },
    "Ranks": {
        "effective rank": ["Multiline", [r"rank/.*/effective"]],
        "stable rank": ["Multiline", [r"rank/.*/stable"]],
    },
    "Accuracy": {"accuracy": ["Multiline", [r".*/accuracy"]], "loss": ["Multiline", [r".*/loss"]]},
    "Drift": {"drift": ["Multiline", [r"drift/.*"]]},
    "Time": {"seconds": ["Multiline", [r"time/.*"]]},
}


class RunRecord(Callback):
    """Writes ``plan.npz``, ``environment.json`` and the layout of TensorBoard's panels."""

    def on_fit_start(self, trainer: FederatedTrainer) -> None:
        if trainer.run_dir is None or trainer.resumed:
            return
        plan = trainer.data.plan
        plan.save(trainer.run_dir / "plan.npz")
        rank_zero_info(plan.report())
        record = {
            **environment(),
            "workers": trainer.world_size,
            "device": str(trainer.fabric.device),
            "seed": trainer.seed,
            "plan_hash": plan.hash,
            "partition": plan.report(),
        }
        if trainer.weights is not None:
            record["weights"] = {"path": str(trainer.weights), "sha256": sha256(trainer.weights)}
        (trainer.run_dir / "environment.json").write_text(json.dumps(record, indent=2) + "\n")
        for writer in trainer.summary_writers:
            writer.add_custom_scalars(LAYOUT)


def environment() -> dict[str, Any]:
    """Versions, hardware, git revision and command line of this process."""
    return {
        "command": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "git_revision": git_revision(),
        "versions": {name: version for name in PACKAGES if (version := version_of(name))},
    }


def version_of(package: str) -> str | None:
    """The installed version of a package, None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def git_revision() -> str | None:
    """The revision of the working folder, with ``-dirty`` where it has uncommitted changes; None without git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path.cwd()).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def processor() -> str:
    """The name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
