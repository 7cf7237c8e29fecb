"""A visit leaves nothing for the next one, in the module and its hooks."""

import random
from collections import deque
from functools import partial

import numpy as np
import pytest
import torch
from helpers.errors import refused, warned
from helpers.notes import noted
from helpers.runs import fitted
from helpers.tiny import TinyData, TinyModule, clients
from torch import nn
from torchmetrics import MeanMetric, MetricCollection, SumMetric

# two rounds of three clients
fit = partial(fitted, data=partial(clients, TinyData(val=(3,)), 6, 4, 4), enable_progress_bar=False)


class Average:
    """Averaged weights, in an object that torch knows nothing of."""

    def __init__(self):
        self.shadow, self.updates, self.itself, self.net = [torch.zeros(2)], 0, self, nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.net.weight)


class Messy(TinyModule):
    """Changes all that is outside of its state in each step, and its modes at the end of a visit."""

    def build(self):
        self.number, self.text, self.nothing = 1, "a", None
        self.tensor, self.array, self.pair = torch.zeros(2), np.zeros(2), (torch.zeros(1), "b")
        self.list, self.dict, self.set, self.queue = [torch.zeros(1)], {"a": [1]}, {1}, deque([1], maxlen=2)
        self.metrics, self.body.count = MetricCollection({"sum": SumMetric()}), 0
        self.generator, self.random, self.rng = torch.Generator(), random.Random(0), np.random.default_rng(0)
        self.seen, self.average, self.teacher = MeanMetric(), Average(), [nn.BatchNorm1d(2).eval()]
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.register_buffer("nobody", None, persistent=False)
        # tensors that cannot be written to
        with torch.inference_mode():
            self.table = torch.ones(2)
        self.mask, self.computed = torch.ones(1).expand(3), torch.ones(1, requires_grad=True) * 2

    def values(self):
        """Plain values of all of it."""
        parts = [self.tensor, self.pair[0], self.list[0], self.cache, self.seen.mean_value, self.average.shadow[0]]
        parts += [self.average.net.weight, self.teacher[0].running_mean, self.table, self.mask, self.computed]
        names = {"new", "nobody"} & {name for name in (*vars(self), *vars(self.average)) if hasattr(self, name)}
        plain = [self.number, self.text, self.nothing, self.nobody, len(self.list), self.dict, self.set]
        plain += [list(self.queue), self.body.count, float(self.metrics["sum"].sum_value)]
        modes = [self.training, self.body.training, self.body[0].weight.requires_grad, self.teacher[0].training]
        counts = [self.array.tolist(), self.average.updates, self.queue.maxlen, self.seen.update_count, sorted(names)]
        return repr([*(part.tolist() for part in parts), *plain, *modes, *counts])

    def on_train_start(self):
        noted.append(self.values())

    def training_step(self, batch, batch_idx):
        if batch_idx == 0:
            draws = torch.rand((), generator=self.generator), self.random.random(), self.rng.random()
            noted.append(tuple(map(float, draws)))
        self.number, self.text, self.nothing, self.new, self.average.new = 2, "c", 3, 4, 5
        for value in (self.tensor, self.array, self.list[0], self.pair[0], self.average.shadow[0]):
            value += 1
        self.list.append(2)
        self.dict["a"].append(2)
        self.set.add(2)
        self.queue = deque([*self.queue, 2])
        self.seen.update(3.0)
        self.metrics.update(3.0)
        self.body.count += 1
        self.cache, self.nobody, self.average.updates = self.cache + 1, torch.ones(1), 1
        with torch.no_grad():
            self.average.net.weight.fill_(7)
            self.teacher[0].running_mean.fill_(7)
        self.mask = self.computed = self.table = torch.zeros(1)
        return super().training_step(batch, batch_idx)

    def on_train_end(self):
        self.body.eval().requires_grad_(False)
        self.teacher[0].train()

    def on_validation_start(self):
        noted.append(self.values())

    def validation_step(self, batch, batch_idx):
        self.log("loss", self.loss(batch))


def test_what_is_in_no_state_begins_each_visit_and_evaluation_as_at_the_start_of_the_run(tmp_path):
    visit, evaluation = Messy().train().values(), Messy().eval().values()
    fit(tmp_path, model=Messy())
    values, draws = ([part for part in noted if isinstance(part, kind)] for kind in (str, tuple))
    assert values == 2 * [*(3 * [visit]), evaluation]
    assert len(draws) == 6 and len(set(draws)) == 1


class Hooked(TinyModule):
    """Registers hooks of all kinds in each visit; one was there before."""

    def build(self):
        self.head.register_forward_hook(lambda *args: None)

    def on_train_start(self):
        head = self.head
        noted.append([len(one) for one in (head._forward_hooks, head._backward_hooks, head._forward_pre_hooks)])
        head.register_forward_hook(lambda *args: None)
        head.register_forward_pre_hook(lambda *args: None)
        head.register_full_backward_hook(lambda *args: None)


def test_hooks_that_a_visit_registers_are_removed_and_the_others_stay(tmp_path):
    model = Hooked()
    fit(tmp_path, model=model)
    assert noted == 6 * [noted[0]] and noted[0][0] >= 1
    assert len(model.head._forward_hooks) == 1


# ---------------------------------------------------------------- what no run can federate
class ExtraState(nn.Linear):
    def __init__(self, value):
        super().__init__(1, 1)
        self.value = value

    def get_extra_state(self):
        return self.value()

    def set_extra_state(self, state):
        pass


def sparse():
    part = nn.Linear(2, 2)
    part.register_buffer("adjacency", torch.eye(2).to_sparse())
    return part


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2)), ("model=WithPart", "torch.jit")),
        (lambda: nn.Linear(2, 2, dtype=torch.complex64), ("model=WithPart",)),
        (lambda: ExtraState(lambda: {"a": 1}), ("_extra_state", "state_dict")),
        (lambda: ExtraState(lambda: torch.ones(1)), ("model=", "_extra_state")),
        (sparse, ("model=", "part.adjacency")),
    ],
    ids=["scripted", "complex", "an object", "made anew", "sparse"],
)
def test_an_entry_of_the_state_that_cannot_be_averaged_is_refused_by_name(tmp_path, make, words):
    class WithPart(TinyModule):
        def build(self):
            self.part = make()

    with refused(*words):
        fit(tmp_path, model=WithPart())
    assert not list(tmp_path.iterdir())


class Changes(TinyModule):
    """Changes an entry of its state in the first visit alone."""

    def __init__(self, change):
        super().__init__()
        self.change = change
        self.register_buffer("mean", torch.zeros(2))

    def on_train_end(self):
        noted.append(1)
        if len(noted) == 1:
            self.change(self)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda module: module.mean.resize_(3), ("mean", "(3,)", "(2,)", "persistent=False")),
        (lambda module: setattr(module, "mean", torch.zeros(2, dtype=torch.int64)), ("mean", "torch.int64")),
        (lambda module: delattr(module, "mean"), ("mean", "None", "(2,)", "persistent=False")),
        (lambda module: setattr(module.head.weight, "data", module.head.weight.data.half()), ("head.weight",)),
    ],
    ids=["shape", "dtype", "removed", "half"],
)
def test_an_entry_of_the_state_that_becomes_another_fails_its_client_and_is_put_back(tmp_path, change, words):
    with warned("client 0", "round 0", *words):
        trainer = fit(tmp_path, model=Changes(change), on_client_error="skip", max_rounds=1)
    assert trainer.metrics["clients/failed"] == 1 and trainer.metrics["clients"] == 2
