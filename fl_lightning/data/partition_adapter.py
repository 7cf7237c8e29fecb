"""Any LightningDataModule, partitioned over clients, with its own samplers and loader arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from fl_lightning.core.client_info import ClientInfo
from fl_lightning.core.seeding import base_seed, rng_scope
from fl_lightning.data.client_loaders import rows_of
from fl_lightning.data.datamodule import FederatedDataModule
from fl_lightning.data.labels import class_names_of, dataset_labels, domains_of
from fl_lightning.data.partitioners import Partitioner
from fl_lightning.data.plan import Plan
from fl_lightning.utilities.errors import require
from fl_lightning.utilities.lightning_compat import LightningDataModule, is_overridden

# the stages in which a run uses the user's data module
STAGES_OF_A_RUN = ("fit", "test")
# labels above this number, and above the number of examples, are refused, since their table would fill the memory
LABELS_IN_MEMORY = 100_000
# arguments of a DataLoader that hold for any part of its data
KEPT = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
)
# methods of a DataLoader with which a subclass changes its batches
PASS = ("__iter__", "__len__", "_get_iterator", "_index_sampler", "_auto_collation")
SAMPLERS = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
USUAL = "give shuffle, or a RandomSampler, SubsetRandomSampler or WeightedRandomSampler"


def of_user(hook: str) -> Callable[..., Any]:
    """Delegate a hook to the user's data module."""
    return lambda self, *args, **kwargs: getattr(self.datamodule, hook)(*args, **kwargs)


