"""Plot functions for the files of arrays that callbacks write.

Each takes ``{label: [arrays of each seed]}``. The label ``""`` alone stands for a single run, whose figures go to
TensorBoard and into its folder; with several labels, the figures compare them in a report.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.ticker import MaxNLocator

from fl_lightning.plotting.drawing import MARKS, Curve, Draw, bars, colour_scale, curves, heat, points, visible
from fl_lightning.plotting.figures import Arrays, Plot, Runs, curve_panels, maps, names_in, of_round, single
from fl_lightning.plotting.values import (
    BOUNDS,
    CLASS_GROUPS,
    MODELS,
    SPECTRUM_TITLES,
    by_layer,
    descending,
    diagonal,
    off_diagonal,
    over,
    row_shares,
)

# arrays of local classifiers, and the names of their correlations
SINGULAR = {"row_norms": "row_norm", "biases": "bias"}
WHEN = {"before": "before aggregation", "after": "after aggregation"}


def spectra(runs: Runs, threshold: float = np.nan) -> Iterator[Plot]:
    """Plot ``spectra.npz``: spectra of all rounds of one run, or the last ones of several; spectra of local models."""
    names = {name for seeds in runs.values() for arrays in seeds for name in arrays}
    adapters = sorted(name for name in names if name.startswith("lora/"))
    titles = SPECTRUM_TITLES | {name: f"LoRA product of {name.removeprefix('lora/')}" for name in adapters}
    for name, title in titles.items():
        local, probe = f"local_{name}", f"probe_{name}"
        how: dict[str, Any] = {"log": "y", "xlabel": "index", "ylabel": "singular value", "title": title}
        visible_runs: dict[str, list[Arrays]] = {}
        for label, seeds in runs.items():
            visible_runs[label] = [with_visible(arrays, name, local, probe) for arrays in seeds]
        run = single(visible_runs)
        if run is None:
            drawings = curve_panels(visible_runs, {name: ""}, **how)
        else:
            drawings = [all_rounds(run, name, **how)] if name in run else []
        yield Plot(f"spectrum/{name}", "", [with_lines(draw, threshold) for draw in drawings])
        if run is not None and {name, local} <= run.keys() and probe not in run:  # the global model in the same round
            visible_runs = {"": [{**run, probe: run[name][np.isin(run["rounds"], run["local_rounds"][-1])]}]}
        labels = {local: "mean of the local models"}
        if run is not None:
            labels[probe] = "global model"
        drawings = curve_panels(visible_runs, labels, spread={local: 0}, **how)
        when = of_round(runs, "local_rounds") if drawings else ""
        drawings = [with_lines(draw, threshold) for draw in drawings]
        yield Plot(f"spectrum/{local}", f"local models{when}", drawings)


def with_visible(arrays: Arrays, *names: str) -> Arrays:
    """Return arrays in which the spectra ``names`` have no rounding errors."""
    return {name: visible(array) if name in names else array for name, array in arrays.items()}


def all_rounds(arrays: Arrays, name: str, **how: Any) -> Draw:
    """Draw a curve for each round, later ones darker, with a colour bar of the rounds."""
    rounds = arrays["rounds"]
    colours = ScalarMappable(Normalize(rounds[0], max(rounds[-1], rounds[0] + 1)), "viridis_r")
    lines = []
    for y, shade in zip(arrays[name], colours.to_rgba(rounds), strict=True):
        lines.append(Curve(0, y, style={"marker": None, "linewidth": 1, "color": shade}))

    def draw(axes: Axes) -> None:
        curves(lines, **how)(axes)
        colour_scale(axes, colours, "round").locator = MaxNLocator(6, integer=True)

    return draw


def with_lines(draw: Draw, y: float, x: float | None = None) -> Draw:
    """Draw, and mark a value of y, if it is within the axes, and a value of x."""

    def both(axes: Axes) -> None:
        draw(axes)
        if axes.get_ylim()[0] <= y <= axes.get_ylim()[1]:
            label = f"threshold {y:g}" if x is None else None
            axes.axhline(y, color="grey", linestyle=":", linewidth=1, label=label)
        if x is not None:
            axes.axvline(x, color="grey", linestyle=":", linewidth=1)

    return both


def sampled_indices(number: int) -> list[int]:
    """Return the indices of the first, the middle and the last measurement."""
    return sorted({0, (number - 1) // 2, number - 1})


def similarity(runs: Runs) -> Iterator[Plot]:
    """Plot ``layer_similarity.npz``: CKA by layer, and for one run the matrices of clients."""
    run, when = single(runs), of_round(runs)
    labels = {
        "to_global": "clients with the global model",
        "between_clients": "clients with each other",
        "between_rounds": "global model before and after the round",
    }
    drawings = curve_panels(runs, labels, by_layer, "layers", {"to_global": 1}, xlabel="layer", ylabel="CKA")
    yield Plot("similarity/layers", f"layer similarity of local models and the global one{when}", drawings)
    if run is not None:
        names, clients = ("layers", "clients"), names_in(runs, "clients")
        drawings = maps(runs, {"to_global": ""}, "CKA", limits=(0, 1), names=names, xlabel="client", ylabel="layer")
        yield Plot("similarity/global", f"CKA with the global model{when}", drawings)
        matrices = run["between_clients"][-1]
        means = zip(run["layers"][-1], off_diagonal(matrices), strict=True)
        titles = [f"{layer}: mean {mean:.2f}" for layer, mean in means]
        drawings = one_each(matrices, titles, "CKA", clients, xlabel="client", ylabel="client")
        yield Plot("similarity/clients", f"CKA of local models{when}", drawings)


def alignment(runs: Runs) -> Iterator[Plot]:
    """Plot ``layer_alignment.npz``: the matrices of one run, or the means by pair of layers of several."""
    run, models = single(runs), {"global": "global model", "local": "mean over the local models"}
    if run is None:
        drawings = curve_panels(runs, models, diagonal, "pairs", xlabel="pair of layers", ylabel="mean absolute cosine")
        yield Plot("alignment/pairs", "alignment of consecutive layers", drawings)
        return
    axes = {"ylabel": "right singular vector of the second", "xlabel": "left singular vector of the first"}
    for name, model in models.items():
        titles = []
        for pair, mean in zip(run["pairs"][-1], diagonal(run[name][-1]), strict=True):
            titles.append(f"{' to '.join(pair)}\nmean of the diagonal {mean:.2f}")
        drawings = one_each(run[name][-1], titles, "absolute cosine", None, **axes)
        yield Plot(f"alignment/{name}", f"alignment of consecutive layers, {model}{of_round(runs)}", drawings)


def one_each(
    matrices: np.ndarray, titles: Sequence[str], unit: str, names: list[str] | None, **labels: Any
) -> list[Draw]:
    """Draw matrices of shares, without rows and columns beyond the names."""
    if names is not None:
        matrices = matrices[:, : len(names), : len(names)]
    drawings = []
    for title, values in zip(titles, matrices, strict=True):
        drawings.append(heat(values, unit, (names, names), limits=(0, 1), title=title, **labels))
    return drawings


def drift(runs: Runs) -> Iterator[Plot]:
    """Plot ``drift.npz``: cosines of the clients' changes, drift by layer, and the bias of local classifiers."""
    run, when, names = single(runs), of_round(runs), ("clients", "clients")
    cosine = "cosine of two clients' changes"
    drawings = maps(runs, {"pairwise": ""}, cosine, limits=(-1, 1), names=names, xlabel="client", ylabel="client")
    yield Plot("drift/pairwise", f"cosines of the clients' changes{when}", drawings)
    of_layers: Runs = runs
    if run is not None:
        indices, by_round = sampled_indices(len(run["rounds"])), dict[str, list[Arrays]]()
        for index in indices:
            by_round[f"round {run['rounds'][index]}"] = [{name: array[: index + 1] for name, array in run.items()}]
        of_layers = by_round
    parts = {"layer_to_mean": "cosine to the mean change", "layer_norms": "norm of a client's change"}
    drawings = curve_panels(of_layers, parts, by_layer, "layers", xlabel="layer")
    parts = {"layer_dissimilarity": "gradient dissimilarity B²"}
    drawings += curve_panels(of_layers, parts, by_layer, "layers", log="y", xlabel="layer")
    yield Plot("drift/layers", "drift by layer", drawings)
    if run is None:
        labels = {"norms": "norm of the change", "to_mean": "cosine to the mean change"}
        drawings = curve_panels(runs, labels, descending, xlabel="client, the largest value first")
        yield Plot("drift/clients", "drift by client", drawings)
    elif "row_norms" in run:
        shares, drawings = 100 * row_shares(run["label_counts"][-1]), []
        for name, label in {"row_norms": "norm of the class's row", "biases": "bias of the class"}.items():
            values = run[name]
            mean = over(0)(run[f"{SINGULAR[name]}_correlation"][-1])
            note = f"mean correlation {mean:.2f}" if np.isfinite(mean) else "no correlation is defined"
            places, x = (
                np.stack([shares.ravel(), values[-1].ravel()], 1),
                "share of the class in the client's data in %",
            )
            drawings.append(points([("", places)], False, xlabel=x, ylabel=label, title=note))
        yield Plot("drift/classifier", f"local classifiers and label counts{when}", drawings)


