"""What a suite says under its key ``tune``: which arguments of which methods to search, and on what runs."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from fl_lightning.bench.fragments import (
    Fragment,
    config_digest,
    in_classes,
    look_up,
    merged_config,
    nested_config,
    of_result,
)
from fl_lightning.bench.suite import Cell, Labels, Suite
from fl_lightning.bench.suite_file import check_keys, read_seeds, strings
from fl_lightning.errors import UsageError, require

AXIS = "method"
TRIALS = 20
# the values of a key: a list of all of them, or where a range begins and ends
Space = list[Any] | dict[str, Any]


@dataclass(frozen=True)
class Tuning:
    """What to tune, and on what runs.

    Args:
        search: by label of the axis ``method``, the values of each key. A name without a dot is an argument of the
            label's last method; others are keys of the config, such as ``model.init_args.optimizer.init_args.lr`` or
            ``method.0.init_args.mu``. A list holds all values; ``{low: ..., high: ..., log: true}`` is a range, of
            integers if both ends are.
        at: the label on every other axis; may leave out axes with one label.
        seeds: seeds of a trial, over which the metric is averaged; not those of the tables.
        metric: tag of the metric, of the validation split.
        minimize: whether smaller values of it are better.
        val_fraction: share of the training examples that is held out, for ``data.init_args.val_fraction``; None where
            the data module has a validation set of its own.
        trials: number of trials of a method; by default 20, or all points of a grid.
        pruner: ``median`` ends a trial whose metric is worse than the median of the former ones in the same round;
            ``none`` ends none.
    """

    search: Mapping[str, Mapping[str, Space]]
    at: Labels = field(default_factory=dict)
    seeds: tuple[int, ...] = (100,)
    metric: str = "val/accuracy"
    minimize: bool = False
    val_fraction: float | None = 0.1
    trials: int | None = None
    pruner: str = "median"


def tuning_of(suite: Suite) -> Tuning:
    """What a suite says of tuning.

    Raises:
        UsageError: it says nothing, or what cannot be done.
    """
    raw, where = suite.tune, f"{suite.path}: tune"
    hint = "the suite has no such key; give it one with search: {METHOD: {ARGUMENT: [values]}}"
    require(bool(raw), where, None, hint)
    check_keys(raw, [field.name for field in fields(Tuning)], where)
    share, trials, metric = raw.get("val_fraction"), raw.get("trials"), raw.get("metric", "")
    validation = "name one of the validation split, such as val/accuracy; the test images are not for tuning"
    a_share = share is None or (isinstance(share, float) and 0 < share < 1)
    for key, good, hint in (
        ("at", isinstance(raw.get("at") or {}, Mapping), "give {AXIS: LABEL}"),
        ("metric", isinstance(metric, str) and not metric.startswith("test/"), validation),
        ("minimize", isinstance(raw.get("minimize", False), bool), "give true or false"),
        ("val_fraction", a_share, "give a share in (0, 1), or null"),
        ("trials", trials is None or (isinstance(trials, int) and trials > 0), "give a number above 0"),
        ("pruner", raw.get("pruner", "none") in ("median", "none"), "choose median or none"),
    ):
        require(good, f"{where}.{key}", raw.get(key), hint)
    return Tuning(
        **{
            **raw,
            "search": read_spaces(suite, raw.get("search"), f"{where}.search"),
            "at": read_setting(suite, strings(raw.get("at") or {}), f"{where}.at"),
            "seeds": read_seeds(raw.get("seeds", [100]), f"{where}.seeds"),
        }
    )


def read_spaces(suite: Suite, raw: Any, where: str) -> dict[str, dict[str, Space]]:
    """The values of each key of each method, of the form that :class:`Tuning` says."""
    require(isinstance(raw, Mapping) and bool(raw), where, raw, "give {METHOD: {ARGUMENT: [values]}}")
    known = suite.axes.get(AXIS, {})
    for label, keys in raw.items():
        hint = f"is no label of the axis {AXIS}; they are {', '.join(known) or 'none'}"
        require(str(label) in known, where, label, hint)
        require(isinstance(keys, Mapping) and bool(keys), f"{where}.{label}", keys, "give {ARGUMENT: [values]}")
        for key, space in keys.items():
            if isinstance(space, Mapping):
                ends = [space.get(name) for name in ("low", "high")]
                low, high = (end if isinstance(end, (int, float)) else 0 for end in ends)
                good = {*space} <= {"low", "high", "log"} and low < high and (low > 0 or not space.get("log"))
            else:
                good = isinstance(space, list) and len(space) > 0
                good = good and all(isinstance(value, bool | int | float | str | None) for value in space)
            hint = "give a list of values, or {low: ..., high: ..., log: true} with 0 < low < high"
            require(good, f"{where}.{label}.{key}", space, hint)
    return {str(label): {str(key): space for key, space in keys.items()} for label, keys in raw.items()}


def read_setting(suite: Suite, chosen: Labels, where: str) -> Labels:
    """The label on each axis beside that of the methods."""
    setting = {}
    for axis, labels in suite.axes.items():
        if axis != AXIS:
            label = chosen.get(axis, next(iter(labels)) if len(labels) == 1 else None)
            require(label in labels, f"{where}.{axis}", label, f"choose the setting to tune in: {', '.join(labels)}")
            setting[axis] = str(label)
    for axis in chosen:
        require(axis in setting, where, axis, f"is no axis to choose on; those are {', '.join(setting) or 'none'}")
    return setting


class Search:
    """The search of one method.

    Args:
        suite: the suite.
        tuning: what it says of tuning.
        label: the method's label.
        scale: share of the work to do.
        extra: fragments that come after those of the suite.
        trials: number of trials, in place of the suite's.

    Raises:
        UsageError: the label has no method whose argument a key could be.

    Attributes:
        study: name of its study.
        spaces: the values of each key.
        base: the config of the method before it is tuned.
        rounds: rounds of a run.
        digest: identifies the search.
        slots: parameters of each trial, by a digest; empty ones are for a sampler to choose.
    """

    def __init__(
        self,
        suite: Suite,
        tuning: Tuning,
        label: str,
        scale: float = 1.0,
        extra: Sequence[Fragment] = (),
        trials: int | None = None,
    ) -> None:
        self.suite, self.tuning, self.label, self.scale = suite, tuning, label, scale
        held_out = {"data": {"init_args": {"val_fraction": tuning.val_fraction}}}
        self.extra = [*extra, held_out] if tuning.val_fraction is not None else list(extra)
        self.study = f"{suite.name}/tune/{label}"
        self.spaces = tuning.search[label]
        self.base = self._cell(tuning.seeds[0]).config
        self.fragment(dict.fromkeys(self.spaces))  # refuses a key of a method that is not there
        self.rounds = int(look_up(self.base, "trainer.max_rounds", 10))
        self.digest = config_digest({"config": of_result(self.base), "spaces": self.spaces, "seeds": tuning.seeds})
        trials = trials or tuning.trials
        self.slots: dict[str, dict[str, Any]] = {f"trial {number}": {} for number in range(trials or TRIALS)}
        if all(isinstance(space, list) for space in self.spaces.values()):
            grid = [dict(zip(self.spaces, point, strict=True)) for point in itertools.product(*self.spaces.values())]
            self.slots = {config_digest({"point": point}): point for point in grid[:trials]}

    def cells(self, values: Mapping[str, Any]) -> list[Cell]:
        """The runs of a trial, one for each seed."""
        return [self._cell(seed, self.fragment(values)) for seed in self.tuning.seeds]

    def fragment(self, values: Mapping[str, Any]) -> Fragment:
        """The config that gives keys their values, with all methods of the label.

        Raises:
            UsageError: the label has no method whose argument a key could be.
        """
        methods, rest = copy.deepcopy(self.base.get("method") or []), []
        for key, value in values.items():
            first, _, inner = key.partition(".")
            if first != "method" and inner:
                rest.append(nested_config(key, value))
                continue
            place, _, argument = (inner or f"{len(methods) - 1}.init_args.{key}").partition(".")
            if not (place.isdigit() and int(place) < len(methods) and argument.startswith("init_args.")):
                hint = f"give an argument of its methods 0 to {len(methods) - 1}, such as method.0.init_args.mu"
                if not methods:
                    hint = f"{self.label} is a list of no methods; give a whole key, as of model or trainer"
                raise UsageError(f"{self.suite.path}: tune.search.{self.label}.{key}: {hint}")
            method = methods[int(place)]
            entry = {"class_path": method} if isinstance(method, str) else dict(method)
            entry["init_args"] = entry.get("init_args") or {}
            methods[int(place)] = merged_config([entry, nested_config(argument, value)])
        classes = look_up(self.base, "model.init_args.num_classes")
        return in_classes(merged_config([*rest, *([{"method": methods}] if methods else [])]), classes)

    def _cell(self, seed: int, tuned: Fragment | None = None) -> Cell:
        labels = {axis: self.tuning.at.get(axis, self.label) for axis in self.suite.axes}
        return self.suite.cell(labels, seed, self.scale, [*self.extra, *([tuned] if tuned else [])])
