"""The accuracy of each site and each client, as tables and bars."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from fl_lightning.bench.table_rendering import NONE, StyledText, TextTable
from fl_lightning.plotting.drawing import MOST_NAMES, bars
from fl_lightning.plotting.values import MODELS
from fl_lightning.report.figures import Card, number_drawings
from fl_lightning.report.reading import measured, plan_of
from fl_lightning.report.runs import Configuration
from fl_lightning.report.sections import Section, in_percent
from fl_lightning.storage.metric_format import few_digits

# bars next to each other at most
BARS = 4
HEADING = "Sites and clients"


@dataclass
class Parts:
    """The numbers of the sites, or of the clients, of a setting.

    Args:
        kind: ``site`` or ``client``.
        values: by the label of a metric, a frame with a row for each part and a column for each line; shares are in
            percent.
        caption: origin of the numbers.
        examples: number of training examples by name of the part; empty where the runs differ in it.
    """

    kind: str
    values: dict[str, pd.DataFrame]
    caption: str
    examples: Mapping[str, int] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The names of the parts, in order."""
        return list(dict.fromkeys(name for frame in self.values.values() for name in frame.index))


def list_parts(section: Section, setting: str) -> Iterator[Parts]:
    """Yield the sites and the clients of a setting that the runs measured."""
    groups = section.at(setting)
    several = any(len(group.runs) > 1 for group in groups)
    when = "at the last measurement"
    if sites := site_values(section.rounds_at(setting)):
        caption = f"On the test data of each site, {when}{', mean over the seeds' * several}."
        yield Parts("site", sites, caption, examples_of(groups))
    if clients := client_values(groups):
        yield Parts("client", clients, f"On each client's own test data, {when}{', smallest seed' * several}.")


def site_values(rounds: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return the last value of each metric by domain, mean over the seeds."""
    tags = {}
    for tag in rounds:
        if tag.startswith("personal/domain/"):
            tags[tag] = ("accuracy", tag.removeprefix("personal/domain/"))
        elif tag.startswith("domain/"):
            tags[tag] = tag.removeprefix("domain/").rpartition("/")[::-2]
    if not tags:
        return {}
    last = rounds.groupby(["line", "seed"], sort=False)[list(tags)].last().groupby("line", sort=False).mean().T
    made = {}
    for metric in sorted({metric for metric, _ in tags.values()}, key=lambda one: (one != "accuracy", one != "loss")):
        own = {tag: site for tag, (of, site) in tags.items() if of == metric}
        frame = last.loc[list(own)].rename(index=own).groupby(level=0, sort=False).last()
        percent = in_percent(metric, frame.to_numpy().ravel())
        made[f"{metric} in %" if percent else metric] = (100.0 if percent else 1.0) * frame
    return made


def client_values(groups: Sequence[Configuration]) -> dict[str, pd.DataFrame]:
    """Return each client's last accuracies by ``PersonalAccuracy``, in the run of the smallest seed."""
    series: dict[str, dict[str, pd.Series]] = {}
    for group in groups:
        arrays, domains = measured(group.first, "personal.npz").values, plan_of(group.first)[1].get("domains", [])
        clients = arrays["clients"][-1] if "clients" in arrays else np.zeros(0)
        names = [f"{int(k)} ({domains[int(k)]})" if 0 <= k < len(domains) else f"{k:g}" for k in clients]
        for what, label in MODELS.items():
            values = arrays[what][-1] if what in arrays else np.zeros(0)
            if values.shape == (len(names),) and np.isfinite(values).any():
                series.setdefault(f"accuracy in %, {label}", {})[group.line] = pd.Series(100 * values, names)
    return {label: pd.DataFrame(of_lines) for label, of_lines in series.items()}


def examples_of(groups: Sequence[Configuration]) -> dict[str, int]:
    """Return the training examples of each site, if all runs have one partition and each client is one site."""
    runs = [run for group in groups for run in group.runs.values()]
    counts, names = plan_of(runs[0])
    domains = names.get("domains", [])
    equal = len({run.plan for run in runs}) == 1
    if not equal or counts is None or len(counts) != len(domains) or not all(domains):
        return {}
    return pd.Series(counts.sum(1), domains).groupby(level=0, sort=False).sum().to_dict()


def parts_tables(section: Section, setting: str) -> Iterator[TextTable]:
    """Yield a table of the sites and one of the clients, with a column for each metric and method."""
    title = ", ".join(filter(None, [section.title, setting]))
    for parts in list_parts(section, setting):
        names, columns = parts.names, list[list[str]]()
        groups: list[tuple[str, Sequence[str]]] = []
        if any(name in parts.examples for name in names):
            groups.append(("training examples", []))
            columns.append([str(parts.examples.get(name, NONE)) for name in names])
        for label, frame in parts.values.items():
            groups.append((label, list(frame) if len(section.at(setting)) > 1 else []))
            shown = "{:.2f}".format if " in %" in label else few_digits
            texts = frame.reindex(names).map(lambda value, shown=shown: shown(value) if value == value else NONE)
            columns += [texts[line].tolist() for line in texts]
        rows = [list(map(StyledText, row)) for row in zip(names, *columns, strict=True)]
        yield TextTable(parts.caption, [parts.kind], groups, rows, title=title, key=f"{parts.kind}s")


def parts_cards(section: Section, setting: str) -> Iterator[tuple[str, Card]]:
    """Yield bars of the accuracies, or of the first metric if no accuracy was logged."""
    for parts in list_parts(section, setting):
        shares = [label for label in parts.values if " in %" in label]
        for label in shares or list(parts.values)[:1]:
            frame, drawings = parts.values[label].reindex(parts.names), []
            for first in range(0, len(frame), MOST_NAMES):
                part = frame.iloc[first : first + MOST_NAMES]
                heights = [(section.lines.index(line), part[line].to_numpy(), line) for line in part]
                for start in range(0, len(heights), BARS):
                    some = heights[start : start + BARS]
                    drawings.append(bars(some, list(part.index), ylabel=label, xlabel=parts.kind))
            name = f"{parts.kind}s-{label.replace(' in %', '')}"
            yield HEADING, Card(name, f"{label} by {parts.kind}", parts.caption, number_drawings(drawings))
