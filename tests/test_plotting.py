"""Names of classes, clients, folders and runs are drawn as they are, whatever their characters."""

import warnings
from types import SimpleNamespace

import numpy as np
import pytest

from fl_lightning.plotting import drawing
from fl_lightning.plotting.figures import figures, laid_out
from fl_lightning.plotting.plots import PLOTS, by_shape
from fl_lightning.storage.partition_table import draw_labels

NAMES = ["$", "$a$ $x^{$", "_hidden", r"\frac{", "two\nlines\tand a tab", "实验数据", "🦠", "half \udcff", "long" * 60]
SQUARE, VALUES = np.full((1, 9, 9), 0.5), np.linspace(0.1, 1, 9)[None]
NAMED = {"layers": np.array([NAMES]), "class_names": np.array([NAMES]), "clients": np.arange(9)[None]}
FILES = {
    "spectra.npz": {
        **{"classifier": VALUES, "representation": VALUES, "local_classifier": SQUARE},
        **{"local_representation": SQUARE, "local_rounds": np.zeros(1, int)},
    },
    "neural_collapse.npz": {
        **{f"nc_{name}": VALUES[0, :1] for name in ("1", "2_angle_means", "2_angle_weights", "3", "4", "classes")},
        **{"cosines_means": SQUARE, "cosines_weights": SQUARE, "norms_means": VALUES, "norms_weights": VALUES},
    },
    "layer_similarity.npz": {
        **{"to_global": SQUARE, "between_clients": np.stack([SQUARE] * 9, 1), "between_rounds": VALUES}
    },
    "layer_alignment.npz": {
        **{"global": np.stack([SQUARE] * 9, 1), "local": np.stack([SQUARE] * 9, 1)},
        "pairs": np.array([[[name, name] for name in NAMES]]),
    },
    "drift.npz": {
        **{"pairwise": SQUARE, "layer_to_mean": SQUARE, "layer_dissimilarity": VALUES, "layer_norms": SQUARE},
        **{"norms": VALUES, "to_mean": VALUES, "row_norms": SQUARE, "biases": SQUARE, "label_counts": SQUARE},
        **{"row_norm_correlation": VALUES, "bias_correlation": VALUES},
    },
    "per_class.npz": {
        **{"before": SQUARE, "after": SQUARE, "groups_before": SQUARE[..., :3], "groups_after": SQUARE[..., :3]},
        **{"confusion_before": SQUARE, "confusion_after": SQUARE, "label_counts": SQUARE},
    },
    "personal.npz": {"own": VALUES, "tuned": VALUES, "domain": VALUES, "domains": np.array([NAMES])},
    "deviation.npz": {"ratio": 2 * SQUARE, "ratio_calibrated": SQUARE, "own": SQUARE, "others": SQUARE},
    "embedding.npz": {
        **{"global": np.ones((1, 9, 2)), "labels": np.array([NAMES]), "models": np.array(NAMES[:3])},
        **{"apart": np.ones((3, 9, 2)), "together": np.ones((3, 9, 2)), "held": np.array([NAMES] * 3)},
    },
    "mine.npz": {"a$": VALUES[0, :1], "_b": VALUES, "实": SQUARE},
}


@pytest.fixture
def strict():
    """Fails where matplotlib warns, except of characters that no installed font has."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Glyph")
        yield


def save(figure, folder):
    """Save a figure outside of any style, as loggers and notebooks do."""
    for ending in ("png", "pdf", "svg"):
        figure.savefig(folder / f"drawn.{ending}", dpi=30)


@pytest.mark.parametrize("file", [*PLOTS, "mine.npz"])
@pytest.mark.parametrize("labels", [[""], NAMES[:5] + NAMES[-3:]], ids=["one", "several"])
def test_any_names_are_drawn(file, labels, strict, tmp_path):
    arrays = {**NAMED, **FILES[file], "rounds": np.zeros(1, int)}
    plot = PLOTS[file][1] if file in PLOTS else by_shape
    drawn = list(figures(plot({label: [arrays] for label in labels})))
    assert drawn
    for _, figure in drawn[:2]:
        figure.savefig(tmp_path / "drawn.png", dpi=30)


def test_the_partition_has_any_names(strict, tmp_path):
    plan = SimpleNamespace(
        sizes=[9] * 9, class_names=NAMES, label_counts=np.eye(9, dtype=int), domain=NAMES.__getitem__
    )
    save(draw_labels(plan), tmp_path)


def test_an_installed_font_draws_what_the_first_one_lacks(monkeypatch, tmp_path):
    lacking = "\u231a"  # a watch, in a font that comes with matplotlib
    monkeypatch.setattr(drawing, "FALLBACKS", ("no such font", "STIXGeneral"))
    figure = laid_out([lambda axes: axes.set(title=lacking)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(figure, tmp_path)
