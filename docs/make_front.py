"""Make the picture of the README and the site's first page, docs/front_accuracy.svg and docs/front_spectra.svg.

python docs/make_front.py [--output FOLDER]

It shows the stored cells of ``experiments/front/suite.yaml``: means over the seeds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from matplotlib import rc_context

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from fl_lightning.bench import load_suite  # noqa: E402, found through the path above
from fl_lightning.bench.cells_csv import stored_cells  # noqa: E402
from fl_lightning.plotting.drawing import Curve, curves, in_style  # noqa: E402
from fl_lightning.plotting.figures import laid_out  # noqa: E402
from fl_lightning.plotting.style import LIGHT  # noqa: E402

SUITE, CELLS = (ROOT / "experiments" / "front" / name for name in ("suite.yaml", "front-suite.cells.csv"))
SPECTRUM = "spectrum/representation/"


def lines() -> Iterator[tuple[Curve, Curve]]:
    """Yield the accuracy over the rounds, and the singular values after the last one, of each method."""
    suite = load_suite(SUITE)
    _, stored = stored_cells(CELLS, suite)
    for number, method in enumerate(suite.axes["method"]):
        results = [stored[cell.digest] for cell in suite.cells() if cell.labels["method"] == method]
        accuracies = [[result.values[round_] for round_ in sorted(result.values)] for result in results]
        tags = sorted(tag for tag in results[0].metrics if tag.startswith("spectrum/representation/"))
        spectra = [[result.metrics[tag] for tag in tags] for result in results]
        yield tuple(
            Curve(number, mean, method, np.arange(len(mean)))
            for mean in (100 * np.mean(accuracies, 0), np.mean(spectra, 0))
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "docs", help="folder of the picture")
    folder = parser.parse_args().output
    accuracies, spectra = zip(*lines(), strict=True)
    drawings = {
        "accuracy": curves(accuracies, xlabel="round", title="test accuracy in %"),
        "spectra": curves(spectra, "y", xlabel="index", title="singular values of representations, round 29"),
    }
    for name, draw in drawings.items():
        figure = laid_out([draw], size=(4.2, 3.0))
        figure.set_facecolor(LIGHT["card"])
        # the letters look alike everywhere, and equal pictures are equal files
        with in_style(), rc_context({"svg.fonttype": "path"}):
            figure.savefig(folder / f"front_{name}.svg", transparent=False, metadata={"Date": None})


if __name__ == "__main__":
    main()
