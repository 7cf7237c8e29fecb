"""Which figures a section has: of its metrics, its partitions, and whatever its callbacks have measured."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np

from fl_lightning.report.curves import BYTES, SECONDS, Curve, curve, last_profile, spent
from fl_lightning.report.figures import HEIGHT, Card, Panel, bars, curves, heat, heat_margins, points, room, stacked
from fl_lightning.report.run import PLAN
from fl_lightning.report.sections import Group, Section

# settings that have figures, and drawings of one figure; the others are in the tables
SETTINGS, PANELS = 6, 6
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
TITLES = {
    "spectra.npz": "Spectra",
    "layer_similarity.npz": "Similarity layer by layer",
    "drift.npz": "Drift in detail",
    "per_class.npz": "Accuracy by class",
    "embedding.npz": "Embedding of the representations",
}
# of singular values; those below this share of the largest are rounding errors
VISIBLE = 1e-12
# the margins of what has no numbers along its axes
BARE = (0.1, 0.1, 0.1, 0.3)
PHASES = ("train", "evaluate", "server", "log")
VISITS = ("load", "data", "forward_backward", "correct", "step", "collect", "wait")


def cards_of(section: Section, prefix: str = "") -> Iterator[tuple[str, Card]]:
    """The figures of a section, each with the heading that it belongs under.

    Args:
        section: the section.
        prefix: beginning of the names of the figures, where a report has several sections.
    """
    shown = section.settings[:SETTINGS]
    for setting in shown:
        yield from (("Accuracy" if section.metric.percent else "Metric", one) for one in main(section, setting, prefix))
    for setting in shown:
        yield from partitions(section, setting, prefix)
        for family in FAMILIES:
            yield from scalars(section, setting, family, prefix)
        yield from others(section, setting, prefix)
        for file in files_of(section.at(setting)):
            yield from of_file(section, setting, file, prefix)
        yield from cost(section, setting, prefix)


def named(prefix: str, setting: str, what: str) -> str:
    """The name of a figure."""
    parts = [prefix, setting, what]
    return "-".join(re.sub(r"[^a-zA-Z0-9.]+", "-", one).strip("-").lower() for one in parts if one)


def titled(title: str, setting: str) -> str:
    """A title with the setting."""
    return f"{title}, {setting}" if setting else title


def legend_of(section: Section, groups: Sequence[Group]) -> list[tuple[int, str]]:
    """The number and the label of each curve."""
    return [(section.lines.index(group.line), group.line) for group in groups]


def band(groups: Sequence[Group]) -> str:
    """What a band shows, where there is one."""
    many = any(len(group.runs) > 1 for group in groups)
    return "The line is the mean over the seeds, the band one standard deviation on either side." if many else ""


# ------------------------------------------------------------------ metrics
def main(section: Section, setting: str, prefix: str) -> Iterator[Card]:
    """The metric of the report against rounds, bytes and seconds."""
    metric, groups = section.metric, section.at(setting)
    found = [(group, one) for group in groups if (one := curve(list(group.runs.values()), metric.tag)) is not None]
    if not found:
        return
    bytes_ = [spent(list(group.runs.values()), BYTES, one.rounds) for group, one in found]
    seconds = [spent(list(group.runs.values()), SECONDS, one.rounds) for group, one in found]
    axes = [
        ("rounds", "round", [one.rounds.astype(float) for _, one in found]),
        ("bytes", *scaled(bytes_, (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)), "sent down and up")),
        ("seconds", *scaled(seconds, (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0)), "spent")),
    ]
    panels = []
    for what, label, places in axes:
        lines = [
            (number_of(section, group), x, metric.in_unit(1) * one.mean, metric.in_unit(1) * one.deviation)
            for (group, one), x in zip(found, places, strict=True)
            if x is not None
        ]
        if lines:
            told = f"{metric.label} against {what}, {setting}".rstrip(", ")
            panels.append(Panel(curves(lines, xlabel=label, ylabel=metric.label), told))
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
    yield Card(named(prefix, setting, metric.tag), title, caption, panels, legend_of(section, shown), head, rows)


def number_of(section: Section, group: Group) -> int:
    """The number of a group's curve, which gives its colour and its strokes."""
    return section.lines.index(group.line)


