"""Compare a round with its limit: the same steps and evaluation on prepared batches, by the same number of workers.

python experiments/speed/limit.py [--pairs 9] [--model FedCKACNN] [--precision 32-true] [--channels_last] [--augment]
                                  [--workers 2] [--images 1000] [--test 2000] [--output limit.json]
python experiments/speed/limit.py --show limit.json

FedAvg, 10 clients of 1,000 images of 32 px, batch 64, one local epoch, evaluation on 2,000 images, one thread a worker.
Before each round the same workers run the limit: their clients' forward and backward passes and optimizer steps, and
the evaluation's forward passes, on tensors in their final form. A ratio is the limit's time over the round's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import seed_everything

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from overhead import CLIENTS, LR, build, generate, machine  # next to this file

from fl_lightning import FederatedTrainer  # found through the path above
from fl_lightning.callbacks import Callback
from fl_lightning.data import Dirichlet, NpyImages, RandomCrop, RandomFlip


class Limit(Callback):
    """Runs pure compute before each round of the trainer, and keeps the seconds of both."""

    def __init__(self) -> None:
        self.limit: list[float] = []
        self.ours: list[float] = []

    def on_fit_start(self, trainer: FederatedTrainer) -> None:
        self.module = trainer.client.reference_copy().requires_grad_()
        rank, size = trainer.global_rank, trainer.world_size
        # all workers have equal shares, whatever the clients have
        loaders, batches = trainer.run.loaders, []
        for k in range(trainer.data.num_clients):
            with loaders.train(k, 0) as loader:
                batches += [batch for _, batch in loaders.batches(loader)]
        self.batches = batches[rank::size]
        tests = [loaders.to_device(batch) for batch in trainer.data.test_dataloader()]
        self.tests = tests[rank::size]

    def on_round_start(self, trainer: FederatedTrainer) -> None:
        self._end_of_ours(trainer)
        trainer.fabric.barrier()
        began = time.perf_counter()
        self._compute(trainer)
        trainer.fabric.barrier()
        self.limit.append(time.perf_counter() - began)
        self._began = time.perf_counter()

    def on_fit_end(self, trainer: FederatedTrainer) -> None:
        self._end_of_ours(trainer)

    def _end_of_ours(self, trainer: FederatedTrainer) -> None:
        if self.limit:
            trainer.fabric.barrier()
            self.ours.append(time.perf_counter() - self._began)

    def _compute(self, trainer: FederatedTrainer) -> None:
        module = self.module.train()
        optimizer = torch.optim.SGD(module.parameters(), lr=LR, momentum=0.9)
        for x, y in self.batches:
            with trainer.fabric.autocast():
                loss = torch.nn.functional.cross_entropy(module(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        module.eval()
        with torch.no_grad():
            for x, _ in self.tests:
                with trainer.fabric.autocast():
                    module(x)


def measure(args: argparse.Namespace) -> Limit:
    watch = Limit()
    seed_everything(0, verbose=False)
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder), CLIENTS * args.images, args.test)
        trainer = FederatedTrainer(
            max_rounds=args.pairs + 1,
            threads_per_worker=1,
            devices=args.workers,
            precision=args.precision,
            channels_last=args.channels_last,
            callbacks=[watch],
            logger=False,
            enable_progress_bar=False,
            default_root_dir=Path(folder, "runs"),
            accelerator="cpu",
        )
        augment = [RandomCrop(4), RandomFlip()] if args.augment else []
        skew = Dirichlet(args.alpha) if args.alpha else None
        data = NpyImages(folder, num_clients=CLIENTS, partitioner=skew, batch_size=64, augment=augment)
        trainer.fit(build(args.model), data)
    watch.phases = {
        phase: statistics.median(metrics[phase] for metrics in trainer.history[1:])
        for phase in trainer.history[0]
        if phase.startswith("time/")
    }
    return watch


def report(args: argparse.Namespace, watch: Limit) -> None:
    limit, ours = watch.limit[1:], watch.ours[1:]  # the first pair warms up
    title = [args.precision, *["channels_last"] * args.channels_last, *["crop and flip"] * args.augment]
    result = {"workers": args.workers, "limit": limit, "ours": ours, "machine": machine()}
    stored = {f"{args.model}, {', '.join(title)}": result}
    print(machine())
    print(table(stored))
    print("median seconds by phase:", ", ".join(f"{n.removeprefix('time/')} {v:.4f}" for n, v in watch.phases.items()))
    if args.output:
        before = json.loads(args.output.read_text()) if args.output.exists() else {}
        args.output.write_text(json.dumps(before | stored, indent=1) + "\n")


def table(stored: dict[str, Any]) -> str:
    """Results as a table in Markdown; a ratio is the limit's time over the round's, of a pair."""
    lines = ["| setting | workers | seconds of a round, median | of the limit | ratio, median | lowest | highest |"]
    lines += ["|---" * 7 + "|"]
    for name, result in stored.items():
        limit, ours = result["limit"], result["ours"]
        ratios = sorted(a / b for a, b in zip(limit, ours, strict=True))
        numbers = (statistics.median(ours), statistics.median(limit), statistics.median(ratios), ratios[0], ratios[-1])
        lines.append(f"| {name} | {result['workers']} | {' | '.join(f'{number:.2f}' for number in numbers)} |")
    return "\n".join(lines)


def arguments(about: str | None) -> argparse.ArgumentParser:
    """Add the arguments of this program, which other programs share."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--model", choices=["FedCKACNN", "FedUVCNN"], default="FedCKACNN")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--channels_last", action="store_true")
    parser.add_argument("--images", type=int, default=1000, help="of a client on average")
    parser.add_argument("--test", type=int, default=2000, help="test images")
    parser.add_argument("--augment", action="store_true", help="crop and flip")
    parser.add_argument("--alpha", type=float, default=0.0, help="of Dirichlet's label skew; 0 deals out equally")
    return parser


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output", type=Path, help="JSON file to which the results are added")
    parser.add_argument("--show", type=Path, help="print the table of such a file, and run nothing")
    given = parser.parse_args()
    if given.show:
        print(table(json.loads(given.show.read_text())))
    else:
        report(given, measure(given))
