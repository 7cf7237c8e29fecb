"""The page of a report, and the files of tables beside it."""

from __future__ import annotations

import base64
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from itertools import groupby
from typing import Any

from jinja2 import Environment, StrictUndefined

from fl_lightning import __version__
from fl_lightning.bench.comparison import Comparison
from fl_lightning.bench.layout import Sheet, latex_tables, markdown, prose, renamed, with_names
from fl_lightning.bench.readings import conclusions, readings_sheet
from fl_lightning.bench.table import first_upper, sheets, summary_lines, what_is_shown
from fl_lightning.errors import count, printable, require
from fl_lightning.plotting.drawing import in_style
from fl_lightning.plotting.style import DARK, DASHES, LIGHT, LINE_COLOURS, LINES_DARK, MARKERS, variables
from fl_lightning.report.cautions import cautions
from fl_lightning.report.figures import Card
from fl_lightning.report.gallery import SETTINGS, cards_of
from fl_lightning.report.sections import Section, choose_metric, sections_of, with_other_names
from fl_lightning.report.sites import HEADING, parts_of, parts_sheet
from fl_lightning.report.sources import Found
from fl_lightning.report.studies import Study
from fl_lightning.report.tables import (
    commands,
    common_config,
    config_sheet,
    cost_sheet,
    environment_sheet,
    numbers_csv,
    results_sheets,
    runs_csv,
    runs_sheet,
    shared_first,
)

# what stands with the results of a setting
WITH_RESULTS = ("Accuracy", "Metric", HEADING)
PlacedCard = tuple[Section, str, str, Card]
READINGS = "Which readings are consistent with the source"
MARKER_SHAPES = {
    "o": '<circle cx="17" cy="5" r="3"/>',
    "s": '<path d="M14 2h6v6h-6z"/>',
    "^": '<path d="M17 1l4 7h-8z"/>',
    "D": '<path d="M17 1l4 4-4 4-4-4z"/>',
    "v": '<path d="M17 9l4-7h-8z"/>',
    "P": '<path d="M15 1h4v2h2v4h-2v2h-4v-2h-2v-4h2z"/>',
}


@dataclass(frozen=True)
class Asked:
    """What a report is asked for.

    Args:
        metric: tag of the metric; None for the usual one.
        minimize: whether smaller values of it are better.
        baseline: label to compare with; None for FedAvg.
        target: value of the metric for which rounds are counted; None for none.
        names: what methods, settings and metrics are called, where it is something else, by what they are.
        command: the command line that makes the report, without ``--output``.
        title: title of the page.
    """

    metric: str | None = None
    minimize: bool = False
    baseline: str | None = None
    target: float | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    command: Sequence[str] = ("fl-lightning", "report")
    title: str = "Report"


