"""Draw the pictures of the pages of classes, docs/figures/classes/NAME.png, each for the example on the page.

python docs/make_pictures.py [--run FOLDER] [--output FOLDER]

Partitioners are drawn on ten clients of the embedded digits. The figures of callbacks are copied from a run with them,
such as the run of the last call of this program::

    python cli.py fit --config experiments/smoke/fedavg.yaml --trainer.max_rounds 3 --trainer.callbacks+=LayerSimilarity
        --trainer.callbacks+=LayerAlignment --trainer.callbacks+=Embedding --trainer.callbacks+=Drift
        --trainer.callbacks+=PerClassAccuracy --trainer.callbacks+=PersonalAccuracy --trainer.callbacks+=DeviationBound
        --trainer.callbacks+=LocalLosses --trainer.callbacks+=NeuralCollapse
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

from class_examples import node_of  # noqa: E402, found through the path above

from fl_lightning import data  # noqa: E402
from fl_lightning.plotting.drawing import in_style  # noqa: E402
from fl_lightning.storage.partition_table import draw_labels  # noqa: E402

# those that the digits can be divided by; the others need domains or a plan
DRAWN = ("IID", "Dirichlet", "ClientDirichlet", "Shards", "ClassesPerClient", "QuantityDirichlet")
# the file of a callback among the figures of a run
FIGURES = {
    "SpectrumMonitor": "spectrum_representation",
    "NeuralCollapse": "nc_cosines",
    "LayerSimilarity": "similarity_global",
    "LayerAlignment": "alignment_global",
    "Embedding": "embedding_classes",
    "Drift": "drift_pairwise",
    "PerClassAccuracy": "per_class_aggregation",
    "PersonalAccuracy": "personal_clients",
    "DeviationBound": "deviation_signs",
    "LocalLosses": "local_losses_loss",
}
WIDEST = 720


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="folder of a run with the callbacks; without it, theirs stay")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "figures" / "classes")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    for name in DRAWN:
        kind = getattr(data, name)
        digits = data.Digits(num_clients=10, partitioner=kind(**node_of(kind).arguments))
        digits.setup("fit")
        with in_style():
            figure = draw_labels(digits.plan)
            figure.savefig(args.output / f"{name}.png", dpi=80, facecolor="white", transparent=False)
    for name, figure in FIGURES.items() if args.run else ():
        with Image.open(args.run / "figures" / f"{figure}.png") as picture:
            width = min(picture.width, WIDEST)
            small = picture.convert("RGBA").resize((width, picture.height * width // picture.width))
            paper = Image.new("RGBA", small.size, "white")
            Image.alpha_composite(paper, small).convert("P", palette=Image.Palette.ADAPTIVE).save(
                args.output / f"{name}.png", optimize=True
            )


if __name__ == "__main__":
    main()
