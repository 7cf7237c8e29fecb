"""Compare a round of our trainer with other frameworks and a bare PyTorch loop that do the same work.

python experiments/speed/peers.py [--peers flower pfl-2] [--turns 7] [--model FedCKACNN] [--devices 2]
                                  [--python other/bin/python] [--output results.json]
python experiments/speed/peers.py --case synthetic [--sides vmap-1 fedjax-1] [--turns 7]
                                  [--option checkpoint_every_n_rounds=100] [--output results.json]
python experiments/speed/peers.py --show results.json

FedAvg in each case. A side is a separate process that runs a round on request; sides are run in turn, A B C A B C, once
to warm up. All begin with the same weights and read the same batches in the same order, from our data module.

Case ``images``: 10 clients of 1,000 images of 32 px, batch 64, one local epoch of SGD with momentum, and in each round
the evaluation of the global model on 2,000 images. All sides but one of ours compute in float32. Each has two threads
in total; one bare loop has a single one. A peer, our trainer and our trainer in bfloat16 are run in turn; their final
accuracies must agree.

The other cases are of small models: one local epoch of SGD without momentum, no evaluation, float32. ``synthetic`` is a
logistic regression on FedProx's Synthetic(1, 1), 100 clients of at most 1,000 examples, all in each round, batch 10;
``femnist`` is fedjax's CNN for EMNIST on noise in its shape, 1,000 clients of 20 to 350 examples, 50 in a round, batch
20. The rates are 0.01 and 0.1. First each side runs one round without dropout, and its weights must agree with ours to
1e-4. Then all are run in turn, the CNN with its dropout. The other sides have their batches ready before a round; ours
gathers them, logs and writes checkpoints as usual. A side is bound to one core or two, with one thread or worker for
each.

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
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from overhead import CLIENTS, generate, machine  # next to this file
from sides import small
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

# the sides of the small models; the others are compared with the first
SMALL = {
    "ours-1": Kind("ours", "fl_lightning, 1 worker", 1, options=("--devices=1",)),
    "loop-1": Kind("loop", "bare loop", 1),
    "vmap-1": Kind("vmap", "torch.vmap over clients", 1),
    "fedjax-1": Kind("fedjax", "fedjax, jit", 1, options=("--backend=jit",)),
    "ours-2": Kind("ours", "fl_lightning, 2 workers", 2, options=("--devices=2",)),
    "loop-2": Kind("loop", "bare loop", 2),
    "vmap-2": Kind("vmap", "torch.vmap over clients", 2),
    "fedjax-2": Kind("fedjax", "fedjax, jit", 2, options=("--backend=jit",)),
    "fedjax-pmap": Kind("fedjax", "fedjax, pmap", 2, options=("--backend=pmap",)),
}
LARGEST = 1e-4  # difference of a side's weights from ours


class NotInstalled(Exception):
    """A side's framework cannot be imported."""


class Side:
    """A process that runs a round on request; to be used in a ``with`` block."""

    def __init__(self, args: argparse.Namespace, folder: Path, kind: Kind) -> None:
        self.kind, self.accuracy = kind, 0.0
        self.seconds: list[float] = []
        start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={kind.ranks}"] if kind.ranks else []
        names = ("case", "model", "images", "test", "devices", "clients", "cohort")
        work = {name: getattr(args, name) for name in names}
        work |= {"rounds": args.turns + 1, "folder": folder, "threads": kind.threads, "side": kind.module}
        given = [f"--{name}={value}" for name, value in work.items() if value is not None]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed with the block
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._log, "text": True}
        self._process = subprocess.Popen([args.python, *start, __file__, *given, *kind.options], **pipes)

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()  # at the end of the input a side ends
        self._log.close()

    def wait(self) -> dict[str, str]:
        """Wait until the side is ready for its first round, and return the versions of its packages."""
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
    """Run a side in this process."""
    gate = Gate(args.rounds)
    if args.case in small.CASES:
        small.bind(args.threads)
    try:
        module = importlib.import_module(f"sides.{args.side}")
    except ModuleNotFoundError as error:
        gate.tell(missing=error.name)
        return
    if os.environ.get("RANK", "0") == "0":
        gate.tell(versions={name: version(name) for name in module.PACKAGES})
    module.run(args, gate)