class Partitioned(FederatedDataModule):
    """Federates a user's LightningDataModule unchanged: its training set is partitioned among the clients.

    Labels are found by :func:`~fl_lightning.data.labels.dataset_labels`; a data set without them can be partitioned by
    :class:`IID`, :class:`QuantityDirichlet` and other partitioners without labels. The domain of each example, such as
    its site, is an attribute or column ``domains``, ``domain``, ``sites`` or ``site`` of the data set, or of the parts
    of a ConcatDataset. The sampler and the other arguments of the user's training loader apply to each client's part,
    see :class:`~fl_lightning.data.partition_adapter.SplitLoader`. Validation and test loaders are used unchanged.
    Hooks, state and ``trainer`` belong to the user's data module.

    The test set names domains as the training set does, or ``test_dataloader`` returns a dictionary with a loader for
    each domain by name. A client's test data are the test examples of its domains or, without domains, the largest
    subset with the proportions of its labels.

    The plan is the partition of all examples of the training set. :meth:`info`, and so the weight of a client, counts
    the examples that its sampler can draw, each once: without examples outside the indices of a SubsetRandomSampler, or
    with weight 0.

    Args:
        datamodule: the user's data module.
        partitioner: assigns the training samples to clients; None is :class:`IID`.
        num_clients: K, at least 1.
        domains: attribute or column of the data sets that names the domain of each example, such as ``hospital``; None
            takes the names above.
    """

    datamodule: LightningDataModule

    def __init__(
        self,
        datamodule: LightningDataModule,
        partitioner: Partitioner | None = None,
        num_clients: int = 10,
        domains: str | None = None,
    ) -> None:
        hint = "pass a LightningDataModule, such as LightningDataModule.from_datasets(train, test_dataset=test)"
        require(hasattr(datamodule, "prepare_data"), "data.datamodule", type(datamodule).__name__, hint)
        self._ready_for: int | None = None
        self.datamodule, self.domains = datamodule, domains
        trainer = getattr(datamodule, "trainer", None)  # which the next line sets to None
        super().__init__(num_clients, partitioner)
        self.trainer, self.prepare_data_per_node = trainer, getattr(datamodule, "prepare_data_per_node", True)

    @property
    def trainer(self) -> Any:
        return self.datamodule.trainer

    @trainer.setter
    def trainer(self, trainer: Any) -> None:
        self.datamodule.trainer = trainer

    def prepare_data(self) -> None:
        self.datamodule.prepare_data()

    def setup(self, stage: str | None = None) -> None:
        """Set up the user's data module for fit and test, and partition its training set.

        In both, draws of the data module from global generators, such as a random split, depend only on the base seed.
        """
        if self._ready_for == base_seed():
            return
        for name in STAGES_OF_A_RUN:
            with rng_scope(base_seed(), "setup"):
                self.datamodule.setup(name)
        has_loader = is_overridden("train_dataloader", self.datamodule)
        require(has_loader, "data.datamodule", self._kind, "it has no train_dataloader; define one")
        self._divided = SplitLoader(self.datamodule.train_dataloader(), self._kind)
        self._forget_test_data()
        plan = self._plan(dataset_labels(self._divided.loader))
        self._divided.check_parts(plan.parts)
        self.plan, self._ready_for = plan, base_seed()

    def teardown(self, stage: str | None = None) -> None:
        """Tear down the user's data module for its stages; the next ``setup`` sets it up again."""
        if self._ready_for is not None:
            self._ready_for = None
            self._forget_test_data()
            for name in STAGES_OF_A_RUN:
                self.datamodule.teardown(name)

    def info(self, k: int) -> ClientInfo:
        rows = self.plan.parts[k]
        rows, labels = rows[self._divided.drawn[rows]], self.plan.labels
        counts = None if labels is None else np.bincount(labels[rows], minlength=self.plan.num_classes)
        return ClientInfo(k, len(rows), None if counts is None else torch.from_numpy(counts), self.plan.domain(k))

    def train_dataloader(self, k: int = 0) -> DataLoader:
        return self._divided.on(self.plan.parts[k])

    def val_dataloader(self) -> Any:
        return self._loaders("val_dataloader")

    def test_dataloader(self, k: int | None = None) -> Any:
        """Return the user's test loaders, or a loader of the test data of client ``k``.

        Raises:
            UsageError: the test data cannot be divided among the clients.
        """
        if k is None:
            return self._loaders("test_dataloader")
        lack = self.missing_test_data_reason()
        require(not lack, "data.datamodule", self._kind, lack)
        tested, names = self._test_data, self.plan.domain_names
        if tested.by_name:
            client_domains = [names[i] for i in self.own_domains(k)]
            return [tested.by_name[name] for name in client_domains if name in tested.by_name]
        places = {name: i for i, name in enumerate(names)}
        domains = None
        if tested.domains is not None:
            domains = np.array([places.get(name, -1) for name in tested.domains])
        return tested.on(self.own_test_rows(k, lambda: tested.labels, domains))

    def missing_test_data_reason(self) -> str:
        return self._lack

    def test_dataloaders_by_domain(self) -> dict[str, Any]:
        """Return the test data of each domain by name, domains of the training set first; empty without domains."""
        return {} if self.plan.domains is None else self._test_data.by_domain(self.plan.domain_names)

    def val_dataloaders_by_domain(self) -> dict[str, Any]:
        """The validation data of each domain, as those for test."""
        names = self.plan.domain_names
        has_domains = self.plan.domains is not None
        return TestSplit(self.val_dataloader(), names, self.domains).by_domain(names) if has_domains else {}

    @cached_property
    def _test_data(self) -> TestSplit:
        return TestSplit(self.test_dataloader(), self.plan.domain_names, self.domains)

    def _forget_test_data(self) -> None:
        for name in ("_test_data", "_lack"):
            vars(self).pop(name, None)

    @cached_property
    def _lack(self) -> str:
        tested = self._test_data
        if tested.lack:
            return tested.lack
        of_domains = all(self.own_domains(k) for k in range(self.num_clients))
        if of_domains and (tested.by_name or tested.domains is not None):
            return ""
        if tested.by_name:
            return "its clients do not correspond to domains; use the partitioner Natural, or one test loader for all"
        labelled = self.plan.label_counts is not None and tested.labels is not None
        hint = "its test set cannot be divided without domains or labels; add an attribute or a column "
        return "" if labelled else f"{hint}{self.domains or 'domains'} (N,)"

    def predict_dataloader(self) -> Any:
        if is_overridden("predict_dataloader", self.datamodule):
            with rng_scope(base_seed(), "setup"):
                self.datamodule.setup("predict")  # only these commands need it
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
        dataset = self._divided.dataset
        domains, names = domains_of(dataset, self.domains), list[str]()
        name = self.domains or "domains"
        hint = f"has no {name}; add, to it or to each part of a ConcatDataset, an attribute or a column {name}"
        suffices = domains is not None or not (self.domains or getattr(self.partitioner, "needs_domains", False))
        require(suffices, "data.datamodule", self._kind, f"{type(dataset).__name__} {hint}")
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
        return self.partition(labels, largest + 1, True, domains, names, class_names_of(dataset, largest + 1))

    def _loaders(self, name: str) -> Any:
        return getattr(self.datamodule, name)() if is_overridden(name, self.datamodule) else []


