"""The loaders of a run, seeded with addresses, and the transfer of their batches to the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import DoublePrecision, HalfPrecision
from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.fabric.utilities.data import sized_len
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from fl_lightning.core.seeding import derive_seed, numpy_rng, rng_scope
from fl_lightning.data.client_loaders import (
    Batches,
    ClientLoader,
    DataLoaderAdapter,
    ExampleIndices,
    IndexedLoader,
    as_client_loader,
    is_combined,
    is_iterable,
    leaves_of,
    rows_of,
)
from fl_lightning.data.datamodule import FederatedDataModule
from fl_lightning.data.partition_adapter import own_module_of
from fl_lightning.data.transfer import pinned, pins
from fl_lightning.storage.serializable import with_tensors
from fl_lightning.training.resident_images import ResidentImages
from fl_lightning.utilities.errors import require
from fl_lightning.utilities.lightning_compat import LightningDataModule, LightningModule, is_overridden

# in the order in which they are called
TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")

MORE = "it gave fewer batches than its length; return the number of batches of every pass"
# examples of a batch of a probe: few enough that several workers have some
PROBE_BATCH = 64


class Loaders:
    """Batches of the clients' training data and of the evaluation data, on the device.

    ``limit`` is the most batches of a visit or of a pass over evaluation data. Images of up to ``resident`` bytes stay
    on the device.
    """

    def __init__(
        self,
        fabric: Fabric,
        data: FederatedDataModule,
        seed: int,
        module: LightningModule | None = None,
        channels_last: bool = False,
        limit: int | None = None,
        resident: float = 0.0,
    ) -> None:
        self.fabric, self.data, self.seed = fabric, data, seed
        self.channels_last, self.limit = channels_last, limit
        self._precision = fabric.strategy.precision
        hooks = {name: transfer_hook(name, module, data) for name in TRANSFER_HOOKS}
        self._hooks = {name: hook for name, hook in hooks.items() if hook is not None}
        self._images = ResidentImages(fabric.device, resident if self.plain else 0.0)
        # on a CPU nothing is moved, and autocast converts what mixed precision needs
        converts = isinstance(self._precision, (DoublePrecision, HalfPrecision))
        self._as_is = self.plain and fabric.device.type == "cpu" and not converts

    @property
    def plain(self) -> bool:
        """Whether no transfer hook of the user's is called, which would see a batch of one client."""
        return not self._hooks

    @contextmanager
    def train(self, k: int, round_: int, purpose: str = "batches") -> Iterator[ClientLoader]:
        """The loader of client ``k``, seeded for ``purpose`` in a round, and closed at the end of the block."""
        loader = self._images.of(as_client_loader(self.data.train_dataloader(k)))
        loader.seed(derive_seed(self.seed, purpose, round_, k))
        try:
            yield loader
        finally:
            if isinstance(loader, DataLoaderAdapter):
                loader.close()

    def batches(self, loader: ClientLoader) -> Iterator[tuple[ExampleIndices | None, Any]]:
        """Yield the batches of one pass over a client's data, on the device, each with its rows.

        The rows are None if examples may differ between passes, or if the loader does not know them.
        """
        repeats, pairs = loader.deterministic, loader.batches(self.channels_last)
        if self._as_is and (type(loader) is Batches or not self.channels_last):
            return pairs if repeats else ((None, batch) for _, batch in pairs)
        return ((rows if repeats else None, self.to_device(batch)) for rows, batch in pairs)

    def extra(self, stream: str, round_: int, k: int, passes: float, fraction: float) -> Iterator[Any]:
        """Yield batches of client ``k`` from a separate random stream, which does not affect any other batch."""
        address = (self.seed, f"batches/{stream}", round_, k)
        with rng_scope(*address):
            loader = self._images.of(as_client_loader(self.data.train_dataloader(k)))
            number = math.ceil(fraction * min(len(loader), math.inf if self.limit is None else self.limit))
        # the data may return the same loader again, and training may be in the middle of a pass over it
        generators, states = list[torch.Generator](), list[Tensor]()
        for part in (loader, *(loader.parts() if isinstance(loader, DataLoaderAdapter) else ())):
            generator = getattr(part, "generator", None)
            if isinstance(generator, torch.Generator) and generator not in generators:
                generators.append(generator)
        batches: Iterator[Any] = iter(())
        count = 0
        try:
            while count < passes * number:
                before = [generator.get_state() for generator in generators]
                try:
                    with rng_scope(*address, count):
                        if not count:
                            loader.seed(derive_seed(*address))
                        for generator, state in zip(generators, states, strict=False):
                            generator.set_state(state)
                        if not count % number:
                            batches = self.batches(loader)
                        pair = next(batches, None)
                        states = [generator.get_state() for generator in generators]
                finally:
                    for generator, state in zip(generators, before, strict=True):
                        generator.set_state(state)
                require(pair is not None, f"data: train_dataloader({k})", "exhausted", MORE)
                yield pair[1]  # type: ignore[index]
                count += 1
        finally:
            if isinstance(loader, DataLoaderAdapter):
                loader.close()

    def evaluation(self, phase: str, client: int | None = None, domain: str | None = None) -> list[ClientLoader]:
        """The loaders of the ``val`` or ``test`` data, or of a domain's; ``client`` restricts test data to its own."""
        if domain is not None:
            loaders = self._by_domain(phase)[domain]
        elif phase == "val":
            loaders = self.data.val_dataloader()
        elif client is None:
            loaders = self.data.test_dataloader()
        else:
            require(not self.missing_test_data_reason, "data", type(self.data).__name__, self.missing_test_data_reason)
            loaders = self.data.test_dataloader(client)  # type: ignore[call-arg]
        key = f"data={type(own_module_of(self.data)).__name__}: {phase}_dataloader"
        return [self._images.of(as_client_loader(part)) for part in flattened(loaders, key)]

    def share(self, loader: ClientLoader, rank: int, size: int) -> Iterator[tuple[int, Any]]:
        """The batches of worker ``rank`` of ``size``, each with its index in the pass.

        They are not on the device yet: :meth:`to_device` belongs into the random stream of the batch.
        """
        return loader.share(rank, size, self.limit, self.channels_last)

    @property
    def missing_test_data_reason(self) -> str:
        """The reason why the clients have no test data, with the remedy; empty if they have test data."""
        reason = getattr(self.data, "missing_test_data_reason", None)
        return FederatedDataModule.missing_test_data_reason(self.data) if reason is None else reason()

    def domains(self, phase: str) -> list[str]:
        """Return the names of the domains with ``val`` or ``test`` data; empty for data without domains."""
        return list(self._by_domain(phase))

    def num_examples(self, domain: str, phase: str) -> int:
        """The number of ``val`` or ``test`` examples of a domain; 0 where a loader does not tell it."""
        return sum(num_pickable(loader) for loader in self.evaluation(phase, domain=domain))

    def _by_domain(self, phase: str) -> Mapping[str, Any]:
        dataloaders = getattr(self.data, f"{phase}_dataloaders_by_domain", None)
        return {} if dataloaders is None else dataloaders()

    def probe(
        self, examples: int | None, client: int | None = None, domain: str | None = None
    ) -> list[tuple[ClientLoader, int | None]]:
        """The test loaders, or loaders of about ``examples`` of their examples; each with the most batches to take.

        The examples are drawn from all loaders alike, and are the same in every round. Where they cannot be picked, as
        in an ``IterableDataset``, the first batches stand for them.
        """
        loaders = self.evaluation("test", client, domain)
        if examples is None:
            return [(loader, self.limit) for loader in loaders]
        sizes = [num_pickable(loader) for loader in loaders]
        share, rng = examples / max(sum(sizes), 1), numpy_rng(self.seed, "probe")
        probes = list[tuple[ClientLoader, int | None]]()
        for loader, size in zip(loaders, sizes, strict=True):
            rows = np.sort(rng.choice(size, min(size, math.ceil(share * size)), replace=False))
            batch_size = min(getattr(getattr(loader, "loader", loader), "batch_size", None) or PROBE_BATCH, PROBE_BATCH)
            limit = min(math.ceil(examples / batch_size), examples if self.limit is None else self.limit)
            probes.append((pick(loader, rows, batch_size) if len(rows) else loader, limit))
        return probes

    def length(self, loader: ClientLoader) -> int | float:
        """The number of batches in a pass over evaluation data; infinite, as in Lightning, where it has no length."""
        size = sized_len(loader)
        return min(math.inf if size is None else size, math.inf if self.limit is None else self.limit)

    def to_device(self, batch: Any, dataloader_idx: int = 0) -> Any:
        """A batch on the device, in the precision's type and memory format, as the transfer hooks make it."""
        if self._hooks:
            before, transfer, after = (self._hooks.get(name) for name in TRANSFER_HOOKS)
            batch, device = self._precision.convert_input(batch), self.fabric.device
            if before is not None:
                batch = before(batch, dataloader_idx)
            batch = self.fabric.to_device(batch) if transfer is None else transfer(batch, device, dataloader_idx)
            if after is not None:
                batch = after(batch, dataloader_idx)
        elif not self._as_is:
            if pins(self.fabric.device):
                batch = with_tensors(batch, partial(pinned, device=self.fabric.device))
            batch = self._precision.convert_input(self.fabric.to_device(batch))
        return apply_to_collection(batch, Tensor, channels_last) if self.channels_last else batch


