"""The tables of a report, as text tables for HTML, Markdown and LaTeX, and as CSV."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import pandas as pd

from fl_lightning.bench.comparison import NOT_COMPARED, Comparison
from fl_lightning.bench.config_fragments import is_of_method
from fl_lightning.bench.table import differences_table, differs, footnotes, ours, text_tables
from fl_lightning.bench.table_rendering import NONE, STAR, StyledText, TextTable, plain_table
from fl_lightning.plotting.values import MODELS
from fl_lightning.report.configs import compact, differing_keys, max_rounds, with_setting
from fl_lightning.report.measurements import measured, plan_of
from fl_lightning.report.sections import BYTES, OF_GROUP, OF_RUN, Section
from fl_lightning.storage.metric_format import few_digits, fixed, in_percent
from fl_lightning.storage.results import FitResult
from fl_lightning.utilities.errors import count, printable

ENVIRONMENT = ("processor", "cores", "gpus", "device", "workers", "threads", "platform", "python", "git_revision")
PHASES = ["train", "evaluate", "server", "log"]
EXAMPLES = "training examples"
OLDER_BYTES = "MB of SCAFFOLD and FedProto in cells from before 2026-11-28 leave out the values that they send down."


def three_digits(value: float) -> str:
    """Return a number with three digits, and a dash for nan."""
    return f"{value:.3g}" if value == value else NONE


def rounds_done(run: FitResult) -> str:
    """Return the rounds of a run, such as ``3 of 10 rounds so far``."""
    num_rounds = max_rounds(run.config)
    text = count(run.rounds, "round")
    if num_rounds not in (None, run.rounds) and "trainer.max_seconds" not in run.settings:
        text = f"{run.rounds} of {num_rounds} rounds"
    return f"{text} so far" if run.state == "running" else text


# ------------------------------------------------------------------ results
def results_tables(section: Section) -> Iterator[TextTable]:
    """Yield the results of a section of one setting, and its differences to the baseline."""
    metric, notes, rows = section.metric, dict[str, str](), list[list[str | StyledText]]()
    by_show = section.comparisons.items()
    comparisons = [comparison for show, comparison in by_show if show != "fair"]
    for line, runs in section.runs.groupby("line", sort=False):
        rounds, logged = runs["rounds"], runs["run"].map(lambda run: len(run.history))
        numbers = [entry_text(comparison, (line,), notes) for comparison in comparisons]
        cost = [
            str(len(runs)),
            str(rounds.min()) if rounds.min() == rounds.max() else f"{rounds.min()} to {rounds.max()}",
            three_digits(runs["seconds"].mean()),
            three_digits((runs["bytes"] / logged.clip(lower=1)).mean() / 1e6),
        ]
        rows.append([line, *numbers, *cost])
    heads = ["method", f"final {metric.label}", f"best {metric.label}"]
    if section.runs["line"].is_unique:
        sentences = ["Values of finished runs."]
    else:
        sentences = ["Mean ± standard deviation over the seeds of finished runs."]
    texts = [text for row in rows for text in row if isinstance(text, StyledText)]
    if any(text.bold for text in texts):
        sentences.append("Bold: best value.")
    if any(STAR in text.marks for text in texts):
        sentences.append(f"Star: the interval of the difference to {section.baseline} excludes 0.")
    if metric.target is not None:
        heads.append(f"rounds to {metric.unit * metric.target:g}{' %' if metric.percent else ''}")
        sentences.append("A run that misses the target counts with all its rounds, and > marks a lower bound.")
    heads += ["seeds", "rounds", "seconds a round", "MB a round"]
    sentences += note_on_bytes(section)
    # without empty columns
    columns = [column for column in zip(heads, *rows, strict=True) if any(str(text) != NONE for text in column[1:])]
    heads, *rows = (list(texts_of_row) for texts_of_row in zip(*columns, strict=True))
    caption = " ".join(sentences)
    yield plain_table(caption, heads[:1], heads[1:], rows, notes=notes, title=section.full_title, key="results")
    final = section.comparisons["final"]
    if section.baseline and any(map(differs, final.entries.values())):
        yield replace(differences_table(final, notes), key="differences")
    if "fair" in section.comparisons:
        yield replace(next(text_tables(section.comparisons["fair"])), key="fair")


def entry_text(comparison: Comparison, row: tuple[str], notes: dict[str, str]) -> StyledText:
    """Return the text of a table cell for the line ``row``, and add its footnotes to ``notes``."""
    entry = comparison.entries.get((row, ()))
    if entry is None:
        return StyledText(NONE)
    footnotes(entry.notes, notes)
    # the table of differences says why runs are not compared
    marks = footnotes([note for note in entry.notes if NOT_COMPARED not in note], notes)
    text = ours(entry, comparison, marks)
    # a cell that waits is a stopped run in a report
    return replace(text, text=text.text.replace("waiting", "stopped"))


# ------------------------------------------------------------------ sites and clients
def parts_tables(section: Section) -> Iterator[TextTable]:
    """Yield a table of the sites and one of the clients of a section of one setting, each only if measured."""
    several_seeds = not section.runs["line"].is_unique
    sites, clients = values_of_sites(section), values_of_clients(section)
    if len(sites):
        over = ", mean over the seeds" if several_seeds else ""
        about = f"On the test data of each site, at the last measurement{over}."
        yield parts_table(section, "site", about, sites, examples_of(section))
    if len(clients):
        over = ", smallest seed" if several_seeds else ""
        about = f"On each client's own test data, at the last measurement{over}."
        yield parts_table(section, "client", about, clients, {})


def parts_table(section: Section, kind: str, about: str, values: pd.DataFrame, examples: dict[str, int]) -> TextTable:
    """Return a table with a row for each site or client, and a column for each metric and method."""
    columns = [[str(examples.get(name, NONE)) for name in values.index]] if examples else []
    groups: dict[str, list[str]] = {EXAMPLES: []} if examples else {}
    several_lines = section.runs["line"].nunique() > 1
    for label, line in values:
        as_text = partial(fixed, decimals=2) if " in %" in label else few_digits
        columns.append([as_text(value) if value == value else NONE for value in values[label, line]])
        lines = groups.setdefault(label, [])
        if several_lines:
            lines.append(line)
    rows = zip(values.index, *columns, strict=True)
    return plain_table(about, [kind], groups.items(), rows, title=section.full_title, key=f"{kind}s")


def values_of_sites(section: Section) -> pd.DataFrame:
    """Return the last value of each site, mean over the seeds, by metric and line; shares are in percent."""
    rounds, tags = section.rounds, dict[str, tuple[str, str]]()
    for tag in rounds:
        if tag.startswith("personal/domain/"):
            tags[tag] = ("accuracy", tag.removeprefix("personal/domain/"))
        elif tag.startswith("domain/"):
            site, _, metric = tag.removeprefix("domain/").rpartition("/")
            tags[tag] = (metric, site)
    finals = rounds.groupby(["line", "seed"], sort=False)[list(tags)].last().groupby("line", sort=False).mean().T
    metrics, frames = {metric for metric, _ in tags.values()}, {}
    for metric in sorted(metrics, key=lambda metric: (metric != "accuracy", metric != "loss")):
        sites = {tag: site for tag, (of_tag, site) in tags.items() if of_tag == metric}
        frame = finals.loc[list(sites)].rename(index=sites).groupby(level=0, sort=False).last()
        percent = in_percent(metric, frame.to_numpy().ravel())
        frames[f"{metric} in %" if percent else metric] = (100.0 if percent else 1.0) * frame
    return pd.concat(frames, axis=1) if frames else pd.DataFrame()


def values_of_clients(section: Section) -> pd.DataFrame:
    """Return each client's last accuracies by ``PersonalAccuracy`` in %, in the run of the smallest seed, by model."""
    series = {}
    for (_, line), run in section.first_runs.items():
        (arrays, _), domains = measured(run, "personal.npz"), plan_of(run)[1].get("domains", [])
        names = []
        for k in arrays["clients"][-1] if "clients" in arrays else ():
            names.append(f"{int(k)} ({domains[int(k)]})" if 0 <= k < len(domains) else f"{k:g}")
        for number, (model, label) in enumerate(MODELS.items()):
            values = arrays[model][-1] if model in arrays else np.zeros(0)
            if values.shape == (len(names),) and np.isfinite(values).any():
                series[number, f"accuracy in %, {label}", line] = pd.Series(100 * values, names)
    return pd.DataFrame({key[1:]: series[key] for key in sorted(series, key=itemgetter(0))})