def fewer(found: Sequence[Curve]) -> str:
    """That a mean is over fewer seeds in some rounds, where it is."""
    if any(len(set(one.n.tolist())) > 1 for one in found):
        return "Where some seeds have fewer rounds than others, the last part of a line is the mean of those left."
    return ""


def scaled(
    found: Sequence[np.ndarray | None], units: Sequence[tuple[str, float]], what: str
) -> tuple[str, list[np.ndarray | None]]:
    """Amounts in the largest unit in which the largest is 1 or more, and the label of the axis."""
    largest = max((float(one.max()) for one in found if one is not None and len(one)), default=0.0)
    unit, size = next((one for one in units if largest >= one[1]), units[-1])
    return f"{unit} {what}", [None if one is None else one / size for one in found]


def scalars(section: Section, setting: str, family: str, prefix: str) -> Iterator[tuple[str, Card]]:
    """The metrics of a family against the rounds."""
    title, fixed = FAMILIES[family]
    tags = [tag for tag in tags_of(section.at(setting)) if (tag in fixed if fixed else tag.startswith(f"{family}/"))]
    order = fixed or tuple(ABOUT_TAG)
    tags = sorted(
        (tag for tag in tags if tag != section.metric.tag and "/local/" not in tag),
        key=lambda tag: order.index(tag) if tag in order else len(order),
    )
    yield from of_tags(section, setting, tags, title, family, prefix)


def others(section: Section, setting: str, prefix: str) -> Iterator[tuple[str, Card]]:
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
    groups = section.at(setting)
    panels, rows, shown = [], [], {}
    for tag in tags[:PANELS]:
        lines = []
        unit = 100.0 if tag.endswith("accuracy") else 1.0
        for group in groups:
            one = curve(list(group.runs.values()), tag)
            if one is not None:
                at = number_of(section, group)
                lines.append((at, one.rounds, unit * one.mean, unit * one.deviation))
                shown[group.line] = group
                numbers = zip(
                    one.rounds.tolist(), one.mean.tolist(), one.deviation.tolist(), one.n.tolist(), strict=True
                )
                rows += [[tag, group.line, *four] for four in numbers]
        if lines:
            label = f"{tag} in %" if unit > 1 else ABOUT_TAG.get(tag, tag)
            panels.append(Panel(curves(lines, xlabel="round", ylabel=label), f"{label} against rounds"))
    if panels:
        left = f"{len(tags) - PANELS} more are in metrics.csv of the runs." if len(tags) > PANELS else ""
        caption = " ".join(filter(None, [band(groups), left]))
        head = ("metric", "curve", "round", "mean", "deviation", "seeds")
        legend = legend_of(section, list(shown.values()))
        yield title, Card(named(prefix, setting, family), titled(title, setting), caption, panels, legend, head, rows)


# ------------------------------------------------------------------ who holds what
def partitions(section: Section, setting: str, prefix: str) -> Iterator[tuple[str, Card]]:
    """Who holds what: the partition of the smallest seed, and of each method whose partition is another one."""
    found: dict[str, Group] = {}
    groups = [group for group in section.at(setting) if group.first.label_counts is not None]
    for group in groups:
        if group.first.seed == min(one.first.seed for one in groups):
            found.setdefault(group.first.plan_hash, group)
    if not found:
        return
    panels, rows = [], []
    for digest, group in list(found.items())[:PANELS]:
        counts = group.first.label_counts
        of = f" of {group.line}" if len(found) > 1 else ""
        title = f"partition {digest[:8]}{of}, seed {group.first.seed}"
        draw = heat(counts.T.astype(float), "samples", log=True, xlabel="client", ylabel="class", title=title)
        told = f"samples of each class at each client, {title}"
        panels.append(Panel(draw, told, margins=heat_margins()))
        rows += [[digest[:12], k, c, int(counts[k, c])] for k, c in zip(*np.nonzero(counts), strict=True)]
    caption = "Samples of each class at each client, on a logarithmic scale; what is empty has none."
    head = ("partition", "client", "class", "samples")
    title = "Who holds what"
    yield title, Card(named(prefix, setting, "partition"), titled(title, setting), caption, panels, (), head, rows)