@dataclass
class Report:
    """What a report shows.

    Args:
        sections: by data set.
        studies: the studies, with the tables of their suites.
        asked: what was asked for.
        warnings: what a reader has to know.
    """

    sections: list[Section]
    studies: list[Study]
    asked: Asked
    warnings: list[str] = field(default_factory=list)

    def cards(self) -> Iterator[PlacedCard]:
        """All figures, each with its section, setting and heading; no two have one name."""
        several, taken = len(self.sections) > 1, Counter[str]()
        for section in self.sections:
            for setting, heading, card in cards_of(section, section.title if several else ""):
                taken[card.name] += 1
                number = taken[card.name]
                named = card if number == 1 else replace(card, name=f"{card.name}-{number}")
                yield section, setting, heading, named

    def files(self, stem: str) -> dict[str, str]:
        """All files of the report by name."""
        made = {f"{stem}.md": self.in_markdown(), f"{stem}.tex": self.in_latex()}
        made[f"{stem}.csv"] = numbers_csv([one for section in self.sections for one in section.comparisons().values()])
        made[f"{stem}.runs.csv"] = runs_csv(self.sections)
        if any(study.suite.tables for study in self.studies):
            made[f"{stem}.paper.csv"] = numbers_csv([one for study in self.studies for one in comparisons(study)])
        return {f"{stem}.html": self.in_html(list(made)), **made}

    def in_html(self, files: Sequence[str]) -> str:
        """The page."""
        environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
        template = environment.from_string(package_text("page.html.j2"))
        runs = [run for section in self.sections for run in section.runs]
        cards = list(self.cards())
        parts = [self.part(at, section, cards) for at, section in enumerate(self.sections)]
        studies = [view_of(at, study, self.asked) for at, study in enumerate(self.studies) if study.suite.tables]
        contents = [(one["anchor"], one["title"]) for one in (*studies, *parts)] + [("environment", "Environment")]
        groups = sum(len(section.groups) for section in self.sections)
        with in_style():
            return template.render(
                version=__version__,
                title=self.asked.title,
                told=f"{count(len(runs), 'run')} of {count(groups, 'configuration')}",
                **{
                    "light": variables(LIGHT, LINE_COLOURS),
                    "dark": variables(DARK, LINES_DARK),
                    "css": package_text("page.css"),
                    "script": package_text("page.js"),
                },
                **{"contents": contents, "warnings": self.warnings, "studies": studies, "sections": parts},
                **{"environment": environment_sheet(runs), "commands": commands(runs)[:60], "files": files},
                command=shlex.join(self.asked.command),
                **{"swatch": swatch, "data_uri": data_uri, "command_of": self.command_of},
            )

    def part(self, at: int, section: Section, cards: Sequence[PlacedCard]) -> dict[str, Any]:
        """What the page shows of a section; ``cards`` are those of all sections."""
        own = [(setting, heading, card) for of, setting, heading, card in cards if of is section]
        by_heading: dict[str, list[Card]] = {}
        for _, heading, card in own:
            if heading not in WITH_RESULTS:
                by_heading.setdefault(heading, []).append(card)
        settings = []
        for number, part in enumerate(section.parts()):
            (setting,) = part.settings
            first = [(heading, card) for of, heading, card in own if of == setting and heading in WITH_RESULTS]
            settings.append(
                {
                    **{"anchor": f"setting-{at}-{number}", "name": setting, "own": part.groups[0].own},
                    **{"results": list(results_sheets(part)), "parts": parts_sheets(section, setting)},
                    "accuracy": [card for heading, card in first if heading != HEADING],
                    "bars": [card for heading, card in first if heading == HEADING],
                }
            )
        left = len(section.settings) - SETTINGS
        told = [f"{count(len(section.runs), 'run')} by {section.metric.label}."]
        told += [f"Differences are to {section.baseline}."] if section.baseline else []
        told += [f"The figures are of the first {SETTINGS} settings of {SETTINGS + left}."] if left > 0 else []
        common = common_config(section)
        return {
            **{"anchor": f"section-{at}", "title": section.title, "told": " ".join(told)},
            **{
                "settings": settings,
                "rest": list(by_heading.items()),
                "accuracy": section.metric.tag.endswith("accuracy"),
            },
            **{"configs": config_sheet(section), "common": common, "shared": shared_first(common)},
            **{
                "runs": runs_sheet(section),
                "cost": cost_sheet(section),
                "seeds": len({run.seed for run in section.runs}),
            },
        }

    def command_of(self, name: str) -> str:
        """The command that makes one figure."""
        return shlex.join([*self.asked.command, "--figure", name, "--output", f"{name}.pdf"])

    def sheets(self) -> Iterator[tuple[str, Sheet]]:
        """All tables, each with its heading."""
        for study in self.studies:
            names = {**study.suite.names, **self.asked.names}
            shown = [(READINGS, sheet) for sheet in readings_sheets(study)]
            shown += [(table_heading(one), begun(sheet)) for one in comparisons(study) for sheet in sheets(one)]
            for heading, sheet in shown:
                yield f"{study.suite.title}: {with_names(heading, names)}", renamed(sheet, names)
        for section in self.sections:
            for part in section.parts():
                named = ", ".join(filter(None, [section.title, *part.settings]))
                yield from ((named, sheet) for sheet in results_sheets(part))
                yield from ((named, sheet) for sheet in parts_sheets(section, part.settings[0]))
            for made in (config_sheet(section), runs_sheet(section), cost_sheet(section)):
                if made is not None:
                    yield section.title, made

    def in_markdown(self) -> str:
        """The warnings and all tables in Markdown."""
        lines = [f"# {prose(self.asked.title)}", "", *(f"- Warning: {prose(one)}" for one in self.warnings), ""]
        for heading, found in groupby(self.sheets(), key=lambda one: one[0]):
            lines += [f"## {prose(heading)}", "", *(line for _, sheet in found for line in markdown(sheet))]
        return "\n".join(lines)

    def in_latex(self) -> str:
        """All tables in LaTeX."""
        lines = ["% \\usepackage{booktabs}", *(f"% warning: {printable(one)}" for one in self.warnings)]
        return "\n".join([*lines, *latex_tables(sheet for _, sheet in self.sheets())])


