"""Reference models: frozen copies of the module with another state, observed on the client's current batch.

They run in eval mode without gradient, only up to the last requested tap, and once per batch for all methods.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from fl_lightning.client.lightning.module_snapshot import ModuleSnapshot, uncopyable
from fl_lightning.client.taps import Taps
from fl_lightning.core.lazy_copies import is_lazy, lazy_copy
from fl_lightning.core.state import copy_into, tensors
from fl_lightning.data.client_loaders import ExampleIndices
from fl_lightning.data.transfer import transferred
from fl_lightning.utilities.errors import ClientError, UsageError, text_of, truncate

Observation = dict[str, Tensor]


class ReferenceModels:
    """The reference models of one visit; up to ``limit`` bytes of taps are cached for the rest of the visit.

    ``num_runs`` counts the forward passes of reference models in all visits.
    """

    def __init__(self, tap_paths: Mapping[str, str], takes_index: bool, limit: float = 0.0) -> None:
        self.tap_paths, self._takes_index, self.limit = dict(tap_paths), takes_index, limit
        self._room, self.num_runs = 0.0, 0
        self._models: dict[str, tuple[LightningModule, Taps, ModuleSnapshot]] = {}
        self.wanted: dict[str, set[str]] = {}
        self._seen: dict[str, Observation] = {}
        self._places: dict[str, int] = {}
        self._caches: dict[str, Cache] = {}
        self._batch: tuple[Any, int] = (None, 0)
        self._versions: list[tuple[int, int]] = []
        self._rows: ExampleIndices | None = None

    def clear(self, repeats: bool = False) -> None:
        """Release the last batch, observations and cache; a visit that ``repeats`` its data fills the cache again."""
        self.wanted, self._caches, self._room = {}, {}, self.limit if repeats else 0.0
        self._batch, self._seen, self._rows = (None, 0), {}, None

    def begin_batch(self, batch: Any, index: int, rows: ExampleIndices | None) -> None:
        """Set the batch to observe from now on; ``rows`` says which of the client's examples it holds."""
        # the cache holds values of full batches only
        cached = (self._room or self._caches) and rows is not None and rows.number >= rows.batch_size
        self._batch, self._seen, self._rows = (batch, index), {}, rows if cached else None
        self._versions = tensor_versions(batch) if self.wanted else []

    @property
    def models(self) -> dict[str, LightningModule]:
        """The reference models by name."""
        return {name: model for name, (model, *_) in self._models.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._models

    def add(self, name: str, model: LightningModule) -> None:
        """Register a frozen copy of the module under ``name``."""
        self._models[name] = model, Taps(model, self.tap_paths), ModuleSnapshot(model)

    def reset(self, name: str) -> LightningModule:
        """The model ``name``, with its first values of all that is outside its state."""
        model, _, snapshot = self._models[name]
        snapshot.restore()
        return model

    def load(self, name: str, state: Mapping[str, Tensor], taps: Collection[str] | None) -> None:
        """Load the state of the model ``name`` for this visit, and want ``taps`` of it too (None: all of them)."""
        copy_into(tensors(self.reset(name)), state)
        self.wanted.setdefault(name, set()).update(self.tap_paths if taps is None else taps)

    @torch.no_grad()
    def observe(self, name: str, places: Mapping[str, int] | None = None) -> Observation:
        """The taps of the model ``name`` on the current batch.

        Of a submodule that is called several times, ``places`` has the number of the call to observe; else the first.
        """
        if name not in self._seen:
            self._places = {tap: (places or {}).get(tap, 1) for tap in sorted(self.wanted[name])}
            self._seen[name] = self._run(name, self._batch) if self._rows is None else self._cached(name, self._rows)
        return self._seen[name]

    def _run(self, name: str, batch: tuple[Any, int]) -> Observation:
        self.num_runs += 1
        model, taps, _ = self._models[name]
        arguments = batch if self._takes_index else batch[:1]
        # the module itself has met the batch before
        if tensor_versions(self._batch[0]) != self._versions:
            hint = "which a reference model is to observe as it came; work on a copy"
            raise ClientError(f"{type(model).__name__}.training_step changes its batch, {hint}")
        values = taps.run_until(self._places, lambda: model.training_step(*arguments))
        return {tap: values[tap] for tap in self._places}

    def _cached(self, name: str, rows: ExampleIndices) -> Observation:
        """As :meth:`_run`, from the cache where it holds the examples.

        A matrix product may round the rows of a smaller matrix differently. So a smaller batch is always run. The first
        time it is also filled up to a full batch, which is run for the cache.
        """
        full, cache = len(rows.index) == rows.batch_size, self._caches.get(name)
        is_cached = cache is not None and bool(cache.filled[rows.index].all())
        if cache is not None and is_cached and full:
            return cache.get(rows.index)
        observation = self._run(name, self._batch)
        if cache is None:
            size = rows.number * sum(value[0].nbytes for value in observation.values())
            if size > self._room:
                return observation
            cache = self._caches[name] = Cache(rows.number)
            self._room -= size
        if not is_cached:
            filled = observation if full else self._run(name, (fill(self._batch[0], rows), self._batch[1]))
            cache.put(rows.index, filled)
        return observation


class Cache:
    """The taps of one reference model on a client's ``number`` examples, filled batch by batch."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.filled = torch.zeros(number, dtype=torch.bool)
        self._values: Observation = {}
        self._channels_last: dict[str, bool] = {}

    def put(self, index: Tensor, observation: Observation) -> None:
        """Keep the first ``len(index)`` rows of each tap, as the values of these examples."""
        for tap, value in observation.items():
            # stored in its memory format, so that it comes back in it
            self._channels_last[tap] = is_channels_last(value)
            rows = value.permute(0, 2, 3, 1) if self._channels_last[tap] else value
            if tap not in self._values:
                self._values[tap] = rows.new_empty((self.number, *rows.shape[1:]))
            self._values[tap].index_copy_(0, transferred(index, rows.device), rows[: len(index)])
        self.filled[index] = True

    def get(self, index: Tensor) -> Observation:
        """The taps of these examples, in the memory format in which they came."""
        observation: Observation = {}
        for tap, value in self._values.items():
            rows = value.index_select(0, transferred(index, value.device))  # faster than value[index]
            observation[tap] = rows.permute(0, 3, 1, 2) if self._channels_last[tap] else rows
        return observation


def tensor_versions(batch: Any) -> list[tuple[int, int]]:
    """The tensors of a batch, each with a number that changes when it is written to."""
    tensors_of_batch: list[tuple[int, int]] = []
    apply_to_collection(batch, Tensor, lambda tensor: tensors_of_batch.append((id(tensor), tensor._version)))
    return tensors_of_batch


def fill(batch: Any, rows: ExampleIndices) -> Any:
    """A batch of tensors repeated up to the size of a full one, each in its memory format."""
    repeats = torch.arange(rows.batch_size) % len(rows.index)
    filled = []
    for part in batch:
        examples = part[transferred(repeats, part.device)]
        filled.append(examples.contiguous(memory_format=torch.channels_last) if is_channels_last(part) else examples)
    return filled


def is_channels_last(images: Tensor) -> bool:
    """Whether a tensor ``(B, C, H, W)`` lies in the channels_last memory format."""
    return images.ndim == 4 and images.is_contiguous(memory_format=torch.channels_last)


def reference_copy(module: LightningModule, shared: object) -> LightningModule:
    """Return a deep copy of the module in eval mode without gradients, which does not log and shares ``shared``.

    Raises:
        UsageError: the module cannot be copied, although its parts can.
    """
    lazy_parameters = filter(is_lazy, module.parameters())
    lazy = {id(part): nn.Parameter(lazy_copy(part), False) for part in lazy_parameters}
    compiled = module.__dict__.pop("forward", None)  # it is bound to the module, so the copy must not call it
    try:
        frozen: Any = copy.deepcopy(module, uncopyable(module, shared) | lazy)
    except Exception as error:
        why = f"it cannot be copied, and a reference model is a copy: {truncate(text_of(error), 80)}"
        raise UsageError(f"model={type(module).__name__}: {why}; fix __deepcopy__ of its parts") from error
    finally:
        module.__dict__.update({"forward": compiled} if compiled is not None else {})
    frozen.log = frozen.log_dict = lambda *args, **kwargs: None
    return frozen.eval().requires_grad_(False)
