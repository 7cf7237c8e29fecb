"""Collects the values of a step: ``self.log`` calls, with Lightning's arguments and names, and the loss's terms."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import copy
from numbers import Number
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from fl_lightning.client.lightning.private import LogValidator, extract_batch_sizes
from fl_lightning.client.lightning.reductions import (
    LogKey,
    LogSpec,
    computed,
    log_spec,
)
from fl_lightning.core.reduced import EMPTY, Reduced, join
from fl_lightning.storage.metric_format import is_defined
from fl_lightning.utilities.errors import require

# stands for a hook in the keys of the loss's terms
TERM = ""
# the hook whose defaults hold for the values that methods log
METHODS_HOOK = "on_train_epoch_end"
# batches whose values wait to be reduced
MAX_PENDING = 4096


class MetricLog:
    """Collects the values of ``self.log`` and the terms of the loss, in a visit or an evaluation.

    The record has one value of each name for a visit. Means are over the visit; sums, maxima, minima and the values of
    torchmetrics objects are from the last epoch that logged them. With both ``on_step`` and ``on_epoch``, the record
    has ``name_epoch``, and the last step of the visit as ``name_step``, except for torchmetrics objects. Their
    ``name/clients`` is 1, or 0 if the value is undefined and omitted. An evaluation records only the reduction over all
    batches. With ``logger=False``, a value is only in :meth:`callback_metrics`. Since a visit runs in one process
    without a display, ``sync_dist``, ``sync_dist_group``, ``rank_zero_only``, ``prog_bar`` and ``enable_graph`` have no
    effect.

    Args:
        module: the user's module.
        evaluated: values of the last evaluations of the global model, which are also in :meth:`callback_metrics`.
        examples: number of the client's examples, the weight of values logged once an epoch; None in an evaluation.
    """

    def __init__(
        self,
        module: LightningModule,
        evaluated: Mapping[str, Tensor] | None = None,
        examples: float | None = 1.0,
    ) -> None:
        self.module = module
        self.dataloader_idx: int | None = None
        self._training = examples is not None
        # where the engine has called no hook
        self._default_hook = "training_step" if self._training else "validation_step"
        self._examples = 1.0 if examples is None else examples
        self._batch: Any = None
        self._num_batches = 0
        self._size: int | None = None
        self._counted: int | None = None
        # of the terms of the loss, and of what the module logs
        self.terms: dict[LogKey, LoggedValue] = {}
        self.entries: dict[LogKey, LoggedValue] = {}
        # original values, which become tensors on demand
        self._callback: dict[str, Any] = dict(evaluated or {})

    # ------------------------------------------------------------------ called by the module
    def log(self, name: str, value: Any, *args: Any, batch_size: int | None = None, **kwargs: Any) -> None:
        """Lightning's ``LightningModule.log``, whose arguments and names these are.

        Raises:
            UsageError: the value or the arguments are not allowed, or the hook has logged this name in another way.
        """
        hook = vars(self.module)["_current_fx_name"] or self._default_hook
        entry, arguments = self.entries.get((hook, name, self.dataloader_idx)), (args, kwargs)
        if entry is None or entry.arguments != arguments:
            entry = self._entry(hook, name, value, arguments)
        weight: Any = entry.batch_size if batch_size is None else batch_size
        if weight is None and entry.once:
            weight = self._examples
        elif weight is None:
            if self._size is None:
                self._size = 1 if self._batch is None else size_of_batch(self._batch)
            weight = self._size
        if weight is None:
            weight, is_mean = 1, entry.spec.on_epoch and entry.spec.kind == "mean"
            hint = f"its size is unknown for a {type(self._batch).__name__}: give batch_size="
            suffices = not is_mean or isinstance(value, Metric)  # by Lightning's rule
            require(suffices, f"self.log({name!r}, ..., batch_size=...)", None, hint)
        # tensors first: testing for a metric takes longer
        if isinstance(value, Tensor):
            if value.ndim:
                hint = f"a tensor of one element is logged; try value.mean(), not {tuple(value.shape)}"
                require(value.numel() == 1, f"self.log({name!r}, ...)", "tensor", hint)
                value = value.reshape(())
            value = value.detach().clone()  # the module may change it in place
        elif isinstance(value, Metric):
            entry.add_metric(value, weight)
            return
        else:
            hint = "a number, a tensor or a Metric is logged"
            require(isinstance(value, Number), f"self.log({name!r}, ...)", type(value).__name__, hint)
            value = float(value)
        entry.append((value, weight))

    def log_dict(self, dictionary: Mapping[str, Any] | MetricCollection, *args: Any, **kwargs: Any) -> None:
        """Lightning's ``log_dict``: :meth:`log` for each value of a dictionary or a ``MetricCollection``."""
        options: dict[str, bool] = {}
        if isinstance(dictionary, MetricCollection):
            # the metrics of a group share their states; a copy of them would not be theirs
            options = {"keep_base": False, **({"copy_state": False} if dictionary._enable_compute_groups else {})}
        for name, value in dictionary.items(**options):
            self.log(name, value, *args, **kwargs)

    def add(self, name: str, value: Any, weight: Any = None, *args: Any, **kwargs: Any) -> None:
        """Add a value that a method logs; by default it is reduced to the mean over the visit."""
        if weight is None:
            weight = self._counted = count_examples(self._batch) if self._counted is None else self._counted
        attributes = vars(self.module)
        before, attributes["_current_fx_name"] = attributes["_current_fx_name"], METHODS_HOOK
        try:
            self.log(name, value, *args, batch_size=weight, **kwargs)
        finally:
            attributes["_current_fx_name"] = before

    def add_term(self, name: str, value: Tensor) -> None:
        """Add a term of the loss, which :meth:`first_nonfinite_term` watches."""
        key = (TERM, name, None)
        entry = self.terms.get(key)
        if entry is None:
            entry = self.terms[key] = self.new_value(key, LogSpec(name))
        if self._counted is None:
            self._counted = count_examples(self._batch, self._size)
        value = value.detach()
        entry.append((value.reshape(()) if value.ndim else value, self._counted))

    # ------------------------------------------------------------------ called by the engine
    def begin_batch(self, batch: Any, dataloader_idx: int | None = None) -> None:
        """Start a batch; its size, counted when needed, is the default weight of logged values."""
        self._batch, self.dataloader_idx = batch, dataloader_idx
        self._size = self._counted = None
        self._num_batches += 1
        if self._num_batches % MAX_PENDING == 0:
            self.read_pending()

    def read_pending(self) -> None:
        """Reduce the values logged so far, which takes less memory."""
        for entry in (*self.terms.values(), *self.entries.values()):
            entry.read()

    def first_nonfinite_term(self) -> tuple[str, int] | None:
        """The term of the loss that was the first to be nan or infinite, and the step; None if all stayed finite."""
        bad: dict[str, int] = {}
        for entry in self.terms.values():
            entry.read()
            if entry.first_bad >= 0:
                bad[entry.spec.name] = entry.first_bad
        return min(bad.items(), key=lambda term: term[1]) if bad else None

    def end_epoch(self) -> dict[str, Reduced]:
        """Reduce the epoch of a visit, and reset the torchmetrics objects that were logged in it.

        Returns:
            The terms of the loss, as means over the examples of the epoch.
        """
        terms = {name: entry for (_, name, _), entry in self.terms.items() if entry.count or entry.pending}
        # an entry of the module takes the place of a term of its name
        for entry in (*terms.values(), *self.entries.values()):
            if entry.count or entry.pending:
                self._callback |= entry.shown_step()
                entry.end_epoch()
                self._callback |= entry.shown_epoch(entry.epoch)
        self._reset_metrics()
        return {name: entry.epoch for name, entry in terms.items() if entry.epoch is not None}

    def sums(self) -> dict[str, Reduced]:
        """The values of the visit for the record, by name; a term that the module logs by its name is the module's."""
        self.end_epoch()
        record: dict[str, Reduced | None] = {}
        for entry in self._recorded:
            record[entry.epoch_name] = entry.total
            if entry.metric is not None and entry.total is not None:
                defined = is_defined(entry.spec.name, entry.total.total)
                record[entry.epoch_name] = entry.total if defined else None
                record[f"{entry.epoch_name}/clients"] = Reduced("sum", float(defined))
            elif entry.step_name != entry.epoch_name:
                record[entry.step_name] = entry.last_step()
        return {name: value for name, value in record.items() if value is not None}

    def states(self) -> dict[str, tuple[str, dict[str, Any]]]:
        """Where each torchmetrics object of the record is in the module, and its states, by name."""
        entries = [entry for entry in self._recorded if entry.metric is not None]
        return {entry.epoch_name: (str(entry.spec.metric), entry.states) for entry in entries}

    def callback_metrics(self) -> dict[str, Tensor]:
        """Return the latest values by Lightning's names, as ``trainer.callback_metrics``.

        In a visit, these are the values of its client and of the last evaluation of the global model.
        """
        metrics = dict(self._callback)
        # in this hook Lightning has reduced the epoch already
        ended = vars(self.module)["_current_fx_name"] == "on_train_epoch_end"
        for entry in self.entries.values() if self._training else ():
            if entry.count or entry.pending:
                metrics |= entry.shown_step()
                metrics |= entry.shown_epoch(entry.partial_value()) if ended else {}
        return {name: as_tensor(value) for name, value in metrics.items()}

    @property
    def names(self) -> list[str]:
        """The names of the record so far."""
        return [entry.epoch_name for entry in self._recorded]

    def muted(self) -> MetricLog:
        """Return another log, for passes whose values are not kept."""
        return MetricLog(self.module)

    # ------------------------------------------------------------------ of an evaluation
    def take(self) -> dict[LogKey, Reduced]:
        """Return and remove the values logged since the last call, except torchmetrics objects."""
        values: dict[LogKey, Reduced] = {}
        for key, entry in self.entries.items():
            if entry.spec.metric is None:
                entry.end_epoch()
                values |= {} if entry.total is None else {key: entry.total}
                entry.total = None
        return values

    def assign(self, specs: Mapping[LogKey, LogSpec], values: Mapping[LogKey, Reduced]) -> None:
        """Store values that were reduced over all workers, including names that this worker did not log."""
        entries, self.entries = self.entries, {}
        for key, spec in specs.items():
            self.entries[key] = entries.get(key) or LoggedValue(spec)
        for key, value in values.items():
            self.entries[key].assign(value)
        self.end_loader()

    def end_loader(self) -> None:
        """Reduce the values logged so far, for the following hooks."""
        for entry in self.entries.values():
            entry.end_epoch()
            self._callback |= entry.shown_epoch(entry.epoch)

    def end_evaluation(self) -> dict[str, float]:
        """The values for the record, by name; the torchmetrics objects that were logged are reset."""
        self.end_loader()
        self._reset_metrics()
        totals = {entry.epoch_name: entry.total for entry in self._recorded}
        return {name: total.value for name, total in totals.items() if total is not None}

    # ------------------------------------------------------------------ inside
    def _entry(self, hook: str, name: str, value: Any, arguments: tuple[tuple, dict]) -> LoggedValue:
        """The entry of a name that is new, or that was logged with other arguments."""
        spec, options = log_spec(hook, name, arguments[0], tuple(arguments[1].items()), self.dataloader_idx)
        key = (hook, name, self.dataloader_idx)
        entry = self.entries.get(key)
        # without its suffix, the name would be the one of another loader
        if entry is None:
            fits = options["add_dataloader_idx"] or key[:2] not in {(hook, name) for hook, name, _ in self.entries}
        else:
            fits = entry.spec._replace(metric=None) == spec
        require(fits, f"self.log({name!r}, ...)", hook, "the hook logs it with different arguments, or for two loaders")
        if entry is None:
            if isinstance(value, Metric):
                parts = dict(self.module.named_modules())
                paths = [path for path in parts if isinstance(parts[path], Metric)]
                path = next((path for path in paths if parts[path] is value), options["metric_attribute"])
                hint = f"not an attribute of the module; available: {paths}"
                require(path is not None, f"self.log({name!r}, ...)", type(value).__name__, hint)
                spec = spec._replace(metric=path)
            functions: Any = LogValidator.functions[hook]
            entry = self.entries[key] = self.new_value(key, spec, functions["allowed_on_step"] == (False,))
        entry.arguments, entry.batch_size = arguments, options["batch_size"]
        return entry

    def new_value(self, key: LogKey, spec: LogSpec, once: bool = False) -> LoggedValue:
        """The entry of a name that is logged for the first time."""
        return LoggedValue(spec, once)

    @property
    def _recorded(self) -> list[LoggedValue]:
        """Return the record, with the terms of the loss first, since the module may log one of their names."""
        entries = [entry for entry in self.entries.values() if entry.spec.logger]
        return [*self.terms.values(), *entries]

    def _reset_metrics(self) -> None:
        for entry in self.entries.values():
            if entry.metric is not None:
                entry.metric.reset()


