"""Draws the papers' figures from our own runs.

python experiments/papers/programs/make_figures.py [--runs DIR] [--fashion DIR]

``python cli.py bench experiments/papers/scaled/figures.yaml --output DIR`` trains the runs of CIFAR-10, and
``figures_fashion.yaml`` the runs of Fashion-MNIST. With ``--runs DIR`` and ``--fashion DIR``, their data for the
figures are stored in ``results/figures.npz`` and ``results/figures_fashion.npz``, after one more round from some final
models for FedLC's Figures 6 and 7 and FedUV's Figure 4. These files, and the stored cells of ``scaled/one_run.yaml``,
are the source of the pictures in ``docs/figures`` and the tables of ``docs/paper_figures.md``, whose text is written by
hand.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))


from fl_lightning.bench import Cell, load_suite  # noqa: E402, found through the path above
from fl_lightning.cli import main  # noqa: E402
from fl_lightning.functional import effective_rank, numerical_rank  # noqa: E402
from fl_lightning.plotting.drawing import Curve, Draw, bars, curves, heat, points  # noqa: E402
from fl_lightning.plotting.figures import curve_panels, laid_out  # noqa: E402
from fl_lightning.plotting.plots import of_client  # noqa: E402

PAPERS, DOCS = ROOT / "experiments" / "papers", ROOT / "docs"
STORES = {suite: PAPERS / "results" / f"{suite}.npz" for suite in ("figures", "figures_fashion")}
ONE_RUN = PAPERS / "results" / "scaled-one_run.cells.csv"
PAGE, PICTURES = "paper_figures.md", "figures"
Data = Mapping[str, np.ndarray]

ALPHAS = {"IID": "IID", "alpha 1": "1", "alpha 0.1": "0.1", "alpha 0.05": "0.05"}
FEDAVG = {label: f"{alpha}/FedAvg" for label, alpha in ALPHAS.items()}
RUNS = {f"FedAvg, {label}": run for label, run in FEDAVG.items()}
RUNS |= {f"{method}, alpha 0.05": f"0.05/{method}" for method in ("FedUV", "FedDecorr")}
# methods that continue for a round from the final model of FedAvg
CONTINUED = {"FedAvg": None, "FedLC (tau 0.5)": 0.5, "FedLC (tau 1)": 1.0}
SKEWED = ("0.1", "0.05")
FINISHED = "version_*/checkpoints/model.ckpt"
GROUPS = ("majority", "minority", "missing", "all classes")
THRESHOLD = 0.01

SKEWS = {
    "classes of a client": ("IID", "4 classes", "2 classes"),
    "Dir(alpha)": ("IID", "alpha 0.5", "alpha 0.2", "alpha 0.05"),
}
NETWORKS = ("CNN", "MLP", "wide MLP")
OTHER_METHODS = ("FedAvgM", "FedProx", "MOON")
ENDS = ("IID", "alpha 0.05")
# methods whose accuracy over the rounds stands in the cells of one_run.yaml
COURSES = {"FedLC, Figure 5": ("FedAvg", "FedRS", "FedLC"), "FedDecorr, Figure 4": ("FedAvg", "FedDecorr (official)")}
# the accuracy in % whose first round is counted, by alpha
TARGETS = {"0.5": 60, "0.05": 40}
# for each class, the number of points of an embedding, and of neighbours of each point whose class is compared
POINTS, NEIGHBOURS = 150, 10
KINDS = ("majority", "minority", "missing")


# ------------------------------------------------------------------ from the runs
Named = Iterator[tuple[str, np.ndarray]]
FILES = {
    "spectra.npz": ("classifier", "representation", "local_representation"),
    "layer_similarity.npz": ("layers", "to_global"),
    "per_class.npz": ("label_counts", "before", "after", "groups_before", "groups_after"),
}


def collect(suite: str, runs: Path) -> dict[str, np.ndarray]:
    """Return the data of the figures from each run of a suite, stacked over the seeds ``(S, ...)``."""
    found: dict[str, list[np.ndarray]] = {}
    for cell in load_suite(PAPERS / "scaled" / f"{suite}.yaml").cells():
        for name, values in OF_RUN[suite](cell, newest(runs / cell.folder)):
            found.setdefault(name, []).append(values)
    return {name: np.stack(values) for name, values in found.items()}


def of_cifar10(cell: Cell, run: Path) -> Named:
    for name, values in last(run, FILES):
        yield "/".join([*cell.labels.values(), name]), values
    if cell.labels["method"] == "FedAvg" and cell.labels["alpha"] in SKEWED:
        yield from continued(cell, run)


def of_fashion(cell: Cell, run: Path) -> Named:
    skew, network, method = cell.labels.values()
    name = f"{skew}/{network}/{method}"
    yield from ((f"{name}/{what}", values) for what, values in last(run, {"spectra.npz": ("representation",)}))
    yield f"{name}/accuracy", course(run)
    if network in NETWORKS[:2] and method == "FedAvg" and skew in ENDS:
        of_layers = last(run, {ALIGNMENT: ("pairs", "global", "local")})
        yield from ((f"{name}/alignment/{what}", values) for what, values in of_layers)
    if network == "CNN" and method in ("FedAvg", "FedUV", "FedDecorr") and skew in ("alpha 0.05", "alpha 0.5"):
        yield f"{name}/loss", by_epoch(run, "loss")
    if method == "FedDecorr":
        yield f"{name}/feddecorr", by_epoch(run, "feddecorr")
    if (skew, network) == ("alpha 0.05", "CNN") and method in EMBEDDED:
        yield from embedded(cell, run)


OF_RUN: dict[str, Callable[[Cell, Path], Named]] = {"figures": of_cifar10, "figures_fashion": of_fashion}
ALIGNMENT = "layer_alignment.npz"


def course(run: Path) -> np.ndarray:
    """The test accuracy in % after each round ``(R,)``."""
    with (run / "metrics.csv").open(newline="") as file:
        return np.array([100 * float(row["test/accuracy"]) for row in csv.DictReader(file)])


def by_epoch(run: Path, term: str) -> np.ndarray:
    """A term of the loss of each client in each of its epochs, over all rounds ``(N, R * E)``."""
    of_client: dict[str, list[float]] = {}
    with (run / "local_losses.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            of_client.setdefault(row["client"], []).append(float(row[term]))
    return np.array(list(of_client.values()), np.float32)


def newest(folder: Path) -> Path:
    """Return the finished run of a cell; fails without one."""
    runs = [path.parent.parent for path in folder.glob(FINISHED)]
    if not runs:
        sys.exit(f"{folder} has no finished run: run the suite's cells first")
    return max(runs, key=lambda path: int(path.name.split("_")[1]))


def last(run: Path, files: Mapping[str, Sequence[str]]) -> Named:
    """The last measurement of arrays in the files of a run."""
    for file, names in files.items():
        with np.load(run / file) as arrays:
            for name in names:
                values = arrays[name][-1]
                yield name, values.astype(np.float32) if values.dtype == np.float64 else values


def continued(cell: Cell, run: Path) -> Named:
    """Accuracies by class before and after aggregation, of a round that several methods begin with the same model."""
    for method, tau in CONTINUED.items():
        folder = run / "continued" / method
        watch = {"class_path": "PerClassAccuracy", "init_args": {"examples": 2000}}
        one_more(cell, run, folder, [] if tau is None else [fedlc(tau)], watch)
        for name, values in last(newest(folder), {"per_class.npz": FILES["per_class.npz"]}):
            yield f"continued/{cell.labels['alpha']}/{method}/{name}", values


def fedlc(tau: float) -> dict[str, Any]:
    return {"class_path": "FedLC", "init_args": {"tau": tau, "missing": "floor"}}


# of the final models of these cells, which methods train the round whose local models are embedded
EMBEDDED: dict[str, dict[str, list[Any] | None]] = {
    "FedAvg": {"FedAvg": None, "FedLC": [fedlc(1.0)]},
    "FedUV": {"FedUV": None},
}


def embedded(cell: Cell, run: Path) -> Named:
    """Points of local models of one more round: three classes of one client, and one class of several clients."""
    with np.load(run / "per_class.npz") as arrays:
        counts = arrays["label_counts"][-1]
    client, classes = with_all_kinds(counts)
    for name, method in EMBEDDED[cell.labels["method"]].items():
        begun = cell.config.get("method") or [] if method is None else method
        for what, asked in (("classes", (client, classes)), ("clients", None)):
            folder = run / "continued" / f"{name}-{what}"
            watch = {
                "examples": 2000,
                "clients": [client] if asked else [0, 1, 2, 3],
                "classes": classes if asked else [1],
            }
            one_more(cell, run, folder, begun, {"class_path": "Embedding", "init_args": watch})
            with np.load(newest(folder) / "embedding.npz") as arrays:
                kind, local, joint = arrays["labels"][-1], arrays["local"][-1, 0], arrays["joint"][-1]
            groups = [local[kind == c] for c in classes] if asked else list(joint)
            yield f"embedding/{name}/{what}", np.stack([group[:POINTS] for group in groups]).astype(np.float32)
        yield f"embedding/{name}/counts", counts[client, classes]


def with_all_kinds(counts: np.ndarray) -> tuple[int, list[int]]:
    """The client with a majority, a minority and a missing class that has most of its minority, and these classes."""
    even = counts.sum(1, keepdims=True) / counts.shape[1]
    minority = np.where((counts < even) & (counts == 0).any(1, keepdims=True), counts, 0)
    client = int(minority.max(1).argmax())
    return client, [int(counts[client].argmax()), int(minority[client].argmax()), int(counts[client].argmin())]


def one_more(cell: Cell, run: Path, folder: Path, method: list[Any], watch: Mapping[str, Any]) -> None:
    """Train a round of a method from the final model of a run, unless that was done."""
    if list(folder.glob(FINISHED)):
        return
    changed = {"max_rounds": 1, "default_root_dir": str(folder.parent), "name": folder.name, "callbacks": [watch]}
    config = {**cell.config, "weights": str(run / "checkpoints" / "model.ckpt"), "method": method}
    config["trainer"] = {**cell.config["trainer"], **changed}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    sys.argv = sys.argv[:1]  # LightningCLI warns of arguments from two places
    main(["fit", "--config", str(folder / "config.yaml")])


def stored_numbers() -> dict[str, np.ndarray]:
    """All that the figures are drawn from: the two files, and accuracies of one_run.yaml, of the seeds of a figure."""
    found: dict[str, np.ndarray] = {}
    for store in STORES.values():
        with np.load(store) as data:
            found |= dict(data)
    with ONE_RUN.open(newline="") as file:
        rows = {(row["alpha"], row["method"], int(row["seed"])): row for row in csv.DictReader(file)}
    for figure, methods in COURSES.items():
        for alpha in {alpha for alpha, *_ in rows}:
            seeds = sorted({s for a, m, s in rows if a == alpha and all((a, one, s) in rows for one in methods)})
            for one in methods:
                values = [list(json.loads(rows[alpha, one, seed]["values"]).values()) for seed in seeds]
                found[f"{figure}/{alpha}/{one}"] = 100 * np.array(values)
    return found


# ------------------------------------------------------------------ the pictures
def spectra(data: Data) -> Figure:
    """FedUV, Figure 1, and FedDecorr, Figures 2 and 3: mean over the seeds, and the band between them."""
    shown = {
        "classifier weight": (lambda run: data[f"{run}/classifier"], ""),
        "representations, global model": (lambda run: data[f"{run}/representation"], "y"),
        "representations, local models": (lambda run: data[f"{run}/local_representation"].mean(1), "y"),
    }
    drawings = []
    for title, (values_of, log) in shown.items():
        lines = [band(number, values_of(run)[:, :100], label) for number, (label, run) in enumerate(RUNS.items())]
        drawings.append(with_level(curves(lines, log, xlabel="index", ylabel="singular value", title=title), bool(log)))
    return laid_out(drawings)


def band(number: int, values: np.ndarray, label: str) -> Curve:
    """The mean over the seeds of values ``(S, n)``, and the band between the lowest and the highest."""
    return Curve(number, values.mean(0), label, band=(values.min(0), values.max(0)))


def with_level(draw: Draw, logarithmic: bool) -> Draw:
    """On a logarithmic scale from 1e-6 on, and with the threshold."""

    def both(axes: Axes) -> None:
        draw(axes)
        axes.set_ylim(1e-6 if logarithmic else 0, None)
        if logarithmic:
            axes.axhline(THRESHOLD, color="0.5", linewidth=0.8)

    return both


def similarity(data: Data) -> Figure:
    """FedCKA, Figure 2: CKA of each layer between the clients and the global model."""
    drawings = []
    for label, run in FEDAVG.items():
        values = np.concatenate(data[f"{run}/to_global"], 1)
        runs = {"": [{"layers": data[f"{run}/layers"][:1], "to_global": values[None]}]}
        how: dict[str, Any] = {"names": "layers", "spread": {"to_global": 1}, "ylim": (0, 1.02)}
        drawings += curve_panels(runs, {"to_global": "CKA"}, title=label, xlabel="layer", **how)
    return laid_out(drawings)


def names_of_layers(data: Data, run: str) -> list[str]:
    return [str(name) for name in data[f"{run}/layers"][0]]


def clients(data: Data) -> Figure:
    """FedLC, Figure 2: label counts and accuracy of each class, of four clients of the first seed."""
    arrays = {name: data[f"0.1/FedAvg/{name}"][:1] for name in ("label_counts", "before", "after")}
    return laid_out([of_client(arrays, k, f"client {k}") for k in range(min(4, arrays["before"].shape[1]))])


def aggregation(data: Data) -> Figure:
    """FedLC, Figure 6: accuracy on a client's classes before and after aggregation, from the same model."""
    drawings = []
    for alpha in SKEWED:
        runs = {f"{method}, {when}": (method, when) for method in CONTINUED for when in ("before", "after")}
        values = {label: by_group(data, f"continued/{alpha}/{method}", when) for label, (method, when) in runs.items()}
        heights = [(number, values[label].mean(0), label) for number, label in enumerate(values)]
        labels = {"xlabel": "classes of the client", "ylabel": "test accuracy in %"}
        drawings.append(bars(heights, GROUPS, title=f"alpha {alpha}", **labels))
    return laid_out(drawings)


