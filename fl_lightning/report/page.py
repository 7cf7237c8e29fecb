"""The page of a report, and its tables as further files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from itertools import groupby
from typing import Any

from jinja2 import Environment, StrictUndefined

from fl_lightning import __version__
from fl_lightning.bench.table import count_states, suite_tables, titled_csv
from fl_lightning.bench.table_rendering import PACKAGES, TextTable, in_markdown, latex_tables, markdown, with_names
from fl_lightning.plotting.drawing import in_style
from fl_lightning.plotting.style import DARK, LIGHT, LINE_COLOURS, LINES_DARK, variables
from fl_lightning.report import tables
from fl_lightning.report.cautions import cautions
from fl_lightning.report.figures import Card
from fl_lightning.report.gallery import SETTINGS, cards_of
from fl_lightning.report.sections import METRICS, Section, choose_metric, sections_of
from fl_lightning.report.sources import Study
from fl_lightning.utilities.errors import count, printable, require

READINGS = "Readings that are consistent with the source"


@dataclass
class Report:
    """A report.

    Args:
        sections: sections by data set.
        studies: studies, with the tables of their suites.
        warnings: warnings for the reader.
        names: other names of methods, settings and metrics.
        title: title of the page.
        command: command line that makes the report.
    """

    sections: list[Section]
    studies: list[Study]
    warnings: list[str]
    names: Mapping[str, str] = field(default_factory=dict)
    title: str = "Report"
    command: str = "fl-lightning report"

    @cached_property
    def cards(self) -> list[list[Card]]:
        """The figures of each section; their names differ."""
        several, taken = len(self.sections) > 1, Counter[str]()
        made = [list(cards_of(section, section.title if several else "")) for section in self.sections]
        for card in (card for cards in made for card in cards):
            taken[card.name] += 1
            card.name += f"-{taken[card.name]}" if taken[card.name] > 1 else ""
        return made

    def files(self, stem: str) -> dict[str, str]:
        """Return the texts of all files of the report by name, the page first."""
        made = {f"{stem}.md": self.in_markdown(), f"{stem}.tex": self.in_latex()}
        compared = [(section.title, table) for section in self.sections for table in section.comparisons.values()]
        made[f"{stem}.csv"] = titled_csv(compared)
        made[f"{stem}.runs.csv"] = tables.runs_csv(self.sections)
        papers = [(study.title, table) for study in self.studies for table in study.comparisons]
        if papers:
            made[f"{stem}.paper.csv"] = titled_csv(papers)
        return {f"{stem}.html": self.in_html(list(made)), **made}

    def in_html(self, files: Sequence[str]) -> str:
        """Return the HTML page.

        Args:
            files: names of the other files of the report, which the page lists.
        """
        environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
        runs = [run for section in self.sections for run in section.runs["run"]]
        with in_style():
            return environment.from_string(package_text("page.html.j2")).render(
                report=self,
                runs=runs,
                version=__version__,
                light=variables(LIGHT, LINE_COLOURS),
                dark=variables(DARK, LINES_DARK),
                css=package_text("page.css"),
                script=package_text("page.js"),
                tables=tables,  # made where the template shows them, as the figures
                count=count,
                count_states=count_states,
                files=files,
                most_settings=SETTINGS,
            )

    def tables_of(self, study: Study) -> Iterator[tuple[str, list[TextTable], list[str]]]:
        """Yield the tables of a study's suite: a heading, its tables, and its verdicts as Markdown."""
        if study.suite is None:
            return
        names = {**study.suite.names, **self.names}
        for title, some, below in suite_tables(study.suite, study.comparisons, names):
            verdicts = [line.removeprefix("- ") for line in below if line]
            yield title or with_names(READINGS, names), some, verdicts

    def all_tables(self) -> Iterator[tuple[str, TextTable]]:
        """Yield all tables, each with its heading."""
        for study in self.studies:
            for head, some, _ in self.tables_of(study):
                yield from ((f"{study.title}: {head}", table) for table in some)
        for section in self.sections:
            for part in section.parts:
                made = (*tables.results_tables(part), *tables.parts_tables(part))
                yield from ((part.full_title, table) for table in made)
            whole = (tables.config_table(section), tables.runs_table(section), tables.cost_table(section))
            yield from ((section.title, table) for table in whole if table is not None)

    def in_markdown(self) -> str:
        """Return the warnings and all tables in Markdown."""
        lines = [f"# {in_markdown(self.title)}", "", *(f"- Warning: {in_markdown(one)}" for one in self.warnings), ""]
        for text, found in groupby(self.all_tables(), key=lambda one: one[0]):
            lines += [f"## {in_markdown(text)}", "", *(line for _, table in found for line in markdown(table))]
        return "\n".join(lines)

    def in_latex(self) -> str:
        """Return all tables in LaTeX."""
        lines = [PACKAGES, *(f"% warning: {printable(one)}" for one in self.warnings)]
        return "\n".join([*lines, *latex_tables(table for _, table in self.all_tables())])


def make_report(
    studies: list[Study],
    metric: str | None = None,
    minimize: bool = False,
    baseline: str | None = None,
    target: float | None = None,
    names: Mapping[str, str] | None = None,
    **of_page: Any,
) -> Report:
    """Make the report of runs and studies.

    Args:
        studies: the runs and studies.
        metric: tag of the metric of the comparison; None for the usual one.
        minimize: whether smaller values are better.
        baseline: label of the method that others are compared with; None for FedAvg.
        target: value of the metric for which rounds are counted; None for none.
        names: other names of methods, settings and metrics.
        of_page: title and command of :class:`Report`.

    Raises:
        UsageError: no run has the metric, the baseline or a renamed label; the target cannot be reached; or two
            methods would have one name.
    """
    other, sections = dict(names or {}), list[Section]()
    for study in studies:
        suite, more = study.suite, dict[str, Any]()
        if not (study.runs or study.name):
            continue
        lower = suite.minimize if suite and metric is None else minimize
        of_study = choose_metric(study.runs, metric, lower, target, (study.metric,) if study.metric else METRICS)
        if suite:
            # seeds that were added until a pair was decided have no interval of Student's
            intervals = {"interval": suite.interval, "confidence": suite.confidence, "decide": suite.decide}
            more = {"names": suite.names, "intervals": intervals}
        sections += sections_of(study.runs, of_study, baseline, study.title, **more)
    lines = list(dict.fromkeys(line for section in sections for line in section.lines))
    hint = f"no such method; available: {', '.join(lines)}"
    require(baseline is None or baseline in lines, "--baseline", baseline, hint)
    known = [*lines, *(text for section in sections for text in (*section.settings, *section.rounds))]
    axes = [pair for study in studies if study.suite for pair in study.suite.axes.items()]
    known += [text for axis, labels in axes for text in (axis, *labels)]
    for old in other:
        hint = "no such method, setting or metric; use a name from the report"
        require(any(with_names(text, {old: ""}) != text for text in known), "--names", old, hint)
    sections = [section.renamed({**section.names, **other}) for section in sections]
    warnings = [f"{note}." for note in (note for study in studies for note in study.notes)]
    for section in sections:
        of = f"{section.title}: " if len(sections) > 1 else ""
        warnings += [f"{of}{one}" for one in cautions(section)]
    return Report(sections, studies, list(dict.fromkeys(warnings)), other, **of_page)


def package_text(name: str) -> str:
    """Return a file of this package."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
