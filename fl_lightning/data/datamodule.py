"""Base classes of federated data modules, and of data sets of images."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from lightning.pytorch import LightningDataModule

from fl_lightning.core.client_info import ClientInfo
from fl_lightning.core.seeding import base_seed, numpy_rng
from fl_lightning.data.augmentation import Augmentation
from fl_lightning.data.client_loaders import Batches
from fl_lightning.data.partitioners import IID, Partitioner
from fl_lightning.data.plan import Plan
from fl_lightning.utilities.errors import require


class FederatedDataModule(LightningDataModule, ABC):
    """The data of several clients. Subclasses set :attr:`plan` in ``setup`` and return the loaders.

    Args:
        num_clients: K, at least 1.
        partitioner: assigns the training samples to clients; None is :class:`IID`.

    Attributes:
        plan: which client holds which samples, after ``setup``.
        is_remote: whether the clients' examples are at real sites, and in no process of the run.
    """

    plan: Plan
    is_remote = False

    def __init__(self, num_clients: int = 10, partitioner: Partitioner | None = None) -> None:
        super().__init__()
        require(num_clients >= 1, "data.num_clients", num_clients, "give 1 or more")
        hint = "pass an object, such as Dirichlet(alpha=0.5)"
        is_object = partitioner is None or (callable(partitioner) and not isinstance(partitioner, type))
        require(is_object, "data.partitioner", partitioner, hint)
        self.num_clients = num_clients
        self.partitioner = partitioner or IID()

    def partition(
        self,
        labels: np.ndarray,
        num_classes: int,
        labelled: bool = True,
        domains: np.ndarray | None = None,
        domain_names: Sequence[str] = (),
        class_names: Sequence[str] = (),
    ) -> Plan:
        """Assign the samples to clients; the result depends on the base seed only.

        Args:
            labels: label of each sample ``(N,)``.
            num_classes: C.
            labelled: False if ``labels`` only stand in for labels that the data does not have.
            domains: domain of each sample ``(N,)``, from 0; None if unknown.
            domain_names: names of the domains.
            class_names: names of the classes, by which tables and figures call them; empty leaves them numbers.

        Raises:
            UsageError: there are fewer samples than clients, or the partitioner needs labels or domains and there are
                none.
        """
        hint = f"there are {len(labels)} training samples, give at most that number"
        require(len(labels) >= self.num_clients, "data.num_clients", self.num_clients, hint)
        kind, deal = type(self.partitioner).__name__, self.partitioner
        hint = "it needs integer labels, but the data set has none; choose IID, QuantityDirichlet or ByDomain"
        require(labelled or not getattr(deal, "needs_labels", True), "data.partitioner", kind, hint)
        needs = getattr(deal, "needs_domains", False)
        hint = f"{type(self).__name__} has no domains; choose a partitioner that needs none, such as Dirichlet"
        require(domains is not None or not needs, "data.partitioner", kind, hint)
        parts = deal(labels, self.num_clients, numpy_rng(base_seed(), "partition"), *((domains,) if needs else ()))
        arrays = [np.asarray(part) for part in parts] if isinstance(parts, (list, tuple)) else []
        flat = all(array.ndim == 1 for array in arrays)
        integer = all(array.dtype.kind in "iu" for array in arrays if array.size)
        hint = f"it must return a list of {self.num_clients} arrays (n,) of the samples' indices; correct it"
        require(flat and integer and len(arrays) == self.num_clients, "data.partitioner", kind, hint)
        hint = f"there are {num_classes} classes; name all of them, or none"
        require(len(class_names) in (0, num_classes), "data: class_names", list(class_names), hint)
        names = (tuple(domain_names), tuple(class_names))
        return Plan(parts, labels if labelled else None, num_classes, getattr(deal, "moved", 0), domains, *names)

    def info(self, k: int) -> ClientInfo:
        """The description of client ``k``."""
        counts = self.plan.label_counts
        labels = None if counts is None else torch.from_numpy(counts[k])
        return ClientInfo(k, len(self.plan.parts[k]), labels, self.plan.domain(k))

    def own_domains(self, k: int) -> list[int]:
        """The domains by which the test data of client ``k`` are known, from 0; none where its labels decide.

        Clients are made of domains where they hold one each, or where the partitioner deals domains out.
        """
        domains = [] if self.plan.domains is None else np.unique(self.plan.domains[self.plan.parts[k]]).tolist()
        by_domain = len(domains) == 1 or getattr(self.partitioner, "needs_domains", False)
        return domains if by_domain else []

    def own_test_rows(self, k: int, labels: Callable[[], np.ndarray], domains: np.ndarray | None) -> np.ndarray:
        """Return the indices of the test examples for client ``k``, in ascending order.

        They are the test examples of its domains, if clients consist of domains. Otherwise they are the largest subset
        with the proportions of its labels.

        Args:
            k: the client.
            labels: returns the label of each test example ``(N,)``; called only if labels are needed.
            domains: domain of each test example ``(N,)``, numbered as in the plan; None if unknown.
        """
        client_domains = self.own_domains(k)
        if client_domains and domains is not None:
            return np.flatnonzero(np.isin(domains, client_domains))
        counts: np.ndarray = self.plan.label_counts[k]  # type: ignore[index]
        test_labels = labels()
        available = np.bincount(test_labels, minlength=len(counts))[: len(counts)]
        owned = counts > 0
        factor = min(available[owned] / counts[owned], default=0.0)
        rng, numbers = numpy_rng(base_seed(), "client test", k), np.floor(factor * counts + 1e-9).astype(int)
        rows_of_classes = []
        for label, number in enumerate(numbers):
            rows_of_classes.append(rng.permutation(np.flatnonzero(test_labels == label))[:number])
        return np.sort(np.concatenate(rows_of_classes))

    @abstractmethod
    def train_dataloader(self, k: int = 0) -> Any:
        """The training batches of client ``k``.

        Returns:
            A :class:`~fl_lightning.data.ClientLoader`, or any iterable with a length, whose ``generator`` is seeded if
            it has one.
        """

    def val_dataloader(self) -> Any:
        """The validation data: none, unless a subclass has some."""
        return []

    def test_dataloader(self) -> Any:
        """Return the test data; by default none.

        A subclass with test data of each client takes the id of a client as an optional argument, as
        :class:`ImageDataModule` does. Some callbacks need it.
        """
        return []

    def missing_test_data_reason(self) -> str:
        """The reason why clients have no test data, with the remedy; empty if they have test data."""
        hint = "its test_dataloader takes no client; add an optional argument, the id of the client"
        return "" if signature(self.test_dataloader).parameters else hint


class Images(NamedTuple):
    """A data set of images, in memory or memory-mapped: a training set and a test set.

    Args:
        train_images: uint8 ``(N, H, W, C)``.
        train_labels: integers ``(N,)``, from 0.
        test_images: as ``train_images``.
        test_labels: as ``train_labels``.
        train_domains: domain of each training sample ``(N,)``, from 0; None without domains.
        test_domains: as ``train_domains``.
        domain_names: names of the domains.
        train_rows: indices ``(n,)`` of the training samples, if the arrays above also contain test samples.
        test_rows: as ``train_rows``.
        val_rows: indices ``(n,)`` of the validation samples in the training arrays, if the data set defines them.
    """

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    train_domains: np.ndarray | None = None
    test_domains: np.ndarray | None = None
    domain_names: tuple[str, ...] = ()
    train_rows: np.ndarray | None = None
    test_rows: np.ndarray | None = None
    val_rows: np.ndarray | None = None


class ImageDataModule(FederatedDataModule):
    """A data set of images in one uint8 array; each batch is gathered, augmented and normalised as a whole.

    Subclasses implement :meth:`load`.

    Args:
        num_clients: K, at least 1.
        partitioner: assigns the training samples to clients; None is :class:`IID`.
        batch_size: examples in a training batch, at least 1.
        eval_batch_size: examples in a validation or test batch, at least 1.
        train_size: draw this many training images, balanced over the classes; or, as a number in (0, 1), this share of
            each class; None takes all.
        test_size: draw this many test images, balanced over the classes; None takes all.
        augment: augmentations of the training batches, applied in order.
        normalize: subtract the mean and divide by the standard deviation of each channel; otherwise values lie in
            [0, 1].
        drop_last: drop the last training batch if it is not full; ``singletons`` drops it only if it has one example,
            on which BatchNorm cannot train.
        val_fraction: share of each class of the training images for validation, in [0, 1). FedUV tunes on
            0.1.
        client_noise: feature skew of NIID-Bench. Each client's images, in training and in its own test set, have
            normal noise added; its standard deviation, for values in [0, 1], rises linearly from 0 for the first
            client to this number for the last.
        mean: mean of each channel (or one for all), of values in [0, 1]; None takes the value of the data set.
        std: standard deviation of each channel (or one for all), above 0; None takes the value of the data set.

    Attributes:
        num_classes: C; for some data sets known only after ``setup``.
        class_names: names of the classes; may be empty.
        measured: names of arguments whose values :meth:`load` measured on the training images.
    """

    # a subclass gives the values of its data set, the arguments of the same names replace them
    mean: tuple[float, ...]
    std: tuple[float, ...]
    num_classes: int = 10
    class_names: tuple[str, ...] = ()
    measured: tuple[str, ...] = ()

    def __init__(
        self,
        num_clients: int = 10,
        partitioner: Partitioner | None = None,
        batch_size: int = 64,
        eval_batch_size: int = 512,
        train_size: int | float | None = None,
        test_size: int | None = None,
        augment: list[Augmentation] | None = None,
        normalize: bool = True,
        drop_last: bool | Literal["singletons"] = False,
        val_fraction: float = 0.0,
        client_noise: float = 0.0,
        mean: list[float] | None = None,
        std: list[float] | None = None,
    ) -> None:
        super().__init__(num_clients, partitioner)
        require(0 <= val_fraction < 1, "data.val_fraction", val_fraction, "use a share in [0, 1)")
        require(0 <= client_noise < math.inf, "data.client_noise", client_noise, "give 0 or more")
        require(batch_size >= 1, "data.batch_size", batch_size, "give 1 or more")
        require(drop_last in (True, False, "singletons"), "data.drop_last", drop_last, "give true, false or singletons")
        require(eval_batch_size >= 1, "data.eval_batch_size", eval_batch_size, "give 1 or more")
        self.batch_size, self.eval_batch_size = batch_size, eval_batch_size
        self.train_size, self.test_size = train_size, test_size
        self.augment, self.normalize, self.drop_last = augment or [], normalize, drop_last
        self.val_fraction, self.client_noise = val_fraction, client_noise
        if mean is not None:
            self.mean = tuple(mean)
        if std is not None:
            self.std = tuple(std)
        self._ready_for: int | None = None

    @abstractmethod
    def load(self) -> Images:
        """Read the data set."""

    def setup(self, stage: str | None = None) -> None:
        """Load the images, draw the subsets and partition them; a second call with the same base seed does nothing."""
        if self._ready_for == base_seed():
            return
        dataset = check_images(self.load())
        channels = dataset.train_images.shape[-1]
        for key, values in (("data.mean", self.mean), ("data.std", self.std)):
            hint = f"give {channels} finite numbers, one for each channel, or one; values of std are above 0"
            fits = len(values) in (1, channels) and all(map(math.isfinite, values))
            require(fits and (key == "data.mean" or min(values) > 0), key, list(values), hint)
        for split, labels in (("train", dataset.train_labels), ("test", dataset.test_labels)):
            largest, hint = int(labels.max()), f"labels count from 0 to {self.num_classes - 1}"
            require(largest < self.num_classes, f"data: {split}_labels", largest, hint)
        train = balanced_subset(dataset.train_labels, self.train_size, "train_size", dataset.train_rows)
        test = balanced_subset(dataset.test_labels, self.test_size, "test_size", dataset.test_rows)
        hint = "the data set has its own validation images; remove val_fraction"
        require(dataset.val_rows is None or not self.val_fraction, "data.val_fraction", self.val_fraction, hint)
        train, val = held_out(train, dataset.train_labels, self.val_fraction)
        hint = f"it holds out none of {len(train)} images; give a larger share, or 0"
        require(len(val) > 0 or not self.val_fraction, "data.val_fraction", self.val_fraction, hint)
        val = val if dataset.val_rows is None else dataset.val_rows
        self._train = (torch.from_numpy(dataset.train_images), torch.from_numpy(dataset.train_labels.astype(np.int64)))
        self._test = (torch.from_numpy(dataset.test_images), torch.from_numpy(dataset.test_labels.astype(np.int64)))
        self._val_rows, self._test_rows = torch.from_numpy(val), torch.from_numpy(test)
        self._train_domains, self._test_domains = dataset.train_domains, dataset.test_domains
        domains = None if dataset.train_domains is None else dataset.train_domains[train]
        names = (dataset.domain_names, self.class_names)
        plan = self.partition(dataset.train_labels[train], self.num_classes, True, domains, *names)
        self._rows = [torch.from_numpy(train[part]) for part in plan.parts]
        self.plan, self._ready_for = plan, base_seed()

    def train_dataloader(self, k: int = 0) -> Batches:
        return Batches(
            *self._train,
            self._rows[k],
            self.batch_size,
            shuffle=True,
            augment=self.augment,
            drop_last=self.drop_last,
            noise=self._noise(k),
            **self._scale(),
        )

    def val_dataloader(self) -> Any:
        """The data set's own validation images, or those held out by ``val_fraction``; none without either."""
        if not len(self._val_rows):
            return []
        return Batches(*self._train, self._val_rows, self.eval_batch_size, **self._scale())

    def test_dataloader(self, k: int | None = None) -> Batches:
        """The test images: all of them, or those for client ``k``, see :meth:`own_test_rows`."""
        rows, noise = self._test_rows, 0.0
        if k is not None:
            domains = None if self._test_domains is None else self._test_domains[rows.numpy()]
            client_rows = self.own_test_rows(k, lambda: self._test[1][self._test_rows].numpy(), domains)
            rows, noise = rows[torch.from_numpy(client_rows)], self._noise(k)
        return Batches(*self._test, rows, self.eval_batch_size, noise=noise, **self._scale())

    def test_dataloaders_by_domain(self) -> dict[str, Batches]:
        """The test images of each domain that has any, by its name; empty without domains."""
        return self._by_domain(self._test, self._test_rows, self._test_domains)

    def val_dataloaders_by_domain(self) -> dict[str, Batches]:
        """The validation images of each domain that has any, by its name; empty without domains."""
        return self._by_domain(self._train, self._val_rows, self._train_domains)

    def inference_arguments(self) -> dict[str, Any]:
        """The arguments by which an image becomes an input, with the measured values, for ``model.ckpt``."""
        scale = self._scale() or {"mean": [0.0], "std": [1.0]}
        return {name: list(values) for name, values in scale.items()}

    def _by_domain(
        self, images: tuple[torch.Tensor, torch.Tensor], rows: torch.Tensor, domains: np.ndarray | None
    ) -> dict[str, Batches]:
        row_domains = None if domains is None else domains[rows.numpy()]
        names = self.plan.domain_names if row_domains is not None else ()
        parts = {name: rows[torch.from_numpy(row_domains == i)] for i, name in enumerate(names)}
        make = partial(Batches, *images, batch_size=self.eval_batch_size, **self._scale())
        return {name: make(rows=part) for name, part in parts.items() if len(part)}

    def _noise(self, k: int) -> float:
        return self.client_noise * k / max(self.num_clients - 1, 1)

    def _scale(self) -> dict[str, Any]:
        return {"mean": self.mean, "std": self.std} if self.normalize else {}


