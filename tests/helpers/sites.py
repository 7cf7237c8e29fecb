"""Sites on this machine: the workers of sites in forked processes, and a link that takes the place of Flower."""

import multiprocessing
import os
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout

import pytest
import torch
import yaml
from torch.optim.lr_scheduler import ReduceLROnPlateau

from fl_lightning import Method, ServerValue
from fl_lightning.cli.cli import FederatedCLI
from fl_lightning.data import Digits
from fl_lightning.federation import server
from fl_lightning.federation.framing import parted, relayed
from fl_lightning.federation.serialization import decoded
from fl_lightning.federation.site import Site
from fl_lightning.models import ImageClassifier
from fl_lightning.training.patching import patched

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
            "train_size": 400,
            "test_size": 100,
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


class Based(ImageClassifier):
    """Trains its projector and its head on a frozen encoder."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.encoder.requires_grad_(False)


class Moving(Based):
    """Changes biases of its frozen encoder from the second round on."""

    def on_train_end(self):
        for name, value in self.encoder.named_parameters():
            if self.current_epoch > 1 and name.endswith("bias"):
                value.data.add_(0.1)


class Assigning(Method):
    """Doubles biases of the frozen encoder at the start of the second round, and assigns them."""

    def on_round_start(self, server):
        if server.round == 1:
            server.assign({name: 2 * server.state[name] for name in server.frozen if name.endswith("bias")})


class Counting(Method):
    """Counts the rounds in a value that no client receives."""

    rounds = ServerValue(lambda server: 0, travels=False)

    def on_round_start(self, server):
        self.rounds += 1


class Beginning(Method):
    """Site k gets a head of its own, from the server or by its choice, and a number beside it."""

    def __init__(self, chooses=False):
        self.chooses = chooses

    def head(self, state, number):
        return {name: value + number for name, value in state.items() if name.startswith("classifier")}

    def sent_state(self, server, k):
        return None if self.chooses else self.head(server.state, k / 100)

    def sent_extras(self, server, k):
        return {"number": (k + server.round) / 100, "nested": {"tensor": server.state["classifier.bias"][:1] + k}}

    def start_state(self, client):
        extras = client.extras(self)
        number = extras["number"] + float(extras["nested"]["tensor"].detach())
        return self.head(client.received, number) if self.chooses else None


class Blank(Digits):
    """Its examples are all alike, once they are on the device."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return tuple(map(torch.zeros_like, batch))


class Here:
    """Reaches sites in this process, which answer at once: node k is the site k.

    Args:
        sites: the sites that answer.

    Attributes:
        absent: disconnected nodes.
        altered: changes the answer of a node, by its number.
        lost: numbers of nodes whose next answer to a visit is lost.
        updates: the answers to visits, before they are changed or lost.
    """

    altered = {}  # noqa: RUF012

    def __init__(self, sites):
        self.sites, self.answers, self.number = dict(enumerate(sites)), {}, 0
        self.absent, self.lost, self.sent, self.updates = set(), set(), [], []

    def nodes(self):
        return [node for node in self.sites if node not in self.absent]

    def answer(self, node, packet):
        return self.sites[node].answer(packet)

    def ask(self, node, packet, number):
        answer = self.answer(node, packet)
        if "update" in decoded(answer):
            self.updates.append(answer)
            if node in self.lost:
                self.lost.discard(node)
                answer = "lost: on the way"
            elif node in self.altered:
                answer = self.altered[node](answer)
        self.answers[number] = answer

    def send(self, node, packet):
        self.number += 1
        self.sent.append((node, packet))
        self.ask(node, packet, str(self.number))
        return str(self.number)

    def receive(self, messages):
        return {number: self.answers.pop(number) for number in [*messages] if number in self.answers}


class Sockets(Here):
    """Reaches the workers of sites by their sockets; they must listen within ``patience`` seconds."""

    def __init__(self, paths, patience=30):
        super().__init__(paths)
        self.patience = patience

    def answer(self, node, packet):
        return relayed(str(self.sites[node]), packet, self.patience)

    def ask(self, *message):
        threading.Thread(target=super().ask, args=message, daemon=True).start()


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
    path = app / "federated_run" / "config.yaml"
    contents = yaml.safe_load(path.read_text())
    contents["data"]["init_args"] |= of_sites
    written(path, contents)
    return app


def message_of(packet):
    """A message of the server: its part for all sites, and for one."""
    return dict(zip(("shared", "own"), map(decoded, parted(packet)), strict=True))


@contextmanager
def sites_here(app, folder, number=SITES, *words):
    """The first sites in this process, until the block ends."""
    began, done = queue.Queue(), threading.Event()

    def answer(run, weights, socket, **how):
        began.put(Site(run, **how))
        done.wait()

    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr("fl_lightning.trainer.answer_messages", answer)
        pool = stack.enter_context(ThreadPoolExecutor(number))
        stack.callback(done.set)
        sites = []
        for k in range(number):
            where = ("--name", f"site-{k}", "--part", k, "--folder", folder / str(k))
            running = pool.submit(command, "site", "--config", app / "site" / "config.yaml", *where, *words)
            while began.empty() and not running.done():
                time.sleep(0.001)
            sites.append(began.get() if not running.done() else running.result())
        yield sites


def _work(app, k, folder, words):
    os.setsid()
    with open(folder / f"{k}.log", "a") as log, redirect_stderr(log), redirect_stdout(log):
        where = ("--name", f"site-{k}", "--part", k, "--folder", folder / str(k), "--socket", folder / f"{k}.sock")
        command("site", "--config", app / "site" / "config.yaml", *where, *words)


@contextmanager
def worker(app, k, folder, *words):
    """Run a worker of a site in another process, which ends with the block; yield the process."""
    process = multiprocessing.get_context("fork").Process(target=_work, args=(app, k, folder, words))
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


@contextmanager
def workers(app, folder, number=SITES):
    """Run the workers of the first sites, which end with the block; yield their processes."""
    with ExitStack() as stack:
        yield [stack.enter_context(worker(app, k, folder)) for k in range(number)]


def until(condition, seconds=60):
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it has not come"
        time.sleep(0.05)


def alone(folder, config):
    """The trainer of the same run in one process."""
    return command(
        "fit", "--config", written(folder / "alone.yaml", config), "--trainer.default_root_dir", folder / "fit"
    )


def numbers_of(history):
    """The metrics of each round, without what depends on the machine or is of a federation alone."""
    return [{tag: value for tag, value in row.items() if not tag.startswith(APART)} for row in history]


def serve(app, link, *words):
    """The trainer of the server, whose run is done."""
    root = app.parent / "server"
    with patched(server, link=link):
        config = app / "federated_run" / "config.yaml"
        return command("fit", "--config", config, "--trainer.default_root_dir", root, *words)


def run_here(folder, config, link=Here, **of_sites):
    """Run a config with all sites in this process; return the trainer of the server, and its link."""
    app = app_of(folder, config, **of_sites)
    with sites_here(app, folder) as sites:
        made = link(sites)
        return serve(app, made), made
