"""The tables of a report, as sheets for HTML, Markdown and LaTeX, and as CSV."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from fl_lightning.bench.cells_csv import in_columns
from fl_lightning.bench.comparison import NOT_COMPARED, Comparison
from fl_lightning.bench.config_fragments import is_of_method
from fl_lightning.bench.table import csv_lines, differences_table, differs, footnotes, ours
from fl_lightning.bench.table_rendering import NONE, STAR, StyledText, TextTable
from fl_lightning.errors import count, printable
from fl_lightning.report.cautions import rounds_done
from fl_lightning.report.configs import ABSENT, compact, differing_between
from fl_lightning.report.gallery import BYTES, ROUND_PHASES, phases_of
from fl_lightning.report.sections import Section
from fl_lightning.results import FitResult

ENVIRONMENT = ("processor", "cores", "gpus", "device", "workers", "threads", "platform", "python", "git_revision")
# common keys that are shown without unfolding, by their last part
SHARED_FIRST = (
    *("partitioner", "alpha", "num_clients", "batch_size", "model", "encoder", "optimizer", "lr", "momentum"),
    *("max_rounds", "local_epochs", "local_steps", "participation", "cohort_size"),
)
OF_RUN = ["setting", "line", "seed"]


def results_tables(section: Section) -> Iterator[TextTable]:
    """Yield the results of a section of one setting, and its differences to the baseline."""
    compared, metric, notes = section.comparisons, section.metric, dict[str, str]()
    sent, lines = bytes_by_run(section), []
    for group in section.in_order:
        numbers = [entry_text(comparison, (group.line,), notes) for comparison in compared.values()]
        runs = list(group.runs.values())
        rounds = sorted({run.rounds for run in runs})
        done = str(rounds[0]) if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]}"
        of_round = [sent.get((group.setting, group.line, run.seed), np.nan) / max(run.rounds, 1) for run in runs]
        spent = (str(len(runs)), done, amount([run.seconds for run in runs]), amount(of_round, 1e6))
        lines.append([StyledText(group.line), *numbers, *map(StyledText, spent)])
    heads = [f"final {metric.label}", f"best {metric.label}"]
    said = ["Values of finished runs."]
    if any(len(group.runs) > 1 for group in section.groups):
        said = ["Mean ± standard deviation over the seeds of finished runs."]
    said += ["Bold: best value."] * any(text.bold for line in lines for text in line)
    starred = any(STAR in text.marks for line in lines for text in line)
    said += [f"Star: the interval of the difference to {section.baseline} excludes 0."] * starred
    if metric.target is not None:
        heads.append(f"rounds to {metric.unit * metric.target:g}{' %' * metric.percent}")
        said.append("A run that misses the target counts with all its rounds, and > marks a lower bound.")
    heads += ["seeds", "rounds", "seconds a round", "MB a round"]
    title = ", ".join(filter(None, [section.title, *section.settings]))
    groups: list[tuple[str, Sequence[str]]] = [(head, []) for head in heads]
    yield without_empty(TextTable(" ".join(said), ["method"], groups, lines, notes, title, "results"))
    final = compared["final"]
    if section.baseline and any(map(differs, final.entries.values())):
        yield replace(differences_table(final, notes), key="differences")


def without_empty(table: TextTable) -> TextTable:
    """Return a table without empty columns."""
    first = len(table.names)
    kept = [at for at in range(len(table.groups)) if any(line[first + at].text != NONE for line in table.lines)]
    lines = [[*line[:first], *(line[first + at] for at in kept)] for line in table.lines]
    return replace(table, groups=[table.groups[at] for at in kept], lines=lines)


def entry_text(comparison: Comparison, row: tuple[str], notes: dict[str, str]) -> StyledText:
    """Return the text of a table cell for the line ``row``, and add its footnotes to ``notes``."""
    entry = comparison.entries.get((row, ()))
    if entry is None:
        return StyledText(NONE)
    footnotes(entry.notes, notes)
    # the table of differences says why runs are not compared
    text = ours(entry, comparison, footnotes([note for note in entry.notes if NOT_COMPARED not in note], notes))
    # a cell that waits is a stopped run in a report
    return replace(text, text=text.text.replace("waiting", "stopped"))


def bytes_by_run(section: Section) -> pd.Series:
    """Return the bytes of all rounds by setting, line and seed; nan where a round has none."""
    known = section.rounds.reindex(columns=[*OF_RUN, *BYTES])
    return known.groupby(OF_RUN)[BYTES].agg(lambda column: column.sum(skipna=False)).sum(axis=1, skipna=False)


def final_and_best(section: Section, run: FitResult) -> tuple[float | None, float | None]:
    """Return the last and the best value of a run, so far."""
    values = run.values(section.metric.tag)
    finite = [value for value in values.values() if value == value]
    last = values[max(values)] if values else None
    return last, (min if section.metric.minimize else max)(finite, default=None)


def runs_table(section: Section) -> TextTable:
    """Return the table of the runs."""
    lines = []
    for group in section.in_order:
        for seed, run in group.runs.items():
            values = map(section.metric.text, final_and_best(section, run))
            state = f"{run.state}, {rounds_done(run)}"
            texts = (group.label, str(seed), state, *values, run.plan[:8] or NONE, run.name)
            lines.append(list(map(StyledText, texts)))
    heads = ["last", "best", "partition", "folder"]
    caption = "Every run with its last and best value so far, finished or not."
    return TextTable(caption, ["configuration", "seed", "state"], [(head, []) for head in heads], lines, key="runs")


def config_table(section: Section) -> TextTable | None:
    """Return the keys in which the configurations differ; None if they do not differ."""
    groups = section.in_order
    configs = [compact(group.config) for group in groups]
    keys = sorted(differing_between(configs), key=lambda key: not is_of_method(key))
    if not keys:
        return None
    caption = "Keys in which the configs differ, without keys that cannot change a result."
    cells = [[StyledText(config.get(key, ABSENT)) for key in keys] for config in configs]
    first, rows, heads = "configuration", [group.label for group in groups], keys
    if len(groups) < len(keys):
        cells = [list(column) for column in zip(*cells, strict=True)]
        first, rows, heads = "key", heads, rows
    lines = [[StyledText(row), *line] for row, line in zip(rows, cells, strict=True)]
    return TextTable(caption, [first], [(head, []) for head in heads], lines, key="configs")


def shared_first(common: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the most informative common keys, by their last part."""
    known = {key.rsplit(".", 1)[-1]: value for key, value in reversed(common)}
    return [(name, known[name]) for name in SHARED_FIRST if name in known]