def check_images(dataset: Images) -> Images:
    """Refuse wrong types, shapes, lengths and labels; returns the data."""
    splits = (("train", *dataset[:2], dataset.train_rows), ("test", *dataset[2:4], dataset.test_rows))
    for split, images, labels, rows in splits:
        usable = images.dtype == np.uint8 and images.ndim == 4 and min(images.shape[1:]) > 0
        channels_first = images.ndim == 4 and images.shape[1] <= 4 < min(images.shape[2:])
        hint = "give uint8 (N, H, W, C)"
        if channels_first:
            hint = "they look like N, C, H, W; give images.transpose(0, 2, 3, 1)"
        require(usable and not channels_first, f"data: {split}_images", f"{images.dtype} {images.shape}", hint)
        integers = np.issubdtype(labels.dtype, np.integer) and labels.ndim == 1
        require(integers, f"data: {split}_labels", f"{labels.dtype} {labels.shape}", "give integers (N,)")
        numbers = f"{len(images)} images, {len(labels)} labels"
        require(len(images) == len(labels), f"data: {split}_labels", numbers, "provide one label for each image")
        number = len(labels) if rows is None else len(rows)
        require(number > 0, f"data: {split}_labels", number, "no examples; provide at least one")
        require(labels.min() >= 0, f"data: {split}_labels", int(labels.min()), "labels count from 0")
    sizes = [" x ".join(map(str, images.shape[1:])) for _, images, *_ in splits]
    hint = f"the training images are {sizes[0]} (H x W x C); use equal sizes"
    require(sizes[0] == sizes[1], "data: test_images", sizes[1], hint)
    return dataset


