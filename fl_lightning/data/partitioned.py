"""Any LightningDataModule, partitioned over clients."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from fl_lightning.data.datamodule import FederatedDataModule
from fl_lightning.data.partitioners import IID, Partitioner
from fl_lightning.errors import UsageError, require
from fl_lightning.namespaces import LightningDataModule, is_overridden
from fl_lightning.seeding import base_seed


class Partitioned(FederatedDataModule):
    """Federates a user's LightningDataModule unchanged: its training set is partitioned over the clients.

    Labels are read from the data set's ``targets`` or ``labels``, or from the second tensor of a TensorDataset;
    otherwise from the second entry of each item. Batch size, ``collate_fn``, ``num_workers`` and ``drop_last`` are
    those of the user's training loader. Validation and test loaders are used as they are.

    Args:
        datamodule: the user's data module.
        partitioner: assigns the training samples to clients; None is :class:`IID`.
        num_clients: K, at least 1.
    """

    def __init__(
        self, datamodule: LightningDataModule, partitioner: Partitioner | None = None, num_clients: int = 10
    ) -> None:
        super().__init__(num_clients, partitioner)
        self.datamodule = datamodule
        self._ready_for: int | None = None

    def prepare_data(self) -> None:
        self.datamodule.prepare_data()

    def setup(self, stage: str | None = None) -> None:
        """Set up the user's data module for fit and test, and partition its training set."""
        if self._ready_for == base_seed():
            return
        for name in ("fit", "test"):
            self.datamodule.setup(name)
        self._loader = self.datamodule.train_dataloader()
        usable = isinstance(self._loader, DataLoader) and hasattr(self._loader.dataset, "__len__")
        hint = "its train_dataloader() must return a DataLoader over a data set that has a length"
        require(usable, "data.datamodule", type(self.datamodule).__name__, hint)
        self.plan, self._ready_for = self._plan(labels_of(self._loader.dataset)), base_seed()

    def train_dataloader(self, k: int = 0) -> DataLoader:
        loader, rows = self._loader, self.plan.parts[k].tolist()
        return DataLoader(
            Subset(loader.dataset, rows),
            batch_size=loader.batch_size,
            shuffle=len(rows) > 0,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            drop_last=loader.drop_last,
            generator=torch.Generator(),
        )

    def val_dataloader(self) -> Any:
        return self._loaders("val_dataloader")

    def test_dataloader(self) -> Any:
        return self._loaders("test_dataloader")

    def predict_dataloader(self) -> Any:
        if is_overridden("predict_dataloader", self.datamodule):
            self.datamodule.setup("predict")  # no other command needs it
        return self._loaders("predict_dataloader")

    def _plan(self, labels: np.ndarray | None) -> Any:
        if labels is not None:
            hint = f"labels must count from 0, its smallest is {labels.min(initial=0)}"
            require(labels.min(initial=0) >= 0, "data.datamodule", type(self.datamodule).__name__, hint)
            return self.partition(labels, int(labels.max(initial=-1)) + 1)
        kind = type(self.partitioner).__name__
        if not isinstance(self.partitioner, IID):
            raise UsageError(
                f"data.partitioner={kind!r}: it needs integer labels, but the data set has none; choose IID"
            )
        number = len(self._loader.dataset)
        return self.partition(np.zeros(number, np.int64), 0, labelled=False)

    def _loaders(self, name: str) -> Any:
        return getattr(self.datamodule, name)() if is_overridden(name, self.datamodule) else []


def labels_of(dataset: Dataset) -> np.ndarray | None:
    """Integer labels ``(N,)`` of a data set; None if it has none."""
    if isinstance(dataset, Subset):
        inner = labels_of(dataset.dataset)
        return None if inner is None else inner[np.asarray(dataset.indices)]
    number = len(dataset)  # type: ignore[arg-type]
    for name in ("targets", "labels"):
        labels = _integers(getattr(dataset, name, None))
        # an attribute of this name may hold something else, such as the names of the classes
        if labels is not None and len(labels) == number:
            return labels
    if isinstance(dataset, TensorDataset):
        return _integers(dataset.tensors[1]) if len(dataset.tensors) > 1 else None
    return _labels_of_items(dataset, number)


def _labels_of_items(dataset: Dataset, number: int) -> np.ndarray | None:
    """The second entries of all items; None if one of them is not an integer."""
    labels = []
    try:
        for index in range(number):
            item = dataset[index]
            # an item that is one tensor, such as token numbers, is an input alone and not a pair (input, label)
            label = np.asarray(item[1] if isinstance(item, (tuple, list)) else None)
            if label.ndim != 0 or not np.issubdtype(label.dtype, np.integer):
                return None
            labels.append(int(label))
    except (TypeError, IndexError, KeyError, ValueError):
        return None
    return np.array(labels, np.int64)


def _integers(values: Any) -> np.ndarray | None:
    try:
        array = np.asarray(values)
    except ValueError:  # nested lists of different lengths
        return None
    return array.astype(np.int64) if array.ndim == 1 and np.issubdtype(array.dtype, np.integer) else None
