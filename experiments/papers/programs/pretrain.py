"""Trains the network of scaled/pretrained.yaml on the other half of the classes, and writes its weights.

python experiments/papers/programs/pretrain.py [--root FOLDER] [--output FILE] [--epochs N] [--offline]

The network is trained centrally on classes 0 to 4 of CIFAR-10, all 25,000 training images, without augmentation. Its
accuracy on their test images is printed. Then the last layer is drawn anew, as the clients' classes are others, and the
state dict is written to the file that the suite names, and with new LoRA adapters to the file that
scaled/pretrained_lora.yaml names. One seed decides all, so that the same machine gives the same files.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
from lightning import seed_everything

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from experiments.papers.scaled.some_classes import SomeClasses  # noqa: E402, found through the path above
from fl_lightning import FederatedTrainer  # noqa: E402
from fl_lightning.data import Pooled  # noqa: E402
from fl_lightning.models import MOONCNN, ImageClassifier, with_lora  # noqa: E402

CLASSES = [0, 1, 2, 3, 4]
SEED = 1000


def pretrain(root: str, epochs: int, offline: bool) -> tuple[ImageClassifier, float]:
    """Train the network; return it with a new last layer, and the accuracy that it had with the old one."""
    seed_everything(SEED)
    optimizer = partial(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=1e-5)
    network = ImageClassifier(MOONCNN(3, 32, "group"), num_classes=len(CLASSES), optimizer=optimizer)
    scale = {"mean": [0.4914, 0.4824, 0.4467], "std": [0.2471, 0.2435, 0.2616]}
    where = {"root": root, "offline": offline, "num_clients": 1, "partitioner": Pooled(), "batch_size": 64}
    data = SomeClasses(CLASSES, **where, **scale)
    with tempfile.TemporaryDirectory() as folder:
        trainer = FederatedTrainer(epochs, local_epochs=1, precision="32-true", logger=False, default_root_dir=folder)
        trainer.fit(network, data)
    network.classifier.reset_parameters()
    return network, trainer.metrics["test/accuracy"]


def save(network: torch.nn.Module, file: Path) -> None:
    torch.save({name: value.clone() for name, value in network.state_dict().items()}, file)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="data/cifar10_npy", help="folder of the .npy files, see scaled/cifar10.yaml")
    parser.add_argument("--output", type=Path, default=Path("data/pretrained.pt"), help="file of the weights")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--offline", action="store_true", help="a small generated data set, to see that it runs")
    options = parser.parse_args()
    network, accuracy = pretrain(options.root, options.epochs, options.offline)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    save(network, options.output)
    save(with_lora(network), options.output.with_stem(f"{options.output.stem}_lora"))
    print(f"{options.output}: {accuracy:.4f} of the test images of classes {CLASSES} after {options.epochs} epochs")
