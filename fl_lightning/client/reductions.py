"""One name that a module logs, reduced over an epoch and over a visit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from functools import lru_cache
from inspect import signature
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import prints

from fl_lightning.aggregation.reduced import EMPTY, KINDS, Kind, Reduced, join
from fl_lightning.client.batched_tree import RowIndex, numbers_of
from fl_lightning.client.lightning.private import LogValidator
from fl_lightning.errors import UsageError, require

# hook, name and index of the data loader
LogKey = tuple[str, str, int | None]
LOG = signature(LightningModule.log)
# in the warnings of torchmetrics about a value that is 0 or 1 by convention, such as the AUROC of a single class
UNDEFINED = ("meaningless", "is undefined")
# pending values of a name before they are reduced
MAX_PENDING = 4096
# valid values of ``reduce_fx``
REDUCTIONS: dict[Any, Kind] = {
    **{kind: kind for kind in KINDS},
    **{"avg": "mean", torch.mean: "mean", torch.sum: "sum", sum: "sum"},
    **{torch.max: "max", max: "max", torch.min: "min", min: "min"},
}
FOLDS: dict[Kind, np.ufunc] = {"mean": np.add, "sum": np.add, "max": np.maximum, "min": np.minimum}


class LogSpec(NamedTuple):
    """How a logged name is reduced and written; small, so that workers can exchange it.

    Args:
        name: the name that the module gave.
        suffix: the suffix of the data loader, or nothing.
        kind: the reduction.
        on_step: whether steps are logged.
        on_epoch: whether epochs are logged.
        logger: whether the value goes into the record.
        metric: name of the torchmetrics object in the module, if one is logged.
    """

    name: str
    suffix: str = ""
    kind: Kind = "mean"
    on_step: bool = False
    on_epoch: bool = True
    logger: bool = True
    metric: str | None = None

    @property
    def plain(self) -> str:
        """The name with the suffix of the data loader."""
        return self.name + self.suffix

    @property
    def step_name(self) -> str:
        """Lightning's name for the value of a step."""
        return f"{self.name}_step{self.suffix}" if self.on_step and self.on_epoch else self.plain

    @property
    def epoch_name(self) -> str:
        """Lightning's name for the value of an epoch."""
        return f"{self.name}_epoch{self.suffix}" if self.on_step and self.on_epoch else self.plain


@lru_cache(1000)
def log_spec(hook: str, name: str, args: tuple, items: tuple, loader: int | None) -> tuple[LogSpec, dict[str, Any]]:
    """Resolve the arguments after the value of a ``self.log`` call, by Lightning's rules.

    Returns:
        The specification without its metric, and all arguments by name.

    Raises:
        UsageError: Lightning does not allow the arguments, or the reduction is not a mean, sum, maximum or minimum.
    """
    bound = LOG.bind(None, name, None, *args, **dict(items))
    bound.apply_defaults()
    given = bound.arguments
    try:
        levels = LogValidator.check_logging_and_get_default_levels(hook, given["on_step"], given["on_epoch"])
    except (MisconfigurationException, RuntimeError) as error:
        raise UsageError(f"self.log({name!r}, ...): {error}") from error
    require(any(levels), "on_step", False, f"self.log({name!r}, on_step=False, on_epoch=False) logs nothing")
    numbered, reduce_fx = given["add_dataloader_idx"], given["reduce_fx"]
    suffixed = numbered and "/dataloader_idx_" in name
    require(not suffixed, "add_dataloader_idx", True, f"the name {name!r} has the index already")
    try:
        kind = REDUCTIONS[reduce_fx.lower() if isinstance(reduce_fx, str) else reduce_fx]
    except (KeyError, TypeError):
        hint = f"self.log({name!r}, ...) takes mean, sum, max or min; for another reduction, log a torchmetrics object"
        raise UsageError(f"reduce_fx={reduce_fx!r}: {hint}") from None
    suffix = f"/dataloader_idx_{loader}" if numbered and loader is not None else ""
    logger = given["logger"] is None or bool(given["logger"])
    return LogSpec(name, suffix, kind, bool(levels[0]), bool(levels[1]), logger), given


class Record(NamedTuple):
    """A value that was logged in a mapped step: of each client ``(m,)``, or a number; ``...`` stands for a tensor."""

    key: LogKey
    spec: LogSpec
    weight: Any
    value: Any


