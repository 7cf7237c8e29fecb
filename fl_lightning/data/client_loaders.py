"""Loaders of batches: the engine's protocol, the loader of image data, and an adapter for other loaders."""

from __future__ import annotations

import copy
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, Sampler, SubsetRandomSampler

from fl_lightning.data.augmentation import Augmentation
from fl_lightning.data.transfer import transferred
from fl_lightning.utilities.errors import UsageError, require, with_location

# number of batches of combined loaders, by mode of a CombinedLoader
LENGTHS: dict[str, Callable[[Iterable[int]], int]] = {"min_size": min, "max_size": max, "max_size_cycle": max}


@dataclass(eq=False)
class ExampleIndices:
    """Which of a client's training examples a batch holds.

    Args:
        index: their places among the client's examples ``(B,)``.
        number: how many examples the client has.
        batch_size: examples of a full batch.
    """

    index: Tensor
    number: int
    batch_size: int


@runtime_checkable
class ClientLoader(Protocol):
    """The engine's protocol for loaders: any object with these members.

    :func:`as_client_loader` adapts other loaders, such as a ``DataLoader``.

    Attributes:
        deterministic: whether an example is equal in every pass, without augmentation or noise, so that outputs of
            frozen models can be cached between passes.
    """

    deterministic: bool

    def __len__(self) -> int:
        """The number of batches in a pass."""

    def seed(self, seed: int) -> None:
        """Seed the loader's only source of randomness: after equal seeds, passes give equal batches.

        The engine calls it at the start of each client's local training, with an address made of the base seed, the
        round and the client. A loader that is not random ignores it.
        """

    def batches(self, channels_last: bool = False) -> Iterator[tuple[ExampleIndices | None, Any]]:
        """One pass over the data: each batch together with its rows.

        Rows and batch come as a pair, so that a loader may prepare batches ahead of their use.

        Args:
            channels_last: give images ``(B, C, H, W)`` in the channels_last memory format. A loader that cannot may
                ignore it; the engine then converts the batch.

        Returns:
            Pairs of the rows, None where the loader does not know them, and the batch.
        """

    def share(
        self, rank: int, size: int, limit: int | None = None, channels_last: bool = False
    ) -> Iterator[tuple[int, Any]]:
        """The batches of one worker, where an evaluation is dealt out over several.

        They are the batches ``rank``, ``rank + size``, ``rank + 2 * size``, ... of a pass in a fixed order, so that the
        workers together give each batch once.

        Args:
            rank: number of the worker, from 0 to ``size - 1``.
            size: number of workers.
            limit: only batches of a smaller index; None for all.
            channels_last: as in :meth:`batches`.

        Returns:
            Pairs of the index of the batch in the pass and the batch.
        """


def as_client_loader(loader: Any) -> ClientLoader:
    """The loader itself where it is a :class:`ClientLoader`, else a :class:`DataLoaderAdapter` around it."""
    # testing for a protocol is slow, and skipped for this package's loaders
    if isinstance(loader, (IndexedLoader, DataLoaderAdapter, ClientLoader)):
        return loader
    several = isinstance(loader, (list, tuple, Mapping)) and any(map(is_loader, leaves_of(loader)))
    return DataLoaderAdapter(CombinedLoader(loader, "max_size_cycle") if several else loader)


def num_batches(datamodule: Any, k: int) -> int:
    """Number of batches in a pass over the training data of client ``k``; a loader without one is refused."""
    key = f"data={type(datamodule).__name__}: train_dataloader({k})"
    try:
        loader = datamodule.train_dataloader(k)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{key} fails: {with_location(error)}; correct it") from error
    hint = "return a DataLoader, a list of batches, or an object with __iter__ and __len__"
    batches = is_iterable(loader) and not isinstance(loader, (str, bytes, Mapping))
    require(batches or any(map(is_loader, leaves_of(loader))), key, type(loader).__name__, hint)
    mode = getattr(loader, "_mode", None) if is_combined(loader) else None
    modes = f"cannot train on a sequence of loaders; use one of {', '.join(LENGTHS)}"
    require(mode is None or mode in LENGTHS, f"{key}: CombinedLoader.mode", mode, modes)
    try:
        return len(as_client_loader(loader))
    except Exception as error:
        fault = f"it has no length, from which the steps of a visit are counted: {with_location(error)}"
        raise UsageError(f"{key}={type(loader).__name__!r}: {fault}; {hint}") from error


