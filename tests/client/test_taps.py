"""Taps record what submodules give, and methods change the logits that the loss sees."""

from typing import NamedTuple

import pytest
import torch
from helpers.errors import refused
from helpers.runs import small_trainer
from helpers.tiny import TinyData, TinyModule, clients
from torch import nn
from torch.nn.functional import cross_entropy

from fl_lightning import Method

# what the last step noted, where no visit puts it back
_noted = {}


class Output(dict):
    """A mapping."""


class Numbered(Output):
    """A mapping that gives the values by their places too, as Hugging Face's outputs."""

    def to_tuple(self):
        return (*self.values(),)

    def __getitem__(self, key):
        return super().__getitem__(key) if isinstance(key, str) else self.to_tuple()[key]


class Pair(NamedTuple):
    hidden: torch.Tensor
    scores: torch.Tensor


class Plain:
    def __init__(self, hidden, scores):
        self.hidden, self.scores = hidden, scores


def filled(kind):
    """A function that makes a mapping of this kind."""
    return lambda hidden, scores: kind(hidden=hidden, scores=scores)


mapping = filled(Output)
# how the submodule gives its two tensors, and the name of the first
OUTPUTS = {
    "mapping": (mapping, "hidden"),
    "tuple": (lambda hidden, scores: (hidden, scores), "0"),
    "negative index": (lambda hidden, scores: (hidden, scores), "-2"),
    "list": (lambda hidden, scores: [hidden, scores], "0"),
    "namedtuple by field": (Pair, "hidden"),
    "namedtuple by index": (Pair, "0"),
    "integer keys": (lambda hidden, scores: {0: hidden, 1: scores}, "0"),
    "object": (Plain, "hidden"),
    "places of a ModelOutput": (filled(Numbered), "0"),
    "nested": (lambda *both: {"all": (*both,)}, "all:0"),
}


class Inner(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.body, self.head, self.kind = nn.Linear(8, 6), nn.Linear(6, 3), kind

    def forward(self, x):
        hidden = self.body(x)
        scores = self.head(hidden)
        _noted.update(raw=(hidden, scores), given=self.kind(hidden, scores))
        return _noted["given"]


class Net(TinyModule):
    """Its submodule ``inner`` gives two tensors in some output, or one."""

    def __init__(self, kind=lambda hidden, scores: scores):
        super().__init__()
        self.inner = Inner(kind)

    def loss(self, batch):
        _noted["out"] = self.inner(batch[0])
        scores = _noted["out"] if isinstance(_noted["out"], torch.Tensor) else _noted["raw"][1]
        return cross_entropy(scores, batch[1])


class Looks(Method):
    """Adds a number to the logits, and notes the taps."""

    def __init__(self, *taps, added=None):
        self.requires = taps
        if added is not None:
            self.requires = (*taps, "logits")
            self.transform_logits = lambda client, logits: logits + added if added else logits

    def penalty(self, client, step):
        _noted.update({name: step.taps[name] for name in self.requires})
        return step.taps[self.requires[0]].sum() * 0


def fit(tmp_path, model, method, **taps):
    trainer = small_trainer(tmp_path, max_rounds=1, local_steps=1, taps=taps, enable_progress_bar=False)
    trainer.fit(model, clients(TinyData(4)), method)
    return trainer


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_tap_can_be_a_part_of_an_output(tmp_path, name):
    kind, hidden = OUTPUTS[name]
    fit(tmp_path, Net(kind), Looks("z"), z=f"inner:{hidden}")
    assert torch.equal(_noted["z"], _noted["raw"][0])
    assert _noted["z"].requires_grad


def test_the_transform_replaces_the_logits_alone(tmp_path):
    fit(tmp_path, Net(), Looks("z", "again", added=1), z="inner.body", logits="inner.head", again="inner.head")
    assert torch.equal(_noted["out"], _noted["logits"] + 1)
    assert torch.equal(_noted["again"], _noted["logits"])
    assert torch.equal(_noted["z"], _noted["raw"][0])


def test_the_trainers_taps_replace_those_of_the_module(tmp_path):
    model = Net()
    model.taps = {"z": "head", "unused": "body"}
    fit(tmp_path, model, Looks("z"), z="inner.body")
    assert torch.equal(_noted["z"], _noted["raw"][0])


def test_of_a_submodule_that_is_called_twice_the_last_output_is_recorded(tmp_path):
    class Twice(Net):
        def loss(self, batch):
            return super().loss(batch) + super().loss([2 * batch[0], batch[1]])

    fit(tmp_path, Twice(), Looks("z"), z="inner.body")
    assert torch.equal(_noted["z"], _noted["raw"][0])


# ---------------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    ("taps", "words"),
    [
        ({}, ("Looks", "'z'", "'y'", "{'z': 'SUBMODULE', 'y': 'SUBMODULE'}")),  # all at once
        ({"y": "body"}, ("Looks", "'z'", "Net")),
        ({"y": "body", "z": "neck"}, ("'neck'", "Net")),
        ({"y": "body", "z": "inner:"}, ("trainer.taps", "z='inner:'")),
        ({"y": "body", "z": "iner.head"}, ("inner.head",)),  # the nearest name
    ],
)
def test_taps_that_are_missing_or_bound_to_nothing_are_refused_by_name(tmp_path, taps, words):
    with refused(*words):
        fit(tmp_path, Net(), Looks("z", "y"), **taps)


@pytest.mark.parametrize(
    ("kind", "field", "named"),
    [
        (mapping, "", ("Output", "inner:hidden", "inner:scores")),  # the whole output
        (mapping, ":pooled", ("Output", "pooled", "hidden, scores")),
        (Pair, ":2", ("Pair", "2", "hidden, scores")),
        (Plain, ":pooled", ("Plain", "pooled", "hidden, scores")),
        (lambda hidden, scores: (hidden, scores), ":hidden", ("tuple", "hidden", "0, 1")),
        (lambda hidden, scores: {"hidden": None}, ":hidden", ("NoneType",)),
        (lambda hidden, scores: scores, ":pooled", ("Tensor", "pooled")),
    ],
)
def test_a_part_that_is_no_tensor_is_refused_and_the_parts_are_named(tmp_path, kind, field, named):
    with refused("trainer.taps", f"z='inner{field}'", *named) as caught:
        fit(tmp_path, Net(kind), Looks("z"), z=f"inner{field}")
    assert "\n" not in str(caught.value)


def test_a_submodule_that_the_forward_does_not_call_is_named(tmp_path):
    with refused("trainer.taps", "z='head'"):
        fit(tmp_path, Net(), Looks("z"), z="head")


def test_logits_that_are_a_part_of_an_output_cannot_be_replaced(tmp_path):
    with refused("trainer.taps: logits='inner:scores'", "classifier"):
        fit(tmp_path, Net(mapping), Looks(added=1), logits="inner:scores")
