"""Makes RESULTS.md, docs/findings.md and the tables of each suite from the stored cells.

python experiments/papers/programs/make_results.py [--output FOLDER] [--tables]

``python cli.py bench SUITE --status --save experiments/papers/results`` stores the cells of a suite. Our conclusions
are written by hand: for one file of cells in ``results/<name of the file of cells>.md.j2``, such as
``results/scaled-decisive.md.j2``; for all of them in ``results/claims.md.j2``, ``results/findings.md.j2`` and, below
its first table, ``results/lesson.md.j2``. Their numbers are quoted from the cells, see ``quotes.py``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from textwrap import wrap

from jinja2 import TemplateError

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from quotes import Stored, hours, p_value, paired, quoted, signed, span  # noqa: E402, next to this file

from fl_lightning.bench import Cell, Suite  # noqa: E402, found through the path above
from fl_lightning.bench.cells_csv import read_cells, stored_cells  # noqa: E402
from fl_lightning.bench.config_fragments import leaves, of_result, write_text  # noqa: E402
from fl_lightning.bench.protocol_variants import suites_in  # noqa: E402
from fl_lightning.bench.results import CellResult  # noqa: E402
from fl_lightning.bench.suite import OF_READINGS  # noqa: E402
from fl_lightning.bench.table import FORMS, render  # noqa: E402
from fl_lightning.utilities.errors import UsageError, require  # noqa: E402

PAPERS = ROOT / "experiments" / "papers"
ENDING = ".cells.csv"
TEXT = ".md.j2"
MADE = "<!-- made by experiments/papers/programs/make_results.py from experiments/papers/results/findings.md.j2 -->\n"
# where docs/findings.md has the table of all methods
TABLE = "<!-- results -->"
RANK, WORST = "rank/representation/effective", "personal/worst_tenth"
STAR = "\\*"
HEAD = """# Results