def by_group(data: Data, run: str, when: str) -> np.ndarray:
    """Accuracy in % of each seed on each group ``(S, 4)``, mean over the clients; nan where none has such classes."""
    groups, whole = data[f"{run}/groups_{when}"], data[f"{run}/{when}"].mean(-1, keepdims=True)
    values = 100 * np.concatenate([groups, whole], -1)
    present = np.isfinite(values).sum(1)
    return np.where(present > 0, np.nansum(values, axis=1) / np.maximum(present, 1), np.nan)


def local_spectra(data: Data) -> Figure:
    """FedDecorr, Figure 10: the local models of clients 1 to 9, whose Figure 2(b) shows one client."""
    drawings = []
    for client in range(1, 10):
        runs = {label: data[f"{run}/local_representation"][:, client, :100] for label, run in FEDAVG.items()}
        drawings.append(drawn_spectra(runs, f"client {client}"))
    return laid_out(drawings)


def drawn_spectra(runs: Mapping[str, np.ndarray], title: str) -> Draw:
    """Singular values of representations ``(S, n)`` of some runs, with the threshold."""
    lines = [band(number, values, label) for number, (label, values) in enumerate(runs.items())]
    return with_level(curves(lines, "y", xlabel="index", ylabel="singular value", title=title), True)


