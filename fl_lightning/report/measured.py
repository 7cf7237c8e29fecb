"""The figures of what callbacks have measured and left in files of arrays."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fl_lightning.errors import printable
from fl_lightning.pictures import Panel, Shown, over
from fl_lightning.pictures.drawing import MOST_NAMES, bars, curves, heat, numbered_line, points, visible
from fl_lightning.pictures.figure import entry_shown, points_by_kind
from fl_lightning.pictures.shipped import SHIPPED
from fl_lightning.report.curves import PANELS, against_rounds, band, legend_of, number_of
from fl_lightning.report.figures import HEAT_MARGINS, HEIGHT, Card, Drawing, curve_id, room
from fl_lightning.report.run import PLAN, ReportedRun
from fl_lightning.report.sections import Group, Section
from fl_lightning.report.sites import BARS

# values of a map in its file of data; values that are drawn; kinds of points that are told apart
MOST_CELLS, LARGEST_DRAWN, MOST_KINDS = 10_000, 1_000_000, 256
# the margins of what has no numbers along its axes
BARE = (0.1, 0.1, 0.1, 0.3)
# arrays by name, each as it is drawn
Declared = Mapping[str, tuple[Shown, Panel]]


def measured_cards(section: Section, setting: str) -> Iterator[tuple[str, Card]]:
    """The figures of all files of measurements of a setting, each with its heading."""
    runs = [run for group in section.at(setting) for run in group.runs.values()]
    known = list(SHIPPED)
    files = {name for run in runs for name in run.files(".npz")} - {PLAN}
    for file in sorted(files, key=lambda name: (known.index(name) if name in SHIPPED else len(known), name)):
        declared = {name: how for run in runs for name, how in declared_in(run, file).items()}
        heading = SHIPPED[file].heading if file in SHIPPED else f"Measured in {printable(file)}"
        for cards in dict.fromkeys(CARDS[panel.kind] for _, panel in declared.values()):
            alike = {name: how for name, how in declared.items() if CARDS[how[1].kind] is cards}
            for card in cards(section, setting, file, alike):
                name = f"{file.removesuffix('.npz')}-{card.name}"
                yield heading, replace(card, name=name, title=f"{heading}{card.title}")


def declared_in(run: ReportedRun, file: str) -> Declared:
    """How the arrays of a run's file are drawn: as their callback declares it, or else by the number of their axes."""
    if file in SHIPPED:
        panels = (panel for picture in SHIPPED[file].pictures if picture.compared for panel in picture.panels)
        return {shown.array: (shown, panel) for panel in panels for shown in panel.shown}
    depths = {name: values.ndim for name, values in run.arrays(file).values.items()}
    return {name: (Shown(name, name), BY_AXES[depth]) for name, depth in depths.items() if depth in BY_AXES}


def entry_drawn(values: np.ndarray, shown: Shown, panel: Panel) -> np.ndarray | None:
    """What is drawn of an entry; None where it has other axes than that needs, or nothing, or too much."""
    try:
        made = entry_shown(shown, values)
    except (ValueError, IndexError):
        return None
    fits = made.ndim == AXES.get(panel.kind, 1) and (panel.kind != "points" or made.shape[1] == 2)
    return made if fits and 0 < made.size <= LARGEST_DRAWN else None


def not_drawn(run: ReportedRun) -> Iterator[str]:
    """That what should be drawn of a run's measurements cannot be."""
    for file in run.files(".npz"):
        arrays = run.arrays(file)
        for name, how in declared_in(run, file).items():
            if name in arrays.others:
                yield f"{printable(file)}: {name} of shape {arrays.others[name]} is not drawn"
            elif name in arrays.values and entry_drawn(arrays.values[name][-1], *how) is None:
                yield f"{printable(file)}: {name} of shape {arrays.values[name].shape} is not drawn"


def last_of(
    section: Section, setting: str, file: str, shown: Shown, panel: Panel
) -> list[tuple[Group, int, np.ndarray]]:
    """What is drawn of the last measurement that all runs of a group have in common, with its round.

    It is the mean over the runs of what is finite, taken of what is drawn, since clients of two seeds are not the same.
    Groups without anything, and those whose runs have different shapes, are left out.
    """
    drawn = []
    for group in section.at(setting):
        files = [run.arrays(file) for run in group.runs.values()]
        measured = [
            dict(zip(arrays.rounds[shown.array].tolist(), arrays.values[shown.array], strict=True))
            for arrays in files
            if shown.array in arrays.values
        ]
        last = max(set.intersection(*map(set, measured)), default=None) if measured else None
        entries = [entry_drawn(values[last], shown, panel) for values in measured if last is not None]
        known = [entry for entry in entries if entry is not None]
        if last is not None and len({entry.shape for entry in known}) == 1:
            mean = over(0)(np.stack(known)) * (100.0 if panel.percent else 1.0)
            if np.isfinite(mean).any():
                drawn.append((group, int(last), mean))
    return drawn


