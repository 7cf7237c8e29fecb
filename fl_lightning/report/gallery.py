"""The figures of a section: metrics, partitions, measurements of callbacks, and costs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd

from fl_lightning.errors import printable
from fl_lightning.plotting.drawing import MOST_LONG, Curve, Draw, curves, heat, stacked
from fl_lightning.plotting.figures import Plot, Runs
from fl_lightning.plotting.plots import PLOTS, by_shape
from fl_lightning.report.figures import Card, number_drawings
from fl_lightning.report.reading import Measured, array_files, measured, plan_of
from fl_lightning.report.runs import Configuration
from fl_lightning.report.sections import Section, in_percent
from fl_lightning.report.sites import parts_cards
from fl_lightning.results import FitResult

# settings with figures at most; further settings have tables alone
SETTINGS = 6
# drawings of one figure, and bands of one drawing
PANELS, MOST_BANDS = 6, 8
BYTES, SECONDS = ["bytes/down", "bytes/up"], ["time/round"]
UNITS = {"bytes": {"GB": 1e9, "MB": 1e6, "kB": 1e3}, "seconds": {"hours": 3600.0, "minutes": 60.0, "seconds": 1.0}}
# families of metrics without curves
ELSEWHERE = ("time", "placed", "spectrum", "bytes", "memory", "round", "step", "clients", "batches", "lr")
LEARNING = ("train/accuracy", "train/loss", "test/accuracy", "test/loss", "val/accuracy")
# families that come first, and their titles
FAMILIES = {
    "learning": "Training and test",
    "rank": "Ranks of classifier and representation",
    "drift": "Drift of the clients",
}
ROUND_PHASES = ("train", "evaluate", "server", "log")
VISITS = ("load", "data", "forward_backward", "correct", "step", "collect", "wait")


def cards_of(section: Section, prefix: str = "") -> Iterator[tuple[str, str, Card]]:
    """Yield the figures of a section, each with its setting and its heading.

    Args:
        section: the section.
        prefix: beginning of the figures' names in a report of several sections.
    """
    for makers in ((metric_cards, parts_cards), (partition_cards, tag_cards, measured_cards, cost_cards)):
        for setting in section.settings[:SETTINGS]:
            for heading, card in (pair for make in makers for pair in make(section, setting)):
                words = filter(None, (prefix, setting, card.name))
                name = "-".join(re.sub(r"[^a-zA-Z0-9.]+", "-", part).strip("-") for part in words).lower()
                title = f"{card.title}, {setting}" if setting else card.title
                yield setting, heading, replace(card, name=name, title=title)


# ------------------------------------------------------------------ metrics
def points_of(rounds: pd.DataFrame, tag: str) -> pd.DataFrame:
    """Return the mean, the deviation (0 for one run) and the number of runs of a metric, by line and round."""
    points = rounds.groupby(["line", "round"])[tag].agg(["mean", "std", "count"])
    return points[points["count"] > 0].fillna({"std": 0.0}).reset_index()


def spent(rounds: pd.DataFrame, tags: Sequence[str]) -> pd.Series:
    """Return the mean cost up to the end of each round, by line and round; nan from the first round without a cost.

    The mean of each round is over the runs that have it, so the sum also rises where some runs have fewer rounds.
    """
    known = rounds.reindex(columns=["line", "round", *tags])
    of_rounds = known[tags].sum(axis=1, skipna=False).groupby([known["line"], known["round"]]).mean()
    return of_rounds.groupby("line").cumsum(skipna=False)


def drawn(section: Section, points: pd.DataFrame, x: str, unit: float, **labels: str) -> Draw:
    """Return a drawing of curves, with the deviations as bands unless there are too many curves."""
    by_line, lines = dict(iter(points.dropna(subset=[x]).groupby("line"))), []
    for number, line in enumerate(section.lines):
        if line in by_line:
            mean, deviation, places = (by_line[line][key].to_numpy(float) for key in ("mean", "std", x))
            band = (unit * (mean - deviation), unit * (mean + deviation)) if len(by_line) <= MOST_BANDS else None
            lines.append(Curve(number, unit * mean, line, places, band))
    return curves(lines, **labels)


def about_band(groups: Sequence[Configuration]) -> str:
    """Return an explanation of the bands, if there are any."""
    if all(len(group.runs) == 1 for group in groups):
        return ""
    if len(groups) > MOST_BANDS:
        return "The lines are means over the seeds; deviations are not drawn for this number of lines."
    return "The line is the mean over the seeds, the band one standard deviation on either side."


def metric_cards(section: Section, setting: str) -> Iterator[tuple[str, Card]]:
    """Yield the metric of the report against rounds, bytes and seconds."""
    metric, rounds = section.metric, section.rounds_at(setting)
    if metric.tag not in rounds:
        return
    points = points_of(rounds, metric.tag)
    costs = {"bytes": spent(rounds, BYTES), "seconds": spent(rounds, SECONDS)}
    points = points.join(pd.DataFrame(costs), on=["line", "round"])
    drawings = {"rounds": drawn(section, points, "round", metric.unit, xlabel="round", ylabel=metric.label)}
    for name, units in UNITS.items():
        if points[name].notna().any():
            # the largest unit in which the greatest value is at least 1
            unit = next((unit for unit, size in units.items() if points[name].max() >= size), list(units)[-1])
            label = f"{unit} sent down and up" if name == "bytes" else f"{unit} spent"
            scaled = points.assign(**{name: points[name] / units[unit]})
            drawings[name] = drawn(section, scaled, name, metric.unit, xlabel=label, ylabel=metric.label)
    head = ["curve", "round", metric.tag, "deviation", "seeds", "bytes", "seconds"]
    points["place"] = points["line"].map(section.lines.index)
    table = points.sort_values(["place", "round"]).drop(columns="place").set_axis(head, axis=1)
    table = table.astype(object).where(table.notna(), "")
    *first, last = drawings
    title = f"{metric.called} against {' and '.join(filter(None, [', '.join(first), last]))}"
    fewer = "Where some seeds have fewer rounds, the last part of a line is the mean over the others."
    caption = f"{about_band(section.at(setting))} {fewer * bool((points.groupby('line')['count'].nunique() > 1).any())}"
    heading = "Accuracy" if metric.tag.endswith("accuracy") else "Metric"
    yield heading, Card(metric.tag, title, caption.strip(), drawings, table)


def tag_cards(section: Section, setting: str) -> Iterator[tuple[str, Card]]:
    """Yield the other metrics against the rounds, grouped by the first part of their tags."""
    groups, rounds = section.at(setting), section.rounds_at(setting)
    families: dict[str, list[str]] = {family: [] for family in FAMILIES}
    for tag in rounds.columns[4:]:
        first = tag.split("/")[0]
        family = "learning" if tag in LEARNING else "terms" if first == "train" else first
        of_a_client = family in FAMILIES and "/local/" in tag
        # sites that were measured once have bars instead of curves
        once = first == "domain" and (rounds.groupby(["line", "seed"])[tag].count() < 2).all()
        if tag != section.metric.tag and first not in ELSEWHERE and not (of_a_client or once):
            families.setdefault(family, []).append(tag)
    for family, found in families.items():
        tags = sorted(found, key=lambda tag: (tag not in LEARNING, tag.count("/"), tag))
        drawings, most = {}, len(tags) if family == "scores" else PANELS
        for tag in tags[:most]:
            percent = in_percent(tag, rounds[tag])
            label = section.names.get(tag, tag) + " in %" * percent
            unit = 100.0 if percent else 1.0
            drawings[tag] = drawn(section, points_of(rounds, tag), "round", unit, xlabel="round", ylabel=label)
        if drawings:
            title = FAMILIES.get(family, "Terms of the loss" if family == "terms" else f"Metrics under {family}/")
            left = f" For {len(tags) - most} more, see metrics.csv of the runs." if len(tags) > most else ""
            yield title, Card(family, title, f"{about_band(groups)}{left}".strip(), drawings)


# ------------------------------------------------------------------ who holds what
def partition_cards(section: Section, setting: str) -> Iterator[tuple[str, Card]]:
    """Yield the partition of the smallest seed, and each different partition of another method."""
    groups = [group for group in section.at(setting) if plan_of(group.first)[0] is not None]
    partitions: dict[str, Configuration] = {}
    for group in groups:
        if group.first.seed == min(other.first.seed for other in groups):
            partitions.setdefault(group.first.plan, group)
    drawings: dict[str, Draw] = {}
    for digest, group in list(partitions.items())[:PANELS]:
        counts, names = plan_of(group.first)
        assert counts is not None
        of = f" of {group.line}" if len(partitions) > 1 else ""
        classes, sites = names.get("class_names", []), names.get("domains", [])
        # the names of sites replace the numbers of clients where each client is a site
        named = len(sites) == len(set(sites)) == len(counts) <= MOST_LONG and all(sites)
        along = (classes if len(classes) == counts.shape[1] else None, sites if named else None)
        labels: dict[str, Any] = {"xlabel": "site" if named else "client", "ylabel": "class"}
        title = f"partition {digest[:8]}{of}, seed {group.first.seed}"
        drawings[digest[:8]] = heat(counts.T.astype(float), "samples", along, log=True, title=title, **labels)
    if drawings:
        caption = "Samples of each class at each client, on a logarithmic scale; empty fields have none."
        yield "Who holds what", Card("partition", "Who holds what", caption, drawings)


# ------------------------------------------------------------------ files of arrays
def measured_cards(section: Section, setting: str) -> Iterator[tuple[str, Card]]:
    """Yield the figures of all files of arrays that callbacks wrote into the folders of the runs."""
    groups = section.at(setting)
    files = {name for group in groups for run in group.runs.values() for name in array_files(run)}
    known = list(PLOTS)
    for file in sorted(files, key=lambda name: (known.index(name) if name in PLOTS else len(known), name)):
        heading, plot = plot_of(file)
        runs: dict[str, list[dict[str, np.ndarray]]] = {line: [] for line in section.lines}
        rounds = set[int]()
        for group in groups:
            seeds = [run for run in group.runs.values() if not not_drawn(run, file)]
            runs[group.line] = up_to_common_round([measured(run, file) for run in seeds])
            for arrays in runs[group.line]:
                arrays["class_names"] = np.array(plan_of(group.first)[1].get("class_names", []))
                rounds |= set(arrays["rounds"][-1:].tolist())
        for one in plot(runs):
            if one.drawings:
                low, high = min(rounds), max(rounds)
                caption = f"Last measurement, {f'round {low}' if low == high else f'rounds {low} to {high}'}, "
                caption += "mean over the seeds."
                more = f" The first {PANELS} of {len(one.drawings)} are drawn." * (len(one.drawings) > PANELS)
                title = ": ".join(filter(None, [heading, one.title]))
                name = f"{file.removesuffix('.npz')}-{one.name.rpartition('/')[2]}"
                yield heading, Card(name, title, f"{caption}{more}", number_drawings(one.drawings[:PANELS]))


def plot_of(file: str) -> tuple[str, Callable[[Runs], Iterator[Plot]]]:
    """Return the heading and the plot function for a file."""
    return PLOTS.get(file, (f"Measured in {printable(file)}", by_shape))


@lru_cache(maxsize=1000)
def not_drawn(run: FitResult, file: str) -> list[str]:
    """Return the reasons why arrays in a file of a run are not drawn."""
    arrays = measured(run, file)
    reasons = [f"{printable(file)}: {problem}" for problem in arrays.problems]
    try:
        list(plot_of(file)[1]({"run": up_to_common_round([arrays])}))
    except (ValueError, IndexError, KeyError, TypeError) as error:
        reasons.append(f"{printable(file)} is not drawn: {error}")
    return reasons


def up_to_common_round(seeds: Sequence[Measured]) -> list[dict[str, np.ndarray]]:
    """Return the arrays of each seed up to the last round that all seeds measured; empty without such a round."""
    made = [{name: np.array(texts) for name, texts in arrays.names.items()} for arrays in seeds]
    for name in {name for arrays in seeds for name in arrays.values}:
        having = [(place, arrays) for place, arrays in enumerate(seeds) if name in arrays.values]
        common = set.intersection(*(set(arrays.rounds[name].tolist()) for _, arrays in having))
        for place, arrays in having if common else ():
            at = arrays.rounds[name].tolist().index(max(common))
            made[place][name] = arrays.values[name][: at + 1]
            made[place]["rounds"] = arrays.rounds[name][: at + 1]
    return [arrays for arrays in made if "rounds" in arrays]


# ------------------------------------------------------------------ cost
def cost_cards(section: Section, setting: str) -> Iterator[tuple[str, Card]]:
    """Yield the seconds of a round by phase."""
    means = phases_of(section.rounds_at(setting)).droplevel("setting")
    lines = [line for line in section.lines if line in means.index]
    parts = [(phase, means.loc[lines, phase].fillna(0.0).to_numpy()) for phase in (*VISITS, *ROUND_PHASES[1:])]
    if lines:
        bars = stacked([(phase, lengths) for phase, lengths in parts if lengths.any()], lines, "seconds a round")
        caption = "Median seconds of a round by phase without the first round, mean over seeds and workers. "
        caption += "For runs without a folder: seconds of the last round."
        yield "Cost", Card("seconds", "Seconds of a round", caption, number_drawings([bars]))


def phases_of(rounds: pd.DataFrame) -> pd.DataFrame:
    """Return the seconds of a round by phase: medians of each run without its first round, averaged over the runs."""
    phases = [*VISITS, *ROUND_PHASES]
    later = rounds[rounds["round"] > 0].rename(columns={f"time/{phase}": phase for phase in phases})
    known = later.reindex(columns=["setting", "line", "seed", *phases])
    return known.groupby(["setting", "line", "seed"]).median().groupby(["setting", "line"]).mean().dropna(how="all")
