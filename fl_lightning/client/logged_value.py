"""One name that a module logs, reduced over an epoch and over a visit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import copy
from functools import lru_cache
from inspect import signature
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.connectors.logger_connector.fx_validator import _FxValidator
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import prints

from fl_lightning.errors import UsageError, require
from fl_lightning.sums.reduced import EMPTY, KINDS, Kind, Reduced, join

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


def log_spec(hook: str, name: str, args: tuple, kwargs: Mapping[str, Any], loader: int | None) -> tuple[LogSpec, Any]:
    """Resolve the arguments after the value of a ``self.log`` call, by Lightning's rules.

    Returns:
        The specification without its metric, and all arguments by name.

    Raises:
        UsageError: Lightning does not allow the arguments, or the reduction is not a mean, sum, maximum or minimum.
    """
    key = (hook, name, args, tuple(kwargs.items()), loader)
    try:
        return _log_spec(*key)
    except TypeError:  # an argument cannot be hashed, or is unknown
        return _log_spec.__wrapped__(*key)


@lru_cache(1000)
def _log_spec(hook: str, name: str, args: tuple, items: tuple, loader: int | None) -> tuple[LogSpec, dict[str, Any]]:
    bound = LOG.bind(None, name, None, *args, **dict(items))
    bound.apply_defaults()
    given = bound.arguments
    try:
        levels = _FxValidator.check_logging_and_get_default_levels(hook, given["on_step"], given["on_epoch"])
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


class LoggedValue:
    """The values of one name, reduced over the present epoch, and over the epochs of a visit.

    A mean is continued over epochs; any other value is the last epoch's.

    Args:
        spec: how it is reduced and written.
        once: whether its hook runs once an epoch.

    Attributes:
        given: the arguments of the latest ``self.log`` call, and ``batch_size``: the size among them.
        metric: the torchmetrics object, if one is logged.
        count: number of values in the present epoch.
        last: the latest value.
        last_weight: its weight.
        epoch: the last complete epoch, reduced.
        total: the complete epochs, reduced.
        states: the states of the torchmetrics object at the end of that epoch; empty where the module has reset it.
        first_bad: index of the first value that made the total nan or infinite.
    """

    is_group = False

    def __init__(self, spec: LogSpec, once: bool = False) -> None:
        self.spec, self.once = spec, once
        self.given: Any = None
        self.batch_size: Any = None
        self.metric: Metric | None = None
        self.count = 0
        self.last: Any = None
        self.last_weight = 0.0
        self.epoch: Reduced | None = None
        self.total: Reduced | None = None
        self.states: dict[str, Any] = {}
        self.first_bad: int | None = None
        self._pending: list[Any] = []
        self._weights: list[float] = []
        self._read_before = 0
        self._sum, self._weight = EMPTY[spec.kind], 0.0

    def add(self, value: Any, weight: float) -> None:
        """Add a number, or a tensor of one."""
        # a step only appends to a list; reading the values would wait for the device
        self._pending.append(value)
        self._weights.append(weight)
        self.last, self.last_weight = value, weight
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
        if not self._pending:
            return
        kind, total = self.spec.kind, self._sum
        for value, weight in zip(numbers(self._pending), self._weights, strict=True):
            total = total + weight * value if kind == "mean" else join(kind, total, value)
            if self.first_bad is None and not math.isfinite(total):
                self.first_bad = self._read_before
            self._read_before += 1
        self._sum, self._weight = total, self._weight + sum(self._weights)
        self._pending, self._weights = [], []

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

    def pop(self) -> Reduced | None:
        """Return the reduction over all values since the last call, and forget them."""
        self.end_epoch()
        taken, self.total = self.total, None
        return taken

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
        value, weight = float(self.last), self.last_weight
        return Reduced(self.spec.kind, value * weight if self.spec.kind == "mean" else value, weight)


def numbers(values: list[Any]) -> list[float]:
    """Numbers and scalar tensors as numbers, with one transfer from the device where all are tensors."""
    try:
        return torch.stack(values).tolist()
    except (TypeError, RuntimeError):
        # some are no tensors, or lie on another device
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