def per_class(runs: Runs) -> Iterator[Plot]:
    """Plot ``per_class.npz``: accuracy by class before and after aggregation, and confusion matrices."""
    run, when, y = single(runs), of_round(runs), "test accuracy in %"
    percent = lambda entry: 100 * over(0)(entry)  # noqa: E731
    groups = {f"groups_{name}": label for name, label in WHEN.items()}
    drawings = curve_panels(runs, WHEN, percent, "class_names", as_bars=True, xlabel="class", ylabel=y)
    drawings += curve_panels(runs, groups, percent, CLASS_GROUPS, as_bars=True, xlabel="group", ylabel=y)
    yield Plot("per_class/aggregation", f"accuracy before and after aggregation, mean over the clients{when}", drawings)
    matrices = {f"confusion_{name}": label for name, label in WHEN.items()}
    shares = lambda entry: 100 * row_shares(entry)  # noqa: E731
    how: dict[str, Any] = {"names": ("class_names",) * 2, "xlabel": "classified as", "ylabel": "class"}
    drawings = maps(runs, matrices, "share of the class in %", shares, (0, 100), **how)
    yield Plot("per_class/confusion", f"how each class's test examples are classified{when}", drawings)
    if run is not None:
        clients = [int(k) for k in run["clients"][-1] if k >= 0][:4]
        drawings = [of_client(run, at, f"client {k}") for at, k in enumerate(clients)]
        yield Plot("per_class/clients", f"accuracy of each class{when}", drawings)


