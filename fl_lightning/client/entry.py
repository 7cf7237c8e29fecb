"""One name that a module logs: the arguments it came with, and its reduction over an epoch and a visit."""

from __future__ import annotations

import math
from copy import copy
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from lightning.pytorch.trainer.connectors.logger_connector.fx_validator import _FxValidator
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import prints

from fl_lightning.errors import UsageError, require
from fl_lightning.sums.reduced import EMPTY, Kind, Reduced, join

# in the warnings of torchmetrics about a value that is 0 or 1 by convention, such as the AUROC of a single class
UNDEFINED = ("meaningless", "is undefined")
# values of a name after which they are read
MOST_PENDING = 4096
# what may be given as ``reduce_fx``
REDUCTIONS: dict[Any, Kind] = {
    **{"mean": "mean", "avg": "mean", torch.mean: "mean"},
    **{"sum": "sum", torch.sum: "sum", sum: "sum"},
    **{"max": "max", torch.max: "max", max: "max"},
    **{"min": "min", torch.min: "min", min: "min"},
}


class Arguments(NamedTuple):
    """The arguments of ``self.log`` that must be the same whenever a hook logs a name."""

    prog_bar: bool = False
    logger: bool | None = None
    on_step: bool | None = None
    on_epoch: bool | None = None
    reduce_fx: Any = "mean"
    enable_graph: bool = False
    sync_dist: bool = False
    sync_dist_group: Any = None
    add_dataloader_idx: bool = True
    metric_attribute: str | None = None
    rank_zero_only: bool = False

    def resolved(self, hook: str, name: str) -> Arguments:
        """The same with Lightning's defaults for ``hook``, and with the reduction by its name.

        Raises:
            UsageError: Lightning does not allow them.
        """
        try:
            levels = _FxValidator.check_logging_and_get_default_levels(hook, self.on_step, self.on_epoch)
        except (MisconfigurationException, RuntimeError) as error:
            raise UsageError(f"self.log({name!r}, ...): {error}") from error
        require(any(levels), "on_step", False, f"self.log({name!r}, on_step=False, on_epoch=False) logs nothing")
        suffixed = self.add_dataloader_idx and "/dataloader_idx_" in name
        require(not suffixed, "add_dataloader_idx", True, f"the name {name!r} has the index already")
        logger = self.logger is None or self.logger
        return self._replace(logger=logger, on_step=levels[0], on_epoch=levels[1], reduce_fx=self._kind(name))

    def _kind(self, name: str) -> Kind:
        key = self.reduce_fx.lower() if isinstance(self.reduce_fx, str) else self.reduce_fx
        try:
            return REDUCTIONS[key]
        except (KeyError, TypeError):
            hint = (
                f"self.log({name!r}, ...) takes mean, sum, max or min; for another reduction, log a torchmetrics object"
            )
            raise UsageError(f"reduce_fx={self.reduce_fx!r}: {hint}") from None


class Form(NamedTuple):
    """How a logged name is reduced and written; small, so that workers can exchange it.

    Args:
        name: the name that the module gave.
        suffix: that of the data loader, or nothing.
        kind: the reduction.
        on_step: whether steps are logged.
        on_epoch: whether epochs are logged.
        logger: whether it goes into the record.
        metric: name of the torchmetrics object in the module, if it is one.
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


class Entry:
    """The values of one name, reduced over the present epoch, and over the epochs of a visit.

    Over epochs, a mean goes on; of everything else the last epoch's value is kept.

    Args:
        form: how it is reduced and written.
        arguments: what it was logged with, as the module gave it.
        resolved: the same with their defaults.
        metric: the torchmetrics object, if it is one.

    Attributes:
        count: values in the present epoch.
        last: the latest value.
        last_weight: its weight.
        epoch: the last epoch that ended, reduced.
        total: the epochs that ended, reduced.
        states: of a torchmetrics object, its states at the end of that epoch; none where the module has reset it.
        first_bad: which value was the first to make the total nan or infinite.
    """

    def __init__(
        self, form: Form, arguments: tuple = (), resolved: tuple = (), metric: Metric | None = None, once: bool = False
    ) -> None:
        self.form, self.arguments, self.resolved, self.metric, self.once = form, arguments, resolved, metric, once
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
        self._sum, self._weight = EMPTY[form.kind], 0.0

    def add(self, value: Any, weight: float) -> None:
        """Add a number, or a tensor of one."""
        # a step only appends to a list; reading the values would wait for the device
        self._pending.append(value)
        self._weights.append(weight)
        self.last, self.last_weight = value, weight
        self.count += 1
        if len(self._pending) >= MOST_PENDING:
            self.read()

    def add_metric(self, metric: Metric, weight: float) -> None:
        """Note that a torchmetrics object was logged."""
        self.metric, self.last, self.last_weight = metric, metric._forward_cache, weight
        self._weight += weight
        self.count += 1

    def read(self) -> None:
        """Reduce the values that wait."""
        if not self._pending:
            return
        kind, total = self.form.kind, self._sum
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
        self.epoch, before = self.so_far(), self.total
        if before is None or self.form.kind != "mean" or self.metric is not None:
            self.total = self.epoch
            if self.metric is not None:
                # copies, since its reset empties the lists
                states = {name: copy(value) for name, value in self.metric.metric_state.items()}
                self.states = states if self.metric.update_called else {}
        else:
            self.total = Reduced("mean", before.total + self.epoch.total, before.weight + self.epoch.weight)
        self.count, self._sum, self._weight = 0, EMPTY[self.form.kind], 0.0

    def so_far(self) -> Reduced:
        """What was logged in the present epoch, reduced."""
        self.read()
        if self.metric is None:
            return Reduced(self.form.kind, self._sum, self._weight)
        # one that the module has reset by itself has nothing but its latest batch
        whole = self.metric.update_called or self.last is None
        value = computed(self.form.name, self.metric) if whole else float(self.last)
        return Reduced("mean", self._weight * value, self._weight)

    def assign(self, value: Reduced) -> None:
        """Take a value that was reduced over all workers."""
        self.epoch = self.total = value
        self.count, self._sum, self._weight = 0, EMPTY[self.form.kind], 0.0

    def take(self) -> Reduced | None:
        """What was logged since the last call, reduced; it is then forgotten."""
        self.end_epoch()
        taken, self.total = self.total, None
        return taken

    def last_step(self) -> Reduced | None:
        """The latest value, with its weight for a mean over clients."""
        if self.last is None:
            return None
        value, weight = float(self.last), self.last_weight
        return Reduced(self.form.kind, value * weight if self.form.kind == "mean" else value, weight)


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
