"""Taps record what submodules give, and a forward can end at the last of them."""

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from helpers.errors import refused
from torch import nn

from fl_lightning.client.taps import Taps, resolve_taps


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
    values = taps.run_until({"representation": 1}, lambda: net(X))
    assert set(values) == {"representation"}
    assert net.ran == 0
    assert set(taps.run_until({"logits": 1}, lambda: net(X))) == {"representation", "logits"}


def test_where_it_is_told_so_nothing_is_recorded_or_replaced():
    net = Net()
    taps = Taps(net, PATHS, transform=lambda logits: logits + 1)
    with taps.recorded(False):
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
    with refused("FedUV", "'z'", "Net"):
        resolve_taps(net, {}, {"z": "FedUV"})
    with refused("FedUV", "'z'", "MOON", "'y'", "{z: SUBMODULE, y: SUBMODULE}"):  # all at once
        resolve_taps(net, {}, {"z": "FedUV", "y": "MOON"})
    with refused("'neck'", "Net"):
        resolve_taps(net, {"z": "neck"}, {"z": "FedUV"})


class Output(dict):
    """A mapping whose fields are attributes too, as those of Hugging Face's models."""

    def __setitem__(self, name, value):
        super().__setitem__(name, value)
        super().__setattr__(name, value)


class Pair(NamedTuple):
    hidden: torch.Tensor
    scores: torch.Tensor


@dataclass(frozen=True)
class Fields:
    hidden: torch.Tensor
    scores: torch.Tensor


class Plain:
    def __init__(self, hidden, scores):
        self.hidden, self.scores = hidden, scores


def mapping(hidden, scores):
    output = Output()
    output["hidden"], output["scores"] = hidden, scores
    return output


class Numbered(Output):
    """A mapping that gives the values by their places too, but sets them by their names alone."""

    def to_tuple(self):
        return (*self.values(),)

    def __getitem__(self, key):
        return super().__getitem__(key) if isinstance(key, str) else self.to_tuple()[key]


def numbered(hidden, scores):
    output = Numbered()
    output["hidden"], output["scores"] = hidden, scores
    return output


# how the submodule gives its two tensors, their names, and how to read the second
OUTPUTS = {
    "mapping": (mapping, ("hidden", "scores"), lambda out: (out["scores"], out.scores)),
    "tuple": (lambda hidden, scores: (hidden, scores), ("0", "1"), lambda out: (out[1],)),
    "negative index": (lambda hidden, scores: (hidden, scores), ("-2", "-1"), lambda out: (out[1],)),
    "list": (lambda hidden, scores: [hidden, scores], ("0", "1"), lambda out: (out[1],)),
    "namedtuple by field": (Pair, ("hidden", "scores"), lambda out: (out.scores,)),
    "namedtuple by index": (Pair, ("0", "1"), lambda out: (out.scores,)),
    "integer keys": (lambda hidden, scores: {0: hidden, 1: scores}, ("0", "1"), lambda out: (out[1],)),
    "dataclass": (Fields, ("hidden", "scores"), lambda out: (out.scores,)),
    "object": (Plain, ("hidden", "scores"), lambda out: (out.scores,)),
    "places of a ModelOutput": (numbered, ("0", "1"), lambda out: (out["scores"],)),
    "nested": (lambda *both: {"all": (*both,)}, ("all:0", "all:1"), lambda out: (out["all"][1],)),
}


