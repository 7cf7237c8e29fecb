"""The page of a report, and the files of tables beside it."""

from __future__ import annotations

import base64
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import resources
from itertools import groupby
from typing import Any

from jinja2 import Environment, StrictUndefined

from fl_lightning import __version__
from fl_lightning.bench.layout import Sheet, latex_tables, markdown, prose, renamed, with_names
from fl_lightning.bench.readings import conclusions
from fl_lightning.bench.table import heading, progress, readings_sheets, sheets, summary_lines
from fl_lightning.errors import count, printable, require
from fl_lightning.plotting.drawing import in_style
from fl_lightning.plotting.style import DARK, LIGHT, LINE_COLOURS, LINES_DARK, variables
from fl_lightning.report.cautions import cautions
from fl_lightning.report.figures import Card
from fl_lightning.report.gallery import SETTINGS, cards_of
from fl_lightning.report.sections import Section, choose_metric, sections_of, with_other_names
from fl_lightning.report.sites import HEADING, parts_sheets
from fl_lightning.report.sources import Found, Study
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

# headings of figures that stand with the results of a setting
WITH_RESULTS = ("Accuracy", "Metric", HEADING)
READINGS = "Which readings are consistent with the source"


@dataclass(frozen=True)
class Asked:
    """The wishes for a report.

    Args:
        metric: tag of the metric; None for the usual one.
        minimize: whether smaller values of it are better.
        baseline: label to compare with; None for FedAvg.
        target: value of the metric for which rounds are counted; None for none.
        names: other names of methods, settings and metrics.
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
    """A report.

    Args:
        sections: by data set.
        studies: the studies, with the tables of their suites.
        asked: the wishes.
        warnings: what a reader has to know.
    """

    sections: list[Section]
    studies: list[Study]
    asked: Asked
    warnings: list[str] = field(default_factory=list)

    @cached_property
    def cards(self) -> list[tuple[Section, str, str, Card]]:
        """All figures, each with its section, setting and heading; no two have one name."""
        several, taken, made = len(self.sections) > 1, Counter[str](), []
        for section in self.sections:
            for setting, heading_, card in cards_of(section, section.title if several else ""):
                taken[card.name] += 1
                number = taken[card.name]
                own = card if number == 1 else replace(card, name=f"{card.name}-{number}")
                made.append((section, setting, heading_, own))
        return made

    def files(self, stem: str) -> dict[str, str]:
        """All files of the report by name."""
        made = {f"{stem}.md": self.in_markdown(), f"{stem}.tex": self.in_latex()}
        made[f"{stem}.csv"] = numbers_csv([one for section in self.sections for one in section.comparisons.values()])
        made[f"{stem}.runs.csv"] = runs_csv(self.sections)
        if any(study.comparisons for study in self.studies):
            made[f"{stem}.paper.csv"] = numbers_csv([one for study in self.studies for one in study.comparisons])
        return {f"{stem}.html": self.in_html(list(made)), **made}

    def in_html(self, files: Sequence[str]) -> str:
        """The page."""
        environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
        template = environment.from_string(package_text("page.html.j2"))
        runs = [run for section in self.sections for run in section.runs]
        parts = [self.part(at, section) for at, section in enumerate(self.sections)]
        studies = [self.of_study(at, study) for at, study in enumerate(self.studies) if study.suite]
        groups = sum(len(section.groups) for section in self.sections)
        with in_style(in_browser=True):
            return template.render(
                version=__version__,
                title=self.asked.title,
                told=f"{count(len(runs), 'run')} of {count(groups, 'configuration')}",
                light=variables(LIGHT, LINE_COLOURS),
                dark=variables(DARK, LINES_DARK),
                css=package_text("page.css"),
                script=package_text("page.js"),
                warnings=self.warnings,
                studies=studies,
                sections=parts,
                environment=environment_sheet(runs),
                commands=[f"{line}  # {n} runs" if n > 1 else line for line, n in commands(runs)[:60]],
                files=files,
                command=shlex.join(self.asked.command),
                count=count,
                data_uri=data_uri,
            )

    def part(self, at: int, section: Section) -> dict[str, Any]:
        """A section as the page shows it."""
        own = [(setting, heading_, card) for of, setting, heading_, card in self.cards if of is section]
        rest: dict[str, list[Card]] = {}
        for _, heading_, card in own:
            if heading_ not in WITH_RESULTS:
                rest.setdefault(heading_, []).append(card)
        settings = [
            {
                "anchor": f"setting-{at}-{number}",
                "name": setting,
                "own": part.groups[0].own,
                "results": list(results_sheets(part)),
                "parts": list(parts_sheets(section, setting)),
                "curves": [card for of, head, card in own if of == setting and head in WITH_RESULTS[:2]],
                "bars": [card for of, head, card in own if of == setting and head == HEADING],
            }
            for number, (setting, part) in enumerate(zip(section.settings, section.parts, strict=True))
        ]
        told = f"{count(len(section.runs), 'run')} by {section.metric.label}."
        told += f" Differences are to {section.baseline}." * bool(section.baseline)
        if len(settings) > SETTINGS:
            told += f" The figures are of the first {SETTINGS} settings of {len(settings)}."
        common = common_config(section)
        return {
            "anchor": f"section-{at}",
            "title": section.title,
            "told": told,
            "settings": settings,
            "rest": rest,
            "accuracy": section.metric.tag.endswith("accuracy"),
            "configs": config_sheet(section),
            "common": common,
            "shared": shared_first(common),
            "runs": runs_sheet(section),
            "cost": cost_sheet(section),
            "seeds": len({run.seed for run in section.runs}),
        }

    def of_study(self, at: int, study: Study) -> dict[str, Any]:
        """Return the study as the page shows it."""
        suite, scale = study.suite, study.cells[0].scale if study.cells else 1.0
        assert suite is not None
        at_scale = f", at scale {scale:g}" if scale != 1 else ""
        return {
            **{"anchor": f"study-{at}", "title": suite.title, "source": suite.source, "notes": suite.notes},
            "tables": list(self.tables_of(study)),
            "told": f"{count(len(study.cells), 'cell')}: {progress(study.cells, study.results)}{at_scale}.",
        }

    def tables_of(self, study: Study) -> Iterator[dict[str, Any]]:
        """Yield the tables of a study's suite, each with its heading and its verdicts."""
        suite, compared = study.suite, study.comparisons
        if suite is None:
            return
        names = {**suite.names, **self.asked.names}
        for sheet in readings_sheets(suite, compared):
            verdicts = list(conclusions(suite, compared))
            yield {"heading": with_names(READINGS, names), "sheets": [renamed(sheet, names)], "verdicts": verdicts}
        for one in compared:
            verdicts = [with_names(line.removeprefix("- "), names) for line in summary_lines(one) if line]
            shown = [renamed(begun(sheet), names) for sheet in sheets(one)]
            yield {"heading": with_names(heading(one), names), "sheets": shown, "verdicts": verdicts}

    def sheets(self) -> Iterator[tuple[str, Sheet]]:
        """All tables, each with its heading."""
        for study in self.studies:
            for table in self.tables_of(study):
                yield from ((f"{study.title}: {table['heading']}", sheet) for sheet in table["sheets"])
        for section in self.sections:
            for setting, part in zip(section.settings, section.parts, strict=True):
                named = ", ".join(filter(None, [section.title, setting]))
                yield from ((named, sheet) for sheet in (*results_sheets(part), *parts_sheets(section, setting)))
            made = (config_sheet(section), runs_sheet(section), cost_sheet(section))
            yield from ((section.title, sheet) for sheet in made if sheet is not None)

    def in_markdown(self) -> str:
        """The warnings and all tables in Markdown."""
        lines = [f"# {prose(self.asked.title)}", "", *(f"- Warning: {prose(one)}" for one in self.warnings), ""]
        for text, found in groupby(self.sheets(), key=lambda one: one[0]):
            lines += [f"## {prose(text)}", "", *(line for _, sheet in found for line in markdown(sheet))]
        return "\n".join(lines)

    def in_latex(self) -> str:
        """All tables in LaTeX."""
        lines = ["% \\usepackage{booktabs}", *(f"% warning: {printable(one)}" for one in self.warnings)]
        return "\n".join([*lines, *latex_tables(sheet for _, sheet in self.sheets())])


