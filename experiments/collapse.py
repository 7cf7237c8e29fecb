"""Dimensional collapse under label skew: effective ranks on Digits, Dirichlet(0.1) against IID.

python experiments/collapse.py [--rounds 20] [--images N] [--output runs/collapse]

Trains FedAvg on IID clients, and FedAvg, FedUV and FedDecorr on skewed ones, from the same initial weights, prints a
table and draws the last spectra of the representations.
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT.parent))

from fl_lightning.cli import main  # noqa: E402  # found through the path above

RUNS = {"FedAvg, IID": ("digits_iid", None), "FedAvg": ("digits", None)}
RUNS |= {"FedUV": ("digits", "feduv"), "FedDecorr": ("digits", "feddecorr")}


def train(data: str, method: str | None, args: argparse.Namespace) -> Path:
    """Run one experiment through the command line; returns its folder."""
    parts = [f"data/{data}", "models/feduvcnn_small", "protocols/short", *([f"methods/{method}"] if method else [])]
    name = f"{data}-{method or 'fedavg'}"
    options = [f"--seed_everything={args.seed}", f"--trainer.max_rounds={args.rounds}", f"--trainer.name={name}"]
    options += [f"--trainer.default_root_dir={args.output}"]
    options += [] if args.images is None else [f"--data.train_size={args.images}"]
    sys.argv = sys.argv[:1]  # LightningCLI warns of arguments from two places
    main(["fit", *(f"--config={ROOT / part}.yaml" for part in parts), *options])
    return max((args.output / name).iterdir(), key=lambda path: int(path.name.split("_")[1]))


def last_row(run: Path) -> dict[str, float]:
    with open(run / "metrics.csv") as file:
        return {name: float(value) for name, value in list(csv.DictReader(file))[-1].items() if value}


def draw(runs: dict[str, Path], path: Path) -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for label, run in runs.items():
        values = np.load(run / "spectra.npz")["representation"][-1]
        axes.semilogy(np.where(values > 1e-12 * values[0], values / values[0], np.nan), label=label)
    axes.set(xlabel="index", ylabel="singular value / the first", title="covariance of the test representations")
    axes.legend()
    figure.savefig(path, dpi=120)


def compare() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--images", type=int, help="for training; default: all")
    parser.add_argument("--output", type=Path, default=Path("runs/collapse"))
    args = parser.parse_args()
    runs = {label: train(*what, args) for label, what in RUNS.items()}
    print(f"\n{'':14}{'accuracy':>10}{'rank of classifier':>20}{'rank of representation':>24}")
    for label, run in runs.items():
        row = last_row(run)
        ranks = row["rank/classifier/effective"], row["rank/representation/effective"]
        print(f"{label:14}{row['test/accuracy']:10.3f}{ranks[0]:20.2f}{ranks[1]:24.2f}")
    draw(runs, args.output / "spectra.png")


if __name__ == "__main__":
    compare()
