"""Federated data modules: clients' loaders and descriptions, and the data sets of the house."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor

from fl_lightning.data.augmentation import Augmentation
from fl_lightning.data.partitioners import IID, Partitioner
from fl_lightning.data.plan import Plan
from fl_lightning.errors import require
from fl_lightning.seeding import base_seed, numpy_rng


@dataclass(frozen=True)
class ClientInfo:
    """What is known of a client.

    Args:
        id: its number, from 0.
        num_examples: n_k, training examples.
        label_counts: training examples of each class ``(C,)``, None where there are no labels.
        domain: where all its data comes from, None where that is not known or not one.
    """

    id: int
    num_examples: int
    label_counts: Tensor | None
    domain: str | None = None


class FederatedDataModule(LightningDataModule, ABC):
    """Data of several clients. Subclasses set up :attr:`plan` and give the loaders.

    Args:
        num_clients: K, at least 1.
        partitioner: deals the training samples out; None is :class:`IID`.

    Attributes:
        plan: who holds what, after :meth:`setup`.
    """

    plan: Plan

    def __init__(self, num_clients: int = 10, partitioner: Partitioner | None = None) -> None:
        super().__init__()
        require(num_clients >= 1, "data.num_clients", num_clients, "give 1 or more")
        self.num_clients = num_clients
        self.partitioner = partitioner or IID()

    def partition(
        self,
        labels: np.ndarray,
        num_classes: int,
        labelled: bool = True,
        domains: np.ndarray | None = None,
        domain_names: Sequence[str] = (),
    ) -> Plan:
        """Deal the samples out; the draw depends on the base seed only.

        Args:
            labels: label of each sample ``(N,)``.
            num_classes: C.
            labelled: whether the labels mean something.
            domains: domain of each sample ``(N,)``, from 0; None where that is not known.
            domain_names: names of the domains.

        Raises:
            UsageError: fewer samples than clients, or a partitioner that needs domains where there are none.
        """
        mend = f"there are {len(labels)} training samples, give at most that"
        require(len(labels) >= self.num_clients, "data.num_clients", self.num_clients, mend)
        kind, deal = type(self.partitioner).__name__, self.partitioner
        needs = getattr(deal, "needs_domains", False)
        mend = f"{type(self).__name__} has no domains; take a partitioner by labels"
        require(domains is not None or not needs, "data.partitioner", kind, mend)
        more = (domains,) if needs else ()
        parts = deal(labels, self.num_clients, numpy_rng(base_seed(), "partition"), *more)
        return Plan(parts, labels if labelled else None, num_classes, deal.moved, domains, tuple(domain_names))

    def info(self, k: int) -> ClientInfo:
        """The description of client ``k``."""
        counts = self.plan.label_counts
        labels = None if counts is None else torch.from_numpy(counts[k])
        return ClientInfo(k, len(self.plan.parts[k]), labels, self.plan.domain(k))

    @abstractmethod
    def train_dataloader(self, k: int = 0) -> Any:
        """The training batches of client ``k``, of a length; with a ``generator`` that the trainer seeds."""

    def val_dataloader(self) -> Any:
        """Validation data: none here."""
        return []

    def test_dataloader(self) -> Any:
        """Test data: none here."""
        return []


class Images(NamedTuple):
    """A data set in memory or memory-mapped: uint8 images ``(N, H, W, C)`` and labels ``(N,)``, train and test."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