class TestSplit:
    """The user's test loaders, with the domains and labels of their examples."""

    __test__ = False  # no test case of pytest

    def __init__(self, loaders: Any, names: Sequence[str], key: str | None) -> None:
        mapping = loaders if isinstance(loaders, Mapping) else {}
        by_name = {str(name): loader for name, loader in mapping.items()}
        self.by_name = by_name if set(names) & set(by_name) else {}
        loader = loaders[0] if isinstance(loaders, (list, tuple)) and len(loaders) == 1 else loaders
        self.loader, self.domains, self.lack = loader, None, ""
        # the rows of the data set that the loader gives: one data set may hold the training examples as well
        self.rows: Any = rows_of(loader) if isinstance(loader, DataLoader) else None
        if self.rows is None:
            kind = type(loaders).__name__ if loaders else "nothing"
            hint = "return one DataLoader with a batch_size over a map-style data set, without a sampler or with a "
            hint += "SubsetRandomSampler, or a dictionary of one for each domain"
            self.lack = "" if self.by_name else f"its test_dataloader gives {kind}; {hint}"
            return
        domains = domains_of(loader.dataset, key) if names else None
        self.domains = None if domains is None else domains[self.rows].astype(str)

    def by_domain(self, trained: Sequence[str]) -> dict[str, Any]:
        """A loader for each domain, by name: domains of the training set first."""
        if self.domains is None:
            return self.by_name
        tested = set(self.domains.tolist())
        names = [name for name in trained if name in tested]
        names += sorted(tested - set(names))
        return {name: self.on(np.flatnonzero(self.domains == name)) for name in names}

    @cached_property
    def labels(self) -> Any:
        labels = dataset_labels(self.loader)
        return None if labels is None else labels[self.rows]

    def on(self, rows: np.ndarray) -> DataLoader:
        options = {name: getattr(self.loader, name) for name in KEPT}
        options |= {"batch_size": self.loader.batch_size, "persistent_workers": False}
        return DataLoader(Subset(self.loader.dataset, self.rows[rows].tolist()), **options)


