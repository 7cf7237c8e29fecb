"""The tables of a report, as text tables for HTML, Markdown and LaTeX, and as CSV."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pandas as pd

from fl_lightning.bench.comparison import NOT_COMPARED, Comparison
from fl_lightning.bench.config_fragments import is_of_method
from fl_lightning.bench.table import differences_table, differs, footnotes, ours, text_tables
from fl_lightning.bench.table_rendering import NONE, STAR, StyledText, TextTable, plain_table
from fl_lightning.errors import count, printable
from fl_lightning.report.cautions import rounds_done
from fl_lightning.report.configs import ABSENT, compact, differing_between
from fl_lightning.report.runs import with_setting
from fl_lightning.report.sections import BYTES, OF_GROUP, OF_RUN, Section
from fl_lightning.results import FitResult

ENVIRONMENT = ("processor", "cores", "gpus", "device", "workers", "threads", "platform", "python", "git_revision")


PHASES = ["train", "evaluate", "server", "log"]


def results_tables(section: Section) -> Iterator[TextTable]:
    """Yield the results of a section of one setting, and its differences to the baseline."""
    metric, notes, rows = section.metric, dict[str, str](), []
    shows = [show for show in section.comparisons if show != "fair"]
    for line, runs in section.by_run.groupby("line", sort=False):
        done = runs["rounds"]
        spent = [
            str(len(runs)),
            str(done.min()) if done.min() == done.max() else f"{done.min()} to {done.max()}",
            three_digits(runs["seconds"].mean()),
            three_digits((runs["bytes"] / done.clip(lower=1)).mean() / 1e6),
        ]
        rows.append([line, *(entry_text(section.comparisons[show], (line,), notes) for show in shows), *spent])
    heads = ["method", f"final {metric.label}", f"best {metric.label}"]
    several = not section.found["line"].is_unique
    said = ["Mean ± standard deviation over the seeds of finished runs." if several else "Values of finished runs."]
    texts = [text for row in rows for text in row if isinstance(text, StyledText)]
    said += ["Bold: best value."] * any(text.bold for text in texts)
    starred = any(STAR in text.marks for text in texts)
    said += [f"Star: the interval of the difference to {section.baseline} excludes 0."] * starred
    if metric.target is not None:
        heads.append(f"rounds to {metric.unit * metric.target:g}{' %' * metric.percent}")
        said.append("A run that misses the target counts with all its rounds, and > marks a lower bound.")
    heads += ["seeds", "rounds", "seconds a round", "MB a round"]
    known = [at for at in range(len(heads)) if any(str(row[at]) != NONE for row in rows)]
    kept = [[row[at] for at in known] for row in rows]
    shown = [heads[at] for at in known[1:]]
    yield plain_table(" ".join(said), heads[:1], shown, kept, notes=notes, title=section.full_title, key="results")
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
    text = ours(entry, comparison, footnotes([note for note in entry.notes if NOT_COMPARED not in note], notes))
    # a cell that waits is a stopped run in a report
    return replace(text, text=text.text.replace("waiting", "stopped"))


def three_digits(value: float) -> str:
    """Return a number with three digits, and a dash for nan."""
    return f"{value:.3g}" if value == value else NONE


def runs_table(section: Section) -> TextTable:
    """Return the table of the runs."""
    metric, rows = section.metric, []
    for told, run in zip(section.by_run.to_dict("records"), section.runs, strict=True):
        values = (metric.unit * told[key] for key in ("last", "best"))
        shown = [f"{value:.{2 if metric.percent else 4}f}" if value == value else NONE for value in values]
        state = f"{run.state}, {rounds_done(run)}"
        label = with_setting(told["line"], told["setting"])
        rows.append([label, run.seed, state, *shown, run.plan[:8] or NONE, run.name])
    caption = "Every run with its last and best value so far, finished or not."
    heads = ["last", "best", "partition", "folder"]
    return plain_table(caption, ["configuration", "seed", "state"], heads, rows, key="runs")


def config_table(section: Section) -> TextTable | None:
    """Return the keys in which the configurations differ; None if they do not differ."""
    configs = {label: compact(config) for label, config in section.configs.items()}
    keys = sorted(differing_between(list(configs.values())), key=lambda key: not is_of_method(key))
    caption = "Keys in which the configs differ, without keys that cannot change a result."
    rows = [[config.get(key, ABSENT) for key in keys] for config in configs.values()]
    first, names, heads = "configuration", list(configs), keys
    if len(configs) < len(keys):
        rows = [list(column) for column in zip(*rows, strict=True)]
        first, names, heads = "key", keys, names
    rows = [[name, *row] for name, row in zip(names, rows, strict=True)]
    return plain_table(caption, [first], heads, rows, key="configs") if keys else None


def cost_table(section: Section) -> TextTable | None:
    """Return the costs of the configurations; None without costs."""
    memory = [tag for tag in section.rounds if tag.startswith("memory/")]
    later = section.rounds[section.rounds["round"] > 0].rename(columns={f"time/{phase}": phase for phase in PHASES})
    phases = later.reindex(columns=[*OF_RUN, *PHASES]).groupby(OF_RUN).median().groupby(OF_GROUP).mean()
    last = section.rounds.reindex(columns=[*OF_RUN, *BYTES, *memory]).groupby(OF_RUN).last().groupby(OF_GROUP).mean()
    runs = section.by_run.groupby(OF_GROUP, sort=False)[["seconds", "bytes"]].mean()
    known = runs.join(phases).join(last)
    heads = {
        **{phase: f"{phase}, s" for phase in PHASES},
        **{"seconds": "round, s", "bytes/down": "down, MB", "bytes/up": "up, MB", "bytes": "all rounds, MB"},
        **{tag: tag for tag in memory},
    }
    known[[*BYTES, "bytes"]] /= 1e6
    texts = known[list(heads)].map(three_digits).set_axis(list(heads.values()), axis=1)
    # the columns of a cost.csv, from the run of the smallest seed
    costs = pd.DataFrame([runs[0].cost for _, runs in section.groups()], texts.index)
    numbers = costs.apply(pd.to_numeric, errors="coerce")
    texts = texts.join(numbers.map("{:.4g}".format).where(numbers.notna(), costs.fillna(NONE)))
    texts = texts.loc[:, (texts != NONE).any()]
    caption = "Cost of a round: median seconds of each phase without the first round, bytes of the last round. "
    caption += "Compare seconds only of runs on one otherwise idle machine."
    if any(run.run_dir is None for run in section.runs):
        caption += " For runs without a folder: phases of the last round."
    rows = [[with_setting(line, setting), *row] for (setting, line), *row in texts.itertuples()]
    return plain_table(caption, ["configuration"], list(texts), rows, key="cost") if len(texts.columns) else None


def environment_table(runs: Sequence[FitResult]) -> TextTable | None:
    """Return the machines and the software of the runs; None if unknown."""
    known = [run.environment for run in runs if run.environment]
    rows: dict[str, list[object]] = {key: [one.get(key) for one in known] for key in ENVIRONMENT}
    for name in dict.fromkeys(name for one in known for name in one.get("versions") or {}):
        rows[f"version of {name}"] = [(one.get("versions") or {}).get(name) for one in known]
    lines = []
    for key, values in rows.items():
        texts = [", ".join(map(str, value)) or "none" if isinstance(value, list) else value for value in values]
        counts = Counter(NONE if text is None else printable(str(text)) for text in texts)
        if set(counts) - {NONE}:
            of = [f"{value} ({count(n, 'run')})" if len(counts) > 1 else value for value, n in counts.most_common()]
            lines.append([key, "; ".join(of)])
    about = f"The machine and the software of {count(len(known), 'run')}."
    return plain_table(about, ["key"], ["value"], lines) if known else None


def commands(runs: Sequence[FitResult]) -> list[tuple[str, int]]:
    """Return the distinct command lines of the runs, each with its number of runs."""
    known = [run.environment.get("command") for run in runs]
    lines = Counter(shlex.join(map(str, line)) for line in known if isinstance(line, list) and line)
    return list(lines.items())


def runs_csv(sections: Sequence[Section]) -> str:
    """Return CSV with a line for each run: state, last and best value, cost, and the keys that differ."""
    heads = {
        **{"data": "data", "line": "method", "setting": "setting", "seed": "seed", "state": "state"},
        **{"rounds": "rounds", "metric": "metric", "last": "last", "best": "best", "seconds": "seconds_a_round"},
        **{"bytes": "bytes", "plan": "partition", "machine": "machine", "name": "run"},
    }
    frames = [pd.DataFrame(columns=list(heads.values()))] * (not sections)
    for section in sections:
        table = section.by_run.assign(data=section.title)[list(heads)].set_axis(list(heads.values()), axis=1)
        for key in differing_between(list(section.configs.values())):
            labels = map(with_setting, table["method"], table["setting"])
            table[f"config {key}"] = [section.configs[label].get(key, "") for label in labels]
        frames.append(table)
    return pd.concat(frames).to_csv(index=False, lineterminator="\n")