def what_of(shown: Shown, panel: Panel) -> str:
    """What the values of an array are, with their unit."""
    return ", ".join(filter(None, [panel.values, shown.label, "%" * panel.percent]))


def when(rounds: Sequence[int], averaged: str = "the seeds") -> str:
    """Of which rounds something is, in words."""
    low, high = min(rounds), max(rounds)
    rounds_ = f"round {low}" if low == high else f"rounds {low} to {high}"
    return f"The last measurement, {rounds_}, as the mean over {averaged}."


def along_cards(section: Section, setting: str, file: str, declared: Declared) -> Iterator[Card]:
    """Curves or bars over an axis, an array in each drawing; curves where there are too many names for bars."""
    figures: dict[str, list[tuple[str, list[tuple[Group, int, np.ndarray]], list[str], list[str]]]] = defaultdict(list)
    for array, (shown, panel) in declared.items():
        drawn = last_of(section, setting, file, shown, panel)
        if not drawn:
            continue
        length = max(len(values) for *_, values in drawn)
        named = drawn[0][0].first.arrays(file).names
        names = list(panel.places) or next((named[name] for name in panel.names[:1] if name in named), [])
        if panel.axis == "class":
            names = drawn[0][0].first.names_in_plan.get("class_names", [])
        numbers = [str(at) for at in range(length)]
        names = names if len(names) == length else numbers
        kind = "curves" if panel.kind == "bars" and len(names) > MOST_NAMES else panel.kind
        figures[f"by-{panel.axis.split(',')[0]}" if kind == "curves" else kind].append((array, drawn, names, numbers))
    for figure, arrays in figures.items():
        of_bars, spectrum = figure == "bars", figure == "spectrum"
        drawings, rows = list[Drawing](), list[list[Any]]()
        for array, drawn, names, numbers in arrays:
            shown, panel = declared[array]
            # above the drawing, since names below it may leave a label beside it too little room
            title = "\n".join(filter(None, [panel.title, what_of(shown, panel)]))
            labels = {"xlabel": panel.axis, "ylabel": "singular value" if spectrum else "", "title": title}
            top = 0.14 + 0.16 * len(title.splitlines())
            told = f"{what_of(shown, panel) or panel.title} by {panel.axis}"
            ticks = names if of_bars or panel.names or panel.places or names != numbers else None
            below = max(room(names), 0.48) if ticks and max(map(len, names)) > 4 else 0.48
            # curves are all in one drawing, and bars a few at a time
            for start in range(0, len(drawn), BARS if of_bars else len(drawn)):
                if of_bars:
                    some = [(number_of(section, group), values, "") for group, _, values in drawn[start : start + BARS]]
                    draw, legend = bars(some, names, **labels), [(at, section.lines[at]) for at, *_ in some]
                else:
                    clean = visible if spectrum else np.asarray
                    numbered = [(number_of(section, group), clean(values)) for group, _, values in drawn]
                    lines = [numbered_line(number, values, gid=curve_id(number)) for number, values in numbered]
                    draw, legend = curves(lines, "y" if spectrum else panel.log, ticks, **labels), []
                drawings.append(Drawing(draw, told, HEIGHT, legend, (0.72, below, 0.12, top)))
            for group, round_, values in drawn:
                rows += [[array, group.line, round_, names[at], float(value)] for at, value in enumerate(values)]
        place = "index" if spectrum else figure.removeprefix("by-")
        alone = of_bars or len(figures.keys() - {"bars"}) == 1
        measured = [(group, round_) for _, drawn, *_ in arrays for group, round_, _ in drawn]
        caption = when(
            [round_ for _, round_ in measured],
            "the clients that were measured and the seeds" if of_bars else "the seeds",
        )
        if spectrum:
            caption += " The scale is logarithmic; values that are rounding errors are left out."
        legend = [] if of_bars else legend_of(section, list({group.line: group for group, _ in measured}.values()))
        head = ("what", "curve", "round", "place" if of_bars else place, "value")
        yield Card(figure, "" if alone else f", by {place}", caption, drawings, legend, head, rows)