# ------------------------------------------------------------------ files of callbacks
def files_of(groups: Sequence[Group]) -> list[str]:
    """The names of the files of measurements of some groups, the known ones first."""
    found = {name for group in groups for run in group.runs.values() for name in run.files(".npz")}
    return sorted(found - {PLAN}, key=lambda name: (list(TITLES).index(name) if name in TITLES else len(TITLES), name))


def of_file(section: Section, setting: str, file: str, prefix: str) -> Iterator[tuple[str, Card]]:
    """The figures of a file of measurements, by the shapes of its arrays."""
    title = TITLES.get(file, f"Measured in {file}")
    groups = section.at(setting)
    arrays = [one for group in groups for run in group.runs.values() if (one := run.arrays(file)) is not None]
    shapes = {name: values.ndim for one in arrays for name, values in one.values.items()}
    names = {length: labels for one in arrays for length, labels in one.names.items()}
    stem = file.removesuffix(".npz")
    for name, depth in shapes.items():
        what = f"{stem}-{name}"
        if file == "embedding.npz":
            card = embedding(section, setting, file, name, prefix)
        elif file == "spectra.npz" and depth in (2, 3):
            card = spectra(section, setting, file, name, prefix)
        elif depth == 1:
            card = course(section, setting, file, name, prefix)
        elif depth == 2:
            card = profile(section, setting, file, name, names, prefix)
        elif depth == 3:
            card = maps(section, setting, file, name, names, prefix)
        else:
            card = None
        if card is not None:
            yield title, Card(**{**vars(card), "name": named(prefix, setting, what)})


def spectra(section: Section, setting: str, file: str, name: str, prefix: str) -> Card | None:
    """Singular values by their index, of the last measurement."""
    lines, rows, shown = [], [], []
    for group in section.at(setting):
        found = last_profile(group, file, name)
        if found is None or not np.nan_to_num(found[1]).max(initial=0) > 0:
            continue
        round_, values = found
        values = values if values.ndim == 1 else mean_of_rows(values)
        visible = np.where(values > VISIBLE * np.nanmax(values), values, np.nan)
        lines.append((number_of(section, group), np.arange(len(values)), visible, None))
        rows += [[group.line, round_, at, float(one)] for at, one in enumerate(values)]
        shown.append(group)
    if not lines:
        return None
    rounds = sorted({row[1] for row in rows})
    when = f"Round {rounds[0]}" if len(rounds) == 1 else f"Rounds {rounds[0]} to {rounds[-1]}"
    of = {"classifier": "the classifier's weight", "representation": "the covariance of the test representations"}
    what = of.get(name.removeprefix("local_"), name)
    who = ", the mean over the clients' own models and the seeds" if "local" in name else ", the mean over the seeds"
    caption = f"Singular values of {what}{who}. {when}. The scale is logarithmic."
    panel = Panel(curves(lines, log=True, xlabel="index", ylabel="singular value"), f"spectrum of {name}")
    head = ("curve", "round", "index", "singular value")
    return Card(name, titled(f"Spectrum: {name}", setting), caption, [panel], legend_of(section, shown), head, rows)


def mean_of_rows(values: np.ndarray) -> np.ndarray:
    """The mean of the rows that are not nan, as of the clients that took part."""
    rows = values[np.isfinite(values).all(1)]
    return rows.mean(0) if len(rows) else np.zeros(values.shape[1])


