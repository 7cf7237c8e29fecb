"""Plot functions of the files that callbacks leave in the folder of a run.

Each takes ``{label: [arrays of each seed]}``. The single label ``""`` stands for a run of its own, whose figures go to
TensorBoard and into the folder of the run; several labels give the figures in which a report compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes

from fl_lightning.plotting.drawing import MARKS, Draw, bars, curves, numbered_line, points, visible
from fl_lightning.plotting.figures import Arrays, Plot, Runs, bar_panels, curve_panels, maps, of_round, single
from fl_lightning.plotting.values import (
    BOUNDS,
    CLASS_GROUPS,
    MODELS,
    SPECTRUM_TITLES,
    descending,
    diagonal,
    off_diagonal,
    over,
    row_shares,
)

WHEN = {"before": "before aggregation", "after": "after aggregation"}
BY_CLIENT = "client, the largest value first"


# ------------------------------------------------------------------ SpectrumMonitor
def spectra(runs: Runs, threshold: float = np.nan) -> Iterator[Plot]:
    """Plot ``spectra.npz``: all rounds of one run, or the last spectra of several; and those of the local models."""
    alone = single(runs)
    for what, title in SPECTRUM_TITLES.items():
        if alone is None:
            drawings = curve_panels(runs, {what: ""}, spectrum=True, xlabel="index", title=title)
        else:
            drawings = [of_all_rounds(alone, what, title, threshold)] if what in alone else []
        yield Plot(f"spectrum/{what}", "", drawings)
        local, shown, of = f"local_{what}", {f"local_{what}": "mean of the local models"}, runs
        if alone is not None and local in alone:
            # the global model on the same images, or in the same round
            probe = f"probe_{what}"
            same = alone[probe] if probe in alone else alone[what][np.isin(alone["rounds"], alone["local_rounds"][-1])]
            of = {"": [{**alone, f"global_{what}": same} if len(same) else alone]}
            shown[f"global_{what}"] = "global model"
        drawings = curve_panels(
            of, shown, {local: over(0)}, spread={local: 0}, spectrum=True, xlabel="index", title=title
        )
        when = of_round(runs, "local_rounds") if drawings else ""
        yield Plot(f"spectrum/{local}", f"local models{when}", [with_level(draw, threshold) for draw in drawings])


def of_all_rounds(arrays: Arrays, what: str, title: str, threshold: float) -> Draw:
    """Draw the spectra of all rounds, later ones darker; the first, the middle and the last have a label."""
    entries, rounds = arrays[what], arrays["rounds"]
    shades = colormaps["viridis_r"](np.linspace(0, 1, len(entries)) if len(entries) > 1 else [1.0])
    lines = [
        numbered_line(
            *(0, visible(entry), f"round {rounds[at]}" * (at in some_of(len(entries)))),
            **{"color": shade, "marker": None, "linewidth": 1},
        )
        for at, (entry, shade) in enumerate(zip(entries, shades, strict=True))
    ]
    return with_level(curves(lines, "y", xlabel="index", ylabel="singular value", title=title), threshold)


def with_level(draw: Draw, threshold: float) -> Draw:
    """Draw, and mark the threshold where the drawing reaches it."""

    def both(axes: Axes) -> None:
        draw(axes)
        if axes.get_ylim()[0] <= threshold <= axes.get_ylim()[1]:
            axes.axhline(threshold, color="grey", linestyle=":", linewidth=1, label=f"threshold {threshold:g}")

    return both


def some_of(number: int) -> list[int]:
    """Return the places of the first, the middle and the last of some measurements."""
    return sorted({0, (number - 1) // 2, number - 1})


# ------------------------------------------------------------------ LayerSimilarity, LayerAlignment
def similarity(runs: Runs) -> Iterator[Plot]:
    """Plot ``layer_similarity.npz``: CKA by layer, and for one run the matrices of clients."""
    alone, when = single(runs), of_round(runs)
    shown = {
        "to_global": "clients with the global model",
        "between_clients": "clients with each other",
        "between_rounds": "global model before and after the round",
    }
    reduce, spread = {"to_global": over(1), "between_clients": off_diagonal}, {"to_global": 1}
    layers = curve_panels(runs, shown, reduce, "layers", spread, xlabel="layer", ylabel="CKA")
    yield Plot("similarity/layers", f"layer similarity of local models and the global one{when}", layers)
    if alone is not None:
        names: Sequence[str] = ("layers", "clients")
        drawings = maps(runs, {"to_global": ""}, "CKA", limits=(0, 1), names=names, xlabel="client", ylabel="layer")
        yield Plot("similarity/global", f"CKA with the global model{when}", drawings)
        means = off_diagonal(alone["between_clients"][-1])
        titles = [f"{layer}: mean {mean:.2f}" for layer, mean in zip(alone["layers"][-1], means, strict=True)]
        drawings = one_map_each(alone, "between_clients", titles, "CKA", "clients", xlabel="client", ylabel="client")
        yield Plot("similarity/clients", f"CKA of local models{when}", drawings)


def alignment(runs: Runs) -> Iterator[Plot]:
    """Plot ``layer_alignment.npz``: the matrices of one run, or the means by pair of layers of several."""
    alone, models = single(runs), {"global": "global model", "local": "mean over the local models"}
    if alone is None:
        shown = {"global": "alignment, global model", "local": "alignment, local models"}
        drawings = curve_panels(runs, shown, diagonal, "pairs", xlabel="pair of layers")
        yield Plot("alignment/pairs", "alignment of consecutive layers", drawings)
        return
    labels: dict[str, Any] = {
        "ylabel": "right singular vector of the second",
        "xlabel": "left singular vector of the first",
    }
    for what, told in models.items():
        means = diagonal(alone[what][-1])
        titles = [
            f"{a} to {b}\nmean of the diagonal {m:.2f}" for (a, b), m in zip(alone["pairs"][-1], means, strict=True)
        ]
        drawings = one_map_each(alone, what, titles, "absolute cosine", **labels)
        yield Plot(f"alignment/{what}", f"alignment of consecutive layers, {told}{of_round(runs)}", drawings)


def one_map_each(arrays: Arrays, name: str, titles: list[str], unit: str, names: str = "", **labels: Any) -> list[Draw]:
    """Draw each of the matrices (L, n, m) of a run's last measurement by itself."""
    drawings = list[Draw]()
    for title, matrix in zip(titles, arrays[name][-1], strict=True):
        own: Runs = {"": [{name: matrix[None], **({names: arrays[names]} if names else {})}]}
        drawings += maps(own, {name: ""}, unit, limits=(0, 1), names=(names, names), title=title, **labels)
    return drawings


