"""The tables of a report, as text tables for HTML, Markdown and LaTeX, and as CSV."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

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
    wanted = max_rounds(run.config)
    done = f"{run.rounds} of {wanted}" if wanted not in (None, run.rounds) else f"{run.rounds}"
    return f"{done} round{'s' * (done != '1')}{' so far' * (run.state == 'running')}"


# ------------------------------------------------------------------ results
def results_tables(section: Section) -> Iterator[TextTable]:
    """Yield the results of a section of one setting, and its differences to the baseline."""
    metric, notes, rows = section.metric, dict[str, str](), []
    shows = [show for show in section.comparisons if show != "fair"]
    for line, runs in section.runs.groupby("line", sort=False):
        done = runs["rounds"]
        spent = [
            str(len(runs)),
            str(done.min()) if done.min() == done.max() else f"{done.min()} to {done.max()}",
            three_digits(runs["seconds"].mean()),
            three_digits((runs["bytes"] / done.clip(lower=1)).mean() / 1e6),
        ]
        rows.append([line, *(entry_text(section.comparisons[show], (line,), notes) for show in shows), *spent])
    heads = ["method", f"final {metric.label}", f"best {metric.label}"]
    several = not section.runs["line"].is_unique
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
    said += note_on_bytes(section)
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


# ------------------------------------------------------------------ sites and clients
def parts_tables(section: Section) -> Iterator[TextTable]:
    """Yield a table of the sites and one of the clients of a section of one setting, each only if measured."""
    several, when = not section.runs["line"].is_unique, "at the last measurement"
    sites, clients = values_of_sites(section), values_of_clients(section)
    if len(sites):
        about = f"On the test data of each site, {when}{', mean over the seeds' * several}."
        yield parts_table(section, "site", about, sites, examples_of(section))
    if len(clients):
        about = f"On each client's own test data, {when}{', smallest seed' * several}."
        yield parts_table(section, "client", about, clients, {})


def parts_table(section: Section, kind: str, about: str, values: pd.DataFrame, examples: dict[str, int]) -> TextTable:
    """Return a table with a row for each site or client, and a column for each metric and method."""
    columns = [[str(examples.get(name, NONE)) for name in values.index]] if examples else []
    groups: dict[str, list[str]] = {EXAMPLES: []} if examples else {}
    for label, line in values:
        shown = partial(fixed, decimals=2) if " in %" in label else few_digits
        columns.append([shown(value) if value == value else NONE for value in values[label, line]])
        groups.setdefault(label, []).extend([line] * (section.runs["line"].nunique() > 1))
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
    last = rounds.groupby(["line", "seed"], sort=False)[list(tags)].last().groupby("line", sort=False).mean().T
    frames = {}
    for metric in sorted({metric for metric, _ in tags.values()}, key=lambda one: (one != "accuracy", one != "loss")):
        own = {tag: site for tag, (of, site) in tags.items() if of == metric}
        frame = last.loc[list(own)].rename(index=own).groupby(level=0, sort=False).last()
        percent = in_percent(metric, frame.to_numpy().ravel())
        frames[f"{metric} in %" if percent else metric] = (100.0 if percent else 1.0) * frame
    return pd.concat(frames, axis=1) if frames else pd.DataFrame()


def values_of_clients(section: Section) -> pd.DataFrame:
    """Return each client's last accuracies by ``PersonalAccuracy`` in %, in the run of the smallest seed, by model."""
    series = {}
    for (_, line), run in section.first_runs.items():
        (arrays, _), domains = measured(run, "personal.npz"), plan_of(run)[1].get("domains", [])
        clients = arrays["clients"][-1] if "clients" in arrays else np.zeros(0)
        names = [f"{int(k)} ({domains[int(k)]})" if 0 <= k < len(domains) else f"{k:g}" for k in clients]
        for at, (what, label) in enumerate(MODELS.items()):
            values = arrays[what][-1] if what in arrays else np.zeros(0)
            if values.shape == (len(names),) and np.isfinite(values).any():
                series[at, f"accuracy in %, {label}", line] = pd.Series(100 * values, names)
    return pd.DataFrame({key[1:]: series[key] for key in sorted(series, key=lambda key: key[0])})


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
    for one in section.runs.itertuples():
        values = (metric.unit * value for value in (one.last, one.best))
        shown = [fixed(value, 2 if metric.percent else 4) if value == value else NONE for value in values]
        state = f"{one.state}, {rounds_done(one.run)}"
        label = with_setting(one.line, one.setting)
        rows.append([label, one.seed, state, *shown, one.plan[:8] or NONE, one.run.name])
    caption = "Every run with its last and best value so far, finished or not."
    heads = ["last", "best", "partition", "folder"]
    return plain_table(caption, ["configuration", "seed", "state"], heads, rows, key="runs")