def examples_of(section: Section) -> dict[str, int]:
    """Return the training examples of each site, if all runs have one partition and each client is one site."""
    counts, names = plan_of(section.runs["run"].iloc[0])
    domains = names.get("domains", [])
    if section.runs["plan"].nunique() > 1 or counts is None or len(counts) != len(domains) or not all(domains):
        return {}
    return pd.Series(counts.sum(1), domains).groupby(level=0, sort=False).sum().to_dict()


# ------------------------------------------------------------------ configurations, runs and costs
def runs_table(section: Section) -> TextTable:
    """Return the table of the runs."""
    metric, rows = section.metric, []
    decimals = 2 if metric.percent else 4
    for row in section.runs.itertuples():
        values = (metric.unit * row.last, metric.unit * row.best)
        texts = [fixed(value, decimals) if value == value else NONE for value in values]
        state = f"{row.state}, {rounds_done(row.run)}"
        label = with_setting(row.line, row.setting)
        rows.append([label, row.seed, state, *texts, row.plan[:8] or NONE, row.run.name])
    caption = "Every run with its last and best value so far, finished or not."
    heads = ["last", "best", "partition", "folder"]
    return plain_table(caption, ["configuration", "seed", "state"], heads, rows, key="runs")


def config_table(section: Section) -> TextTable | None:
    """Return the keys in which the configurations differ; None if they do not differ."""
    labels = [with_setting(line, setting) for setting, line in section.first_runs.index]
    settings = [compact(run.settings) for run in section.first_runs]
    configs = pd.DataFrame(settings, labels, dtype=object)
    configs = configs[sorted(differing_keys(configs), key=lambda key: not is_of_method(key))].fillna(NONE)
    if not configs.shape[1]:
        return None
    # the longer side is the one with rows
    head, table = ("key", configs.T) if len(labels) < configs.shape[1] else ("configuration", configs)
    caption = "Keys in which the configs differ, without keys that cannot change a result."
    rows = [[name, *row] for name, row in zip(table.index, table.to_numpy(), strict=True)]
    return plain_table(caption, [head], list(table), rows, key="configs")


