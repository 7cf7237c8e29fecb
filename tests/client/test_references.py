"""Reference models run once a batch, as far as the last tap, and cached observations have the same bits."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from fl_lightning.client.references import Cache, References, fill, frozen_copy
from fl_lightning.data.loaders import Rows
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
    found = References(PATHS, True, caching)
    copies = {name: frozen_copy(net, []) for name in names}
    for name, model in copies.items():
        found.add(name, model)
    found.start()
    return net, found, copies


def test_a_frozen_copy_is_in_eval_mode_without_gradients_and_logs_nothing():
    copy = frozen_copy(Net().train(), [])
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