class ImageDataModule(FederatedDataModule):
    """Images kept as one uint8 array; each batch is gathered, augmented and normalised as a whole.

    Args:
        num_clients: K, at least 1.
        partitioner: deals the training samples out; None is :class:`IID`.
        batch_size: examples of a training batch, at least 1.
        eval_batch_size: examples of a test batch, at least 1.
        train_size: draw this many training images, balanced over the classes; None takes all.
        test_size: draw this many test images, balanced over the classes; None takes all.
        augment: applied to training batches, in order.
        normalize: subtract the mean and divide by the deviation of each channel; else values lie in [0, 1].
        drop_last: leave out a last batch that is not full.

    Attributes:
        mean: mean of each channel, of values in [0, 1].
        std: deviation of each channel.
        num_classes: C, after :meth:`setup` where it is not known before.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    num_classes: int = 10

    def __init__(
        self,
        num_clients: int = 10,
        partitioner: Partitioner | None = None,
        batch_size: int = 64,
        eval_batch_size: int = 512,
        train_size: int | None = None,
        test_size: int | None = None,
        augment: list[Augmentation] | None = None,
        normalize: bool = True,
        drop_last: bool = False,
    ) -> None:
        super().__init__(num_clients, partitioner)
        require(batch_size >= 1, "data.batch_size", batch_size, "give 1 or more")
        require(eval_batch_size >= 1, "data.eval_batch_size", eval_batch_size, "give 1 or more")
        self.batch_size, self.eval_batch_size = batch_size, eval_batch_size
        self.train_size, self.test_size = train_size, test_size
        self.augment, self.normalize, self.drop_last = augment or [], normalize, drop_last
        self._ready_for: int | None = None

    @abstractmethod
    def load(self) -> Images:
        """The data set. Subclasses implement it."""

    def setup(self, stage: str | None = None) -> None:
        """Load, draw the subsets and partition; a second call with the same base seed does nothing."""
        if self._ready_for == base_seed():
            return
        found = check_images(self.load())
        check_scale(self.mean, self.std, found.train_images.shape[-1])
        train = balanced_subset(found.train_labels, self.train_size, "train_size")
        test = balanced_subset(found.test_labels, self.test_size, "test_size")
        self._train = (torch.from_numpy(found.train_images), torch.from_numpy(found.train_labels.astype(np.int64)))
        self._test = (torch.from_numpy(found.test_images), torch.from_numpy(found.test_labels.astype(np.int64)))
        self._test_rows = torch.from_numpy(test)
        plan = self.partition(found.train_labels[train], self.num_classes)
        self._rows = [torch.from_numpy(train[part]) for part in plan.parts]
        self.plan, self._ready_for = plan, base_seed()

    def train_dataloader(self, k: int = 0) -> Batches:
        how: dict[str, Any] = {"shuffle": True, "augment": self.augment, "drop_last": self.drop_last}
        return Batches(self._train[0], self._train[1], self._rows[k], self.batch_size, **how, **self._scale())

    def test_dataloader(self) -> Batches:
        return Batches(self._test[0], self._test[1], self._test_rows, self.eval_batch_size, **self._scale())

    def _scale(self) -> dict[str, Any]:
        return {"mean": self.mean, "std": self.std} if self.normalize else {}


class Batches:
    """Batches ``x (B, C, H, W)`` float32 and ``y (B,)`` int64 of some rows of one uint8 array.

    Args:
        images: ``(N, H, W, C)`` uint8, possibly memory-mapped.
        labels: ``(N,)`` int64.
        rows: indices ``(n,)``.
        batch_size: B.
        shuffle: whether each pass has an order of its own.
        augment: applied to each batch.
        drop_last: leave out a last batch that is not full.
        mean: of each channel, of values in [0, 1].
        std: of each channel.

    Attributes:
        generator: the only source of its randomness.
        current: which of ``rows`` the last batch holds, as places in it ``(B,)``.
        deterministic: whether an example is the same in every pass.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        rows: Tensor,
        batch_size: int,
        shuffle: bool = False,
        augment: Iterable[Augmentation] = (),
        drop_last: bool = False,
        mean: Iterable[float] = (0.0,),
        std: Iterable[float] = (1.0,),
    ) -> None:
        self.images, self.labels, self.rows = images, labels, rows
        self.batch_size, self.shuffle, self.augment, self.drop_last = batch_size, shuffle, list(augment), drop_last
        deviation = torch.tensor(list(std)).view(-1, 1, 1)
        self._scale = 1 / (255 * deviation)
        self._shift = -torch.tensor(list(mean)).view(-1, 1, 1) / deviation
        self.generator = torch.Generator()
        self.current = torch.arange(0)
        self.deterministic = not self.augment

    def __len__(self) -> int:
        whole, rest = divmod(len(self.rows), self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        number = len(self.rows)
        order = torch.randperm(number, generator=self.generator) if self.shuffle else torch.arange(number)
        for index in range(len(self)):
            self.current = order[index * self.batch_size : (index + 1) * self.batch_size]
            rows = self.rows[self.current]
            yield self._images(rows), self.labels[rows]

    def _images(self, rows: Tensor) -> Tensor:
        images = self.images.index_select(0, rows).permute(0, 3, 1, 2)
        for augmentation in self.augment:
            images = augmentation(images, self.generator)
        # one pass changes type and layout, two more work in place
        x = images.to(torch.float32, memory_format=torch.contiguous_format)
        return x.mul_(self._scale).add_(self._shift)


def check_images(found: Images) -> Images:
    """Refuse images and labels that do not belong together.

    Raises:
        UsageError: another dtype or shape, different lengths, or a negative label.
    """
    for split, images, labels in (("train", *found[:2]), ("test", *found[2:])):
        usable = images.dtype == np.uint8 and images.ndim == 4 and min(images.shape[1:]) > 0
        require(usable, f"data: {split}_images", f"{images.dtype} {images.shape}", "give uint8 (N, H, W, C)")
        whole = np.issubdtype(labels.dtype, np.integer) and labels.ndim == 1
        require(whole, f"data: {split}_labels", f"{labels.dtype} {labels.shape}", "give integers (N,)")
        numbers = f"{len(images)} images, {len(labels)} labels"
        require(len(images) == len(labels), f"data: {split}_labels", numbers, "give one label an image")
        require(len(labels) > 0, f"data: {split}_labels", 0, "there is not one example")
        require(labels.min() >= 0, f"data: {split}_labels", int(labels.min()), "labels count from 0")
    channels, others = found.train_images.shape[-1], found.test_images.shape[-1]
    require(channels == others, "data: test_images", f"{others} channels", f"the training images have {channels}")
    return found


def check_scale(mean: Sequence[float], std: Sequence[float], channels: int) -> None:
    """Refuse statistics that do not fit the images.

    Raises:
        UsageError: neither one number nor one a channel, or a deviation that is not above 0.
    """
    for key, values in (("data.mean", mean), ("data.std", std)):
        mend = f"give {channels} numbers, one a channel" if channels > 1 else "give one number"
        require(len(values) in (1, channels), key, list(values), mend)
    require(all(value > 0 for value in std), "data.std", list(std), "give numbers above 0")


def balanced_subset(labels: np.ndarray, size: int | None, key: str) -> np.ndarray:
    """Indices of ``size`` samples, as even over the classes as can be, in ascending order; all for None.

    Raises:
        UsageError: ``size`` is below 1 or above the number of samples.
    """
    if size is None:
        return np.arange(len(labels))
    require(1 <= size <= len(labels), f"data.{key}", size, f"there are {len(labels)} samples, give 1 to that many")
    rng = numpy_rng(base_seed(), "subset", 0 if key == "train_size" else 1)
    # the i-th member of every class comes before any (i+1)-th: a prefix is balanced
    shuffled = rng.permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    starts = np.searchsorted(labels[by_class], labels[by_class], side="left")
    turn = np.arange(len(labels)) - starts
    return np.sort(by_class[np.lexsort((rng.random(len(labels)), turn))[:size]])
