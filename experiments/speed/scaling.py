"""Measure seconds and memory of a round by the numbers of workers, clients and rounds.

python experiments/speed/scaling.py workers [--pairs 7] [--counts 1 2 4] [--alpha 0.1] [--model FedCKACNN]
python experiments/speed/scaling.py clients [--numbers 10 100 1000 10000 1000000] [--cohort 10000] [--workers 2]
python experiments/speed/scaling.py memory [--rounds 200] [--cohorts 10 1000] [--method SCAFFOLD]

``workers``: alternates a round by each number of workers with the pure compute of limit.py by the same number, which
shows the current speed of the machine; prints the gain of both over one worker, and their ratio. ``clients``: N clients
of 10 examples train a logistic regression for one local step, all of them or a cohort of limited size in a round; also
measures the start of the run. ``memory``: resident memory of a worker after each round of an MLP, its slope over the
rounds, and its level for small and large cohorts; SCAFFOLD's clients have memories.
"""

from __future__ import annotations

import argparse
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

from limit import arguments, measure  # next to this file
from overhead import machine

from fl_lightning import FederatedTrainer  # found through the path above
from fl_lightning.callbacks import Callback
from fl_lightning.data import NpyImages
from fl_lightning.methods import SCAFFOLD
from fl_lightning.models import MLP, ImageClassifier, Logistic


def by_workers(args: argparse.Namespace) -> None:
    """Gains over one worker: ours, pure compute's, and their ratio, as medians over the turns."""
    limit: dict[int, list[float]] = {count: [] for count in args.counts}
    ours: dict[int, list[float]] = {count: [] for count in args.counts}
    for _ in range(args.pairs):
        for count in args.counts:
            watch = measure(argparse.Namespace(**{**vars(args), "workers": count, "pairs": 1}))
            limit[count].append(watch.limit[-1])
            ours[count].append(watch.ours[-1])
    print(f"{args.model}, {args.precision}, alpha {args.alpha or 'none'}, {args.pairs} turns; seconds are medians")
    print(
        f"{'workers':>8}{'limit':>9}{'ours':>9}{'gain':>9}{'gain':>9}{'ratio':>9}{'lowest':>9}{'highest':>9}{'fastest':>9}"
    )
    for count in args.counts:
        gains = [[one / many for one, many in zip(of[1], of[count], strict=True)] for of in (limit, ours)]
        ratios = [b / a for a, b in zip(*gains, strict=True)]
        fastest = min(ours[1]) / min(ours[count]) * min(limit[count]) / min(limit[1])
        numbers = [statistics.median(of) for of in (limit[count], ours[count], *gains, ratios)]
        print(f"{count:8}{''.join(f'{n:9.3f}' for n in (*numbers, min(ratios), max(ratios), fastest))}")


def generate_small(folder: Path, clients: int) -> None:
    """Images of 3 x 3 pixels, 10 for each client."""
    rng = np.random.default_rng(0)
    for split, number in (("train", clients * 10), ("test", 1000)):
        np.save(folder / f"{split}_images.npy", rng.integers(0, 256, (number, 3, 3, 1), dtype=np.uint8))
        np.save(folder / f"{split}_labels.npy", np.arange(number) % 10)


def memory(key: str) -> float:
    """An entry of this process's status in MiB (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))


class Watch(Callback):
    """Resident memory of the largest worker after each round, in MiB."""

    def __init__(self) -> None:
        self.megabytes: list[float] = []

    def on_round_end(self, trainer: FederatedTrainer) -> None:
        self.megabytes.append(max(trainer.gather(memory("VmRSS"))))


def train(clients: int, model: ImageClassifier, methods: list, **kwargs: object) -> tuple[FederatedTrainer, Watch]:
    """A run over ``clients`` small clients."""
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        generate_small(Path(folder), clients)
        how = {"logger": False, "enable_progress_bar": False, "accelerator": "cpu", "threads_per_worker": 1}
        trainer = FederatedTrainer(callbacks=[watch], default_root_dir=Path(folder, "runs"), **how, **kwargs)
        trainer.fit(model, NpyImages(folder, num_clients=clients, batch_size=16), methods)
    return trainer, watch


def by_clients(args: argparse.Namespace) -> None:
    print(f"Logistic, {args.workers} workers; the fastest of {args.rounds} rounds, and the whole run")
    print(f"{'clients':>8}{'cohort':>8}{'seconds':>10}{'ms a visit':>12}{'MiB':>8}{'run':>8}")
    for number in args.numbers:
        model = ImageClassifier(Logistic(9), optimizer=partial(torch.optim.SGD, lr=0.01))
        cohort, begin = min(number, args.cohort), time.perf_counter()
        given = {"devices": args.workers, "max_rounds": args.rounds, "cohort_size": cohort}
        trainer, watch = train(number, model, [], **given)
        whole, seconds = time.perf_counter() - begin, min(metrics["time/round"] for metrics in trainer.history)
        visits = 1000 * seconds * args.workers / cohort
        print(f"{number:8}{cohort:8}{seconds:10.3f}{visits:12.3f}{watch.megabytes[-1]:8.0f}{whole:8.1f}")


def by_rounds(args: argparse.Namespace) -> None:
    print(f"MLP, {args.method}, {args.workers} workers, 1000 clients, memories beyond {args.client_memory} GiB on disk")
    print("MiB; the slope is in KiB a round, over the second half")
    print(f"{'cohort':>8}{'rounds':>8}{'first':>8}{'last':>8}{'slope':>12}")
    methods = [SCAFFOLD()] if args.method == "SCAFFOLD" else []
    for cohort in args.cohorts:
        rounds = args.rounds if cohort <= 100 else max(10, args.rounds * 10 // cohort)
        model = ImageClassifier(MLP(9, [256, 256]), optimizer=partial(torch.optim.SGD, lr=0.01))
        given = {"devices": args.workers, "max_rounds": rounds, "client_memory": args.client_memory}
        _, watch = train(1000, model, methods, cohort_size=cohort, eval_every_n_rounds=rounds, **given)
        half = np.array(watch.megabytes[len(watch.megabytes) // 2 :])
        slope = 1024 * np.polyfit(np.arange(len(half)), half, 1)[0]
        print(f"{cohort:8}{rounds:8}{watch.megabytes[0]:8.0f}{watch.megabytes[-1]:8.0f}{slope:12.2f}")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("what", choices=["workers", "clients", "memory"])
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--numbers", type=int, nargs="+", default=[10, 100, 1000, 10_000])
    parser.add_argument("--cohort", type=int, default=10_000)
    parser.add_argument("--cohorts", type=int, nargs="+", default=[10, 1000])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--method", choices=["FedAvg", "SCAFFOLD"], default="FedAvg")
    parser.add_argument("--client_memory", type=float, default=0.05)
    args = parser.parse_args()
    args.rounds = args.rounds or {"clients": 4, "memory": 200}.get(args.what, 1)
    seed_everything(0, verbose=False)
    print(machine(), time.strftime("%F"))
    {"workers": by_workers, "clients": by_clients, "memory": by_rounds}[args.what](args)


if __name__ == "__main__":
    main()
