"""Draws the papers' figures from runs of our own: python experiments/papers/programs/make_figures.py [--runs DIR]

``python cli.py bench experiments/papers/scaled/figures.yaml --output DIR`` trains the runs. With ``--runs DIR``, what
the figures need of them goes into ``results/figures.npz``, after one more round from their final models, which FedLC's
Figure 6 is about. From that file come the pictures in ``docs/figures`` and the tables of ``docs/paper_figures.md``;
the text there is written by hand.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from fl_lightning.bench import Cell, load_suite  # noqa: E402, found through the path above
from fl_lightning.cli import main  # noqa: E402
from fl_lightning.functional import effective_rank  # noqa: E402
from fl_lightning.pictures.drawing import CurveLine, Draw, bars, curves, numbered_line  # noqa: E402
from fl_lightning.pictures.figure import drawings_of, figure_of, laid_out  # noqa: E402
from fl_lightning.pictures.shipped import PER_CLASS, SIMILARITY  # noqa: E402

PAPERS, DOCS = ROOT / "experiments" / "papers", ROOT / "docs"
STORE, PAGE, PICTURES = PAPERS / "results" / "figures.npz", "paper_figures.md", "figures"
Data = Mapping[str, np.ndarray]

ALPHAS = {"IID": "IID", "alpha 1": "1", "alpha 0.1": "0.1", "alpha 0.05": "0.05"}
FEDAVG = {label: f"{alpha}/FedAvg" for label, alpha in ALPHAS.items()}
RUNS = {f"FedAvg, {label}": run for label, run in FEDAVG.items()}
RUNS |= {f"{method}, alpha 0.05": f"0.05/{method}" for method in ("FedUV", "FedDecorr")}
# what continues for a round from the final model of FedAvg
CONTINUED = {"FedAvg": None, "FedLC (tau 0.5)": 0.5, "FedLC (tau 1)": 1.0}
SKEWED = ("0.1", "0.05")
FINISHED = "version_*/checkpoints/model.ckpt"
GROUPS = ("majority", "minority", "missing", "all classes")
THRESHOLD = 0.01
LAST_ROUND = 19


# ------------------------------------------------------------------ from the runs
FILES = {
    "spectra.npz": ("classifier", "representation", "local_representation"),
    "layer_similarity.npz": ("layers", "to_global"),
    "per_class.npz": ("label_counts", "before", "after", "groups_before", "groups_after"),
}


def collect(runs: Path) -> dict[str, np.ndarray]:
    """The last measurement of each array in each run, stacked over the seeds ``(S, ...)``."""
    found: dict[str, list[np.ndarray]] = {}
    for cell in load_suite(PAPERS / "scaled" / "figures.yaml").cells():
        run = newest(runs / cell.folder)
        for name, values in last(run, FILES):
            found.setdefault("/".join([*cell.labels.values(), name]), []).append(values)
        if cell.labels["method"] == "FedAvg" and cell.labels["alpha"] in SKEWED:
            for name, values in continued(cell, run):
                found.setdefault(name, []).append(values)
    return {name: np.stack(values) for name, values in found.items()}


def newest(folder: Path) -> Path:
    """The run of a cell; fails where there is none that is finished."""
    runs = [path.parent.parent for path in folder.glob(FINISHED)]
    if not runs:
        sys.exit(f"{folder} has no finished run: run the suite's cells first")
    return max(runs, key=lambda path: int(path.name.split("_")[1]))


def last(run: Path, files: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, np.ndarray]]:
    """The last measurement of arrays in the files of a run."""
    for file, names in files.items():
        with np.load(run / file) as arrays:
            for name in names:
                values = arrays[name][-1]
                yield name, values.astype(np.float32) if values.dtype == np.float64 else values


def continued(cell: Cell, run: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Accuracies by class before and after aggregation, of a round that several methods begin with the same model."""
    for method, tau in CONTINUED.items():
        folder = run / "continued" / method
        if not list(folder.glob(FINISHED)):
            train_round(cell, run, folder, tau)
        for name, values in last(newest(folder), {"per_class.npz": FILES["per_class.npz"]}):
            yield f"continued/{cell.labels['alpha']}/{method}/{name}", values


