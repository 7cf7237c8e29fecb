"""Sites on this machine: the workers of sites in forked processes, and a link that takes the place of Flower."""

import multiprocessing
import os
import threading
import time
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout

import torch
import yaml
from torch.optim.lr_scheduler import ReduceLROnPlateau

from fl_lightning.cli import FederatedCLI
from fl_lightning.federation.link import reached_by
from fl_lightning.federation.relay import relayed
from fl_lightning.models import ImageClassifier

ROUNDS, SITES = 3, 3
APART = ("time/", "memory/", "placed/", "sites/", "domain/", "bytes/message/")
SMALL = {
    "seed_everything": 0,
    "model": {
        "class_path": "ImageClassifier",
        "init_args": {
            "num_classes": 10,
            "encoder": {"class_path": "MLP", "init_args": {"in_features": 64, "hidden": [16]}},
            "projector": {"class_path": "Projector", "init_args": {"width": 8}},
            "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}},
        },
    },
    "data": {
        "class_path": "Digits",
        "init_args": {
            "num_clients": SITES,
            "batch_size": 64,
            "partitioner": {"class_path": "Dirichlet", "init_args": {"alpha": 0.5}},
        },
    },
    "trainer": {"max_rounds": ROUNDS, "clients_per_step": 1, "logger": False, "enable_progress_bar": False},
}


class Watching(ImageClassifier):
    """Halves its rate after each round, as the test loss never falls by ten."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0, threshold_mode="abs")
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "test/loss"}}


class Sockets:
    """Reaches the workers of sites by their sockets: node k is the worker k.

    Args:
        paths: their sockets.
        patience: seconds in which a worker must listen.

    Attributes:
        gone: nodes that are not there.
        altered: changes the answer of a node, by its number.
        lost: numbers of nodes whose next answer to a visit is lost.
        updates: the answers to visits, before they are changed or lost.
    """

    def __init__(self, paths, patience=30):
        self.paths, self.patience, self.answers, self.number = dict(enumerate(paths)), patience, {}, 0
        self.gone, self.altered, self.lost, self.sent, self.updates = set(), {}, set(), [], []

    def nodes(self):
        return [node for node in self.paths if node not in self.gone]

    def send(self, node, packet):
        self.number += 1
        number = str(self.number)
        self.sent.append((node, packet))

        def ask():
            answer = relayed(str(self.paths[node]), packet, self.patience)
            if '"update"' in answer.text:
                self.updates.append(answer)
                if node in self.lost:
                    self.lost.discard(node)
                    answer = "lost: on the way"
                elif node in self.altered:
                    answer = self.altered[node](answer)
            self.answers[number] = answer

        threading.Thread(target=ask, daemon=True).start()
        return number

    def receive(self, messages):
        return {number: self.answers.pop(number) for number in [*messages] if number in self.answers}


def command(*words):
    """The trainer of a command of the program, in this process."""
    return FederatedCLI([str(word) for word in words]).trainer


def written(path, config):
    """A config as a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


def app_of(folder, config, **of_sites):
    """The folder of the app of a config, whose server's data have some arguments."""
    app = folder / "app"
    command("federate", "--config", written(folder / "config.yaml", config), "--output", app)
    server = app / "federated_run" / "config.yaml"
    contents = yaml.safe_load(server.read_text())
    contents["data"]["init_args"] |= of_sites
    written(server, contents)
    return app


def _work(app, k, folder, words):
    os.setsid()
    with open(folder / f"{k}.log", "a") as log, redirect_stderr(log), redirect_stdout(log):
        where = ("--name", f"site-{k}", "--part", k, "--folder", folder / str(k), "--socket", folder / f"{k}.sock")
        command("site", "--config", app / "site" / "config.yaml", *where, *words)


@contextmanager
def worker(app, k, folder, *words):
    """A worker of a site in a process of its own, which ends with the block; gives the process."""
    process = multiprocessing.get_context("fork").Process(target=_work, args=(app, k, folder, words))
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


@contextmanager
def workers(app, folder, number=SITES):
    """The workers of the first sites, which end with the block; gives their processes."""
    with ExitStack() as stack:
        yield [stack.enter_context(worker(app, k, folder)) for k in range(number)]


def until(condition, seconds=60):
    """Wait for something that is to come."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it has not come"
        time.sleep(0.05)


def alone(folder, config):
    """The trainer of the same run in one process."""
    return command(
        "fit", "--config", written(folder / "alone.yaml", config), "--trainer.default_root_dir", folder / "fit"
    )


def assert_same_bits(state, other):
    """Fail where two states differ."""
    assert state.keys() == other.keys()
    for entry, value in other.items():
        assert torch.equal(state[entry], value), entry


def numbers_of(history):
    """The metrics of each round, without what depends on the machine or is of a federation alone."""
    return [{tag: value for tag, value in row.items() if not tag.startswith(APART)} for row in history]


def serve(app, link, *words):
    """The trainer of the server, whose run is done."""
    root = app.parent / "server"
    with reached_by(link):
        config = app / "federated_run" / "config.yaml"
        return command("fit", "--config", config, "--trainer.default_root_dir", root, *words)
