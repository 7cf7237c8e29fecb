"""Make the two pictures and the table of stored results in the README and on the site's first page.

python docs/make_front.py [--output FOLDER]

The pictures, ``docs/front_*.svg``, show cells and spectra of ``experiments/papers/scaled/figures.yaml``. The table
shows ``experiments/papers/scaled/decisive.yaml``, between ``<!-- results -->`` and ``<!-- end -->`` in the README.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "experiments" / "papers" / "programs")]

from quotes import Quote, Stored, signed, span  # noqa: E402, found through the path above

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
    """The lines of the table: each method's gain over FedAvg, effective rank and worst decile; what was tested."""
    suite, file = load_suite(PAPERS / "scaled" / "decisive.yaml"), RESULTS / "scaled-decisive.cells.csv"
    at, alphas = Stored(suite, stored_cells(file, suite), read_cells(file)), list(suite.axes["alpha"])
    methods = [method for method in suite.axes["method"] if method != "FedAvg"]
    yield "|  | " + " | ".join(f"gain at alpha {alpha} | rank | worst" for alpha in alphas) + " |"
    yield "|---|" + "---|---:|---:|" * len(alphas)
    for method in ("FedAvg", *methods):
        values = dict.fromkeys(tuned(at.coefficients(method=method, alpha=alpha)) for alpha in alphas)
        name = f"{method}: {' / '.join(values)}" if any(values) else method
        yield " | ".join([f"| {name}", *(text for alpha in alphas for text in texts(at, method, alpha))]) + " |"
    quotes = [at(method=method, alpha=alpha) for method in methods for alpha in alphas]
    p_values = [found.holm for found in quotes if found.holm is not None]
    seeds, survive = sorted({found.pairs for found in quotes}), sum(p < 0.05 for p in p_values)
    assert suite.decide is not None
    yield ""
    yield f"{' or '.join(map(str, seeds))} of {suite.decide.max_seeds} seeds have been run; a sequence needs 5."
    yield "Each verdict is on one pair, with an error of 5 %. \\* It is another one by the best round, or by the mean"
    yield "of the last three."
    if p_values:
        shown = f"{survive or 'none'} of them {'are' if survive > 1 else 'is'} shown to differ from FedAvg"
        yield f"After Holm's correction for the {len(p_values)} comparisons, {shown}:"
        yield f"the smallest p-value is {min(p_values):.3f}."
    yield ""
    yield from lesson([at(method=method, alpha=alphas[0]) for method in methods], alphas[0])


def tuned(coefficients: str) -> str:
    """The coefficients that were chosen, without the other arguments of a method or a server optimizer."""
    others = ("temperature", "layers", "lambda", "floor", "dampening", "beta1", "beta2", "tau 0.001", "initial_v")
    kept = [one for one in coefficients.split(", ") if not one.startswith(others)]
    return ", ".join(one for one in kept if len(kept) == 1 or one != "lr 1")


def lesson(quotes: Sequence[Quote], alpha: str) -> Iterator[str]:
    """One sentence: the lesson of the comparisons under the strongest skew."""
    deviations = [found.compared.deviation for found in quotes if found.compared]
    opened = sum(found.verdict == "undecided" for found in quotes)
    yield f"The lesson: at alpha {alpha} a pair's difference deviates from seed to seed by {min(deviations):.0f} to"
    yield f"{max(deviations):.0f} points, so that {opened} of {len(quotes)} methods are undecided with these seeds."


def texts(at: Stored, method: str, alpha: str) -> tuple[str, str, str]:
    """The gain with its verdict, or FedAvg's accuracy; mean effective rank, and mean accuracy of the worst decile."""
    found = at(method=method, alpha=alpha)
    rank, worst = (
        fmean(found.metric(tag).values()) for tag in ("rank/representation/effective", "personal/worst_tenth")
    )
    if found.compared is None:
        return f"{found.mean:.1f} %", f"{rank:.1f}", f"{100 * worst:.0f} %"
    others = (at(show, k, method=method, alpha=alpha) for show, k in (("last", 3), ("best", None)))
    star = "\\*" * any(other.verdict != found.verdict for other in others)
    gain = signed(found.difference)
    if found.compared.interval:
        gain += f" ({span(found)}), {found.verdict}{star}"
    return gain, f"{rank:.1f}", f"{100 * worst:.0f} %"


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
