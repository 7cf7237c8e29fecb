"""Lazy copies share memory until someone writes to one of them, in any way."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from fl_lightning.lazy_copies import is_lazy, lazy_copy, readable, share_memory
from fl_lightning.storage.atomic_io import dump, load

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


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
@pytest.mark.parametrize("device", DEVICES)
def test_a_write_to_either_leaves_the_other_and_ends_the_sharing(write, written, device):
    if write is through_numpy and device != "cpu":
        pytest.skip("NumPy has arrays on the CPU")
    first = torch.ones(3, 4, device=device)
    pair = first, lazy_copy(first)
    assert share_memory(*pair)
    write(pair[written])
    assert not share_memory(*pair)
    assert torch.equal(pair[1 - written].cpu(), torch.ones(3, 4)) and not torch.equal(*pair)


@pytest.mark.parametrize("device", DEVICES)
def test_code_that_reads_keeps_the_sharing(tmp_path, device):
    layer = nn.Linear(4, 4).requires_grad_(False).to(device)
    copy = lazy_copy(layer.weight)
    layer(torch.ones(2, 4, device=device, requires_grad=True)).sum().backward()
    contents = {"a": layer.weight.detach(), "b": [copy, copy.t(), copy[1:]]}
    dump(contents, tmp_path / "file.pt")
    assert share_memory(layer.weight, copy)
    assert (tmp_path / "file.pt").stat().st_size < 3000
    held = load(tmp_path / "file.pt")
    for after, before in zip([held["a"], *held["b"]], [contents["a"], *contents["b"]], strict=True):
        assert torch.equal(after, before.cpu())
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