def other_spectra(data: Data) -> Figure:
    """FedDecorr, Figures 7 to 9: another data set than CIFAR-10, other methods and other networks."""
    drawings = []
    for title, runs in others().items():
        of_skew = {skew: data[f"{skew}/{of_all}/representation"] for skew, of_all in runs}
        drawings.append(drawn_spectra(of_skew, title))
    return laid_out(drawings)


def others() -> dict[str, list[tuple[str, str]]]:
    """Return the titles of the panels of :func:`other_spectra`: skew, and network and method."""
    panels = {"FedAvg, CNN": [(skew, "CNN/FedAvg") for skew in SKEWS["Dir(alpha)"]]}
    panels |= {f"{method}, CNN": [(skew, f"CNN/{method}") for skew in ENDS] for method in OTHER_METHODS}
    return panels | {f"FedAvg, {one}": [(skew, f"{one}/FedAvg") for skew in ENDS] for one in NETWORKS[1:]}


def over_rounds(runs: Mapping[str, np.ndarray], title: str) -> Draw:
    """The test accuracy of some runs ``(S, R)`` after each round."""
    lines = []
    for number, (label, values) in enumerate(runs.items()):
        line = band(number, values, label)
        lines.append(replace(line, x=np.arange(len(line.y)) + 1))
    return curves(lines, xlabel="round", ylabel="test accuracy in %", title=title)


