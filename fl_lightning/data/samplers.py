"""A user's training loader on each client's part of its data set, with the user's sampler and arguments."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from fl_lightning.errors import require

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
# methods of a DataLoader with which a subclass changes what a pass gives
PASS = ("__iter__", "__len__", "_get_iterator", "_index_sampler", "_auto_collation")
SAMPLERS = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
USUAL = "give shuffle, or a RandomSampler, SubsetRandomSampler or WeightedRandomSampler"


class DividedLoader:
    """A user's training loader, whose data set is divided over the clients.

    On a client's part the loader's sampler becomes one of the same kind. Here, a share of ``num_samples`` is in
    proportion to the rows of the part, rounded to the nearest whole number, and at least 1.

    - ``SequentialSampler``: the rows of the part in the order of the data set.
    - ``RandomSampler``: ``replacement`` is kept; ``num_samples`` is the part's share.
    - ``SubsetRandomSampler``: those of its indices that are in the part.
    - ``WeightedRandomSampler``: the weights of the part's rows; ``replacement`` is kept; ``num_samples`` is the part's
      share, without replacement at most the number of rows of positive weight.

    Every other argument of the loader is kept. Its ``generator`` is a new one for each loader, from which the sampler
    and the worker processes of the loader get all their random numbers.

    Args:
        loader: what the user's ``train_dataloader()`` returns.
        owner: name of the user's data module, for error messages.

    Attributes:
        dataset: the user's data set.
        drawn: whether the sampler can draw a row ``(N,)``.

    Raises:
        UsageError: the loader cannot be divided; the error names the part of it that cannot, and the remedy.
    """

    def __init__(self, loader: Any, owner: str) -> None:
        self.owner = owner
        self._check_loader(loader)
        self.loader, self.dataset = loader, loader.dataset
        batches = loader.batch_sampler
        # without automatic batching, a batch is what the sampler gives: an example, or a list of them
        self._batching = {
            "batch_size": getattr(batches, "batch_size", None),
            "drop_last": getattr(batches, "drop_last", False),
        }
        self._sampler = self._base = loader.sampler if batches is None else batches.sampler
        while type(self._base) is BatchSampler:
            self._base = self._base.sampler
        self._check_sampler(self._base)
        self._times = self._times_drawn(self._base)
        self.drawn = self._times > 0

    def check_parts(self, parts: list[np.ndarray]) -> None:
        """Refuse a part that has rows, of which the sampler can draw none."""
        for k, rows in enumerate(parts):
            hint = f"its {type(self._base).__name__} draws none of the {len(rows)} examples of client {k}; "
            hint += "give fewer clients, another partitioner, or a sampler that draws from every part"
            self._require(not len(rows) or bool(self.drawn[rows].any()), hint)

    def on(self, rows: np.ndarray) -> DataLoader:
        """The loader of a part ``(n,)``, seeded by its ``generator`` alone."""
        generator = torch.Generator()
        # the partitioner shuffles the rows; a sequential pass is in the order of the data set
        rows = np.sort(rows) if type(self._base) is SequentialSampler else rows
        kept = {name: getattr(self.loader, name) for name in KEPT}
        kept |= {**self._batching, "generator": generator}
        sampler = self._sampler_on(self._sampler, rows, generator)
        # Lightning's own, in which the rank of this process must not count
        init = self.loader.worker_init_fn or partial(pl_worker_init_function, rank=0)
        return DataLoader(Subset(self.dataset, rows.tolist()), sampler=sampler, worker_init_fn=init, **kept)

    def _sampler_on(self, sampler: Any, rows: np.ndarray, generator: torch.Generator) -> Iterable[Any]:
        if type(sampler) is BatchSampler:
            inner = self._sampler_on(sampler.sampler, rows, generator)
            return BatchSampler(inner, sampler.batch_size, sampler.drop_last)
        if type(sampler) is SequentialSampler or not len(rows):
            return SequentialSampler(rows)
        if type(sampler) is SubsetRandomSampler:
            places = np.repeat(np.arange(len(rows)), self._times[rows])
            return SubsetRandomSampler(places.tolist(), generator)
        number = self._share(sampler.num_samples, len(rows))
        if type(sampler) is RandomSampler:
            return RandomSampler(rows, sampler.replacement, number, generator)
        most = number if sampler.replacement else int(self.drawn[rows].sum())
        weights = sampler.weights[torch.from_numpy(rows)]
        return WeightedRandomSampler(weights, min(number, most), sampler.replacement, generator)

    def _share(self, number: int, size: int) -> int:
        whole = len(self.dataset)
        return max(1, (2 * number * size + whole) // (2 * whole))

    def _times_drawn(self, sampler: Any) -> np.ndarray:
        """How often a sampler lists each row ``(N,)``; 0 or 1 for one that draws at random."""
        number = len(self.dataset)
        if isinstance(sampler, SubsetRandomSampler):
            indices = np.array([int(index) for index in sampler.indices], np.int64)
            within = bool((indices >= -number).all() and (indices < number).all())
            self._require(within, f"its SubsetRandomSampler has indices beyond the {number} examples; remove them")
            return np.bincount(indices % number, minlength=number)
        if isinstance(sampler, WeightedRandomSampler):
            return (sampler.weights > 0).numpy().astype(np.int64)
        return np.ones(number, np.int64)

    def _check_loader(self, loader: Any) -> None:
        kind, hint = type(loader).__name__, "return one DataLoader over a data set that has a length"
        self._require(isinstance(loader, DataLoader), f"its train_dataloader() returns a {kind}; {hint}")
        changed = [name for name in PASS if getattr(type(loader), name) is not getattr(DataLoader, name)]
        data, batches = loader.dataset, loader.batch_sampler
        hint = f"its training loader {kind} has its own {', '.join(changed)}, which a client's part would lose; return "
        self._require(not changed, hint + "a DataLoader, and put the change into collate_fn or the data set")
        hint = f"its training set {type(data).__name__} is iterable and cannot be divided; give one that has a length "
        indexed = hasattr(data, "__len__") and not isinstance(data, IterableDataset)
        self._require(indexed, hint + "and indices")
        hint = "in_order=False gives batches in an order that depends on time; remove it"
        self._require(getattr(loader, "in_order", True), hint)
        hint = f"its batch_sampler {type(batches).__name__} is not known on a client's part; give batch_size, and "
        known = batches is None or type(batches) is BatchSampler
        self._require(known, hint + USUAL.removeprefix("give "))

    def _check_sampler(self, sampler: Sampler) -> None:
        kind, number = type(sampler), len(self.dataset)
        hint = f"its sampler {kind.__name__} is not known on a client's part; {USUAL}"
        self._require(kind in SAMPLERS, hint)
        if isinstance(sampler, WeightedRandomSampler):
            hint = f"its WeightedRandomSampler has {len(sampler.weights)} weights for {number} examples"
            self._require(len(sampler.weights) == number, hint + "; give one for each")
        if isinstance(sampler, (RandomSampler, SequentialSampler)):
            theirs = len(sampler.data_source)
            hint = f"its {kind.__name__} is that of {theirs} examples, the data set has {number}; give it this set"
            self._require(theirs == number, hint)

    def _require(self, condition: bool, hint: str) -> None:
        require(condition, "data.datamodule", self.owner, hint)
