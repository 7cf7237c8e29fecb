r"""Distances and directions in which the clients of a round drift apart.

With client k's change :math:`\Delta_k = y_k - w^t`, its weight :math:`p_k` (normalised over the clients measured) and
the sum :math:`\eta_k` of the learning rates of its local steps, the pseudo-gradient is
:math:`g_k = -\Delta_k / \eta_k`, and

.. math::
    \cos_{kl} = \frac{\langle \Delta_k, \Delta_l \rangle}{\lVert \Delta_k \rVert \lVert \Delta_l \rVert}, \qquad
    B^2 = \frac{\sum_k p_k \lVert g_k \rVert^2}{\lVert \sum_k p_k g_k \rVert^2} \ge 1

B is the gradient dissimilarity of FedProx (Li et al., MLSys 2020, Definition 3, https://arxiv.org/abs/1812.06127),
which SCAFFOLD also bounds (Karimireddy et al., ICML 2020, assumption A1, https://arxiv.org/abs/1910.06378). They define
it for gradients at one point, which is equal for one local step on all of a client's data.

All values follow from the inner products of the changes by layer, so that only the changes of ``max_clients`` clients
are stored.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.callbacks.measurement import (
    ClientMeasurement,
    classifier_of,
    finite_mean,
    log_finite,
    merge_sorted,
    quotient,
    require_label_counts,
)
from fl_lightning.client import Client
from fl_lightning.client.run_context import RunContext


class Drift(ClientMeasurement):
    r"""Measures the clients' changes: norms, cosines, gradient dissimilarity, and the bias of the local classifiers.

    The changes are of all trained parameters, including parameters that stay with a client. In ``drift.npz``, for R
    measurements, m clients and L layers (submodules that directly contain trained parameters):

    - ``rounds`` (R,), ``clients`` (R, m), ``weights`` (R, m): the clients' weights in the mean, before normalisation;
      ``lr_totals`` (R, m): sums of learning rates; ``layers`` (R, L): names.
    - ``gram`` (R, L, m, m): inner products of the changes; ``norms`` (R, m), ``pairwise`` (R, m, m) and
      ``to_mean`` (R, m): the clients' norms, their cosines, and their cosines to the weighted mean change, over all
      layers; ``layer_norms`` and ``layer_to_mean`` (R, L, m): the same by layer.
    - ``dissimilarity`` (R,) and ``layer_dissimilarity`` (R, L): :math:`B^2`, at least 1, and 1 if all clients agree;
      nan if the mean is 0.
    - with ``classifier``: ``label_counts``, ``row_norms`` and ``biases`` (R, m, C) of the classifiers of the local
      models, and their correlations with the label counts over the classes, ``row_norm_correlation`` and
      ``bias_correlation`` (R, m); nan for a classifier without bias, and for a client with equal numbers of examples
      in all classes.

    Logged are the means over the clients: ``drift/cosine/pairwise``, ``drift/cosine/mean``, ``drift/dissimilarity``,
    ``drift/norm/spread`` (the standard deviation of the norms divided by their mean), ``drift/classifier/row_norm`` and
    ``drift/classifier/bias``. Figures: ``drift/pairwise``, ``drift/layers`` and ``drift/classifier``.

    Args:
        every_n_rounds: rounds from one measurement to the next, at least 1; the last round has one too.
        max_clients: number of clients measured in a round at most, at least 1; drawn at random from a larger cohort.
            Their changes stay in memory until the end of the round.
        classifier: also compare the local classifiers with the label counts.

    Raises:
        UsageError: an argument out of its range; or, with ``classifier``, clients without label counts, or a tap
            ``logits`` other than a layer with a row of weights for each class.
    """

    file = "drift.npz"

    def __init__(self, every_n_rounds: int = 10, max_clients: int = 20, classifier: bool = True) -> None:
        super().__init__(every_n_rounds, max_clients)
        self.classifier = classifier
        self.requires = ("logits",) if classifier else ()

    def setup(self, trainer: RunContext) -> None:
        if self.classifier:
            classes = require_label_counts(trainer, self, "set Drift.classifier=false")
            remedy = "bind it to the last linear layer, or set classifier=false"
            self._classifier = classifier_of(trainer, self, remedy, classes)

    def on_round_start(self, trainer: RunContext) -> None:
        super().on_round_start(trainer)
        self._changes: dict[int, dict[str, np.ndarray]] = {}

    def on_client_end(self, trainer: RunContext, client: Client) -> None:
        if not self.measures(trainer, client):
            return
        k = client.info.id
        # the precision of the parameters, at least float32, suffices and halves the memory of float64
        changes = {}
        for name, value in client.change.items():
            kind = torch.promote_types(client.live[name].dtype, torch.float32)
            changes[name] = value.detach().flatten().to("cpu", kind).numpy()
        self._changes[k] = changes
        self.mine[k] = {"weights": float(client.weight), "lr_totals": client.lr_total}
        if self.classifier:
            counts: Tensor = client.info.label_counts  # type: ignore[assignment]
            self.mine[k] |= against_counts(self._classifier, counts.double().numpy())

    def record(self, trainer: RunContext, clients: dict[int, dict[str, Any]]) -> None:
        # a layer has the parameters of one submodule; the layer of the module itself is called "."
        grams: dict[str, np.ndarray] = {}
        for name in trainer.client.trainable:
            layer = name.rpartition(".")[0] or "."
            # each worker gets the changes of one parameter at a time and computes the same bits
            worker_changes = {k: change[name] for k, change in self._changes.items()}
            changes = merge_sorted(trainer.gather(worker_changes))
            rows = torch.from_numpy(np.stack(list(changes.values()))).double()
            grams[layer] = grams.get(layer, 0.0) + (rows @ rows.T).numpy()
        self._changes = {}
        scales = {}
        for name in ("weights", "lr_totals"):
            scales[name] = np.array([values[name] for values in clients.values()])
        every = summary_of_changes(sum(grams.values(), start=np.zeros(())), **scales)
        by_layer = []
        for gram in grams.values():
            by_layer.append({"gram": gram, **summary_of_changes(gram, **scales)})
        self.append_tables(trainer, clients)
        number = self.rows(trainer)
        for name in ("norms", "to_mean", "pairwise", "dissimilarity"):
            self.append(name, padded_with_nan(every[name], number))
        for name in ("norms", "to_mean", "gram", "dissimilarity"):
            entries = [padded_with_nan(of_layer[name], number) for of_layer in by_layer]
            self.append(name if name == "gram" else f"layer_{name}", np.stack(entries))
        self.append("layers", list(grams))
        logged = {
            "drift/cosine/pairwise": finite_mean(every["pairwise"][~np.eye(len(clients), dtype=bool)]),
            "drift/cosine/mean": finite_mean(every["to_mean"]),
            "drift/dissimilarity": float(every["dissimilarity"]),
            "drift/norm/spread": float(quotient(every["norms"].std(), every["norms"].mean())),
        }
        for quantity in ("row_norm", "bias") if self.classifier else ():
            correlations = [values[f"{quantity}_correlation"] for values in clients.values()]
            logged[f"drift/classifier/{quantity}"] = finite_mean(correlations)
        log_finite(trainer, logged)


def summary_of_changes(gram: np.ndarray, weights: np.ndarray, lr_totals: np.ndarray) -> dict[str, np.ndarray]:
    r"""Return norms, cosines and :math:`B^2` from the inner products of the clients' changes ``(m, m)``.

    If all weights are 0, clients are weighted equally.
    """
    total = weights.sum()
    p = weights / total if total else np.full(len(weights), 1 / len(weights))
    norms, scaled = np.sqrt(np.diag(gram)), quotient(p, lr_totals)
    squares = quotient(p, lr_totals**2) @ np.diag(gram)
    return {
        "norms": norms,
        "pairwise": quotient(gram, np.outer(norms, norms)).clip(-1, 1),
        "to_mean": quotient(gram @ p, norms * np.sqrt(max(p @ gram @ p, 0.0))).clip(-1, 1),
        "dissimilarity": quotient(squares, scaled @ gram @ scaled),
    }


def padded_with_nan(table: np.ndarray, rows: int) -> np.ndarray:
    """Return a table ``(n,)`` or ``(n, n)`` padded with nan to ``rows`` along each axis; a number unchanged."""
    if not table.ndim:
        return table
    return np.pad(table, [(0, rows - size) for size in table.shape], constant_values=np.nan)


@torch.no_grad()
def against_counts(classifier: Any, counts: np.ndarray) -> dict[str, Any]:
    """Return row norms and biases of a classifier, and their correlations with the label counts."""
    row_norms = torch.linalg.vector_norm(classifier.weight.detach().double(), dim=1).cpu().numpy()
    bias = getattr(classifier, "bias", None)
    biases = np.full(len(counts), np.nan) if bias is None else bias.detach().double().cpu().numpy().copy()
    correlations = {
        "row_norm_correlation": correlation(row_norms, counts),
        "bias_correlation": correlation(biases, counts),
    }
    return {"label_counts": counts, "row_norms": row_norms, "biases": biases, **correlations}


def correlation(values: np.ndarray, counts: np.ndarray) -> float:
    """Return Pearson's correlation over the classes; nan if either is constant."""
    x, y = values - values.mean(), counts - counts.mean()
    return float(np.clip(quotient(x @ y, np.sqrt((x @ x) * (y @ y))), -1, 1))
