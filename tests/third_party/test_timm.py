"""timm's networks (1.0) in the house model's ``Backbone``."""

from functools import partial
from typing import ClassVar

import pytest
import torch
from helpers.published import Published, Sets
from torch.utils.data import TensorDataset

from fl_lightning.data import Dirichlet
from fl_lightning.models import Backbone, ImageClassifier

timm = pytest.importorskip("timm")


def images(number, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(number) % 3
    pictures = torch.randn(number, 3, 32, 32, generator=generator)
    pictures[torch.arange(number), labels] += 1.0
    return TensorDataset(pictures, labels)


class Timm(Published):
    name, options_of_network = "", {}
    partitioner = Dirichlet(1.0, min_size=8)
    logged = ("train/loss", "val/loss", "test/accuracy")

    def module(self):
        network = Backbone(timm.create_model, {"model_name": self.name, "num_classes": 3, **self.options_of_network})
        return ImageClassifier(network, num_classes=3, optimizer=partial(torch.optim.SGD, lr=0.05))

    def data(self):
        return Sets(images(48, 0), images(18, 1), drop_last=True)


class TestResNet(Timm):
    name = "test_resnet"


class TestViT(Timm):
    name = "test_vit"
    options_of_network: ClassVar = {"img_size": 32, "patch_size": 8}


class TestConvNeXt(Timm):
    name = "test_convnext"
    options_of_network: ClassVar = {"ls_init_value": 1.0}  # the published 1e-6 leaves some weights where they are
