"""What client hooks change of a method lasts for the visit: nothing leaks from client to client."""

import random
from collections import Counter, defaultdict, deque
from functools import partial
from typing import ClassVar

import numpy as np
import pytest
import torch
from helpers.errors import assert_names, refused
from helpers.notes import noted
from helpers.runs import assert_same_bits, fitted
from helpers.tiny import TinyData, TinyModule, clients
from torch import nn

from fl_lightning import Method, Server, ServerValue, Weighted
from fl_lightning.callbacks import Callback
from fl_lightning.methods import FedProx
from fl_lightning.utilities.errors import SharedStateError


class Net(TinyModule):
    """Its logits can be changed, and its normalisation stays with the clients of FedBN."""

    def build(self):
        self.body = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6))
        self.taps = {"logits": "head"}


# two rounds of three clients, of two steps each
CLIENTS = partial(clients, TinyData(20), 8, 6, 6)
fit = partial(fitted, model=Net, data=CLIENTS, local_steps=2, enable_progress_bar=False)


class Leaky(Method):
    """Counts in some place, once a step, and pulls the last bias towards 0 by as much as it has counted."""

    name = property(lambda self: type(self).__name__.lower())

    def count(self, client):
        """Count one more, and return how many these are."""
        raise NotImplementedError

    def penalty(self, client, step):
        self.last = float(self.count(client))
        return 0.01 * self.last * client.live[client.trainable[-1]].square().sum()

    def on_client_end(self, client):
        noted.append((self.name, self.last / client.num_steps))


class Tally:
    total = 0


class InItself(Leaky):
    """Counts in attributes, old and new, in containers, tensors and objects, and for the visit alone."""

    def __init__(self):
        self.number, self.tally, self.tensor, self.array = 0, Tally(), torch.zeros(2), np.zeros(2)
        self.held = {"list": [], "deep": ({"counter": Counter(), "by": defaultdict(list), "last": deque(maxlen=3)},)}

    def count(self, client):
        inner, visit = self.held["deep"][0], client.scratch(self)
        self.number, self.new = self.number + 1, getattr(self, "new", 0) + 1
        self.tally.total += 1
        self.tensor.add_(1)
        self.tensor.data.add_(1)
        self.array += 1
        self.held["list"].append(client.info.id)
        inner["counter"]["steps"] += 1
        inner["by"][client.info.id].append(1)
        inner["last"].append(len(self.held["list"]))
        visit.theirs = getattr(visit, "theirs", 0) + 1
        numbers = [self.number, self.new, self.tally.total, self.tensor.sum(), self.array.sum(), visit.theirs]
        lengths = [len(self.held["list"]), sum(map(len, inner["by"].values())), inner["last"][-1]]
        return sum([*numbers, *lengths, inner["counter"]["steps"]])


class InItsClass(Leaky):
    seen: ClassVar = []

    def count(self, client):
        self.seen.append(client.info.id)
        return len(self.seen)


class Wraps(Leaky):
    """Has other methods inside, of its own and of the package."""

    def __init__(self):
        self.inner, self.others = InItself(), [InItsClass(), FedProx(0.0)]

    def count(self, client):
        self.others[1].mu += 1
        return (self.inner.count(client) + self.others[0].count(client) + self.others[1].mu) / 3


class Trains(Leaky):
    """Trains a network of its own, whose optimizer has momentum."""

    def __init__(self):
        torch.manual_seed(1)
        self.network = nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=0.01, momentum=0.9)

    def count(self, client):
        loss = self.network(torch.ones(3)).square().sum()
        loss.backward()
        self.optimizer.step()
        return client.num_steps + loss.detach()


class Draws(Leaky):
    def __init__(self):
        self.torch, self.numpy, self.python = torch.Generator(), np.random.default_rng(0), random.Random(0)
        self.torch.manual_seed(0)

    def count(self, client):
        return client.num_steps + torch.rand(1, generator=self.torch) + self.numpy.random() + self.python.random()


class InEveryHook(Leaky):
    """Counts in all other hooks of clients, and in what they return."""

    def __init__(self):
        self.number = 0

    def count(self, client):
        return self.number

    def add(self, *args):
        self.number += 1

    on_client_start = on_before_optimizer_step = on_after_clipping = on_after_optimizer_step = add

    def transform_logits(self, client, logits):
        self.number += 1
        return logits * (1 + 1e-3 * self.number)

    def on_client_end(self, client):
        self.number += 1
        super().on_client_end(client)
        return {"number": Weighted.of(self.number)}

    def transform_client_update(self, client, delta):
        self.number += 1
        return {name: value * (1 + 1e-3 * self.number) for name, value in delta.items()}

    def client_weight(self, client):
        self.number += 1
        return float(self.number)