def num_pickable(loader: ClientLoader) -> int:
    """Return the number of a loader's examples; 0 if they cannot be indexed."""
    if isinstance(loader, IndexedLoader):
        return len(loader.rows)
    inner: Any = getattr(loader, "loader", None)
    rows = rows_of(inner) if isinstance(inner, DataLoader) else None
    return 0 if rows is None else len(rows)


def pick(loader: Any, places: np.ndarray, batch_size: int) -> ClientLoader:
    """A loader of the examples at these places."""
    if isinstance(loader, IndexedLoader):
        return loader.subset(torch.from_numpy(places), batch_size)
    rows = rows_of(loader.loader)[places]  # type: ignore[index]
    subset = Subset(loader.loader.dataset, rows.tolist())
    return DataLoaderAdapter(DataLoader(subset, batch_size, collate_fn=loader.loader.collate_fn))


def flattened(loaders: Any, key: str) -> list[Any]:
    """Return the loaders of a collection, in the order of Lightning's evaluation.

    A list or tuple that contains a tensor, or another value except loaders, is one loader: a list of batches.
    """
    if is_combined(loaders):
        mode, hint = getattr(loaders, "_mode", None), "combine evaluation data with mode sequential, not"
        require(mode == "sequential", f"{key}: CombinedLoader.mode", mode, hint)
        return list(loaders.flattened)
    if isinstance(loaders, (list, tuple)) and any(map(is_data, leaves_of(loaders))):
        return [loaders]
    if isinstance(loaders, (list, tuple, Mapping)):
        parts = loaders.values() if isinstance(loaders, Mapping) else loaders
        return [leaf for part in parts for leaf in flattened(part, key)]
    hint = "return a DataLoader, a list of batches, or an object with __iter__"
    require(loaders is None or not is_data(loaders) or isinstance(loaders, Tensor), key, type(loaders).__name__, hint)
    return [] if loaders is None else [loaders]


def is_data(value: Any) -> bool:
    """Return whether a value is part of a batch instead of a loader; None means no loader."""
    return isinstance(value, (Tensor, np.ndarray, str, bytes)) or not (is_iterable(value) or value is None)


def transfer_hook(name: str, module: LightningModule | None, data: Any) -> Callable[..., Any] | None:
    """The hook of this name of the data module or else of the module, None where neither overrides it."""
    owner = own_module_of(data)
    if isinstance(owner, LightningDataModule) and is_overridden(name, owner):
        return getattr(owner, name)
    overridden = module is not None and is_overridden(name, module)
    return getattr(module, name) if overridden else None


def channels_last(part: Tensor) -> Tensor:
    """Images ``(B, C, H, W)`` in the channels_last memory format; other tensors as they are."""
    return part.contiguous(memory_format=torch.channels_last) if part.ndim == 4 else part