def make_report(found: Found, asked: Asked) -> Report:
    """Make the report of some runs and studies.

    Raises:
        UsageError: no run has the metric, no line is called like the baseline, the target cannot be reached, or two
            lines would have one name.
    """
    sections: list[Section] = []
    if found.runs:
        metric = choose_metric(found.runs, asked.metric, asked.minimize, asked.target)
        sections += sections_of(found.runs, metric, asked.baseline)
    warnings = [f"{note}." for note in (*found.notes, *(note for study in found.studies for note in study.notes))]
    for study in found.studies:
        suite, intervals, names = study.suite, dict[str, Any](), dict[str, str]()
        minimize = suite.minimize if suite and asked.metric is None else asked.minimize
        metric = choose_metric(study.runs, asked.metric, minimize, asked.target, (study.metric,))
        if suite:
            names |= suite.names
            # seeds that were added until a pair was decided have no interval of Student's
            intervals |= {"interval": suite.interval, "confidence": suite.confidence, "decide": suite.decide}
        of_study = sections_of(study.runs, metric, asked.baseline, study.title, **intervals)
        sections += [replace(section, names=names) for section in of_study]
    lines = list(dict.fromkeys(line for section in sections for line in section.lines))
    hint = f"no run is called so; there are {', '.join(lines)}"
    require(asked.baseline is None or asked.baseline in lines, "--baseline", asked.baseline, hint)
    known = [*lines, *(text for section in sections for text in (*section.settings, *section.rounds))]
    axes = [pair for study in found.studies if study.suite for pair in study.suite.axes.items()]
    known += [text for axis, labels in axes for text in (axis, *labels)]
    for old in asked.names:
        hint = "is no method, setting or metric of these runs; give one of their names"
        require(any(with_names(text, {old: ""}) != text for text in known), "--names", old, hint)
    sections = [with_other_names(section, {**section.names, **asked.names}) for section in sections]
    for section in sections:
        of = f"{section.title}: " if len(sections) > 1 else ""
        warnings += [f"{of}{one}" for one in cautions(section)]
    return Report(sections, found.studies, asked, list(dict.fromkeys(warnings)))


def begun(sheet: Sheet) -> Sheet:
    """Return a table without rows of which nothing is done yet, and a note that names them."""
    own = len(sheet.names)
    waiting = [line for line in sheet.lines if {text.text for text in line[own:]} == {"waiting"}]
    if not waiting:
        return sheet
    named = "; ".join(", ".join(text.text for text in line[:own]) for line in waiting)
    note = " ".join(filter(None, [sheet.note, f"Nothing is done yet of: {named}."]))
    return replace(sheet, lines=[line for line in sheet.lines if line not in waiting], note=note)


def data_uri(text: str) -> str:
    """Return a table as an address that a browser saves."""
    return f"data:text/csv;charset=utf-8;base64,{base64.b64encode(text.encode(errors='backslashreplace')).decode()}"


def package_text(name: str) -> str:
    """Return a file of this package."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
