"""Metrics and activations of a model on validation or test data, with the batches distributed over the workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from fl_lightning.client import Client, targets_of
from fl_lightning.client.run_context import BatchIndex, Observed
from fl_lightning.client.taps import Taps, resolve_taps, with_paths
from fl_lightning.core.seeding import rng_scope
from fl_lightning.core.state import State, copy_into, tensors
from fl_lightning.core.weighted import Sums, Weighted
from fl_lightning.data.client_loaders import ClientLoader, DataLoaderAdapter
from fl_lightning.data.partition_adapter import own_module_of
from fl_lightning.engine.evaluation.loop import EvaluationLoop, evaluation_hooks, needs_loader
from fl_lightning.storage.metric_format import is_defined, tagged
from fl_lightning.training.device_loaders import Loaders
from fl_lightning.utilities.errors import count, require
from fl_lightning.utilities.lightning_compat import is_overridden

if TYPE_CHECKING:
    from fl_lightning.distributed.workers import Workers

PHASES = ("val", "test")
STAGES = {"val": "validate", "test": "test"}


class Evaluator:
    """Runs the module's validation or test step; ``call`` calls a named hook of all callbacks."""

    def __init__(self, client: Client, loaders: Loaders, workers: Workers, call: Callable[..., Any]) -> None:
        self.client, self.loaders, self.workers, self.call = client, loaders, workers, call
        self.worker_module = client.worker_module

    @torch.no_grad()
    def evaluate(
        self,
        phase: str,
        state: State,
        observed: bool = True,
        client: int | None = None,
        data_of: int | None = None,
        domain: str | None = None,
        keeps: bool = False,
    ) -> dict[str, float]:
        """Return the metrics of a state by tag, in eval mode; empty without data.

        Args:
            phase: ``val`` or ``test``.
            state: the global model, or that of a ``client``.
            observed: whether callbacks see each batch.
            client: id of the client whose own model it is; None for the global model.
            data_of: id of the client on whose data it is evaluated; None for all.
            domain: the domain on whose data it is evaluated; None for all.
            keeps: whether the user's module has the attributes set meanwhile after the run.
        """
        self.worker_module.load(state)
        loaders, step = self.loaders.evaluation(phase, data_of, domain), step_name(self.client.module, phase)
        if not loaders or step is None:
            return {}

        def observe(batch: Any) -> None:
            taps = self.worker_module.taps.values
            self.call("on_evaluation_batch_end", phase=phase, batch=batch, targets=targets_of(batch), taps=taps)

        loop = EvaluationLoop(self.client, self.loaders, self.workers, phase, step, observe if observed else None)
        self.worker_module.trainer_shim.evaluated_batches = [*map(self.loaders.length, loaders)]
        if observed and phase == "val":
            # Lightning calls this hook within a fit only
            self.worker_module.call("on_validation_model_zero_grad")
        # without sharing, every worker runs all batches
        with self.worker_module.evaluating(STAGES[phase]), self.workers.local_only(not loop.shared):
            values = loop.run(loaders)
            if observed and client is None:
                self.worker_module.evaluated = self.worker_module.logged.callback_metrics()
            if observed:
                self.call("on_evaluation_end", phase=phase, client=client)
            if keeps:
                self.worker_module.keep_attributes(self.workers.size)
        return {tagged(phase, name): value for name, value in values.items()}

    def means(self, metrics: Iterable[dict[str, float]]) -> dict[str, float]:
        """Return the mean metrics over the clients of all workers; each worker passes its clients' metrics.

        If a mean omits undefined values, ``<tag>/clients`` counts the clients with a value.
        """
        sums = Sums()
        with self.workers.local_only():
            for of_client in metrics:
                defined = [tag for tag, value in of_client.items() if is_defined(tag, value)]
                sums.add({tag: Weighted.of(of_client[tag]) for tag in defined})
        sums.all_reduce(self.workers)
        numbers = {tag: float(total.weight) for tag, total in sums.totals.items()}
        means = {tag: float(mean) for tag, mean in sums.means().items()}
        for tag, number in numbers.items():
            if number < max(numbers.values()):
                means[f"{tag}/clients"] = number
        return means

    def check(self) -> None:
        """Refuse steps and hooks without ``dataloader_idx`` if there are several data loaders, as Lightning does.

        Also refuse a data module that returns the same exhausted iterator for the next evaluation.
        """
        module = self.client.module
        for phase in PHASES:
            step, loaders = step_name(module, phase), self.loaders.evaluation(phase)
            if step is not None and loaders:
                check_loader_index(module, evaluation_hooks(module, step), len(loaders))
            used_up = [loader for loader in map(inner, loaders) if isinstance(loader, Iterator)]
            again = set(map(id, map(inner, self.loaders.evaluation(phase)))) if used_up else set()
            iterators = [type(loader).__name__ for loader in used_up if id(loader) in again]
            key = f"data={type(own_module_of(self.loaders.data)).__name__}: {phase}_dataloader"
            hint = "the first evaluation exhausts it; create it in this function, or return a list of batches"
            require(not iterators, key, ", ".join(iterators[:1]), hint)

    def has_data(self, phase: str) -> bool:
        """Return whether this phase has data."""
        return bool(self.loaders.evaluation(phase))


