"""Tunes the methods of a suite on a validation split, each in a study of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import optuna
import yaml
from optuna.exceptions import UpdateFinishedTrialError
from optuna.pruners import MedianPruner, NopPruner
from optuna.samplers import TPESampler
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, Trial, TrialState

from fl_lightning.bench.driver import Driver, Dropped, drop_repetition, last_value
from fl_lightning.bench.estimate import measured_estimate
from fl_lightning.bench.fragments import Fragment, write_text
from fl_lightning.bench.process import Runner
from fl_lightning.bench.study import (
    CellStudy,
    Database,
    by_digest,
    decisive,
    hidden,
)
from fl_lightning.bench.suite import Suite, file_part
from fl_lightning.bench.tuning import Search, Space
from fl_lightning.errors import UsageError, printable, require
from fl_lightning.records.summary import told

# share of the rounds before which no trial is pruned
WARM_UP = 0.25


class Tuner(Driver):
    """Runs the trials of several searches, in several runner processes side by side.

    Args:
        suite: the suite.
        searches: the searches.
        database: the connection to it.
        output: folder of all runs.
        jobs: number of runner processes.
        say: takes the lines that say what has been done.
        runner: makes the runner of a job, by its number.
    """

    def __init__(
        self,
        suite: Suite,
        searches: Sequence[Search],
        database: Database,
        output: Path,
        jobs: int = 1,
        say: Callable[[str], object] = print,
        runner: Callable[[int], Any] = Runner,
    ) -> None:
        super().__init__(suite, (), database, output, jobs, say, runner)
        self.searches = {search.study: search for search in searches}
        self.metric = searches[0].tuning.metric

    def _open_studies(self) -> list[CellStudy]:
        return [open_search(search, self.database) for search in self.searches.values()]

    def _enqueue(self, study: CellStudy) -> bool:
        search = self.searches[study.study_name]
        trials_of = by_digest(study, search.slots)
        missing = [slot for slot, trials in trials_of.items() if decisive(trials) is None]
        for slot in missing:
            # of a grid its own, else those of the trial that was interrupted, if there is one
            values = search.slots[slot] or (dict(trials_of[slot][-1].params) if trials_of[slot] else {})
            study.enqueue_trial(values, user_attrs={"digest": slot})
        return bool(missing)

    def _objective(self, study: CellStudy, runner: Any, trial: Trial) -> float:
        """The metric of a trial: its last value, as the mean over the seeds."""
        search = self.searches[study.study_name]
        drop_repetition(study, trial, Dropped)
        # a sampler that went on from trial to trial would draw the same points in each process
        trial.study.sampler = TPESampler(seed=trial.number)
        values = {key: suggested(trial, key, space) for key, space in search.spaces.items()}
        finals = []
        for number, cell in enumerate(search.cells(values)):
            report = PruningReport(trial, number * search.rounds)
            result = self._run_cell(study, runner, trial, cell, report)
            if report.pruned is not None:
                trial.set_user_attr("reason", f"pruned after round {report.pruned} with seed {cell.seed}")
                raise optuna.TrialPruned
            finals.append(last_value(result)[1])
        return sum(finals) / len(finals)

    def _outcome(self, study: CellStudy, trial: FrozenTrial) -> str:
        search = self.searches[study.study_name]
        over = sum(trial.state.is_finished() for trial in last_trials(search, study))
        return f"{search.label}: {trial_outcome(trial, search)} ({over} of {len(search.slots)})"


class PruningReport:
    """Tells a trial the metric of its rounds, and a run whether to end.

    Args:
        trial: the trial.
        offset: rounds of the runs with its former seeds.

    Attributes:
        pruned: the round after which the run was to end; None if it may go on.
    """

    def __init__(self, trial: Trial, offset: int) -> None:
        self.trial, self.offset = trial, offset
        self.pruned: int | None = None

    def __call__(self, round_: int, value: float) -> bool:
        """Tell the trial of a round; returns whether the run is to end."""
        with suppress(UpdateFinishedTrialError):
            self.trial.report(value, self.offset + round_)
        if self.pruned is None and self.trial.should_prune():
            self.pruned = round_
        return self.pruned is not None


def open_search(search: Search, database: Database) -> CellStudy:
    """The study of a search, created where there is none.

    Raises:
        UsageError: the study there is of another search.
    """
    direction = StudyDirection.MINIMIZE if search.tuning.minimize else StudyDirection.MAXIMIZE
    optuna.create_study(study_name=search.study, direction=direction, storage=database, load_if_exists=True)
    by_median = MedianPruner(n_warmup_steps=round(WARM_UP * search.rounds))
    pruner = NopPruner() if search.tuning.pruner == "none" else by_median
    study = CellStudy(search.study, database, search.slots, pruner=pruner)
    known = study.user_attrs.get("digest", search.digest)
    hint = f"the study {search.study!r} there has another config, search or seeds; give another --output or --storage"
    require(known == search.digest, "--storage", known, hint)
    attributes = {"suite": search.suite.name, "metric": search.tuning.metric, "digest": search.digest}
    for key, value in attributes.items():
        study.set_user_attr(key, value)
    return study


def suggested(trial: Trial, key: str, space: Space) -> Any:
    """The value of a key in a trial."""
    if isinstance(space, list):
        return trial.suggest_categorical(key, space)
    low, high, log = space["low"], space["high"], bool(space.get("log"))
    if isinstance(low, int) and isinstance(high, int):
        return trial.suggest_int(key, low, high, log=log)
    return trial.suggest_float(key, low, high, log=log)


def last_trials(search: Search, study: Study) -> list[FrozenTrial]:
    """The trials that say what became of those of a search, as far as it has come."""
    trials = map(decisive, by_digest(study, search.slots).values())
    return [trial for trial in trials if trial is not None]


def retry_failed(search: Search, study: Study) -> None:
    """Queue the trials that failed."""
    for trial in last_trials(search, study):
        if trial.state == TrialState.FAIL:
            study.enqueue_trial(dict(trial.params), user_attrs={"digest": trial.user_attrs["digest"]})


def check_metric(search: Search, runner: Any) -> None:
    """Run one round of a method before it is tuned, in a temporary folder.

    Raises:
        UsageError: it fails, or has no such metric.
    """
    tuning, cell = search.tuning, search.cells({})[0]
    reason = measured_estimate(search.label, [cell], 1, tuning.metric, runner).reason
    where = f"{search.suite.path}: tune.metric"
    hint = reason.partition(": ")[2]
    if "validation_step" not in hint and " val/" not in hint:
        hint += "; set tune.val_fraction above 0, or give the data module a val_dataloader"
    require(not reason.startswith("metric="), where, tuning.metric, hint)
    if reason:
        raise UsageError(f"{search.suite.path}: tune.search.{search.label}: {reason}")


def trial_outcome(trial: FrozenTrial, search: Search) -> str:
    """What became of a trial, in words."""
    if trial.state == TrialState.COMPLETE:
        return f"{parameters_text(trial)}: {search.tuning.metric} {told(search.tuning.metric, trial.values[0])}"
    why = trial.user_attrs.get("reason", "interrupted")
    return f"{parameters_text(trial)}: {'failed: ' if trial.state == TrialState.FAIL else ''}{why}"


def parameters_text(trial: FrozenTrial) -> str:
    """A trial's parameters as a reader wants them, on one line, since they stand in a comment, too."""
    texts = {key: f"{v:.4g}" if isinstance(v, float) else printable(str(v)) for key, v in trial.params.items()}
    return ", ".join(f"{key} {text}" for key, text in texts.items())


def write_best(search: Search, study: Study, output: Path, url: str) -> Path | None:
    """Write the best values of a search as a config, with what they come from in its head; None without a trial.

    Of equal trials the first point is taken, whenever it was run.

    Returns:
        The file, which ``fit --config`` takes.
    """
    complete = [trial for trial in last_trials(search, study) if trial.state == TrialState.COMPLETE]
    if not complete:
        return None
    complete.sort(key=lambda trial: trial.value, reverse=not search.tuning.minimize)  # type: ignore[arg-type, return-value]
    fragment: Fragment = search.fragment(complete[0].params)
    text = "".join(f"# {line}\n" for line in head(search, study, complete, url))
    path = output / "tuned" / f"{file_part(search.label)}.yaml"
    return write_text(path, text + yaml.safe_dump(fragment, sort_keys=False))


def head(search: Search, study: Study, complete: Sequence[FrozenTrial], url: str) -> Iterator[str]:
    """Where tuned values come from: the study, the number of trials, and the numbers of all that were not pruned."""
    tuning, trials = search.tuning, last_trials(search, study)
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
