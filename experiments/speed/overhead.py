"""Measure the overhead of a round against a bare PyTorch loop that does the same steps in the same process.

python experiments/speed/overhead.py [--pairs 9] [--model FedCKACNN] [--precision 32-true] [--threads 1]
                                     [--images 1000] [--test 2000]

FedAvg, 10 clients of 1,000 images of 32 px, batch 64, one local epoch, evaluation on 2,000 images. The two sides are
run in turn, A B A B; both read the same batches, and after each pair the two global models are compared.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import seed_everything

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fl_lightning import FederatedTrainer  # found through the path above
from fl_lightning.callbacks import Callback
from fl_lightning.core.seeding import derive_seed
from fl_lightning.data import NpyImages
from fl_lightning.data.array_datasets import cycled, patterns
from fl_lightning.models import FedCKACNN, FedUVCNN, ImageClassifier, Projector

CLIENTS, BATCH, LR = 10, 64, 0.01


def generate(folder: Path, images: int = 10_000, test: int = 2000) -> None:
    """Patterns of the classes under noise: the work is the same as on real images, and there is something to learn."""
    rng = np.random.default_rng(0)
    for split, number in (("train", images), ("test", test)):
        labels = cycled(10, number)
        noisy = 0.6 * patterns(labels, 32, 3, number) + 0.4 * rng.integers(0, 256, (number, 32, 32, 3))
        np.save(folder / f"{split}_images.npy", noisy.astype(np.uint8))
        np.save(folder / f"{split}_labels.npy", labels)


def build(name: str) -> ImageClassifier:
    optimizer = partial(torch.optim.SGD, lr=LR, momentum=0.9)
    if name == "FedUVCNN":
        return ImageClassifier(FedUVCNN(4), Projector(256), optimizer=optimizer)
    return ImageClassifier(FedCKACNN(), optimizer=optimizer)


class Bare(Callback):
    """Runs the bare loop before each round of the trainer, from the same global state, and times both."""

    def __init__(self, model: str) -> None:
        self.model = build(model)
        self.bare: list[float] = []
        self.ours: list[float] = []
        self.largest = 0.0

    def on_round_start(self, trainer: FederatedTrainer) -> None:
        self._end_of_ours(trainer)
        start = {name: value.clone() for name, value in trainer.server.state.items()}
        began = time.perf_counter()
        self.state, _ = bare_round(self.model, start, trainer)
        self.bare.append(time.perf_counter() - began)
        self._began = time.perf_counter()

    def on_fit_end(self, trainer: FederatedTrainer) -> None:
        self._end_of_ours(trainer)

    def _end_of_ours(self, trainer: FederatedTrainer) -> None:
        if self.bare:
            self.ours.append(time.perf_counter() - self._began)
            gaps = [(self.state[n] - v).abs().max().item() for n, v in trainer.server.state.items()]
            self.largest = max(self.largest, *gaps)


def bare_round(model: ImageClassifier, start: dict, trainer: FederatedTrainer) -> tuple[dict, float]:
    """Broadcast, train each client, average by examples, evaluate: a loop as one would write it by hand.

    Returns the new global state and its accuracy.
    """
    total = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in start.items()}
    for k in range(CLIENTS):
        visit(model, start, trainer, k)
        for name, value in model.state_dict().items():
            total[name] += value.double() * (1 / CLIENTS)
    mean = {name: value.to(start[name].dtype) for name, value in total.items()}
    model.load_state_dict(mean)
    return mean, evaluate(model, trainer)


def visit(model: ImageClassifier, start: dict, trainer: FederatedTrainer, k: int) -> None:
    """Train client ``k`` from a state for one local epoch."""
    model.load_state_dict(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    loader = trainer.data.train_dataloader(k)
    loader.generator.manual_seed(derive_seed(trainer.seed, "batches", trainer.server.round, k))
    model.train()
    for x, y in loader:
        step(model, optimizer, x, y, trainer)


def step(model: ImageClassifier, optimizer: torch.optim.Optimizer, x, y, trainer: FederatedTrainer) -> None:  # type: ignore[no-untyped-def]
    if trainer.run.loaders.channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    optimizer.zero_grad()
    with trainer.fabric.autocast():
        logits = model(x)
        loss = torch.nn.functional.cross_entropy(logits, y)
        accuracy = (logits.argmax(1) == y).float().mean()
    loss.backward()
    optimizer.step()
    loss.item(), accuracy.item()


@torch.no_grad()
def evaluate(model: ImageClassifier, trainer: FederatedTrainer) -> float:
    model.eval()
    hits, loader = 0, trainer.data.test_dataloader()
    for x, y in loader:
        if trainer.run.loaders.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        with trainer.fabric.autocast():
            logits = model(x)
            torch.nn.functional.cross_entropy(logits, y).item()
        hits += int((logits.argmax(1) == y).sum())
    return hits / len(loader.rows)


def measure(args: argparse.Namespace) -> Bare:
    seed_everything(0, verbose=False)
    watch = Bare(args.model)
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder), CLIENTS * args.images, args.test)
        data = NpyImages(folder, num_clients=CLIENTS, batch_size=BATCH)
        trainer = FederatedTrainer(
            max_rounds=args.pairs + 1,
            precision=args.precision,
            channels_last=args.channels_last,
            threads_per_worker=args.threads,
            callbacks=[watch],
            default_root_dir=folder,
            accelerator="cpu",
        )
        if args.channels_last:
            watch.model.to(memory_format=torch.channels_last)
        trainer.fit(build(args.model), data)
    return watch


def machine() -> str:
    """The processor and the versions, for the head of a table."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{name}, {os.cpu_count()} cores, torch {torch.__version__}, Python {platform.python_version()}"


def report(args: argparse.Namespace, watch: Bare) -> None:
    ours, bare = watch.ours[1:], watch.bare[1:]  # the first pair warms up
    print(f"{machine()}, {args.threads} threads")
    print(f"{args.model}, {args.precision}, channels_last {args.channels_last}, {args.pairs} pairs")
    print(f"{'':10}{'fastest':>10}{'median':>10}")
    for name, values in (("bare", bare), ("ours", ours)):
        print(f"{name:10}{min(values):10.3f}{statistics.median(values):10.3f}")
    ratios = [a / b for a, b in zip(ours, bare, strict=True)]
    print(f"{'ratio':10}{min(ours) / min(bare):10.3f}{statistics.median(ratios):10.3f}  (median over pairs)")
    print(f"ratios of the pairs: {', '.join(f'{ratio:.3f}' for ratio in sorted(ratios))}")
    print(f"largest difference of the global models: {watch.largest:.1e}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--model", choices=["FedCKACNN", "FedUVCNN"], default="FedCKACNN")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--channels_last", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--images", type=int, default=1000, help="of a client")
    parser.add_argument("--test", type=int, default=2000, help="test images")
    given = parser.parse_args()
    report(given, measure(given))
