"""What client hooks change of a method lasts for the visit: nothing leaks from client to client, on any worker."""

import random
from collections import Counter, defaultdict, deque
from typing import ClassVar

import numpy as np
import pytest
import torch
from helpers.errors import refused
from helpers.runs import assert_same_bits, history, plain_sgd_model, small_data, small_trainer
from torch import nn

from fl_lightning import Method, Server, ServerValue, Weighted
from fl_lightning.callbacks import Callback
from fl_lightning.errors import SharedStateError
from fl_lightning.methods import FedBN, FedProx

# what each leaky method had come to at the end of each visit: class, round, client, value
_noted = []


class Leaky(Method):
    """Counts in some place, once a step, and pulls the last bias towards 0 by as much as it has counted."""

    name = property(lambda self: type(self).__name__.lower())

    def count(self, client):
        """One more, and how many these are."""
        raise NotImplementedError

    def penalty(self, client, step):
        self.last = float(self.count(client))
        return 0.01 * self.last * client.live[client.trainable[-1]].square().sum()

    def on_client_end(self, client):
        _noted.append((self.name, client.visit.clock.round, client.info.id, self.last / client.num_steps))


class InAnAttribute(Leaky):
    def __init__(self):
        self.number = 0

    def count(self, client):
        self.number += 1
        return self.number


class InANewAttribute(Leaky):
    def count(self, client):
        self.number = getattr(self, "number", 0) + 1
        return self.number


class InContainers(Leaky):
    def __init__(self):
        self.held = {"list": [], "deep": ({"counter": Counter(), "by": defaultdict(list), "last": deque(maxlen=3)},)}

    def count(self, client):
        inner = self.held["deep"][0]
        self.held["list"].append(client.info.id)
        inner["counter"]["steps"] += 1
        inner["by"][client.info.id].append(1)
        inner["last"].append(len(self.held["list"]))
        return (len(self.held["list"]) + inner["counter"]["steps"] + sum(map(len, inner["by"].values()))) / 3


class InATensor(Leaky):
    def __init__(self):
        self.number, self.array = torch.zeros(2), np.zeros(2)

    def count(self, client):
        self.number.add_(1)
        self.number.data.add_(1)
        self.array += 1
        return (self.number.sum() / 2 + self.array.sum()) / 4


class Tally:
    total = 0


class InAnObject(Leaky):
    def __init__(self):
        self.tally = Tally()

    def count(self, client):
        self.tally.total += 1
        return self.tally.total


class InItsClass(Leaky):
    number = 0
    seen: ClassVar = []

    def count(self, client):
        type(self).number += 1
        self.seen.append(client.info.id)
        type(self).fresh = getattr(type(self), "fresh", 0) + 1
        return (self.number + len(self.seen) + self.fresh) / 3


class InTheClassOfItsParent(InItsClass):
    def count(self, client):
        InItsClass.number += 1
        return super().count(client)


class Wraps(Leaky):
    """Has other methods inside, of its own and of the package."""

    def __init__(self):
        self.inner, self.others = InAnAttribute(), [InItsClass(), FedProx(0.0)]

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


class InTheVisit(Leaky):
    def count(self, client):
        visit = client.scratch(self)
        visit.theirs = getattr(visit, "theirs", 0) + 1
        return visit.theirs


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
        return self.number - 100 * client.visit.clock.round

    def on_round_end(self, server, payload):
        assert self.number == 100 * server.round
        self.buffer.add_(10)
        self.rounds = {"number": self.rounds["number"] + 10}


LEAKY = [
    InAnAttribute,
    InANewAttribute,
    InContainers,
    InATensor,
    InAnObject,
    InItsClass,
    InTheClassOfItsParent,
    Wraps,
    Trains,
    Draws,
    InTheVisit,
    InEveryHook,
    OnTheServer,
]


HOW = {"threads_per_worker": 1, "local_steps": 2, "name": "run"}


def fit(tmp_path, methods, ckpt_path=None, **kwargs):
    """Two rounds of seven clients, of two steps each."""
    trainer = small_trainer(tmp_path, **{**HOW, **kwargs})
    trainer.fit(plain_sgd_model(), small_data(num_clients=7), methods, ckpt_path=ckpt_path)
    return {name: value.clone() for name, value in trainer.server.state.items()}, trainer


def test_every_visit_begins_with_what_the_server_left(tmp_path):
    """Each visit has two steps, so that all of them come to the same number."""
    _noted.clear()
    methods = [kind() for kind in LEAKY]
    fit(tmp_path, methods)
    values = defaultdict(list)
    for name, _, _, value in _noted:
        values[name].append(value)
    assert values.keys() == {method.name for method in methods}
    assert {name: len(per_visit) for name, per_visit in values.items()} == dict.fromkeys(values, 14)
    assert [name for name, per_visit in values.items() if len(set(per_visit)) > 1] == []
    assert InItsClass.number == 0 and InItsClass.seen == [] and not hasattr(InItsClass, "fresh")