def skews(data: Data) -> Figure:
    """FedLC, Figure 1: FedAvg under label skew."""
    of_skew = {skew: data[f"{skew}/CNN/FedAvg/accuracy"] for skews in SKEWS.values() for skew in skews}
    return laid_out([over_rounds({s: of_skew[s] for s in names}, title) for title, names in SKEWS.items()])


def courses(data: Data) -> Figure:
    """FedLC, Figure 5, and FedDecorr, Figure 4: the accuracy over the rounds."""
    drawings = []
    for figure, methods in COURSES.items():
        for alpha in TARGETS:
            runs = {method: data[f"{figure}/{alpha}/{method}"] for method in methods}
            seeds = len(next(iter(runs.values())))
            drawings.append(over_rounds(runs, f"{figure}: alpha {alpha}, {seeds} seeds"))
    return laid_out(drawings)


def losses(data: Data) -> Figure:
    """FedUV, Figure 3, the training loss, and FedDecorr, Figure 11, its term of each client."""
    drawings = []
    for alpha in ("alpha 0.5", "alpha 0.05"):
        runs = {method: data[f"{alpha}/CNN/{method}/loss"].mean(1) for method in ("FedAvg", "FedUV")}
        lines = [band(number, values, label) for number, (label, values) in enumerate(runs.items())]
        labels = {"xlabel": "local epoch, 5 a round", "ylabel": "training loss, mean over the clients"}
        drawings.append(curves(lines, title=f"FedUV, Figure 3: {alpha}", **labels))
    terms = data["alpha 0.05/CNN/FedDecorr/feddecorr"][0]
    lines = [Curve(number, values, f"client {number}") for number, values in enumerate(terms)]
    title = "FedDecorr, Figure 11: alpha 0.05, first seed"
    drawings.append(curves(lines, xlabel="local epoch, 5 a round", ylabel="FedDecorr's term", title=title))
    return laid_out(drawings)