class LoggedValue:
    """The values of one name, reduced over the present epoch and over the epochs of a visit.

    A mean is continued over epochs; any other value is the last epoch's.
    """

    def __init__(self, spec: LogSpec, once: bool = False) -> None:
        self.spec, self.once = spec, once
        # the name, and Lightning's names for the values of a step and an epoch
        self.plain = self.step_name = self.epoch_name = spec.name + spec.suffix
        if spec.on_step and spec.on_epoch:
            self.step_name, self.epoch_name = f"{spec.name}_step{spec.suffix}", f"{spec.name}_epoch{spec.suffix}"
        self.arguments: Any = None  # of the latest call
        self.batch_size: Any = None
        self.metric: Metric | None = None
        self.count = 0  # values in the present epoch, without those pending
        self.last: Any = None
        self.last_weight: Any = 0.0
        self.epoch: Reduced | None = None  # the last complete epoch
        self.total: Reduced | None = None  # all complete epochs
        self.states: dict[str, Any] = {}  # of the metric at the end of the last epoch
        self.first_bad: Any = -1  # index of the first value that made the total nan or infinite
        # values that are not reduced yet, with their weights
        self.pending: list[tuple[Any, Any]] = []
        # a step only appends to a list; reading the values would wait for the device
        self.append: Callable[[tuple[Any, Any]], object] = self.pending.append
        self.num_read: Any = 0  # number of values that are reduced
        self.running: Any = EMPTY[spec.kind]  # reduction of the present epoch so far
        self.running_weight: Any = 0.0

    def add_metric(self, metric: Metric, weight: float) -> None:
        """Note that a torchmetrics object was logged."""
        self.metric, self.last, self.last_weight = metric, metric._forward_cache, weight
        self.running_weight += weight
        self.count += 1

    def read(self) -> None:
        """Reduce the pending values."""
        if self.pending:
            # a loop over numbers takes less time than arrays for the few steps of an epoch
            kind, total = self.spec.kind, self.running
            values, weights = zip(*self.pending, strict=True)
            try:
                numbers = torch.stack(values).tolist()  # with one transfer from the device
            except (TypeError, RuntimeError):  # some are not tensors, or are on another device
                numbers = [*map(float, values)]
            for value, weight in zip(numbers, weights, strict=True):
                total = total + weight * value if kind == "mean" else join(kind, total, value)
                if self.first_bad < 0 and not math.isfinite(total):
                    self.first_bad = self.num_read
                self.num_read += 1
            self.running, self.running_weight = total, self.running_weight + sum(weights)
            self.last, self.last_weight = self.pending[-1]
            self.count += len(self.pending)
            self.pending.clear()

    def end_epoch(self) -> None:
        """Reduce the epoch and begin another; without effect where nothing was logged in it."""
        if not (self.count or self.pending):
            return
        epoch, before = self.partial_value(), self.total
        if self.metric is not None:
            # copies, since its reset empties the lists
            states = {name: copy(value) for name, value in self.metric.metric_state.items()}
            self.states = states if self.metric.update_called else {}
        self.assign(epoch)
        if before is not None:
            self.total = self.continued(before, epoch)

    def continued(self, before: Reduced, epoch: Reduced) -> Reduced:
        """The value of all epochs."""
        if epoch.kind != "mean" or self.metric is not None:
            return epoch
        return Reduced("mean", before.total + epoch.total, before.weight + epoch.weight)

    def partial_value(self) -> Reduced:
        """The reduction over the present epoch so far."""
        self.read()
        if self.metric is None:
            return Reduced(self.spec.kind, self.running, self.running_weight)
        # one that the module has reset by itself has nothing but its latest batch
        is_complete = self.metric.update_called or self.last is None
        value = computed(self.spec.name, self.metric) if is_complete else float(self.last)
        return Reduced("mean", self.running_weight * value, self.running_weight)

    def assign(self, value: Reduced) -> None:
        """Set the reduced value, and begin another epoch."""
        self.epoch = self.total = value
        self.count, self.running, self.running_weight = 0, EMPTY[self.spec.kind], 0.0

    def shown_step(self) -> dict[str, Any]:
        """The latest value by Lightning's names, where steps are logged."""
        value = self.pending[-1][0] if self.pending else self.last
        return {self.plain: value, self.step_name: value} if self.spec.on_step and value is not None else {}

    def shown_epoch(self, value: Reduced | None) -> dict[str, Any]:
        """The value of an epoch by Lightning's names, where epochs are logged."""
        is_shown = self.spec.on_epoch and value is not None
        return {self.plain: value, self.epoch_name: value} if is_shown else {}

    def last_step(self) -> Reduced | None:
        """The latest value, with its weight for a mean over clients."""
        if self.last is None:
            return None
        value, weight = float(self.last) if isinstance(self.last, Tensor) else self.last, self.last_weight
        return Reduced(self.spec.kind, value * weight if self.spec.kind == "mean" else value, weight)


def size_of_batch(batch: Any) -> int | None:
    """The size of a batch by Lightning's rule: the length of the first tensor in it; None without one."""
    if type(batch) in (tuple, list) and all(isinstance(part, Tensor) for part in batch):
        sizes = {part.shape[:1] for part in batch}
        if len(sizes) == 1 and (size := sizes.pop()):  # else Lightning warns, or counts 1
            return size[0]
    try:
        return extract_batch_size(batch)
    except MisconfigurationException:
        return None


def count_examples(batch: Any, size: int | None = None) -> int:
    """Return the number of examples in a batch: graphs (PyG), or the length of its first tensor; 1 if unknown.

    ``size`` is this length, where it is known already.
    """
    graphs = None if type(batch) in (tuple, list) else getattr(batch, "num_graphs", None)
    if isinstance(graphs, int):
        return graphs
    if size is None:
        size = next((length for length in extract_batch_sizes(batch) if length is not None), 1)
    return size


def as_tensor(value: Any) -> Tensor:
    """Return a reduced value as a tensor, in float64; a number or a tensor unchanged."""
    return torch.tensor(value.value, dtype=torch.float64) if isinstance(value, Reduced) else torch.as_tensor(value)
