"""Figures of what callbacks have measured and left in files of arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from fl_lightning.errors import printable
from fl_lightning.plotting.figures import Plot, Runs
from fl_lightning.plotting.plots import PLOTS, by_shape
from fl_lightning.report.curves import PANELS
from fl_lightning.report.figures import Card, Drawing
from fl_lightning.report.run import PLAN, Arrays, ReportedRun
from fl_lightning.report.sections import Section


def measured_cards(section: Section, setting: str) -> Iterator[tuple[str, Card]]:
    """Yield the figures of all files of arrays of a setting, each with its heading."""
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
            drawings = [Drawing(draw, f"{heading}, {one.title}".rstrip(", ")) for draw in one.drawings[:PANELS]]
            if drawings:
                title = ": ".join(filter(None, [heading, one.title]))
                name = f"{file.removesuffix('.npz')}-{one.name.rpartition('/')[2]}"
                yield heading, Card(name, title, caption(rounds, len(one.drawings)), drawings)


def plot_of(file: str) -> tuple[str, Callable[[Runs], Iterator[Plot]]]:
    """Return the heading and the plot function of a file."""
    return PLOTS.get(file, (f"Measured in {printable(file)}", by_shape))


def not_drawn(run: ReportedRun, file: str) -> Iterator[str]:
    """Yield why arrays of a file of a run are not drawn."""
    arrays = run.arrays(file)
    if arrays.problem:
        yield f"{printable(file)} {arrays.problem}"
    if arrays.others:
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


def caption(rounds: set[int], drawings: int) -> str:
    """Return how to read a figure of the last measurement."""
    low, high = min(rounds), max(rounds)
    when = f"round {low}" if low == high else f"rounds {low} to {high}"
    more = f" The first {PANELS} of {drawings} are drawn." if drawings > PANELS else ""
    return f"The last measurement, {when}, as the mean over the seeds.{more}"
