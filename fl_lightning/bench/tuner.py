"""Tunes the methods of a suite on a validation split, each in a separate study.

The key ``tune`` of a suite has the arguments of the methods to search, and the runs. The cells of a study are its
*slots*: the points of a grid, or trials with sampled values.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
import yaml
from optuna.exceptions import UpdateFinishedTrialError
from optuna.pruners import MedianPruner, NopPruner
from optuna.samplers import TPESampler
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, Trial, TrialState

from fl_lightning.bench.cell import Cell, Labels, file_part
from fl_lightning.bench.config_fragments import (
    Fragment,
    config_digest,
    in_classes,
    look_up,
    merged_config,
    nested_config,
    of_result,
    write_text,
)
from fl_lightning.bench.scheduler import last_value
from fl_lightning.bench.study import CellStudy, hidden
from fl_lightning.bench.suite import Suite
from fl_lightning.bench.suite_file import BOOL, COUNT, MAPPING, NOT_EMPTY, SEEDS, SHARE, Kind, one_of, read_keys
from fl_lightning.storage.metric_format import format_value
from fl_lightning.utilities.errors import UsageError, printable, require

AXIS = "method"
TRIALS = 20
# share of the rounds before which no trial is pruned
WARM_UP = 0.25
KEYS_OF_TUNE = {
    **{"search": NOT_EMPTY, "at": MAPPING, "seeds": SEEDS, "minimize": BOOL, "pruner": one_of(("median", "none"))},
    "metric": Kind(
        lambda value: isinstance(value, str) and not value.startswith(("test/", "test_")),
        "name one of the validation split, such as val/accuracy; the test images are not for tuning",
    ),
    "val_fraction": Kind(lambda value: value is None or SHARE.passes(value), "use a share in (0, 1), or null"),
    "trials": Kind(lambda value: value is None or COUNT.passes(value), COUNT.remedy),
}
# the values of a key: a list of all of them, or a range
Space = list[Any] | dict[str, Any]


@dataclass(frozen=True)
class TuningSpec:
    """The search of a suite, and its runs.

    Args:
        search: values of each key, by label of the axis ``method``. A name without a dot is an argument of the
            label's last method; others are keys of the config, such as ``model.init_args.optimizer.init_args.lr`` or
            ``method.0.init_args.mu``. A list holds all values; ``{low: ..., high: ..., log: true}`` is a range, of
            integers if both ends are.
        at: the label on every other axis.
        seeds: seeds of a trial, over which the metric is averaged; the tables have other seeds.
        metric: tag of the metric, of the validation split.
        minimize: whether smaller values of it are better.
        val_fraction: share of the training examples for validation, ``data.init_args.val_fraction``; None for a data
            module with its own validation set.
        trials: number of trials of a method; by default 20, or all points of a grid.
        pruner: ``median`` ends a trial whose metric is worse than the median of earlier trials in the same round;
            ``none`` ends no trial.
    """

    search: Mapping[str, Mapping[str, Space]]
    at: Labels = field(default_factory=dict)
    seeds: tuple[int, ...] = (100,)
    metric: str = "val/accuracy"
    minimize: bool = False
    val_fraction: float | None = 0.1
    trials: int | None = None
    pruner: str = "median"


def read_tuning_specs(suite: Suite) -> list[TuningSpec]:
    """The tuning that a suite asks for, in each setting; an axis that its key ``at`` omits has all its labels."""
    where = f"{suite.path}: tune"
    hint = "the suite has no such key; add one with search: {METHOD: {ARGUMENT: [values]}}"
    require(bool(suite.tune), where, None, hint)
    spec = read_keys(suite.tune, KEYS_OF_TUNE, f"{where}.", ["search"])
    methods, search = suite.axes.get(AXIS, {}), dict[str, dict[str, Space]]()
    for label, keys in spec["search"].items():
        hint = f"is not a label of the axis {AXIS}; they are {', '.join(methods) or 'none'}"
        require(str(label) in methods, f"{where}.search", label, hint)
        require(NOT_EMPTY.passes(keys), f"{where}.search.{label}", keys, "give {ARGUMENT: [values]}")
        for key, space in keys.items():
            hint = "use a list of values, or {low: ..., high: ..., log: true} with 0 < low < high"
            require(is_space(space), f"{where}.search.{label}.{key}", space, hint)
        search[str(label)] = {str(key): space for key, space in keys.items()}
    at = {axis: [*labels] for axis, labels in suite.axes.items() if axis != AXIS}
    for axis, label in spec.get("at", {}).items():
        require(axis in at, f"{where}.at", axis, f"is not an axis to choose on; available: {', '.join(at) or 'none'}")
        require(label in at[axis], f"{where}.at.{axis}", label, f"choose among {', '.join(at[axis])}")
        at[axis] = [label]
    settings = [dict(zip(at, labels, strict=True)) for labels in itertools.product(*at.values())]
    return [TuningSpec(**{**spec, "search": search, "at": setting}) for setting in settings]


def is_space(space: Any) -> bool:
    """Whether a value is a list of plain values, or a range."""
    if isinstance(space, Mapping):
        ends = [space.get(name) for name in ("low", "high")]
        low, high = (end if isinstance(end, (int, float)) else 0 for end in ends)
        return {*space} <= {"low", "high", "log"} and low < high and (low > 0 or not space.get("log"))
    if not isinstance(space, list) or not space:
        return False
    return all(isinstance(value, bool | int | float | str | None) for value in space)


class Search:
    """The search of one method; ``slots`` has the parameters of each trial by a digest, none where TPE chooses."""

    def __init__(
        self,
        suite: Suite,
        tuning: TuningSpec,
        label: str,
        scale: float = 1.0,
        extra: Sequence[Fragment] = (),
        trials: int | None = None,
    ) -> None:
        self.suite, self.tuning, self.label, self.scale = suite, tuning, label, scale
        self.setting = [tuning.at[axis] for axis in suite.tuned_axes]
        held_out = {"data": {"init_args": {"val_fraction": tuning.val_fraction}}}
        self.extra = [*extra, *([held_out] if tuning.val_fraction is not None else [])]
        self.study, self.spaces = "/".join([suite.name, "tune", *self.setting, label]), tuning.search[label]
        self.base = self._cell(tuning.seeds[0]).config
        self.fragment(dict.fromkeys(self.spaces))  # refuses a key of a method that is not there
        self.rounds = int(look_up(self.base, "trainer.max_rounds", 10))
        self.digest = config_digest({"config": of_result(self.base), "spaces": self.spaces, "seeds": tuning.seeds})
        trials = trials or tuning.trials
        self.slots: dict[str, dict[str, Any]] = {}
        if all(isinstance(space, list) for space in self.spaces.values()):
            for values in itertools.islice(itertools.product(*self.spaces.values()), trials):
                point = dict(zip(self.spaces, values, strict=True))
                self.slots[config_digest({"point": point})] = point
        else:
            self.slots = {f"trial {number}": {} for number in range(trials or TRIALS)}

    def cells(self, values: Mapping[str, Any]) -> list[Cell]:
        """The runs of a trial, one for each seed."""
        return [self._cell(seed, [self.fragment(values)]) for seed in self.tuning.seeds]

    def first_cell(self) -> Cell:
        """A run with the first value of each key."""
        values = {}
        for key, space in self.spaces.items():
            values[key] = space[0] if isinstance(space, list) else space["low"]
        return self.cells(values)[0]

    def fragment(self, values: Mapping[str, Any]) -> Fragment:
        """The config that gives keys their values, with all methods of the label."""
        methods, fragments = copy.deepcopy(self.base.get("method") or []), []
        for key, value in values.items():
            section, _, inner = key.partition(".")
            if section != "method" and inner:
                fragments.append(nested_config(key, value))
                continue
            place, _, argument = (inner or f"{len(methods) - 1}.init_args.{key}").partition(".")
            if not (place.isdigit() and int(place) < len(methods) and argument.startswith("init_args.")):
                hint = f"use an argument of its methods 0 to {len(methods) - 1}, such as method.0.init_args.mu"
                if not methods:
                    hint = f"{self.label} is not a list of methods; use a complete key, such as of model or trainer"
                raise UsageError(f"{self.suite.path}: tune.search.{self.label}.{key}: {hint}")
            method = methods[int(place)]
            entry = {"init_args": {}, **({"class_path": method} if isinstance(method, str) else method)}
            methods[int(place)] = merged_config([entry, nested_config(argument, value)])
        if methods:
            fragments.append({"method": methods})
        return in_classes(merged_config(fragments), look_up(self.base, "model.init_args.num_classes"))

    def _cell(self, seed: int, tuned: Sequence[Fragment] = ()) -> Cell:
        labels = {axis: self.tuning.at.get(axis, self.label) for axis in self.suite.axes}
        return self.suite.cell(labels, seed, self.scale, [*self.extra, *tuned])


class SearchStudy(CellStudy):
    """The study of a search."""

    def __init__(self, search: Search, database: RDBStorage) -> None:
        tuning = search.tuning
        about = {"suite": search.suite.name, "metric": tuning.metric}
        trials: dict[str, Any] = {}
        for digest, parameters in search.slots.items():
            trials[digest] = ({"digest": digest}, parameters)
        by_median = MedianPruner(n_warmup_steps=round(WARM_UP * search.rounds))
        pruner = NopPruner() if tuning.pruner == "none" else by_median
        super().__init__(search.study, database, tuning.minimize, trials, about, pruner)
        self.search = search
        digest = self.user_attrs.get("digest", search.digest)
        hint = f"the study {search.study!r} there has another config, search or seeds; "
        require(digest == search.digest, "--storage", digest, f"{hint}use another --output or --storage")
        self.set_user_attr("digest", search.digest)

    def objective(self, trial: Trial, run: Any) -> float:
        """The metric of a trial: its last value, as the mean over the seeds."""
        search = self.search
        # a sampler that went on from trial to trial would draw the same points in each process
        trial.study = copy.copy(self)
        trial.study.sampler = TPESampler(seed=trial.number)
        values: dict[str, Any] = {}
        for key, space in search.spaces.items():
            if isinstance(space, list):
                values[key] = trial.suggest_categorical(key, space)
            else:
                of_integers = isinstance(space["low"], int) and isinstance(space["high"], int)
                suggest: Any = trial.suggest_int if of_integers else trial.suggest_float
                values[key] = suggest(key, space["low"], space["high"], log=bool(space.get("log")))
        finals, pruned = [], list[int]()
        for number, cell in enumerate(search.cells(values)):

            def report(round_: int, value: float, offset: int = number * search.rounds) -> bool:
                with suppress(UpdateFinishedTrialError):
                    trial.report(value, offset + round_)
                if not pruned and trial.should_prune():
                    pruned.append(round_)
                return bool(pruned)

            result = run(trial, cell, report)
            if pruned:
                trial.set_user_attr("reason", f"pruned after round {pruned[0]} with seed {cell.seed}")
                raise optuna.TrialPruned
            finals.append(last_value(result))
        return sum(finals) / len(finals)

    def outcome(self, trial: FrozenTrial) -> str:
        """A line about a trial that has ended."""
        search, text = self.search, trial.user_attrs.get("reason", "")
        if trial.state == TrialState.COMPLETE:
            text = f"{search.tuning.metric} {format_value(search.tuning.metric, trial.values[0])}"
        elif trial.state == TrialState.FAIL:
            text = f"failed: {text}"
        num_ended = sum(ended.state.is_finished() for ended in self.last_trials())
        name = ", ".join([search.label, *search.setting])
        return f"{name}: {parameters_text(trial)}: {text} ({num_ended} of {len(search.slots)})"

    def write_best(self, output: Path, url: str) -> Path | None:
        """Write the best values as a config with their origin in its head; None without a complete trial."""
        search, tuning, trials = self.search, self.search.tuning, self.last_trials()
        complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
        if not complete:
            return None
        # of equal trials the first point stays the first, whenever it was run
        complete.sort(key=lambda trial: trial.values[0], reverse=not tuning.minimize)
        states = Counter(trial.state for trial in trials)
        names = {"complete": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL}
        counts = [f"{states[state]} {name}" for name, state in names.items() if states[state]]
        setting = [f"{axis}={label}" for axis, label in tuning.at.items()]
        word = "seeds" if len(tuning.seeds) > 1 else "seed"
        setting.append(f"{word} {', '.join(map(str, tuning.seeds))}")
        if tuning.val_fraction is not None:
            setting.append(f"{tuning.val_fraction:g} of the training examples held out")
        if search.scale != 1:
            setting.append(f"scale {search.scale:g}")
        head = [
            f"{search.label}, tuned: the best of {len(trials)} trials ({', '.join(counts)})",
            f"study {search.study} in {hidden(url)}",
            ", ".join(setting),
            f"{tuning.metric} after {search.rounds} rounds:",
            *(f"  {trial.values[0]:.6g} with {parameters_text(trial)}" for trial in complete),
        ]
        text = "".join(f"# {line}\n" for line in head)
        path = output.joinpath("tuned", *map(file_part, search.setting), f"{file_part(search.label)}.yaml")
        return write_text(path, text + yaml.safe_dump(search.fragment(complete[0].params), sort_keys=False))


def parameters_text(trial: FrozenTrial) -> str:
    """A trial's parameters on one line, since they stand in a comment, too."""
    texts = []
    for key, value in trial.params.items():
        texts.append(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {printable(str(value))}")
    return ", ".join(texts)
