r"""FedLC's deviation bound: whether a client's majority class lowers the scores of its minority classes.

Zhang et al., Federated Learning with Label Distribution Skew via Logits Calibration, ICML 2022, Definition 3,
Theorems 1 and 3. Paper: https://arxiv.org/abs/2209.00189

Over a client's training examples of class c, let :math:`\bar h^{(c)}` be the mean representation and
:math:`\bar p_y^{(c)}` the mean probability of class y. For a majority class j and a minority class r

.. math::
    D_{jr} = \frac{(1 - \bar p_r^{(r)}) \lVert \bar h^{(r)} \rVert^2}{\bar p_r^{(j)} \, \bar h^{(r)} \cdot \bar h^{(j)}}

Theorem 1: if :math:`n_j / n_r > D_{jr} > 0`, the examples of j outweigh the examples of r in a gradient step: the row
:math:`w_r` of the classifier moves against its class, :math:`\Delta w_r \cdot \bar h^{(r)} < 0`, and other rows towards
it.

Theorem 3 gives the bound under calibrated logits. It follows from Definition 3 with the probabilities of the calibrated
softmax, as computed here:

.. math::
    D_{jr}^{cal} = \sum_{y \ne r} e^{\Delta_{(r, y)}}
        \frac{\overline{\tilde p}_y^{(r)} \lVert \bar h^{(r)} \rVert^2}
             {\overline{\tilde p}_r^{(j)} \, \bar h^{(r)} \cdot \bar h^{(j)}},
    \qquad \Delta_{(r, y)} = \tau (n_r^{-1/4} - n_y^{-1/4})

As printed, the factor is :math:`\Delta_{(r, y)}` without the exponential. The bound would then be 0 at
:math:`\tau = 0`, where it must equal Definition 3.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

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
from fl_lightning.client.run_context import RunContext
from fl_lightning.functional import as_rows, calibrated_logits, class_sums
from fl_lightning.utilities.errors import UsageError, require

if TYPE_CHECKING:
    from fl_lightning.client.run_context import Observed


class DeviationBound(ClientMeasurement):
    r"""Compares FedLC's deviation bound with the changes of the local classifiers' rows.

    The means are taken in the state that a client receives, in eval mode; the change of the classifier covers the whole
    visit. For each minority class r of a client, the majority class j is the one with the largest
    :math:`(n_j / n_r) / D_{jr}`; the paper's condition holds if this ratio is above 1. In ``deviation.npz``, for R
    measurements, m clients and C classes, nan unless r is a minority class of the client with examples in the batches:

    - ``rounds`` (R,), ``clients`` (R, m) and ``label_counts`` (R, m, C).
    - ``ratio`` and ``ratio_calibrated`` (R, m, C): the ratio with the bounds of Definition 3 and Theorem 3.
    - ``bound`` and ``bound_calibrated`` (R, m, C): these bounds; nan unless they are above 0.
    - ``own`` (R, m, C): the cosine of :math:`\Delta w_r` and :math:`\bar h^{(r)}`; below 0 the class has deviated.
    - ``others`` (R, m, C): the largest such cosine of another row; above 0 another class's score rises.

    Logged are ``deviation/bound`` and ``deviation/bound_calibrated``, medians over all minority classes of all clients,
    ``deviation/predicted`` and ``deviation/predicted_calibrated``, the share of these classes whose ratio is above 1,
    ``deviation/observed``, the share that deviated, and, as the sign test of Theorem 1, ``deviation/confirmed`` and
    ``deviation/confirmed_calibrated``, the share of the predicted classes that deviated. The converse is not claimed:
    several majority classes together, or missing ones, may lower a class as well. With FedLC in the run the
    calibrated bound applies. A class that the client lacks is missing in the calibrated softmax, which lowers the bound
    if the model still assigns it probability. The figure is ``deviation/signs``.

    Args:
        every_n_rounds: rounds from one measurement to the next, at least 1; the last round has one too.
        max_clients: number of clients measured in a round at most, at least 1; drawn at random from a larger cohort.
        examples: approximate number of a client's training examples for the means: the first batches of a pass in
            random order; None takes all. Rare classes may be missed.
        tau: :math:`\tau \ge 0` of the calibrated bound; None takes FedLC's value in the run, or 1.
        majority: threshold of a majority class, as in :class:`~fl_lightning.callbacks.PerClassAccuracy`.

    Raises:
        UsageError: an argument out of its range, clients without label counts, or a tap ``logits`` other than a trained
            layer that reads ``representation`` and has a row of weights for each class.
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
        require(examples is None or examples >= 1, "DeviationBound.examples", examples, "use 1 or more")
        require(tau is None or tau >= 0, "DeviationBound.tau", tau, "use 0 or more")
        require(majority > 0, "DeviationBound.majority", majority, "use a number above 0")
        self.examples, self.tau, self.majority = examples, tau, majority

    def setup(self, trainer: RunContext) -> None:
        classifier_of(trainer, self, classes=require_label_counts(trainer, self))
        self._weight = f"{trainer.client.tap_paths['logits']}.weight"
        trained = self._weight in trainer.client.trainable
        require(trained, "DeviationBound: the classifier", self._weight, "is not trained; remove the callback")
        methods: list[Any] = trainer.methods.methods
        of_methods = [method.tau for method in methods if method.name == "fedlc"]
        self._tau = float(self.tau if self.tau is not None else [*of_methods, 1.0][0])

    def on_client_end(self, trainer: RunContext, client: Client) -> None:
        if not self.measures(trainer, client):
            return
        counts: Tensor = client.info.label_counts  # type: ignore[assignment]
        taps, k = ("representation", "logits"), client.info.id
        with closing(trainer.representations(client.received, taps, "train", k)) as batches:  # type: ignore[type-var]
            means = class_means(batches, counts, self._tau, self.examples)
        if not means:
            return
        width, columns = means["h"].shape[1], client.change[self._weight].shape[1]
        hint = f"the classifier reads {columns} numbers; bind the tap representation to its input"
        require(width == columns, "DeviationBound: width of the representation", width, hint)
        change, numbers = client.change[self._weight].cpu().numpy(), counts.double().numpy()
        deviation = deviations(means, numbers, class_groups(counts.numpy(), self.majority), change)
        self.mine[client.info.id] = {"label_counts": numbers, **deviation}

    def record(self, trainer: RunContext, clients: dict[int, dict[str, Any]]) -> None:
        self.append_tables(trainer, clients)
        names = next(iter(clients.values()))
        every = {name: np.stack([values[name] for values in clients.values()]) for name in names}
        # medians of the bounds and shares of the minority classes, over all clients
        defined = np.isfinite(every["own"]) & np.isfinite(every["ratio"])
        observed = every["own"][defined] < 0
        logged = {"observed": finite_mean(observed)}
        for suffix in ("", "_calibrated"):
            predicted, bounds = every[f"ratio{suffix}"][defined] > 1, every[f"bound{suffix}"]
            logged[f"predicted{suffix}"] = finite_mean(predicted)
            logged[f"confirmed{suffix}"] = finite_mean(observed[predicted])
            logged[f"bound{suffix}"] = float(np.nanmedian(bounds)) if np.isfinite(bounds).any() else float("nan")
        log_finite(trainer, logged, "deviation/")


