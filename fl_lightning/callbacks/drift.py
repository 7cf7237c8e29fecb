r"""How far and in which directions clients move away from each other in a round.

With client k's change :math:`\Delta_k = y_k - w^t`, its weight :math:`p_k` (normalised over the clients measured) and
the sum :math:`\eta_k` of the learning rates of its local steps, the pseudo-gradient is
:math:`g_k = -\Delta_k / \eta_k`, and

.. math::
    \cos_{kl} = \frac{\langle \Delta_k, \Delta_l \rangle}{\lVert \Delta_k \rVert \lVert \Delta_l \rVert}, \qquad
    B^2 = \frac{\sum_k p_k \lVert g_k \rVert^2}{\lVert \sum_k p_k g_k \rVert^2} \ge 1

B is the gradient dissimilarity of FedProx (Li et al., MLSys 2020, Definition 3, https://arxiv.org/abs/1812.06127),
which SCAFFOLD bounds, too (Karimireddy et al., ICML 2020, assumption A1, https://arxiv.org/abs/1910.06378). Theirs is
of the gradients at one point; with one local step on all of a client's data this is the same number.

Everything follows from the inner products of the changes, layer by layer: no mean is needed, and no more than the
changes of ``max_clients`` clients are held.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.callbacks.by_client import (
    ClientMeasurement,
    classifier_of,
    finite_mean,
    log_finite,
    need_label_counts,
)
from fl_lightning.callbacks.heatmap import heat_map, integer_ticks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fl_lightning.client import Client
    from fl_lightning.trainer import FederatedTrainer


class Drift(ClientMeasurement):
    r"""Measures the clients' changes: norms, cosines, gradient dissimilarity, and the bias of the local classifiers.

    The changes are those of all trained parameters, those included that stay with a client. In ``drift.npz``, for R
    measurements, m clients and L layers (submodules with trained parameters of their own):

    - ``rounds`` (R,), ``clients`` (R, m), ``weights`` (R, m): the clients' weights in the mean, before normalisation;
      ``lr_totals`` (R, m): sums of learning rates; ``layers`` (R, L): names.
    - ``gram`` (R, L, m, m): inner products of the changes; ``norms`` (R, m), ``pairwise`` (R, m, m) and
      ``to_mean`` (R, m): the clients' norms, their cosines, and their cosines to the weighted mean change, over all
      layers; ``layer_norms`` and ``layer_to_mean`` (R, L, m): the same by layer.
    - ``dissimilarity`` (R,) and ``layer_dissimilarity`` (R, L): :math:`B^2`, at least 1, and 1 where all agree; nan
      where the mean is 0.
    - with ``classifier``: ``label_counts``, ``row_norms`` and ``biases`` (R, m, C) of the classifiers of the local
      models, and their correlations with the label counts over the classes, ``row_norm_correlation`` and
      ``bias_correlation`` (R, m); nan for a classifier without bias, and for a client that has equally many examples of
      all classes.

    Logged are the means over the clients: ``drift/cosine/pairwise``, ``drift/cosine/mean``, ``drift/dissimilarity``,
    ``drift/norm/spread`` (the standard deviation of the norms divided by their mean), ``drift/classifier/row_norm`` and
    ``drift/classifier/bias``. Figures: ``drift/pairwise``, ``drift/layers`` and ``drift/classifier``.

    Args:
        every_n_rounds: rounds from one measurement to the next, at least 1; the last round has one too.
        max_clients: most clients that a round measures, at least 1; of a larger cohort as many are drawn at random. The
            change of each is held in memory until the end of the round.
        classifier: also compare the local classifiers with the label counts.

    Raises:
        UsageError: an argument out of its range; or, with ``classifier``, clients without label counts, or a tap
            ``logits`` that is no layer with a row of weights for each class.
    """

    file = "drift.npz"

    def __init__(self, every_n_rounds: int = 10, max_clients: int = 20, classifier: bool = True) -> None:
        super().__init__(every_n_rounds, max_clients)
        self.classifier = classifier
        self.requires = ("logits",) if classifier else ()

    def setup(self, trainer: FederatedTrainer) -> None:
        if self.classifier:
            need_label_counts("Drift", trainer, "give Drift.classifier=false")
            self._classifier = classifier_of(
                "Drift", trainer, "bind it to the last linear layer, or give classifier=false"
            )

    def on_round_start(self, trainer: FederatedTrainer) -> None:
        super().on_round_start(trainer)
        self._changes: dict[int, dict[str, np.ndarray]] = {}

    def on_client_end(self, trainer: FederatedTrainer, client: Client) -> None:
        if not self.measures(trainer, client):
            return
        k = client.info.id
        # in the precision of the parameters the changes are practically exact, and half as large
        self._changes[k] = {name: narrow(value, client.live[name]) for name, value in client.change.items()}
        self.mine[k] = {"weights": float(client.weight), "lr_totals": client.lr_total}
        if self.classifier:
            counts: Tensor = client.info.label_counts  # type: ignore[assignment]
            self.mine[k] |= against_counts(self._classifier, counts.double().numpy())

    def record(self, trainer: FederatedTrainer, clients: dict[int, dict[str, Any]]) -> None:
        layers = layers_of(trainer.client.trainable)
        grams = {layer: self._gram(trainer, names) for layer, names in layers.items()}
        self._changes = {}
        self._append(trainer, clients, grams)

    def on_fit_end(self, trainer: FederatedTrainer) -> None:
        if trainer.run_dir is None or not self.series:
            return
        series = self.series.arrays()
        trainer.log_figure("drift/pairwise", draw_pairwise(series))
        trainer.log_figure("drift/layers", draw_layers(series))
        if self.classifier:
            trainer.log_figure("drift/classifier", draw_classifier(series))

    def _gram(self, trainer: FederatedTrainer, names: list[str]) -> np.ndarray:
        """The inner products (m, m) of all clients' changes of some parameters; all workers call this.

        Each worker gets the changes of one parameter at a time, and computes the same bits from them.
        """
        gram = np.zeros(())
        for name in names:
            parts = trainer.gather({k: changes[name] for k, changes in self._changes.items()})
            every = dict(sorted((k, change) for part in parts for k, change in part.items()))
            rows = (
                torch.stack([torch.from_numpy(one).double() for one in every.values()]) if every else torch.zeros(0, 1)
            )
            gram = gram + (rows @ rows.T).numpy()
        return gram

    def _append(
        self, trainer: FederatedTrainer, clients: dict[int, dict[str, Any]], grams: dict[str, np.ndarray]
    ) -> None:
        given = {name: np.array([one[name] for one in clients.values()]) for name in ("weights", "lr_totals")}
        every = Summary(sum(grams.values(), start=np.zeros(())), **given)
        by_layer = {layer: Summary(gram, **given) for layer, gram in grams.items()}
        self.series.append("layers", np.array(list(grams)))
        for name in next(iter(clients.values())):
            self.append(trainer, name, {k: one[name] for k, one in clients.items()})
        for name in ("norms", "to_mean", "pairwise"):
            self.series.append(name, padded(getattr(every, name), self.rows(trainer)))
        for name, own in (("layer_norms", "norms"), ("layer_to_mean", "to_mean"), ("gram", "gram")):
            tables = [padded(getattr(one, own), self.rows(trainer)) for one in by_layer.values()]
            self.series.append(name, np.stack(tables))
        self.series.append("dissimilarity", every.dissimilarity)
        self.series.append("layer_dissimilarity", np.array([one.dissimilarity for one in by_layer.values()]))
        self._log(trainer, every, clients)

    def _log(self, trainer: FederatedTrainer, every: Summary, clients: dict[int, dict[str, Any]]) -> None:
        off_diagonal = every.pairwise[~np.eye(len(clients), dtype=bool)]
        values = {
            "drift/cosine/pairwise": finite_mean(off_diagonal),
            "drift/cosine/mean": finite_mean(every.to_mean),
            "drift/dissimilarity": every.dissimilarity,
            "drift/norm/spread": float(quotient(every.norms.std(), every.norms.mean())),
        }
        for what in ("row_norm", "bias") if self.classifier else ():
            values[f"drift/classifier/{what}"] = finite_mean([one[f"{what}_correlation"] for one in clients.values()])
        log_finite(trainer, values)


class Summary:
    r"""What follows from the inner products of the clients' changes.

    Args:
        gram: inner products of the changes ``(m, m)``.
        weights: :math:`p_k` before normalisation ``(m,)``; where all are 0, the clients count alike.
        lr_totals: :math:`\eta_k` ``(m,)``.

    Attributes:
        gram: as given.
        norms: of the changes ``(m,)``.
        pairwise: cosines ``(m, m)``; nan where a change is 0.
        to_mean: cosines to the weighted mean change ``(m,)``.
        dissimilarity: :math:`B^2` of the changes divided by ``lr_totals``.
    """

    def __init__(self, gram: np.ndarray, weights: np.ndarray, lr_totals: np.ndarray) -> None:
        total = weights.sum()
        p = weights / total if total else np.full(len(weights), 1 / len(weights))
        self.gram, self.norms = gram, np.sqrt(np.diag(gram))
        self.pairwise = quotient(gram, np.outer(self.norms, self.norms)).clip(-1, 1)
        self.to_mean = quotient(gram @ p, self.norms * np.sqrt(max(p @ gram @ p, 0.0))).clip(-1, 1)
        scaled = quotient(p, lr_totals)
        squares = quotient(p, lr_totals**2) @ np.diag(gram)
        self.dissimilarity = float(quotient(squares, scaled @ gram @ scaled))


def quotient(numerator: Any, denominator: Any) -> np.ndarray:
    """Their quotient; nan where the denominator is not above 0."""
    numerator, denominator = np.asarray(numerator), np.asarray(denominator)
    return np.divide(numerator, np.where(denominator > 0, denominator, np.nan))


def narrow(change: Tensor, parameter: Tensor) -> np.ndarray:
    """A change ``(n,)`` in the precision of its parameter, in float32 at least."""
    kind = torch.promote_types(parameter.dtype, torch.float32)
    return change.detach().flatten().to("cpu", kind).numpy()


def layers_of(names: list[str]) -> dict[str, list[str]]:
    """The parameters of each submodule, by its path; those of the module itself bear the name of a dot."""
    layers: dict[str, list[str]] = {}
    for name in names:
        layers.setdefault(name.rpartition(".")[0] or ".", []).append(name)
    return layers


def padded(table: np.ndarray, rows: int) -> np.ndarray:
    """A table ``(n,)`` or ``(n, n)`` with nan up to ``rows`` in each axis."""
    return np.pad(table, [(0, rows - size) for size in table.shape], constant_values=np.nan)


@torch.no_grad()
def against_counts(classifier: Any, counts: np.ndarray) -> dict[str, Any]:
    """Row norms and biases of a classifier, and their correlations with the label counts."""
    row_norms = torch.linalg.vector_norm(classifier.weight.detach().double(), dim=1).cpu().numpy()
    bias = getattr(classifier, "bias", None)
    biases = np.full(len(counts), np.nan) if bias is None else bias.detach().double().cpu().numpy().copy()
    correlations = {
        "row_norm_correlation": correlation(row_norms, counts),
        "bias_correlation": correlation(biases, counts),
    }
    return {"label_counts": counts, "row_norms": row_norms, "biases": biases, **correlations}


def correlation(values: np.ndarray, counts: np.ndarray) -> float:
    """Pearson's correlation over the classes; nan where either does not vary."""
    x, y = values - values.mean(), counts - counts.mean()
    return float(np.clip(quotient(x @ y, np.sqrt((x @ x) * (y @ y))), -1, 1))