def cost_table(section: Section) -> TextTable | None:
    """Return the costs of the configurations; None without costs."""
    phases, sent = phases_of(section.rounds), bytes_by_run(section)
    memory = [tag for tag in section.rounds if tag.startswith("memory/")]
    last = section.rounds.reindex(columns=[*OF_RUN, *BYTES, *memory]).groupby(OF_RUN).last()
    columns = dict.fromkeys(column for group in section.groups for column in group.first.cost)
    heads = [*(f"{phase}, s" for phase in ROUND_PHASES), "round, s", "down, MB", "up, MB", "all rounds, MB"]
    lines = []
    for group in section.in_order:
        place = group.setting, group.line
        own = last.loc[place] if place in last.index.droplevel("seed") else last.iloc[:0]
        numbers = [
            *(amount([phases[phase].get(place)]) for phase in ROUND_PHASES),
            amount([run.seconds for run in group.runs.values()]),
            *(amount(own[tag], 1e6) for tag in BYTES),
            amount(sent.loc[place] if len(own) else [], 1e6),
            *(amount(own[tag]) for tag in memory),
        ]
        for column in columns:
            text = group.first.cost.get(column, NONE)
            with suppress(ValueError):  # not a number
                text = f"{float(text):.4g}"
            numbers.append(text)
        lines.append([StyledText(group.label), *map(StyledText, numbers)])
    caption = "Cost of a round: median seconds of each phase without the first round, bytes of the last round. "
    caption += "Compare seconds only of runs on one otherwise idle machine."
    if any(run.run_dir is None for run in section.runs):
        caption += " For runs without a folder: phases of the last round."
    groups: list[tuple[str, Sequence[str]]] = [(head, []) for head in (*heads, *memory, *columns)]
    table = without_empty(TextTable(caption, ["configuration"], groups, lines, key="cost"))
    return table if table.groups else None


