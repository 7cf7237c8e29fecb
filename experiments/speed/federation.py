"""Measure a round at real sites: our run, and Flower's own FedAvg of the same model, through one SuperLink.

python experiments/speed/federation.py [--models FedCKACNN ResNet18] [--turns 2] [--rounds 6] [--output results.json]
python experiments/speed/federation.py --show results.json

Three sites with a SuperNode each, on this machine, with TLS and keys. A round is one local epoch of SGD with momentum
on 128 images of 32 px at each site, batch 64, without evaluation; both begin with the same weights. Flower's app is the
shortest one: its ClientApp trains in the process that Flower starts for each message. Runs alternate. The first round
of each, which also waits for sites to start, and our last one, which evaluates, are excluded. A relay between the sites
and the SuperLink counts bytes, including TLS, HTTP and the requests of idle nodes.

Flower is in the extra ``federation``: ``pip install -e .[federation]``.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from overhead import BATCH, LR, generate, machine  # next to this file

ROOT = Path(__file__).resolve().parents[2]
SITES, IMAGES = 3, 128
OURS, THEIRS = "fl_lightning", "Flower's FedAvg"
PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "plain"
version = "1.0.0"
description = "FedAvg"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "local"
[tool.flwr.app.components]
serverapp = "plain.apps:server_app"
clientapp = "plain.apps:client_app"
[tool.flwr.app.config]
model = ""
images = ""
rounds = 1
done = ""
"""

PLAIN = """\
from sides import flower_sites

client_app = flower_sites.client_app
server_app = flower_sites.server_app
"""


class Counted:
    """A relay to a port of this machine, which counts the bytes that pass.

    Attributes:
        port: where it listens.
        up: bytes towards the port.
        down: bytes from it.
    """

    def __init__(self, port: int) -> None:
        self.target, self.up, self.down = port, 0, 0
        self.server = socket.create_server(("127.0.0.1", 0))
        self.port = self.server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self.server.accept()
            far = socket.create_connection(("127.0.0.1", self.target))
            for source, sink, way in ((near, far, "up"), (far, near, "down")):
                threading.Thread(target=self._copy, args=(source, sink, way), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        try:
            while data := source.recv(2**16):
                setattr(self, way, getattr(self, way) + len(data))
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass


def config(model: str, images: Path, rounds: int) -> dict[str, Any]:
    """Our run."""
    optimizer = {"class_path": "torch.optim.SGD", "init_args": {"lr": LR, "momentum": 0.9}}
    encoder = {"num_classes": 10, "encoder": {"class_path": model}, "optimizer": optimizer}
    data = {"root": str(images), "num_clients": SITES, "batch_size": BATCH}
    return {
        "seed_everything": 0,
        "model": {"class_path": "ImageClassifier", "init_args": encoder},
        "data": {"class_path": "NpyImages", "init_args": data},
        "trainer": {"max_rounds": rounds, "eval_every_n_rounds": rounds, "logger": False, "enable_progress_bar": False},
    }


def write_plain(folder: Path) -> Path:
    """Flower's own app."""
    (folder / "plain").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "plain" / "__init__.py").write_text("")
    # Flower searches the text of the file for these names
    (folder / "plain" / "apps.py").write_text(PLAIN)
    return folder


def begin(flower: Any, folder: Path, images: Path, model: str, rounds: int) -> Path:
    """Start our workers of a model; returns the folder of the app."""
    from helpers.sites import app_of

    app = app_of(folder / model, config(model, images, rounds))
    for k in range(SITES):
        words = ("--name", f"site-{k}", "--part", k, "--folder", folder / model / f"{k}")
        words = (*words, "--socket", folder / f"{k}.sock")
        where = ("--config", app / "site" / "config.yaml")
        flower.start(f"{model}-{k}", sys.executable, ROOT / "cli.py", "site", *where, *words)
    flower.until(lambda: all((folder / f"{k}.sock").exists() for k in range(SITES)), f"{model}-0", 300)
    return app