def course(section: Section, setting: str, file: str, name: str, prefix: str) -> Card | None:
    """A number of each measurement against the rounds."""
    from fl_lightning.report.curves import averaged

    lines, rows, shown = [], [], []
    for group in section.at(setting):
        values = []
        for run in group.runs.values():
            arrays = run.arrays(file)
            if arrays is not None and name in arrays.values and arrays.values[name].ndim == 1:
                values.append(dict(zip(arrays.rounds.astype(int).tolist(), arrays.values[name].tolist(), strict=True)))
        one = averaged(values)
        if one is not None:
            lines.append((number_of(section, group), one.rounds, one.mean, one.deviation))
            rows += [[group.line, *two] for two in zip(one.rounds.tolist(), one.mean.tolist(), strict=True)]
            shown.append(group)
    if not lines:
        return None
    panel = Panel(curves(lines, xlabel="round", ylabel=name), f"{name} against rounds")
    caption = f"From `{file}`. {band(section.at(setting))}".strip()
    return Card(
        name, titled(name, setting), caption, [panel], legend_of(section, shown), ("curve", "round", name), rows
    )


def profile(
    section: Section, setting: str, file: str, name: str, names: dict[int, list[str]], prefix: str
) -> Card | None:
    """Numbers along an axis, such as classes or layers, of the last measurement; bars where they are of classes."""
    found = [(group, one) for group in section.at(setting) if (one := last_profile(group, file, name)) is not None]
    found = [(group, one) for group, one in found if np.isfinite(one[1]).any()]
    if not found:
        return None
    length = max(len(values) for _, (_, values) in found)
    labels = names.get(length, [str(at) for at in range(length)])
    axis = "class" if file == "per_class.npz" else "layer" if file == "layer_similarity.npz" else "index"
    rows = [
        [group.line, round_, labels[at] if at < len(labels) else at, float(one)]
        for group, (round_, values) in found
        for at, one in enumerate(values)
    ]
    if file == "per_class.npz" and length <= 24:
        unit = 100.0 if all(np.nanmax(values) <= 1 for _, (_, values) in found) else 1.0
        panels = []
        for start in range(0, len(found), 4):  # more bars side by side cannot be told apart
            some = [(number_of(section, group), unit * values) for group, (_, values) in found[start : start + 4]]
            label = f"{name} in %" if unit > 1 else name
            legend = [(at, section.lines[at]) for at, _ in some]
            below = max(room(labels), 0.48) if max(map(len, labels)) > 4 else 0.48
            draw = bars(some, labels, xlabel=axis, ylabel=label)
            panels.append(Panel(draw, f"{name} by {axis}", HEIGHT, legend, (0.72, below, 0.12, 0.14)))
    else:
        lines = [(number_of(section, group), np.arange(len(values)), values, None) for group, (_, values) in found]
        panels = [Panel(curves(lines, xlabel=axis, ylabel=name), f"{name} by {axis}")]
    caption = f"Of the last measurement in `{file}`, round {found[0][1][0]}, the mean over the seeds."
    if length in names and not (file == "per_class.npz" and length <= 24):
        caption += f" In order: {', '.join(labels[:40])}."
    legend = [] if panels[0].legend else legend_of(section, [group for group, _ in found])
    return Card(name, titled(name, setting), caption, panels, legend, ("curve", "round", axis, name), rows)


def maps(section: Section, setting: str, file: str, name: str, names: dict[int, list[str]], prefix: str) -> Card | None:
    """A matrix of the last measurement for each method, as a map."""
    found = [(group, one) for group in section.at(setting) if (one := last_profile(group, file, name)) is not None]
    found = [(group, one) for group, one in found if np.isfinite(one[1]).any()]
    if not found:
        return None
    finite = np.concatenate([values[np.isfinite(values)] for _, (_, values) in found])
    limits = (float(finite.min()), float(finite.max()))
    panels, rows = [], []
    for group, (round_, values) in found[:PANELS]:
        kinds = [names.get(length) for length in values.shape]
        labels = {"title": group.line, "ylabel": axis_of(file, 0, name), "xlabel": axis_of(file, 1, name)}
        draw = heat(values, name, *kinds, limits=limits, **labels)
        panels.append(Panel(draw, f"{name} of {group.line}", margins=heat_margins(*kinds)))
        rows += [
            [group.line, round_, i, j, float(values[i, j])]
            for i, j in np.ndindex(*values.shape)
            if values.size <= 10000
        ]
    left = f" The first {PANELS} of {len(found)} are drawn." if len(found) > PANELS else ""
    caption = f"Of the last measurement in `{file}`, round {found[0][1][0]}, the mean over the seeds.{left}"
    return Card(name, titled(name, setting), caption, panels, (), ("curve", "round", "row", "column", "value"), rows)


