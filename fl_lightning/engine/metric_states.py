"""The states of torchmetrics objects in an evaluation whose batches are dealt out over the workers.

The private names of torchmetrics in this file were checked against version 1.9.0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum

from fl_lightning.errors import require
from fl_lightning.sums import Weighted

# index of the data loader, and of the batch in it
Place = tuple[int, int]
# name of the torchmetrics object in the module, and of one of its states
State = tuple[str, str]
EXTREMES: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {dim_zero_max: torch.maximum, dim_zero_min: torch.minimum}


def metrics_of(module: nn.Module) -> dict[str, Metric]:
    """The torchmetrics objects in a module, by name."""
    return {name: part for name, part in module.named_modules() if isinstance(part, Metric)}


def can_merge(metric: Metric) -> bool:
    """Whether the states of several workers can be merged to exactly that of one process.

    Not those of an object with other objects within (a wrapper), with a ``reset`` or ``merge_state`` of its own, or
    with a state whose reduction is neither a sum from zero, a maximum, a minimum nor a list of batches.
    """
    within = any(isinstance(part, Metric) for part in metric.modules() if part is not metric)
    usual = type(metric).reset is Metric.reset and getattr(type(metric), "merge_state", None) is _MERGE
    return not within and usual and all(_reducible(metric, name) for name in metric._defaults)


# added to torchmetrics in version 1.4
_MERGE = getattr(Metric, "merge_state", None)


def _reducible(metric: Metric, state: str) -> bool:
    default, reduction = metric._defaults[state], metric._reductions[state]
    if reduction is dim_zero_cat:
        return True
    if not isinstance(default, Tensor) or default.is_complex():
        return False
    return reduction in EXTREMES or (reduction is dim_zero_sum and not default.any())


def reads_running_values(module: LightningModule) -> bool:
    """Whether the module's own code outside of training names ``compute``: it may want the value up to a batch."""
    own = type(module).__mro__[: type(module).__mro__.index(_lightning_base(module))]
    parts = [(name, part) for kind in own for name, part in vars(kind).items()]
    codes = [part.__code__ for name, part in parts if hasattr(part, "__code__") and not _of_training(name)]
    return any("compute" in code.co_names for code in _nested(codes))


def _lightning_base(module: LightningModule) -> type:
    return next(kind for kind in type(module).__mro__ if kind.__module__.split(".")[0].startswith(("lightning", "pytorch")))


def _of_training(name: str) -> bool:
    return name.startswith(("training_step", "on_train_"))


def _nested(codes: list[CodeType]) -> Iterator[CodeType]:
    for code in codes:
        yield code
        yield from _nested([part for part in code.co_consts if isinstance(part, CodeType)])


class Note(NamedTuple):
    """What workers tell each other beside sums.

    Args:
        types: dtype of each sum.
        extremes: maxima and minima, by data loader and state.
        batches: lists of tensors, by state and place.
    """

    types: dict[State, torch.dtype]
    extremes: dict[tuple[int, State], Tensor]
    batches: dict[State, dict[Place, list[Tensor]]]


class MetricStates:
    """The states of the torchmetrics objects of a module, batch by batch, and the values of all workers' batches.

    After each batch its states are taken out of the objects, so that every batch begins from their defaults: what is
    added up does then not depend on which worker had which batches.

    Args:
        module: the user's module.
    """

    def __init__(self, module: LightningModule) -> None:
        self.metrics = metrics_of(module)
        self.note = Note({}, {}, {})
        self._updates: set[str] = set()

    @contextmanager
    def dealt_out(self, module: LightningModule) -> Iterator[None]:
        """Let every object be updated by itself and be read by :meth:`values` only, in one evaluation."""
        with ungrouped(module), self._unread():
            self._reset()
            yield
            self._reset()

    def take(self, place: Place) -> dict[str, dict[str, dict[str, Weighted]]]:
        """Take the states of a batch out of the objects: returns the sums, by data loader, object and state."""
        updated = [name for name, metric in self.metrics.items() if metric.update_called]
        sums = {name: self._take_one(name, place) for name in updated}
        self._reset()
        return {str(place[0]): {name: states for name, states in sums.items() if states}}

    def values(self, sums: Mapping[str, Any], notes: list[Note], asked: Mapping[Any, tuple[int, str]]) -> dict[Any, Any]:
        """Load the merged states into the objects, and compute.

        Args:
            sums: what :meth:`take` gave, added up over the batches of all workers.
            notes: of all workers.
            asked: the data loader and the object, by any key. As with Lightning, the value after a data loader is that
                of all batches up to its end.

        Returns:
            The object for each key, with its merged states; to be used before the next is asked for.
        """
        raise NotImplementedError

    def _reset(self) -> None:
        for metric in self.metrics.values():
            metric.reset()
