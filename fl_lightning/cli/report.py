"""``report DIR|STUDY ...``: one page of runs and studies, with their tables. Nothing here imports torch."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fl_lightning.cli.entry_point import COMMANDS, OneLineParser, end_with_status, program, writing_into
from fl_lightning.errors import choices, clipped, count, printable, require

if TYPE_CHECKING:
    from fl_lightning.report.page import Report

PAGE = (".html", ".htm")
BESIDE = (".md", ".tex", ".csv", ".runs.csv", ".paper.csv")
# in the head of each page of a report
GENERATOR = '<meta name="generator" content="fl-lightning '
PICTURE = (".pdf", ".svg", ".png")
# without the date, which would make each file another one
UNDATED: dict[str, dict[str, None]] = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}, ".png": {}}


def report_parser() -> argparse.ArgumentParser:
    """The parser of the command."""
    parser = OneLineParser(prog=f"{program()} report", description=COMMANDS["report"], allow_abbrev=False)
    about = "folder with runs below it, output folder of bench, URL of its database, its file of cells, or a suite"
    parser.add_argument("sources", metavar="DIR|STUDY", nargs="+", help=about)
    parser.add_argument("--output", metavar="FILE", type=Path, help="the page; default: report.html")
    parser.add_argument("--metric", metavar="TAG", help="what the runs are compared by; default: test/accuracy")
    parser.add_argument("--minimize", action="store_true", help="smaller values are better, as is known of a loss")
    parser.add_argument("--baseline", metavar="NAME", help="method that the others are compared with; default: FedAvg")
    parser.add_argument("--target", type=float, help="count the rounds until the metric is there, such as 0.6")
    parser.add_argument(
        "--suite",
        metavar="FILE",
        type=Path,
        nargs="+",
        action="extend",
        default=[],
        help="suites of the studies, where these do not know the file",
    )
    parser.add_argument("--title", default="Report", help="title of the page")
    about = "what methods, settings and metrics are called in tables and figures, such as test/accuracy=Accuracy"
    parser.add_argument("--names", metavar="OLD=NEW", nargs="+", action="extend", default=[], help=about)
    about = "write each drawing there, too, as PDF and SVG as wide as a column of a paper"
    parser.add_argument("--figures", metavar="FOLDER", type=Path, help=about)
    parser.add_argument("--figure", metavar="NAME", help="make this one figure, as --output FILE.pdf, .svg or .png")
    return parser


def main(args: Sequence[str]) -> None:
    """Run ``report``. Bad input ends it with one line and exit status 2, and writes nothing."""
    end_with_status(lambda: report(report_parser().parse_args(args[1:])))


def report(options: argparse.Namespace) -> None:
    """Make the page and its tables, or one figure, and say where they are."""
    endings = PICTURE if options.figure else PAGE
    output = options.output or Path("report.html" if not options.figure else f"{options.figure}.pdf")
    require(output.suffix in endings, "--output", str(output), f"give a file that ends in {', '.join(endings)}")
    require(not output.is_dir(), "--output", str(output), "is a folder; give a file")
    check_writable("--output", output, output.parent)
    names = names_of(options.names)
    if options.figures is not None:
        require(not options.figure, "--figures", str(options.figures), "is for all figures; leave out --figure")
        check_writable("--figures", options.figures, options.figures)
    if not options.figure:
        output = output.with_suffix(".html")
        check_others(output)
    # these take a second to import, and bad arguments need none of them
    from fl_lightning.bench.fragments import write_text
    from fl_lightning.report.page import Asked, make_report
    from fl_lightning.report.sources import read_sources

    # the command line that makes the same report
    command = [*shlex.split(program()), "report", *options.sources]
    for key in ("metric", "baseline", "target"):
        command += [f"--{key}", str(getattr(options, key))] if getattr(options, key) is not None else []
    command += ["--minimize"] * options.minimize
    command += ["--suite", *map(str, options.suite)] if options.suite else []
    command += ["--names", *options.names] if options.names else []
    how = {key: getattr(options, key) for key in ("metric", "minimize", "baseline", "target", "title")}
    made = make_report(read_sources(options.sources, options.suite), Asked(**how, names=names, command=command))
    if options.figure:
        write_figure(made, options.figure, output)
        return
    files = made.files(output.stem)
    with writing_into("--output", output.parent):
        for name, text in files.items():
            write_text(output.parent / name, text)
    for warning in made.warnings[:5]:
        print(f"warning: {clipped(warning)}", file=sys.stderr)
    if len(made.warnings) > 5:
        print(f"warning: {len(made.warnings) - 5} more are on the page", file=sys.stderr)
    runs = sum(len(section.runs) for section in made.sections)
    beside = ", ".join(name for name in files if name != output.name)
    print(printable(f"{count(runs, 'run')}: {output}, and {beside} beside it"))
    if options.figures is not None:
        print(printable(f"{write_figures(made, options.figures)} drawings as PDF and SVG in {options.figures}"))


def names_of(pairs: Sequence[str]) -> dict[str, str]:
    """Other names by what they stand for.

    Raises:
        UsageError: an entry is no pair, or one is named twice.
    """
    made: dict[str, str] = {}
    for pair in pairs:
        # what is named may be a setting, such as alpha=0.1
        old, _, new = pair.rpartition("=")
        require(bool(old and new), "--names", pair, "give OLD=NEW, such as test/accuracy=Accuracy")
        require(old not in made, "--names", pair, f"{old} is called {made.get(old)} already; give it one name")
        made[old] = new
    return made


def check_writable(key: str, place: Path, folder: Path) -> None:
    """Refuse a place whose folder cannot be made or written into, before anything is read."""
    folder = folder.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    writable = folder.is_dir() and os.access(folder, os.W_OK)
    require(writable, key, str(place), f"cannot be written: {folder} is no folder, or not writable; give another one")


def check_others(output: Path) -> None:
    """Refuse to write over files that are no report's.

    Raises:
        UsageError: a file of one of the names is there, and not a page of a report.
    """
    if output.is_file():
        ours = GENERATOR in output.read_text(encoding="utf-8", errors="replace")[:2000]
        require(ours, "--output", str(output), "is there and is no report; give another file")
        return
    beside = [path for ending in BESIDE if (path := output.with_suffix(ending)).exists()]
    require(not beside, "--output", str(output), f"{', '.join(map(str, beside))} is there; give another file")


def write_figure(made: Report, name: str, output: Path) -> None:
    """Write one figure.

    Raises:
        UsageError: the report has none of this name, or it cannot be written.
    """
    from fl_lightning.plotting.drawing import in_style

    cards = {card.name: card for *_, card in made.cards}
    require(name in cards, "--figure", name, f"the report has none of this name; it has {choices(cards, name)}")
    with in_style(), writing_into("--output", output):
        output.parent.mkdir(parents=True, exist_ok=True)
        cards[name].figure().savefig(output, dpi=200, metadata=UNDATED[output.suffix], bbox_inches="tight")
    print(output)


def write_figures(made: Report, folder: Path) -> int:
    """Write each drawing of a report as PDF and SVG; returns their number.

    Raises:
        UsageError: they cannot be written.
    """
    from fl_lightning.plotting.drawing import in_style

    number = 0
    with in_style(), writing_into("--figures", folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, figure in (pair for *_, card in made.cards for pair in card.printed()):
            number += 1
            for ending in (".pdf", ".svg"):
                figure.savefig(folder / f"{name}{ending}", dpi=300, metadata=UNDATED[ending])
                figure.set_layout_engine("none")  # laying it out again takes as long as to draw it
    return number