def test_leaky_methods_have_the_same_bits_on_any_number_of_workers(tmp_path):
    runs = [fit(tmp_path, [kind() for kind in LEAKY], devices=workers) for workers in (1, 3)]
    assert_same_bits(runs[0][0], runs[1][0])
    assert history(runs[0][1]) == history(runs[1][1])


class Metrics(Callback):
    """What each visit has logged, by round and client."""

    def __init__(self):
        self.of = {}

    def on_client_end(self, trainer, client):
        self.of[trainer.server.round, client.info.id] = dict(client.metrics)


def test_a_resumed_run_and_a_replay_have_the_same_bits(tmp_path):
    kinds, metrics = [kind for kind in LEAKY if kind is not OnTheServer], Metrics()
    whole, _ = fit(tmp_path / "whole", [kind() for kind in kinds], callbacks=[metrics])
    fit(tmp_path, [kind() for kind in kinds], max_rounds=1)
    last = tmp_path / "run" / "version_0" / "checkpoints" / "last.ckpt"
    trainer = small_trainer(tmp_path / "replay", **HOW)
    methods = [kind() for kind in kinds]
    again = trainer.replay(plain_sgd_model(), small_data(num_clients=7), 1, 5, ckpt_path=last, method=methods)
    assert {name: again[name] for name in metrics.of[1, 5]} == metrics.of[1, 5]
    assert_same_bits(whole, fit(tmp_path, [kind() for kind in kinds], "last")[0])


class Rehearses(Callback):
    def on_round_end(self, trainer):
        names = [method.name for method in trainer.methods.methods]
        trainer.rehearse(trainer.server.cohort[0], names)
        trainer.fine_tune(trainer.server.cohort[0], None, 2)


def test_a_rehearsal_and_fine_tuning_leave_methods_as_they_were(tmp_path):
    plain, rehearsed = (fit(tmp_path, [kind() for kind in LEAKY], callbacks=c)[0] for c in ([], [Rehearses()]))
    assert_same_bits(plain, rehearsed)


class Aliases(Method):
    """Sends and remembers its own tensors and containers, which it sets back by itself."""

    def __init__(self):
        self.total, self.one, self.seen, self.sent = torch.zeros(2).double(), torch.ones(()).double(), [], {}

    def on_client_start(self, client):
        before = client.memory(self).get("total", torch.zeros(2))
        _noted.append((client.info.id, before.tolist(), list(client.memory(self).get("seen", []))))
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
        assert payload["deep"]["total"].total.tolist() == 2 * [2.0 * sum(range(1, 8))]


def test_what_a_method_sends_and_remembers_stays_when_its_attributes_are_put_back(tmp_path):
    _noted.clear()
    fit(tmp_path, [Aliases()])
    first = [(k, [0.0, 0.0], []) for k in range(7)]
    assert _noted == first + [(k, 2 * [2.0 * (k + 1)], [0, 1]) for k in range(7)]


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
    client.received["classifier.bias"] = client.received["classifier.bias"] + 1


def in_place(method, client):
    client.received["classifier.bias"].mul_(0.9)


def counts(method, client):
    client.info.label_counts.add_(1)


def variate(method, client):
    method.variate["classifier.bias"] += 1


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    ("hook", "write", "name"),
    [
        ("on_client_start", item, "client.received"),
        ("on_before_optimizer_step", in_place, "client.received['classifier.bias']"),
        ("transform_logits", in_place, "client.received['classifier.bias']"),
        ("transform_client_update", in_place, "client.received['classifier.bias']"),
        ("on_after_clipping", counts, "client.info.label_counts"),
        ("on_after_optimizer_step", variate, "Writes.variate"),
    ],
)
def test_what_is_the_servers_is_not_written_to(tmp_path, hook, write, name, fails):
    with pytest.raises(SharedStateError) as caught:
        # the client cannot be skipped: the others would begin with what it has written
        fit(tmp_path, [FedProx(0.1), Writes(hook, write, fails)], max_rounds=1, on_client_error="skip")
    text = str(caught.value)
    assert text.startswith(f"method=Writes: {hook} wrote to ") and name in text and "clone" in text


class SetsAnAttribute(Method):
    def on_client_start(self, client):
        client.counter = 1


def test_what_is_set_on_the_client_is_refused_with_the_place_for_it(run):
    with refused("client.counter", "client.scratch"):
        run([SetsAnAttribute()])


class WritesWhileItBegins(FedBN):
    def __init__(self, hook):
        super().__init__()
        setattr(self, hook, self.write)

    def write(self, client):
        next(iter(client.received.values())).zero_()
        return {}


def test_what_gives_a_client_its_beginning_writes_to_nothing_of_the_servers(run):
    with refused("WritesWhileItBegins", "initial_state", "client.received"):
        run([WritesWhileItBegins("initial_state")], model=plain_sgd_model())