def make_report(found: Found, asked: Asked) -> Report:
    """The report of some runs and studies.

    Raises:
        UsageError: no run has the metric, no line is called like the baseline, the target cannot be reached, or two
            lines would have one name.
    """
    sections: list[Section] = []
    if found.runs:
        metric = choose_metric(found.runs, asked.metric, asked.minimize, asked.target)
        sections += sections_of(found.runs, metric, asked.baseline)
    warnings = [f"{note}." for note in found.notes]
    for study in found.studies:
        warnings += [f"{note}." for note in study.notes]
        suite = study.suite
        minimize = suite.minimize if asked.metric is None else asked.minimize
        metric = choose_metric(study.runs, asked.metric, minimize, asked.target, (suite.metric,))
        of_study = sections_of(study.runs, metric, asked.baseline, suite.title)
        # seeds that were added until a pair was decided have no interval of Student's
        intervals = {"interval": suite.interval, "confidence": suite.confidence, "decide": suite.decide}
        sections += [replace(section, names=suite.names, intervals=intervals) for section in of_study]
    lines = list(dict.fromkeys(line for section in sections for line in section.lines))
    hint = f"no run is called so; there are {', '.join(lines)}"
    require(asked.baseline is None or asked.baseline in lines, "--baseline", asked.baseline, hint)
    sections = [with_other_names(section, {**section.names, **asked.names}) for section in sections]
    for section in sections:
        of = f"{section.title}: " if len(sections) > 1 else ""
        warnings += [f"{of}{one}" for one in cautions(section)]
    return Report(sections, found.studies, asked, list(dict.fromkeys(warnings)))


def parts_sheets(section: Section, setting: str) -> list[Sheet]:
    """The tables of the sites and of the clients of a setting."""
    return [parts_sheet(section, setting, parts) for parts in parts_of(section, setting)]


def comparisons(study: Study) -> list[Comparison]:
    """The tables of a study's suite."""
    return [Comparison(study.suite, table, study.cells, study.results) for table in study.suite.tables]


def begun(sheet: Sheet) -> Sheet:
    """A table without the rows of which nothing is done yet, which are named below it instead."""
    own = len(sheet.names)
    waiting = [line for line in sheet.lines if {text.text for text in line[own:]} == {"waiting"}]
    if not waiting:
        return sheet
    named = "; ".join(", ".join(text.text for text in line[:own]) for line in waiting)
    note = " ".join(filter(None, [sheet.note, f"Nothing is done yet of: {named}."]))
    return replace(sheet, lines=[line for line in sheet.lines if line not in waiting], note=note)


def readings_sheets(study: Study) -> list[Sheet]:
    """Which readings are consistent with the published numbers, for a study of readings."""
    is_of_readings = study.suite.has_readings
    return [readings_sheet(study.suite, comparisons(study))] if is_of_readings else []


def table_heading(comparison: Comparison) -> str:
    """What a table of a paper is called."""
    table = comparison.table
    page = f"page {table.page} of the source" if str(table.page).isdigit() else table.page
    return f"{table.caption or first_upper(what_is_shown(comparison))}{f' ({page})' if page is not None else ''}"


def view_of(at: int, study: Study, asked: Asked) -> dict[str, Any]:
    """What the page shows of a study."""
    names = {**study.suite.names, **asked.names}
    states = Counter(
        study.results[cell.digest].state if cell.digest in study.results else "waiting" for cell in study.cells
    )
    told = ", ".join(f"{states[state]} {state}" for state in ("done", "running", "waiting", "failed") if states[state])
    scale = study.cells[0].scale if study.cells else 1.0
    tables = []
    for sheet in readings_sheets(study):
        said = list(conclusions(study.suite, comparisons(study)))
        tables.append({"heading": READINGS, "sheets": [renamed(sheet, names)], "verdicts": said})
    for one in comparisons(study):
        verdicts = [with_names(line.removeprefix("- "), names) for line in summary_lines(one) if line]
        shown = [renamed(begun(sheet), names) for sheet in sheets(one)]
        tables.append({"heading": with_names(table_heading(one), names), "sheets": shown, "verdicts": verdicts})
    return {
        **{"anchor": f"study-{at}", "title": study.suite.title, "source": study.suite.source, "tables": tables},
        **{"told": f"{count(len(study.cells), 'cell')}: {told}{f', at scale {scale:g}' if scale != 1 else ''}."},
        "notes": study.suite.notes,
    }


def swatch(at: int) -> str:
    """A piece of a curve, for the legend of a page."""
    colour, dash = f"var(--line-{at % len(LINE_COLOURS)})", DASHES[at % len(DASHES)]
    strokes = " ".join(f"{2 * float(one):g}" for one in dash.split())
    style = f' stroke-dasharray="{strokes}"' if strokes else ""
    mark = MARKER_SHAPES.get(MARKERS[at // len(DASHES) % len(MARKERS)], "")
    line = f'<line x1="0" y1="5" x2="34" y2="5" stroke="{colour}" stroke-width="2.2"{style}/>'
    return f'<svg viewBox="0 0 34 10" aria-hidden="true" fill="{colour}">{line}{mark}</svg>'


def data_uri(text: str) -> str:
    """A table as an address that a browser saves."""
    return f"data:text/csv;charset=utf-8;base64,{base64.b64encode(text.encode(errors='backslashreplace')).decode()}"


def package_text(name: str) -> str:
    """A file of this package."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
