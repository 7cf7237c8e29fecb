"""Make the picture of the README and the site's first page, docs/front_accuracy.svg and docs/front_spectra.svg.

python docs/make_front.py [--output FOLDER]

It shows stored cells of ``experiments/overview/suite.yaml``: four methods on handwritten digits, with the seed 0.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from matplotlib import rc_context

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from fl_lightning.bench import load_suite  # noqa: E402, found through the path above
from fl_lightning.bench.cells_csv import read_cells, stored_cells  # noqa: E402
from fl_lightning.plotting.drawing import Curve, curves, in_style  # noqa: E402
from fl_lightning.plotting.figures import laid_out  # noqa: E402
from fl_lightning.plotting.style import LIGHT  # noqa: E402

SUITE, CELLS = (ROOT / "experiments" / "overview" / name for name in ("suite.yaml", "overview-suite.cells.csv"))
METHODS = ("FedAvg", "FedDyn", "FedUV", "FedDecorr")
SPECTRUM = "spectrum/representation/"


def lines() -> Iterator[tuple[Curve, Curve]]:
    """Yield the accuracy over the rounds, and the singular values after the last one, of each method."""
    stored, cells = read_cells(CELLS), stored_cells(CELLS, load_suite(SUITE))
    for number, method in enumerate(METHODS):
        labels = {"data": "Digits", "method": method}
        (result,) = (stored[cell.digest] for cell in cells if cell.labels == labels and cell.seed == 0)
        values = {int(tag.removeprefix(SPECTRUM)): v for tag, v in result.metrics.items() if tag.startswith(SPECTRUM)}
        yield curve(number, method, result.values, 100), curve(number, method, values)


def curve(number: int, label: str, values: Mapping[int, float], unit: float = 1) -> Curve:
    """Return the curve of values by their place."""
    return Curve(number, unit * np.array([values[x] for x in sorted(values)]), label, np.array(sorted(values)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "docs", help="folder of the picture")
    folder = parser.parse_args().output
    accuracies, spectra = zip(*lines(), strict=True)
    drawings = {
        "accuracy": curves(accuracies, xlabel="round", title="test accuracy in %"),
        "spectra": curves(spectra, "y", xlabel="index", title="singular values of the representations, round 19"),
    }
    for name, draw in drawings.items():
        figure = laid_out([draw], size=(4.2, 3.0))
        figure.set_facecolor(LIGHT["card"])
        # the letters look alike everywhere, and equal pictures are equal files
        with in_style(), rc_context({"svg.fonttype": "path"}):
            figure.savefig(folder / f"front_{name}.svg", transparent=False, metadata={"Date": None})


if __name__ == "__main__":
    main()
