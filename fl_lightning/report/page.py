"""The page of a report, and its tables as further files."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from operator import itemgetter
from typing import Any

from jinja2 import Environment, StrictUndefined

from fl_lightning import __version__
from fl_lightning.bench.comparison import Comparison
from fl_lightning.bench.table import comparisons_csv, count_states, suite_tables
from fl_lightning.bench.table_rendering import (
    PACKAGES,
    TextTable,
    in_markdown,
    latex_tables,
    markdown,
    renamed,
    with_names,
)
from fl_lightning.plotting.drawing import in_style
from fl_lightning.plotting.style import DARK, LIGHT, LINE_COLOURS, LINES_DARK, variables
from fl_lightning.report import tables
from fl_lightning.report.cautions import cautions
from fl_lightning.report.figures import Card
from fl_lightning.report.gallery import SETTINGS, cards_of
from fl_lightning.report.sections import METRICS, Section, choose_metric, sections_of, with_tag
from fl_lightning.report.sources import Study
from fl_lightning.utilities.errors import count, printable, require


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
        several, counts = len(self.sections) > 1, Counter[str]()
        cards = [list(cards_of(section, section.title if several else "")) for section in self.sections]
        for card in itertools.chain(*cards):
            counts[card.name] += 1
            if counts[card.name] > 1:
                card.name += f"-{counts[card.name]}"
        return cards

    def files(self, stem: str) -> dict[str, str]:
        """Return the texts of all files of the report by name, the page first."""
        texts = {f"{stem}.md": self.in_markdown(), f"{stem}.tex": self.in_latex()}
        comparisons = list[tuple[str, Comparison]]()
        for section in self.sections:
            comparisons += ((section.title, comparison) for comparison in section.comparisons.values())
        texts[f"{stem}.csv"] = comparisons_csv(comparisons)
        texts[f"{stem}.runs.csv"] = tables.runs_csv(self.sections)
        of_papers = []
        for study in self.studies:
            of_papers += [(study.title, comparison) for comparison in study.comparisons]
        if of_papers:
            texts[f"{stem}.paper.csv"] = comparisons_csv(of_papers)
        return {f"{stem}.html": self.in_html(list(texts)), **texts}

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
        for title, of_part, below in suite_tables(study.suite, study.comparisons):
            verdicts = [with_names(line.removeprefix("- "), self.names) for line in below if line]
            renamed_tables = [renamed(table, self.names) for table in of_part]
            yield with_names(title, self.names), renamed_tables, verdicts

    def all_tables(self) -> Iterator[tuple[str, TextTable]]:
        """Yield all tables, each with its heading."""
        for study in self.studies:
            for heading, of_part, _ in self.tables_of(study):
                yield from ((f"{study.title}: {heading}", table) for table in of_part)
        for section in self.sections:
            for part in section.parts:
                for table in itertools.chain(tables.results_tables(part), tables.parts_tables(part)):
                    yield part.full_title, table
            of_section = (tables.config_table(section), tables.runs_table(section), tables.cost_table(section))
            yield from ((section.title, table) for table in of_section if table is not None)

    def in_markdown(self) -> str:
        """Return the warnings and all tables in Markdown."""
        warnings = [f"- Warning: {in_markdown(warning)}" for warning in self.warnings]
        lines = [f"# {in_markdown(self.title)}", "", *warnings, ""]
        for heading, pairs in itertools.groupby(self.all_tables(), key=itemgetter(0)):
            lines += [f"## {in_markdown(heading)}", ""]
            for _, table in pairs:
                lines += markdown(table)
        return "\n".join(lines)

    def in_latex(self) -> str:
        """Return all tables in LaTeX."""
        lines = [PACKAGES, *(f"% warning: {printable(warning)}" for warning in self.warnings)]
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
    new_names, sections = dict(names or {}), list[Section]()
    for study in studies:
        suite, of_suite = study.suite, dict[str, Any]()
        if not (study.runs or study.name):
            continue
        lower = suite.minimize if suite and metric is None else minimize
        of_study = choose_metric(study.runs, metric, lower, target, (study.metric,) if study.metric else METRICS)
        if suite:
            # seeds that were added until a pair was decided have no interval of Student's
            intervals = {"confidence": suite.confidence, "decide": suite.decide}
            of_suite = {"intervals": intervals}
        runs = [with_tag(run, of_study.tag) for run in study.runs]
        sections += sections_of(runs, of_study, baseline, study.title, **of_suite)
    lines = list(dict.fromkeys(line for section in sections for line in section.lines))
    hint = f"no such method; available: {', '.join(lines)}"
    require(baseline is None or baseline in lines, "--baseline", baseline, hint)
    texts = list(lines)
    for section in sections:
        texts += [*section.settings, *section.rounds]
    for study in studies:
        for axis, labels in study.suite.axes.items() if study.suite else ():
            texts += [axis, *labels]
    for name in new_names:
        hint = "no such method, setting or metric; use a name from the report"
        require(any(with_names(text, {name: ""}) != text for text in texts), "--names", name, hint)
    sections = [section.renamed(new_names) for section in sections]
    warnings = [f"{note}." for note in (note for study in studies for note in study.notes)]
    for section in sections:
        of = f"{section.title}: " if len(sections) > 1 else ""
        warnings += [f"{of}{warning}" for warning in cautions(section)]
    return Report(sections, studies, list(dict.fromkeys(warnings)), new_names, **of_page)


def package_text(name: str) -> str:
    """Return a file of this package."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