def class_means(batches: Iterable[Observed], counts: Tensor, tau: float, examples: int | None) -> dict[str, np.ndarray]:
    """Return means over about ``examples`` examples by class; empty without examples.

    Row c of ``h (C, d)``, ``p (C, C)`` and ``q (C, C)`` is the mean representation, probability and calibrated
    probability of the examples of class c; nan without examples.
    """
    sums: dict[str, Any] = {}
    total = 0
    for _, _, targets, taps in batches:
        if targets is None:
            raise UsageError("DeviationBound: the clients' data have no labels (B,); remove the callback")
        logits = taps["logits"].double()
        calibrated = calibrated_logits(logits, counts.to(logits.device), tau)
        for name, rows in (
            ("h", as_rows(taps["representation"])),
            ("p", logits.softmax(1)),
            ("q", calibrated.softmax(1)),
        ):
            of_batch, number = class_sums(rows, targets, len(counts))
            sums[name] = sums.get(name, 0) + of_batch.cpu()
        sums["n"] = sums.get("n", 0) + number.cpu()
        total += len(targets)
        if examples is not None and total >= examples:
            break
    number = sums.pop("n", None)
    if number is None:
        return {}
    divisor = number.where(number > 0, torch.nan)
    return {name: (value / divisor).numpy() for name, value in sums.items()}


def ratios(h: np.ndarray, p: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return :math:`(n_j / n_r) / D_{jr}` for classes j (rows) and r (columns), ``(C, C)``; nan without examples."""
    products = h @ h.T
    with np.errstate(divide="ignore", invalid="ignore"):
        inverse = p * products / ((1 - np.diag(p)) * np.diag(products))
        return counts[:, None] / counts * inverse


def deviations(
    means: dict[str, np.ndarray], counts: np.ndarray, groups: dict[str, np.ndarray], change: np.ndarray
) -> dict[str, np.ndarray]:
    """Return a client's arrays ``(C,)`` of the file, from the change of the classifier's weight ``(C, d)``."""
    arrays: dict[str, np.ndarray] = {}
    h = means["h"]
    occurs = np.isfinite(h).all(1)
    minority, majority = groups["minority"] & occurs, groups["majority"] & occurs
    for suffix, p in (("", means["p"]), ("_calibrated", means["q"])):
        table = ratios(h, p, counts)[majority]
        largest = table.max(0) if len(table) else np.full(len(counts), np.nan)
        numbers = counts[majority][table.argmax(0)] if len(table) else largest
        with np.errstate(divide="ignore", invalid="ignore"):
            bound = np.where(largest > 0, numbers / counts / largest, np.nan)
        arrays |= {
            f"ratio{suffix}": np.where(minority, largest, np.nan),
            f"bound{suffix}": np.where(minority, bound, np.nan),
        }
    norms = np.outer(np.linalg.norm(change, axis=1), np.linalg.norm(h, axis=1))
    cosines = quotient(change @ h.T, norms)
    nearest_other = np.where(np.eye(len(counts), dtype=bool), -np.inf, cosines).max(0)
    arrays["own"], arrays["others"] = (
        np.where(minority, np.diag(cosines), np.nan),
        np.where(minority, nearest_other, np.nan),
    )
    return arrays
