"""Evaluation of a model on the validation or test data, its batches dealt out over the workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torchmetrics import Metric

from fl_lightning.client import Client, count_examples, targets_of
from fl_lightning.client.logged import tagged
from fl_lightning.client.taps import Taps, resolve_taps
from fl_lightning.data.loaders import ClientLoader
from fl_lightning.engine.loaders import Loaders
from fl_lightning.engine.workers import Workers
from fl_lightning.seeding import ambient
from fl_lightning.state import State, copy_into, tensors
from fl_lightning.sums import Sums, Weighted

PHASES = ("val", "test")


class Evaluator:
    """Runs the module's own validation or test step in the resident module.

    Args:
        client: the resident module.
        loaders: the evaluation data.
        workers: who share the batches.
        call: calls a hook of the callbacks.
    """

    def __init__(self, client: Client, loaders: Loaders, workers: Workers, call: Callable[..., Any]) -> None:
        self.client, self.loaders, self.workers, self.call = client, loaders, workers, call

    def global_model(self, phase: str, state: State, observed: bool = True) -> dict[str, float]:
        """Metrics of ``state`` by tag; none without data. If ``observed``, callbacks see each batch."""
        self.client.load(state)
        return self._evaluate(phase, self.loaders.evaluation(phase), observed)

    def own_models(
        self, phase: str, state: State, own: Iterator[tuple[int, State]], observed: bool = True
    ) -> dict[str, float]:
        """Mean metrics of the clients' own models.

        Args:
            phase: ``val`` or ``test``.
            state: the global state.
            own: each client of this worker, with the entries of its own that complete ``state``.
            observed: whether callbacks see each batch.
        """
        sums = Sums()
        with self.workers.alone():
            for k, entries in own:
                self.client.load({**state, **entries})
                metrics = self._evaluate(phase, self.loaders.evaluation(phase), observed, k)
                sums.add({tag: Weighted.of(value) for tag, value in metrics.items()})
        sums.all_reduce(self.workers)
        return {tag: float(mean) for tag, mean in sums.means().items()}

    def on_own_data(self, phase: str, state: State, k: int) -> dict[str, float]:
        """Metrics of ``state`` on the data of client ``k`` alone, unobserved."""
        self.client.load(state)
        return self._evaluate(phase, self.loaders.evaluation(phase, k), False)

    def has_data(self, phase: str) -> bool:
        """Whether there is data of this phase."""
        return bool(self.loaders.evaluation(phase))

    @torch.no_grad()
    def _evaluate(
        self, phase: str, loaders: list[ClientLoader], observed: bool, client: int | None = None
    ) -> dict[str, float]:
        """Metrics by tag of what is loaded, in eval mode."""
        module, name = self.client.module, step_name(self.client.module, phase)
        if not loaders or name is None:
            return {}
        stage = "validation" if name == "validation_step" else "test"
        module.eval()
        self.client.logged.clear()
        sums = Sums()
        # where the module adds something up over the batches by itself, every worker evaluates all
        with self.workers.alone(not can_share(module, stage)):
            with ambient(self.loaders.seed, phase):
                getattr(module, f"on_{stage}_epoch_start")()
                for index, loader in enumerate(loaders):
                    self._evaluate_loader(loader, index, name, phase, observed, sums)
                getattr(module, f"on_{stage}_epoch_end")()
            sums.add(self.client.logged.sums())
            sums.all_reduce(self.workers)
            if observed:
                self.call("on_evaluation_end", phase=phase, client=client)
        return {tagged(phase, key): float(value) for key, value in sums.means().items()}

    def _evaluate_loader(
        self, loader: ClientLoader, index: int, name: str, phase: str, observed: bool, sums: Sums
    ) -> None:
        step = bound_step(self.client.module, name, index)
        for batch_idx, batch in self.loaders.share(loader, self.workers.rank, self.workers.size):
            self.workers.check()
            self.client.logged.batch_size = count_examples(batch)
            # each batch has its own address, whoever evaluates the others
            with ambient(self.loaders.seed, phase, index, batch_idx), self.loaders.fabric.autocast():
                step(batch, batch_idx)
            sums.add(self.client.logged.take())
            if observed:
                seen = {"batch": batch, "targets": targets_of(batch), "taps": self.client.taps.values}
                self.call("on_evaluation_batch_end", phase=phase, **seen)


class BatchIndex(NamedTuple):
    """Which batch: of which client's data (None: of the test data of all), and its number in the pass."""

    client: int | None
    batch: int


