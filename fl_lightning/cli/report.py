"""``report DIR|STUDY ...``: a page about runs and studies. Importing this module does not import torch."""

from __future__ import annotations

import argparse
import itertools
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fl_lightning.cli.entry_point import COMMANDS, OneLineParser, end_with_status, program
from fl_lightning.utilities.errors import choices, count, printable, require, truncate, writing_into

if TYPE_CHECKING:
    from fl_lightning.report.figures import Card

BESIDE = (".md", ".tex", ".csv", ".runs.csv", ".paper.csv")
# stands in the head of each page
GENERATOR = '<meta name="generator" content="fl-lightning '
# formats of a figure, without a date, so that equal figures are equal files
UNDATED: dict[str, dict[str, None]] = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}, ".png": {}}


def report_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = OneLineParser(prog=f"{program()} report", description=COMMANDS["report"], allow_abbrev=False)
    about = "folder that contains runs, output folder of bench, database URL, file of cells, or suite"
    parser.add_argument("sources", metavar="DIR|STUDY", nargs="+", help=about)
    parser.add_argument("--output", metavar="FILE", type=Path, help="the page; default: report.html")
    parser.add_argument("--metric", metavar="TAG", help="metric of the comparison; default: test/accuracy")
    parser.add_argument("--minimize", action="store_true", help="smaller is better; default for a loss or an error")
    parser.add_argument("--baseline", metavar="NAME", help="method that others are compared with; default: FedAvg")
    parser.add_argument("--target", type=float, help="count the rounds to this value of the metric, such as 0.6")
    several: dict = {"nargs": "+", "action": "extend", "default": []}
    about = "suites of studies whose file has moved"
    parser.add_argument("--suite", metavar="FILE", type=Path, help=about, **several)
    parser.add_argument("--title", default="Report", help="title of the page")
    about = "other names of methods, settings and metrics in tables and figures, such as test/accuracy=Accuracy"
    parser.add_argument("--names", metavar="OLD=NEW", help=about, **several)
    about = "also write each drawing as PDF and SVG, as wide as a column of a paper"
    parser.add_argument("--figures", metavar="FOLDER", type=Path, help=about)
    parser.add_argument("--figure", metavar="NAME", help="write only this figure, to --output FILE.pdf, .svg or .png")
    return parser


def main(args: Sequence[str]) -> None:
    """Run ``report``. Bad input ends the program with one line and exit status 2, without writing a file."""
    command = shlex.join([*shlex.split(program()), *args])
    end_with_status(lambda: report(report_parser().parse_args(args[1:]), command))


def report(options: argparse.Namespace, command: str) -> None:
    """Write the page and its tables, or one figure, and print their paths.

    Args:
        options: the arguments.
        command: the command line, which the page shows.

    Raises:
        UsageError: an option or a source is wrong, or a file cannot be written.
    """
    output = options.output or Path("report.html" if not options.figure else f"{options.figure}.pdf")
    check_output(output, tuple(UNDATED) if options.figure else (".html", ".htm"))
    if options.figures is not None:
        require(not options.figure, "--figures", str(options.figures), "writes all figures; remove --figure")
    names: dict[str, str] = {}
    for pair in options.names:
        # the old name may contain =, such as alpha=0.1
        name, _, new_name = pair.rpartition("=")
        require(bool(name and new_name), "--names", pair, "use OLD=NEW, such as test/accuracy=Accuracy")
        require(name not in names, "--names", pair, f"{name} has the name {names.get(name)} already; remove one")
        names[name] = new_name
    # slow imports, which bad arguments do not need
    from fl_lightning.bench.config_fragments import write_text
    from fl_lightning.plotting.figures import laid_out
    from fl_lightning.report.page import make_report
    from fl_lightning.report.sources import read_sources

    page = make_report(
        read_sources(options.sources, options.suite),
        options.metric,
        options.minimize,
        options.baseline,
        options.target,
        names,
        title=options.title,
        command=command,
    )
    cards: dict[str, Card] = {}
    if options.figure or options.figures:
        cards = {card.name: card for card in itertools.chain(*page.cards)}
    if options.figure:
        name = options.figure
        require(name in cards, "--figure", name, f"no such figure; available: {choices(cards, name)}")
        with writing_into("--output", output):
            output.parent.mkdir(parents=True, exist_ok=True)
            drawings = list(cards[name].drawings.values())
            drawn = laid_out(drawings, columns=len(drawings))
            drawn.savefig(output, dpi=200, metadata=UNDATED[output.suffix], bbox_inches="tight")
        print(output)
        return
    output = output.with_suffix(".html")
    files = page.files(output.stem)
    with writing_into("--output", output.parent):
        for name, text in files.items():
            write_text(output.parent / name, text)
    for warning in page.warnings[:5]:
        print(f"warning: {truncate(warning)}", file=sys.stderr)
    if len(page.warnings) > 5:
        print(f"warning: {len(page.warnings) - 5} more are on the page", file=sys.stderr)
    runs = sum(len(section.runs) for section in page.sections)
    print(printable(f"{count(runs, 'run')}: {output}, and {', '.join(list(files)[1:])} beside it"))
    if options.figures is not None:
        with writing_into("--figures", options.figures):
            options.figures.mkdir(parents=True, exist_ok=True)
            printed = [pair for card in cards.values() for pair in card.printed()]
            for name, figure in printed:
                for ending in (".pdf", ".svg"):
                    figure.savefig(options.figures / f"{name}{ending}", dpi=300, metadata=UNDATED[ending])
                    figure.set_layout_engine("none")  # laying it out again takes as long as to draw it
        print(printable(f"{len(printed)} drawings as PDF and SVG in {options.figures}"))


def check_output(output: Path, endings: Sequence[str]) -> None:
    """Refuse an output that cannot be written, or that would replace a file that is not a report."""
    require(output.suffix in endings, "--output", str(output), f"use a file name that ends in {', '.join(endings)}")
    require(not output.is_dir(), "--output", str(output), "is a folder; use a file name")
    page = output.with_suffix(".html")
    if output.suffix not in (".html", ".htm"):
        return
    if page.is_file():
        is_report = GENERATOR in page.read_text(encoding="utf-8", errors="replace")[:2000]
        require(is_report, "--output", str(page), "exists and is not a report; use another name")
        return
    beside = [path for ending in BESIDE if (path := page.with_suffix(ending)).exists()]
    require(not beside, "--output", str(page), f"{', '.join(map(str, beside))} exists; use another name")
