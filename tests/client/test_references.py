"""Reference models run once a batch, as far as the last tap, and cached observations have the same bits."""

import math

import pytest
import torch
from helpers.errors import refused
from lightning.pytorch import LightningModule
from torch import nn

from fl_lightning.client.references import Cache, References, fill, frozen_copy
from fl_lightning.data.loaders import Rows
from fl_lightning.errors import ClientError
from fl_lightning.state import clone, tensors

PATHS = {"early": "body", "late": "head"}


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.body, self.head, self.runs = nn.Linear(6, 5), nn.Linear(5, 4), []

    def training_step(self, batch, batch_idx):
        self.runs.append(len(batch[0]))
        self.log("loss", 0.0)
        return self.head(self.body(batch[0]).relu()).sum()


def references(caching=False, names=("global",)):
    torch.manual_seed(0)
    net = Net()
    found = References(PATHS, True, math.inf if caching else 0.0)
    copies = {name: frozen_copy(net, None) for name in names}
    for name, model in copies.items():
        found.add(name, model)
    found.start()
    return net, found, copies


def test_a_frozen_copy_is_in_eval_mode_without_gradients_and_logs_nothing():
    copy = frozen_copy(Net().train(), None)
    assert not copy.training
    assert not any(parameter.requires_grad for parameter in copy.parameters())
    copy.training_step((torch.ones(2, 6), None), 0)


def test_a_model_runs_once_a_batch_however_many_ask_and_each_sees_the_taps_of_all():
    net, found, copies = references()
    found.load("global", clone(tensors(net)), ["early"])
    found.load("global", clone(tensors(net)), ["late"])
    x = torch.randn(3, 6)
    found.begin_batch((x, None), 0, None)
    first, second = found.observe("global"), found.observe("global")
    assert first is second
    assert copies["global"].runs == [3]
    assert torch.equal(first["early"], net.body(x))
    assert torch.equal(first["late"], net.head(net.body(x).relu()))
    assert not first["early"].requires_grad


def test_a_new_batch_and_a_new_visit_forget_what_was_observed():
    net, found, copies = references()
    found.load("global", clone(tensors(net)), None)
    for _ in range(2):
        found.begin_batch((torch.randn(3, 6), None), 0, None)
        found.observe("global")
    assert copies["global"].runs == [3, 3]
    found.start()
    found.load("global", {name: torch.zeros_like(value) for name, value in tensors(net).items()}, ["early"])
    found.begin_batch((torch.randn(3, 6), None), 0, None)
    assert not found.observe("global")["early"].any()


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_cached_observations_are_those_of_a_run_though_batches_come_in_another_order(order):
    net, found, copies = references(caching=True)
    found.load("global", clone(tensors(net)), ["early"])
    x = torch.randn(8, 6)
    batches = [torch.tensor([5, 1, 0]), torch.tensor([2, 7, 3]), torch.tensor([6, 4])]
    for epoch in range(3):
        for place in order:
            index = batches[place]
            found.begin_batch((x[index], index), 0, Rows(index, 8, 3))
            assert torch.equal(found.observe("global")["early"], net.body(x[index]))
        if epoch == 0:
            copies["global"].runs.clear()
    # the smaller batch is run each time, since its rows may round in another way
    assert copies["global"].runs == [2, 2]


def test_without_known_rows_nothing_is_cached():
    net, found, copies = references(caching=True)
    found.load("global", clone(tensors(net)), ["early"])
    for _ in range(2):
        found.begin_batch((torch.ones(3, 6), None), 0, None)
        found.observe("global")
    assert copies["global"].runs == [3, 3]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_cache_gives_rows_back_in_their_memory_format(layout):
    cache = Cache(6)
    maps = torch.randn(4, 3, 5, 5).contiguous(memory_format=layout)
    index = torch.tensor([4, 0, 5, 2])
    cache.put(index, {"early": maps})
    assert cache.holds(index)
    assert not cache.holds(torch.tensor([1]))
    again = cache.get(index)["early"]
    assert torch.equal(again, maps)
    assert again.is_contiguous(memory_format=layout)


def test_a_smaller_batch_is_filled_up_by_repeating_it():
    x, y = fill((torch.arange(6.0).view(3, 2), torch.arange(3)), Rows(torch.tensor([7, 8, 9]), 10, 5))
    assert y.tolist() == [0, 1, 2, 0, 1]
    assert x[:, 0].tolist() == [0, 2, 4, 0, 2]


def observed(found, copies, number=8, size=3, epochs=2):
    """Observe batches of all examples but for those that would not fill one; returns the runs of each model."""
    x = torch.randn(number, 6)
    for _ in range(epochs):
        for index in torch.arange(number).split(size):
            found.begin_batch((x[index], index), 0, Rows(index, number, size))
            for name in copies:
                found.observe(name)
    return [len(copy.runs) for copy in copies.values()]


# 6 examples of 5 numbers are 120 bytes a model
@pytest.mark.parametrize(("limit", "runs"), [(0, [4, 4]), (119, [4, 4]), (120, [2, 4]), (240, [2, 2])])
def test_as_many_models_are_cached_as_there_is_room_for(limit, runs):
    net, found, copies = references(names=("global", "previous"))
    found.limit = limit
    for _ in range(2):
        found.start()
        for name in copies:
            copies[name].runs.clear()
            found.load(name, clone(tensors(net)), ["early"])
        assert observed(found, copies, number=6) == runs


def test_nothing_is_cached_that_is_seen_once_or_never_in_a_full_batch():
    net, found, copies = references(caching=True)
    found.start(repeats=False)
    found.load("global", clone(tensors(net)), ["early"])
    assert observed(found, copies, number=6, epochs=1) == [2]
    assert not found._caches
    found.start()
    found.load("global", clone(tensors(net)), ["early"])
    copies["global"].runs.clear()
    assert observed(found, copies, number=2) == [2]
    assert copies["global"].runs == [2, 2]


def test_the_end_of_a_visit_releases_what_was_cached():
    net, found, copies = references(caching=True)
    found.load("global", clone(tensors(net)), ["early"])
    observed(found, copies)
    assert found._caches
    found.end()
    assert not found._caches and not found._seen


class InPlace(Net):
    def training_step(self, batch, batch_idx):
        batch[0].mul_(2)
        return super().training_step(batch, batch_idx)


class Rebinding(Net):
    def training_step(self, batch, batch_idx):
        batch["x"] = batch["x"] * 2
        return super().training_step((batch["x"],), batch_idx)


@pytest.mark.parametrize(("kind", "batch"), [(InPlace, [torch.ones(3, 6)]), (Rebinding, {"x": torch.ones(3, 6)})])
def test_a_step_that_changes_its_batch_is_refused(kind, batch):
    net = kind()
    found = References(PATHS, True)
    found.add("global", frozen_copy(net, None))
    found.start()
    found.load("global", clone(tensors(net)), ["early"])
    found.begin_batch(batch, 0, None)
    net.training_step(batch, 0)
    with refused(f"{kind.__name__}.training_step", kind=ClientError):
        found.observe("global")
