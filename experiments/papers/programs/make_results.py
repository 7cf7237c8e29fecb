"""Makes the pages about results from the stored cells: RESULTS.md, docs/papers, docs/findings.md and their pictures.

python experiments/papers/programs/make_results.py [--output FOLDER] [--pictures]

``python cli.py bench SUITE --status --save experiments/papers/results`` stores the cells of a suite. The texts are
written by hand, and their numbers are quoted from the cells, see ``quotes.py``:

- ``pages/<page>.md.j2`` for RESULTS.md, docs/findings.md and one page for each paper,
- ``results/<name of the file of cells>.md.j2`` for the conclusions of one suite. They stand below its tables, in
  ``results/<name>.md``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
from jinja2 import TemplateError
from matplotlib import rc_context

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from protocol_variants import READING, conclusions, readings_table  # noqa: E402, next to this file
from quotes import Quote, Stored, hours, quoted  # noqa: E402, next to this file

from fl_lightning.bench import Cell, Suite, load_suite  # noqa: E402, found through the path above
from fl_lightning.bench.cells_csv import stored_cells  # noqa: E402
from fl_lightning.bench.config_fragments import leaves, of_result, write_text  # noqa: E402
from fl_lightning.bench.table import render  # noqa: E402
from fl_lightning.bench.table_rendering import in_markdown, markdown  # noqa: E402
from fl_lightning.plotting.drawing import Curve, Draw, curves, forest, in_style  # noqa: E402
from fl_lightning.plotting.figures import laid_out  # noqa: E402
from fl_lightning.plotting.style import LIGHT  # noqa: E402
from fl_lightning.utilities.errors import UsageError, require  # noqa: E402

PAPERS = ROOT / "experiments" / "papers"
ENDING, TEXT = ".cells.csv", ".md.j2"
FIGURES = ROOT / "docs" / "figures" / "papers"
# the suite of a paper's picture, the labels of its runs, and the limits of the accuracy in %
ANCHORS: dict[str, tuple[str, dict[str, str], tuple[float, float]]] = {
    "fedcka": ("anchors-fedcka", {"alpha": "5.0"}, (55, 70)),
    "feduv": ("anchors-feduv", {"skew": "0.01"}, (0, 70)),
    "fedlc": ("anchors-fedlc", {"beta": "0.05"}, (0, 70)),
    "feddecorr": ("scaled-mobilenet", {}, (0, 80)),
}


def pages(papers: Path = PAPERS, docs: Path = ROOT / "docs") -> Iterator[tuple[Path, str]]:
    """Yield the file and the text of each page: of ``pages``, and of each file of cells."""
    folders = {"RESULTS.md": papers, "findings.md": docs}
    for template in sorted((papers / "pages").glob(f"*{TEXT}")):
        name = template.name.removesuffix(".j2")
        source = f"experiments/papers/programs/make_results.py from experiments/papers/pages/{template.name}"
        yield folders.get(name, docs / "papers") / name, f"<!-- made by {source} -->\n{text_of(template, papers)}"
    for file in sorted((papers / "results").glob(f"*{ENDING}")):
        at = stored(file.name.removesuffix(ENDING), papers)
        yield file.with_name(file.name.removesuffix(ENDING) + ".md"), "\n".join(of_suite(file, at, papers))
        yield (
            file.with_name(file.name.removesuffix(ENDING) + ".table.csv"),
            render(at.suite, at.cells, at.results, "csv"),
        )


def pictures() -> Iterator[tuple[str, list[Draw], tuple[float, float]]]:
    """Yield the name, the drawings and the size of a panel of each picture."""
    for paper, (name, labels, limits) in ANCHORS.items():
        axes = {"xlabel": "round", "ylabel": "test accuracy in %", "ylim": limits}
        yield paper, [curves(list(courses(stored(name), labels)), **axes)], (6, 3)
    decisive, longer = stored("scaled-decisive"), stored("scaled-sixty_rounds")
    alphas = {f"alpha {alpha}": compared(decisive.each(alpha=alpha)) for alpha in decisive.suite.axes["alpha"]}
    yield "forest", forests(alphas), (3.6, 4)
    means = {
        "rounds 4 to 6": compared(longer.after(6).each("last", k=3, alpha="0.05")),
        "rounds 56 to 60": compared(longer.each("last", k=5, alpha="0.05")),
    }
    yield "forest_of_rounds", forests(means), (3.6, 2.6)


def courses(at: Stored, labels: Mapping[str, str]) -> Iterator[Curve]:
    """Yield the accuracy of each method by round: mean, lowest and highest of the seeds; dotted, as published."""
    quotes = at.each("final", **labels)
    quotes += [quote for quote in at.each("final", method="FedAvg") if "IID" in quote.labels.values()]
    for number, quote in enumerate(quotes):
        seeds = 100 * np.array([list(result.values.values()) for result in quote.results.values()])
        name = "FedAvg, IID clients" if "IID" in quote.labels.values() else quote.labels["method"]
        rounds = np.arange(1, seeds.shape[1] + 1)
        yield Curve(number, seeds.mean(0), name, rounds, (seeds.min(0), seeds.max(0)))
    for number, method in enumerate(at.suite.axes["method"]):
        published = at("final", method=method, **labels).published
        if published is not None:
            style = {"linestyle": (0, (1, 4)), "linewidth": 1.2}
            yield Curve(number, np.full(len(rounds), published), f"{method}, published", rounds, style=style)


def compared(quotes: Sequence[Quote]) -> dict[str, Quote]:
    """Return the quotes that have an interval of the difference to the baseline, by method."""
    return {quote.labels["method"]: quote for quote in quotes if quote.compared and quote.compared.interval}


def forests(panels: Mapping[str, Mapping[str, Quote]]) -> list[Draw]:
    """Return a forest plot for each panel, on equal axes; the rows are sorted by the first panel.

    Marks are filled where the p-value that Holm's correction gives is below 0.05.
    """
    first = next(iter(panels.values()))
    names = sorted(first, key=lambda name: -first[name].difference)
    ends = [end for quotes in panels.values() for quote in quotes.values() for end in quote.interval]
    axes = {"xlabel": "points above FedAvg", "xlim": (min(ends) - 1, max(ends) + 1)}
    drawings = []
    for title, quotes in panels.items():
        estimates = [(quotes[name].difference, *quotes[name].interval) if name in quotes else None for name in names]
        shown = [name for name, quote in quotes.items() if quote.holm is not None and quote.holm < 0.05]
        drawings.append(forest(names, estimates, shown, title=title, **axes))
    return drawings


def draw(folder: Path) -> None:
    """Write all pictures as SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, drawings, size in pictures():
        figure = laid_out(drawings, size=size)
        figure.set_facecolor(LIGHT["card"])
        with in_style(), rc_context({"svg.fonttype": "path", "svg.hashsalt": name}):
            figure.savefig(folder / f"{name}.svg", transparent=False, metadata={"Date": None})


