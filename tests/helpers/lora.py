"""A classifier with LoRA adapters, and the weights of their layers as a forward uses them."""

from functools import partial

import torch
from torch.optim import SGD

from fl_lightning.client.lora import lora_adapters
from fl_lightning.models import MLP, ImageClassifier, with_lora


def effective(module, state):
    """W + s B A of each adapter, by its path, in the layout of W."""
    found = {}
    for adapter in lora_adapters(module):
        change = adapter.product(state)
        change = change.T if adapter.transposed else change
        found[adapter.path] = state[adapter.base].double() + adapter.scaling * change.reshape(state[adapter.base].shape)
    return found


def lora_model(sgd=None, **kwargs):
    torch.manual_seed(0)
    optimizer = partial(SGD, **{"lr": 0.1, **(sgd or {})})
    return with_lora(ImageClassifier(MLP(64, [32, 24]), optimizer=optimizer), **kwargs)
