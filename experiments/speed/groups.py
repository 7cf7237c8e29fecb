"""Measure clients that train side by side: CPU time of a round by the size of the groups.

python experiments/speed/groups.py [--models Logistic MLP FEMNIST FedCKACNN] [--sizes 1 2 4 8 16 32 64]
                                   [--turns 3] [--output results.csv]
python experiments/speed/groups.py --show experiments/speed/groups.csv

64 clients of equal size train on one thread for a local epoch, by FedAvg: a logistic regression on 60 numbers and a
perceptron with two layers of 200 on 784, 20 batches of 10; the network of LEAF's FEMNIST (convolutions of 32 and 64
maps, a layer of 512), 4 batches of 20; FedCKA's network, 4 batches of 64. Sizes alternate, and the fastest round of
each counts, in which programs are repeated. The table also has the operations of a step, by which ``auto`` decides.
``--show`` also fits a line to the groups of two clients and more of the logistic regression: the duration of a program,
in steps of a single client.
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import linear_regression

import numpy as np
import torch
from lightning.pytorch import seed_everything
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from overhead import machine  # next to this file

from fl_lightning import FederatedTrainer  # found through the path above
from fl_lightning.callbacks import Callback
from fl_lightning.data import NpyImages
from fl_lightning.models import MLP, Backbone, FedCKACNN, ImageClassifier, Logistic

CLIENTS = 64


def femnist() -> Backbone:
    """The network of LEAF's FEMNIST up to its classifier."""
    layers = [nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
    return Backbone(nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 49, 512), nn.ReLU(), nn.Linear(512, 62)))


# the network, the shape of an image, the batch size and the number of batches
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, int, int], int, int]] = {
    "Logistic": (lambda: Logistic(60), (6, 10, 1), 10, 20),
    "MLP": (lambda: MLP(784, [200, 200]), (28, 28, 1), 10, 20),
    "FEMNIST": (femnist, (28, 28, 1), 20, 4),
    "FedCKACNN": (FedCKACNN, (32, 32, 3), 64, 4),
}


class Watch(Callback):
    """CPU seconds of each round, from the draw of the cohort to the aggregation."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_round_start(self, trainer: FederatedTrainer) -> None:
        self._began = time.process_time()

    def on_round_end(self, trainer: FederatedTrainer) -> None:
        self.seconds.append(time.process_time() - self._began)


def generate(folder: Path, shape: tuple[int, int, int], number: int) -> None:
    """Return random images, the same number for each client."""
    rng = np.random.default_rng(0)
    for split, size in (("train", number), ("test", 16)):
        np.save(folder / f"{split}_images.npy", rng.integers(0, 256, (size, *shape), dtype=np.uint8))
        np.save(folder / f"{split}_labels.npy", np.arange(size) % 10)


def seconds_of_round(name: str, size: int, rounds: int) -> float:
    """CPU seconds of the fastest round after the first."""
    network, shape, batch, batches = MODELS[name]
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder), shape, CLIENTS * batches * batch)
        seed_everything(0, verbose=False)
        model = ImageClassifier(network(), optimizer=partial(torch.optim.SGD, lr=0.01))
        how = {"logger": False, "enable_progress_bar": False, "accelerator": "cpu", "threads_per_worker": 1}
        how |= {"default_root_dir": folder, "eval_every_n_rounds": rounds, "channels_last": size == 1}
        watch = Watch()
        trainer = FederatedTrainer(rounds, clients_per_step=size, callbacks=[watch], **how)
        trainer.fit(model, NpyImages(folder, num_clients=CLIENTS, batch_size=batch))
    return min(watch.seconds[1:])


def operations(name: str) -> int:
    """Operations of a forward pass on a batch."""
    network, (height, width, channels), batch, _ = MODELS[name]
    model = ImageClassifier(network())
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(batch, channels, height, width))
    return counter.get_total_flops()


def table(rows: list[dict[str, str]]) -> str:
    """Return the stored figures as a Markdown table: the share of the sequential time."""
    sizes = sorted({int(row["size"]) for row in rows})
    lines = [
        f"| model | operations of a step | {' | '.join(f'{size}' for size in sizes)} |",
        "|---|---|" + "---|" * len(sizes),
    ]
    for model in dict.fromkeys(row["model"] for row in rows):
        of_model = {int(row["size"]): row for row in rows if row["model"] == model}
        first = next(row for row in rows if row["model"] == model and row["size"] == "1")
        shares = {size: f"{float(row['seconds']) / float(first['seconds']):.2f}" for size, row in of_model.items()}
        cells = [shares.get(size, "") for size in sizes]
        lines.append(f"| {model} | {int(of_model[1]['operations']) / 1e6:.3g} million | {' | '.join(cells)} |")
    return "\n".join(lines)


def fit(rows: list[dict[str, str]]) -> str:
    """Fit the duration of a program of the logistic regression to its number of clients; empty below two sizes."""
    seconds = {int(row["size"]): float(row["seconds"]) for row in rows if row["model"] == "Logistic"}
    # one program for each group of a round
    steps = {n: n * took / seconds[1] for n, took in seconds.items() if n > 1}
    if len(steps) < 2:
        return ""
    slope, intercept = linear_regression(list(steps), list(steps.values()))
    return f"a program for n clients takes {intercept:.2f} + {slope:.3f} n steps of one client"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="CSV file of the figures")
    parser.add_argument("--show", type=Path, help="CSV file whose figures are printed as Markdown, and nothing is run")
    args = parser.parse_args()
    if args.show is not None:
        with args.show.open() as file:
            rows = list(csv.DictReader(file))
        print(table(rows))
        print(fit(rows))
        return
    torch.set_num_threads(1)
    print(machine(), time.strftime("%F"))
    print("milliseconds of CPU a round, and the share of the sequential time")
    print(f"{'model':>17}{'operations':>12}{''.join(f'{size:>15}' for size in args.sizes)}")
    rows = []
    for name in args.models:
        fastest = {size: float("inf") for size in args.sizes}
        for _ in range(args.turns):
            for size in args.sizes:
                fastest[size] = min(fastest[size], seconds_of_round(name, size, args.rounds))
        first = fastest[args.sizes[0]]
        cells = "".join(f"{1000 * seconds:9.0f} {seconds / first:5.2f}" for seconds in fastest.values())
        print(f"{name:>17}{operations(name) / 1e6:11.1f}M{cells}")
        rows += [{"model": name, "operations": operations(name), "size": k, "seconds": v} for k, v in fastest.items()]
    if args.output is not None:
        with args.output.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["model", "operations", "size", "seconds"])
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
