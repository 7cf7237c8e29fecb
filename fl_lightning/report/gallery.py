"""Which figures a section has: of its metrics, its partitions, and whatever its callbacks have measured."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from fl_lightning.plotting.drawing import MOST_LONG, curves, heat, stacked
from fl_lightning.report.curves import (
    BYTES,
    PANELS,
    SECONDS,
    against_rounds,
    averaged,
    band,
    few_bands,
    number_of,
    spent,
)
from fl_lightning.report.figures import Card, Drawing
from fl_lightning.report.measured import measured_cards
from fl_lightning.report.run import ReportedRun
from fl_lightning.report.sections import Group, Section, in_percent
from fl_lightning.report.sites import parts_cards

# settings that have figures; the others are in the tables
SETTINGS = 6
# what is drawn elsewhere, or says nothing of a model
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


def cards_of(section: Section, prefix: str = "") -> Iterator[tuple[str, str, Card]]:
    """The figures of a section, each with its setting and the heading that it belongs under.

    Args:
        section: the section.
        prefix: beginning of the names of the figures, where a report has several sections.
    """
    for makers in ((metric_cards, parts_cards), (partition_cards, tag_cards, measured_cards, cost_cards)):
        for setting in section.settings[:SETTINGS]:
            for heading, card in (pair for make in makers for pair in make(section, setting)):
                parts = [
                    re.sub(r"[^a-zA-Z0-9.]+", "-", part).strip("-") for part in (prefix, setting, card.name) if part
                ]
                title = f"{card.title}, {setting}" if setting else card.title
                yield setting, heading, replace(card, name="-".join(parts).lower(), title=title)


# ------------------------------------------------------------------ metrics
def metric_cards(section: Section, setting: str) -> Iterator[tuple[str, Card]]:
    """The metric of the report against rounds, bytes and seconds."""
    metric, groups = section.metric, section.at(setting)
    means = [averaged([run.values(metric.tag) for run in group.runs.values()]) for group in groups]
    shown = [(group, mean) for group, mean in zip(groups, means, strict=True) if mean is not None]
    if not shown:
        return
    bytes_ = [spent(list(group.runs.values()), BYTES, mean.rounds) for group, mean in shown]
    seconds = [spent(list(group.runs.values()), SECONDS, mean.rounds) for group, mean in shown]
    axes: list[tuple[str, str, Sequence[np.ndarray | None]]] = [
        ("rounds", "round", [mean.rounds.astype(float) for _, mean in shown]),
        ("bytes", *in_largest_unit(bytes_, (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)), "sent down and up")),
        ("seconds", *in_largest_unit(seconds, (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0)), "spent")),
    ]
    drawings = []
    for what, label, places in axes:
        lines = [
            mean.line(x, metric.in_unit(1), number_of(section, group), group.line)
            for (group, mean), x in zip(shown, places, strict=True)
            if x is not None
        ]
        if lines:
            told = f"{metric.label} against {what}, {setting}".rstrip(", ")
            drawings.append(Drawing(curves(few_bands(lines), xlabel=label, ylabel=metric.label), told, name=what))
    rows = [
        [
            *(group.line, int(mean.rounds[i]), float(mean.mean[i]), float(mean.deviation[i]), int(mean.n[i])),
            *("" if spent_ is None else float(spent_[i]) for spent_ in (b, s)),
        ]
        for (group, mean), b, s in zip(shown, bytes_, seconds, strict=True)
        for i in range(len(mean.rounds))
    ]
    head = ("curve", "round", metric.tag, "deviation", "seeds", "bytes", "seconds")
    fewer = any(len(set(mean.n.tolist())) > 1 for _, mean in shown)
    caption = " ".join(filter(None, [band(groups), FEWER * fewer]))
    *first, last = [drawing.name for drawing in drawings]
    title = f"{metric.called} against {' and '.join(filter(None, [', '.join(first), last]))}"
    yield (
        "Accuracy" if metric.tag.endswith("accuracy") else "Metric",
        Card(metric.tag, title, caption, drawings, head, rows),
    )


def in_largest_unit(
    amounts: Sequence[np.ndarray | None], units: Sequence[tuple[str, float]], what: str
) -> tuple[str, list[np.ndarray | None]]:
    """Amounts in the largest unit in which the largest is 1 or more, and the label of the axis."""
    largest = max((float(amount.max()) for amount in amounts if amount is not None), default=0.0)
    unit, size = next(((unit, size) for unit, size in units if largest >= size), units[-1])
    return f"{unit} {what}", [None if amount is None else amount / size for amount in amounts]


def tag_cards(section: Section, setting: str) -> Iterator[tuple[str, Card]]:
    """All other metrics that a run has logged against the rounds: families by the first part of their tags."""
    runs = [run for group in section.at(setting) for run in group.runs.values()]
    rows = (row for run in runs for row in run.rows)
    families: dict[str, list[str]] = {family: [] for family in FAMILIES}
    for tag in dict.fromkeys(tag for row in rows for tag in row):
        first = tag.split("/")[0]
        family = "learning" if tag in LEARNING else "terms" if first == "train" else first
        of_a_client = family in FAMILIES and "/local/" in tag
        # what was measured once is no curve: of sites there are bars
        once = first == "domain" and all(len(run.values(tag)) < 2 for run in runs)
        if tag != section.metric.tag and first not in ELSEWHERE and not (of_a_client or once):
            families.setdefault(family, []).append(tag)
    for family, found in families.items():
        tags = [tag for tag in (*LEARNING, *ABOUT_TAG) if tag in found]
        others = [tag for tag in found if tag not in tags]
        tags += others if family in FAMILIES else sorted(others, key=lambda tag: (tag.count("/"), tag))
        wanted = {
            tag: (f"{section.names.get(tag, tag)} in %", 100.0)
            if in_percent(tag, (value for run in runs for value in run.values(tag).values()))
            else (section.names.get(tag, ABOUT_TAG.get(tag, tag)), 1.0)
            for tag in tags[:PANELS]
        }
        drawings, lines = against_rounds(section, setting, wanted, ReportedRun.values)
        if drawings:
            title = FAMILIES.get(family, "Terms of the loss" if family == "terms" else f"Metrics under {family}/")
            left = f"{len(tags) - PANELS} more are in metrics.csv of the runs." if len(tags) > PANELS else ""
            caption = " ".join(filter(None, [band(section.at(setting)), left]))
            head = ("metric", "curve", "round", "mean", "deviation", "seeds")
            yield title, Card(family, title, caption, drawings, head, lines)


# ------------------------------------------------------------------ who holds what
def partition_cards(section: Section, setting: str) -> Iterator[tuple[str, Card]]:
    """Who holds what: the partition of the smallest seed, and of each method whose partition is another one."""
    groups = [group for group in section.at(setting) if group.first.label_counts is not None]
    partitions: dict[str, Group] = {}
    for group in groups:
        if group.first.seed == min(other.first.seed for other in groups):
            partitions.setdefault(group.first.plan_hash, group)
    drawings, rows = [], []
    for digest, group in list(partitions.items())[:PANELS]:
        counts = group.first.label_counts
        of = f" of {group.line}" if len(partitions) > 1 else ""
        title = f"partition {digest[:8]}{of}, seed {group.first.seed}"
        names = group.first.names_in_plan.get("class_names")
        sites = names_of_clients(group.first, len(counts))
        named = (names if names is not None and len(names) == counts.shape[1] else None, sites)
        along = "client" if sites is None else "site"
        draw = heat(counts.T.astype(float), "samples", named, log=True, xlabel=along, ylabel="class", title=title)
        told = f"samples of each class at each client, {title}"
        drawings.append(Drawing(draw, told))
        rows += [[digest[:12], k, c, int(counts[k, c])] for k, c in zip(*np.nonzero(counts), strict=True)]
    if drawings:
        caption = "Samples of each class at each client, on a logarithmic scale; what is empty has none."
        head = ("partition", "client", "class", "samples")
        yield "Who holds what", Card("partition", "Who holds what", caption, drawings, head, rows)


def names_of_clients(run: ReportedRun, clients: int) -> list[str] | None:
    """The sites of a few clients, each of which is one; None where they are no names of theirs, or too many."""
    sites = run.names_in_plan.get("domains", [])
    own = len(sites) == len(set(sites)) == clients <= MOST_LONG and all(sites)
    return sites if own else None


# ------------------------------------------------------------------ cost
def cost_cards(section: Section, setting: str) -> Iterator[tuple[str, Card]]:
    """Seconds of a round by phase."""
    means = {group.line: seconds for group in section.at(setting) if (seconds := mean_phases(group))}
    if not means:
        return
    names, phases = list(means), (*VISITS, *ROUND_PHASES[1:])
    parts = [(phase, np.array([seconds.get(phase, 0.0) for seconds in means.values()])) for phase in phases]
    parts = [(phase, lengths) for phase, lengths in parts if lengths.any()]
    height = 0.26 * len(names) + 0.65
    caption = "Median seconds of a round without the first, by phase, the mean over the seeds and over the workers. "
    caption += "Of a run whose folder is not here, those of its last round."
    drawing = Drawing(stacked(parts, names, "seconds a round"), "seconds of a round by phase", height)
    rows = [[name, phase, float(lengths[at])] for at, name in enumerate(names) for phase, lengths in parts]
    yield "Cost", Card("seconds", "Seconds of a round", caption, [drawing], ("curve", "phase", "seconds"), rows)


def mean_phases(group: Group) -> dict[str, float]:
    """Seconds of each phase of a round: of a run the median without the first round, of a group the mean over these."""
    means = {}
    for phase in (*VISITS, *ROUND_PHASES):
        by_run = [
            [row[f"time/{phase}"] for row in run.rows[1:] if f"time/{phase}" in row] for run in group.runs.values()
        ]
        medians = [np.median(seconds) for seconds in by_run if seconds]
        if medians:
            means[phase] = float(np.mean(medians))
    return means
