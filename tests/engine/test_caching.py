"""``cache_references=auto`` caches reference models if the bits do not change and memory suffices."""

import pytest
import torch
from helpers.runs import small_data, small_model
from torch import nn

from fl_lightning.client.reference_models import ReferenceModels
from fl_lightning.data import Digits, RandomFlip
from fl_lightning.engine import launching as building
from fl_lightning.methods import MOON
from fl_lightning.models import ImageClassifier
from fl_lightning.training.device_loaders import TRANSFER_HOOKS


@pytest.fixture
def cached(run, undrawn, monkeypatch):
    """``cached()`` trains, and returns the number of cached models in each visit."""
    held, clear = [], ReferenceModels.clear

    def noted(self, **of_start):
        if not of_start:  # at the end of a visit
            held.append(len(self._caches))
        clear(self, **of_start)

    monkeypatch.setattr(ReferenceModels, "clear", noted)

    def train(model=None, data=None, **kwargs):
        held.clear()
        run(
            [MOON()],
            model=model,
            data=data or small_data(partitioner=None, train_size=130),
            **{"local_epochs": 2, **kwargs},
        )
        return held[-8:]

    return train


@pytest.mark.parametrize(
    ("options", "augment", "caches"),
    [
        ({}, [], True),
        ({"local_epochs": 1}, [], False),
        ({"local_epochs": 1, "local_steps": 6}, [], True),
        ({"cache_references": False}, [], False),
        ({"client_memory": 0.0}, [], False),
        ({}, [RandomFlip()], False),
    ],
    ids=["auto", "one epoch", "steps of several epochs", "false", "no memory", "augmented"],
)
def test_a_run_caches_by_default_where_examples_are_seen_again_as_they_were(cached, options, augment, caches):
    data = small_data(partitioner=None, train_size=130, augment=augment)
    # the global and the previous model, from the second visit on
    assert cached(data=data, **options) == [0] * 4 + [2 * caches] * 4


@pytest.mark.parametrize(("free", "caches"), [(2**30, 2), (2**12, 0)])
def test_auto_takes_no_more_than_a_share_of_the_available_memory(cached, monkeypatch, free, caches):
    monkeypatch.setattr(building, "available_memory", lambda device: free)
    assert cached()[-1] == caches


class OwnLayer(nn.Dropout):
    """A user's class, which might be random in eval mode too."""


class Own(ImageClassifier):
    """A user's class, whose step might draw random numbers."""


def own_layer():
    model = small_model()
    model.encoder.layers.append(OwnLayer(0.0))
    return model


def own_step():
    return Own(small_model().encoder, optimizer=small_model().optimizer)


@pytest.mark.parametrize("make", [own_layer, own_step])
def test_auto_caches_nothing_where_user_code_might_change_the_taps(cached, make):
    assert not any(cached(make()))


def test_auto_caches_nothing_on_several_threads_of_a_cpu(cached):
    """With two threads, a linear layer rounds the rows of a batch of 5 by their place in it."""
    assert not any(cached(threads_per_worker=2))
    torch.set_num_threads(1)


@pytest.mark.parametrize("hook", TRANSFER_HOOKS)
def test_auto_caches_nothing_beside_a_transfer_hook(cached, hook):
    data = type("Hooked", (Digits,), {hook: lambda self, batch, *args: batch})
    assert not any(cached(data=data(num_clients=4, batch_size=32, train_size=130)))