def check_loader_index(module: LightningModule, hooks: Iterable[Any], number: int) -> None:
    """Refuse steps and hooks that lack ``dataloader_idx`` for a ``number`` of loaders, or that require it for one."""
    for hook in hooks:
        fits = is_param_in_hook_signature(hook, "dataloader_idx") if number > 1 else not needs_loader(hook)
        key, hint = f"{type(module).__name__}.{hook.__name__}", "add the argument dataloader_idx=0"
        require(fits, key, count(number, "data loader"), hint)


def inner(loader: ClientLoader) -> Any:
    """Return the user's loader inside an adapter."""
    return loader.loader if isinstance(loader, DataLoaderAdapter) else loader


class Representations:
    """Activations of a state on test or training data, recorded in a frozen copy of the module.

    ``taps`` are added to the module's own taps.
    """

    def __init__(self, client: Client, loaders: Loaders, workers: Workers, taps: dict[str, str]) -> None:
        self.client, self.loaders, self.workers, self.extra = client, loaders, workers, taps
        self._loaded: State | None = None
        # index of the recorded call within a forward, by tap, for each kind of data
        self._places: dict[tuple[str, ...], dict[str, int]] = {}

    @cached_property
    def _copy(self) -> LightningModule:
        return self.client.reference_copy()

    @torch.no_grad()
    def observe(
        self,
        state: State,
        names: tuple[str, ...],
        data: str,
        client: int | None,
        round_: int,
        examples: int | None,
        domain: str | None = None,
    ) -> Iterator[Observed]:
        """Yield the batches of this worker, each with its index, its targets and the taps called ``names``."""
        readers = dict.fromkeys(names, "trainer.representations")
        extra = with_paths(self._copy, self.extra, names)
        taps, key = Taps(self._copy, resolve_taps(self._copy, extra, readers)), (data, *names)
        try:
            batches = self._train(client, round_) if data == "train" else self._test(client, examples, domain)
            for index, seed, step, batch in batches:
                if self._loaded is not state:  # several iterators may take turns
                    copy_into(tensors(self._copy), state)
                    self._loaded = state
                with rng_scope(self.loaders.seed, *seed):
                    batch = self.loaders.to_device(batch, 0 if data == "train" else seed[1])
                    with self.loaders.fabric.autocast():
                        # the first forward runs to its end, to find the last call of each submodule
                        recorded = taps.run_until(self._places.get(key, {}), partial(step, batch, index.batch))
                    values = {name: recorded[name] for name in names}
                    self._places[key] = recorded.places
                yield index, batch, targets_of(batch), values
        finally:
            taps.remove()

    def _train(self, client: int | None, round_: int) -> Iterator[tuple[BatchIndex, tuple, Any, Any]]:
        """Yield all training batches of this worker's share of the clients."""
        step = bound_step(self._copy, "training_step")
        clients = range(self.loaders.data.num_clients) if client is None else [client]
        for k in clients[self.workers.rank :: self.workers.size]:
            with self.loaders.train(k, round_) as loader:
                for index, (_, batch) in enumerate(loader.batches(self.loaders.channels_last)):
                    yield BatchIndex(k, index), ("representations", round_, k, index), step, batch

    def _test(
        self, client: int | None, examples: int | None, domain: str | None
    ) -> Iterator[tuple[BatchIndex, tuple, Any, Any]]:
        """Yield this worker's share of the test batches."""
        name = step_name(self._copy, "test") or "training_step"
        rank, size, channels_last = self.workers.rank, self.workers.size, self.loaders.channels_last
        for number, (loader, limit) in enumerate(self.loaders.probe(examples, client, domain)):
            step = bound_step(self._copy, name, number)
            for index, batch in loader.share(rank, size, limit, channels_last):
                yield BatchIndex(client, index, number), ("test", number, index), step, batch


def step_name(module: LightningModule, phase: str) -> str | None:
    """Return the name of the step that evaluates ``phase``; ``validation_step`` is the fallback for test."""
    names = ("validation_step",) if phase == "val" else ("test_step", "validation_step")
    return next((name for name in names if is_overridden(name, module)), None)


def bound_step(module: LightningModule, name: str, dataloader_idx: int = 0) -> Callable[[Any, int], Any]:
    """Return a step of the module as a function of a batch and its index, whatever arguments it declares."""
    step = getattr(module, name)
    takes_loader = is_param_in_hook_signature(step, "dataloader_idx", explicit=True)
    extra = {"dataloader_idx": dataloader_idx} if takes_loader else {}
    if is_param_in_hook_signature(step, "batch_idx", min_args=2):
        return lambda batch, index: step(batch, index, **extra)
    return lambda batch, index: step(batch, **extra)