Observed = tuple[BatchIndex, Any, Tensor | None, dict[str, Tensor]]


class Representations:
    """The taps of a state on test or training data, observed in a frozen copy of the module.

    Args:
        client: the resident module, of which the copy is made.
        loaders: the data.
        workers: who share the batches.
        taps: taps that the trainer adds to those of the module.
    """

    def __init__(self, client: Client, loaders: Loaders, workers: Workers, taps: dict[str, str]) -> None:
        self.client, self.loaders, self.workers, self.extra = client, loaders, workers, taps
        self._copy: LightningModule | None = None

    @torch.no_grad()
    def observe(
        self, state: State, names: tuple[str, ...], data: str, client: int | None, round_: int
    ) -> Iterator[Observed]:
        """The batches of this worker, each with its index, targets and the taps called ``names``."""
        self._copy = self._copy or self.client.frozen_copy()
        copy_into(tensors(self._copy), state)
        asked = dict.fromkeys(names, "trainer.representations")
        taps = Taps(self._copy, resolve_taps(self._copy, self.extra, asked))
        try:
            batches = self._train(client, round_) if data == "train" else self._test(client)
            for index, seed, step, batch in batches:
                with ambient(self.loaders.seed, *seed), self.loaders.fabric.autocast():
                    values = taps.run_until(names, partial(step, batch, index.batch))
                yield index, batch, targets_of(batch), values
        finally:
            taps.remove()

    def _train(self, client: int | None, round_: int) -> Iterator[tuple[BatchIndex, tuple, Any, Any]]:
        """All batches of the clients of this worker."""
        step = bound_step(self._copy, "training_step")
        clients = range(self.loaders.data.num_clients) if client is None else [client]
        for k in clients[self.workers.rank :: self.workers.size]:
            for index, (_, batch) in enumerate(self.loaders.batches(self.loaders.train(k, round_))):
                yield BatchIndex(k, index), ("representations", round_, k, index), step, batch

    def _test(self, client: int | None) -> Iterator[tuple[BatchIndex, tuple, Any, Any]]:
        """This worker's share of the test batches."""
        name = step_name(self._copy, "test") or "training_step"
        for number, loader in enumerate(self.loaders.evaluation("test", client)):
            step = bound_step(self._copy, name, number)
            for index, batch in self.loaders.share(loader, self.workers.rank, self.workers.size):
                yield BatchIndex(client, index), ("test", number, index), step, batch


def step_name(module: LightningModule | None, phase: str) -> str | None:
    """The step that evaluates ``phase``: its own, or for test the validation step; None where there is none."""
    names = ("validation_step",) if phase == "val" else ("test_step", "validation_step")
    return next((name for name in names if is_overridden(name, module)), None)


def bound_step(module: LightningModule | None, name: str, dataloader_idx: int = 0) -> Callable[[Any, int], Any]:
    """A step of the module as a function of a batch and its index, whichever arguments it takes."""
    step = getattr(module, name)
    extra = (
        {"dataloader_idx": dataloader_idx} if is_param_in_hook_signature(step, "dataloader_idx", explicit=True) else {}
    )
    if is_param_in_hook_signature(step, "batch_idx", min_args=2):
        return lambda batch, index: step(batch, index, **extra)
    return lambda batch, index: step(batch, **extra)


def can_share(module: LightningModule, stage: str) -> bool:
    """Whether the batches can be dealt out: not where the module adds something up over them by itself."""
    hooks = (f"on_{stage}_epoch_start", f"on_{stage}_epoch_end")
    accumulates = any(isinstance(part, Metric) for part in module.modules())
    return not accumulates and not any(is_overridden(hook, module) for hook in hooks)
