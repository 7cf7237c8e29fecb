"""Reports a partition: a table of the clients, and heat maps of their labels and of the brightness of their images.

The label map follows FedCKA (Son et al., 2021, Figure 4) and FedUV (Son et al., CVPR 2024, supplement, Figures 1 to 6).
The map of brightness has a column for each histogram of mean pixels in these figures of FedUV.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.seeding import base_seed, derive_seed, rng_scope
from fl_lightning.data.client_loaders import Batches, as_client_loader
from fl_lightning.data.plan import Plan
from fl_lightning.storage.metric_format import aligned
from fl_lightning.utilities.errors import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TABLE_HEADS = ("client", "samples", "classes", "largest class", "its share", "domain")
ROWS_SHOWN = 20
BINS = 40


def save_partition(datamodule: Any, folder: Path) -> str:
    """Write the plan, the table and the figures of a partition into ``folder``; return a summary to print."""
    plan: Plan = datamodule.plan
    (folder / "figures").mkdir(parents=True)
    plan.save(folder / "plan.npz")
    rows = client_rows(plan)
    with open(folder / "clients.csv", "w", newline="", encoding="utf-8", errors="backslashreplace") as file:
        csv.writer(file).writerows([TABLE_HEADS, *rows])
    means = means_of(datamodule)
    if plan.label_counts is not None:
        draw_labels(plan).savefig(folder / "figures" / "labels.png", dpi=120)
    if means:
        draw_means(means).savefig(folder / "figures" / "means.png", dpi=120)
    return f"{table(rows)}\n{plan.report()}\nplan {plan.hash[:12]}, in {folder}"


def client_rows(plan: Plan) -> list[tuple]:
    """Return a row of :data:`TABLE_HEADS` for each client."""
    rows = []
    for k, size in enumerate(plan.sizes):
        counts = plan.label_counts[k] if plan.label_counts is not None and size else np.zeros(0)
        commonest = int(counts.argmax()) if len(counts) else 0
        name = plan.class_names[commonest] if plan.class_names else commonest
        largest = (name, f"{counts.max() / size:.2f}") if len(counts) else ("", "")
        rows.append((k, int(size), int((counts > 0).sum()) if len(counts) else "", *largest, plan.domain(k) or ""))
    return rows


def table(rows: list[tuple]) -> str:
    """Return the rows under their heads, without the middle of a long table."""
    if len(rows) > ROWS_SHOWN + 1:
        gap = ("...", *[""] * (len(TABLE_HEADS) - 1))
        rows = [*rows[: ROWS_SHOWN // 2], gap, *rows[-ROWS_SHOWN // 2 :]]
    return aligned([TABLE_HEADS, *([printable(str(cell)) for cell in row] for row in rows)])


def draw_labels(plan: Plan) -> Figure:
    """Draw the samples of each client (columns) and class (rows) on a logarithmic scale; zero is white."""
    from fl_lightning.plotting.drawing import MOST_NAMES

    domains = [plan.domain(k) or "" for k in range(len(plan.sizes))]
    named = any(domains) and len(domains) <= MOST_NAMES
    names = (plan.class_names or None, domains if named else None)
    return by_client("samples of each class at each client", plan.label_counts, "samples", names, "class", log=True)


def draw_means(means: list[Tensor]) -> Figure:
    """Draw the distribution over a client's (columns) examples of the means (rows) of :func:`means_of`."""
    values = torch.cat(means)
    low, high = float(values.min()), float(values.max())
    edges = np.linspace(low, high if high > low else low + 1, BINS + 1)[::-1]
    shares = []
    for values_of_client in means:
        counts, _ = np.histogram(values_of_client.numpy(), edges[::-1])
        shares.append(counts[::-1] / max(len(values_of_client), 1))
    names = [f"{middle:.2g}" for middle in (edges[1:] + edges[:-1]) / 2]
    ylabel, unit = "mean of an example's input", "share of the client's examples"
    return by_client("mean pixel of the examples of each client", np.stack(shares), unit, (names, None), ylabel)


def by_client(title: str, values: Any, unit: str, names: Any, ylabel: str, log: bool = False) -> Figure:
    """Draw values ``(N, n)`` as a heat map with a column for each client; zeros are empty."""
    from fl_lightning.plotting.drawing import heat
    from fl_lightning.plotting.figures import laid_out

    positive_values = np.where(values > 0, values, np.nan).T
    figure = laid_out([heat(positive_values, unit, names, log, xlabel="client", ylabel=ylabel)], title)
    figure.set_size_inches(min(max(6, 0.45 * len(values)), 16), 4.5)
    return figure


def means_of(datamodule: Any) -> list[Tensor]:
    """Return the mean input of each example ``(n_k,)``, by client; empty if batches do not begin with a tensor.

    For images it is the mean pixel of the stored image, before augmentation and noise, normalised if the data is. Other
    loaders are iterated once, and yield examples as in training. Means that are not finite are left out.
    """
    means = []
    for k in range(datamodule.num_clients):
        loader = datamodule.train_dataloader(k)
        loader = as_client_loader(loader.as_stored() if isinstance(loader, Batches) else loader)
        loader.seed(derive_seed(base_seed(), "partition", k))
        with rng_scope(base_seed(), "partition", k):
            batches = [batch for _, batch in loader.batches()]
        inputs = [batch[0] for batch in batches if isinstance(batch, (list, tuple)) and batch]
        fits = all(isinstance(x, Tensor) and x.is_floating_point() and x.ndim for x in inputs)
        if not fits or len(inputs) < len(batches):
            return []
        values = torch.cat([torch.zeros(0), *(x.reshape(len(x), -1).mean(1) for x in inputs)])
        means.append(values[values.isfinite()])
    return means if any(map(len, means)) else []