def held_out(rows: np.ndarray, labels: np.ndarray, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Hold out a seeded share of each class; returns the remaining and the held-out rows, ascending."""
    rng, remaining = numpy_rng(base_seed(), "validation"), np.ones(len(rows), bool)
    for label in np.unique(labels[rows]) if fraction else ():
        members = rng.permutation(np.flatnonzero(labels[rows] == label))
        remaining[members[: round(fraction * len(members))]] = False
    return rows[remaining], rows[~remaining]


def balanced_subset(labels: np.ndarray, size: float | None, key: str, rows: np.ndarray | None = None) -> np.ndarray:
    """Draw ``size`` rows, balanced over the classes; a float draws this share of each class. Ascending."""
    rows = np.arange(len(labels)) if rows is None else rows
    if size is None:
        return rows
    share, number = isinstance(size, float), len(rows)
    hint = f"there are {number} samples; use 1 to this number"
    if key == "train_size":
        hint += ", or a share in (0, 1)"
    require(0 < size < 1 if share else 1 <= size <= number, f"data.{key}", size, hint)
    rng, labels = numpy_rng(base_seed(), "subset", 0 if key == "train_size" else 1), labels[rows]
    # the i-th members of all classes come before any (i+1)-th, so that every prefix is balanced
    shuffled = rng.permutation(number)
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    turn = np.arange(number) - np.searchsorted(labels[by_class], labels[by_class], side="left")
    if share:
        drawn = by_class[turn < np.round(size * np.bincount(labels))[labels[by_class]]]
        return rows[np.sort(drawn if len(drawn) else by_class[:1])]
    return rows[np.sort(by_class[np.lexsort((rng.random(number), turn))[: int(size)]])]
