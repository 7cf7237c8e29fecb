"""Measure the cost of the data path: seconds to gather, augment and normalise a batch, against a training step.

python experiments/speed/data.py [--batches 200] [--rounds 9]

10,000 images of 32 px, batch 64, one thread; with and without RandomCrop and RandomFlip. Batches and steps are timed in
turn, and the median over the turns is shown.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fl_lightning.data import Batches, RandomCrop, RandomFlip  # found through the path above
from fl_lightning.models import FedCKACNN, FedUVCNN, ImageClassifier, Projector

MODELS = {
    "FedUVCNN, width 4": lambda: ImageClassifier(FedUVCNN(4), Projector(256)),
    "FedCKACNN": lambda: ImageClassifier(FedCKACNN()),
}


def loader(augment: bool) -> Batches:
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (10_000, 32, 32, 3), dtype=np.uint8))
    labels, rows = torch.arange(10_000) % 10, torch.arange(10_000)
    how = [RandomCrop(4), RandomFlip()] if augment else []
    scale = {"mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25)}
    return Batches(images, labels, rows, 64, shuffle=True, augment=how, **scale)


def seconds_of_batches(batches: Batches, number: int) -> float:
    began = time.perf_counter()
    for _, _ in zip(range(number), batches, strict=False):
        pass
    return (time.perf_counter() - began) / number


def seconds_of_steps(model: ImageClassifier, batch: tuple, number: int) -> float:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    began = time.perf_counter()
    for _ in range(number):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()
    return (time.perf_counter() - began) / number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    loaders = {"plain": loader(False), "augmented": loader(True)}
    models = {name: build() for name, build in MODELS.items()}
    batch = next(iter(loaders["plain"]))
    found: dict[str, list[float]] = {name: [] for name in [*loaders, *models]}
    for _ in range(args.rounds):
        for name, one in loaders.items():
            found[name].append(seconds_of_batches(one, args.batches))
        for name, model in models.items():
            found[name].append(seconds_of_steps(model, batch, 5))
    median = {name: 1000 * statistics.median(values) for name, values in found.items()}
    print(f"torch {torch.__version__}, 1 thread; milliseconds, median of {args.rounds}")
    for name, value in median.items():
        print(f"{name:20}{value:9.2f}")
    for kind in loaders:
        for name in models:
            print(f"{kind} batch over a step of {name}: {100 * median[kind] / median[name]:.1f} %")


if __name__ == "__main__":
    main()
