"""Any LightningDataModule, partitioned over clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from fl_lightning.data.datamodule import ClientInfo, FederatedDataModule
from fl_lightning.data.labels import dataset_labels, domains_of
from fl_lightning.data.partitioners import Partitioner
from fl_lightning.data.plan import Plan
from fl_lightning.data.samplers import DividedLoader
from fl_lightning.errors import require
from fl_lightning.namespaces import LightningDataModule, is_overridden
from fl_lightning.seeding import ambient, base_seed

# the stages in which a run uses the user's data module
STAGES_OF_A_RUN = ("fit", "test")
# larger labels than this, and than there are examples, are no classes; the table of all of them would fill the memory
LABELS_IN_MEMORY = 100_000


def of_user(hook: str) -> Callable[..., Any]:
    """A hook of the user's data module; :func:`own_module_of` says which module to ask whether it has it."""
    return lambda self, *args, **kwargs: getattr(self.datamodule, hook)(*args, **kwargs)


class Partitioned(FederatedDataModule):
    """Federates a user's LightningDataModule unchanged: its training set is partitioned over the clients.

    Labels are found by :func:`~fl_lightning.data.labels.dataset_labels`; a data set without them can be partitioned by
    :class:`IID`, :class:`QuantityDirichlet` and others that need none. Domains are its attribute or column ``domains``
    or ``domain``, or the parts of a ConcatDataset. The sampler and the other arguments of the user's training loader
    are kept on each client's part, see :class:`~fl_lightning.data.samplers.DividedLoader`. Validation and test
    loaders are used as they are. Hooks, state and ``trainer`` are those of the user's data module.

    The plan is the partition of all examples of the training set. What :meth:`info` counts, and so the weight of a
    client, are those that its sampler can draw, each once: without the examples that are not among the indices of a
    SubsetRandomSampler, or whose weight is 0.

    Args:
        datamodule: the user's data module.
        partitioner: assigns the training samples to clients; None is :class:`IID`.
        num_clients: K, at least 1.
    """

    datamodule: LightningDataModule

    def __init__(
        self, datamodule: LightningDataModule, partitioner: Partitioner | None = None, num_clients: int = 10
    ) -> None:
        self._ready_for: int | None = None
        self.datamodule = datamodule
        trainer = getattr(datamodule, "trainer", None)  # which the next line sets to None
        super().__init__(num_clients, partitioner)
        self.trainer, self.prepare_data_per_node = trainer, getattr(datamodule, "prepare_data_per_node", True)

    @property
    def trainer(self) -> Any:
        """The trainer of the user's data module."""
        return self.datamodule.trainer

    @trainer.setter
    def trainer(self, trainer: Any) -> None:
        self.datamodule.trainer = trainer

    def prepare_data(self) -> None:
        self.datamodule.prepare_data()

    def setup(self, stage: str | None = None) -> None:
        """Set up the user's data module for fit and test, and partition its training set.

        In each of the two, what the data module draws from the global generators, such as a random split, depends on
        the base seed only.
        """
        if self._ready_for == base_seed():
            return
        for name in STAGES_OF_A_RUN:
            with ambient(base_seed(), "setup"):
                self.datamodule.setup(name)
        has_loader = is_overridden("train_dataloader", self.datamodule)
        require(has_loader, "data.datamodule", self._kind, "it has no train_dataloader; define one")
        self._divided = DividedLoader(self.datamodule.train_dataloader(), self._kind)
        plan = self._plan(dataset_labels(self._divided.dataset))
        self._divided.check_parts(plan.parts)
        self.plan, self._ready_for = plan, base_seed()

    def teardown(self, stage: str | None = None) -> None:
        """Tear down the user's data module for what it was set up for; the next ``setup`` sets it up again."""
        if self._ready_for is not None:
            self._ready_for = None
            for name in STAGES_OF_A_RUN:
                self.datamodule.teardown(name)

    def info(self, k: int) -> ClientInfo:
        rows = self.plan.parts[k]
        rows, labels = rows[self._divided.drawn[rows]], self.plan.labels
        counts = None if labels is None else np.bincount(labels[rows], minlength=self.plan.num_classes)
        return ClientInfo(k, len(rows), None if counts is None else torch.from_numpy(counts), self.plan.domain(k))

    def idle_clients(self) -> list[int]:
        return [k for k, rows in enumerate(self.plan.parts) if self._divided.is_idle(rows)]

    def train_dataloader(self, k: int = 0) -> DataLoader:
        return self._divided.on(self.plan.parts[k])

    def val_dataloader(self) -> Any:
        return self._loaders("val_dataloader")

    def test_dataloader(self) -> Any:
        return self._loaders("test_dataloader")

    def predict_dataloader(self) -> Any:
        if is_overridden("predict_dataloader", self.datamodule):
            with ambient(base_seed(), "setup"):
                self.datamodule.setup("predict")  # no other command needs it
        return self._loaders("predict_dataloader")

    transfer_batch_to_device = of_user("transfer_batch_to_device")
    on_before_batch_transfer = of_user("on_before_batch_transfer")
    on_after_batch_transfer = of_user("on_after_batch_transfer")
    on_exception = of_user("on_exception")
    state_dict = of_user("state_dict")
    load_state_dict = of_user("load_state_dict")

    @property
    def _kind(self) -> str:
        return type(self.datamodule).__name__

    def _plan(self, labels: np.ndarray | None) -> Plan:
        dataset, needs_domains = self._divided.dataset, getattr(self.partitioner, "needs_domains", False)
        domains, names = domains_of(dataset, from_parts=needs_domains), []
        hint = "has no domains; give it an attribute domains (N,), or concatenate a data set for each"
        known = domains is not None or not needs_domains
        require(known, "data.datamodule", self._kind, f"{type(dataset).__name__} {hint}")
        if domains is not None:
            values, domains = np.unique(domains, return_inverse=True)
            names = [str(value) for value in values]
        if labels is None:
            return self.partition(np.zeros(len(dataset), np.int64), 0, False, domains, names)
        smallest, largest = int(labels.min(initial=0)), int(labels.max(initial=-1))
        floats = "; give targets of a regression as floats"
        hint = f"labels must count from 0, its smallest is {smallest}{floats}"
        require(smallest >= 0, "data.datamodule", self._kind, hint)
        hint = f"labels must be the numbers of classes, its largest is {largest}{floats}"
        require(largest < max(len(labels), LABELS_IN_MEMORY), "data.datamodule", self._kind, hint)
        return self.partition(labels, largest + 1, True, domains, names)

    def _loaders(self, name: str) -> Any:
        return getattr(self.datamodule, name)() if is_overridden(name, self.datamodule) else []


def own_module_of(data: Any) -> Any:
    """The data module that the user wrote: the one inside of a :class:`Partitioned`, else ``data``."""
    return data.datamodule if isinstance(data, Partitioned) else data
