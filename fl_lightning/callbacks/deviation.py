r"""FedLC's deviation bound: does a client's majority class push the scores of its minority classes down?

Zhang et al., Federated Learning with Label Distribution Skew via Logits Calibration, ICML 2022, Definition 3,
Theorems 1 and 3. Paper: https://arxiv.org/abs/2209.00189

Over a client's training examples of class c, let :math:`\bar h^{(c)}` be the mean representation and
:math:`\bar p_y^{(c)}` the mean probability of class y. For a majority class j and a minority class r

.. math::
    D_{jr} = \frac{(1 - \bar p_r^{(r)}) \lVert \bar h^{(r)} \rVert^2}{\bar p_r^{(j)} \, \bar h^{(r)} \cdot \bar h^{(j)}}

Theorem 1: where :math:`n_j / n_r > D_{jr} > 0`, the examples of j outweigh those of r in a gradient step: the row
:math:`w_r` of the classifier moves against its class, :math:`\Delta w_r \cdot \bar h^{(r)} < 0`, and other rows towards
it.

Theorem 3 gives the bound under calibrated logits. Its derivation is that of Definition 3 with the probabilities of the
calibrated softmax, which is what is computed here:

.. math::
    D_{jr}^{cal} = \sum_{y \ne r} e^{\Delta_{(r, y)}}
        \frac{\overline{\tilde p}_y^{(r)} \lVert \bar h^{(r)} \rVert^2}
             {\overline{\tilde p}_r^{(j)} \, \bar h^{(r)} \cdot \bar h^{(j)}},
    \qquad \Delta_{(r, y)} = \tau (n_r^{-1/4} - n_y^{-1/4})

As printed, the factor is :math:`\Delta_{(r, y)}` without the exponential. The bound would then be 0 at
:math:`\tau = 0`, where it has to be that of Definition 3.
"""

from __future__ import annotations

from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fl_lightning.callbacks.access import RunAccess
from fl_lightning.callbacks.measurement import (
    ClientMeasurement,
    class_groups,
    classifier_of,
    finite_mean,
    log_finite,
    quotient,
    require_label_counts,
)
from fl_lightning.client import Client
from fl_lightning.errors import UsageError, require
from fl_lightning.functional import as_rows, calibrated_logits, class_sums


class DeviationBound(ClientMeasurement):
    r"""Compares FedLC's deviation bound with what the rows of the local classifiers do.

    The means are of the state that a client receives, in eval mode; the change of the classifier is that of the whole
    visit. For each minority class r of a client, the majority class j is the one with the largest
    :math:`(n_j / n_r) / D_{jr}`; the paper's condition holds where this ratio is above 1. In ``deviation.npz``, for R
    measurements, m clients and C classes, nan where r is no minority class of the client or was in no batch:

    - ``rounds`` (R,), ``clients`` (R, m) and ``label_counts`` (R, m, C).
    - ``ratio`` and ``ratio_calibrated`` (R, m, C): the ratio with the bounds of Definition 3 and Theorem 3.
    - ``bound`` and ``bound_calibrated`` (R, m, C): these bounds; nan where they are not above 0.
    - ``own`` (R, m, C): the cosine of :math:`\Delta w_r` and :math:`\bar h^{(r)}`; below 0 the class has deviated.
    - ``others`` (R, m, C): the largest such cosine of another row; above 0 another class's score rises.

    Logged are ``deviation/bound`` and ``deviation/bound_calibrated``, medians over all minority classes of all clients,
    ``deviation/predicted`` and ``deviation/predicted_calibrated``, the share of these classes whose ratio is above 1,
    ``deviation/observed``, the share that has deviated, and, as the sign test of Theorem 1, ``deviation/confirmed`` and
    ``deviation/confirmed_calibrated``, the share of the predicted ones that has deviated. The converse is not claimed:
    several majority classes together, or missing ones, may push a class down as well. With FedLC in the run the
    calibrated bound is the one that applies. A class that the client lacks leaves the calibrated softmax, which lowers
    the bound where the model still gives it probability. The figure is ``deviation/signs``.

    Args:
        every_n_rounds: rounds from one measurement to the next, at least 1; the last round has one too.
        max_clients: most clients that a round measures, at least 1; of a larger cohort as many are drawn at random.
        examples: about how many of a client's training examples the means are of: the first batches of a pass in random
            order; None takes all. Rare classes may be missed.
        tau: :math:`\tau \ge 0` of the calibrated bound; None takes that of FedLC in the run, or else 1.
        majority: threshold of a majority class, as in :class:`~fl_lightning.callbacks.PerClassAccuracy`.

    Raises:
        UsageError: an argument out of its range, clients without label counts, or a tap ``logits`` that is no trained
            layer which reads ``representation`` and has a row of weights for each class.
    """

    file = "deviation.npz"
    requires = ("representation", "logits")

    def __init__(
        self,
        every_n_rounds: int = 10,
        max_clients: int = 20,
        examples: int | None = 256,
        tau: float | None = None,
        majority: float = 1.0,
    ) -> None:
        super().__init__(every_n_rounds, max_clients)
        require(examples is None or examples >= 1, "DeviationBound.examples", examples, "give 1 or more")
        require(tau is None or tau >= 0, "DeviationBound.tau", tau, "give 0 or more")
        require(majority > 0, "DeviationBound.majority", majority, "give a number above 0")
        self.examples, self.tau, self.majority = examples, tau, majority

    def setup(self, trainer: RunAccess) -> None:
        require_label_counts(trainer, self)
        classifier_of(trainer, self)
        self._weight = f"{trainer.client.tap_paths['logits']}.weight"
        trained = self._weight in trainer.client.trainable
        require(trained, "DeviationBound: the classifier", self._weight, "it is not trained; take the callback out")
        of_methods = [method.tau for method in trainer.methods.methods if hasattr(method, "tau")]
        self._tau = float(self.tau if self.tau is not None else [*of_methods, 1.0][0])

    def on_client_end(self, trainer: RunAccess, client: Client) -> None:
        if not self.measures(trainer, client):
            return
        counts: Tensor = client.info.label_counts  # type: ignore[assignment]
        means = self._means(trainer, client, counts)
        if means is None:
            return
        change, numbers = client.change[self._weight].cpu().numpy(), counts.double().numpy()
        deviation = deviations(means, numbers, class_groups(counts.numpy(), self.majority), change)
        self.mine[client.info.id] = {"label_counts": numbers, **deviation}

    def record(self, trainer: RunAccess, clients: dict[int, dict[str, Any]]) -> None:
        every = {}
        for name in next(iter(clients.values())):
            self.append_table(trainer, name, {k: values[name] for k, values in clients.items()})
            every[name] = np.stack([values[name] for values in clients.values()])
        # medians of the bounds and shares of the minority classes, over all clients
        known = np.isfinite(every["own"]) & np.isfinite(every["ratio"])
        observed = every["own"][known] < 0
        logged = {"observed": finite_mean(observed)}
        for suffix in ("", "_calibrated"):
            predicted, bounds = every[f"ratio{suffix}"][known] > 1, every[f"bound{suffix}"]
            logged[f"predicted{suffix}"] = finite_mean(predicted)
            logged[f"confirmed{suffix}"] = finite_mean(observed[predicted])
            logged[f"bound{suffix}"] = float(np.nanmedian(bounds)) if np.isfinite(bounds).any() else float("nan")
        log_finite(trainer, logged, "deviation/")

    def _means(self, trainer: RunAccess, client: Client, counts: Tensor) -> Means | None:
        """The means over the training examples of each class, under the state that the client has received."""
        taps, k, total = ("representation", "logits"), client.info.id, 0
        sums: dict[str, Any] = {}
        with closing(trainer.representations(client.received, taps, "train", k)) as batches:  # type: ignore[type-var]
            for _, _, targets, values in batches:
                if targets is None:
                    raise UsageError(f"DeviationBound: the data of client={k}: they have no labels (B,)")
                add(sums, values["representation"], values["logits"], targets, counts, self._tau)
                total += len(targets)
                if self.examples is not None and total >= self.examples:
                    break
        if not sums:
            return None
        width, columns = sums["h"].shape[1], client.change[self._weight].shape[1]
        hint = f"the classifier reads {columns} numbers; bind the tap representation to its input"
        require(width == columns, "DeviationBound: width of the representation", width, hint)
        return Means(*((sums[name] / sums["n"].where(sums["n"] > 0, torch.nan)).numpy() for name in ("h", "p", "q")))