class SplitLoader:
    """A user's training loader whose data set is divided among the clients.

    Each part has a sampler of the same kind. Its share of ``num_samples`` is in proportion to its rows, rounded to the
    nearest whole number, and at least 1.

    - ``SequentialSampler``: the rows of the part in the order of the data set.
    - ``RandomSampler``: ``replacement`` is kept; ``num_samples`` is the part's share.
    - ``SubsetRandomSampler``: its indices in the part.
    - ``WeightedRandomSampler``: the weights of the part's rows; ``replacement`` is kept; ``num_samples`` is the part's
      share, without replacement at most the number of rows of positive weight.

    Every other argument of the loader is kept. Its ``generator`` is a new one for each loader, from which the sampler
    and the worker processes of the loader get all their random numbers. A loader that cannot be divided is refused.
    """

    def __init__(self, loader: Any, owner: str) -> None:
        self.owner, kind = owner, type(loader).__name__
        hint = f"its train_dataloader() returns a {kind}; return one DataLoader over a data set that has a length"
        self._require(isinstance(loader, DataLoader), hint)
        changed = []
        for method in PASS:
            if getattr(type(loader), method) is not getattr(DataLoader, method):
                changed.append(method)
        hint = f"its training loader {kind} has its own {', '.join(changed)}, which a client's part would lose; return "
        self._require(not changed, hint + "a DataLoader, and put the change into collate_fn or the data set")
        dataset, batch_sampler = loader.dataset, loader.batch_sampler
        hint = f"its training set {type(dataset).__name__} is iterable and cannot be divided; "
        indexed = hasattr(dataset, "__len__") and not isinstance(dataset, IterableDataset)
        self._require(indexed, hint + "use a data set with a length and indices")
        hint = f"its batch_sampler {type(batch_sampler).__name__} is not known on a client's part; "
        usual = batch_sampler is None or type(batch_sampler) is BatchSampler
        self._require(usual, hint + "give batch_size, and " + USUAL.removeprefix("give "))
        sampler, number = loader.sampler if batch_sampler is None else batch_sampler.sampler, len(dataset)
        kind, times = type(sampler).__name__, np.ones(number, np.int64)
        self._require(type(sampler) in SAMPLERS, f"its sampler {kind} is not known on a client's part; {USUAL}")
        if isinstance(sampler, SubsetRandomSampler):
            indices = np.array([int(index) for index in sampler.indices], np.int64)
            within = bool((indices >= -number).all() and (indices < number).all())
            self._require(within, f"its {kind} has indices beyond the {number} examples; remove them")
            times = np.bincount(indices % number, minlength=number)
        elif isinstance(sampler, WeightedRandomSampler):
            num_weights = len(sampler.weights)
            hint = f"its {kind} has {num_weights} weights for {number} examples; use one for each"
            self._require(num_weights == number, hint)
            times = (sampler.weights > 0).numpy().astype(np.int64)
        else:
            sampled = len(sampler.data_source)
            hint = f"its {kind} is that of {sampled} examples, the data set has {number}; use this set"
            self._require(sampled == number, hint)
        self.loader, self.dataset, self._sampler = loader, dataset, sampler
        # how often the sampler lists each row, 0 or 1 for one that draws at random
        self._times, self.drawn = times, times > 0

    def check_parts(self, parts: list[np.ndarray]) -> None:
        """Refuse a part with rows that the sampler cannot draw."""
        for k, rows in enumerate(parts):
            hint = f"its {type(self._sampler).__name__} draws none of the {len(rows)} examples of client {k}; "
            hint += "give fewer clients, another partitioner, or a sampler that draws from every part"
            self._require(not len(rows) or bool(self.drawn[rows].any()), hint)

    def on(self, rows: np.ndarray) -> DataLoader:
        """The loader of a part ``(n,)``, seeded by its ``generator`` alone."""
        generator = torch.Generator()
        # the partitioner shuffles the rows; a sequential pass is in the order of the data set
        rows = np.sort(rows) if type(self._sampler) is SequentialSampler else rows
        options = {name: getattr(self.loader, name) for name in KEPT}
        batch_sampler = self.loader.batch_sampler
        options |= {
            "batch_size": getattr(batch_sampler, "batch_size", None),
            "drop_last": getattr(batch_sampler, "drop_last", False),
        }
        options |= {"sampler": self._sampler_on(rows, generator), "generator": generator}
        # Lightning's own, in which the rank of this process must not count
        init = self.loader.worker_init_fn or partial(pl_worker_init_function, rank=0)
        return DataLoader(Subset(self.dataset, rows.tolist()), worker_init_fn=init, **options)

    def _sampler_on(self, rows: np.ndarray, generator: torch.Generator) -> Iterable[Any]:
        sampler: Any = self._sampler
        if type(sampler) is SequentialSampler or not len(rows):
            return SequentialSampler(rows)
        if type(sampler) is SubsetRandomSampler:
            places = np.repeat(np.arange(len(rows)), self._times[rows])
            return SubsetRandomSampler(places.tolist(), generator)
        total = len(self.dataset)
        number = max(1, (2 * sampler.num_samples * len(rows) + total) // (2 * total))
        if type(sampler) is RandomSampler:
            return RandomSampler(rows, sampler.replacement, number, generator)
        available = number if sampler.replacement else int(self.drawn[rows].sum())
        weights = sampler.weights[torch.from_numpy(rows)]
        return WeightedRandomSampler(weights, min(number, available), sampler.replacement, generator)

    def _require(self, condition: bool, hint: str) -> None:
        require(condition, "data.datamodule", self.owner, hint)


def own_module_of(datamodule: Any) -> Any:
    """The data module that the user wrote: the one inside of a :class:`Partitioned`, else ``datamodule``."""
    return datamodule.datamodule if isinstance(datamodule, Partitioned) else datamodule
