"""The accuracy of each site and each client, as tables."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from fl_lightning.bench.table_rendering import NONE, TextTable, plain_table
from fl_lightning.plotting.values import MODELS
from fl_lightning.report.measurements import measured, plan_of
from fl_lightning.report.sections import Section
from fl_lightning.storage.metric_format import few_digits, in_percent

EXAMPLES = "training examples"


def sites_and_clients(section: Section) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """Yield the numbers of the sites, and of the clients, of a section of one setting.

    Yields:
        ``site`` or ``client``; the origin of the numbers; and a frame with a row for each of them and columns of the
        label of a metric and a line, in which shares are in percent.
    """
    several = len(section.runs) > len(set(section.found["line"]))
    when = "at the last measurement"
    sites = values_of_sites(section)
    if len(sites):
        yield "site", f"On the test data of each site, {when}{', mean over the seeds' * several}.", sites
    clients = values_of_clients(section)
    if len(clients):
        yield "client", f"On each client's own test data, {when}{', smallest seed' * several}.", clients


def values_of_sites(section: Section) -> pd.DataFrame:
    """Return the last value of each metric by domain, mean over the seeds."""
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
    """Return each client's last accuracies by ``PersonalAccuracy``, in the run of the smallest seed."""
    series = {}
    for line, runs in section.found.groupby("line", sort=False)["run"]:
        (arrays, _), domains = measured(runs.iloc[0], "personal.npz"), plan_of(runs.iloc[0])[1].get("domains", [])
        clients = arrays["clients"][-1] if "clients" in arrays else np.zeros(0)
        names = [f"{int(k)} ({domains[int(k)]})" if 0 <= k < len(domains) else f"{k:g}" for k in clients]
        for what, label in MODELS.items():
            values = arrays[what][-1] if what in arrays else np.zeros(0)
            if values.shape == (len(names),) and np.isfinite(values).any():
                series[f"accuracy in %, {label}", line] = pd.Series(100 * values, names)
    models = [f"accuracy in %, {label}" for label in MODELS.values()]
    return pd.DataFrame({column: series[column] for column in sorted(series, key=lambda one: models.index(one[0]))})


def examples_of(section: Section) -> dict[str, int]:
    """Return the training examples of each site, if all runs have one partition and each client is one site."""
    counts, names = plan_of(section.runs[0])
    domains = names.get("domains", [])
    equal = len({run.plan for run in section.runs}) == 1
    if not equal or counts is None or len(counts) != len(domains) or not all(domains):
        return {}
    return pd.Series(counts.sum(1), domains).groupby(level=0, sort=False).sum().to_dict()


def parts_tables(section: Section) -> Iterator[TextTable]:
    """Yield a table of the sites and one of the clients, with a column for each metric and method."""
    for kind, caption, frame in sites_and_clients(section):
        lines = set(section.found["line"])
        examples = examples_of(section) if kind == "site" else {}
        columns = {(EXAMPLES, ""): [str(examples.get(name, NONE)) for name in frame.index]} if examples else {}
        for label, line in frame:
            shown = "{:.2f}".format if " in %" in label else few_digits
            columns[label, line] = [shown(value) if value == value else NONE for value in frame[label, line]]
        groups: dict[str, list[str]] = {}
        for label, line in columns:
            groups.setdefault(label, []).extend([line] * (line != "" and len(lines) > 1))
        rows = zip(frame.index, *columns.values(), strict=True)
        yield plain_table(caption, [kind], groups.items(), rows, title=section.full_title, key=f"{kind}s")
