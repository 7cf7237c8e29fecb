"""The accuracy of each site and each client: tables and bars of all of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fl_lightning.bench.layout import NONE, Sheet, Text
from fl_lightning.plotting.drawing import MOST_NAMES, bars
from fl_lightning.plotting.values import MODELS
from fl_lightning.records.summary import few_digits
from fl_lightning.report.figures import Card, Drawing
from fl_lightning.report.sections import Group, Section, in_percent

# more bars side by side cannot be told apart
BARS = 4
HEADING = "Sites and clients"


@dataclass
class Parts:
    """The numbers of the sites, or of the clients, of a setting.

    Args:
        kind: ``site`` or ``client``.
        values: numbers by metric, by the line of the group, by the name of the part; shares are in percent.
        examples: number of training examples by the name of the part; empty where it is not the same in all runs.
        told: the runs and the measurement of the numbers.
    """

    kind: str
    values: dict[str, dict[str, dict[str, float]]]
    told: str
    examples: Mapping[str, int] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The names of the parts, in their order."""
        return list(dict.fromkeys(name for lines in self.values.values() for one in lines.values() for name in one))


def parts_of(section: Section, setting: str) -> Iterator[Parts]:
    """Yield the sites and the clients of a setting, where a run has measured them."""
    groups = section.at(setting)
    several = any(len(group.runs) > 1 for group in groups)
    when = "the last time it was measured"
    if sites := sites_of(groups):
        told = f"On the test data of each site, {when}{', as the mean over the seeds' * several}."
        yield Parts("site", sites, told, examples_of(groups))
    if clients := clients_of(groups):
        yield Parts("client", clients, f"On each client's own test data, {when}{', of the smallest seed' * several}.")


def sites_of(groups: Sequence[Group]) -> dict[str, dict[str, dict[str, float]]]:
    """Return the last finite value of each metric of each domain, as the mean over the seeds."""
    found: dict[str, dict[str, dict[str, list[float]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for group in groups:
        for run in group.runs.values():
            last: dict[tuple[str, str], float] = {}
            for prefix, ending in (("personal/domain/", "/accuracy"), ("domain/", "")):
                for tag, value in (item for row in run.rows for item in row.items()):
                    if tag.startswith(prefix) and np.isfinite(value):
                        site, _, metric = f"{tag.removeprefix(prefix)}{ending}".rpartition("/")
                        last[site, metric] = value
            for (site, metric), value in last.items():
                found[metric][group.line][site].append(value)
    values = {}
    for metric, by_line in sorted(found.items(), key=lambda one: (one[0] != "accuracy", one[0] != "loss")):
        percent = in_percent(metric, (one for sites in by_line.values() for some in sites.values() for one in some))
        values[f"{metric} in %" if percent else metric] = {
            line: {site: (100.0 if percent else 1.0) * float(np.mean(some)) for site, some in sites.items()}
            for line, sites in by_line.items()
        }
    return values


def clients_of(groups: Sequence[Group]) -> dict[str, dict[str, dict[str, float]]]:
    """Return the last accuracies of each client by ``PersonalAccuracy``, in the run of the smallest seed."""
    values: dict[str, dict[str, dict[str, float]]] = {}
    for group in groups:
        arrays, domains = group.first.arrays("personal.npz").values, group.first.names_in_plan.get("domains", [])
        clients = arrays["clients"][-1] if "clients" in arrays else np.zeros(0)
        names = [f"{int(k)} ({domains[int(k)]})" if 0 <= k < len(domains) else f"{k:g}" for k in clients]
        for what, label in MODELS.items():
            measured = arrays[what][-1] if what in arrays else np.zeros(0)
            if measured.shape == (len(names),) and np.isfinite(measured).any():
                pairs = zip(names, measured.tolist(), strict=True)
                known = {name: 100 * value for name, value in pairs if np.isfinite(value)}
                values.setdefault(f"accuracy in %, {label}", {})[group.line] = known
    return values


def examples_of(groups: Sequence[Group]) -> dict[str, int]:
    """Return the training examples of each site, if all runs have one partition, and each client holds one site."""
    runs = [run for group in groups for run in group.runs.values()]
    counts, domains = runs[0].label_counts, runs[0].names_in_plan.get("domains", [])
    equal = len({run.plan_hash for run in runs}) == 1
    if not equal or counts is None or len(counts) != len(domains) or not all(domains):
        return {}
    made: dict[str, int] = defaultdict(int)
    for domain, number in zip(domains, counts.sum(1), strict=True):
        made[domain] += int(number)
    return dict(made)


def parts_sheets(section: Section, setting: str) -> Iterator[Sheet]:
    """Yield a table for the sites and one for the clients: a row for each, a column for each metric and method."""
    title = ", ".join(filter(None, [section.title, setting]))
    for parts in parts_of(section, setting):
        with_examples = any(name in parts.examples for name in parts.names)
        heads: list[tuple[str, Sequence[str]]] = [("training examples", [])] * with_examples
        heads += [(label, list(lines) if len(section.at(setting)) > 1 else []) for label, lines in parts.values.items()]
        rows = []
        for name in parts.names:
            cells = [str(parts.examples.get(name, NONE))] * with_examples
            for label, lines in parts.values.items():
                shown = "{:.2f}".format if " in %" in label else few_digits
                cells += [shown(one[name]) if name in one else NONE for one in lines.values()]
            rows.append([Text(name), *map(Text, cells)])
        yield Sheet(parts.told, [parts.kind], heads, rows, title=title, key=f"{parts.kind}s")


def parts_cards(section: Section, setting: str) -> Iterator[tuple[str, Card]]:
    """Yield bars of the accuracies, or else of the first metric, of all parts."""
    for parts in parts_of(section, setting):
        shares = [label for label in parts.values if " in %" in label]
        for label in shares or list(parts.values)[:1]:
            lines, drawings = list(parts.values[label].items()), []
            for first in range(0, len(parts.names), MOST_NAMES):
                names = parts.names[first : first + MOST_NAMES]
                heights = [
                    (section.lines.index(line), np.array([values.get(name, np.nan) for name in names]), line)
                    for line, values in lines
                ]
                for start in range(0, len(heights), BARS):
                    some = heights[start : start + BARS]
                    drawings.append(Drawing(bars(some, names, ylabel=label, xlabel=parts.kind)))
            name = f"{parts.kind}s-{label.replace(' in %', '')}"
            yield HEADING, Card(name, f"{label} by {parts.kind}", parts.told, drawings)