def of_client(arrays: Arrays, at: int, title: str) -> Draw:
    """Draw a client's training examples as grey bars, and the accuracy of its classes over them."""

    def draw(axes: Axes) -> None:
        counts, right = arrays["label_counts"][-1, at], axes.twinx()
        names, y = [str(c) for c in range(len(counts))], "training examples"
        bars([(0, counts, y)], names, xlabel="class", ylabel=y, title=title)(axes)
        for bar in axes.patches:
            bar.set(facecolor="0.8", hatch=None)
        labels, lines = {"before": "accuracy of the local model", "after": "accuracy after aggregation"}, []
        for number, (name, label) in enumerate(labels.items()):
            lines.append(Curve(number, 100 * arrays[name][-1, at], label, style={"marker": MARKS[number]}))
        curves(lines, ylabel="test accuracy in %", ylim=(-4, 104))(right)
        right.grid(visible=False)
        right.spines["right"].set_visible(True)

    return draw


def personal(runs: Runs) -> Iterator[Plot]:
    """Plot ``personal.npz``: sorted accuracies of the clients' models on their data, and accuracies by domain."""
    run, y = single(runs), "accuracy on its own test data in %"
    if run is None:
        x, in_order = "client, the largest value first", lambda entry: 100 * descending(entry)
        yield Plot("personal/clients", "", curve_panels(runs, MODELS, in_order, xlabel=x, ylabel=y))
        labels, y = {"domain": "global model"}, "accuracy in %"
        percent = lambda entry: 100 * entry  # noqa: E731
        drawings = curve_panels(runs, labels, percent, "domains", as_bars=True, xlabel="domain", ylabel=y)
        yield Plot("personal/domains", "accuracy by domain", drawings)
        return
    order = np.argsort(run["own"][-1], kind="stable")
    models = {name: label for name, label in MODELS.items() if name in run}
    means = [f"{label} {100 * over(0)(run[name][-1]):.1f} %" for name, label in models.items()]
    ordered = {name: run[name][-1:, order] for name in ("clients", *models)}
    x, title = "client, from the worst to the best", f"mean: {', '.join(means)}"
    percent = lambda entry: 100 * entry  # noqa: E731
    drawings = curve_panels({"": [ordered]}, models, percent, "clients", xlabel=x, ylabel=y, title=title)
    yield Plot("personal/clients", f"personal accuracy{of_round(runs)}", drawings)