def cost_table(section: Section) -> TextTable | None:
    """Return the costs of the configurations; None without costs."""
    memory = [tag for tag in section.rounds if tag.startswith("memory/")]
    later = section.rounds[section.rounds["round"] > 0]
    later = later.rename(columns={f"time/{phase}": phase for phase in PHASES})
    phases = later.reindex(columns=[*OF_RUN, *PHASES]).groupby(OF_RUN).median().groupby(OF_GROUP).mean()
    finals = section.rounds.reindex(columns=[*OF_RUN, *BYTES, *memory])
    finals = finals.groupby(OF_RUN).last().groupby(OF_GROUP).mean()
    costs = section.runs.groupby(OF_GROUP, sort=False)[["seconds", "bytes"]].mean().join(phases).join(finals)
    heads = {
        **{phase: f"{phase}, s" for phase in PHASES},
        **{"seconds": "round, s", "bytes/down": "down, MB", "bytes/up": "up, MB", "bytes": "all rounds, MB"},
        **{tag: tag for tag in memory},
    }
    costs[[*BYTES, "bytes"]] /= 1e6
    texts = costs[list(heads)].map(three_digits).set_axis(list(heads.values()), axis=1)
    # the columns of a cost.csv, from the run of the smallest seed
    of_methods = pd.DataFrame([run.cost for run in section.first_runs], texts.index)
    numbers = of_methods.apply(pd.to_numeric, errors="coerce")
    texts = texts.join(numbers.map("{:.4g}".format).where(numbers.notna(), of_methods.fillna(NONE)))
    texts = texts.loc[:, (texts != NONE).any()]
    caption = "Cost of a round: median seconds of each phase without the first round, bytes of the last round. "
    caption += "Compare seconds only of runs on one otherwise idle machine."
    if any(run.run_dir is None for run in section.runs["run"]):
        caption += " For runs without a folder: phases of the last round."
    caption = " ".join([caption, *note_on_bytes(section)])
    rows = [[with_setting(line, setting), *row] for (setting, line), *row in texts.itertuples()]
    return plain_table(caption, ["configuration"], list(texts), rows, key="cost") if len(texts.columns) else None