def last_batch(datamodule: Any, k: int) -> str:
    """Kind of the last batch of client ``k``: full, short, single (one example), dropped or unknown."""
    loader = datamodule.train_dataloader(k)
    size = getattr(loader, "batch_size", None)
    if not size:
        return "unknown"
    try:
        number = len(loader.sampler)
    except (AttributeError, TypeError):
        number = datamodule.info(k).num_examples
    remainder, drops = number % size, getattr(loader, "drop_last", False)
    if remainder == 0:
        return "full"
    return "dropped" if drops is True or (drops and remainder == 1) else "single" if remainder == 1 else "short"


def without_singles(datamodule: Any) -> str:
    """Return the remedy for a last batch of one example."""
    has_option = hasattr(datamodule, "drop_last")
    option = "data.drop_last=singletons" if has_option else "drop_last=True in the training loader"
    return f"give {option}, or another batch size"


def rows_of(loader: DataLoader) -> np.ndarray | None:
    """Return the rows of its data set that a loader gives, ascending; None if only its sampler knows them."""
    number = sized_len(loader.dataset)
    if number is None or not loader.batch_size:
        return None
    if isinstance(loader.sampler, SubsetRandomSampler):
        return np.unique(np.array([int(index) for index in loader.sampler.indices], np.int64) % number)
    return np.arange(number) if sized_len(loader.sampler) == number else None


def leaves_of(loaders: Any) -> Iterator[Any]:
    """Leaves of nested lists, tuples and mappings."""
    if isinstance(loaders, (list, tuple, Mapping)):
        for part in loaders.values() if isinstance(loaders, Mapping) else loaders:
            yield from leaves_of(part)
    else:
        yield loaders


def is_loader(value: Any) -> bool:
    """Whether a value is known as a loader: any iterable may be one, but so may a batch."""
    return isinstance(value, (DataLoader, ClientLoader)) or is_combined(value)


def is_iterable(value: Any) -> bool:
    """Whether a value yields batches."""
    return isinstance(value, ClientLoader) or hasattr(value, "__iter__") or hasattr(value, "__getitem__")


def is_combined(loader: Any) -> bool:
    """Whether a loader is Lightning's ``CombinedLoader``, of either distribution."""
    return hasattr(loader, "flattened") and hasattr(loader, "limits")


class DataLoaderAdapter:
    """Adapts any iterable with a length; a ``CombinedLoader`` gives its batches without their indices."""

    deterministic = False

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._combined: list[Any] | None = list(loader.flattened) if is_combined(loader) else None  # type: ignore[attr-defined]

    def __len__(self) -> int:
        combined: Any = self.loader
        if self._combined is None:
            return len(combined)
        limits = combined.limits or [math.inf] * len(self._combined)
        # its own length begins a pass over each loader
        parts = zip(self._combined, limits, strict=True)
        return LENGTHS[combined._mode](int(min(len(part), limit)) for part, limit in parts)

    def seed(self, seed: int) -> None:
        for part in self.parts():
            generator = getattr(part, "generator", None)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(seed)

    def close(self) -> None:
        """End the worker processes of a ``DataLoader``; the garbage collector would wait 5 s for each."""
        for loader in self._combined or [self.loader]:
            iterator: Any = getattr(loader, "_iterator", None)
            if hasattr(iterator, "_shutdown_workers"):
                iterator._shutdown_workers()
                vars(loader)["_iterator"] = None

    def batches(self, channels_last: bool = False) -> Iterator[tuple[ExampleIndices | None, Any]]:
        combined = self._combined is not None
        return ((None, batch[0] if combined else batch) for batch in self.loader)

    def share(
        self, rank: int, size: int, limit: int | None = None, channels_last: bool = False
    ) -> Iterator[tuple[int, Any]]:
        """Load all batches and keep one worker's; a shuffled loader repeats one order, on which workers agree."""
        for part in self.parts():
            if isinstance(part, (DataLoader, Sampler)) and getattr(part, "generator", 0) is None:
                part.generator = torch.Generator()  # type: ignore[union-attr]
        self.seed(0)
        return itertools.islice(enumerate(self.loader), rank, limit, size)

    def parts(self) -> Iterator[Any]:
        """The loaders and samplers, which may have a ``generator``."""
        for loader in self._combined or [self.loader]:
            batches = getattr(loader, "batch_sampler", None)
            yield from (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))


