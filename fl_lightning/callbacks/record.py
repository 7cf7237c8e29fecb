"""Records the partition and the environment of a run, and the layout of TensorBoard's panels."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info

from fl_lightning.callbacks.base import Callback
from fl_lightning.client.run_context import RunContext
from fl_lightning.data.partition_adapter import own_module_of
from fl_lightning.storage.atomic_io import write_atomically
from fl_lightning.utilities.code_fingerprint import file_sha256
from fl_lightning.utilities.numerics import tf32_settings

PACKAGES = ("fl-lightning", "torch", "torchvision", "lightning", "torchmetrics", "jsonargparse", "numpy")
# charts of TensorBoard's page Custom Scalars: a regular expression for the beginning of tags, by panel and title.
# A run has one colour, so a chart of one tag distinguishes runs.
LAYOUT: dict[str, dict[str, str]] = {
    "Accuracy": {
        "test accuracy": "test/accuracy$",
        "validation accuracy": "val/accuracy$",
        "training accuracy": "train/accuracy$",
    },
    "Loss": {
        "test loss": "test/loss$",
        "validation loss": "val/loss$",
        "training loss": "train/loss$",
        "penalties": "train/(?!accuracy$|loss$)",
    },
    "Ranks": {
        "effective rank of the representation": "rank/representation/effective$",
        "effective rank of the classifier": "rank/classifier/effective$",
        "stable rank of the representation": "rank/representation/stable$",
        "stable rank of the classifier": "rank/classifier/stable$",
    },
    "Spectra": {
        f"log10 of the {which} singular value of the {matrix}": f"spectrum/log10/{matrix}/{which}$"
        for matrix in ("representation", "classifier")
        for which in ("largest", "median", "smallest")
    },
    "Drift": {"drift of the clients": "drift/client$", "drift of the global model": "drift/global$"},
    "Time": {"seconds of a round": "time/round$", "seconds of its phases": "time/(?!round$)"},
    "Bytes": {"bytes that a round sends down": "bytes/down$", "bytes that a round sends up": "bytes/up$"},
}


class RunRecord(Callback):
    """Writes ``plan.npz``, ``environment.json`` and, after the first round, the layout of TensorBoard's panels."""

    _layout_is_due = False

    def on_fit_start(self, trainer: RunContext) -> None:
        if trainer.run_dir is None or trainer.resumed:
            return
        plan = trainer.data.plan
        plan.save(trainer.run_dir / "plan.npz")
        rank_zero_info(plan.report())
        # asking for names would initialize CUDA
        gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        versions = {}
        for package in PACKAGES:
            with suppress(metadata.PackageNotFoundError):
                versions[package] = metadata.version(package)
        record = {
            "command": sys.argv,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "processor": processor(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "gpus": [torch.cuda.get_device_name(gpu) for gpu in gpus],
            "git_revision": git_revision(),
            "versions": versions,
            "workers": trainer.world_size,
            "device": str(trainer.run.fabric.device),
            "deterministic": (False, "warn", True)[torch.get_deterministic_debug_mode()],
            "tf32": tf32_settings(),
            "seed": trainer.seed,
            "plan_hash": plan.hash,
            "partition": plan.report(),
            "data_set": type(own_module_of(trainer.data)).__name__,
            "data": getattr(trainer.data, "inference_arguments", dict)(),
        }
        if trainer.weights is not None:
            record["weights"] = {"path": str(trainer.weights), "sha256": file_sha256(trainer.weights)}
        text = json.dumps(record, indent=2) + "\n"
        write_atomically(trainer.run_dir / "environment.json", lambda partial: partial.write_text(text))
        self._layout_is_due = True

    def on_round_end(self, trainer: RunContext) -> None:
        # the tags are known now
        if self._layout_is_due:
            self._layout_is_due = False
            phases_logged = {tag.split("/")[0] for tag in trainer.metrics}
            to_come = ["time/round"]
            for phase in ("test", "val"):
                if phase not in phases_logged and trainer.run.evaluator.has_data(phase):
                    to_come += [f"{phase}/accuracy", f"{phase}/loss"]
            tags, charts = [*trainer.metrics, *to_come], dict[str, dict[str, list[Any]]]()
            for panel, titles in LAYOUT.items():
                for title, pattern in titles.items():
                    if any(re.match(pattern, tag) for tag in tags):
                        charts.setdefault(panel, {})[title] = ["Multiline", [pattern]]
            for callback in trainer.callbacks:
                for panel, titles in getattr(callback, "panels", {}).items():
                    lines = {title: ["Multiline", [tag]] for title, tag in titles.items()}
                    charts.setdefault(panel, {}).update(lines)
            for writer in trainer.summary_writers:
                writer.add_custom_scalars(charts)


def git_revision() -> str | None:
    """Return the git revision of the working folder, with ``-dirty`` for uncommitted changes; None without git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path.cwd()).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def processor() -> str:
    """Return the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        line = next(line for line in lines if line.startswith("model name"))
        return line.split(":", 1)[1].strip()
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