# ---------------------------------------------------------------------- figures
def draw_pairwise(series: dict[str, np.ndarray]) -> Figure:
    """The cosines of the last round's changes, client by client."""
    from matplotlib.figure import Figure

    clients = series["clients"][-1]
    clients = clients[clients >= 0]
    table = series["pairwise"][-1][: len(clients), : len(clients)]
    figure = Figure(figsize=(5.5, 4.5), layout="constrained")
    axes = figure.add_subplot()
    heat_map(axes, table, "cosine", -1, 1, ".2f")
    integer_ticks(axes.set_xticks, clients.tolist())
    integer_ticks(axes.set_yticks, clients.tolist())
    axes.set(xlabel="client", ylabel="client", title=f"cosines of the clients' changes, round {series['rounds'][-1]}")
    return figure


def draw_layers(series: dict[str, np.ndarray]) -> Figure:
    """The mean cosine to the mean change and the gradient dissimilarity of each layer, in some of the rounds."""
    from matplotlib.figure import Figure

    layers, rounds = series["layers"][-1].tolist(), series["rounds"]
    shown = sorted({0, (len(rounds) - 1) // 2, len(rounds) - 1})
    figure = Figure(figsize=(max(6.0, 0.35 * min(len(layers), 40) + 3), 6.5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    for style, index in zip(("o:", "s--", "^-"), shown, strict=False):
        cosines = [finite_mean(row) for row in series["layer_to_mean"][index]]
        upper.plot(cosines, style, label=f"round {rounds[index]}", markersize=4)
        lower.plot(series["layer_dissimilarity"][index], style, markersize=4)
    upper.set(ylabel="cosine to the mean change", title="drift by layer")
    upper.legend()
    lower.set(yscale="log", ylabel="gradient dissimilarity $B^2$", xlabel="layer, from the input on")
    for ticks in (lower.yaxis.set_major_formatter, lower.yaxis.set_minor_formatter):
        ticks("{x:g}")
    integer_ticks(lower.set_xticks, layers, most=40)
    lower.tick_params(axis="x", labelrotation=60)
    for label in lower.get_xticklabels():
        label.set(ha="right", rotation_mode="anchor", fontsize=8)
    return figure


def draw_classifier(series: dict[str, np.ndarray]) -> Figure:
    """Row norms and biases of the last round's local classifiers over the clients' shares of each class."""
    from matplotlib.figure import Figure

    counts = series["label_counts"][-1]
    shares = 100 * counts / np.nansum(counts, axis=1, keepdims=True).clip(1)
    figure = Figure(figsize=(9, 4), layout="constrained")
    for axes, what in zip(figure.subplots(1, 2), ("row_norm", "bias"), strict=True):
        label = "norm of the class's row" if what == "row_norm" else "bias of the class"
        values = series["row_norms" if what == "row_norm" else "biases"][-1]
        axes.scatter(shares, values, s=12, alpha=0.6)
        mean = finite_mean(series[f"{what}_correlation"][-1])
        axes.set(xlabel="share of the class in the client's data in %", ylabel=label)
        axes.set_title(f"mean correlation {mean:.2f}" if np.isfinite(mean) else "no correlation is defined")
    figure.suptitle(f"local classifiers and label counts, round {series['rounds'][-1]}")
    return figure