class LoggedValue:
    """The values of one name, reduced over the present epoch and over the epochs of a visit.

    A mean is continued over epochs; any other value is the last epoch's. Of ``size`` clients side by side, all numbers
    are arrays ``(G,)``, and the values of a mapped step go to ``records`` until they are computed.
    """

    def __init__(
        self,
        spec: LogSpec,
        once: bool = False,
        size: int | None = None,
        key: LogKey = ("", "", None),
        records: list[Record] | None = None,
    ) -> None:
        self.spec, self.once, self.size, self.key, self._records = spec, once, size, key, records
        self.given: Any = None  # arguments of the latest call
        self.batch_size: Any = None
        self.metric: Metric | None = None
        self.count = 0  # values in the present epoch, of all clients
        self.last: Any = None
        self.last_weight: Any = 0.0
        self.epoch: Reduced | None = None  # the last complete epoch
        self.total: Reduced | None = None  # all complete epochs
        self.states: dict[str, Any] = {}  # of the metric at the end of the last epoch
        self.first_bad: Any = -1  # index of the first value that made the total nan or infinite
        self._pending: list[Any] = []
        self._weights: list[Any] = []
        self._rows: list[RowIndex] = []
        self._read_before: Any = 0
        self._sum: Any = EMPTY[spec.kind]
        self._weight: Any = 0.0

    def add(self, value: Any, weight: Any, rows: RowIndex | None = None) -> None:
        """Add a number, or a tensor of one; of several clients a number or a tensor ``(m,)``, with their rows."""
        if rows is not None:
            self._rows.append(rows)
        elif self.size is None:
            self.last, self.last_weight = value, weight
        else:
            assert self._records is not None
            self._records.append(Record(self.key, self.spec, weight, value))
            return
        # a step only appends to a list; reading the values would wait for the device
        self._pending.append(value)
        self._weights.append(weight)
        self.count += 1
        if len(self._pending) >= MAX_PENDING:
            self.read()

    def add_metric(self, metric: Metric, weight: float) -> None:
        """Note that a torchmetrics object was logged."""
        self.metric, self.last, self.last_weight = metric, metric._forward_cache, weight
        self._weight += weight
        self.count += 1

    def read(self) -> None:
        """Reduce the pending values."""
        if self._rows:
            self._read_rows(len(self._rows), self.size or 0)
        elif self._pending:
            # a loop over numbers takes less time than arrays for the few steps of an epoch
            kind, total = self.spec.kind, self._sum
            for value, weight in zip(numbers(self._pending), self._weights, strict=True):
                total = total + weight * value if kind == "mean" else join(kind, total, value)
                if self.first_bad < 0 and not math.isfinite(total):
                    self.first_bad = self._read_before
                self._read_before += 1
            self._sum, self._weight = total, self._weight + sum(self._weights)
        self._pending, self._weights, self._rows = [], [], []

    def _read_rows(self, steps: int, size: int) -> None:
        """Reduce the pending values of several clients, as matrices ``(steps, G)`` and in the order of one client."""
        kind = self.spec.kind
        chosen = [numbers_of(rows, size) for rows in self._rows]
        lengths = [*map(len, chosen)]
        places = np.repeat(np.arange(steps) * size, lengths) + np.concatenate(chosen)

        def spread(parts: Sequence[Any], empty: float) -> np.ndarray:
            whole = np.full(steps * size, empty)
            whole[places] = one_after_another(parts, lengths)
            return whole.reshape(steps, size)

        values, weights = spread(self._pending, EMPTY[kind]), spread(self._weights, 0.0)
        there = spread([1.0] * steps, 0.0).astype(bool)
        parts, fold = values * weights if kind == "mean" else values, FOLDS[kind]
        self._sum = fold(self._sum, fold.accumulate(parts)[-1]) + 0.0
        self._weight = self._weight + weights.sum(0)
        bad = there & ~np.isfinite(parts)
        if bad.any():
            index = self._read_before + np.take_along_axis(np.cumsum(there, 0), bad.argmax(0)[None], 0)[0] - 1
            self.first_bad = np.where(bad.any(0) & (np.asarray(self.first_bad) < 0), index, self.first_bad)
        self._read_before = self._read_before + there.sum(0)
        latest = steps - 1 - there[::-1].argmax(0)[None]
        before = (0.0, 0.0) if self.last is None else (self.last, self.last_weight)
        self.last, self.last_weight = (
            np.where(there.any(0), np.take_along_axis(now, latest, 0)[0], old)
            for now, old in zip((values, weights), before, strict=True)
        )

    def end_epoch(self) -> None:
        """Reduce the epoch and begin another; without effect where nothing was logged in it."""
        if not self.count:
            return
        epoch, before = self.partial_value(), self.total
        if self.metric is not None:
            # copies, since its reset empties the lists
            states = {name: copy(value) for name, value in self.metric.metric_state.items()}
            self.states = states if self.metric.update_called else {}
        self.assign(epoch)
        if before is not None and epoch.kind == "mean" and self.metric is None:
            self.total = Reduced("mean", before.total + epoch.total, before.weight + epoch.weight)
        elif before is not None and self.size is not None:  # a client without a value in this epoch keeps its last one
            pairs = ((epoch.total, before.total), (epoch.weight, before.weight))
            seen = np.asarray(epoch.weight) != 0
            self.total = Reduced(epoch.kind, *(np.where(seen, new, old) for new, old in pairs))  # type: ignore[arg-type]

    def partial_value(self) -> Reduced:
        """The reduction over the present epoch so far."""
        self.read()
        if self.metric is None:
            return Reduced(self.spec.kind, self._sum, self._weight)
        # one that the module has reset by itself has nothing but its latest batch
        whole = self.metric.update_called or self.last is None
        value = computed(self.spec.name, self.metric) if whole else float(self.last)
        return Reduced("mean", self._weight * value, self._weight)

    def assign(self, value: Reduced) -> None:
        """Set the reduced value, and begin another epoch."""
        self.epoch = self.total = value
        self.count, self._sum, self._weight = 0, EMPTY[self.spec.kind], 0.0

    def of_row(self, row: int) -> LoggedValue | None:
        """The values of one of several clients, after the last epoch; None if it has none."""
        if self.total is None or not self._read_before[row]:
            return None
        one = LoggedValue(self.spec)
        one.assign(row_of(self.total, row))
        one.last, one.last_weight = float(self.last[row]), float(self.last_weight[row])
        one.first_bad = int(np.broadcast_to(self.first_bad, self._read_before.shape)[row])
        return one

    def shown_step(self) -> dict[str, Any]:
        """The latest value by Lightning's names, where steps are logged."""
        known = self.spec.on_step and self.last is not None
        return {self.spec.plain: self.last, self.spec.step_name: self.last} if known else {}

    def shown_epoch(self, value: Reduced | None) -> dict[str, Any]:
        """The value of an epoch by Lightning's names, where epochs are logged."""
        known = self.spec.on_epoch and value is not None
        return {self.spec.plain: value, self.spec.epoch_name: value} if known else {}

    def last_step(self) -> Reduced | None:
        """The latest value, with its weight for a mean over clients."""
        if self.last is None:
            return None
        value, weight = float(self.last) if self.size is None else self.last, self.last_weight
        return Reduced(self.spec.kind, value * weight if self.spec.kind == "mean" else value, weight)