class Means(NamedTuple):
    """Means over a client's training examples of each class; nan for a class without any.

    Args:
        h: of the representations ``(C, d)``.
        p: of the probabilities ``(C, C)``: row c is of the examples of class c.
        q: of the probabilities of the calibrated softmax ``(C, C)``.
    """

    h: np.ndarray
    p: np.ndarray
    q: np.ndarray


def add(sums: dict[str, Any], z: Tensor, logits: Tensor, targets: Tensor, counts: Tensor, tau: float) -> None:
    """Add the sums of a batch over the examples of each class, by the names of :class:`Means`, and the number ``n``."""
    classes, wide = len(counts), logits.double()
    calibrated = calibrated_logits(wide, counts.to(logits.device), tau)
    rows = {"h": as_rows(z), "p": wide.softmax(1), "q": calibrated.softmax(1)}
    for name, values in rows.items():
        total, number = class_sums(values, targets, classes)
        sums[name] = sums.get(name, 0) + total.cpu()
    sums["n"] = sums.get("n", 0) + number.cpu()


def ratios(h: np.ndarray, p: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """:math:`(n_j / n_r) / D_{jr}` for all classes j (rows) and r (columns), ``(C, C)``; nan without their examples."""
    products = h @ h.T
    with np.errstate(divide="ignore", invalid="ignore"):
        inverse = p * products / ((1 - np.diag(p)) * np.diag(products))
        return counts[:, None] / counts * inverse


def deviations(
    means: Means, counts: np.ndarray, groups: dict[str, np.ndarray], change: np.ndarray
) -> dict[str, np.ndarray]:
    """What the file has of a client: numbers ``(C,)``, nan where the class is no minority class.

    Args:
        means: over the examples of each class.
        counts: n ``(C,)``.
        groups: the client's majority and minority classes.
        change: of the classifier's weight ``(C, d)``.
    """
    found: dict[str, np.ndarray] = {}
    seen = groups["minority"] & np.isfinite(means.h).all(1)
    majority = groups["majority"] & np.isfinite(means.h).all(1)
    for suffix, p in (("", means.p), ("_calibrated", means.q)):
        table = ratios(means.h, p, counts)[majority]
        largest = table.max(0) if len(table) else np.full(len(counts), np.nan)
        numbers = counts[majority][table.argmax(0)] if len(table) else largest
        with np.errstate(divide="ignore", invalid="ignore"):
            bound = np.where(largest > 0, numbers / counts / largest, np.nan)
        found |= {f"ratio{suffix}": np.where(seen, largest, np.nan), f"bound{suffix}": np.where(seen, bound, np.nan)}
    norms = np.outer(np.linalg.norm(change, axis=1), np.linalg.norm(means.h, axis=1))
    cosines = quotient(change @ means.h.T, norms)
    others = np.where(np.eye(len(counts), dtype=bool), -np.inf, cosines).max(0)
    found["own"], found["others"] = np.where(seen, np.diag(cosines), np.nan), np.where(seen, others, np.nan)
    return found
