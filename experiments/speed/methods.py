"""Measure the cost of methods: seconds a round, as ratios to FedAvg, in the same process.

python experiments/speed/methods.py [--model FedUVCNN|ResNet18|FedCKACNN] [--cycles 9] [--methods MOON FedCKA]
                                    [--batch_size 64] [--local_epochs 5] [--precision bf16-mixed] [--channels_last]
                                    [--cache_references auto|true|false] [--cpu_time]

Images of 32 px, SGD, one thread. A cycle is one round of FedAvg, one of each method and one of FedAvg again,
whose ratio shows how far the machine can be trusted. All run in turn, in threads that take turns. Rounds count without
their evaluation. While other programs are running, the processor time of a thread is more reliable than wall-clock
time. `footprint.py` measures memory.

FedCKA's and FedUV's papers give seconds a round on FedCKA's network, with 10 local epochs in batches of 128:

python experiments/speed/methods.py --model FedCKACNN --batch_size 128 --local_epochs 10 --precision bf16-mixed
                                    --channels_last --methods FedCKA FedUV MOON FedDecorr
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from lightning.pytorch import seed_everything

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from overhead import generate  # next to this file

from fl_lightning import FederatedTrainer, Method, methods
from fl_lightning.callbacks import Callback
from fl_lightning.data import NpyImages
from fl_lightning.models import FedCKACNN, FedUVCNN, ImageClassifier, Projector, ResNet18

FEDAVG, AGAIN = "FedAvg", "FedAvg again"
TEST = 64
METHODS: dict[str, Callable[[], list[Method]]] = {
    **{name: partial(lambda name: [getattr(methods, name)()], name) for name in methods.__all__ if name != "Local"},
    "FedBuff": lambda: [methods.FedBuff()],
    "TrimmedMean": lambda: [methods.TrimmedMean(f=2)],
    "SCAFFOLD by gradients": lambda: [methods.SCAFFOLD(variate="gradients")],
    "FedProto, weights too": lambda: [methods.FedProto(aggregate_weights=True)],
    "MOON and FedCKA": lambda: [methods.MOON(), methods.FedCKA()],
}


MODELS: dict[str, Callable[..., ImageClassifier]] = {
    "FedUVCNN": lambda **how: ImageClassifier(FedUVCNN(4), Projector(256), **how),
    "ResNet18": lambda **how: ImageClassifier(ResNet18(), **how),
    "FedCKACNN": lambda **how: ImageClassifier(FedCKACNN(), **how),
}


def build(name: str) -> ImageClassifier:
    # without momentum, which SCAFFOLD is not defined for
    return MODELS[name](optimizer=partial(torch.optim.SGD, lr=0.01))


class Turn(Callback):
    """Holds a run at the beginning of each round until :meth:`take`, and keeps the seconds of the rounds."""

    def __init__(self, cpu_time: bool = False) -> None:
        self._go, self._ready = threading.Semaphore(0), threading.Semaphore(0)
        self._cpu_time, self._began = cpu_time, 0.0
        self.seconds: list[float] = []

    def on_round_start(self, trainer: FederatedTrainer) -> None:
        self._ready.release()
        self._go.acquire()
        self._began = time.thread_time()

    def on_round_end(self, trainer: FederatedTrainer) -> None:
        wall = trainer.metrics["time/train"] + trainer.metrics["time/server"]
        self.seconds.append(time.thread_time() - self._began if self._cpu_time else wall)

    def on_fit_end(self, trainer: FederatedTrainer) -> None:
        self._ready.release()

    def wait(self) -> None:
        """Until the run stands before its next round, or at its end."""
        self._ready.acquire()

    def take(self) -> None:
        """Let the run go one round, and wait until it is done."""
        self._go.release()
        self.wait()


def train(args: argparse.Namespace, folder: str, name: str, rounds: int, callbacks: list[Callback]) -> None:
    """Run the method ``name``, or FedAvg for an unknown name."""
    trainer = FederatedTrainer(
        max_rounds=rounds,
        local_epochs=args.local_epochs,
        cache_references={"true": True, "false": False}.get(args.cache_references, "auto"),
        eval_every_n_rounds=rounds,
        threads_per_worker=args.threads,
        precision=args.precision,
        channels_last=args.channels_last,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        default_root_dir=Path(folder, "runs"),
        accelerator="cpu",
    )
    sizes = {"train_size": args.clients * args.images, "test_size": TEST}
    data = NpyImages(folder, num_clients=args.clients, batch_size=args.batch_size, **sizes)
    trainer.fit(build(args.model), data, METHODS.get(name, list)())


def measure(args: argparse.Namespace, folder: str) -> dict[str, list[float]]:
    """Seconds of the rounds by method, without the first two, which have no previous models or warm up."""
    names = [FEDAVG, *args.methods, AGAIN]
    turns = {name: Turn(args.cpu_time) for name in names}
    threads = []
    for name, turn in turns.items():
        run = partial(train, args, folder, name, args.cycles + 2, [turn])
        threads.append(threading.Thread(target=run, daemon=True))
        threads[-1].start()
        turn.wait()
    for cycle in range(args.cycles + 2):
        for turn in turns.values():
            turn.take()
        print(f"cycle {cycle - 1} of {args.cycles}", file=sys.stderr)
    for thread in threads:
        thread.join()
    return {name: turn.seconds[2:] for name, turn in turns.items()}


def report(args: argparse.Namespace, seconds: dict[str, list[float]]) -> None:
    fedavg = seconds[FEDAVG]
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, {args.threads} thread")
    print(
        f"{args.model}, {args.precision}, {args.clients} clients of {args.images} images, batch {args.batch_size}, "
        f"local epochs {args.local_epochs}, cache_references {args.cache_references}, {args.cycles} cycles; "
        f"FedAvg's fastest round {min(fedavg):.2f} s, median {statistics.median(fedavg):.2f} s"
    )
    print(f"{'ratio to FedAvg':24}{'fastest':>9}{'median':>9}{'lowest':>9}{'highest':>9}")
    for name, values in seconds.items():
        ratios = [a / b for a, b in zip(values, fedavg, strict=True)]
        columns = (min(values) / min(fedavg), statistics.median(ratios), min(ratios), max(ratios))
        print(f"{name:24}{''.join(f'{value:9.3f}' for value in columns)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="FedUVCNN")
    parser.add_argument("--methods", nargs="*", choices=[*METHODS, FEDAVG], default=list(METHODS))
    parser.add_argument("--cycles", type=int, default=9)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--images", type=int, default=512, help="of a client")
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--local_epochs", type=int, default=1)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--threads", type=int, default=1)
    cached = {"choices": ["auto", "true", "false"], "default": "auto"}
    parser.add_argument("--cache_references", nargs="?", const="true", **cached)
    parser.add_argument("--cpu_time", action="store_true", help="measure processor time")
    parser.add_argument("--channels_last", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        seed_everything(0, verbose=False)
        generate(Path(folder), args.clients * args.images, TEST)
        seconds = measure(args, folder)
    report(args, seconds)


if __name__ == "__main__":
    main()
