"""Measure a long run of a small model: memory, open files, the size of its folder and seconds a round.

python experiments/reliability/endurance.py [--rounds 2000] [--clients 20] [--client_memory 0.0001]
    [--methods SCAFFOLD MOON FedDecorr] [--spectra] [--workers 2]

It trains SCAFFOLD, or other methods, on the embedded digits, with TensorBoard, a checkpoint and an evaluation in every
round, and prints the first hundred rounds of the first worker next to the last hundred.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import torch
from lightning import seed_everything

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fl_lightning import FederatedTrainer, methods  # found through the path above
from fl_lightning.callbacks import Callback, SpectrumMonitor
from fl_lightning.data import Digits
from fl_lightning.models import MLP, ImageClassifier

SPAN = 100


class Watch(Callback):
    """Records memory, open files and the size of the run's folder after each round."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_round_end(self, trainer: FederatedTrainer) -> None:
        if trainer.run_dir is None:  # the first worker alone has the folder
            return
        status = Path("/proc/self/status").read_text().splitlines()
        resident = {
            line.split(":")[0]: int(line.split()[1]) for line in status if line.startswith(("VmRSS", "RssAnon"))
        }
        files = [path.stat().st_size for path in trainer.run_dir.rglob("*") if path.is_file()]
        self.rows.append(
            {
                "memory, KiB": resident["VmRSS"],
                "without files, KiB": resident["RssAnon"],
                "open files": len(os.listdir("/proc/self/fd")),
                "memory maps": len(Path("/proc/self/maps").read_text().splitlines()),
                "files in the folder": len(files),
                "folder, KiB": sum(files) / 1024,
                "last.ckpt, KiB": size(trainer.run_dir / "checkpoints" / "last.ckpt"),
            }
        )


def size(path: Path) -> float:
    """Return the size of a file in KiB, 0 for a missing one."""
    return path.stat().st_size / 1024 if path.exists() else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--client_memory", type=float, default=4.0)
    parser.add_argument("--methods", nargs="+", default=["SCAFFOLD"], help="names of methods with their defaults")
    parser.add_argument("--spectra", action="store_true", help="with SpectrumMonitor, in every round")
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    seed_everything(0, verbose=False)
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        given = {"client_memory": args.client_memory, "default_root_dir": folder, "enable_progress_bar": False}
        where = {"accelerator": "cpu", "devices": args.workers, "threads_per_worker": 1}
        callbacks = [*[SpectrumMonitor(every_n_rounds=1)] * args.spectra, watch]
        trainer = FederatedTrainer(args.rounds, cohort_size=5, callbacks=callbacks, **where, **given)
        chosen = [getattr(methods, name)() for name in args.methods]
        model = ImageClassifier(MLP(64, [32]), optimizer=partial(torch.optim.SGD, lr=0.05))
        trainer.fit(model, Digits(num_clients=args.clients, train_size=600, test_size=200), chosen)
    seconds = [row["time/round"] for row in trainer.history]
    report(watch.rows, seconds)


def report(rows: list[dict[str, float]], seconds: list[float]) -> None:
    """Print medians over the first and the last rounds, and the growth per round in the second half."""
    print(
        f"{len(rows)} rounds, torch {torch.__version__}; medians over {SPAN} rounds, and the slope over the second half"
    )
    print(f"{'':24}{'first':>12}{'last':>12}{'a round':>12}")
    columns = {name: [row[name] for row in rows] for name in rows[0]} | {"ms a round": [1000 * one for one in seconds]}
    for name, values in columns.items():
        half = np.array(values[len(values) // 2 :])
        slope = np.polyfit(np.arange(len(half)), half, 1)[0]
        first, last = statistics.median(values[:SPAN]), statistics.median(values[-SPAN:])
        print(f"{name:24}{first:12.1f}{last:12.1f}{slope:12.4f}")


if __name__ == "__main__":
    main()