def config_table(section: Section) -> TextTable | None:
    """Return the keys in which the configurations differ; None if they do not differ."""
    labels = [with_setting(line, setting) for setting, line in section.first_runs.index]
    configs = pd.DataFrame([compact(run.settings) for run in section.first_runs], labels, dtype=object)
    configs = configs[sorted(differing_keys(configs), key=lambda key: not is_of_method(key))].fillna(NONE)
    # the longer side is the one with rows
    first, shown = ("key", configs.T) if len(labels) < configs.shape[1] else ("configuration", configs)
    caption = "Keys in which the configs differ, without keys that cannot change a result."
    rows = [[name, *row] for name, row in zip(shown.index, shown.to_numpy(), strict=True)]
    return plain_table(caption, [first], list(shown), rows, key="configs") if configs.shape[1] else None


def cost_table(section: Section) -> TextTable | None:
    """Return the costs of the configurations; None without costs."""
    memory = [tag for tag in section.rounds if tag.startswith("memory/")]
    later = section.rounds[section.rounds["round"] > 0].rename(columns={f"time/{phase}": phase for phase in PHASES})
    phases = later.reindex(columns=[*OF_RUN, *PHASES]).groupby(OF_RUN).median().groupby(OF_GROUP).mean()
    last = section.rounds.reindex(columns=[*OF_RUN, *BYTES, *memory]).groupby(OF_RUN).last().groupby(OF_GROUP).mean()
    known = section.runs.groupby(OF_GROUP, sort=False)[["seconds", "bytes"]].mean().join(phases).join(last)
    heads = {
        **{phase: f"{phase}, s" for phase in PHASES},
        **{"seconds": "round, s", "bytes/down": "down, MB", "bytes/up": "up, MB", "bytes": "all rounds, MB"},
        **{tag: tag for tag in memory},
    }
    known[[*BYTES, "bytes"]] /= 1e6
    texts = known[list(heads)].map(three_digits).set_axis(list(heads.values()), axis=1)
    # the columns of a cost.csv, from the run of the smallest seed
    costs = pd.DataFrame([run.cost for run in section.first_runs], texts.index)
    numbers = costs.apply(pd.to_numeric, errors="coerce")
    texts = texts.join(numbers.map("{:.4g}".format).where(numbers.notna(), costs.fillna(NONE)))
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
    stored = [str(run.config.get("method")) for run in section.runs["run"] if run.run_dir is None]
    return [OLDER_BYTES] * any(name in methods for methods in stored for name in ("SCAFFOLD", "FedProto"))


def environment_table(runs: Sequence[FitResult]) -> TextTable | None:
    """Return the machines and the software of the runs; None if unknown."""
    known = [run.environment for run in runs if run.environment]
    flat = [
        {**one, **{f"version of {key}": text for key, text in (one.get("versions") or {}).items()}} for one in known
    ]
    lines = []
    for key in dict.fromkeys([*ENVIRONMENT, *(key for one in flat for key in one if key.startswith("version of "))]):
        values = [one.get(key) for one in flat]
        texts = [", ".join(map(str, value)) or "none" if isinstance(value, list) else value for value in values]
        counts = Counter(NONE if text is None else printable(str(text)) for text in texts)
        if set(counts) - {NONE}:
            of = [f"{value} ({count(n, 'run')})" if len(counts) > 1 else value for value, n in counts.most_common()]
            lines.append([key, "; ".join(of)])
    about = f"The machine and the software of {count(len(known), 'run')}."
    return plain_table(about, ["key"], ["value"], lines) if known else None


def commands(runs: Sequence[FitResult]) -> list[str]:
    """Return the distinct command lines of the runs."""
    known = [run.environment.get("command") for run in runs]
    return list(dict.fromkeys(shlex.join(map(str, line)) for line in known if isinstance(line, list) and line))


def runs_csv(sections: Sequence[Section]) -> str:
    """Return CSV with a line for each run: state, last and best value, cost, and the keys that differ."""
    heads = {
        **{"data": "data", "line": "method", "setting": "setting", "seed": "seed", "state": "state"},
        **{"rounds": "rounds", "metric": "metric", "last": "last", "best": "best", "seconds": "seconds_a_round"},
        **{"bytes": "bytes", "plan": "partition", "machine": "machine", "name": "run"},
    }
    frames = [pd.DataFrame(columns=list(heads.values()))] * (not sections)
    for section in sections:
        keys = section.configs[differing_keys(section.configs)].fillna("").add_prefix("config ")
        named = {key: [getattr(run, key) for run in section.runs["run"]] for key in ("machine", "name")}
        table = section.runs.assign(data=section.title, metric=section.metric.tag, **named).join(keys, on=OF_GROUP)
        frames.append(table[[*heads, *keys]].rename(columns=heads))
    return pd.concat(frames).to_csv(index=False, lineterminator="\n")