def alignment(data: Data) -> Figure:
    """FedDecorr, Figure 6: absolute cosines of singular vectors of consecutive layers, of local models."""
    drawings = []
    for _, title, values, _ in aligned(data, ("alpha 0.05",)):
        labels = {"xlabel": "left vector of the first", "ylabel": "right vector of the second"}
        drawings.append(heat(values[0], "absolute cosine", limits=(0, 1), title=title, **labels))
    return laid_out(drawings)


def aligned(data: Data, skews: Sequence[str]) -> Iterator[tuple[str, str, np.ndarray, np.ndarray]]:
    """Of each pair of layers: the skew, its name, and the cosines of the local and of the global models (S, k, k)."""
    for skew in skews:
        for network in NETWORKS[:2]:
            run = f"{skew}/{network}/FedAvg/alignment"
            for place, pair in enumerate(data[f"{run}/pairs"][0]):
                name = f"{network}, {' to '.join(str(path).removeprefix('encoder.') for path in pair)}"
                yield skew, name, *(data[f"{run}/{models}"][:, place] for models in ("local", "global"))


def embedding(data: Data) -> Figure:
    """FedLC, Figure 7, by kind of class, and FedUV, Figure 4, one class by model, both of the first seed."""
    drawings = []
    for method in ("FedAvg", "FedLC"):
        groups = zip(KINDS, data[f"embedding/{method}/classes"][0], strict=True)
        drawings.append(points(list(groups), True, title=f"FedLC, Figure 7: {method}"))
    names = ("global model", *(f"client {k}" for k in range(4)))
    for method in ("FedAvg", "FedUV"):
        groups = zip(names, data[f"embedding/{method}/clients"][0], strict=True)
        drawings.append(points(list(groups), True, title=f"FedUV, Figure 4: {method}"))
    return laid_out(drawings)


DRAWN: dict[str, Callable[[Data], Figure]] = {
    "spectra": spectra,
    "similarity": similarity,
    "clients": clients,
    "aggregation": aggregation,
    "skews": skews,
    "courses": courses,
    "losses": losses,
    "local_spectra": local_spectra,
    "other_spectra": other_spectra,
    "alignment": alignment,
    "embedding": embedding,
}


# ------------------------------------------------------------------ the tables
def spectra_table(data: Data) -> Iterator[Sequence[str]]:
    yield "", "classifier, sum", "rank", "representation, rank", "above 0.01", "local models, rank", "above 0.01"
    for label, run in RUNS.items():
        weight, whole = data[f"{run}/classifier"], data[f"{run}/representation"]
        local = data[f"{run}/local_representation"]
        of_local = [(rank(local).mean(1), ".1f"), ((local > THRESHOLD).sum(-1).mean(1), ".0f")]
        numbers = [(weight.sum(1), ".2f"), (rank(weight), ".2f"), (rank(whole), ".1f")]
        yield label, *(spread(*one) for one in (*numbers, ((whole > THRESHOLD).sum(1), ".0f"), *of_local))


