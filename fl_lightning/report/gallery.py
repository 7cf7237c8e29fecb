"""The figures of a section: metrics, partitions, and measurements of callbacks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from fl_lightning.plotting.drawing import MOST_LONG, Curve, Draw, curves, heat
from fl_lightning.plotting.plots import PLOTS
from fl_lightning.report.figures import Card
from fl_lightning.report.measurements import array_files, measured, plan_of, plot_of, up_to_common_round
from fl_lightning.report.sections import BYTES, CLOCK, OF_RUN, Section
from fl_lightning.storage.metric_format import in_percent

# settings with figures at most; further settings have tables alone
SETTINGS = 6
# drawings of one figure, and bands of one drawing
PANELS, MOST_BANDS = 6, 8
# metrics without curves
ELSEWHERE = re.compile(
    r"(time|placed|spectrum|bytes|memory|round|step|clients|batches|lr)(/.*)?|(rank|drift|nc)/(.*/)?local/.*"
    r"|personal/(.*/)?client/.*"
)
# families without a limit of panels
WHOLE = ("scores", "nc")
LEARNING = ("train/accuracy", "train/loss", "test/accuracy", "test/loss", "val/accuracy")
# families that come first, and their titles
FAMILIES = {
    "learning": "Training and test",
    "rank": "Ranks of classifier and representation",
    "nc": "Distance from neural collapse",
    "drift": "Drift of the clients",
}


def cards_of(section: Section, prefix: str = "") -> Iterator[Card]:
    """Yield the figures of a section.

    Args:
        section: the section.
        prefix: beginning of the figures' names in a report of several sections.
    """
    for part in section.parts[:SETTINGS]:
        for card in (*metric_cards(part), *partition_cards(part), *tag_cards(part), *measured_cards(part)):
            texts = filter(None, (prefix, part.setting, card.name))
            words = [re.sub(r"[^a-zA-Z0-9.]+", "-", text).strip("-") for text in texts]
            name = "-".join(words).lower()
            title = ", ".join(filter(None, [card.title, part.setting]))
            yield replace(card, name=name, title=title, setting=part.setting)


# ------------------------------------------------------------------ metrics
def points_of(rounds: pd.DataFrame, tag: str) -> pd.DataFrame:
    """Return the mean, the deviation (0 for one run) and the number of runs of a metric, by line and round."""
    points = rounds.groupby(["line", "round"])[tag].agg(["mean", "std", "count"])
    return points[points["count"] > 0].fillna({"std": 0.0}).reset_index()


def drawn(section: Section, points: pd.DataFrame, x: str, unit: float, **labels: str) -> Draw:
    """Return a drawing of curves, with the deviations as bands unless there are too many curves."""
    by_line, lines = dict(iter(points.dropna(subset=[x]).groupby("line"))), []
    for number, line in enumerate(section.lines):
        if line in by_line:
            mean, deviation, places = by_line[line][["mean", "std", x]].to_numpy(float).T
            band = (unit * (mean - deviation), unit * (mean + deviation)) if len(by_line) <= MOST_BANDS else None
            lines.append(Curve(number, unit * mean, line, places, band))
    return curves(lines, **labels)


def about_band(section: Section) -> str:
    """Return an explanation of the lines, if they are of several seeds."""
    lines = section.runs["line"]
    if lines.is_unique:
        return ""
    band = ", the band one standard deviation on either side" if lines.nunique() <= MOST_BANDS else ""
    return f"The line is the mean over the seeds{band}."


def metric_cards(section: Section) -> Iterator[Card]:
    """Yield the metric of the report against rounds, bytes, seconds and, with a clock, simulated seconds."""
    metric, rounds = section.metric, section.rounds
    if metric.tag not in rounds:
        return
    points = points_of(rounds, metric.tag)
    # the cost up to the end of each round, from the means of the runs that have it, so that it rises with the rounds
    costs = rounds.reindex(columns=["line", "round", "time/round"])
    costs["bytes"] = rounds.reindex(columns=BYTES).sum(axis=1, skipna=False) / 1e6
    spent = costs.groupby(["line", "round"]).mean().groupby("line").cumsum(skipna=False)
    points = points.join(spent.rename(columns={"time/round": "seconds"})[["bytes", "seconds"]], on=["line", "round"])
    labels = {"round": "round", "bytes": "MB sent down and up", "seconds": "seconds spent"}
    head = ["curve", "round", metric.tag, "deviation", "seeds", "MB", "seconds"]
    if CLOCK in rounds:
        simulated = rounds.groupby(["line", "round"])[CLOCK].mean()
        points, labels[CLOCK], head = points.join(simulated, on=["line", "round"]), "simulated seconds", [*head, CLOCK]
    drawings: dict[str, Draw] = {}
    for x, label in labels.items():
        if points[x].notna().any():
            name = {"round": "rounds", CLOCK: "simulated seconds"}.get(x, x)
            drawings[name] = drawn(section, points, x, metric.unit, xlabel=label, ylabel=metric.label)
    table = points.sort_values("line", key=lambda lines: lines.map(section.lines.index), kind="stable")
    table = table.set_axis(head, axis=1).astype(object).where(table.notna().to_numpy(), "")
    *names, final_name = drawings
    title = f"{metric.called} against {' and '.join(filter(None, [', '.join(names), final_name]))}"
    caption = about_band(section)
    if (points.groupby("line")["count"].nunique() > 1).any():
        caption += " Where some seeds have fewer rounds, the last part of a line is the mean over the others."
    caption = caption.strip()
    yield Card(metric.tag, title, caption, drawings, table, "Results")


def tag_cards(section: Section) -> Iterator[Card]:
    """Yield the other metrics against the rounds, grouped by the first part of their tags."""
    rounds, families = section.rounds, {family: list[str]() for family in FAMILIES}
    for tag in rounds.columns.drop([*OF_RUN, section.metric.tag], errors="ignore"):
        prefix = tag.split("/")[0]
        # sites that were measured once have a table instead of curves
        once = prefix == "domain" and (rounds.groupby(["line", "seed"])[tag].count() < 2).all()
        if not (ELSEWHERE.fullmatch(tag) or once):
            family = "learning" if tag in LEARNING else "terms" if prefix == "train" else prefix
            families.setdefault(family, []).append(tag)
    for family, of_family in families.items():
        tags = sorted(of_family, key=lambda tag: (tag not in LEARNING, tag.count("/"), tag))
        drawings, max_panels = {}, len(tags) if family in WHOLE else PANELS
        for tag in tags[:max_panels]:
            percent, label = in_percent(tag, rounds[tag]), section.names.get(tag, tag)
            label, unit = (f"{label} in %", 100.0) if percent else (label, 1.0)
            drawings[tag] = drawn(section, points_of(rounds, tag), "round", unit, xlabel="round", ylabel=label)
        if drawings:
            title = FAMILIES.get(family, "Terms of the loss" if family == "terms" else f"Metrics under {family}/")
            caption = about_band(section)
            if len(tags) > max_panels:
                caption += f" For {len(tags) - max_panels} more, see metrics.csv of the runs."
            yield Card(family, title, caption.strip(), drawings, heading=title)


# ------------------------------------------------------------------ who holds what
def partition_cards(section: Section) -> Iterator[Card]:
    """Yield the partition of the smallest seed."""
    with_plan = [run for run in section.runs["run"] if plan_of(run)[0] is not None]
    if not with_plan:
        return
    run = min(with_plan, key=lambda run: run.seed)
    counts, names = plan_of(run)
    assert counts is not None
    classes, sites = names.get("class_names", []), names.get("domains", [])
    # the names of sites replace the numbers of clients where each client is a site
    sited = len(sites) == len(set(sites)) == len(counts) <= MOST_LONG and all(sites)
    along = (classes if len(classes) == counts.shape[1] else None, sites if sited else None)
    labels: dict[str, Any] = {"xlabel": "site" if sited else "client", "ylabel": "class"}
    labels["title"] = f"partition {run.plan[:8]}, seed {run.seed}"
    caption = "Samples of each class at each client, on a logarithmic scale; empty fields have none."
    draw = heat(counts.T.astype(float), "samples", along, log=True, **labels)
    yield Card("partition", "Who holds what", caption, {"1": draw}, heading="Who holds what")


# ------------------------------------------------------------------ files of arrays
def measured_cards(section: Section) -> Iterator[Card]:
    """Yield the figures of all files of arrays that callbacks wrote into the folders of the runs."""
    files, order = {name for run in section.runs["run"] for name in array_files(run)}, list(PLOTS)
    for file in sorted(files, key=lambda name: (order.index(name) if name in PLOTS else len(order), name)):
        heading, plot = plot_of(file)
        runs: dict[str, list[dict[str, np.ndarray]]] = {line: [] for line in section.lines}
        for line, runs_of_line in section.runs.groupby("line")["run"]:
            runs[line] = up_to_common_round(list(filter(None, (measured(run, file)[0] for run in runs_of_line))))
            for arrays in runs[line]:
                arrays["class_names"] = np.array(plan_of(runs_of_line.iloc[0])[1].get("class_names", []))
        rounds = [int(arrays["rounds"][-1]) for seeds in runs.values() for arrays in seeds]
        for figure in plot(runs):
            if figure.drawings:
                low, high = min(rounds), max(rounds)
                when = f"round {low}" if low == high else f"rounds {low} to {high}"
                caption = f"Last measurement, {when}, mean over the seeds."
                if len(figure.drawings) > PANELS:
                    caption += f" The first {PANELS} of {len(figure.drawings)} are drawn."
                title = ": ".join(filter(None, [heading, figure.title]))
                name = f"{file.removesuffix('.npz')}-{figure.name.rpartition('/')[2]}"
                panels = enumerate(figure.drawings[:PANELS], 1)
                drawings = {str(number): draw for number, draw in panels}
                yield Card(name, title, caption, drawings, heading=heading)