class IndexedLoader(ABC):
    """A :class:`ClientLoader` of some rows of tensors, which the loaders of several clients may share."""

    deterministic = True
    drop_last: bool | Literal["singletons"] = False

    def __init__(self, rows: Tensor, batch_size: int, shuffle: bool = False) -> None:
        self.rows, self.batch_size, self.shuffle = rows, batch_size, shuffle
        self.generator = torch.Generator()

    @abstractmethod
    def gather(self, rows: Tensor, channels_last: bool = False) -> Any:
        """A batch of any rows ``(m,)`` of the tensors; all randomness comes from :attr:`generator`."""

    @abstractmethod
    def is_like(self, loader: Any) -> bool:
        """Whether another loader gives the same batches for the same rows."""

    def __len__(self) -> int:
        full, remainder = divmod(len(self.rows), self.batch_size)
        least = 2 if self.drop_last == "singletons" else self.batch_size if self.drop_last else 1
        return full + (remainder >= least)

    def __iter__(self) -> Iterator[Any]:
        """One pass without the rows: ``for x, y in loader``."""
        return (batch for _, batch in self.batches())

    def seed(self, seed: int) -> None:
        self.generator.manual_seed(seed)

    def batches(self, channels_last: bool = False) -> Iterator[tuple[ExampleIndices, Any]]:
        places, number = self._places(), len(self.rows)
        parts = zip(places.split(self.batch_size), self.rows[places].split(self.batch_size), strict=True)
        for indices, rows in itertools.islice(parts, len(self)):
            yield ExampleIndices(indices, number, self.batch_size), self.gather(rows, channels_last)

    def subset(self, places: Tensor, batch_size: int) -> IndexedLoader:
        """Some of the examples, by their places in :attr:`rows`, in this order in every pass."""
        part = copy.copy(self)
        part.rows, part.batch_size, part.shuffle, part.drop_last = self.rows[places], batch_size, False, False
        part.generator = torch.Generator()
        return part

    def order(self) -> Tensor:
        """The rows ``(n,)`` in the order of one pass, which it begins."""
        return self.rows[self._places()] if self.shuffle else self.rows

    def share(
        self, rank: int, size: int, limit: int | None = None, channels_last: bool = False
    ) -> Iterator[tuple[int, Any]]:
        """The batches of one worker, in the order of :attr:`rows`; no others are computed."""
        batches = enumerate(self.rows.split(self.batch_size)[: len(self)])
        worker_batches = itertools.islice(batches, rank, limit, size)
        return ((index, self.gather(rows, channels_last)) for index, rows in worker_batches)

    def _places(self) -> Tensor:
        number = len(self.rows)
        return torch.randperm(number, generator=self.generator) if self.shuffle else torch.arange(number)


class ArrayBatches(IndexedLoader):
    """Batches of some rows of tensors, a list of one tensor for each, in the order of a seeded ``DataLoader``."""

    def __init__(self, arrays: Sequence[Tensor], rows: Tensor, batch_size: int, shuffle: bool = False) -> None:
        super().__init__(rows, batch_size, shuffle)
        self.arrays = arrays

    def gather(self, rows: Tensor, channels_last: bool = False) -> list[Tensor]:
        return [array.index_select(0, rows) for array in self.arrays]

    def is_like(self, loader: Any) -> bool:
        return type(loader) is type(self) and loader.arrays is self.arrays and loader.batch_size == self.batch_size

    def _places(self) -> Tensor:
        if self.shuffle:
            # a DataLoader first draws the seed of its worker processes
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        return super()._places()


