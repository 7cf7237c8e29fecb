"""What a reader of a report has to know before trusting its numbers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations, groupby

from fl_lightning.errors import count
from fl_lightning.report.gallery import not_drawn
from fl_lightning.report.run import INFINITE, PLAN, ReportedRun
from fl_lightning.report.sections import Section

# what is skipped, one and several
SKIPPED = {
    "clients/failed": ("client failed and was skipped", "clients failed and were skipped"),
    "batches/skipped": ("batch was skipped", "batches were skipped"),
    "steps/lost": ("step of 16-mixed was lost", "steps of 16-mixed were lost"),
}
# runs that are named; of more there is one line for all
NAMED = 3


def cautions(section: Section) -> Iterator[str]:
    """The warnings of a section, the gravest first."""
    for group in section.groups:
        for run in (*group.runs.values(), *group.repeats):
            yield from cautions_of_run(section, run)
    yield from of_skipped(section.runs)
    yield from of_partitions(section)
    for group in section.groups:
        if group.repeats:
            names = ", ".join(run.name for run in group.repeats)
            yield f"{names}: left out, since another run has the same config and seed and has come as far or further."
    yield from of_seeds(section)
    yield from of_scores(section)
    yield from of_versions(section.runs)


def cautions_of_run(section: Section, run: ReportedRun) -> Iterator[str]:
    """The warnings of one run."""
    if run.state == "running":
        yield f"{run.name} is still running, {run.told.partition(', ')[2]}: it is not in the means."
    if run.state == "stopped":
        last = "--ckpt_path last" if run.rounds else "nothing to resume from"
        yield f"{run.name} was stopped: {run.told.partition(', ')[2]}, {last}; it is not in the means."
    if run.state == "failed":
        yield f"{run.name} failed: {run.reason or 'for an unknown reason'}."
    of_arrays = [note for file in run.files(".npz") if file != PLAN for note in not_drawn(run, file)]
    yield from (f"{run.name}: {note}." for note in (*run.notes, *of_arrays))
    # the report's own metric, or a loss
    for tag in dict.fromkeys(tag for row in run.rows for tag in row if tag == section.metric.tag or "loss" in tag):
        values = run.values(tag)
        bad = next((round_ for round_, value in values.items() if not abs(value) < INFINITE), None)
        if bad is not None:
            yield f"{run.name}: {tag} was {values[bad]} in round {bad}."
    if run.state == "finished" and not run.values(section.metric.tag):
        yield f"{run.name} has no {section.metric.tag}."


def of_skipped(runs: Sequence[ReportedRun]) -> Iterator[str]:
    """Warn of clients and batches that were skipped."""
    for tag, (one, several) in SKIPPED.items():
        numbers = [(sum(run.values(tag).values()), run) for run in runs]
        some = [(number, run) for number, run in numbers if number]
        if len(some) > NAMED:
            most, run = max(some, key=lambda pair: pair[0])
            total = sum(number for number, _ in some)
            yield f"{total:g} {several} in {len(some)} runs, most of them in {run.name}: {most:g}."
            continue
        for number, run in some:
            rounds = count(sum(value > 0 for value in run.values(tag).values()), "round")
            yield f"{run.name}: {number:g} {one if number == 1 else several}, in {rounds}."


def of_partitions(section: Section) -> Iterator[str]:
    """Warn of different partitions of the runs that a reader compares."""
    for setting in section.settings:
        hashes: dict[int, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for group in section.at(setting):
            for seed, run in group.runs.items():
                if run.plan_hash:
                    hashes[seed][run.plan_hash].append(group.line)
        for seed, found in hashes.items():
            if len(found) > 1:
                told = "; ".join(f"{digest[:8]} of {', '.join(lines)}" for digest, lines in found.items())
                where = f"{setting}, seed {seed}" if setting else f"seed {seed}"
                yield f"Different partitions are compared ({where}): {told}. No differences are taken between them."


def of_seeds(section: Section) -> Iterator[str]:
    """Warn of configurations of a setting that have different seeds."""
    for setting in section.settings:
        seeds = {group.line: sorted(group.runs) for group in section.at(setting)}
        if len({tuple(one) for one in seeds.values()}) > 1:
            told = "; ".join(f"{line}: {', '.join(spans(one))}" for line, one in seeds.items())
            where = f" ({setting})" if setting else ""
            yield f"The seeds are not the same for all{where}: {told}. Differences are of the seeds that both have."


def spans(numbers: Sequence[int]) -> Iterator[str]:
    """Yield ascending numbers as text, three and more without a gap by the first and the last."""
    for _, span in groupby(enumerate(numbers), key=lambda one: one[1] - one[0]):
        some = [number for _, number in span]
        yield from map(str, some) if len(some) < 3 else [f"{some[0]} to {some[-1]}"]


def of_scores(section: Section) -> Iterator[str]:
    """Warn where the order of two configurations depends on the score of the callback ``Scores``."""
    tags = {tag for run in section.runs for row in run.rows for tag in row if tag.startswith("scores/")}
    for setting in section.settings:
        for one, other in combinations(section.at(setting), 2):
            ahead, behind = list[str](), list[str]()
            for tag in sorted(tags):
                # the last values of the seeds that both have
                values = [
                    [list(group.runs[seed].values(tag).values())[-1:] for group in (one, other)]
                    for seed in one.runs.keys() & other.runs.keys()
                ]
                gap = math.fsum(ours[0] - theirs[0] for ours, theirs in values if ours and theirs)
                if gap:
                    (ahead if gap > 0 else behind).append(tag.removeprefix("scores/"))
            if ahead and behind:
                where = f" ({setting})" if setting else ""
                sides = f"{one.line} is ahead by {', '.join(ahead)}; {other.line} is ahead by {', '.join(behind)}"
                yield f"The order depends on the score{where}: {sides}."


def of_versions(runs: Sequence[ReportedRun]) -> Iterator[str]:
    """Warn of different code, software and machines of the runs."""
    known = [run.environment for run in runs if run.environment]
    revisions = {str(one.get("git_revision")) for one in known if one.get("git_revision")}
    torch = {(one.get("versions") or {}).get("torch") for one in known}
    if len(revisions) > 1:
        yield f"The runs are of {len(revisions)} revisions of the code; the table of the environment has them."
    if len(torch) > 1:
        yield f"The runs are of different versions of torch: {', '.join(sorted(map(str, torch)))}."
    machines = {run.machine for run in runs if run.machine}
    if len(machines) > 1:
        yield f"The runs were on {len(machines)} kinds of machines: their seconds cannot be compared."
