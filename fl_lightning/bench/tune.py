"""Tunes the methods of a suite on a validation split, each in a study of its own.

The key ``tune`` of a suite says which arguments of which methods to search, and on what runs. The cells of a study are
its *slots*: the points of a grid, or trials whose values a sampler chooses.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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

from fl_lightning.bench.driver import last_value
from fl_lightning.bench.fragments import (
    Fragment,
    config_digest,
    in_classes,
    look_up,
    merged_config,
    nested_config,
    of_result,
    write_text,
)
from fl_lightning.bench.study import CellStudy, hidden
from fl_lightning.bench.suite import Cell, Labels, Suite, file_part
from fl_lightning.bench.suite_file import (
    BOOL,
    COUNT,
    MAPPING,
    SEEDS,
    SHARE,
    Kind,
    check_values,
    one_of,
    seeds_of,
    strings,
)
from fl_lightning.errors import UsageError, printable, require
from fl_lightning.records.summary import told

AXIS = "method"
TRIALS = 20
# share of the rounds before which no trial is pruned
WARM_UP = 0.25
KEYS_OF_TUNE: dict[str, Kind] = {
    "search": (lambda value: isinstance(value, Mapping) and bool(value), "give {METHOD: {ARGUMENT: [values]}}"),
    **{"at": MAPPING, "seeds": SEEDS, "minimize": BOOL, "pruner": one_of(("median", "none"))},
    "metric": (
        lambda value: isinstance(value, str) and not value.startswith(("test/", "test_")),
        "name one of the validation split, such as val/accuracy; the test images are not for tuning",
    ),
    "val_fraction": (lambda value: value is None or SHARE[0](value), "give a share in (0, 1), or null"),
    "trials": (lambda value: value is None or COUNT[0](value), COUNT[1]),
}
# the values of a key: a list of all of them, or a range
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
    check_values(raw, KEYS_OF_TUNE, f"{where}.", ["search"])
    return Tuning(
        **{
            **raw,
            "search": read_spaces(suite, raw["search"], f"{where}.search"),
            "at": read_setting(suite, strings(raw.get("at", {})), f"{where}.at"),
            "seeds": seeds_of(raw.get("seeds", [100])),
        }
    )


def read_spaces(suite: Suite, raw: Mapping[str, Any], where: str) -> dict[str, dict[str, Space]]:
    """The values of each key of each method, of the form that :class:`Tuning` says."""
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

    Raises:
        UsageError: the label has no method whose argument a key could be.

    Attributes:
        base: the config of the method before it is tuned.
        rounds: rounds of a run.
        digest: identifies the search.
        slots: parameters of each trial, by a digest; a sampler chooses empty ones.
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

    def first_values(self) -> dict[str, Any]:
        """Values of the keys with which a trial can be built: the first of each."""
        return {key: space[0] if isinstance(space, list) else space["low"] for key, space in self.spaces.items()}

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


class SearchStudy(CellStudy):
    """The study of a search.

    Raises:
        UsageError: the study there is of another search.
    """

    def __init__(self, search: Search, database: RDBStorage) -> None:
        tuning = search.tuning
        about = {"suite": search.suite.name, "metric": tuning.metric}
        trials = {digest: ({"digest": digest}, parameters) for digest, parameters in search.slots.items()}
        by_median = MedianPruner(n_warmup_steps=round(WARM_UP * search.rounds))
        pruner = NopPruner() if tuning.pruner == "none" else by_median
        super().__init__(search.study, database, tuning.minimize, trials, about, pruner=pruner)
        self.search = search
        known = self.user_attrs.get("digest", search.digest)
        hint = f"the study {search.study!r} there has another config, search or seeds; "
        require(known == search.digest, "--storage", known, f"{hint}give another --output or --storage")
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
                whole = isinstance(space["low"], int) and isinstance(space["high"], int)
                suggest: Any = trial.suggest_int if whole else trial.suggest_float
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
            finals.append(last_value(result)[1])
        return sum(finals) / len(finals)

    def outcome(self, trial: FrozenTrial) -> str:
        """A line about a trial that has ended."""
        search, why = self.search, trial.user_attrs.get("reason", "interrupted")
        text = f"{'failed: ' if trial.state == TrialState.FAIL else ''}{why}"
        if trial.state == TrialState.COMPLETE:
            text = f"{search.tuning.metric} {told(search.tuning.metric, trial.values[0])}"
        over = sum(trial.state.is_finished() for trial in self.last_trials())
        return f"{search.label}: {parameters_text(trial)}: {text} ({over} of {len(search.slots)})"

    def write_best(self, output: Path, url: str) -> Path | None:
        """Write the best values as a config, with their origin in its head; None without a complete trial.

        Of equal trials the first point is taken, whenever it was run.

        Returns:
            The file, which ``fit --config`` takes.
        """
        complete = [trial for trial in self.last_trials() if trial.state == TrialState.COMPLETE]
        if not complete:
            return None
        complete.sort(key=lambda trial: trial.value, reverse=not self.search.tuning.minimize)  # type: ignore[arg-type, return-value]
        text = "".join(f"# {line}\n" for line in self._head(complete, url))
        path = output / "tuned" / f"{file_part(self.search.label)}.yaml"
        return write_text(path, text + yaml.safe_dump(self.search.fragment(complete[0].params), sort_keys=False))

    def _head(self, complete: Sequence[FrozenTrial], url: str) -> Iterator[str]:
        """The origin of tuned values: the study, the number of trials, and the values of the complete ones."""
        search, tuning, trials = self.search, self.search.tuning, self.last_trials()
        states = Counter(trial.state for trial in trials)
        names = {"complete": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL}
        counts = [f"{states[state]} {name}" for name, state in names.items() if states[state]]
        yield f"{search.label}, tuned: the best of {len(trials)} trials ({', '.join(counts)})"
        yield f"study {search.study} in {hidden(url)}"
        seeds = f"seed{'s' * (len(tuning.seeds) > 1)} {', '.join(map(str, tuning.seeds))}"
        held_out = "" if tuning.val_fraction is None else f", {tuning.val_fraction:g} of the training examples held out"
        setting = "".join(f"{axis}={label}, " for axis, label in tuning.at.items())
        yield f"{setting}{seeds}{held_out}{f', scale {search.scale:g}' if search.scale != 1 else ''}"
        yield f"{tuning.metric} after {search.rounds} rounds:"
        yield from (f"  {trial.value:.6g} with {parameters_text(trial)}" for trial in complete)


def parameters_text(trial: FrozenTrial) -> str:
    """A trial's parameters on one line, since they stand in a comment, too."""
    texts = {key: f"{v:.4g}" if isinstance(v, float) else printable(str(v)) for key, v in trial.params.items()}
    return ", ".join(f"{key} {text}" for key, text in texts.items())