def deviation(runs: Runs) -> Iterator[Plot]:
    """Plot ``deviation.npz``: directions of the rows of minority classes, or ratios of several runs."""
    run, drawings = single(runs), []
    if run is None:
        labels = {
            "ratio": "ratio to the bound",
            "ratio_calibrated": "ratio to the calibrated bound",
            "own": "cosine of the own row",
            "others": "largest cosine of another row",
        }
        yield Plot("deviation/classes", "deviation by class", curve_panels(runs, labels, over(0), xlabel="class"))
        return
    x, y = "(n_j / n_r) / D_jr", "cosine to the class's mean"
    for name, title in BOUNDS.items():
        ratios, cosines = run[name].ravel(), run["own"].ravel()
        measured = (ratios > 0) & np.isfinite(cosines)
        places = np.stack([ratios[measured], cosines[measured]], 1)
        predicted = places[:, 0] > 1
        against = predicted & (places[:, 1] >= 0)
        kinds = {"as the theorem allows": places[~against], "against the theorem": places[against]}
        note = f"{title}\nof {predicted.sum()} above 1, {(predicted & ~against).sum()} deviate"
        if len(places):
            drawn = points(list(kinds.items()), False, "x", title=note, xlabel=x, ylabel=y)
            drawings.append(with_lines(drawn, 0, 1))
    title = f"direction of each minority class's row by the ratio of Theorem 1{of_round(runs)}"
    yield Plot("deviation/signs", title, drawings)


def embedding(runs: Runs) -> Iterator[Plot]:
    """Plot ``embedding.npz``: embeddings of the models of one run, or of the global models of several."""
    run, title = single(runs), "t-SNE of the test representations"
    if run is None:
        embeddings = []
        for label, seeds in runs.items():
            if seeds and {"global", "labels"} <= seeds[0].keys():
                places = seeds[0]["global"][-1]
                if places.shape[1:] == (2,) and np.isfinite(places).all():
                    embeddings.append((label, places, seeds[0]["labels"][-1]))
        yield Plot("embedding/classes", title, by_kind(embeddings))
        return
    embeddings = list(zip(run["models"], run["apart"], run["held"], strict=True))
    yield Plot("embedding/classes", f"{title} by class, each model alone{of_round(runs)}", by_kind(embeddings))
    if len(run["models"]) > 1:
        groups = list(zip(run["models"], run["together"], strict=True))
        title = f"t-SNE of all models' representations{of_round(runs)}"
        yield Plot("embedding/clients", title, [points(groups, bare=True)])


def by_kind(embeddings: Sequence[tuple[str, np.ndarray, np.ndarray]]) -> list[Draw]:
    """Draw points (n, 2) for each title by their kind (n,), such as ``3 (25)``: class 3 with 25 training examples."""
    # the kind of each class in each drawing
    kinds_of = [
        {kind.partition(" (")[0]: kind for kind in dict.fromkeys(map(str, kinds.tolist()))} for *_, kinds in embeddings
    ]
    classes = sorted({*itertools.chain(*kinds_of)}, key=lambda name: name.zfill(9))
    drawings = []
    for (title, places, kinds), by_class in zip(embeddings, kinds_of, strict=True):
        groups = []
        for name in classes:  # a class has one colour in all drawings
            kind = by_class.get(name, "")
            groups.append((kind, places[kinds.astype(str) == kind]))
        drawings.append(points(groups, bare=True, title=title))
    return drawings