def row_of(value: Reduced, row: int) -> Reduced:
    """The reduction of one of several clients."""
    total, weight = (np.asarray(part)[row].item() for part in (value.total, value.weight))
    return Reduced(value.kind, total, weight)


def one_after_another(parts: Sequence[Any], lengths: Sequence[int]) -> np.ndarray:
    """Tensors ``(m,)`` in one array of float64, with one transfer; a number stands for the length at its place."""
    device = next((part.device for part in parts if isinstance(part, Tensor)), None)
    if device is None:
        return np.repeat(np.array(parts, dtype=np.float64), lengths)
    tensors = [
        part.to(device) if isinstance(part, Tensor) else torch.full((length,), part, dtype=torch.float64, device=device)
        for part, length in zip(parts, lengths, strict=True)
    ]
    same = len({tensor.dtype for tensor in tensors}) == 1
    return torch.cat(tensors if same else [tensor.double() for tensor in tensors]).double().cpu().numpy()


def numbers(values: list[Any]) -> list[float]:
    """Numbers and scalar tensors as numbers, with one transfer from the device where all are tensors."""
    try:
        return torch.stack(values).tolist()
    except (TypeError, RuntimeError):
        # some are not tensors, or are on another device
        return [float(value) for value in values]


def computed(name: str, metric: Metric) -> float:
    """The value of a torchmetrics object; nan where torchmetrics reports that it is undefined.

    Raises:
        UsageError: it is not one number.
    """
    told: list[tuple[Any, ...]] = []
    source: Any = prints
    before = source.warnings, source.rank_zero_only.rank
    source.warnings = SimpleNamespace(warn=lambda *args, **kwargs: told.append(args))
    # a stored value would come without its warning, and only the first worker warns
    metric._computed, source.rank_zero_only.rank = None, 0
    try:
        value = metric.compute()
    finally:
        source.warnings, source.rank_zero_only.rank = before
    undefined = any(part in str(text) for text, *_ in told for part in UNDEFINED)
    for args in () if undefined else told:
        prints.rank_zero_warn(*args)
    single = isinstance(value, Tensor) and value.numel() == 1
    what = f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    hint = f"its compute() gives {what}, and one number is logged under a name: log its elements in the epoch-end hook"
    require(single, f"self.log({name!r}, ...)", type(metric).__name__, hint)
    return math.nan if undefined else float(value)