Made by `python experiments/papers/programs/make_results.py` from the cells in `results/`; the conclusions are
written by hand, and their numbers come from the cells.
[The guide](../../docs/bench.md#reading-the-table) says how to read the tables.
"""


def make(papers: Path = PAPERS) -> str:
    """The page, from the files of cells below a folder of suites."""
    files = sorted((papers / "results").glob(f"*{ENDING}"))
    claims = papers / "results" / f"claims{TEXT}"
    summary = [text_of(claims, papers)] if claims.is_file() else []
    return "\n".join([HEAD, *summary, *(line for file in files for line in part(file, papers))])


def findings(papers: Path = PAPERS) -> str:
    """The page docs/findings.md."""
    text = text_of(papers / "results" / f"findings{TEXT}", papers)
    return MADE + (text.replace(TABLE, "\n".join(in_one_table(papers))) if TABLE in text else text)


def in_one_table(papers: Path) -> Iterator[str]:
    """Yield the lines of a table of all methods, its footnotes, and the lesson."""
    file = papers / "results" / "scaled-decisive.cells.csv"
    suite = suite_of(file, papers)
    at, alphas = Stored(suite, stored_cells(file, suite), read_cells(file)), list(suite.axes["alpha"])
    methods = [method for method in suite.axes["method"] if method != "FedAvg"]
    yield "|  | " + " | ".join(f"gain at alpha {alpha} | rank | worst" for alpha in alphas) + " |"
    yield "|---|" + "---|---:|---:|" * len(alphas)
    rows = {method: [text for alpha in alphas for text in texts(at, method, alpha)] for method in ("FedAvg", *methods)}
    for method, row in rows.items():
        values = dict.fromkeys(tuned(at.coefficients(method=method, alpha=alpha)) for alpha in alphas)
        yield " | ".join([f"| {method}: {' / '.join(values)}" if any(values) else f"| {method}", *row]) + " |"
    by_alpha = {alpha: [at(method=method, alpha=alpha) for method in methods] for alpha in alphas}
    quotes = [found for some in by_alpha.values() for found in some]
    assert suite.decide is not None
    pairs, planned = min(found.pairs for found in quotes), suite.decide.max_seeds
    said = [f"{f'All {planned}' if pairs == planned else f'{pairs} of {planned}'} planned seeds have been run."]
    if any(STAR in text for row in rows.values() for text in row):
        said.append(f"{STAR} The verdict differs for the best round or the mean of the last three.")
    said.append("FedETF's rank is of normalised projections, which its fixed classifier reads.")
    p_values = [found.holm for found in quotes if found.holm is not None]
    if p_values:
        said.append("Each verdict has an error of 5 % for itself. After Holm's correction, p-values below 0.05:")
        remaining = sum(p < 0.05 for p in p_values) or "none"
        said.append(f"{remaining} of {len(p_values)}; the smallest is {p_value(min(p_values))}.")
    yield from ("", *wrap(" ".join(said), 120), "")
    for line in text_of(papers / "results" / f"lesson{TEXT}", papers).splitlines():
        yield from wrap(line, 120, subsequent_indent="  " * line.startswith("-")) or [""]


def tuned(coefficients: str) -> str:
    """The coefficients that were chosen, without the other arguments of a method or a server optimizer."""
    others = ("temperature", "layers", "lambda", "floor", "dampening", "beta1", "beta2", "tau 0.001", "initial_v")
    kept = [one for one in coefficients.split(", ") if not one.startswith(others)]
    return ", ".join(one for one in kept if len(kept) == 1 or one != "lr 1").replace("alpha", "its alpha")


def texts(at: Stored, method: str, alpha: str) -> tuple[str, str, str]:
    """The gain with its verdict, or FedAvg's accuracy; mean effective rank; mean accuracy of the worst decile.

    Ranks and accuracies that differ from FedAvg's by Student's interval are bold.
    """
    found, avg = at(method=method, alpha=alpha), at(method="FedAvg", alpha=alpha)
    measured = []
    for tag, form, unit in ((RANK, "{:.1f}", 1), (WORST, "{:.0f} %", 100)):
        values, others = found.metric(tag), avg.metric(tag)
        low, high = paired(values, others).interval or (0, 0)
        measured.append(("**{}**" if low > 0 or high < 0 else "{}").format(form.format(unit * fmean(values.values()))))
    if found.compared is None:
        return f"{found.mean:.1f} %", *measured
    others = [at(show, k, method=method, alpha=alpha) for show, k in (("last", 3), ("best", None))]
    gain = signed(found.difference)
    if found.compared.interval:
        gain += f" ({span(found)}), {found.verdict}{STAR * any(other.verdict != found.verdict for other in others)}"
    return gain, *measured


def text_of(file: Path, papers: Path) -> str:
    """Render a handwritten text with the numbers that it quotes.

    Raises:
        UsageError: the text quotes a missing number, or is not a valid template.
    """

    def stored(name: str) -> Stored:
        folders = (papers / "results", papers.parent / "overview")
        cells = next((at for folder in folders if (at := folder / f"{name}{ENDING}").is_file()), folders[0] / name)
        require(cells.is_file(), f"{file}: stored", name, f"lacks a file of cells next to it, such as {name}{ENDING}")
        suite = suite_of(cells, papers)
        return Stored(suite, stored_cells(cells, suite), read_cells(cells))

    try:
        return quoted(file.read_text(), stored)
    except TemplateError as error:
        raise UsageError(f"{file}: {error}; see quotes.py for the syntax of quotes") from error


def write_tables_beside(papers: Path = PAPERS) -> list[Path]:
    """Write the tables of each file of cells next to it, in the current format; return the files."""
    made = []
    for file in sorted((papers / "results").glob(f"*{ENDING}")):
        suite = suite_of(file, papers)
        cells, results = stored_cells(file, suite), read_cells(file)
        for form in FORMS:
            beside = file.with_name(f"{file.name.removesuffix(ENDING)}.table.{form}")
            made.append(write_text(beside, render(suite, cells, results, form)))
    return made


def part(file: Path, papers: Path) -> Iterator[str]:
    """Return the section of one file of cells: the suite, the tables, and our conclusions."""
    suite = suite_of(file, papers)
    cells, results = stored_cells(file, suite), read_cells(file)
    title, *rest = render(suite, cells, results).splitlines()
    yield from (f"#{title}", "", f"Suite: [`{suite.path.relative_to(papers)}`]({suite.path.relative_to(papers)})", "")
    yield from (*what_was_run(suite, cells, results), "")
    yield from (f"#{line}" if line.startswith("## ") else line for line in rest[1:])
    conclusions = file.with_name(file.name.removesuffix(ENDING) + TEXT)
    text = text_of(conclusions, papers).strip() if conclusions.is_file() else "Not written yet."
    yield from ("", "### What we conclude", "", text, "")


def suite_of(file: Path, papers: Path) -> Suite:
    """Return the suite of a file of cells.

    Raises:
        UsageError: the suite does not exist.
    """
    name = file.name.removesuffix(ENDING).split("_scale")[0]
    for path in (*sorted(papers.glob("*/*.yaml")), papers.parent / "overview" / "suite.yaml"):
        if name.removesuffix(OF_READINGS) == f"{path.parent.name}-{path.stem}":
            for suite in suites_in(path):
                if suite.name == name:
                    return suite
    raise UsageError(f"{file}: unknown suite {name} below {papers}: name the file after its suite")


def what_was_run(suite: Suite, cells: Sequence[Cell], results: Mapping[str, CellResult]) -> Iterator[str]:
    """Seeds, scale, seconds, coefficients, and the keys of the configs in which the cells are not the suite's."""
    seeds = sorted({cell.seed for cell in cells})
    done = [cell for cell in cells if results[cell.digest].state == "done"]
    scale = cells[0].scale
    share = f" at scale {scale:g} (rounds, local epochs and examples each times {scale ** (1 / 3):.2f})"
    yield f"- Seeds {', '.join(map(str, seeds))} of the suite's {len(suite.seeds)}{share if scale != 1 else ''}"
    in_rounds = hours(results[cell.digest] for cell in done)
    yield f"- {in_rounds:.1f} hours of training in the rounds of the {len(done)} finished cells"
    stored = Stored(suite, list(cells), results)
    given = {label: stored.coefficients(method=label) for label in suite.axes.get("method", ())}
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
    parser.add_argument("--output", type=Path, help="folder for both pages, which replaces the default folders")
    parser.add_argument("--tables", action="store_true", help="also write the tables next to the cells")
    options = parser.parse_args()
    for page, text in ((PAPERS / "RESULTS.md", make()), (ROOT / "docs" / "findings.md", findings())):
        (options.output / page.name if options.output else page).write_text(text)
    if options.tables:
        write_tables_beside()