class OnTheServer(Leaky):
    """Counts rounds in server hooks, from which each visit begins, and keeps a server value of plain numbers."""

    rounds = ServerValue(lambda server: {"number": 0})

    def __init__(self):
        self.number, self.buffer = 0, torch.zeros(1)

    def on_round_start(self, server):
        assert self.rounds["number"] == self.buffer.item() == 10 * server.round
        self.number, self.started = 100 * server.round, self.number

    def count(self, client):
        self.number += 1
        self.rounds["number"] += 1
        self.buffer += 1
        return self.number - 100 * client.visit.fit_progress.round

    def on_round_end(self, server, payload):
        assert self.number == 100 * server.round
        self.buffer.add_(10)
        self.rounds = {"number": self.rounds["number"] + 10}


LEAKY = [InItself, InItsClass, Wraps, Trains, Draws, InEveryHook, OnTheServer]


def test_every_visit_begins_with_what_the_server_left(tmp_path):
    methods = [kind() for kind in LEAKY]
    fit(tmp_path, methods)
    values = defaultdict(list)
    for name, value in noted:
        values[name].append(value)
    assert values.keys() == {method.name for method in methods}
    assert {name: len(per_visit) for name, per_visit in values.items()} == dict.fromkeys(values, 6)
    assert [name for name, per_visit in values.items() if len(set(per_visit)) > 1] == []
    assert InItsClass.seen == []


class Rehearses(Callback):
    def on_round_end(self, trainer):
        names = [method.name for method in trainer.methods.methods]
        trainer.rehearse(trainer.server.cohort[0], names)
        trainer.fine_tune(trainer.server.cohort[0], None, 2)


def test_a_rehearsal_and_fine_tuning_leave_methods_as_they_were(tmp_path):
    plain, rehearsed = (
        fit(tmp_path, [kind() for kind in LEAKY], callbacks=callbacks).server.state for callbacks in ([], [Rehearses()])
    )
    assert_same_bits(plain, rehearsed)


class Aliases(Method):
    """Sends and remembers its own tensors and containers, which it sets back by itself."""

    def __init__(self):
        self.total, self.one, self.seen, self.sent = torch.zeros(2).double(), torch.ones(()).double(), [], {}

    def on_client_start(self, client):
        before = client.memory(self).get("total", torch.zeros(2))
        noted.append((client.info.id, before.tolist(), list(client.memory(self).get("seen", []))))
        self.total.zero_()
        self.seen.clear()

    def on_before_optimizer_step(self, client, optimizer):
        self.total += client.info.id + 1
        self.seen.append(client.num_steps)

    def transform_client_update(self, client, delta):
        name = next(iter(delta))
        self.change = getattr(self, "change", delta[name])
        return delta

    def on_client_end(self, client):
        client.memory(self).update(total=self.total, seen=self.seen)
        self.sent["total"] = Weighted(self.total, self.one)
        return {"deep": self.sent}

    def on_round_end(self, server, payload):
        assert payload["deep"]["total"].total.tolist() == 2 * [2.0 * (1 + 2 + 3)]


def test_what_a_method_sends_and_remembers_stays_when_its_attributes_are_put_back(tmp_path):
    fit(tmp_path, [Aliases()])
    first = [(k, [0.0, 0.0], []) for k in range(3)]
    assert noted == first + [(k, 2 * [2.0 * (k + 1)], [0, 1]) for k in range(3)]


# ---------------------------------------------------------------- what is the server's
class Writes(Method):
    """Writes in one hook to what it may only read."""

    variate = ServerValue(Server.zeros)

    def __init__(self, hook, write, fails):
        self.write, self.fails = write, fails
        setattr(self, hook, self.hook)

    def hook(self, client, value=None):
        self.write(self, client)
        if self.fails:
            raise ValueError("after it has written")
        return value


def item(method, client):
    client.received["head.bias"] = client.received["head.bias"] + 1


def in_place(method, client):
    client.received["head.bias"].mul_(0.9)


def counts(method, client):
    client.info.label_counts.add_(1)


def variate(method, client):
    method.variate["head.bias"] += 1


@pytest.mark.parametrize(
    ("hook", "write", "name", "fails"),
    [
        ("on_client_start", item, "client.received", False),
        ("on_before_optimizer_step", in_place, "client.received['head.bias']", True),
        ("transform_logits", in_place, "client.received['head.bias']", False),
        ("transform_client_update", in_place, "client.received['head.bias']", False),
        ("on_after_clipping", counts, "client.info.label_counts", False),
        ("on_after_optimizer_step", variate, "Writes.variate", True),
    ],
)
def test_what_is_the_servers_is_not_written_to(tmp_path, hook, write, name, fails):
    with pytest.raises(SharedStateError) as caught:
        # the client cannot be skipped: the others would begin with what it has written
        fit(tmp_path, [FedProx(0.1), Writes(hook, write, fails)], max_rounds=1, on_client_error="skip")
    assert_names(str(caught.value), "method=Writes", hook, name)


class SetsAnAttribute(Method):
    def on_client_start(self, client):
        client.counter = 1


def test_what_is_set_on_the_client_is_refused_with_the_place_for_it(tmp_path):
    with refused("client.counter", "client.scratch"):
        fit(tmp_path, [SetsAnAttribute()])