def rank(values: np.ndarray, kind: Callable[[torch.Tensor], torch.Tensor] = effective_rank) -> np.ndarray:
    """A rank, by default the effective one, over the last axis."""
    return np.apply_along_axis(lambda one: float(kind(torch.from_numpy(one))), -1, values)


def similarity_table(data: Data) -> Iterator[Sequence[str]]:
    yield "", *names_of_layers(data, "IID/FedAvg")
    for label, run in FEDAVG.items():
        yield label, *(spread(one, ".2f") for one in data[f"{run}/to_global"].mean(2).T)


def clients_table(data: Data) -> Iterator[Sequence[str]]:
    return groups_table(data, RUNS)


def aggregation_table(data: Data) -> Iterator[Sequence[str]]:
    return groups_table(data, {f"{m}, alpha {a}": f"continued/{a}/{m}" for a in SKEWED for m in CONTINUED})


def groups_table(data: Data, runs: Mapping[str, str]) -> Iterator[Sequence[str]]:
    yield "", *(f"{group}, {when}" for group in GROUPS for when in ("before", "after"))
    for label, run in runs.items():
        values = [by_group(data, run, when) for when in ("before", "after")]
        yield label, *(spread(one[:, group], ".1f") for group in range(len(GROUPS)) for one in values)


def skews_table(data: Data) -> Iterator[Sequence[str]]:
    yield "FedAvg", "after 6 rounds", "difference to IID"
    accuracy = {skew: data[f"{skew}/CNN/FedAvg/accuracy"][:, -1] for skews in SKEWS.values() for skew in skews}
    for skew, values in accuracy.items():
        yield skew, spread(values, ".1f"), "" if skew == "IID" else spread(values - accuracy["IID"], "+.1f")


def courses_table(data: Data) -> Iterator[Sequence[str]]:
    yield "", "seeds", "after 2 rounds", "4 rounds", "6 rounds", "greatest fall in a round", "rounds to the target"
    for figure, methods in COURSES.items():
        for alpha in TARGETS:
            for method in methods:
                values = data[f"{figure}/{alpha}/{method}"]
                falls = np.maximum(-np.diff(values, axis=1), 0).max(1)
                above = values >= TARGETS[alpha]
                reached = np.where(above.any(1), above.argmax(1) + 1, np.nan)
                numbers = [(values[:, at], ".1f") for at in (1, 3, 5)]
                shown = (spread(*one) for one in (*numbers, (falls, ".1f"), (reached, ".1f")))
                yield f"{figure}: {method}, alpha {alpha}", str(len(values)), *shown


def losses_table(data: Data) -> Iterator[Sequence[str]]:
    yield "", "after 1 round", "3 rounds", "6 rounds", "mean change from epoch to epoch"
    for alpha in ("alpha 0.5", "alpha 0.05"):
        for method in ("FedAvg", "FedUV"):
            values = data[f"{alpha}/CNN/{method}/loss"].mean(1)
            yield f"training loss, {method}, {alpha}", *in_epochs(values)
    yield "FedDecorr's term, alpha 0.05", *in_epochs(data["alpha 0.05/CNN/FedDecorr/feddecorr"].mean(1))


def in_epochs(values: np.ndarray) -> Iterator[str]:
    """Values ``(S, 30)`` at the end of some rounds, and how much they change from one to the next."""
    for at in (4, 14, 29):
        yield spread(values[:, at], ".3f")
    yield spread(np.abs(np.diff(values, axis=1)).mean(1), ".3f")


def local_spectra_table(data: Data) -> Iterator[Sequence[str]]:
    yield "above 0.01", *(f"client {client}" for client in range(1, 10))
    for label, run in FEDAVG.items():
        above = (data[f"{run}/local_representation"] > THRESHOLD).sum(-1)
        yield label, *(spread(above[:, client], ".0f") for client in range(1, 10))


def other_spectra_table(data: Data) -> Iterator[Sequence[str]]:
    yield "", "above 0.01", "effective rank", "numerical rank", "test accuracy in %"
    # FedDecorr has no run with IID data, and is in no picture
    for title, runs in (*others().items(), ("FedDecorr, CNN", [("alpha 0.05", "CNN/FedDecorr")])):
        for skew, of_all in runs:
            values, accuracy = (data[f"{skew}/{of_all}/{what}"] for what in ("representation", "accuracy"))
            numbers = [
                ((values > THRESHOLD).sum(1), ".0f"),
                (rank(values), ".1f"),
                (rank(values, numerical_rank), ".0f"),
            ]
            numbers += [(accuracy[:, -1], ".1f")]
            yield f"{title}, {skew}", *(spread(*one) for one in numbers)


