"""How well each site and each client is served: tables and bars of all of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fl_lightning.bench.layout import NONE, Sheet, Text
from fl_lightning.plotting.drawing import MOST_NAMES, bars
from fl_lightning.plotting.values import MODELS
from fl_lightning.records.summary import few_digits
from fl_lightning.report.curves import number_of
from fl_lightning.report.figures import Card, Drawing
from fl_lightning.report.run import ReportedRun
from fl_lightning.report.sections import Group, Section, in_percent

# more bars side by side cannot be told apart
BARS = 4
HEADING = "Sites and clients"


@dataclass
class Parts:
    """The numbers of the sites, or of the clients, of a setting.

    Args:
        kind: ``site`` or ``client``.
        values: of each metric, by group, by the name of the part; shares are in percent.
        examples: number of training examples by the name of the part; empty where it is not the same in all runs.
        told: which runs and which measurement the numbers are of.
    """

    kind: str
    values: dict[str, dict[int, dict[str, float]]] = field(default_factory=dict)
    examples: Mapping[str, int] = field(default_factory=dict)
    told: str = ""

    @property
    def names(self) -> list[str]:
        """The names of the parts, in the order in which they come."""
        return list(
            dict.fromkeys(name for by_group in self.values.values() for one in by_group.values() for name in one)
        )


def parts_of(section: Section, setting: str) -> Iterator[Parts]:
    """The sites, and the clients, of a setting; those that no run tells of are left out."""
    groups = section.at(setting)
    for made in (sites_of(groups), clients_of(groups)):
        if made.values:
            yield made


def sites_of(groups: Sequence[Group]) -> Parts:
    """What was logged of each domain at last, as the mean over the seeds."""
    found: dict[str, dict[int, dict[str, list[float]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for at, group in enumerate(groups):
        for run in group.runs.values():
            for (site, metric), value in last_of_sites(run).items():
                found[metric][at][site].append(value)
    values = dict[str, dict[int, dict[str, float]]]()
    for metric, by_group in sorted(found.items(), key=lambda one: (one[0] != "accuracy", one[0] != "loss")):
        percent = in_percent(metric, (one for sites in by_group.values() for some in sites.values() for one in some))
        values[f"{metric} in %" if percent else metric] = {
            at: {site: (100.0 if percent else 1.0) * float(np.mean(some)) for site, some in by_site.items()}
            for at, by_site in by_group.items()
        }
    several = any(len(group.runs) > 1 for group in groups)
    told = f"On the test data of each site, the last time it was measured{', as the mean over the seeds' * several}."
    return Parts("site", values, examples_of(groups), told)


def last_of_sites(run: ReportedRun) -> dict[tuple[str, str], float]:
    """The last finite values of a run by site and metric."""
    values: dict[tuple[str, str], float] = {}
    for prefix, ending in (("personal/domain/", "/accuracy"), ("domain/", "")):
        for row in run.rows:
            for tag, value in row.items():
                if tag.startswith(prefix) and np.isfinite(value):
                    site, _, metric = f"{tag.removeprefix(prefix)}{ending}".rpartition("/")
                    values[site, metric] = value
    return values


def clients_of(groups: Sequence[Group]) -> Parts:
    """What ``PersonalAccuracy`` has measured of each client at last, in the run of the smallest seed."""
    values: dict[str, dict[int, dict[str, float]]] = {}
    for at, group in enumerate(groups):
        run = group.first
        arrays = run.arrays("personal.npz").values
        clients = arrays["clients"][-1] if "clients" in arrays else np.zeros(0)
        domains = run.names_in_plan.get("domains", [])
        names = [f"{int(k)} ({domains[int(k)]})" if 0 <= k < len(domains) else f"{k:g}" for k in clients]
        for what, label in MODELS.items():
            measured = arrays[what][-1] if what in arrays else np.zeros(0)
            if measured.shape == (len(names),):
                known = {name: 100 * float(one) for name, one in zip(names, measured, strict=True) if np.isfinite(one)}
                if known:
                    values.setdefault(f"accuracy in %, {label}", {})[at] = known
    several = any(len(group.runs) > 1 for group in groups)
    told = f"On each client's own test data, the last time it was measured{', of the smallest seed' * several}."
    return Parts("client", values, {}, told)


def examples_of(groups: Sequence[Group]) -> dict[str, int]:
    """Training examples of each site, where all runs have one partition whose clients hold one site each."""
    runs = [run for group in groups for run in group.runs.values()]
    if len({run.plan_hash for run in runs}) != 1:
        return {}
    counts, domains = runs[0].label_counts, runs[0].names_in_plan.get("domains", [])
    if counts is None or len(counts) != len(domains) or not all(domains):
        return {}
    made: dict[str, int] = defaultdict(int)
    for domain, number in zip(domains, counts.sum(1), strict=True):
        made[domain] += int(number)
    return dict(made)


def parts_sheet(section: Section, setting: str, parts: Parts) -> Sheet:
    """A table with a row for each part, and for each metric a column of each configuration."""
    groups = section.at(setting)
    with_examples = [name for name in parts.names if name in parts.examples]
    heads: list[tuple[str, Sequence[str]]] = [("training examples", [])] if with_examples else []
    for label, by_group in parts.values.items():
        lines = [groups[at].line for at in by_group]
        heads.append((label, lines) if len(groups) > 1 else (label, []))
    rows = []
    for name in parts.names:
        cells = [str(parts.examples.get(name, NONE))] if with_examples else []
        for label, by_group in parts.values.items():
            shown = "{:.2f}".format if " in %" in label else few_digits
            cells += [shown(one[name]) if name in one else NONE for one in by_group.values()]
        rows.append([Text(name), *map(Text, cells)])
    title = ", ".join(filter(None, [section.title, setting]))
    return Sheet(parts.told, [parts.kind], heads, rows, title=title, key=f"{parts.kind}s")


def parts_cards(section: Section, setting: str) -> Iterator[tuple[str, Card]]:
    """Bars of the accuracies, or else of the first metric, of all parts."""
    groups = section.at(setting)
    for parts in parts_of(section, setting):
        shares = [label for label in parts.values if " in %" in label]
        for label in shares or list(parts.values)[:1]:
            by_group = parts.values[label]
            drawings, rows = [], []
            for first in range(0, len(parts.names), MOST_NAMES):
                names = parts.names[first : first + MOST_NAMES]
                for start in range(0, len(by_group), BARS):
                    some = list(by_group)[start : start + BARS]
                    heights = [
                        (
                            number_of(section, groups[at]),
                            np.array([by_group[at].get(name, np.nan) for name in names]),
                            groups[at].line,
                        )
                        for at in some
                    ]
                    draw = bars(heights, names, ylabel=label, xlabel=parts.kind)
                    told = f"{label} by {parts.kind}"
                    drawings.append(Drawing(draw, told))
            for at, values in by_group.items():
                rows += [[groups[at].line, name, value] for name, value in values.items()]
            name = f"{parts.kind}s-{label.replace(' in %', '')}"
            yield HEADING, Card(name, told, parts.told, drawings, ("curve", parts.kind, label), rows)