# ------------------------------------------------------------------ Drift
def drift(runs: Runs) -> Iterator[Plot]:
    """Plot ``drift.npz``: cosines of the clients' changes, drift by layer, and the bias of local classifiers."""
    alone, when = single(runs), of_round(runs)
    how: dict[str, Any] = {"limits": (-1, 1), "names": ("clients", "clients"), "xlabel": "client", "ylabel": "client"}
    cosines = maps(runs, {"pairwise": ""}, "cosine of two clients' changes", **how)
    yield Plot("drift/pairwise", f"cosines of the clients' changes{when}", cosines)
    some = {} if alone is None else {f"round {alone['rounds'][at]}": at for at in some_of(len(alone["rounds"]))}
    of = runs if alone is None else {label: [upto(alone, at)] for label, at in some.items()}
    by_layer = {
        "layer_to_mean": "cosine to the mean change",
        "layer_dissimilarity": "gradient dissimilarity B²",
        "layer_norms": "norm of a client's change",
    }
    drawings = list[Draw]()
    for name, label in by_layer.items():
        of_layers = name == "layer_dissimilarity"
        of_one: dict[str, Any] = {
            "reduce": None if of_layers else over(1),
            "names": "layers",
            "log": "y" * of_layers,
            "xlabel": "layer",
        }
        drawings += curve_panels(of, {name: label}, **of_one)
    yield Plot("drift/layers", "drift by layer", drawings)
    if alone is None:
        shown = {"norms": "norm of the change", "to_mean": "cosine to the mean change"}
        drawings = curve_panels(runs, shown, descending, xlabel=BY_CLIENT)
        yield Plot("drift/clients", "drift by client", drawings)
    elif "row_norms" in alone:
        shares, drawings = 100 * row_shares(alone["label_counts"][-1]), []
        for what, values, label in (
            ("row_norm", "row_norms", "norm of the class's row"),
            ("bias", "biases", "bias of the class"),
        ):
            mean = over(0)(alone[f"{what}_correlation"][-1])
            note = f"mean correlation {mean:.2f}" if np.isfinite(mean) else "no correlation is defined"
            places = np.stack([shares.ravel(), alone[values][-1].ravel()], 1)
            labels: dict[str, Any] = {
                "xlabel": "share of the class in the client's data in %",
                "ylabel": label,
                "title": note,
            }
            drawings.append(points([("", places)], bare=False, **labels))
        yield Plot("drift/classifier", f"local classifiers and label counts{when}", drawings)


def upto(arrays: Arrays, at: int) -> Arrays:
    """Return the arrays as they were after a measurement."""
    return {name: array[: at + 1] for name, array in arrays.items()}