def timed(
    flower: Any, relay: Counted, app: Path, done: Path, rounds: int, given: dict[str, Any]
) -> list[dict[str, float]]:
    """Return the cost of each round from the second on; a round ends with a new line in the file ``done``."""
    words = " ".join(f'{key}="{value}"' if isinstance(value, str) else f"{key}={value}" for key, value in given.items())
    process = flower.start("run", "flwr", "run", app, "tls", "--stream", "--run-config", words)
    marks: list[tuple[float, int, int]] = []
    while len(marks) < rounds:
        (file,) = [*done.parent.rglob(done.name)] or [done]
        header = file.suffix == ".csv"
        if file.exists() and len(file.read_text().splitlines()) - header > len(marks):
            marks.append((time.perf_counter(), relay.up, relay.down))
        if process.poll() is not None and len(marks) < rounds:
            raise RuntimeError(flower.log("run")[-2000:])
        time.sleep(0.02)
    process.wait(120)
    costs = [{"seconds": b[0] - a[0], "up": b[1] - a[1], "down": b[2] - a[2]} for a, b in pairwise(marks)]
    return costs[:-1]  # ours evaluates in the last one


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Both sides in turn."""
    from helpers.flower import Flower

    rows = []
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as name:
        folder, images = Path(name), Path(name) / "images"
        images.mkdir()
        generate(images, SITES * IMAGES, 100)
        with Flower(folder / "flower") as flower:
            relay = Counted(flower.port)
            for k in range(SITES):
                flower.register(f"node-{k}")
                own = f'socket="{folder / f"{k}.sock"}" number={k}'
                flower.start_node(f"node-{k}", own, port=relay.port)
            plain = write_plain(folder / "app")
            for model in args.models:
                ours = begin(flower, folder, images, model, args.rounds)
                for turn in range(args.turns):
                    of = {"model": model, "turn": turn, "machine": machine()}
                    root = folder / f"{model}-{turn}"
                    costs = timed(flower, relay, ours, root / "metrics.csv", args.rounds, {"root": str(root)})
                    rows += [{"side": OURS, **of, **cost} for cost in costs]
                    done = folder / f"{model}-{turn}.done"
                    own = {"model": model, "images": str(images), "rounds": args.rounds, "done": str(done)}
                    costs = timed(flower, relay, plain, done, args.rounds, own)
                    rows += [{"side": THEIRS, **of, **cost} for cost in costs]
                for k in range(SITES):
                    flower.processes[f"{model}-{k}"].kill()
                    (folder / f"{k}.sock").unlink()
    return {"flwr": version("flwr"), "sites": SITES, "images": IMAGES, "rows": rows}


def table(results: dict[str, Any]) -> str:
    """The medians over all rounds, as a table in Markdown."""
    lines = ["| model | side | seconds a round | MB up a site | MB down a site | rounds |", "|---|---|---|---|---|---|"]
    for model in dict.fromkeys(row["model"] for row in results["rows"]):
        for side in (OURS, THEIRS):
            rows = [row for row in results["rows"] if (row["model"], row["side"]) == (model, side)]
            seconds, up, down = (statistics.median(row[key] for row in rows) for key in ("seconds", "up", "down"))
            sizes = " | ".join(f"{size / results['sites'] / 1e6:.3g}" for size in (up, down))
            lines.append(f"| {model} | {side} | {seconds:.1f} | {sizes} | {len(rows)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["FedCKACNN", "ResNet18"])
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--show", type=Path)
    args = parser.parse_args()
    results = json.loads(args.show.read_text()) if args.show else measure(args)
    if args.output:
        args.output.write_text(json.dumps(results, indent=1) + "\n")
    machines = dict.fromkeys(f"{row['model']}: {row['machine']}" for row in results["rows"])
    print(*machines, f"flwr {results['flwr']}", table(results), sep="\n")


if __name__ == "__main__":
    main()