class Batches(IndexedLoader):
    """Batches ``x (B, C, H, W)`` float32 and ``y (B,)`` int64 of some rows of one uint8 array.

    Args:
        images: ``(N, H, W, C)`` uint8, possibly memory-mapped. On a GPU, the batches are computed there.
        labels: ``(N,)`` int64, on the same device.
        rows: indices ``(n,)`` into both.
        batch_size: B.
        shuffle: whether each pass has its own random order.
        augment: applied to each batch.
        drop_last: omit an incomplete last batch; ``singletons``: only one with a single example.
        mean: mean of each channel, of values in [0, 1].
        std: standard deviation of each channel.
        noise: standard deviation of normal noise that is added to the values in [0, 1].
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        rows: Tensor,
        batch_size: int,
        shuffle: bool = False,
        augment: Iterable[Augmentation] = (),
        drop_last: bool | Literal["singletons"] = False,
        mean: Iterable[float] = (0.0,),
        std: Iterable[float] = (1.0,),
        noise: float = 0.0,
    ) -> None:
        super().__init__(rows, batch_size, shuffle)
        self.images, self.labels, self.augment, self.drop_last = images, labels, list(augment), drop_last
        self.mean, self.std, self.noise = tuple(mean), tuple(std), noise
        self.deterministic = not self.augment and not noise

    def on(self, images: Tensor, labels: Tensor) -> Batches:
        """This loader, with the same generator, on copies of its images and labels on another device."""
        moved = copy.copy(self)
        moved.images, moved.labels = images, labels
        return moved

    def is_like(self, loader: Any) -> bool:
        """Return whether another loader returns the same batches for the same rows; never for a random loader."""
        if not (isinstance(loader, Batches) and self.deterministic and loader.deterministic):
            return False
        same_tensors = loader.images is self.images and loader.labels is self.labels
        same_scale = (loader.mean, loader.std) == (self.mean, self.std)
        return same_tensors and same_scale and loader.batch_size == self.batch_size

    def as_stored(self, noise: bool = False) -> Batches:
        """The same images in the order of :attr:`rows`, all of them, not augmented, and normalised as these.

        Args:
            noise: keep the noise that is added to them.
        """
        how: dict[str, Any] = {"mean": self.mean, "std": self.std, "noise": self.noise if noise else 0.0}
        return Batches(self.images, self.labels, self.rows, self.batch_size, **how)

    def share(
        self, rank: int, size: int, limit: int | None = None, channels_last: bool = False
    ) -> Iterator[tuple[int, Any]]:
        """The batches of one worker; the noise of a batch follows that of the batches before it, of any worker."""
        dealt = (0, 1) if self.noise else (rank, size)
        return (pair for pair in super().share(*dealt, limit, channels_last) if pair[0] % size == rank)

    def gather(self, rows: Tensor, channels_last: bool = False) -> tuple[Tensor, Tensor]:
        """A batch of any rows ``(m,)``; augmentation and noise draw from :attr:`generator`."""
        device = self.images.device
        rows = rows if device.type == "cpu" else transferred(rows, device)
        images = self.images.index_select(0, rows).permute(0, 3, 1, 2)
        for augmentation in self.augment:
            images = augmentation(images, self.generator)
        size = tuple(images.shape[-2:]) if channels_last else (1, 1)
        scale, shift = scaling(self.mean, self.std, size, channels_last, device)
        # one pass over the memory changes type and layout, two more work in place
        x = images.permute(0, 2, 3, 1) if channels_last else images
        x = x.to(torch.float32, memory_format=torch.contiguous_format).mul_(scale).add_(shift)
        x = x.permute(0, 3, 1, 2) if channels_last else x
        if self.noise:
            deviation = torch.tensor(self.std).view(-1, 1, 1)
            noise = torch.randn(x.shape, generator=self.generator).mul_(self.noise / deviation)
            x.add_(transferred(noise, device))
        return x, self.labels[rows]


@lru_cache(maxsize=16)
def scaling(
    mean: tuple[float, ...], std: tuple[float, ...], size: tuple[int, int], channels_last: bool, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Factor and summand that normalise 0 to 255: ``(C, H, W)``, or ``(H, W, C)`` if ``channels_last``."""
    deviation = torch.tensor(std).view(-1, 1, 1)
    by_channel = (1 / (255 * deviation), -torch.tensor(mean).view(-1, 1, 1) / deviation)
    expanded = [part.expand(-1, *size) for part in by_channel]
    parts = [part.permute(1, 2, 0).contiguous() if channels_last else part for part in expanded]
    factor, summand = [part.to(device) for part in parts]
    return factor, summand