@cache
def stored(name: str, papers: Path = PAPERS) -> Stored:
    """Return the cells of a file in ``results``, or of the leaderboard.

    Raises:
        UsageError: the file, or its suite, does not exist.
    """
    if name == "leaderboard":
        suite = load_suite(papers.parent / name / "suite.yaml")
        return Stored(suite, *stored_cells(suite.finished, suite))
    file = papers / "results" / f"{name}{ENDING}"
    require(file.is_file(), "stored", name, f"lacks a file of cells in {file.parent}, such as {file.name}")
    suite = suite_of(file, papers)
    return Stored(suite, *stored_cells(file, suite))


def text_of(file: Path, papers: Path) -> str:
    """Render a handwritten text with the numbers that it quotes.

    Raises:
        UsageError: the text quotes a missing number, or is not a valid template.
    """
    names = [path.name.removesuffix(ENDING) for path in sorted((papers / "results").glob(f"*{ENDING}"))]
    try:
        return quoted(file.read_text(), lambda name: stored(name, papers), file.parent, names)
    except TemplateError as error:
        raise UsageError(f"{file}: {error}; see quotes.py for the syntax of quotes") from error


def of_suite(file: Path, at: Stored, papers: Path) -> Iterator[str]:
    """Yield the lines of the page of one file of cells: the suite, the tables, and our conclusions."""
    suite = at.suite
    title, *rest = render(suite, at.cells, at.results).splitlines()
    path = f"{suite.path.parent.name}/{suite.path.name}"
    yield from (title, "", f"Suite: [`{path}`](../{path}); its cells: [`{file.name}`]({file.name})", "")
    yield from (*what_was_run(at), "")
    tables = next(number for number, line in enumerate(rest) if line.startswith("## "))
    yield from rest[1:tables]
    if READING in suite.axes:
        yield from markdown(readings_table(suite, at.comparisons))
        for sentence in conclusions(at.comparisons):
            yield from (in_markdown(sentence), "")
    yield from rest[tables:]
    template = file.with_name(file.name.removesuffix(ENDING) + TEXT)
    text = text_of(template, papers).strip() if template.is_file() else "Not written yet."
    yield from ("", "## What we conclude", "", text, "")