# ------------------------------------------------------------------ PerClassAccuracy, PersonalAccuracy
def per_class(runs: Runs) -> Iterator[Plot]:
    """Plot ``per_class.npz``: accuracy by class before and after aggregation, and confusion matrices."""
    alone, when = single(runs), of_round(runs)
    label: dict[str, Any] = {"ylabel": "test accuracy in %"}
    drawings = bar_panels(runs, WHEN, over(0), "class_names", 100, xlabel="class", **label)
    groups = {f"groups_{one}": told for one, told in WHEN.items()}
    drawings += bar_panels(runs, groups, over(0), CLASS_GROUPS, 100, xlabel="group", **label)
    yield Plot("per_class/aggregation", f"accuracy before and after aggregation, mean over the clients{when}", drawings)
    shown = {f"confusion_{one}": told for one, told in WHEN.items()}
    how: dict[str, Any] = {
        "limits": (0, 100),
        "names": ("class_names", "class_names"),
        "xlabel": "classified as",
        "ylabel": "class",
    }
    drawings = maps(runs, shown, "share of the class in %", lambda entry: 100 * row_shares(entry), **how)
    yield Plot("per_class/confusion", f"how each class's test examples are classified{when}", drawings)
    if alone is not None:
        clients = [int(k) for k in alone["clients"][-1] if k >= 0][:4]
        drawings = [of_client(alone, at, f"client {k}") for at, k in enumerate(clients)]
        yield Plot("per_class/clients", f"accuracy of each class{when}", drawings)


def of_client(arrays: Arrays, at: int, title: str) -> Draw:
    """Draw a client's training examples as grey bars, and the accuracy of its classes over them."""

    def draw(axes: Axes) -> None:
        counts = arrays["label_counts"][-1, at]
        names = [str(c) for c in range(len(counts))]
        bars([(0, counts, "training examples")], names, xlabel="class", ylabel="training examples", title=title)(axes)
        for bar in axes.patches:
            bar.set(facecolor="0.8", hatch=None)
        right = axes.twinx()
        shown = {"before": "accuracy of the local model", "after": "accuracy after aggregation"}
        lines = [
            numbered_line(number, 100 * arrays[name][-1, at], label, marker=MARKS[number])
            for number, (name, label) in enumerate(shown.items())
        ]
        curves(lines, ylabel="test accuracy in %")(right)
        right.set_ylim(-4, 104)
        right.grid(visible=False)
        right.spines["right"].set_visible(True)

    return draw


def personal(runs: Runs) -> Iterator[Plot]:
    """Plot ``personal.npz``: the accuracy of each client's model on its own data, in order, and of each domain."""
    alone = single(runs)
    if alone is None:
        label: dict[str, Any] = {"xlabel": BY_CLIENT, "title": "accuracy on their own test data in %"}
        yield Plot("personal/clients", "", curve_panels(runs, MODELS, descending, unit=100, **label))
        drawings = bar_panels(
            runs, {"domain": "global model"}, None, "domains", 100, xlabel="domain", ylabel="accuracy in %"
        )
        yield Plot("personal/domains", "accuracy by domain", drawings)
        return
    order = np.argsort(alone["own"][-1], kind="stable")
    known = {name: label for name, label in MODELS.items() if name in alone}
    means = [f"{label} {100 * over(0)(alone[name][-1]):.1f} %" for name, label in known.items()]
    ordered = {name: alone[name][-1:, order] for name in ("clients", *known)}
    labels: dict[str, Any] = {
        "xlabel": "client, from the worst to the best",
        "ylabel": "accuracy on its own test data in %",
    }
    title = f"mean: {', '.join(means)}"
    drawings = curve_panels({"": [ordered]}, known, names="clients", unit=100, title=title, **labels)
    yield Plot("personal/clients", f"personal accuracy{of_round(runs)}", drawings)


# ------------------------------------------------------------------ DeviationBound
def deviation(runs: Runs) -> Iterator[Plot]:
    """Plot ``deviation.npz``: the direction of each minority class's row, or the ratios of several runs."""
    alone = single(runs)
    if alone is None:
        shown = {
            "ratio": "ratio to the bound",
            "ratio_calibrated": "ratio to the calibrated bound",
            "own": "cosine of the own row",
            "others": "largest cosine of another row",
        }
        yield Plot("deviation/classes", "deviation by class", curve_panels(runs, shown, over(0), xlabel="class"))
        return
    drawings = []
    for name, title in BOUNDS.items():
        ratio, own = alone[name].ravel(), alone["own"].ravel()
        known = (ratio > 0) & np.isfinite(own)
        places, predicted, down = np.stack([ratio[known], own[known]], 1), ratio[known] > 1, own[known] < 0
        note = f"{title}\nof {predicted.sum()} above 1, {down[predicted].sum()} deviate"
        kinds = np.where(predicted & ~down, "against the theorem", "as the theorem allows")
        labels: dict[str, Any] = {
            "xlabel": "(n_j / n_r) / D_jr",
            "ylabel": "cosine of the row's change and the class's mean",
        }
        if len(places):
            drawings.append(crossed(points(points_by_kind(places, kinds), False, "x", title=note, **labels)))
    title = f"direction of each minority class's row by the ratio of Theorem 1{of_round(runs)}"
    yield Plot("deviation/signs", title, drawings)


