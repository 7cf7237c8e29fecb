"""Makes RESULTS.md, and the tables of each suite beside its cells, from the stored cells of the suites.

python experiments/papers/programs/make_results.py [--output FILE] [--tables]

``python cli.py bench SUITE --status --save experiments/papers/results`` stores the cells of a suite. What we conclude
from them is written by hand, in ``results/<name of the file of cells>.md``, such as ``results/fedcka-table2.md``; what
we conclude from all of them, in ``results/claims.md``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from fl_lightning.bench import Cell, Suite  # noqa: E402, found through the path above
from fl_lightning.bench.cells_csv import read_cells, stored_cells  # noqa: E402
from fl_lightning.bench.fragments import leaves, of_result, write_text  # noqa: E402
from fl_lightning.bench.readings import OF_READINGS, suites_in  # noqa: E402
from fl_lightning.bench.results import CellResult  # noqa: E402
from fl_lightning.bench.table import FORMS, render  # noqa: E402
from fl_lightning.errors import UsageError  # noqa: E402

PAPERS = ROOT / "experiments" / "papers"
ENDING = ".cells.csv"
HEAD = """# Results

Made by `python experiments/papers/programs/make_results.py` from the cells in `results/`; the conclusions are
written by hand.
[The guide](../../docs/bench.md#reading-the-table) says how to read the tables.
"""


def make(papers: Path = PAPERS) -> str:
    """The page, from the files of cells below a folder of suites."""
    files = sorted((papers / "results").glob(f"*{ENDING}"))
    claims = papers / "results" / "claims.md"
    summary = [claims.read_text()] if claims.is_file() else []
    return "\n".join([HEAD, *summary, *(line for file in files for line in part(file, papers))])


def write_tables_beside(papers: Path = PAPERS) -> list[Path]:
    """Write the tables of each file of cells beside it, in the form that they have today; returns the files."""
    made = []
    for file in sorted((papers / "results").glob(f"*{ENDING}")):
        suite = suite_of(file, papers)
        cells, results = stored_cells(file, suite), read_cells(file)
        for form in FORMS:
            beside = file.with_name(f"{file.name.removesuffix(ENDING)}.table.{form}")
            made.append(write_text(beside, render(suite, cells, results, form)))
    return made


def part(file: Path, papers: Path) -> Iterator[str]:
    """What one file of cells says: what was run, the tables, and what we conclude."""
    suite = suite_of(file, papers)
    cells, results = stored_cells(file, suite), read_cells(file)
    title, *rest = render(suite, cells, results).splitlines()
    yield from (f"#{title}", "", f"Suite: [`{suite.path.relative_to(papers)}`]({suite.path.relative_to(papers)})", "")
    yield from (*what_was_run(suite, cells, results), "")
    yield from (f"#{line}" if line.startswith("## ") else line for line in rest[1:])
    conclusions = file.with_name(file.name.removesuffix(ENDING) + ".md")
    text = conclusions.read_text().strip() if conclusions.is_file() else "Not written yet."
    yield from ("", "### What we conclude", "", text, "")


def suite_of(file: Path, papers: Path) -> Suite:
    """The suite that a file of cells is of.

    Raises:
        UsageError: there is none.
    """
    name = file.name.removesuffix(ENDING).split("_scale")[0]
    for path in sorted(papers.glob("*/*.yaml")):
        if name.removesuffix(OF_READINGS) == f"{path.parent.name}-{path.stem}":
            for suite in suites_in(path):
                if suite.name == name:
                    return suite
    raise UsageError(f"{file}: there is no suite {name} below {papers}: give the file its suite's name")


def what_was_run(suite: Suite, cells: Sequence[Cell], results: Mapping[str, CellResult]) -> Iterator[str]:
    """Seeds, scale, seconds, and the keys of the configs in which the cells are not the suite's."""
    seeds = sorted({cell.seed for cell in cells})
    done = [cell for cell in cells if results[cell.digest].state == "done"]
    hours = sum((one.seconds or 0) * len(one.values) for one in (results[cell.digest] for cell in done)) / 3600
    scale = cells[0].scale
    share = f" at scale {scale:g} (rounds, local epochs and examples each times {scale ** (1 / 3):.2f})"
    yield f"- Seeds {', '.join(map(str, seeds))} of the suite's {len(suite.seeds)}{share if scale != 1 else ''}"
    yield f"- {hours:.1f} hours of training in the rounds of the {len(done)} finished cells"
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
    parser.add_argument("--output", type=Path, default=PAPERS / "RESULTS.md")
    parser.add_argument("--tables", action="store_true", help="write the tables beside the cells again, too")
    options = parser.parse_args()
    options.output.write_text(make())
    if options.tables:
        write_tables_beside()