def map_cards(section: Section, setting: str, file: str, declared: Declared) -> Iterator[Card]:
    """A matrix for each method, all of them on one scale."""
    for name, (shown, panel) in declared.items():
        drawn = last_of(section, setting, file, shown, panel)
        if not drawn:
            continue
        finite = np.concatenate([values[np.isfinite(values)] for *_, values in drawn])
        limits = panel.limits or (float(finite.min()), float(finite.max()))
        what, (down, across) = what_of(shown, panel), panel.axis.split(", ")
        drawings = []
        for group, _, values in drawn[:PANELS]:
            classes = group.first.names_in_plan.get("class_names", [])
            named = classes if down == "class" and values.shape == (len(classes), len(classes)) else None
            draw = heat(values, what, (named, named), limits=limits, title=group.line, ylabel=down, xlabel=across)
            margins = (room(named), room(named), *HEAT_MARGINS[2:]) if named else HEAT_MARGINS
            drawings.append(Drawing(draw, f"{what}, {group.line}", margins=margins))
        rows = [
            [group.line, round_, i, j, float(values[i, j])]
            for group, round_, values in drawn
            if values.size <= MOST_CELLS
            for i, j in np.ndindex(*values.shape)
        ]
        left = f" The first {PANELS} of {len(drawn)} are drawn." if len(drawn) > PANELS else ""
        head = ("curve", "round", down, across if down != across else f"other {across}", "value")
        caption = when([round_ for _, round_, _ in drawn]) + left
        yield Card(name, f": {what}", caption, drawings, (), head, rows)


def course_cards(section: Section, setting: str, file: str, declared: Declared) -> Iterator[Card]:
    """Numbers against the rounds, an array in each drawing."""

    def values_of(run: ReportedRun, name: str) -> dict[int, float]:
        arrays = run.arrays(file)
        known = name in arrays.values and arrays.values[name].ndim == 1
        return dict(zip(arrays.rounds[name].tolist(), arrays.values[name].tolist(), strict=True)) if known else {}

    wanted = {name: (what_of(*how), 1.0) for name, how in declared.items()}
    drawings, rows, legend = against_rounds(section, setting, wanted, values_of)
    if drawings:
        head = ("what", "curve", "round", "mean", "deviation", "seeds")
        yield Card("course", "", band(section.at(setting)), drawings[:PANELS], legend, head, rows)


def points_cards(section: Section, setting: str, file: str, declared: Declared) -> Iterator[Card]:
    """Points in the plane for each method, with the colour and the marker of their class."""
    for name, (shown, panel) in declared.items():
        drawings, rows = [], []
        for group in section.at(setting):
            values = group.first.arrays(file).values
            places = entry_drawn(values[name][-1], shown, panel) if name in values else None
            if places is None or not np.isfinite(places).any():
                continue
            labels = values.get(panel.kinds)
            kinds = labels[-1] if labels is not None and labels[-1].shape == places.shape[:1] else np.zeros(len(places))
            if not (np.isfinite(kinds).all() and len(np.unique(kinds)) <= MOST_KINDS):
                kinds = np.zeros(len(places))
            draw = points(points_by_kind(places, kinds.astype(int)), bare=True, title=group.line)
            drawings.append(Drawing(draw, f"{shown.label}, {group.line}", margins=BARE))
            rows += [[group.line, *map(float, place), int(kind)] for place, kind in zip(places, kinds, strict=True)]
        if drawings:
            caption = "The last measurement of the smallest seed; each class has a colour and a marker."
            yield Card(name, "", caption, drawings[:PANELS], (), ("curve", "x", "y", "class"), rows)


# what the callbacks of others may leave
BY_AXES = {1: Panel("course", ()), 2: Panel("curves", ()), 3: Panel("map", (), axis="row, column")}
# axes of what is drawn of one measurement; the others are curves or bars
AXES = {"course": 0, "map": 2, "points": 2}
CARDS: dict[str, Callable[[Section, str, str, Declared], Iterator[Card]]] = {
    **{"course": course_cards, "map": map_cards, "points": points_cards},
    **dict.fromkeys(("curves", "spectrum", "bars"), along_cards),
}
