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
        totals = {run.name: sum(run.values(tag).values()) for run in runs}
        totals = {name: total for name, total in totals.items() if total}
        if totals:
            worst = max(totals, key=totals.__getitem__)
            where = worst if len(totals) == 1 else f"{len(totals)} runs, {totals[worst]:g} of them in {worst}"
            yield f"{sum(totals.values()):g} {skipped} in {where}."
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
        remedy = "--ckpt_path last" if run.rounds else "nothing to resume from"
        yield f"{run.name} was stopped: {rounds_done(run)}, {remedy}; it is not in the means."
    if run.state == "failed":
        yield f"{run.name} failed: {run.reason or 'for an unknown reason'}."
    skipped = (measured(run, file)[1] for file in array_files(run))
    yield from (f"{run.name}: {note}." for note in (*run.notes, *skipped) if note)
    for name in dict.fromkeys(name for row in run.history for name in row):
        # the metric of the report and all losses
        values = run.values(name) if name == tag or "loss" in name else {}
        for round_, value in values.items():
            if not abs(value) < INFINITE:
                yield f"{run.name}: {name} was {value} in round {round_}."
                break
    # a callback such as EarlyStopping, or simulated seconds, may have ended it
    ending = ("trainer.callbacks.", "trainer.max_seconds")
    may_end = any(key.startswith(ending) for key in run.settings)
    is_short = run.state == "finished" and 0 < run.rounds < (max_rounds(run.config) or 0)
    if is_short and run.run_dir is not None and not may_end:
        yield f"{run.name} is finished after {rounds_done(run)}: it stopped early, or its metrics.csv is cut."
    if run.state == "finished" and not run.values(tag):
        yield f"{run.name} has no {tag}."


def of_setting(part: Section) -> Iterator[str]:
    """Warn of different partitions and seeds of the runs of one setting, and of orders that depend on the score."""
    for seed, runs in part.runs[part.runs["plan"] != ""].groupby("seed", sort=False):
        plans = runs.groupby("plan", sort=False)["line"].agg(", ".join)
        if len(plans) > 1:
            text = "; ".join(f"{digest[:8]} of {lines}" for digest, lines in plans.items())
            where = ", ".join(filter(None, [part.setting, f"seed {seed}"]))
            yield f"Different partitions are compared ({where}): {text}. No differences are taken between them."
    where = f" ({part.setting})" if part.setting else ""
    seeds = part.runs.groupby("line", sort=False)["seed"].agg(tuple)
    if seeds.nunique() > 1:
        ranges = []
        for line, of_line in seeds.items():
            ranges.append(f"{line}: {len(of_line)} ({of_line[0]} to {of_line[-1]})")
        text = "; ".join(ranges)
        yield f"The seeds are not the same for all{where}: {text}. Differences are of the seeds that both have."
    tags = sorted(tag for tag in part.rounds if tag.startswith("scores/"))
    scores = part.rounds.groupby(["line", "seed"])[tags].last()
    scored = [line for line in part.lines if tags and line in scores.index]
    for line_a, line_b in combinations(scored, 2):
        # over the seeds that both have
        gaps = (scores.loc[line_a] - scores.loc[line_b]).sum().rename(lambda tag: tag.removeprefix("scores/"))
        ahead, behind = (", ".join(gaps.index[sides]) for sides in (gaps > 0, gaps < 0))
        if ahead and behind:
            yield f"The order depends on the score{where}: {line_a} is ahead by {ahead}; {line_b} is ahead by {behind}."
