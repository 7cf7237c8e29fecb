"""Lazy copies share memory until someone writes to one of them, in any way; on CUDA there are none."""

import sys
from functools import partial

import numpy as np
import pytest
import torch
from helpers.runs import assert_same_bits, small_trainer
from helpers.tiny import TinyData, TinyModule, clients
from torch import Tensor, nn
from torch.optim import SGD
from torch.testing._internal.two_tensor import TwoTensor

from fl_lightning.core.lazy_copies import is_lazy, lazy_copy, readable, share_memory
from fl_lightning.storage.atomic_io import dump, load


def through_numpy(value):
    value.numpy()[0, 0] += 1


WRITES = {
    "in place": lambda value: value.add_(1),
    "data": lambda value: value.data.mul_(2),
    "other data": lambda value: setattr(value, "data", value.data + 1),
    "view": lambda value: value[0].zero_(),
    "list": lambda value: torch._foreach_add_([value], 1.0),
    "numpy": through_numpy,
}


@pytest.mark.parametrize("write", WRITES.values(), ids=[*WRITES])
@pytest.mark.parametrize("written", [0, 1])
def test_a_write_to_either_leaves_the_other_and_ends_the_sharing(write, written):
    first = torch.ones(3, 4)
    pair = first, lazy_copy(first)
    assert share_memory(*pair)
    write(pair[written])
    assert not share_memory(*pair)
    assert torch.equal(pair[1 - written], torch.ones(3, 4)) and not torch.equal(*pair)


@pytest.fixture
def as_on_cuda(monkeypatch):
    """``lazy_copy`` finds tensors on CUDA, where operations on lists write by address and leave the memory shared."""
    device = Tensor.device

    def seen(tensor):
        by_lazy_copy = sys._getframe(1).f_code is lazy_copy.__code__
        return torch.device("cuda") if by_lazy_copy else device.__get__(tensor)

    def by_address(function, tensors, *args, **kwargs):
        with torch.no_grad():
            function([readable(tensor, {}) for tensor in tensors], *args, **kwargs)
        return tensors

    monkeypatch.setattr(Tensor, "device", property(seen))
    for name in dir(torch):
        if name.startswith("_foreach_") and name.endswith("_"):
            monkeypatch.setattr(torch, name, partial(by_address, getattr(torch, name)))


@pytest.mark.usefixtures("as_on_cuda")
def test_an_operation_on_lists_on_cuda_leaves_the_original():
    first = torch.ones(3, 4)
    copy = lazy_copy(first)
    assert not is_lazy(copy)  # so that no graph of CUDA is captured while one is made real, which fails
    torch._foreach_add_([copy], [torch.ones(3, 4)])
    assert torch.equal(first, torch.ones(3, 4)) and torch.equal(copy, 2 * first)


class Unfreezes(TinyModule):
    """Trains its first layer from the second round on, by an optimizer of lists, as is the default on CUDA."""

    def build(self):
        self.optimizer = partial(SGD, lr=0.1, momentum=0.9, foreach=True)
        self.body.requires_grad_(False)

    def on_train_start(self):
        self.body.requires_grad_(self.current_epoch >= 1)


def test_a_layer_that_is_unfrozen_trains_on_cuda_as_on_the_cpu(tmp_path, request):
    def trained(folder):
        torch.manual_seed(0)
        module, trainer = Unfreezes(), small_trainer(folder, max_rounds=3, clients_per_step=1)
        first = module.body[0].weight.detach().clone()
        trainer.fit(module, clients(TinyData(14), 8, 6))
        assert not torch.equal(trainer.server.state["body.0.weight"], first)
        return trainer.server.state

    expected = trained(tmp_path / "cpu")
    request.getfixturevalue("as_on_cuda")
    assert_same_bits(expected, trained(tmp_path / "cuda"))


def test_code_that_reads_keeps_the_sharing(tmp_path):
    layer = nn.Linear(4, 4).requires_grad_(False)
    copy = lazy_copy(layer.weight)
    layer(torch.ones(2, 4, requires_grad=True)).sum().backward()
    contents = {"a": layer.weight.detach(), "b": [copy, copy.t(), copy[1:]]}
    dump(contents, tmp_path / "file.pt")
    assert share_memory(layer.weight, copy)
    assert (tmp_path / "file.pt").stat().st_size < 3000
    held = load(tmp_path / "file.pt")
    for after, before in zip([held["a"], *held["b"]], [contents["a"], *contents["b"]], strict=True):
        assert torch.equal(after, before)
    assert readable(copy, {}).numpy().sum() == pytest.approx(float(copy.sum())) and share_memory(layer.weight, copy)


@pytest.mark.parametrize("shape", ["view", "numpy", "empty", "channels_last", "subclass"])
def test_other_memory_is_copied(shape):
    value = {
        "view": torch.ones(3, 4)[1:],
        "numpy": torch.from_numpy(np.ones((3, 4))),
        "empty": torch.ones(0),
        "subclass": nn.Parameter(TwoTensor(torch.ones(3), torch.ones(3)), requires_grad=False),
        "channels_last": torch.ones(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
    }[shape]
    copy = lazy_copy(value)
    assert bool((value == copy).all()) and share_memory(value, copy) == is_lazy(copy) == (shape == "channels_last")
    assert bool((readable(copy, {}) == value).all())
    with torch.no_grad():
        copy.add_(1)
    assert bool((value == 1).all())
