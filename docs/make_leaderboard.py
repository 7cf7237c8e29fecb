"""Make docs/leaderboard.md and its picture, docs/figures/leaderboard.svg.

python docs/make_leaderboard.py [--output FOLDER]

All numbers come from the stored cells of ``experiments/leaderboard`` and from the comments of its tuned files. The text
is in its ``page.md.j2``.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
import yaml
from matplotlib import rc_context

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from fl_lightning.bench import Cell, Suite, load_suite  # noqa: E402, found through the path above
from fl_lightning.bench.cell import file_part  # noqa: E402
from fl_lightning.bench.cells_csv import stored_cells  # noqa: E402
from fl_lightning.bench.leaderboard import Standing, endpoints, forests, frame_of_runs, standings  # noqa: E402
from fl_lightning.bench.results import CellResult  # noqa: E402
from fl_lightning.bench.statistics import POINTS, point_of  # noqa: E402
from fl_lightning.bench.table_rendering import markdown  # noqa: E402
from fl_lightning.plotting.drawing import in_style  # noqa: E402
from fl_lightning.plotting.style import LIGHT  # noqa: E402

DOCS, FOLDER = ROOT / "docs", ROOT / "experiments" / "leaderboard"
# cells of some rows, run without vector units
ELSEWHERE = FOLDER / "without_vectors.csv.gz"
MARKS = dict(zip(POINTS, ("", "T", "A"), strict=True))
GLOBAL = "global model"


def linked(line: str, links: Mapping[str, str], marks: Mapping[str, str]) -> str:
    """Return a line of a table in which the method is a link, with its mark."""
    parts = line.split(" | ")
    if len(parts) > 1 and parts[1] in links:
        parts[1] = " ".join(filter(None, (f"[{parts[1]}]({links[parts[1]]})", marks.get(parts[1]))))
    return " | ".join(parts)


def sentence(part: tuple[str, str], standing: Standing) -> str:
    """Which rows differ from the baseline in a standing."""
    frame, texts = standing.frame, []
    for side, excludes in (("above", frame["low"] > 0), ("below", frame["high"] < 0)):
        names = [f"**{method}**" if method in standing.significant else method for method in frame.index[excludes]]
        texts.append(f"{side} {standing.baseline}: {', '.join(names) or 'none'}")
    return f"{', '.join(part)}, {frame['low'].count()} comparisons. Interval {'; '.join(texts)}."


def coefficients(suite: Suite) -> list[list[str]]:
    """Return a row for each tuned method: the accuracies of its values in each setting."""
    rows = []
    for method, search in suite.tune["search"].items():
        ((key, values),) = search.items()
        row = [method, f"`{key.rpartition('.')[2]}`"]
        for setting in suite.axes["data"]:
            file = FOLDER / "tuned" / file_part(setting) / f"{file_part(method)}.yaml"
            lines = re.findall(r"^#   (\S+) with \S+ (\S+)$", file.read_text(), re.MULTILINE) if file.is_file() else ()
            accuracies = {float(value): 100 * float(accuracy) for accuracy, value in lines}
            texts = []
            for value, accuracy in sorted(accuracies.items()):
                is_best = value == float(lines[0][1])
                star = "\\*" * (is_best and value in (min(values), max(values)))
                texts.append(f"**{value:g}: {accuracy:.1f}**{star}" if is_best else f"{value:g}: {accuracy:.1f}")
            row.append(", ".join(texts) or "-")
        rows.append(row)
    return rows


def on_other_machine(suite: Suite, results: Mapping[str, CellResult]) -> tuple[list[list[str]], str]:
    """Compare the stored cells that were run elsewhere with those of the leaderboard: rows of a table, and its text."""
    (_, table), *_ = endpoints(suite)
    cells, elsewhere = stored_cells(ELSEWHERE, suite)
    frames = [frame_of_runs(suite, table, cells, stored) for stored in (results, elsewhere)]
    here, there = (frame.set_index(["method", "seed"])["value"] for frame in frames)
    rows = []
    for method in here.index.unique("method"):
        means = here[method].mean(), there[method].mean()
        row = [*(f"{mean:.2f}" for mean in means), f"{means[1] - means[0]:+.2f}", f"{here[method].std():.2f}"]
        rows.append([method, *row])
    changes = (there - here).abs()
    equal = (changes == 0).sum()
    text = f"Of {len(changes)} cells {equal} have the same endpoint; the largest change is {changes.max():.2f} points."
    return rows, text


def make() -> tuple[str, Any]:
    """Return the page and the figure."""
    suite = load_suite(FOLDER / "suite.yaml")
    cells, results = stored_cells(suite.finished, suite)
    board = standings(suite, cells, results)
    ledger = yaml.safe_load((DOCS / "ledger.yaml").read_text())
    links = {name: f"methods_{facts['group']}.md#{name.lower()}" for name, facts in ledger.items()}
    tables = {}
    for part, standing in board.items():
        marks = marks_of(cells, results, part[0]) if part[1] != GLOBAL else {}
        lines = markdown(standing.table(""))
        tables[part] = [linked(line, links, marks) for line in lines if line.startswith("|")]
    machines, machines_text = on_other_machine(suite, results)
    of_global = {part: standing for part, standing in board.items() if part[1] == GLOBAL}
    page = jinja2.Template((FOLDER / "page.md.j2").read_text()).render(
        tables=tables,
        sentences=[sentence(part, standing) for part, standing in board.items()],
        endpoint_text=suite.tables[0].show.title(suite),
        notes=suite.notes,
        settings=[*suite.axes["data"]],
        coefficients=coefficients(suite),
        machines=machines,
        machines_text=machines_text,
    )
    return page.rstrip() + "\n", forests(of_global)


def marks_of(cells: list[Cell], results: Mapping[str, CellResult], setting: str) -> dict[str, str]:
    """The mark of each method's accuracies of clients' models in a setting."""
    points = defaultdict[str, str](str)
    for cell in cells:
        metrics = results[cell.digest].metrics
        if cell.labels["data"] == setting and metrics:
            points[cell.labels["method"]] = MARKS[point_of(metrics)]
    return points


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=DOCS, help="folder of the page; figures/ in it has the picture")
    folder = parser.parse_args().output
    page, figure = make()
    (folder / "leaderboard.md").write_text(page)
    (folder / "figures").mkdir(exist_ok=True)
    figure.set_facecolor(LIGHT["card"])
    # the letters look alike everywhere, and equal pictures are equal files
    with in_style(), rc_context({"svg.fonttype": "path", "svg.hashsalt": "leaderboard"}):
        figure.savefig(folder / "figures" / "leaderboard.svg", transparent=False, metadata={"Date": None})


if __name__ == "__main__":
    main()