def collapse(runs: Runs) -> Iterator[Plot]:
    """Plot ``neural_collapse.npz``: the distances of one run over the rounds, and the last cosines and norms."""
    run, when, simplex = single(runs), of_round(runs), ""
    names = {"means": "class means", "weights": "rows of the classifier"}
    if run is not None:
        parts = [
            ("variability within classes (NC1)", "y", {"nc_1": ""}),
            (
                "distance of the cosines (NC2)",
                "",
                {"nc_2_angle_means": names["means"], "nc_2_angle_weights": names["weights"]},
            ),
            ("distance of rows and means (NC3)", "", {"nc_3": ""}),
            ("share not nearest to its mean (NC4)", "", {"nc_4": ""}),
        ]
        drawings = []
        for y, log, labels in parts:
            lines = []
            for number, (name, label) in enumerate(labels.items()):
                lines.append(Curve(number, run[name], label, run["rounds"]))
            has_positive = bool((lines[0].y > 0).any())
            drawings.append(curves(lines, log if has_positive else "", xlabel="round", ylabel=y))
        yield Plot("nc/rounds", "distance from neural collapse", drawings)
        classes = run["nc_classes"][-1]
        simplex = f", {-1 / (classes - 1):.2f} in a simplex" if classes > 1 else ""
    how: dict[str, Any] = {"limits": (-1, 1), "names": ("class_names",) * 2, "xlabel": "class", "ylabel": "class"}
    cosines = {f"cosines_{name}": label for name, label in names.items()}
    drawings = maps(runs, cosines, "cosine", **how)
    yield Plot("nc/cosines", f"cosines of two classes{simplex}{when}", drawings)
    how = {"as_bars": True, "xlabel": "class", "ylabel": "norm / mean norm"}
    norms = {f"norms_{name}": label for name, label in names.items()}
    drawings = curve_panels(runs, norms, names="class_names", **how)
    yield Plot("nc/norms", f"norms of each class{when}", drawings)


def by_shape(runs: Runs) -> Iterator[Plot]:
    """Plot a file of arrays (R, ...) by shape: numbers against the rounds, curves, and matrices."""
    num_axes: dict[str, int] = {}
    for arrays in itertools.chain(*runs.values()):
        num_axes |= {name: array.ndim for name, array in arrays.items() if array.dtype.kind in "fiub"}
    names = [name for name in num_axes if not name.endswith("rounds")]
    yield Plot("course", "", course(runs, [name for name in names if num_axes[name] == 1]))
    yield Plot("curves", "", curve_panels(runs, {name: name for name in names if num_axes[name] == 2}, xlabel="index"))
    for name in (name for name in names if num_axes[name] == 3):
        yield Plot(name, "", maps(runs, {name: name}, name, xlabel="column", ylabel="row"))


def course(runs: Runs, names: Sequence[str]) -> list[Draw]:
    """Draw numbers against the rounds: a drawing for each array, a curve of the mean over the seeds for each label."""
    drawings = []
    for name in names:
        lines = []
        for number, (label, seeds) in enumerate(runs.items()):
            values: dict[int, list[float]] = {}
            for arrays in seeds:
                for round_, value in zip(arrays["rounds"], arrays.get(name, ()), strict=False):
                    values.setdefault(int(round_), []).append(float(value))
            means = np.array([over(0)(np.array(values[round_])) for round_ in sorted(values)])
            if np.isfinite(means).any():
                lines.append(Curve(number, means, label, np.array(sorted(values))))
        if lines:
            drawings.append(curves(lines, xlabel="round", ylabel=name))
    return drawings


PLOTS: dict[str, tuple[str, Callable[[Runs], Iterator[Plot]]]] = {
    "spectra.npz": ("Spectra", spectra),
    "neural_collapse.npz": ("Neural collapse by class", collapse),
    "layer_similarity.npz": ("Similarity layer by layer", similarity),
    "layer_alignment.npz": ("Alignment of consecutive layers", alignment),
    "drift.npz": ("Drift in detail", drift),
    "per_class.npz": ("Accuracy by class", per_class),
    "personal.npz": ("Accuracy by client", personal),
    "deviation.npz": ("Deviation bound", deviation),
    "embedding.npz": ("Embedding of the representations", embedding),
}
