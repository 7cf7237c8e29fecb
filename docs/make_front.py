"""Make the two pictures and the table of stored results in the README and on the site's first page.

python docs/make_front.py [--output FOLDER]

The pictures, ``docs/front_*.svg``, show cells and spectra of ``experiments/papers/scaled/figures.yaml``. The table
shows ``experiments/papers/scaled/decisive.yaml``, between ``<!-- results -->`` and ``<!-- end -->`` in the README; the
lesson below it is ``experiments/papers/results/lesson.md.j2``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from textwrap import wrap

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "experiments" / "papers" / "programs")]

from make_results import text_of  # noqa: E402, found through the path above
from quotes import Stored, p_value, paired, signed, span  # noqa: E402, found through the path above

from fl_lightning.bench import load_suite  # noqa: E402, found through the path above
from fl_lightning.bench.cells_csv import read_cells, stored_cells  # noqa: E402
from fl_lightning.plotting.drawing import in_style, logarithmic  # noqa: E402
from fl_lightning.plotting.style import LIGHT, LINE_COLOURS  # noqa: E402

PAPERS = ROOT / "experiments" / "papers"
RESULTS = PAPERS / "results"
ALPHA = "\N{GREEK SMALL LETTER ALPHA}"
# by the label of a partition in the suite: its name in the picture, its colour, and the vertical offset of the name in
# points; from no skew to the strongest
LINES = {
    "IID": ("IID", LINE_COLOURS[5], 5),
    "1": (f"{ALPHA} = 1", LINE_COLOURS[0], -3),
    "0.1": (f"{ALPHA} = 0.1", LINE_COLOURS[3], 5),
    "0.05": (f"{ALPHA} = 0.05", LINE_COLOURS[1], -5),
}
RANK, WORST = "rank/representation/effective", "personal/worst_tenth"
STAR = "\\*"
# of the 84 neurons of the layer; the last ones are rounding errors in some of the runs
SHOWN = 70


def accuracies() -> dict[str, np.ndarray]:
    """FedAvg's test accuracy in % of each seed and round ``(S, R)``, by the label of the partition."""
    suite, file = load_suite(PAPERS / "scaled" / "figures.yaml"), RESULTS / "scaled-figures.cells.csv"
    results, found = read_cells(file), {}
    for cell in stored_cells(file, suite):
        if cell.labels["method"] == "FedAvg":
            values = results[cell.digest].values
            found.setdefault(cell.labels["alpha"], []).append([100 * values[at] for at in sorted(values)])
    return {label: np.array(values) for label, values in found.items()}


def spectra() -> dict[str, np.ndarray]:
    """The singular values of the representations' covariance of each seed ``(S, d)``, by the label of the partition."""
    with np.load(RESULTS / "figures.npz") as stored:
        return {label: stored[f"{label}/FedAvg/representation"][:, :SHOWN] for label in LINES}


def picture(of_label: Mapping[str, np.ndarray], log: str, **labels: str) -> Figure:
    """A line for each partition: the mean over the seeds, and a band from the lowest to the highest."""
    figure = Figure(figsize=(4.2, 3.3), layout="constrained", facecolor=LIGHT["card"])
    axes = figure.add_subplot()
    for label, (name, colour, up) in LINES.items():
        of_seeds = of_label[label]
        x, mean = np.arange(1, of_seeds.shape[1] + 1), of_seeds.mean(0)
        axes.plot(x, mean, color=colour)
        axes.fill_between(x, of_seeds.min(0), of_seeds.max(0), color=colour, alpha=0.15, linewidth=0)
        end, style = (x[-1], mean[-1]), {"va": "center", "fontsize": 10, "fontweight": "bold"}
        axes.annotate(name, end, (5, up), textcoords="offset points", color=colour, **style)
    # with room for the names
    axes.set_xlim(1, 1.23 * x[-1])
    axes.set_xticks([1, *range(x[-1] // 4 // 5 * 5, x[-1] + 1, x[-1] // 4 // 5 * 5)])
    axes.set(**labels)
    logarithmic(axes, log)
    return figure


def results() -> Iterator[str]:
    """Yield the lines of the table, its footnotes, and the lesson."""
    suite, file = load_suite(PAPERS / "scaled" / "decisive.yaml"), RESULTS / "scaled-decisive.cells.csv"
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
    for line in text_of(RESULTS / "lesson.md.j2", PAPERS).splitlines():
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


def with_table(page: str) -> str:
    """The page with the table in its place."""
    head, _, rest = page.partition("<!-- results -->\n")
    return "\n".join([f"{head}<!-- results -->", *results(), rest[rest.index("<!-- end -->") :]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT, help="folder of README.md and docs")
    folder = parser.parse_args().output
    (folder / "docs").mkdir(exist_ok=True)
    with in_style():
        accuracy = picture(accuracies(), "", title="Test accuracy in %", xlabel="round")
        singular = picture(spectra(), "y", title="Singular values of the representations", xlabel="index")
    for name, figure in (("accuracy", accuracy), ("spectra", singular)):
        # the letters look alike everywhere, and equal pictures are equal files
        with in_style(), rc_context({"svg.fonttype": "path", "svg.hashsalt": name}):
            place = folder / "docs" / f"front_{name}.svg"
            figure.savefig(place, transparent=False, metadata={"Date": None})
    (folder / "README.md").write_text(with_table((ROOT / "README.md").read_text()))


if __name__ == "__main__":
    main()
