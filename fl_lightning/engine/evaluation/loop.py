"""The evaluation loop, with Lightning's hooks in Lightning's order."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from fl_lightning.client import Client
from fl_lightning.client.lightning.reductions import LogKey, computed
from fl_lightning.core.reduced import Reduced, addable, reduced, update_extremes
from fl_lightning.core.seeding import rng_scope
from fl_lightning.core.weighted import Sums
from fl_lightning.data.client_loaders import ClientLoader
from fl_lightning.engine.evaluation.metric_states import MetricStates, Note, can_merge, metrics_of, names_in_evaluation
from fl_lightning.training.device_loaders import Loaders
from fl_lightning.training.patching import patched

if TYPE_CHECKING:
    from fl_lightning.distributed.workers import Workers

# hooks around an evaluation, and around a batch; on_<stage>_model_eval and _model_train only set the mode
EPOCH_HOOKS = ("start", "epoch_start", "epoch_end", "end")
BATCH_HOOKS = ("batch_start", "batch_end")


def can_share(client: Client, stage: str) -> bool:
    """Return whether the workers can share the batches of an evaluation; else each of them evaluates all batches.

    Hooks of ``stage`` (``validation``, ``test`` or ``predict``) may accumulate values, a logger writes on the first
    worker only, and some torchmetrics objects cannot be merged.
    """
    hooks = {f"on_{stage}_{name}" for name in (*EPOCH_HOOKS, *BATCH_HOOKS)}
    kind: Any = type(client.module)
    if hooks & client.worker_module.hooks or names_in_evaluation(kind) & {"logger", "loggers"}:
        return False
    metrics, kinds = metrics_of(client.module), set[Any](map(type, client.module.modules()))
    wrapped = any(kind.__module__.startswith("torchmetrics.wrappers") for kind in kinds)
    # the module's code may read the value of a metric up to a batch
    if metrics and (wrapped or any("compute" in names_in_evaluation(kind) for kind in kinds)):
        return False
    return all(map(can_merge, metrics.values()))


class EvaluationLoop:
    """Evaluates the loaded state with one of the module's steps; ``observe`` is called with each batch."""

    def __init__(
        self,
        client: Client,
        loaders: Loaders,
        workers: Workers,
        phase: str,
        step: str,
        observe: Callable[[Any], None] | None = None,
    ) -> None:
        self.worker_module, self.loaders, self.workers = client.worker_module, loaders, workers
        self.phase, self.step, self.stage, self.observe = phase, step, stage_of(step), observe
        self.shared = can_share(client, self.stage)
        # the step may require the index although this evaluation has one loader
        self._needs_loader = any(map(needs_loader, evaluation_hooks(client.module, step)))
        self._takes_index = is_param_in_hook_signature(getattr(client.module, step), "batch_idx", min_args=2)
        self._states = MetricStates(client.module)
        self._sums, self._extremes = Sums(), dict[str, Reduced]()

    def run(self, data: Sequence[ClientLoader]) -> dict[str, float]:
        """Return the logged values by name."""
        logged = self.worker_module.begin_logging()
        with ExitStack() as stack:
            stack.enter_context(rng_scope(self.loaders.seed, self.phase))
            if self.shared:
                stack.enter_context(self._states.dealt_out())
            self._call("start")
            self._call("epoch_start")
            for index, loader in enumerate(data):
                self._pass(loader, index, len(data) > 1)
            logged.begin_batch(None)
            if self.shared:
                self._merge(len(data))
            self._call("epoch_end")
            logged.end_loader()
            self._call("end")
            return logged.end_evaluation()

    def _pass(self, loader: ClientLoader, index: int, several: bool) -> None:
        for batch_idx, batch in self.loaders.share(loader, self.workers.rank, self.workers.size):
            self.workers.check()
            # a seed per batch makes the random numbers independent of the number of workers
            with rng_scope(self.loaders.seed, self.phase, index, batch_idx):
                batch = self.loaders.to_device(batch, index)
                self.worker_module.logged.begin_batch(batch, index if several else None)
                which = (index,) if several or self._needs_loader else ()
                self._call("batch_start", batch, batch_idx, *which)
                place = (batch_idx, *which) if self._takes_index else which
                with self.loaders.fabric.autocast():
                    output = self.worker_module.call(self.step, batch, *place)
                self._call("batch_end", output, batch, batch_idx, *which)
            if self.shared:
                # values logged in this batch, and the states of torchmetrics objects
                logged = self.worker_module.logged.take()
                values = {str(key): value for key, value in logged.items()}
                self._sums.add({**addable(values), "states": self._states.take((index, batch_idx))})
                update_extremes(self._extremes, values)
            if self.observe is not None:
                self.observe(batch)
        if not self.shared:
            self.worker_module.logged.end_loader()

    def _call(self, hook: str, *args: Any) -> None:
        self.worker_module.call(f"on_{self.stage}_{hook}", *args)

    def _merge(self, num_loaders: int) -> None:
        """Reduce the logged values over all workers, which all call this.

        As in Lightning, torchmetrics objects that are logged are reset, and the others hold all batches.
        """
        logged = self.worker_module.logged
        specs_here = {key: entry.spec for key, entry in logged.entries.items()}
        note = (specs_here, self._extremes, self._states.note)
        notes = self._sums.all_reduce(self.workers, note)
        for _, extremes, _ in notes:
            update_extremes(self._extremes, extremes)
        # the first worker has the first batch of each loader, so its order is the order of one process
        specs = dict(notes[0][0])
        for specs_of_worker, *_ in reversed(notes):
            specs |= specs_of_worker
        results = reduced(self._sums.totals, self._extremes)
        keys_with_result = [key for key in specs if str(key) in results]
        values = {key: Reduced(specs[key].kind, results[str(key)]) for key in keys_with_result}
        metrics = {key: spec.metric for key, spec in specs.items() if spec.metric is not None}
        states = [states for *_, states in notes]
        logged.assign(specs, {**values, **self._computed(metrics, states)})
        self._states.load(num_loaders - 1, self._sums.totals.get("states", {}), states)
        for name in metrics.values():
            self._states.metrics[name].reset()

    def _computed(self, metrics: dict[LogKey, str], notes: list[Note]) -> dict[LogKey, Reduced]:
        """Return the values of torchmetrics objects, each after the loader in which it was logged."""
        values = {}
        for loader in sorted({key[2] or 0 for key in metrics}):
            self._states.load(loader, self._sums.totals.get("states", {}), notes)
            with patched(self._states, reads=True):
                for key, name in metrics.items():
                    if (key[2] or 0) == loader:
                        values[key] = Reduced("mean", computed(key[1], self._states.metrics[name]))
        return values


def stage_of(step: str) -> str:
    """Return the stage in the hook names that belong to a step."""
    return step.removesuffix("_step")


def evaluation_hooks(module: LightningModule, step: str) -> list[Any]:
    """Return the module's step, and its hooks around a batch."""
    hooks = [f"on_{stage_of(step)}_{hook}" for hook in BATCH_HOOKS]
    return [getattr(module, name) for name in (step, *hooks)]


def needs_loader(function: Any) -> bool:
    """Return whether a step or a hook requires the index of a data loader."""
    parameter = inspect.signature(function).parameters.get("dataloader_idx")
    return parameter is not None and parameter.default is parameter.empty