def train_round(cell: Cell, run: Path, folder: Path, tau: float | None) -> None:
    """Train one round from the final model of a run, with FedLC or, without tau, FedAvg."""
    watch = {"class_path": "PerClassAccuracy", "init_args": {"examples": 2000}}
    changed = {"max_rounds": 1, "default_root_dir": str(folder.parent), "name": folder.name, "callbacks": [watch]}
    config = {**cell.config, "weights": str(run / "checkpoints" / "model.ckpt")}
    calibrated = {"class_path": "FedLC", "init_args": {"tau": tau, "missing": "floor"}}
    config["method"] = [] if tau is None else [calibrated]
    config["trainer"] = {**cell.config["trainer"], **changed}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    sys.argv = sys.argv[:1]  # LightningCLI warns of arguments from two places
    main(["fit", "--config", str(folder / "config.yaml")])


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


def band(number: int, values: np.ndarray, label: str) -> CurveLine:
    """The mean over the seeds of values ``(S, n)``, and the band between the lowest and the highest."""
    return replace(numbered_line(number, values.mean(0), label), band=(values.min(0), values.max(0)))


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
    panel = SIMILARITY.pictures[0].panels[0]
    drawings = []
    for label, run in FEDAVG.items():
        values = np.concatenate(data[f"{run}/to_global"], 1)
        arrays = {"rounds": np.array([LAST_ROUND]), "layers": data[f"{run}/layers"][:1], "to_global": values[None]}
        drawings += drawings_of(replace(panel, title=label, limits=(0, 1.02)), arrays)
    return laid_out(drawings)


def names_of_layers(data: Data, run: str) -> list[str]:
    return [str(name) for name in data[f"{run}/layers"][0]]


def clients(data: Data) -> Figure:
    """FedLC, Figure 2: label counts and accuracy of each class, of four clients of the first seed."""
    arrays = {name: data[f"0.1/FedAvg/{name}"][:1] for name in ("label_counts", "before", "after")}
    titles = np.array([[f"client {k}" for k in range(arrays["before"].shape[1])]])
    picture = next(one for one in PER_CLASS.pictures if one.name == "per_class/clients")
    return figure_of(picture, {**arrays, "client_titles": titles, "rounds": np.array([LAST_ROUND])})


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


DRAWN: dict[str, Callable[[Data], Figure]] = {
    "spectra": spectra,
    "similarity": similarity,
    "clients": clients,
    "aggregation": aggregation,
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


def rank(values: np.ndarray) -> np.ndarray:
    """The effective rank over the last axis."""
    return np.apply_along_axis(lambda one: float(effective_rank(torch.from_numpy(one))), -1, values)


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


def spread(values: np.ndarray, form: str) -> str:
    """Mean, and the lowest and highest of the seeds, and how many these are if not all."""
    found = values[np.isfinite(values)]
    if not len(found):
        return "none"
    left_out = f", {len(found)} seeds" if len(found) < len(values) else ""
    return f"{found.mean():{form}} ({found.min():{form}} to {found.max():{form}}{left_out})"


TABLES: dict[str, Callable[[Data], Iterable[Sequence[str]]]] = {
    "spectra": spectra_table,
    "similarity": similarity_table,
    "clients": clients_table,
    "aggregation": aggregation_table,
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
    parser.add_argument("--runs", type=Path, help="output folder of the suite; without it, stored numbers are drawn")
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder of the page, and of figures/ beside it")
    args = parser.parse_args()
    if args.runs:
        np.savez_compressed(STORE, **collect(args.runs.resolve()))
    with np.load(STORE) as data:
        stored = dict(data)
    page, pictures = args.docs / PAGE, args.docs / PICTURES
    pictures.mkdir(exist_ok=True)
    for name, draw in DRAWN.items():
        draw(stored).savefig(pictures / f"{name}.png", dpi=90)
    page.write_text(with_tables(page.read_text(), stored))


if __name__ == "__main__":
    main_program()
