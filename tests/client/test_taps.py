"""Taps record what submodules give, and a forward can end at the last of them."""

import pytest
import torch
from torch import nn

from fl_lightning.client.taps import Taps, resolve_taps
from fl_lightning.errors import UsageError


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head, self.ran = nn.Linear(3, 2), nn.Linear(2, 4), 0

    def forward(self, x):
        hidden = self.body(x)
        self.ran += 1
        return self.head(hidden)


PATHS = {"representation": "body", "logits": "head"}
X = torch.ones(5, 3)


def test_a_tap_is_the_output_of_its_submodule_with_its_graph():
    net = Net()
    taps = Taps(net, PATHS)
    out = net(X)
    assert torch.equal(taps.values["representation"], net.body(X))
    assert taps.values["logits"] is out
    assert taps.values["representation"].requires_grad


def test_the_transform_replaces_the_logits_alone_and_the_raw_ones_are_recorded():
    net = Net()
    plain = net(X)
    taps = Taps(net, {**PATHS, "again": "head"}, transform=lambda logits: logits + 1)
    assert torch.equal(net(X), plain + 1)
    assert torch.equal(taps.values["logits"], plain)
    assert torch.equal(taps.values["again"], plain)
    assert torch.equal(taps.values["representation"], net.body(X))


def test_a_forward_ends_as_soon_as_all_asked_taps_are_there():
    net = Net()
    taps = Taps(net, PATHS)
    values = taps.run_until(["representation"], lambda: net(X))
    assert set(values) == {"representation"}
    assert net.ran == 0
    assert set(taps.run_until(["logits"], lambda: net(X))) == {"representation", "logits"}


def test_while_paused_nothing_is_recorded_or_replaced():
    net = Net()
    taps = Taps(net, PATHS, transform=lambda logits: logits + 1)
    with taps.paused():
        out = net(X)
    assert taps.values == {}
    assert torch.equal(net(X), out + 1)
    assert taps.recording


def test_removed_taps_leave_no_hook():
    net = Net()
    Taps(net, PATHS).remove()
    assert not net.body._forward_hooks
    assert not net.head._forward_hooks


def test_the_trainers_taps_replace_those_of_the_module():
    net = Net()
    net.taps = {"representation": "body", "logits": "body"}
    assert resolve_taps(net, {"logits": "head"}, {"logits": "FedLC"}) == {"logits": "head"}
    with pytest.raises(UsageError, match=r"FedUV needs the tap 'z', which is not bound in Net; .* one of body, head"):
        resolve_taps(net, {}, {"z": "FedUV"})
    with pytest.raises(UsageError, match="bound to 'neck', no submodule of Net"):
        resolve_taps(net, {"z": "neck"}, {"z": "FedUV"})
