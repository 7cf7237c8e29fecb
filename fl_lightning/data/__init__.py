"""Data sets, and their partition over clients."""

from fl_lightning.data.array_datasets import CIFAR10, CIFAR100, MNIST, STL10, SVHN, Digits, FashionMNIST, NpyImages
from fl_lightning.data.augmentation import Augmentation, AutoAugment, RandomCrop, RandomFlip, RandomRotation
from fl_lightning.data.client_loaders import Batches, ClientLoader, ExampleIndices
from fl_lightning.data.datamodule import FederatedDataModule, ImageDataModule, Images
from fl_lightning.data.femnist import FEMNIST
from fl_lightning.data.folders import HAM10000, PACS, ImageFolderImages, OfficeHome, SiteImageFolders, TinyImageNet
from fl_lightning.data.partition_adapter import Partitioned
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
from fl_lightning.data.synthetic import Synthetic, SyntheticPerClass

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "FEMNIST",
    "HAM10000",
    "IID",
    "MNIST",
    "PACS",
    "STL10",
    "SVHN",
    "Augmentation",
    "AutoAugment",
    "Batches",
    "ByDomain",
    "ClassesPerClient",
    "ClientDirichlet",
    "ClientLoader",
    "Digits",
    "Dirichlet",
    "DomainDirichlet",
    "ExampleIndices",
    "FashionMNIST",
    "FederatedDataModule",
    "FromPlan",
    "ImageDataModule",
    "ImageFolderImages",
    "Images",
    "Natural",
    "NpyImages",
    "OfficeHome",
    "Partitioned",
    "Partitioner",
    "Plan",
    "Pooled",
    "QuantityDirichlet",
    "RandomCrop",
    "RandomFlip",
    "RandomRotation",
    "Shards",
    "SiteImageFolders",
    "Synthetic",
    "SyntheticPerClass",
    "TinyImageNet",
]
