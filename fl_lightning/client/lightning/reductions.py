"""How logged values are reduced: by the arguments of ``self.log``, and from tensors and torchmetrics objects."""

from __future__ import annotations

import math
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

from fl_lightning.client.lightning.private import LogValidator
from fl_lightning.core.reduced import KINDS, Kind
from fl_lightning.utilities.errors import UsageError, require

# hook, name and index of the data loader
LogKey = tuple[str, str, int | None]
LOG = signature(LightningModule.log)
# in the warnings of torchmetrics about a value that is 0 or 1 by convention, such as the AUROC of a single class
UNDEFINED = ("meaningless", "is undefined")
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
    arguments = bound.arguments
    try:
        levels = LogValidator.check_logging_and_get_default_levels(hook, arguments["on_step"], arguments["on_epoch"])
    except (MisconfigurationException, RuntimeError) as error:
        raise UsageError(f"self.log({name!r}, ...): {error}") from error
    require(any(levels), "on_step", False, f"self.log({name!r}, on_step=False, on_epoch=False) logs nothing")
    numbered, reduce_fx = arguments["add_dataloader_idx"], arguments["reduce_fx"]
    suffixed = numbered and "/dataloader_idx_" in name
    require(not suffixed, "add_dataloader_idx", True, f"the name {name!r} has the index already")
    try:
        kind = REDUCTIONS[reduce_fx.lower() if isinstance(reduce_fx, str) else reduce_fx]
    except (KeyError, TypeError):
        hint = f"self.log({name!r}, ...) takes mean, sum, max or min; for another reduction, log a torchmetrics object"
        raise UsageError(f"reduce_fx={reduce_fx!r}: {hint}") from None
    suffix = f"/dataloader_idx_{loader}" if numbered and loader is not None else ""
    logger = arguments["logger"] is None or bool(arguments["logger"])
    return LogSpec(name, suffix, kind, bool(levels[0]), bool(levels[1]), logger), arguments


def computed(name: str, metric: Metric) -> float:
    """The value of a torchmetrics object; nan where torchmetrics reports that it is undefined.

    Raises:
        UsageError: it is not one number.
    """
    warned: list[tuple[Any, ...]] = []
    source: Any = prints
    before = source.warnings, source.rank_zero_only.rank
    source.warnings = SimpleNamespace(warn=lambda *args, **kwargs: warned.append(args))
    # a stored value would come without its warning, and only the first worker warns
    metric._computed, source.rank_zero_only.rank = None, 0
    try:
        value = metric.compute()
    finally:
        source.warnings, source.rank_zero_only.rank = before
    undefined = any(part in str(text) for text, *_ in warned for part in UNDEFINED)
    for args in () if undefined else warned:
        prints.rank_zero_warn(*args)
    single = isinstance(value, Tensor) and value.numel() == 1
    kind = f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    hint = f"its compute() gives {kind}, and one number is logged under a name: log its elements in the epoch-end hook"
    require(single, f"self.log({name!r}, ...)", type(metric).__name__, hint)
    return math.nan if undefined else float(value)