def note_on_bytes(section: Section) -> list[str]:
    """Return the sentence on bytes that older cells leave out; none without such cells."""
    for run in section.runs["run"]:
        methods = str(run.config.get("method"))
        if run.run_dir is None and ("SCAFFOLD" in methods or "FedProto" in methods):
            return [OLDER_BYTES]
    return []


def environment_table(runs: Sequence[FitResult]) -> TextTable | None:
    """Return the machines and the software of the runs; None if unknown."""
    columns: dict[str, list[Any]] = {key: [] for key in ENVIRONMENT}
    environments = [run.environment for run in runs if run.environment]
    for environment in environments:
        for name in environment.get("versions") or {}:
            columns.setdefault(f"version of {name}", [])
    for environment in environments:
        versions = {f"version of {name}": text for name, text in (environment.get("versions") or {}).items()}
        for key, values in columns.items():
            values.append(versions.get(key, environment.get(key)))
    rows = []
    for key, values in columns.items():
        counts = Counter(map(environment_text, values))
        texts = [*counts]
        if len(counts) > 1:
            texts = [f"{text} ({count(number, 'run')})" for text, number in counts.most_common()]
        if set(counts) - {NONE}:
            rows.append([key, "; ".join(texts)])
    about = f"The machine and the software of {count(len(environments), 'run')}."
    return plain_table(about, ["key"], ["value"], rows) if environments else None


def environment_text(value: Any) -> str:
    """Return a value of an environment as a text; a dash for none."""
    if isinstance(value, list):
        value = ", ".join(map(str, value)) or "none"
    return NONE if value is None else printable(str(value))


def commands(runs: Sequence[FitResult]) -> list[str]:
    """Return the distinct command lines of the runs."""
    lines = dict[str, None]()
    for run in runs:
        words = run.environment.get("command")
        if isinstance(words, list) and words:
            lines[shlex.join(map(str, words))] = None
    return list(lines)


def runs_csv(sections: Sequence[Section]) -> str:
    """Return CSV with a line for each run: state, last and best value, cost, and the keys that differ."""
    heads = {
        **{"data": "data", "line": "method", "setting": "setting", "seed": "seed", "state": "state"},
        **{"rounds": "rounds", "metric": "metric", "last": "last", "best": "best", "seconds": "seconds_a_round"},
        **{"bytes": "bytes", "plan": "partition", "machine": "machine", "name": "run"},
    }
    frames = [] if sections else [pd.DataFrame(columns=list(heads.values()))]
    for section in sections:
        keys = section.configs[differing_keys(section.configs)].fillna("").add_prefix("config ")
        table = section.runs.assign(
            data=section.title,
            metric=section.metric.tag,
            machine=[run.machine for run in section.runs["run"]],
            name=[run.name for run in section.runs["run"]],
        )
        frames.append(table.join(keys, on=OF_GROUP)[[*heads, *keys]].rename(columns=heads))
    return pd.concat(frames).to_csv(index=False, lineterminator="\n")
