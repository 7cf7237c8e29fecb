"""The figures of a section: its metrics, who holds what, what callbacks have measured, and costs."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fl_lightning.errors import printable
from fl_lightning.plotting.drawing import MOST_LONG, curves, heat, numbered_line, stacked
from fl_lightning.plotting.figures import Plot, Runs
from fl_lightning.plotting.plots import PLOTS, by_shape
from fl_lightning.report.figures import Card, Drawing
from fl_lightning.report.run import INFINITE, PLAN, Arrays, ReportedRun
from fl_lightning.report.sections import Group, Section, in_percent
from fl_lightning.report.sites import parts_cards

# settings that have figures; the others are in the tables
SETTINGS = 6
# drawings of one figure, and bands of one drawing
PANELS, MOST_BANDS = 6, 8
BYTES, SECONDS = ("bytes/down", "bytes/up"), ("time/round",)
SIZES = {"GB": 1e9, "MB": 1e6, "kB": 1e3}
TIMES = {"hours": 3600.0, "minutes": 60.0, "seconds": 1.0}
# drawn elsewhere, or of no interest for the model
ELSEWHERE = ("time", "placed", "spectrum", "bytes", "memory", "round", "step", "clients", "batches", "lr")
LEARNING = ("train/accuracy", "train/loss", "test/accuracy", "test/loss", "val/accuracy")
# families of metrics that come first
FAMILIES = {
    "learning": "Training and test",
    "rank": "Ranks of classifier and representation",
    "drift": "Drift of the clients",
}
ABOUT_TAG = {
    "drift/client": "mean norm of the clients' changes",
    "drift/global": "norm of the global change",
    "rank/classifier/effective": "effective rank of the classifier",
    "rank/representation/effective": "effective rank of the representation",
    "rank/classifier/stable": "stable rank of the classifier",
    "rank/representation/stable": "stable rank of the representation",
}
FEWER = "Where some seeds have fewer rounds than others, the last part of a line is the mean of those left."
ROUND_PHASES = ("train", "evaluate", "server", "log")
VISITS = ("load", "data", "forward_backward", "correct", "step", "collect", "wait")


@dataclass(frozen=True)
class Curve:
    """A metric of a configuration by round.

    Args:
        rounds: rounds in which any of the runs has it ``(R,)``.
        mean: its mean over the runs that have it ``(R,)``.
        deviation: its standard deviation, with n - 1 in the denominator; 0 where one run has it ``(R,)``.
        n: number of runs that have it ``(R,)``.
    """

    rounds: np.ndarray
    mean: np.ndarray
    deviation: np.ndarray
    n: np.ndarray


def cards_of(section: Section, prefix: str = "") -> Iterator[tuple[str, str, Card]]:
    """Yield the figures of a section, each with its setting and its heading.

    Args:
        section: the section.
        prefix: beginning of the names of the figures, where a report has several sections.
    """
    for makers in ((metric_cards, parts_cards), (partition_cards, tag_cards, measured_cards, cost_cards)):
        for setting in section.settings[:SETTINGS]:
            for heading, card in (pair for make in makers for pair in make(section, setting)):
                words = filter(None, (prefix, setting, card.name))
                name = "-".join(re.sub(r"[^a-zA-Z0-9.]+", "-", part).strip("-") for part in words).lower()
                title = f"{card.title}, {setting}" if setting else card.title
                yield setting, heading, replace(card, name=name, title=title)


# ------------------------------------------------------------------ metrics
def averaged(values: Iterable[Mapping[int, float]]) -> Curve | None:
    """Return the mean of values by round, of those whose square is finite; None without one."""
    by_round: dict[int, list[float]] = defaultdict(list)
    for of_run in values:
        for round_, value in of_run.items():
            if abs(value) < INFINITE:
                by_round[round_].append(value)
    columns = [
        (round_, math.fsum(some) / len(some), np.std(some, ddof=1) if len(some) > 1 else 0.0, len(some))
        for round_, some in sorted(by_round.items())
    ]
    return Curve(*map(np.array, zip(*columns, strict=True))) if columns else None


def costs(run: ReportedRun, tags: Sequence[str]) -> dict[int, float]:
    """Return the sum of some metrics by round; nothing where a round lacks one of them."""
    known = all(tag in row for row in run.rows for tag in tags)
    return {int(row["round"]): sum(row[tag] for tag in tags) for row in run.rows} if known else {}


def spent(group: Group, tags: Sequence[str], rounds: np.ndarray) -> np.ndarray | None:
    """Return the mean cost of a group up to the end of each round; None where a round has no cost.

    It adds up the mean of each round over the runs that have it, and so rises where some runs have fewer rounds, too.
    """
    mean = averaged(costs(run, tags) for run in group.runs.values())
    if mean is None or not np.isin(rounds, mean.rounds).all():
        return None
    return np.cumsum(mean.mean)[np.searchsorted(mean.rounds, rounds)]


def in_largest_unit(
    amounts: Sequence[np.ndarray | None], units: Mapping[str, float], what: str
) -> tuple[str, list[np.ndarray | None]]:
    """Return the label of an axis, and amounts in the largest unit in which the largest is 1 or more."""
    largest = max((float(amount.max()) for amount in amounts if amount is not None), default=0.0)
    unit = next((unit for unit, size in units.items() if largest >= size), list(units)[-1])
    return f"{unit} {what}", [None if amount is None else amount / units[unit] for amount in amounts]


def drawn(
    section: Section, shown: Sequence[tuple[Group, Curve, np.ndarray]], unit: float, name: str, **labels: str
) -> Drawing:
    """Return a drawing of curves over their places, with the deviations as bands where these are not too many."""
    lines = []
    for group, curve, x in shown:
        line = numbered_line(section.lines.index(group.line), unit * curve.mean, group.line, x)
        band = (unit * (curve.mean - curve.deviation), unit * (curve.mean + curve.deviation))
        lines.append(replace(line, band=band if len(shown) <= MOST_BANDS else None))
    return Drawing(curves(lines, **labels), name=name)


def about_band(groups: Sequence[Group]) -> str:
    """Return the meaning of a band, where there is one."""
    if all(len(group.runs) == 1 for group in groups):
        return ""
    if len(groups) > MOST_BANDS:
        return "The lines are means over the seeds; their deviations are too many to be drawn as bands."
    return "The line is the mean over the seeds, the band one standard deviation on either side."


def metric_cards(section: Section, setting: str) -> Iterator[tuple[str, Card]]:
    """Yield the metric of the report against rounds, bytes and seconds."""
    metric, groups = section.metric, section.at(setting)
    means = [(group, averaged(run.values(metric.tag) for run in group.runs.values())) for group in groups]
    shown = [(group, curve) for group, curve in means if curve is not None]
    if not shown:
        return
    bytes_, seconds = ([spent(group, tags, curve.rounds) for group, curve in shown] for tags in (BYTES, SECONDS))
    axes: dict[str, tuple[str, Sequence[np.ndarray | None]]] = {
        "rounds": ("round", [curve.rounds for _, curve in shown]),
        "bytes": in_largest_unit(bytes_, SIZES, "sent down and up"),
        "seconds": in_largest_unit(seconds, TIMES, "spent"),
    }
    drawings = []
    for name, (label, places) in axes.items():
        some = [(*pair, x) for pair, x in zip(shown, places, strict=True) if x is not None]
        if some:
            drawings.append(drawn(section, some, metric.in_unit(1), name, xlabel=label, ylabel=metric.label))
    rows = [
        [group.line, *of_round, *("" if one is None else float(one[at]) for one in (sent, time))]
        for (group, curve), sent, time in zip(shown, bytes_, seconds, strict=True)
        for at, of_round in enumerate(
            zip(*(one.tolist() for one in (curve.rounds, curve.mean, curve.deviation, curve.n)), strict=True)
        )
    ]
    head = ("curve", "round", metric.tag, "deviation", "seeds", "bytes", "seconds")
    fewer = any(len(set(curve.n.tolist())) > 1 for _, curve in shown)
    *first, last = [drawing.name for drawing in drawings]
    title = f"{metric.called} against {' and '.join(filter(None, [', '.join(first), last]))}"
    heading, caption = "Accuracy" if metric.tag.endswith("accuracy") else "Metric", f"{about_band(groups)} "
    yield heading, Card(metric.tag, title, f"{caption}{FEWER * fewer}".strip(), drawings, head, rows)


def tag_cards(section: Section, setting: str) -> Iterator[tuple[str, Card]]:
    """Yield all other metrics against the rounds, in families by the first part of their tags."""
    groups = section.at(setting)
    runs = [run for group in groups for run in group.runs.values()]
    families: dict[str, list[str]] = {family: [] for family in FAMILIES}
    for tag in dict.fromkeys(tag for run in runs for row in run.rows for tag in row):
        first = tag.split("/")[0]
        family = "learning" if tag in LEARNING else "terms" if first == "train" else first
        of_a_client = family in FAMILIES and "/local/" in tag
        # a metric that was measured once is no curve: sites have bars
        once = first == "domain" and all(len(run.values(tag)) < 2 for run in runs)
        if tag != section.metric.tag and first not in ELSEWHERE and not (of_a_client or once):
            families.setdefault(family, []).append(tag)
    for family, found in families.items():
        tags = [tag for tag in (*LEARNING, *ABOUT_TAG) if tag in found]
        others = [tag for tag in found if tag not in tags]
        tags += others if family in FAMILIES else sorted(others, key=lambda tag: (tag.count("/"), tag))
        drawings, most = [], len(tags) if family == "scores" else PANELS
        for tag in tags[:most]:
            percent = in_percent(tag, (value for run in runs for value in run.values(tag).values()))
            label = (
                f"{section.names.get(tag, tag)} in %" if percent else section.names.get(tag, ABOUT_TAG.get(tag, tag))
            )
            means = [(group, averaged(run.values(tag) for run in group.runs.values())) for group in groups]
            shown = [(group, curve, curve.rounds) for group, curve in means if curve is not None]
            if shown:
                drawings.append(drawn(section, shown, 100.0 if percent else 1.0, tag, xlabel="round", ylabel=label))
        if drawings:
            title = FAMILIES.get(family, "Terms of the loss" if family == "terms" else f"Metrics under {family}/")
            left = f" {len(tags) - most} more are in metrics.csv of the runs." if len(tags) > most else ""
            yield title, Card(family, title, f"{about_band(groups)}{left}".strip(), drawings)


# ------------------------------------------------------------------ who holds what
def partition_cards(section: Section, setting: str) -> Iterator[tuple[str, Card]]:
    """Yield who holds what: the partition of the smallest seed, and of each method whose partition is another one."""
    groups = [group for group in section.at(setting) if group.first.label_counts is not None]
    partitions: dict[str, Group] = {}
    for group in groups:
        if group.first.seed == min(other.first.seed for other in groups):
            partitions.setdefault(group.first.plan_hash, group)
    drawings = []
    for digest, group in list(partitions.items())[:PANELS]:
        counts, names = group.first.label_counts, group.first.names_in_plan
        of = f" of {group.line}" if len(partitions) > 1 else ""
        classes, sites = names.get("class_names", []), names.get("domains", [])
        # sites name a few clients, each of which is one
        named = len(sites) == len(set(sites)) == len(counts) <= MOST_LONG and all(sites)
        along = (classes if len(classes) == counts.shape[1] else None, sites if named else None)
        labels: dict[str, Any] = {"xlabel": "site" if named else "client", "ylabel": "class"}
        title = f"partition {digest[:8]}{of}, seed {group.first.seed}"
        drawings.append(Drawing(heat(counts.T.astype(float), "samples", along, log=True, title=title, **labels)))
    if drawings:
        caption = "Samples of each class at each client, on a logarithmic scale; what is empty has none."
        yield "Who holds what", Card("partition", "Who holds what", caption, drawings)


# ------------------------------------------------------------------ files of arrays
def measured_cards(section: Section, setting: str) -> Iterator[tuple[str, Card]]:
    """Yield the figures of all files of arrays that callbacks have left in the folders of the runs."""
    groups = section.at(setting)
    files = {name for group in groups for run in group.runs.values() for name in run.files(".npz")} - {PLAN}
    known = list(PLOTS)
    for file in sorted(files, key=lambda name: (known.index(name) if name in PLOTS else len(known), name)):
        heading, plot = plot_of(file)
        runs: dict[str, list[dict[str, np.ndarray]]] = {line: [] for line in section.lines}
        rounds = set[int]()
        for group in groups:
            seeds = [run for run in group.runs.values() if not list(not_drawn(run, file))]
            runs[group.line] = up_to_common_round([run.arrays(file) for run in seeds])
            for arrays in runs[group.line]:
                arrays["class_names"] = np.array(group.first.names_in_plan.get("class_names", []))
                rounds |= set(arrays["rounds"][-1:].tolist())
        for one in plot(runs):
            if one.drawings:
                low, high = min(rounds), max(rounds)
                caption = f"The last measurement, {f'round {low}' if low == high else f'rounds {low} to {high}'}, "
                caption += "as the mean over the seeds."
                more = f" The first {PANELS} of {len(one.drawings)} are drawn." * (len(one.drawings) > PANELS)
                title = ": ".join(filter(None, [heading, one.title]))
                name = f"{file.removesuffix('.npz')}-{one.name.rpartition('/')[2]}"
                yield heading, Card(name, title, f"{caption}{more}", [*map(Drawing, one.drawings[:PANELS])])


def plot_of(file: str) -> tuple[str, Callable[[Runs], Iterator[Plot]]]:
    """Return the heading and the plot function of a file."""
    return PLOTS.get(file, (f"Measured in {printable(file)}", by_shape))


def not_drawn(run: ReportedRun, file: str) -> Iterator[str]:
    """Yield why arrays of a file of a run are not drawn."""
    arrays = run.arrays(file)
    if arrays.problem:
        yield f"{printable(file)} {arrays.problem}"
    yield from (f"{printable(file)}: {name} of shape {shape} is not drawn" for name, shape in arrays.others.items())
    try:
        list(plot_of(file)[1]({"run": up_to_common_round([arrays])}))
    except (ValueError, IndexError, KeyError, TypeError) as error:
        yield f"{printable(file)} is not drawn: {error}"


def up_to_common_round(seeds: Sequence[Arrays]) -> list[dict[str, np.ndarray]]:
    """Return the arrays of each seed up to the last round that all seeds have measured; none without one."""
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
    means = {group.line: seconds for group in section.at(setting) if (seconds := mean_phases(group))}
    phases = (*VISITS, *ROUND_PHASES[1:])
    parts = [(phase, np.array([seconds.get(phase, 0.0) for seconds in means.values()])) for phase in phases]
    if means:
        bars = stacked([(phase, lengths) for phase, lengths in parts if lengths.any()], list(means), "seconds a round")
        caption = (
            "Median seconds of a round without the first, by phase, the mean over the seeds and over the workers. "
        )
        caption += "Of a run whose folder is not here, those of its last round."
        yield "Cost", Card("seconds", "Seconds of a round", caption, [Drawing(bars, 0.26 * len(means) + 0.65)])


def mean_phases(group: Group) -> dict[str, float]:
    """Return the seconds of a round by phase: the mean over the runs of their medians without the first round."""
    means = {}
    for phase in (*VISITS, *ROUND_PHASES):
        seconds = [
            [row[f"time/{phase}"] for row in run.rows[1:] if f"time/{phase}" in row] for run in group.runs.values()
        ]
        medians = [np.median(of_run) for of_run in seconds if of_run]
        if medians:
            means[phase] = float(np.mean(medians))
    return means