class Inner(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.body, self.head, self.kind, self.given = nn.Linear(3, 2), nn.Linear(2, 4), kind, None

    def forward(self, x):
        hidden = self.body(x)
        self.given = self.kind(hidden, self.head(hidden))
        return self.given


def wrapped(kind):
    net = nn.Module()
    net.inner = Inner(kind)
    net.forward = lambda x: net.inner(x)
    return net


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_tap_can_be_a_part_of_an_output_that_is_no_tensor(name):
    kind, (hidden, scores), _ = OUTPUTS[name]
    net = wrapped(kind)
    bound = {"representation": f"inner:{hidden}", "logits": f"inner:{scores}"}
    taps = Taps(net, resolve_taps(net, bound, dict.fromkeys(bound, "FedUV")))
    assert net(X) is net.inner.given
    assert torch.equal(taps.values["representation"], net.inner.body(X))
    assert torch.equal(taps.values["logits"], net.inner.head(net.inner.body(X)))
    assert taps.values["logits"].requires_grad


@pytest.mark.parametrize("name", OUTPUTS)
def test_the_transform_replaces_the_logits_in_a_copy_of_such_an_output(name):
    kind, (hidden, scores), read = OUTPUTS[name]
    net = wrapped(kind)
    taps = Taps(net, {"logits": f"inner:{scores}", "z": f"inner:{hidden}"}, transform=lambda logits: logits + 1)
    out = net(X)
    raw = net.inner.head(net.inner.body(X))
    assert type(out) is type(net.inner.given) and out is not net.inner.given
    assert all(torch.equal(value, raw + 1) for value in read(out))
    assert all(torch.equal(value, raw) for value in read(net.inner.given))
    assert torch.equal(taps.values["logits"], raw)
    assert torch.equal(taps.values["z"], net.inner.body(X))


def test_the_whole_of_such_an_output_is_refused_and_its_parts_are_named():
    net = wrapped(mapping)
    Taps(net, {"z": "inner"})
    with refused("trainer.taps", "z='inner'", "Output", "inner:hidden", "inner:scores"):
        net(X)


@pytest.mark.parametrize(
    ("kind", "field", "named"),
    [
        (mapping, "pooled", ("Output", "pooled", "hidden, scores")),
        (Pair, "2", ("Pair", "2", "hidden, scores")),
        (Plain, "pooled", ("Plain", "pooled", "hidden, scores")),
        (lambda hidden, scores: (hidden, scores), "hidden", ("tuple", "hidden", "0, 1")),
        (lambda hidden, scores: {"hidden": None}, "hidden", ("NoneType",)),
        (lambda hidden, scores: scores, "pooled", ("Tensor", "pooled")),
    ],
)
def test_a_part_that_there_is_not_is_refused(kind, field, named):
    net = wrapped(kind)
    Taps(net, {"z": f"inner:{field}"})
    with refused("trainer.taps", f"z='inner:{field}'", *named) as refusal:
        net(X)
    assert "\n" not in str(refusal.value)


def test_a_colon_without_a_field_is_refused():
    with refused("trainer.taps", "z='inner:'"):
        resolve_taps(wrapped(Pair), {"z": "inner:"}, {"z": "FedUV"})


def test_logits_beside_a_loss_that_is_made_of_them_cannot_be_replaced():
    net = wrapped(lambda hidden, scores: {"loss": scores.sum(), "scores": scores})
    Taps(net, {"logits": "inner:scores"}, transform=lambda logits: logits)
    net(X)
    net = wrapped(lambda hidden, scores: {"loss": scores.sum(), "scores": scores})
    Taps(net, {"logits": "inner:scores"}, transform=lambda logits: logits + 1)
    with refused("logits='inner:scores'"):
        net(X)


def test_logits_that_cannot_be_replaced_are_refused():
    class Fixed:
        __slots__ = ("_scores",)

        def __init__(self, hidden, scores):
            self._scores = scores

        scores = property(lambda self: self._scores)

    net = wrapped(Fixed)
    Taps(net, {"logits": "inner:scores"}, transform=lambda logits: logits + 1)
    with refused("scores", "Fixed", "logits"):
        net(X)


def test_a_submodule_that_the_forward_does_not_call_is_named():
    net = Net()
    net.unused = nn.Linear(1, 1)
    taps = Taps(net, {"z": "unused", "logits": "head"})
    net(X)
    with refused("trainer.taps", "z='unused'"):
        taps.values["z"]
    with refused("trainer.taps", "z='unused'"):
        taps.run_until({"z": 1, "logits": 1}, lambda: net(X))
    with pytest.raises(KeyError, match="never declared"):
        taps.values["never declared"]


def test_of_a_submodule_that_is_called_twice_the_last_output_is_recorded():
    net = Net()
    taps = Taps(net, PATHS)
    net(X)
    net(2 * X)
    assert torch.equal(taps.values["representation"], net.body(2 * X))


def test_of_many_submodules_an_error_names_the_nearest():
    net = nn.Module()
    net.layers = nn.ModuleList(nn.ModuleDict({"attention": nn.Linear(1, 1)}) for _ in range(100))
    net.classifier = nn.Linear(1, 1)
    with refused("SUBMODULE", "layers.7.attention") as refusal:
        resolve_taps(net, {"z": "layer.7.attention"}, {"z": "FedUV"})
    assert "classifier" in str(refusal.value)
    assert len(str(refusal.value)) < 500


def test_in_training_the_last_output_that_has_a_gradient_is_recorded_and_another_forward_ends_there():
    net = Net()
    taps = Taps(net, PATHS)
    taps.trains = True
    net(X)
    net(2 * X)
    with torch.no_grad():
        net(3 * X)
    taps.trains = False
    places = {"representation": taps.values.places["representation"]}
    assert places == {"representation": 2}
    recorded = taps.values["representation"]
    observed = taps.run_until(places, lambda: [net(factor * X) for factor in (1, 2, 3)])
    assert observed.calls["representation"] == 2
    taps.remove()
    assert torch.equal(recorded, net.body(2 * X)) and torch.equal(observed["representation"], recorded)
    assert recorded.requires_grad


def test_a_submodule_that_is_only_called_without_gradient_is_named():
    net = Net()
    taps = Taps(net, {"z": "body"})
    taps.trains = True
    with torch.no_grad():
        net(X)
    taps.values.check_called("z")
    with refused("trainer.taps", "z='body'", "use_reentrant=False"):
        taps.values["z"]