def crossed(draw: Draw) -> Draw:
    """Draw, with lines at x = 1 and y = 0."""

    def both(axes: Axes) -> None:
        draw(axes)
        axes.axvline(1, color="black", linewidth=0.8, linestyle="--")
        axes.axhline(0, color="black", linewidth=0.8)

    return both


# ------------------------------------------------------------------ Embedding
def embedding(runs: Runs) -> Iterator[Plot]:
    """Plot ``embedding.npz``: the embeddings of one run's models, or those of the global models of several."""
    alone, title = single(runs), "t-SNE of the test representations"
    if alone is None:
        drawings = [
            points(points_by_kind(seeds[0]["global"][-1], seeds[0]["labels"][-1]), bare=True, title=label)
            for label, seeds in runs.items()
            if seeds
            and {"global", "labels"} <= seeds[0].keys()
            and seeds[0]["global"].shape[2:] == (2,)
            and np.isfinite(seeds[0]["global"][-1]).all()
        ]
        yield Plot("embedding/classes", title, drawings)
        return
    drawings = [
        points(points_by_kind(places, held), bare=True, title=model)
        for model, places, held in zip(alone["models"], alone["apart"], alone["held"], strict=True)
    ]
    yield Plot("embedding/classes", f"{title} by class, each model alone{of_round(runs)}", drawings)
    if len(alone["models"]) > 1:
        groups = list(zip(alone["models"], alone["together"], strict=True))
        drawings = [points(groups, bare=True)]
        yield Plot("embedding/clients", f"t-SNE of all models' representations{of_round(runs)}", drawings)


def points_by_kind(places: np.ndarray, kinds: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Return points (n, 2) by their kind (n,), in the order of the numbers with which the kinds begin."""
    names = sorted(set(kinds.tolist()), key=lambda kind: (str(kind).split(" ")[0].zfill(9), str(kind)))
    return [(str(name), places[kinds == name]) for name in names]


# ------------------------------------------------------------------ other files
def by_shape(runs: Runs) -> Iterator[Plot]:
    """Plot a file of arrays (R, ...) by shape: numbers against the rounds, curves, and matrices."""
    arrays = {name: array for seeds in runs.values() for one in seeds for name, array in one.items()}
    measured = {name: array.ndim for name, array in arrays.items() if array.dtype.kind in "fiub"}
    axes = {
        depth: [name for name, d in measured.items() if d == depth and not name.endswith("rounds")]
        for depth in (1, 2, 3)
    }
    yield Plot("course", "", course(runs, axes[1]))
    yield Plot("curves", "", curve_panels(runs, {name: name for name in axes[2]}, xlabel="index"))
    for name in axes[3]:
        yield Plot(name, "", maps(runs, {name: name}, name, xlabel="column", ylabel="row"))


def course(runs: Runs, names: Sequence[str]) -> list[Draw]:
    """Draw numbers against the rounds: a drawing for each array, a curve of the mean over the seeds for each label."""
    made = []
    for name in names:
        lines = []
        for number, (label, seeds) in enumerate(runs.items()):
            values: dict[int, list[float]] = {}
            for arrays in seeds:
                for round_, value in zip(arrays["rounds"], arrays.get(name, ()), strict=False):
                    values.setdefault(int(round_), []).append(float(value))
            means = np.array([over(0)(np.array(values[round_])) for round_ in sorted(values)])
            if np.isfinite(means).any():
                lines.append(numbered_line(number, means, label, np.array(sorted(values))))
        if lines:
            made.append(curves(lines, xlabel="round", ylabel=name))
    return made


PLOTS: dict[str, tuple[str, Callable[[Runs], Iterator[Plot]]]] = {
    "spectra.npz": ("Spectra", spectra),
    "layer_similarity.npz": ("Similarity layer by layer", similarity),
    "layer_alignment.npz": ("Alignment of consecutive layers", alignment),
    "drift.npz": ("Drift in detail", drift),
    "per_class.npz": ("Accuracy by class", per_class),
    "personal.npz": ("Accuracy by client", personal),
    "deviation.npz": ("Deviation bound", deviation),
    "embedding.npz": ("Embedding of the representations", embedding),
}
