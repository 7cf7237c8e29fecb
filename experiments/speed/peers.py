"""What a round costs in our trainer, in other frameworks and in a bare PyTorch loop, which all do the same work.

python experiments/speed/peers.py [--peers flower pfl-2] [--turns 7] [--model FedCKACNN] [--devices 2]
                                  [--python other/bin/python]

FedAvg, 10 clients of 1,000 images of 32 px, batch 64, one local epoch of SGD with momentum, and in each round the
evaluation of the global model on 2,000 images. All sides begin with the same weights and read the same batches in the
same order, from our data module; all but one of ours compute in float32. Each has two threads in all, but for the bare
loop on one. A side is a process of its own that runs a round when it is told to. A peer, our trainer and our trainer in
bfloat16 are run in turn, A B C A B C, once to warm up; the accuracies they have in the end must agree.

The peers are in the extra ``speed``: ``pip install -e .[speed]``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from overhead import CLIENTS, generate, machine  # lies beside this file
from sides.work import Gate


@dataclass(frozen=True)
class Kind:
    """How a side is started.

    Attributes:
        module: of the package ``sides``.
        title: its name in the table.
        threads: in all its processes together.
        ranks: processes that ``torchrun`` starts; 0 starts one without it.
        options: for the side alone.
    """

    module: str
    title: str
    threads: int = 2
    ranks: int = 0
    options: tuple[str, ...] = ()


OURS = (
    Kind("ours", "float32", options=("--precision=32-true",)),
    Kind("ours", "float32, channels_last", options=("--precision=32-true", "--channels_last")),
    Kind("ours", "bf16, channels_last", options=("--precision=bf16-mixed", "--channels_last")),
)
PEERS = {
    "bare-1": Kind("bare", "bare loop, 1 thread", threads=1),
    "bare-2": Kind("bare", "bare loop, 2 threads"),
    "flower": Kind("flower", "Flower, 2 actors"),
    "pfl-1": Kind("apple", "pfl-research, 1 rank"),
    "pfl-2": Kind("apple", "pfl-research, 2 ranks", ranks=2),
    "fluke": Kind("fluke", "fluke"),
}


class NotInstalled(Exception):
    """A side's framework cannot be imported."""


class Side:
    """A process that runs a round when told; to be used in a ``with`` block."""

    def __init__(self, args: argparse.Namespace, folder: Path, kind: Kind) -> None:
        self.kind, self.accuracy = kind, 0.0
        self.seconds: list[float] = []
        start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={kind.ranks}"] if kind.ranks else []
        work = {name: getattr(args, name) for name in ("model", "images", "test", "devices")}
        work |= {"rounds": args.turns + 1, "folder": folder, "threads": kind.threads, "side": kind.module}
        given = [f"--{name}={value}" for name, value in work.items()]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed with the block
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._log, "text": True}
        self._process = subprocess.Popen([args.python, *start, __file__, *given, *kind.options], **pipes)

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()  # at the end of the input a side ends
        self._log.close()

    def wait(self) -> dict[str, str]:
        """Wait until it stands before its first round, and return the versions of what it uses."""
        versions = self._hear()["versions"]
        self._hear()
        return versions

    def take(self) -> None:
        """Let it run one round, and wait until it is done."""
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        heard = self._hear()
        self.seconds.append(heard["seconds"])
        self.accuracy = heard["accuracy"]

    def _hear(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise RuntimeError(f"{self.kind.title} has failed:\n{self._log.read()[-5000:]}")
        heard = json.loads(line)
        if "missing" in heard:
            raise NotInstalled(heard["missing"])
        return heard


def run_side(args: argparse.Namespace) -> None:
    """What the process of a side does."""
    gate = Gate(args.rounds)
    try:
        module = importlib.import_module(f"sides.{args.side}")
    except ModuleNotFoundError as error:
        gate.tell(missing=error.name)
        return
    if os.environ.get("RANK", "0") == "0":
        gate.tell(versions={name: version(name) for name in module.PACKAGES})
    module.run(args, gate)


def measure(args: argparse.Namespace, folder: Path, peer: Kind) -> tuple[list[Side], dict[str, str]]:
    """Run a peer and our sides in turn; returns them with what they took, and the versions of what they use."""
    versions: dict[str, str] = {}
    with ExitStack() as stack:
        sides = []
        for kind in (peer, *(kind for kind in OURS if kind.title in args.ours)):
            sides.append(stack.enter_context(Side(args, folder, kind)))
            versions |= sides[-1].wait()
        for _ in range(args.turns + 1):
            for side in sides:
                side.take()
    return sides, versions


def head(args: argparse.Namespace) -> None:
    print(f"{machine()}; {args.model}, {args.turns} turns, seconds a round")
    columns = ("fastest", "median", "fastest", "median", "ratio", "median", "lowest", "highest", "accuracy", "ours")
    print(f"{'peer':24}{'ours':26}{''.join(f'{column:>9}' for column in columns)}", flush=True)


def line(peer: Side, ours: Side) -> str:
    """A line of the table; the first round warms up."""
    a, b = peer.seconds[1:], ours.seconds[1:]
    ratios = [x / y for x, y in zip(a, b, strict=True)]
    seconds = (min(a), statistics.median(a), min(b), statistics.median(b))
    columns = (*seconds, min(a) / min(b), statistics.median(ratios), min(ratios), max(ratios))
    accuracies = f"{peer.accuracy:9.3f}{ours.accuracy:9.3f}"
    return f"{peer.kind.title:24}{ours.kind.title:26}{''.join(f'{c:9.2f}' for c in columns)}{accuracies}"


def compare(args: argparse.Namespace, folder: Path) -> tuple[dict[str, str], list[str]]:
    """Print the table; returns versions, and the pairs that have not done the same work."""
    versions: dict[str, str] = {}
    differing = []
    for name in args.peers:
        try:
            (peer, *ours), found = measure(args, folder, PEERS[name])
        except NotInstalled as missing:
            print(f"{PEERS[name].title:24}not installed ({missing})", flush=True)
            continue
        versions |= found
        for side in ours:
            print(line(peer, side), flush=True)
            if abs(peer.accuracy - side.accuracy) > args.tolerance:
                differing.append(f"{peer.kind.title} {peer.accuracy:.3f}, {side.kind.title} {side.accuracy:.3f}")
    return versions, differing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    titles = [kind.title for kind in OURS]
    parser.add_argument("--ours", nargs="+", choices=titles, default=titles, help="settings of our trainer")
    parser.add_argument("--turns", type=int, default=7, help="rounds of each side, after one that warms up")
    parser.add_argument("--model", choices=["FedCKACNN", "FedUVCNN"], default="FedCKACNN")
    parser.add_argument("--images", type=int, default=1000, help="of a client")
    parser.add_argument("--test", type=int, default=2000, help="test images")
    parser.add_argument("--devices", type=int, default=2, help="processes of our trainer")
    parser.add_argument("--tolerance", type=float, default=0.02, help="of the accuracies in the end")
    parser.add_argument("--python", default=sys.executable, help="interpreter of all sides")
    for name in ("side", "folder", "precision"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    for name in ("rounds", "threads"):
        parser.add_argument(f"--{name}", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--channels_last", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        run_side(args)
        return
    head(args)
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder), CLIENTS * args.images, args.test)
        versions, differing = compare(args, Path(folder))
    print(", ".join(f"{name} {number}" for name, number in versions.items()))
    if differing:
        sys.exit(f"not the same work, accuracies differ by more than {args.tolerance}: {'; '.join(differing)}")


if __name__ == "__main__":
    main()
