"""Any LightningDataModule, dealt out to clients."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from fl_lightning.data.datamodule import FederatedDataModule
from fl_lightning.data.partitioners import IID, Partitioner
from fl_lightning.errors import UsageError, require
from fl_lightning.seeding import base_seed


class Partitioned(FederatedDataModule):
    """Federates a user's LightningDataModule unchanged: its training set is dealt out, the rest stays as it is.

    Labels are read from the data set (``targets``, ``labels``, the second tensor of a TensorDataset) or, failing that,
    from the second entry of each of its items. Batch size, collation, workers and ``drop_last`` are those of the user's
    own training loader.

    Args:
        datamodule: the user's data module.
        partitioner: deals the training samples out; None is :class:`IID`.
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
        """Set the user's data module up for fit and test, and deal its training set out."""
        if self._ready_for == base_seed():
            return
        for name in ("fit", "test"):
            self.datamodule.setup(name)
        self._loader = self.datamodule.train_dataloader()
        usable = isinstance(self._loader, DataLoader) and hasattr(self._loader.dataset, "__len__")
        mend = "its train_dataloader() must give a DataLoader over a data set with a length"
        require(usable, "data.datamodule", type(self.datamodule).__name__, mend)
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

    def _plan(self, labels: np.ndarray | None) -> Any:
        if labels is not None:
            mend = f"labels count from 0, its smallest is {labels.min(initial=0)}"
            require(labels.min(initial=0) >= 0, "data.datamodule", type(self.datamodule).__name__, mend)
            return self.partition(labels, int(labels.max(initial=-1)) + 1)
        kind = type(self.partitioner).__name__
        if not isinstance(self.partitioner, IID):
            raise UsageError(f"data.partitioner={kind!r}: it needs integer labels, the data set has none; take IID")
        number = len(self._loader.dataset)
        return self.partition(np.zeros(number, np.int64), 0, labelled=False)

    def _loaders(self, name: str) -> Any:
        return getattr(self.datamodule, name)() if is_overridden(name, self.datamodule, LightningDataModule) else []


def labels_of(dataset: Dataset) -> np.ndarray | None:
    """Integer labels ``(N,)`` of a data set; None where it has none."""
    if isinstance(dataset, Subset):
        inner = labels_of(dataset.dataset)
        return None if inner is None else inner[np.asarray(dataset.indices)]
    number = len(dataset)  # type: ignore[arg-type]
    for name in ("targets", "labels"):
        found = _integers(getattr(dataset, name, None))
        # an attribute of this name may be something else, such as the names of the classes
        if found is not None and len(found) == number:
            return found
    if isinstance(dataset, TensorDataset):
        return _integers(dataset.tensors[1]) if len(dataset.tensors) > 1 else None
    return _labels_of_items(dataset, number)


def _labels_of_items(dataset: Dataset, number: int) -> np.ndarray | None:
    """The second entries of the items; the first that is no integer ends the search."""
    found = []
    try:
        for index in range(number):
            item = dataset[index]
            # one tensor of token numbers is an input, not an (input, label)
            label = np.asarray(item[1] if isinstance(item, (tuple, list)) else None)
            if label.ndim != 0 or not np.issubdtype(label.dtype, np.integer):
                return None
            found.append(int(label))
    except (TypeError, IndexError, KeyError, ValueError):
        return None
    return np.array(found, np.int64)


def _integers(values: Any) -> np.ndarray | None:
    try:
        found = np.asarray(values)
    except ValueError:  # lists of several lengths
        return None
    return found.astype(np.int64) if found.ndim == 1 and np.issubdtype(found.dtype, np.integer) else None
