"""Measure seconds a round on a GPU: workers, compiled models, the price of determinism, and methods on a large network.

python experiments/speed/gpu.py [--turns 7] [--models FedCKACNN FedUVCNN ResNet18] [--workers 1 2 4 8] [--clients 10]
python experiments/speed/gpu.py --methods [--turns 5]
python experiments/speed/gpu.py --data [--models ResNet18]

Clients of 1,000 images of 32 px, batch 64, one local epoch, bf16-mixed. Each setting is a separate run, with its
fastest and median round, and the ratio to one uncompiled worker. The last column is the share of the card's matrix rate
that training reaches: three times the operations of a forward pass, counted by torch, over the operations of a large
matrix product in the same time. ``--methods`` compares methods on ResNet-50 instead, and ``--data`` images that stay on
the GPU with those in main memory, with and without crop and flip.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from lightning.pytorch import seed_everything
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from overhead import generate, machine  # next to this file

from fl_lightning import FederatedTrainer, methods  # found through the path above
from fl_lightning.data import NpyImages, RandomCrop, RandomFlip
from fl_lightning.data.augmentation import Augmentation
from fl_lightning.models import FedCKACNN, FedUVCNN, ImageClassifier, Projector, ResNet18, ResNet50

MODELS = {
    "FedCKACNN": lambda: (FedCKACNN(), None),
    "FedUVCNN": lambda: (FedUVCNN(4), Projector(256)),
    "ResNet18": lambda: (ResNet18(), None),
    "ResNet50": lambda: (ResNet50(), None),
}
IMAGES = 10_000


class Stays(Augmentation):
    """Changes nothing, and keeps the images in main memory."""

    def __call__(self, images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return images


def build(name: str) -> ImageClassifier:
    return ImageClassifier(*MODELS[name](), optimizer=partial(torch.optim.SGD, lr=0.01))


def rounds(args: argparse.Namespace, model: str, method: str = "", **engine: object) -> list[float]:
    """Return the seconds of the rounds after the first, without evaluation.

    Each setting runs in a separate process: a process that has used the GPU cannot fork workers.
    """
    setting = {"workers": 1, "mode": False, "deterministic": None, "on_gpu": True, "augmented": False, **engine}
    setting |= {"model": model, "method": method, "turns": args.turns, "clients": args.clients}
    command = [sys.executable, __file__, "--child", json.dumps(setting)]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(found.stdout.splitlines()[-1])


def run(setting: dict) -> list[float]:
    """Run a setting in this process."""
    with tempfile.TemporaryDirectory() as folder:
        seed_everything(0, verbose=False)
        generate(Path(folder))
        trainer = FederatedTrainer(
            max_rounds=setting["turns"] + 1,
            eval_every_n_rounds=setting["turns"] + 1,
            accelerator="gpu",
            devices=1,
            workers_per_device=setting["workers"],
            compile=setting["mode"],
            deterministic=setting["deterministic"],
            precision="bf16-mixed",
            channels_last=True,
            logger=False,
            enable_progress_bar=False,
            default_root_dir=Path(folder, "runs"),
        )
        augment = [RandomCrop(), RandomFlip()] * setting["augmented"] + [Stays()] * (not setting["on_gpu"])
        data = NpyImages(folder, num_clients=setting["clients"], batch_size=64, augment=augment)
        trainer.fit(build(setting["model"]), data, [getattr(methods, setting["method"])()] if setting["method"] else [])
    return [metrics["time/train"] + metrics["time/server"] for metrics in trainer.history[1:]]


def matrix_rate() -> float:
    """Operations a second of a large product of bfloat16 matrices."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    seconds = []
    for _ in range(10):
        torch.cuda.synchronize()
        began = time.perf_counter()
        a @ a
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return 2 * 8192**3 / min(seconds)


def operations(model: str) -> float:
    """Operations of training on all images once: a backward pass is twice a forward pass."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        build(model).eval()(torch.zeros(1, 3, 32, 32))
    return 3 * IMAGES * counter.get_total_flops()


def line(title: str, seconds: list[float], base: float, share: float) -> None:
    numbers = (min(seconds), statistics.median(seconds), base / min(seconds), share)
    print(f"{title:36}{''.join(f'{number:10.3f}' for number in numbers)}", flush=True)


def by_engine(args: argparse.Namespace) -> None:
    rate = matrix_rate()
    for model in args.models:
        settings = [{"workers": count} for count in args.workers] + [{"mode": True}, {"mode": "reduce-overhead"}]
        settings.append({"deterministic": False})
        found = [rounds(args, model, **setting) for setting in settings]
        for setting, seconds in zip(settings, found, strict=True):
            line(f"{model}, {setting}", seconds, min(found[0]), operations(model) / min(seconds) / rate)


def by_place(args: argparse.Namespace) -> None:
    rate = matrix_rate()
    for model in args.models:
        for augmented in (False, True):
            base = 0.0
            for on_gpu in (False, True):
                seconds = rounds(args, model, on_gpu=on_gpu, augmented=augmented)
                base = base or min(seconds)
                title = f"{model}, {'on the GPU' if on_gpu else 'main memory'}{', crop, flip' * augmented}"
                line(title, seconds, base, operations(model) / min(seconds) / rate)


def by_method(args: argparse.Namespace) -> None:
    rate, base = matrix_rate(), 0.0
    for name in ("", "FedCKA", "MOON", "FedUV", "FedDecorr"):
        seconds = rounds(args, "ResNet50", name)
        base = base or min(seconds)
        line(f"ResNet50, {name or 'FedAvg'}", seconds, base, operations("ResNet50") / min(seconds) / rate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["FedCKACNN", "FedUVCNN", "ResNet18"])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--methods", action="store_true", help="compare methods on ResNet-50")
    parser.add_argument("--data", action="store_true", help="compare images on the GPU with images in main memory")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no GPU is available")
    if args.child:
        print(json.dumps(run(args.child)))
        return
    print(machine(), torch.cuda.get_device_name(0))
    print(f"{'':36}{'fastest':>10}{'median':>10}{'ratio':>10}{'share':>10}")
    (by_method if args.methods else by_place if args.data else by_engine)(args)


if __name__ == "__main__":
    main()
