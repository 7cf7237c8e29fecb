"""Which figures a section has: of its metrics, its partitions, and whatever its callbacks have measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from fl_lightning.pictures.drawing import CurveLine, curves, heat, stacked
from fl_lightning.pictures.style import line_style
from fl_lightning.report.curves import BYTES, SECONDS, Curve, curve, spent
from fl_lightning.report.figures import Card, Drawing, heat_margins, room
from fl_lightning.report.measured import measured_cards
from fl_lightning.report.names import PANELS, against_rounds, band, figure_name, legend_of, number_of, titled
from fl_lightning.report.run import ReportedRun
from fl_lightning.report.sections import Group, Section

# settings that have figures; the others are in the tables
SETTINGS = 6
# what is drawn elsewhere, or says nothing of a model
ELSEWHERE = ("time", "placed", "spectrum", "bytes", "memory", "round", "step", "clients", "batches", "lr")
FAMILIES = {
    "learning": ("Training and test", ("train/accuracy", "train/loss", "test/accuracy", "test/loss", "val/accuracy")),
    "rank": ("Ranks of classifier and representation", ()),
    "drift": ("Drift of the clients", ()),
}
ABOUT_TAG = {
    "drift/client": "mean norm of the clients' changes",
    "drift/global": "norm of the global change",
    "rank/classifier/effective": "effective rank of the classifier",
    "rank/representation/effective": "effective rank of the representation",
    "rank/classifier/stable": "stable rank of the classifier",
    "rank/representation/stable": "stable rank of the representation",
}
ROUND_PHASES = ("train", "evaluate", "server", "log")
VISITS = ("load", "data", "forward_backward", "correct", "step", "collect", "wait")


def cards_of(section: Section, prefix: str = "") -> Iterator[tuple[str, Card]]:
    """The figures of a section, each with the heading that it belongs under.

    Args:
        section: the section.
        prefix: beginning of the names of the figures, where a report has several sections.
    """
    shown = section.settings[:SETTINGS]
    for setting in shown:
        yield from (
            ("Accuracy" if section.metric.percent else "Metric", one) for one in metric_cards(section, setting, prefix)
        )
    for setting in shown:
        yield from partition_cards(section, setting, prefix)
        for family in FAMILIES:
            yield from family_cards(section, setting, family, prefix)
        yield from other_cards(section, setting, prefix)
        yield from measured_cards(section, setting, prefix)
        yield from cost_cards(section, setting, prefix)


# ------------------------------------------------------------------ metrics
def metric_cards(section: Section, setting: str, prefix: str) -> Iterator[Card]:
    """The metric of the report against rounds, bytes and seconds."""
    metric, groups = section.metric, section.at(setting)
    found = [(group, one) for group in groups if (one := curve(list(group.runs.values()), metric.tag)) is not None]
    if not found:
        return
    bytes_ = [spent(list(group.runs.values()), BYTES, one.rounds) for group, one in found]
    seconds = [spent(list(group.runs.values()), SECONDS, one.rounds) for group, one in found]
    axes: list[tuple[str, str, Sequence[np.ndarray | None]]] = [
        ("rounds", "round", [one.rounds.astype(float) for _, one in found]),
        ("bytes", *in_largest_unit(bytes_, (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)), "sent down and up")),
        ("seconds", *in_largest_unit(seconds, (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0)), "spent")),
    ]
    unit, drawings = metric.in_unit(1), []
    for what, label, places in axes:
        lines = [
            CurveLine(x, unit * one.mean, line_style(number_of(section, group)), one.band(unit))
            for (group, one), x in zip(found, places, strict=True)
            if x is not None
        ]
        if lines:
            told = f"{metric.label} against {what}, {setting}".rstrip(", ")
            drawings.append(Drawing(curves(lines, xlabel=label, ylabel=metric.label), told))
    rows = [
        [
            *(group.line, int(one.rounds[i]), float(one.mean[i]), float(one.deviation[i]), int(one.n[i])),
            *("" if spent_ is None else float(spent_[i]) for spent_ in (b, s)),
        ]
        for (group, one), b, s in zip(found, bytes_, seconds, strict=True)
        for i in range(len(one.rounds))
    ]
    head = ("curve", "round", metric.tag, "deviation", "seeds", "bytes", "seconds")
    caption = " ".join(filter(None, [band(groups), fewer([one for _, one in found])]))
    title = titled(f"{metric.tag} against rounds, bytes and seconds", setting)
    shown = [group for group, _ in found]
    yield Card(
        figure_name(prefix, setting, metric.tag), title, caption, drawings, legend_of(section, shown), head, rows
    )


def fewer(found: Sequence[Curve]) -> str:
    """That a mean is over fewer seeds in some rounds, where it is."""
    if any(len(set(one.n.tolist())) > 1 for one in found):
        return "Where some seeds have fewer rounds than others, the last part of a line is the mean of those left."
    return ""


def in_largest_unit(
    found: Sequence[np.ndarray | None], units: Sequence[tuple[str, float]], what: str
) -> tuple[str, list[np.ndarray | None]]:
    """Amounts in the largest unit in which the largest is 1 or more, and the label of the axis."""
    largest = max((float(one.max()) for one in found if one is not None and len(one)), default=0.0)
    unit, size = next((one for one in units if largest >= one[1]), units[-1])
    return f"{unit} {what}", [None if one is None else one / size for one in found]


def family_cards(section: Section, setting: str, family: str, prefix: str) -> Iterator[tuple[str, Card]]:
    """The metrics of a family against the rounds."""
    title, fixed = FAMILIES[family]
    tags = [tag for tag in tags_of(section.at(setting)) if (tag in fixed if fixed else tag.startswith(f"{family}/"))]
    order = fixed or tuple(ABOUT_TAG)
    tags = sorted(
        (tag for tag in tags if tag != section.metric.tag and "/local/" not in tag),
        key=lambda tag: order.index(tag) if tag in order else len(order),
    )
    yield from of_tags(section, setting, tags, title, family, prefix)


def other_cards(section: Section, setting: str, prefix: str) -> Iterator[tuple[str, Card]]:
    """All other metrics that a run has logged, by the first part of their tags."""
    known = {section.metric.tag, *FAMILIES["learning"][1]}
    left: dict[str, list[str]] = {}
    for tag in tags_of(section.at(setting)):
        family = tag.split("/")[0]
        if family not in (*ELSEWHERE, "drift", "rank") and tag not in known:
            left.setdefault("terms" if family == "train" else family, []).append(tag)
    for family, tags in left.items():
        title = "Terms of the loss" if family == "terms" else f"Metrics under {family}/"
        yield from of_tags(section, setting, sorted(tags, key=lambda tag: (tag.count("/"), tag)), title, family, prefix)


def tags_of(groups: Sequence[Group]) -> list[str]:
    """The tags of the metrics that any run of some groups has."""
    rows = (row for group in groups for run in group.runs.values() for row in run.rows)
    return list(dict.fromkeys(tag for row in rows for tag in row))


def of_tags(
    section: Section, setting: str, tags: Sequence[str], title: str, family: str, prefix: str
) -> Iterator[tuple[str, Card]]:
    """Some metrics against the rounds, a drawing for each."""
    percent = {tag: tag.endswith("accuracy") for tag in tags[:PANELS]}
    wanted = {tag: (f"{tag} in %", 100.0) if percent[tag] else (ABOUT_TAG.get(tag, tag), 1.0) for tag in percent}
    drawings, rows, legend = against_rounds(section, setting, wanted, ReportedRun.values)
    if drawings:
        left = f"{len(tags) - PANELS} more are in metrics.csv of the runs." if len(tags) > PANELS else ""
        caption = " ".join(filter(None, [band(section.at(setting)), left]))
        head, name = ("metric", "curve", "round", "mean", "deviation", "seeds"), figure_name(prefix, setting, family)
        yield title, Card(name, titled(title, setting), caption, drawings, legend, head, rows)


# ------------------------------------------------------------------ who holds what
def partition_cards(section: Section, setting: str, prefix: str) -> Iterator[tuple[str, Card]]:
    """Who holds what: the partition of the smallest seed, and of each method whose partition is another one."""
    found: dict[str, Group] = {}
    groups = [group for group in section.at(setting) if group.first.label_counts is not None]
    for group in groups:
        if group.first.seed == min(one.first.seed for one in groups):
            found.setdefault(group.first.plan_hash, group)
    if not found:
        return
    drawings, rows = [], []
    for digest, group in list(found.items())[:PANELS]:
        counts = group.first.label_counts
        of = f" of {group.line}" if len(found) > 1 else ""
        title = f"partition {digest[:8]}{of}, seed {group.first.seed}"
        draw = heat(counts.T.astype(float), "samples", log=True, xlabel="client", ylabel="class", title=title)
        told = f"samples of each class at each client, {title}"
        drawings.append(Drawing(draw, told, margins=heat_margins()))
        rows += [[digest[:12], k, c, int(counts[k, c])] for k, c in zip(*np.nonzero(counts), strict=True)]
    caption = "Samples of each class at each client, on a logarithmic scale; what is empty has none."
    head = ("partition", "client", "class", "samples")
    title = "Who holds what"
    yield (
        title,
        Card(figure_name(prefix, setting, "partition"), titled(title, setting), caption, drawings, (), head, rows),
    )


# ------------------------------------------------------------------ cost
def cost_cards(section: Section, setting: str, prefix: str) -> Iterator[tuple[str, Card]]:
    """Seconds of a round by phase."""
    groups = [group for group in section.at(setting) if any(map(phase_seconds, group.runs.values()))]
    if not groups:
        return
    means = [mean_phases(group) for group in groups]
    names = [group.line for group in groups]
    parts = [(phase, np.array([one.get(phase, 0.0) for one in means])) for phase in (*VISITS, *ROUND_PHASES[1:])]
    parts = [(phase, lengths) for phase, lengths in parts if lengths.any()]
    height = 0.26 * len(names) + 0.65
    caption = "Median seconds of a round without the first, by phase, the mean over the seeds and over the workers. "
    caption += "Of a run whose folder is not here, those of its last round."
    legend = [(at, phase.replace("_", " and ")) for at, (phase, _) in enumerate(parts)]
    margins = (max(room(names), 0.6), 0.45, 0.15, 0.1)
    drawing = Drawing(stacked(parts, names, "seconds a round"), "seconds of a round by phase", height, legend, margins)
    rows = [[name, phase, float(lengths[at])] for at, name in enumerate(names) for phase, lengths in parts]
    title = "Seconds of a round"
    head = ("curve", "phase", "seconds")
    yield (
        "Cost",
        Card(figure_name(prefix, setting, "seconds"), titled(title, setting), caption, [drawing], (), head, rows),
    )


def phase_seconds(run: object) -> dict[str, float]:
    """Median seconds of each phase of a run, without the first round."""
    rows = getattr(run, "rows", [])[1:]
    found = {
        phase: [row[f"time/{phase}"] for row in rows if f"time/{phase}" in row] for phase in (*VISITS, *ROUND_PHASES)
    }
    return {phase: float(np.median(values)) for phase, values in found.items() if values}


def mean_phases(group: Group) -> dict[str, float]:
    """The mean of the phases over the runs of a group."""
    found = [phase_seconds(run) for run in group.runs.values()]
    keys = dict.fromkeys(key for one in found for key in one)
    return {key: float(np.mean([one[key] for one in found if key in one])) for key in keys}
