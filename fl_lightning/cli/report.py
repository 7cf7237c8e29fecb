"""``report DIR|STUDY ...``: one page of runs and studies, with their tables. Nothing here imports torch."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from fl_lightning.cli.arguments import Parser, end_with_status, program
from fl_lightning.errors import UsageError, clipped, printable, require

PAGE = (".html", ".htm")
BESIDE = (".md", ".tex", ".csv", ".runs.csv", ".paper.csv")
# what a page of a report says in its head
GENERATOR = '<meta name="generator" content="fl-lightning '
PICTURE = (".pdf", ".svg", ".png")


def parser_of() -> argparse.ArgumentParser:
    """The parser of the command."""
    about = "Make one HTML page of runs and studies, and their tables in Markdown, LaTeX and CSV."
    parser = Parser(prog=f"{program()} report", description=about, allow_abbrev=False)
    told = "folder with runs below it, output folder of bench, URL of its database, its file of cells, or a suite"
    parser.add_argument("sources", metavar="DIR|STUDY", nargs="+", help=told)
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
    parser.add_argument("--figure", metavar="NAME", help="make this one figure, as --output FILE.pdf, .svg or .png")
    return parser


def main(args: Sequence[str]) -> None:
    """Run ``report``. Bad input ends it with one line and exit status 2, and writes nothing."""
    end_with_status(lambda: report(parser_of().parse_args(args[1:])))


def report(given: argparse.Namespace) -> None:
    """Make the page and its tables, or one figure, and say where they are."""
    endings = PICTURE if given.figure else PAGE
    output = given.output or Path("report.html" if not given.figure else f"{given.figure}.pdf")
    require(output.suffix in endings, "--output", str(output), f"give a file that ends in {', '.join(endings)}")
    check_output(output)
    if not given.figure:
        output = output.with_suffix(".html")
        check_others(output)
    # these take a second to import, and bad arguments need none of them
    from fl_lightning.report.page import Asked, make_report
    from fl_lightning.report.sources import read_sources

    how = {key: getattr(given, key) for key in ("metric", "minimize", "baseline", "target", "title")}
    made = make_report(read_sources(given.sources, given.suite), Asked(**how, command=command_of(given)))
    if given.figure:
        write_figure(made, given.figure, output)
        return
    files = made.files(output.stem)
    write_all(output.parent, files)
    for warning in made.warnings[:5]:
        print(f"warning: {clipped(warning)}", file=sys.stderr)
    if len(made.warnings) > 5:
        print(f"warning: {len(made.warnings) - 5} more are on the page", file=sys.stderr)
    runs = sum(len(section.runs) for section in made.sections)
    beside = ", ".join(name for name in files if name != output.name)
    print(printable(f"{runs} run{'s' * (runs != 1)}: {output}, and {beside} beside it"))


def command_of(given: argparse.Namespace) -> list[str]:
    """The command line that makes the same report."""
    keys = ("metric", "baseline", "target")
    more = [part for key in keys if getattr(given, key) is not None for part in (f"--{key}", str(getattr(given, key)))]
    more += ["--minimize"] if given.minimize else []
    more += ["--suite", *map(str, given.suite)] if given.suite else []
    return [*shlex.split(program()), "report", *given.sources, *more]


def check_output(output: Path) -> None:
    """Refuse a file that cannot be written; nothing is made yet.

    Raises:
        UsageError: it cannot.
    """
    require(not output.is_dir(), "--output", str(output), "is a folder; give a file")
    folder = output.absolute().parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    hint = "cannot be written: its folder is not one, or not writable; give another file"
    require(folder.is_dir() and os.access(folder, os.W_OK), "--output", str(output), hint)


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


def write_all(folder: Path, texts: Mapping[str, str]) -> None:
    """Write files side by side: all of them, or none.

    Raises:
        UsageError: the folder cannot be written to.
    """
    partial = {folder / name: folder / f".{name}.{os.getpid()}" for name in texts}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in zip(partial.values(), texts.values(), strict=True):
            path.write_text(text, encoding="utf-8", errors="backslashreplace")
        for path, complete in zip(partial.values(), partial, strict=True):
            path.replace(complete)
    except OSError as error:
        for path in partial.values():
            path.unlink(missing_ok=True)
        hint = f"cannot be written: {error.strerror}; give another file"
        raise UsageError(f"--output={str(folder)!r}: {hint}") from error


def write_figure(made: object, name: str, output: Path) -> None:
    """Write one figure.

    Raises:
        UsageError: the report has none of this name, or it cannot be written.
    """
    from fl_lightning.pictures.drawing import in_style

    cards = {card.name: card for *_, card in made.cards()}  # type: ignore[attr-defined]
    require(name in cards, "--figure", name, f"the report has none of this name; it has {', '.join(cards)}")
    with in_style():
        figure = cards[name].figure()
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            keys = {".pdf": "CreationDate", ".svg": "Date"}
            metadata = {keys[output.suffix]: None} if output.suffix in keys else None
            figure.savefig(output, dpi=200, metadata=metadata, bbox_inches="tight")
        except OSError as error:
            hint = f"cannot be written: {error.strerror}; give another file"
            raise UsageError(f"--output={str(output)!r}: {hint}") from error
    print(output)
