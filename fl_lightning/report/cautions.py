"""The warnings of a report."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from fl_lightning.report.configs import max_rounds
from fl_lightning.report.measurements import array_files, measured
from fl_lightning.report.reading import INFINITE
from fl_lightning.report.sections import Section
from fl_lightning.report.tables import rounds_done
from fl_lightning.storage.results import FitResult

# tags of the numbers of skipped clients, batches and steps
SKIPPED = {
    "clients/failed": "clients failed and were skipped",
    "batches/skipped": "batches were skipped",
    "steps/lost": "steps of 16-mixed were lost",
}


def cautions(section: Section) -> Iterator[str]:
    """Yield the warnings of a section, the gravest first."""
    runs = list(section.runs["run"])
    for run in (*runs, *section.repeats):
        yield from of_run(section.metric.tag, run)
    for tag, skipped in SKIPPED.items():
        some = {run.name: number for run in runs if (number := sum(run.values(tag).values()))}
        if some:
            most = max(some, key=some.__getitem__)
            where = most if len(some) == 1 else f"{len(some)} runs, {some[most]:g} of them in {most}"
            yield f"{sum(some.values()):g} {skipped} in {where}."
    if section.repeats:
        names = ", ".join(run.name for run in section.repeats)
        yield f"{names}: not in the means, since another run has the same config, seed and at least as many rounds."
    for part in section.parts:
        yield from of_setting(part)
    machines = {run.machine for run in runs if run.machine}
    if len(machines) > 1:
        yield f"The runs used {len(machines)} kinds of machines: do not compare their seconds."


def of_run(tag: str, run: FitResult) -> Iterator[str]:
    """Yield the warnings of one run, in a report by the metric ``tag``."""
    if run.state == "running":
        yield f"{run.name} is still running, {rounds_done(run)}: it is not in the means."
    if run.state == "stopped":
        last = "--ckpt_path last" if run.rounds else "nothing to resume from"
        yield f"{run.name} was stopped: {rounds_done(run)}, {last}; it is not in the means."
    if run.state == "failed":
        yield f"{run.name} failed: {run.reason or 'for an unknown reason'}."
    skipped = (measured(run, file)[1] for file in array_files(run))
    yield from (f"{run.name}: {note}." for note in (*run.notes, *skipped) if note)
    # the metric of the report and all losses
    for name in dict.fromkeys(name for row in run.history for name in row if name == tag or "loss" in name):
        bad = next(((at, value) for at, value in run.values(name).items() if not abs(value) < INFINITE), None)
        if bad is not None:
            yield f"{run.name}: {name} was {bad[1]} in round {bad[0]}."
    # a callback such as EarlyStopping may have ended it
    whole = run.run_dir is None or any(key.startswith("trainer.callbacks.") for key in run.settings)
    if run.state == "finished" and 0 < run.rounds < (max_rounds(run.config) or 0) and not whole:
        yield f"{run.name} is finished after {rounds_done(run)}: it stopped early, or its metrics.csv is cut."
    if run.state == "finished" and not run.values(tag):
        yield f"{run.name} has no {tag}."


def of_setting(part: Section) -> Iterator[str]:
    """Warn of different partitions and seeds of the runs of one setting, and of orders that depend on the score."""
    for seed, some in part.runs[part.runs["plan"] != ""].groupby("seed", sort=False):
        plans = some.groupby("plan", sort=False)["line"].agg(", ".join)
        if len(plans) > 1:
            told = "; ".join(f"{digest[:8]} of {lines}" for digest, lines in plans.items())
            where = ", ".join(filter(None, [part.setting, f"seed {seed}"]))
            yield f"Different partitions are compared ({where}): {told}. No differences are taken between them."
    where = f" ({part.setting})" * bool(part.setting)
    seeds = part.runs.groupby("line", sort=False)["seed"].agg(tuple)
    if seeds.nunique() > 1:
        told = "; ".join(f"{line}: {len(one)} ({one[0]} to {one[-1]})" for line, one in seeds.items())
        yield f"The seeds are not the same for all{where}: {told}. Differences are of the seeds that both have."
    tags = sorted(tag for tag in part.rounds if tag.startswith("scores/"))
    last = part.rounds.groupby(["line", "seed"])[tags].last()
    for one, other in combinations([line for line in part.lines if tags and line in last.index], 2):
        # over the seeds that both have
        gaps = (last.loc[one] - last.loc[other]).sum().rename(lambda tag: tag.removeprefix("scores/"))
        ahead, behind = (", ".join(gaps.index[sides]) for sides in (gaps > 0, gaps < 0))
        if ahead and behind:
            yield f"The order depends on the score{where}: {one} is ahead by {ahead}; {other} is ahead by {behind}."