def measure(args: argparse.Namespace, folder: Path, kinds: list[Kind]) -> tuple[list[Side], dict[str, str]]:
    """Run some sides in turn; return them with their seconds, and the versions of their packages."""
    versions: dict[str, str] = {}
    with ExitStack() as stack:
        sides = []
        for kind in kinds:
            sides.append(stack.enter_context(Side(args, folder, kind)))
            versions |= sides[-1].wait()
        for _ in range(args.turns + 1):
            for side in sides:
                side.take()
    return sides, versions


def compare_images(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The results of the case of images: of each pair of a peer and a setting of ours, the seconds of each turn."""
    versions: dict[str, str] = {}
    pairs = []
    for name in args.peers:
        try:
            kinds = [PEERS[name], *(kind for kind in OURS if kind.title in args.ours)]
            (peer, *ours), found = measure(args, folder, kinds)
        except NotInstalled as missing:
            print(f"{PEERS[name].title}: not installed ({missing})", flush=True)
            continue
        versions |= found
        for side in ours:
            # the first round warms up
            sides = {"peer": peer.kind.title, "ours": side.kind.title, "threads": peer.kind.threads}
            seconds = {"seconds": peer.seconds[1:], "seconds of ours": side.seconds[1:]}
            pairs.append({**sides, **seconds, "accuracy": peer.accuracy, "accuracy of ours": side.accuracy})
    return {"machine": machine(), "versions": versions, "model": args.model, "sides": pairs}


def table_of_images(results: dict[str, Any]) -> str:
    """Return the results of the case of images as a Markdown table: the ratio of a peer's time to ours."""
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    pairs = {(pair["peer"], pair["ours"]): pair for pair in results["sides"]}
    settings = list(dict.fromkeys(ours for _, ours in pairs))
    lines = [f"{results['model']}: {results['machine']}; {versions}", ""]
    lines += [f"| side | threads | seconds, fastest | {' | '.join(f'times ours in {ours}' for ours in settings)} |"]
    lines += ["|---" * (3 + len(settings)) + "|"]
    for peer in dict.fromkeys(peer for peer, _ in pairs):
        of_peer = {ours: pairs[peer, ours] for ours in settings if (peer, ours) in pairs}
        first = next(iter(of_peer.values()))
        times = (f"{ratio(of_peer[ours]):.2f}" if ours in of_peer else "" for ours in settings)
        lines.append(f"| {peer} | {first['threads']} | {min(first['seconds']):.2f} | {' | '.join(times)} |")
    return "\n".join(lines)


def ratio(pair: dict[str, Any]) -> float:
    """A peer's fastest round through ours."""
    return min(pair["seconds"]) / min(pair["seconds of ours"])


def differences(args: argparse.Namespace, folder: Path) -> tuple[dict[Kind, float], float]:
    """Have each side run a round without dropout.

    Returns:
        The largest difference of the weights from ours, of each side that is installed; and the largest difference of
        ours from those before the round, without which the others would say nothing.
    """
    kinds = {name: SMALL[name] for name in SMALL if name in ("ours-1", *args.sides)}
    ours = [kind for name, kind in kinds.items() if name.startswith("ours")]
    changed = [
        replace(kind, title=f"{kind.title}, {option}", options=(*kind.options, f"--option={option}"))
        for option in args.option
        for kind in ours
    ]
    found: dict[Kind, float] = {}
    ours_after: dict[str, torch.Tensor] = {}
    file, one_round = folder / "weights.pt", argparse.Namespace(**vars(args) | {"turns": 0})
    for kind in [*kinds.values(), *changed]:
        try:
            measure(one_round, folder, [replace(kind, options=(*kind.options, f"--save={file}"))])
        except NotInstalled as missing:
            print(f"{kind.title}: not installed ({missing})", flush=True)
            continue
        weights = torch.load(file)
        ours_after = ours_after or weights
        found[kind] = gap(weights, ours_after)
    return found, gap(small.first_model(argparse.Namespace(case=args.case, dropout=False)).state_dict(), ours_after)


def gap(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest difference of two states' entries; NaN where one of them has it."""
    return float(torch.stack([(a[name] - value).abs().max() for name, value in b.items()]).max())


def compare_small(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The results of a case of small models: of each side, microseconds a step of each turn, without the first."""
    if args.case == "femnist":
        small.generate(folder, args.clients)
    gaps, moved = differences(args, folder)
    sides, versions = measure(args, folder, [replace(kind, options=(*kind.options, "--dropout")) for kind in gaps])
    steps = small.steps(argparse.Namespace(**vars(args) | {"rounds": args.turns + 1, "folder": folder}))
    rows = []
    for side, difference in zip(sides, gaps.values(), strict=True):
        took = [1e6 * seconds / number for seconds, number in zip(side.seconds, steps, strict=True)]
        row = {"side": side.kind.title, "threads": side.kind.threads, "difference": difference}
        rows.append({**row, "microseconds": took[1:]})
    work = {"clients": args.clients, "cohort": args.cohort, "steps": steps[1:], "moved": moved}
    return {"machine": machine(), "versions": versions, **work, "sides": rows}


def table(case: str, results: dict[str, Any]) -> str:
    """The results of a case as a table in Markdown."""
    if case == "images":
        return table_of_images(results)
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    lines = [f"{case}: {results['machine']}; {versions}; ours moves a weight by up to {results['moved']:.0e}", ""]
    lines += ["| side | threads | microseconds a step, fastest | median | weights differ by |", "|---|---|---|---|---|"]
    for row in results["sides"]:
        took = row["microseconds"]
        numbers = f"{min(took):.1f} | {statistics.median(took):.1f} | {row['difference']:.0e}"
        lines.append(f"| {row['side']} | {row['threads']} | {numbers} |")
    return "\n".join(lines)


def run(args: argparse.Namespace) -> None:
    """Measure a case, print and store its table; ends with an error where a side has not done the same work."""
    with tempfile.TemporaryDirectory() as folder:
        if args.case == "images":
            generate(Path(folder), CLIENTS * args.images, args.test)
            results = compare_images(args, Path(folder))
        else:
            case = small.CASES[args.case]
            args.clients = args.clients or case.clients
            args.cohort = args.cohort or min(case.cohort, args.clients)
            results = compare_small(args, Path(folder))
    print(table(args.case, results))
    if args.output:
        stored = json.loads(args.output.read_text()) if args.output.exists() else {}
        args.output.write_text(json.dumps(stored | {args.case: results}, indent=1) + "\n")
    differing = differing_sides(args.case, results, args.tolerance)
    if differing:
        sys.exit(f"not the same work: {'; '.join(differing)}")


def differing_sides(case: str, results: dict[str, Any], tolerance: float) -> list[str]:
    """The sides that have not done the same work as ours: by the accuracy in the end, or by the weights."""
    if case == "images":
        pairs = [(pair, pair["accuracy"], pair["accuracy of ours"]) for pair in results["sides"]]
        return [
            f"{pair['peer']} has an accuracy of {peer:.3f}, ours in {pair['ours']} of {ours:.3f}"
            for pair, peer, ours in pairs
            if not abs(peer - ours) <= tolerance
        ]
    rows = [row for row in results["sides"] if not row["difference"] <= LARGEST]
    return [f"the weights of {row['side']} differ from ours by {row['difference']:.0e}" for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=["images", *small.CASES], default="images")
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
    parser.add_argument("--sides", nargs="+", choices=SMALL, default=list(SMALL), help="of a small model")
    told = "NAME=VALUE of our trainer, which then runs a small model with it as well; may be repeated"
    parser.add_argument("--option", action="append", default=[], help=told)
    parser.add_argument("--clients", type=int, help="number of clients of a small model; default: as in its case")
    parser.add_argument("--cohort", type=int, help="clients in a round of a small model")
    parser.add_argument("--output", type=Path, help="JSON file to which the results are added")
    parser.add_argument("--show", type=Path, help="print the tables of such a file, and run nothing")
    for name in ("side", "folder", "precision", "save", "backend"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    for name in ("rounds", "threads"):
        parser.add_argument(f"--{name}", type=int, help=argparse.SUPPRESS)
    for name in ("channels_last", "dropout"):
        parser.add_argument(f"--{name}", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        run_side(args)
    elif args.show:
        print("\n\n".join(table(case, results) for case, results in json.loads(args.show.read_text()).items()))
    else:
        run(args)


if __name__ == "__main__":
    main()