def axis_of(file: str, at: int, name: str) -> str:
    """What lies along an axis of a matrix, as far as its file tells."""
    if file == "per_class.npz":
        return ("true class", "predicted class")[at] if "confusion" in name else ("client", "class")[at]
    if file == "layer_similarity.npz":
        return ("layer or client", "client or layer")[at]
    return ("client" if name.startswith("local_") else "row", "index" if name.startswith("local_") else "column")[at]


def embedding(section: Section, setting: str, file: str, name: str, prefix: str) -> Card | None:
    """Points of the last measurement, coloured by the kind that the file gives them."""
    panels, rows = [], []
    for group in section.at(setting):
        arrays = group.first.arrays(file)
        if arrays is None or name not in arrays.values or arrays.values[name].ndim != 3:
            continue
        places = arrays.values[name][-1]
        if places.shape[-1] != 2:
            continue
        kinds = [key for key, one in arrays.values.items() if one.ndim == 2 and one.shape[1] == len(places)]
        for kind in sorted(kinds)[:2] or [None]:
            values = None if kind is None else arrays.values[kind][-1]
            title = group.line if kind is None else f"{group.line}, by {kind}"
            if len(panels) < PANELS:
                panels.append(Panel(points(places, values, title=title), f"embedding of {title}", margins=BARE))
        kept = [(kind, arrays.values[kind][-1]) for kind in sorted(kinds)[:1]]
        rows += [
            [group.line, int(arrays.rounds[-1]), *map(float, places[i]), *(float(values[i]) for _, values in kept)]
            for i in range(len(places))
        ]
    if not panels:
        return None
    caption = f"Of the last measurement in `{file}`, of the smallest seed. Colour and marker are those of a kind."
    head = ("curve", "round", "x", "y", "kind")
    return Card(name, titled("Embedding", setting), caption, panels, (), head, rows)


# ------------------------------------------------------------------ cost
def cost(section: Section, setting: str, prefix: str) -> Iterator[tuple[str, Card]]:
    """Seconds of a round by phase."""
    groups = [group for group in section.at(setting) if any(map(phase_seconds, group.runs.values()))]
    if not groups:
        return
    means = [mean_phases(group) for group in groups]
    names = [group.line for group in groups]
    parts = [(phase, np.array([one.get(phase, 0.0) for one in means])) for phase in (*VISITS, *PHASES[1:])]
    parts = [(phase, lengths) for phase, lengths in parts if lengths.any()]
    height = 0.26 * len(names) + 0.65
    caption = "Median seconds of a round without the first, by phase, the mean over the seeds and over the workers. "
    caption += "Of a run whose folder is not here, those of its last round."
    legend = [(at, phase.replace("_", " and ")) for at, (phase, _) in enumerate(parts)]
    margins = (max(room(names), 0.6), 0.45, 0.15, 0.1)
    panel = Panel(stacked(parts, names, "seconds a round"), "seconds of a round by phase", height, legend, margins)
    rows = [[name, phase, float(lengths[at])] for at, name in enumerate(names) for phase, lengths in parts]
    title = "Seconds of a round"
    head = ("curve", "phase", "seconds")
    yield (
        "Cost",
        Card(named(prefix, setting, "seconds"), titled(title, setting), caption, [panel], (), head, rows),
    )


def phase_seconds(run: object) -> dict[str, float]:
    """Median seconds of each phase of a run, without the first round."""
    rows = getattr(run, "rows", [])[1:]
    found = {phase: [row[f"time/{phase}"] for row in rows if f"time/{phase}" in row] for phase in (*VISITS, *PHASES)}
    return {phase: float(np.median(values)) for phase, values in found.items() if values}


def mean_phases(group: Group) -> dict[str, float]:
    """The mean of the phases over the runs of a group."""
    found = [phase_seconds(run) for run in group.runs.values()]
    keys = dict.fromkeys(key for one in found for key in one)
    return {key: float(np.mean([one[key] for one in found if key in one])) for key in keys}