def suite_of(file: Path, papers: Path) -> Suite:
    """Return the suite of a file of cells.

    Raises:
        UsageError: the suite does not exist.
    """
    name = file.name.removesuffix(ENDING).split("_scale")[0]
    for path in sorted(papers.glob("*/*.yaml")):
        if name == f"{path.parent.name}-{path.stem}":
            return load_suite(path)
    raise UsageError(f"{file}: unknown suite {name} below {papers}: name the file after its suite")


def what_was_run(at: Stored) -> Iterator[str]:
    """Seeds, scale, seconds, coefficients, and the keys of the configs in which the cells are not the suite's."""
    suite, cells, results = at.suite, at.cells, at.results
    seeds = sorted({cell.seed for cell in cells})
    done = [cell for cell in cells if results[cell.digest].state == "done"]
    scale = cells[0].scale
    share = f" at scale {scale:g} (rounds, local epochs and examples each times {scale ** (1 / 3):.2f})"
    yield f"- Seeds {', '.join(map(str, seeds))} of the suite's {len(suite.seeds)}{share if scale != 1 else ''}"
    in_rounds = hours(results[cell.digest] for cell in done)
    yield f"- {in_rounds:.1f} hours of training in the rounds of the {len(done)} finished cells"
    given = {label: at.coefficients(method=label) for label in suite.axes.get("method", ())}
    if any(given.values()):
        yield f"- Coefficients: {'; '.join(f'{label} {numbers}' for label, numbers in given.items() if numbers)}"
    for key, (theirs, ours) in sorted(changed(suite, done).items()):
        yield f"- `{key}`: `{ours}` instead of the suite's `{theirs}`"


def changed(suite: Suite, cells: Sequence[Cell]) -> dict[str, tuple[str, str]]:
    """The keys in which any cell was run otherwise than the suite says today, with both values."""
    found: dict[str, tuple[str, str]] = {}
    for cell in cells:
        theirs = dict(leaves(of_result(suite.cell(cell.labels, cell.seed, cell.scale).config)))
        ours = dict(leaves(cell.config))
        for key in theirs.keys() | ours.keys():
            if theirs.get(key) != ours.get(key):
                found[key] = theirs.get(key, "nothing"), ours.get(key, "nothing")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="folder for all pages and pictures")
    parser.add_argument("--pictures", action="store_true", help="also draw the pictures")
    options = parser.parse_args()
    for page, text in pages():
        write_text(options.output / page.name if options.output else page, text)
    if options.pictures or options.output:
        draw(options.output or FIGURES)
