"""Measure a report: seconds and bytes of the page of many generated runs.

python experiments/speed/report.py [--runs 30] [--rounds 100] [--clients 20] [--turns 3] [--keep FOLDER]

The runs have five methods, two settings and three seeds each; ``--runs`` sets their number. Each has 33 metrics a
round, a partition, spectra of global and local models, similarity by layer, drift, accuracy by class, an embedding of
512 points and a table of costs, as the callbacks write them. The command runs in a separate process.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import yaml

ROOT = Path(__file__).resolve().parents[2]
METHODS = {"FedAvg": None, "FedProx": {"mu": 0.01}, "FedUV": {"mu": 0.5}, "MOON": {"mu": 1.0}, "FedLC": {"tau": 1.0}}
PHASES = (
    "load",
    "data",
    "forward_backward",
    "correct",
    "step",
    "collect",
    "wait",
    "train",
    "evaluate",
    "server",
    "log",
)
VERSIONS = {"fl-lightning": "0.1.0", "torch": "2.6.0", "numpy": "2.1.0"}


def write_run(
    folder: Path,
    method: str = "FedAvg",
    seed: int = 0,
    rounds: int = 10,
    done: int | None = None,
    level: float = 0.6,
    data: str = "CIFAR10",
    alpha: float = 0.1,
    clients: int = 4,
    plan: str = "",
    measured: bool = True,
    config: dict[str, Any] | None = None,
) -> Path:
    """Write the folder of a run in the format of the trainer and its callbacks.

    Args:
        folder: the folder.
        method: name of its method.
        seed: its seed.
        rounds: rounds of its config.
        done: finished rounds; None for all.
        level: final accuracy.
        data: class of its data set.
        alpha: of its partition.
        clients: number of clients.
        plan: source of the hash of its partition, by default data set, alpha and seed.
        measured: whether the files of callbacks exist.
        config: top-level keys of the config that replace the defaults.
    """
    folder.mkdir(parents=True)
    done = rounds if done is None else done
    rng = np.random.default_rng([seed, sum(map(ord, method))])
    digest = hashlib.sha256((plan or f"{data} {alpha} {seed}").encode()).hexdigest()
    (folder / "config.yaml").write_text(
        yaml.safe_dump({**config_of(method, seed, rounds, data, alpha), **(config or {})})
    )
    record = {"command": ["cli.py", "fit", "--config", f"{method}.yaml"], "python": "3.11.7", "processor": "A CPU"}
    record |= {
        "cores": 2,
        "gpus": [],
        "git_revision": "0" * 40,
        "versions": VERSIONS,
        "seed": seed,
        "plan_hash": digest,
    }
    (folder / "environment.json").write_text(json.dumps(record))
    write_metrics(folder / "metrics.csv", rng, done, level, clients)
    counts = np.random.default_rng(int(digest[:8], 16)).integers(0, 90, (clients, 10)) * 5
    np.savez(
        folder / "plan.npz", sizes=counts.sum(1), label_counts=counts, hash=digest, indices=np.arange(counts.sum())
    )
    if measured:
        write_measurements(folder, rng, done, clients)
    return folder


def config_of(method: str, seed: int, rounds: int, data: str, alpha: float) -> dict[str, Any]:
    """The resolved config of a run, with the keys that matter to a report."""
    given = METHODS.get(method, {"mu": 0.1})
    methods = [] if given is None else [{"class_path": f"fl_lightning.methods.{method}", "init_args": given}]
    partitioner = {"class_path": "fl_lightning.data.Dirichlet", "init_args": {"alpha": alpha, "min_size": 10}}
    optimizer = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.01, "momentum": 0.9}}
    return {
        "seed_everything": seed,
        "trainer": {"max_rounds": rounds, "local_epochs": 5, "callbacks": None, "default_root_dir": f"runs/{seed}"},
        "model": {"class_path": "fl_lightning.models.ImageClassifier", "init_args": {"optimizer": optimizer}},
        "data": {"class_path": f"fl_lightning.data.{data}", "init_args": {"root": "data", "partitioner": partitioner}},
        "method": methods or None,
        "ckpt_path": None,
    }


def write_metrics(path: Path, rng: np.random.Generator, rounds: int, level: float, clients: int) -> None:
    """Write the metrics of the rounds, an accuracy that rises to about ``level`` among them."""
    rows = []
    for at in range(rounds):
        risen = 1 - np.exp(-4 * (at + 1) / max(rounds, 1))
        accuracy = float(np.clip(level * risen + 0.01 * rng.standard_normal(), 0, 1))
        seconds = {f"time/{phase}": float(rng.uniform(0.01, 0.3)) for phase in PHASES}
        ranks = {
            f"rank/{what}/{kind}": 8 * risen
            for what in ("classifier", "representation")
            for kind in ("effective", "stable")
        }
        rows.append(
            {
                **{"round": at, "step": at, "test/accuracy": accuracy, "test/loss": 2.4 - 2 * accuracy},
                **{
                    "train/accuracy": min(1.0, accuracy + 0.1),
                    "train/loss": 2.2 - 2 * accuracy,
                    "train/term": 1 / (at + 1),
                },
                **{
                    "drift/client": 1.0 - 0.5 * risen,
                    "drift/global": 0.5 - 0.3 * risen,
                    "clients": clients,
                    "lr": 0.01,
                },
                **{
                    "bytes/down": 6_000_000,
                    "bytes/up": 6_000_000,
                    "time/round": sum(seconds.values()),
                    **seconds,
                    **ranks,
                },
                **{f"class/{c}/accuracy": accuracy for c in range(4)},
            }
        )
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, sorted(rows[0]) if rows else ["round"])
        writer.writeheader()
        writer.writerows(rows)


def write_measurements(folder: Path, rng: np.random.Generator, rounds: int, clients: int) -> None:
    """Write the files of the callbacks, of every tenth round."""
    at = np.arange(0, max(rounds, 1), 10)
    many = len(at)
    falling = np.exp(-np.arange(64) / 6) * rng.uniform(0.8, 1.2, (many, 64))
    local = np.exp(-np.arange(64) / 4) * rng.uniform(0.8, 1.2, (many, clients, 64))
    np.savez(
        folder / "spectra.npz",
        rounds=at,
        classifier=falling[:, :10],
        representation=falling,
        local_rounds=at,
        local_representation=local,
    )
    layers = np.tile(["conv1", "conv2", "conv3", "linear1", "linear2"], (many, 1))
    similarity = np.linspace(0.95, 0.5, 5)[:, None] + 0.03 * rng.standard_normal((many, 5, clients))
    arrays = {"layers": layers, "to_global": similarity, "between_rounds": similarity.mean(2)}
    arrays["between_clients"] = np.broadcast_to(similarity[..., None], (*similarity.shape, clients)) - 0.1
    np.savez(folder / "layer_similarity.npz", rounds=at, **arrays)
    cosines, norms = rng.uniform(-1, 1, (many, clients, clients)), rng.uniform(1, 2, (many, 5, clients))
    arrays = {"layers": layers, "norms": norms.mean(1), "pairwise": cosines, "dissimilarity": norms.mean((1, 2))}
    np.savez(folder / "drift.npz", rounds=at, layer_norms=norms, **arrays)
    by_class = rng.uniform(0.2, 0.9, (many, clients, 10))
    arrays = {"before": by_class**2, "after": by_class, "groups_after": by_class[..., :3]}
    confusion = rng.integers(0, 100, (many, 10, 10))
    np.savez(folder / "per_class.npz", rounds=at, confusion_after=confusion, **arrays)
    places, kinds = rng.standard_normal((many, 512, 2)), np.tile(np.arange(512) % 10, (many, 1))
    arrays = {"global": places + kinds[..., None] / 2, "labels": kinds}
    np.savez(folder / "embedding.npz", rounds=at, **arrays)
    (folder / "cost.csv").write_text("round,flops,extra_forwards\n0,2.5e9,1\n")


def write_runs(root: Path, runs: int, rounds: int, clients: int) -> None:
    """Write the folders of some runs."""
    for number, (seed, alpha, method) in zip(range(runs), combinations(), strict=False):
        level = 0.5 + 0.05 * list(METHODS).index(method) + 0.1 * (alpha == 1)
        name = f"{method}-{alpha:g}-{seed}-{number}"
        write_run(root / name / "version_0", method, seed, rounds, None, level, alpha=alpha, clients=clients)


def combinations() -> Iterator[tuple[int, float, str]]:
    """Seeds, settings and methods without end, the methods in the innermost loop."""
    seed = 0
    while True:
        yield from ((seed, alpha, method) for alpha in (0.1, 1.0) for method in METHODS)
        seed += 1


def measure(root: Path, turns: int) -> list[float]:
    """Seconds of each of some reports."""
    seconds = []
    for _ in range(turns):
        began = time.perf_counter()
        command = [
            sys.executable,
            str(ROOT / "cli.py"),
            "report",
            str(root / "runs"),
            "--output",
            str(root / "page.html"),
        ]
        subprocess.run([*command, "--target", "0.5"], check=True, capture_output=True, text=True, cwd=ROOT)
        seconds.append(time.perf_counter() - began)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("runs", 30), ("rounds", 100), ("clients", 20), ("turns", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--keep", type=Path, help="folder for the runs and the page, instead of a temporary one")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = given.keep or Path(temporary)
        write_runs(root / "runs", given.runs, given.rounds, given.clients)
        seconds = measure(root, given.turns)
        page = (root / "page.html").stat().st_size
        drawings = (root / "page.html").read_text().count("<figure")
        told = f"{given.runs} runs of {given.rounds} rounds: {statistics.median(seconds):.1f} s"
        print(f"{told} (of {given.turns} turns {min(seconds):.1f} to {max(seconds):.1f})")
        print(f"{page / 1e6:.2f} MB, {drawings} figures")


if __name__ == "__main__":
    main()
