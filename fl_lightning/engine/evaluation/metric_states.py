"""States of torchmetrics objects, merged over the workers of an evaluation and over the visits of a round.

The private names of torchmetrics in this file are the same in versions 1.4.1 and 1.9.0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache, partial, reduce
from operator import itemgetter
from types import CodeType
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum

from fl_lightning.client.lightning.reductions import computed
from fl_lightning.core.collectives import Collectives
from fl_lightning.core.weighted import Sums, Weighted
from fl_lightning.training.patching import patched
from fl_lightning.utilities.errors import require

# index of the data loader, and of the batch in it
Place = tuple[int, int]
# name of the torchmetrics object in the module, and of one of its states
StateName = tuple[str, str]
EXTREMES: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {dim_zero_max: torch.maximum, dim_zero_min: torch.minimum}


def metrics_of(module: nn.Module) -> dict[str, Metric]:
    """Return the torchmetrics objects in a module, by name."""
    return {name: part for name, part in module.named_modules() if isinstance(part, Metric)}


def can_merge(metric: Metric) -> bool:
    """Return whether states can be merged: sums that start at zero, maxima, minima and lists of batches."""
    within = any(isinstance(part, Metric) for part in metric.modules() if part is not metric)
    usual = type(metric).reset is Metric.reset and not metric.dist_sync_on_step
    for state, reduction in metric._reductions.items():
        default: Any = metric._defaults[state]
        if reduction is not dim_zero_cat and (not isinstance(default, Tensor) or default.is_complex()):
            return False
        if reduction not in (dim_zero_cat, *EXTREMES) and (reduction is not dim_zero_sum or default.any()):
            return False
    return usual and not within


@cache
def names_in_evaluation(kind: Any) -> frozenset[str]:
    """Return the names used in the functions of a class, except its training hooks."""
    kinds = [base for base in kind.__mro__ if base.__module__.split(".")[0] not in FRAMEWORKS]
    parts = [(name, part) for base in kinds for name, part in vars(base).items()]
    of_training = ("training_step", "on_train_")
    codes = [part.__code__ for name, part in parts if hasattr(part, "__code__") and not name.startswith(of_training)]
    for code in codes:  # grows by nested functions
        codes += [part for part in code.co_consts if isinstance(part, CodeType)]
    return frozenset(name for code in codes for name in code.co_names)


# packages of the base classes of modules
FRAMEWORKS = ("lightning", "pytorch_lightning", "torch", "torchmetrics", "builtins", "typing")


class Note(NamedTuple):
    """States that workers exchange in addition to sums: types of sums, lists of batches, extremes per loader."""

    types: dict[StateName, torch.dtype]
    parts: dict[StateName, dict[Place, list[Tensor]]]


class MetricStates:
    """Collects the states of a module's torchmetrics objects batch by batch, and loads the merged states.

    The objects are reset after each batch, so that the sums do not depend on the assignment of batches to workers.
    Values may only be computed while ``reads`` is true.
    """

    def __init__(self, module: LightningModule) -> None:
        self.module, self.metrics = module, metrics_of(module)
        self.note = Note({}, {})
        self.reads = False

    @contextmanager
    def dealt_out(self) -> Iterator[None]:
        """Within this context, the objects hold one batch at a time, and only this class computes totals."""
        with ExitStack() as stack:
            for part in self.module.modules():
                if isinstance(part, MetricCollection) and part._enable_compute_groups is True:
                    # compute groups depend on the first batch, which differs between workers
                    groups = {index: [str(name)] for index, name in enumerate(part.keys(keep_base=True))}
                    flags = dict.fromkeys(("_enable_compute_groups", "_groups_checked", "_state_is_copy"), False)
                    stack.enter_context(patched(part, _groups=groups, **flags))
            for name, metric in self.metrics.items():
                # compute() of the module between batches would return the value of one batch
                stack.enter_context(patched(metric, compute=partial(self._compute, name, metric, metric.compute)))
            self.reset()
            yield

    def take(self, place: Place) -> dict[str, Any]:
        """Extract the states of a batch, and reset the objects; return the sums by data loader, object and state."""
        updated = {name: metric for name, metric in self.metrics.items() if metric.update_called}
        if not updated:
            return {}
        sums = {}
        for name, metric in updated.items():
            sums[name] = self.take_states(name, metric.metric_state, place)
        # after all were read, since objects of one group share their states
        self.reset()
        return {str(place[0]): sums}

    def load(self, loader: int, sums: Mapping[str, Any], notes: list[Note]) -> None:
        """Load the states after all batches up to the end of a data loader, as in Lightning.

        ``sums`` are the results of :meth:`take`, summed over the batches of all workers.
        """
        self.reset()
        values: dict[StateName, Any] = {}
        for index in range(loader + 1):
            for name, states in sums.get(str(index), {}).items():
                for state, total in states.items():
                    values[name, state] = total.total + values.get((name, state), 0.0)
        types = {where: dtype for note in notes for where, dtype in note.types.items()}
        values = {where: value.to(types[where]) for where, value in values.items()}
        for name, state in dict.fromkeys(where for note in notes for where in note.parts):
            tensors = [pair for note in notes for pair in note.parts.get((name, state), {}).items()]
            parts, metric = [], self.metrics[name]
            for place, tensors_of_place in sorted(tensors, key=itemgetter(0)):
                if place[0] <= loader:
                    parts += tensors_of_place
            extreme = EXTREMES.get(metric._reductions[state])
            if parts and extreme:
                values[name, state] = reduce(extreme, parts)
            elif parts:
                if not metric.compute_on_cpu:
                    parts = [part.to(metric.device) for part in parts]
                values[name, state] = torch.cat(parts) if isinstance(metric._defaults[state], Tensor) else parts
        for (name, state), value in values.items():
            metric = self.metrics[name]
            metric._update_count = 1
            setattr(metric, state, value if isinstance(value, list) else value.to(metric.device))

    def take_states(self, name: str, values: Mapping[str, Any], place: Place) -> dict[str, Weighted]:
        """Extract the states of one object; return the sums by state."""
        sums = {}
        for state, reduction in self.metrics[name]._reductions.items():
            value, where = values[state], (name, state)
            if reduction is dim_zero_sum:
                self.note.types[where] = value.dtype
                sums[state] = Weighted.summed(value.detach().cpu(), 1.0)
            elif reduction is dim_zero_cat:
                parts = value if isinstance(value, list) else [value]
                tensors = [part.detach().cpu() for part in parts]
                self.note.parts.setdefault(where, {})[place] = tensors
            else:
                so_far, extreme, key = self.note.parts.setdefault(where, {}), value.detach().cpu(), (place[0], 0)
                so_far[key] = [EXTREMES[reduction](so_far[key][0], extreme) if key in so_far else extreme]
        return sums

    def reset(self) -> None:
        """Reset all objects."""
        for metric in self.metrics.values():
            metric.reset()

    def _compute(self, name: str, metric: Metric, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # forward may compute the value of a batch
        hint = "it is called between batches that several workers share; call it in on_validation_epoch_end"
        require(self.reads or not metric._should_unsync, f"{name}.compute", type(metric).__name__, hint)
        return compute(*args, **kwargs)


class VisitMetrics:
    """Merges the torchmetrics objects logged in visits, over the visits of all workers."""

    def __init__(self, module: LightningModule) -> None:
        self._states, self._sums = MetricStates(module), Sums()
        # path of each name's object; empty if the states of some visit cannot be merged
        self._paths: dict[str, str] = {}

    def add(self, k: int, metric_states: Mapping[str, tuple[str, Mapping[str, Any]]]) -> None:
        """Add the states of the objects logged in the visit of client ``k``, each with its place, by name."""
        sums = {}
        for name, (path, states) in metric_states.items():
            fits = bool(states) and path in self._states.metrics and can_merge(self._states.metrics[path])
            self._paths[name] = self._paths.get(name, path) if fits else ""
            if fits:
                sums[path] = self._states.take_states(path, states, (0, k))
        self._sums.add(sums)

    def merged(self, workers: Collectives) -> dict[str, float]:
        """Return the value of each name whose states can be merged; all workers call this."""
        if not self._states.metrics:
            return {}
        gathered = self._sums.all_reduce(workers, (self._paths, self._states.note))
        pairs = [pair for paths_of_worker, _ in gathered for pair in paths_of_worker.items()]
        unmergeable_names = {name for name, path in pairs if not path}
        paths = {name: path for name, path in pairs if name not in unmergeable_names}
        self._states.load(0, {"0": self._sums.totals}, [note for _, note in gathered])
        values = {name: computed(name, self._states.metrics[path]) for name, path in paths.items()}
        self._states.reset()
        return values
