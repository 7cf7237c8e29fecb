"""Data sets, and how they are dealt out to clients."""

from fl_lightning.data.augmentation import Augmentation, RandomCrop, RandomFlip
from fl_lightning.data.datamodule import Batches, ClientInfo, FederatedDataModule, ImageDataModule, Images
from fl_lightning.data.images import CIFAR10, Digits, NpyImages
from fl_lightning.data.partitioned import Partitioned
from fl_lightning.data.partitioners import (
    IID,
    ByDomain,
    ClassesPerClient,
    ClientDirichlet,
    Dirichlet,
    DomainDirichlet,
    FromPlan,
    Natural,
    Partitioner,
    Pooled,
    QuantityDirichlet,
    Shards,
)
from fl_lightning.data.plan import Plan

__all__ = [
    "CIFAR10",
    "IID",
    "Augmentation",
    "Batches",
    "ByDomain",
    "ClassesPerClient",
    "ClientDirichlet",
    "ClientInfo",
    "Digits",
    "Dirichlet",
    "DomainDirichlet",
    "FederatedDataModule",
    "FromPlan",
    "ImageDataModule",
    "Images",
    "Natural",
    "NpyImages",
    "Partitioned",
    "Partitioner",
    "Plan",
    "Pooled",
    "QuantityDirichlet",
    "RandomCrop",
    "RandomFlip",
    "Shards",
]