def alignment_table(data: Data) -> Iterator[Sequence[str]]:
    yield "absolute cosine of equal places", "local models", "global model", "other places, local models"
    for skew, name, local, whole in aligned(data, ENDS):
        same = [np.diagonal(values, axis1=1, axis2=2).mean(1) for values in (local, whole)]
        apart = local[:, ~np.eye(local.shape[1], dtype=bool)].mean(1)
        yield f"{name}, {skew}", *(spread(values, ".2f") for values in (*same, apart))


def embedding_table(data: Data) -> Iterator[Sequence[str]]:
    yield "neighbours of the own kind in %", *KINDS, "all three", "of the own model, one class"
    for method in ("FedAvg", "FedLC", "FedUV"):
        by_class, by_model = (own_neighbours(data[f"embedding/{method}/{what}"]) for what in ("classes", "clients"))
        shown = (spread(values, ".0f") for values in (*by_class.T, by_class.mean(1), by_model.mean(1)))
        yield method, *shown


def own_neighbours(groups: np.ndarray) -> np.ndarray:
    """Return the share of nearest neighbours of points ``(S, G, n, 2)`` in the same group, in % ``(S, G)``."""
    seeds, kinds, size, _ = groups.shape
    of_point = np.repeat(np.arange(kinds), size)
    shares = []
    for places in groups.reshape(seeds, kinds * size, 2):
        apart = ((places[:, None] - places[None]) ** 2).sum(-1)
        np.fill_diagonal(apart, np.inf)
        near = apart.argsort(1)[:, :NEIGHBOURS]
        shares.append(100 * (of_point[near] == of_point[:, None]).reshape(kinds, -1).mean(1))
    return np.array(shares)


def spread(values: np.ndarray, form: str) -> str:
    """Return the mean, the lowest and the highest of the seeds, and their number if not all."""
    found = values[np.isfinite(values)]
    if not len(found):
        return "none"
    left_out = f", {len(found)} seed{'s' * (len(found) > 1)}" if len(found) < len(values) else ""
    return f"{found.mean():{form}} ({found.min():{form}} to {found.max():{form}}{left_out})"


TABLES: dict[str, Callable[[Data], Iterable[Sequence[str]]]] = {
    "spectra": spectra_table,
    "similarity": similarity_table,
    "clients": clients_table,
    "aggregation": aggregation_table,
    "skews": skews_table,
    "courses": courses_table,
    "losses": losses_table,
    "local_spectra": local_spectra_table,
    "other_spectra": other_spectra_table,
    "alignment": alignment_table,
    "embedding": embedding_table,
}


def markdown(rows: Iterable[Sequence[str]]) -> str:
    """A table whose first row is its header."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    width = lines[0].count("|") - 1
    return "\n".join([lines[0], "|" + "---|" * width, *lines[1:]])


def with_tables(page: str, data: Data) -> str:
    """The page with each table in its place, between ``<!-- NAME -->`` and ``<!-- end -->``."""
    for name, table in TABLES.items():
        head, _, rest = page.partition(f"<!-- {name} -->\n")
        page = f"{head}<!-- {name} -->\n{markdown(table(data))}\n{rest[rest.index('<!-- end -->') :]}"
    return page


def main_program() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="output folder of figures.yaml; without it, stored numbers are drawn")
    parser.add_argument("--fashion", type=Path, help="output folder of figures_fashion.yaml, in the same way")
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder of the page and of figures/")
    args = parser.parse_args()
    for suite, runs in zip(STORES, (args.runs, args.fashion), strict=True):
        if runs:
            np.savez_compressed(STORES[suite], **collect(suite, runs.resolve()))
    stored = stored_numbers()
    page, pictures = args.docs / PAGE, args.docs / PICTURES
    pictures.mkdir(exist_ok=True)
    for name, draw in DRAWN.items():
        draw(stored).savefig(pictures / f"{name}.png", dpi=90)
    page.write_text(with_tables(page.read_text(), stored))


if __name__ == "__main__":
    main_program()
