"""Which reference models ``cache_references=auto`` caches: where no bit changes, and memory suffices."""

import math
from types import SimpleNamespace

import pytest
import torch
from helpers.runs import small_data, small_model, small_trainer
from torch import nn

from fl_lightning.client.references import References
from fl_lightning.data import Digits, RandomFlip
from fl_lightning.engine import run as building
from fl_lightning.engine.loaders import TRANSFER_HOOKS
from fl_lightning.engine.run import cache_limit
from fl_lightning.methods import MOON
from fl_lightning.models import MLP, ImageClassifier

CPU = torch.device("cpu")


class Four:
    """Four workers, two on each of two machines, of which this one has 8 GiB available and the other ``other``."""

    def __init__(self, other):
        self.other = other

    def gather(self, place):
        return [place, place, ("other", "cpu", self.other), ("other", "cpu", self.other)]


ALONE = SimpleNamespace(gather=lambda place: [place])


def limit(tmp_path, workers=ALONE, model=None, data=None, **kwargs):
    return cache_limit(small_trainer(tmp_path, **kwargs), model or small_model(), data or small_data(), workers, CPU)


def test_true_has_no_limit_and_false_caches_nothing(tmp_path):
    assert limit(tmp_path, cache_references=True) == math.inf
    assert limit(tmp_path, cache_references=False) == 0


def test_auto_takes_a_share_of_the_least_available_memory_and_no_more_than_client_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(building, "available_memory", lambda device: 8 * 2**30)
    assert limit(tmp_path) == 2 * 2**30
    assert limit(tmp_path, client_memory=0.5) == 2**29
    assert limit(tmp_path, workers=Four(16 * 2**30)) == 2**30
    assert limit(tmp_path, workers=Four(4 * 2**30)) == 2**29


def test_available_memory_is_known_on_linux_and_else_0(monkeypatch):
    assert 2**20 < building.available_memory(CPU) < 2**50
    assert building.available_memory(torch.device("meta")) == 0
    monkeypatch.setattr(building, "Path", lambda path: SimpleNamespace(exists=lambda: False))
    assert building.available_memory(CPU) == 0


class Own(ImageClassifier):
    """A user's class, whose step might draw random numbers."""


class OwnLayer(nn.Dropout):
    """A user's class, which might be random in eval mode too."""


def test_auto_caches_nothing_where_user_code_might_change_the_taps(tmp_path):
    assert limit(tmp_path) > 0
    assert limit(tmp_path, model=Own(MLP(64, [8]))) == 0
    within = small_model()
    within.encoder.layers.append(OwnLayer())
    assert limit(tmp_path, model=within) == 0


def test_auto_caches_nothing_on_several_threads_of_a_cpu(tmp_path):
    """With two threads, a linear layer rounds the rows of a batch of 5 by their place in it."""
    try:
        torch.set_num_threads(2)
        assert limit(tmp_path) == 0
    finally:
        torch.set_num_threads(1)
    assert limit(tmp_path) > 0


@pytest.mark.parametrize("hook", TRANSFER_HOOKS)
def test_auto_caches_nothing_beside_a_transfer_hook(tmp_path, hook):
    data = type("Hooked", (Digits,), {hook: lambda self, batch, *args: batch})()
    assert limit(tmp_path, data=data) == 0


@pytest.mark.parametrize(
    ("options", "augment", "cached"),
    [
        ({}, [], True),
        ({"local_epochs": 1}, [], False),
        ({"local_epochs": 1, "local_steps": 30}, [], True),
        ({"cache_references": False}, [], False),
        ({}, [RandomFlip()], False),
    ],
    ids=["auto", "one epoch", "steps of several epochs", "false", "augmented"],
)
def test_a_run_caches_by_default_where_examples_are_seen_again_as_they_were(run, monkeypatch, options, augment, cached):
    held, inner = [], References.end
    monkeypatch.setattr(References, "end", lambda self: (held.append(len(self._caches)), inner(self)))
    run([MOON()], data=small_data(partitioner=None, augment=augment), **{"local_epochs": 2, **options})
    # the global and the previous model, from the second visit on
    assert held[-8:] == [0] * 4 + [2 * cached] * 4 and not any(held[:-8])