def amount(values: Iterable[float | None], unit: float = 1.0) -> str:
    """Return the mean of the known values."""
    known = [value for value in values if value is not None and value == value]
    return f"{np.mean(known) / unit:.3g}" if known else NONE


def environment_table(runs: Sequence[FitResult]) -> TextTable | None:
    """Return the machines and the software of the runs; None if unknown."""
    known = [run.environment for run in runs if run.environment]
    if not known:
        return None
    versions: list[Mapping[str, str]] = [environment.get("versions") or {} for environment in known]
    keys = [(key, [environment.get(key) for environment in known]) for key in ENVIRONMENT]
    for name in dict.fromkeys(name for installed in versions for name in installed):
        keys.append((f"version of {name}", [installed.get(name) for installed in versions]))
    lines = []
    for key, values in keys:
        texts = [", ".join(map(str, value)) or "none" if isinstance(value, list) else value for value in values]
        counts = Counter(NONE if text is None else printable(str(text)) for text in texts)
        if set(counts) != {NONE}:
            of = [f"{value} ({count(n, 'run')})" if len(counts) > 1 else value for value, n in counts.most_common()]
            lines.append([StyledText(key), StyledText("; ".join(of))])
    return TextTable(f"The machine and the software of {count(len(known), 'run')}.", ["key"], [("value", [])], lines)


def commands(runs: Sequence[FitResult]) -> list[tuple[str, int]]:
    """Return the distinct command lines of the runs, each with its number of runs."""
    known = [run.environment.get("command") for run in runs]
    lines = Counter(shlex.join(map(str, line)) for line in known if isinstance(line, list) and line)
    return list(lines.items())


def numbers_csv(comparisons: Sequence[Comparison]) -> str:
    """Return CSV with a line for each row and column of each table, numbers unrounded."""
    return in_lines(
        {"title": comparison.suite.title, **line}
        for at, comparison in enumerate(comparisons, 1)
        for line in csv_lines(at, comparison)
    )


def runs_csv(sections: Sequence[Section]) -> str:
    """Return CSV with a line for each run: state, last and best value, cost, and the keys that differ."""
    lines = list[dict[str, Any]]()
    for section in sections:
        keys = differing_between([group.config for group in section.groups])
        sent = bytes_by_run(section)
        for group in section.in_order:
            for seed, run in group.runs.items():
                last, best = final_and_best(section, run)
                of_run = sent.get((group.setting, group.line, seed), np.nan)
                lines.append(
                    {
                        **{"data": section.title, "method": group.line, "setting": group.setting, "seed": seed},
                        **{"state": run.state, "rounds": run.rounds, "metric": section.metric.tag, "last": last},
                        **{"best": best, "seconds_a_round": run.seconds, "bytes": of_run if of_run == of_run else None},
                        **{"partition": run.plan, "machine": run.machine, "run": run.name},
                        **{f"config {key}": group.config.get(key, "") for key in keys},
                    }
                )
    return in_lines(lines)


def in_lines(lines: Iterable[Mapping[str, Any]]) -> str:
    """Return a table as CSV with the columns of all its lines."""
    made = list(lines)
    columns = dict.fromkeys(column for line in made for column in line)
    return in_columns(list(columns), made)
