"""Singular-value spectra of the classifier and of the representations' covariance.

A diagnostic of FedDecorr (Shi et al., ICLR 2023, Figures 1 to 3) and FedUV (Son et al., CVPR 2024): under label skew,
trailing singular values approach 0, and the representation collapses into few dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fl_lightning.callbacks.measurement import EvaluationMeasurement, classifier_of, has_test_step, merge_sorted
from fl_lightning.client import Client
from fl_lightning.client.lora import lora_adapters
from fl_lightning.client.run_context import RunContext
from fl_lightning.core.state import State
from fl_lightning.core.weighted import Sums, Weighted
from fl_lightning.functional import (
    condition_number,
    effective_rank,
    eigenvalues,
    numerical_rank,
    singular_values,
    stable_rank,
)
from fl_lightning.plotting.values import VISIBLE
from fl_lightning.utilities.errors import require

if TYPE_CHECKING:
    from fl_lightning.plotting.figures import Plot, Runs


def rows_and_products(z: Tensor) -> dict[str, Weighted]:
    """Return sums of rows ``(B, ...)``, flattened to ``(d,)``, and their outer products ``(d, d)``, in float64."""
    rows = z.detach().flatten(1).double()
    totals = {"rows": rows.sum(0), "products": rows.T @ rows}
    return {name: Weighted.summed(total, len(rows)) for name, total in totals.items()}


def spectrum_of_rows(sums: Sums) -> Tensor | None:
    """Return the singular values of the covariance ``(d, d)`` of the summed rows, descending; None without rows."""
    means = sums.means()
    return eigenvalues(means["products"] - torch.outer(means["rows"], means["rows"])) if means else None


class SpectrumMonitor(EvaluationMeasurement):
    """Logs the spectra of the classifier weight and of the covariance of the test representations.

    Each spectrum is logged as scalars (``spectrum/classifier/<kk>``, ``spectrum/representation/<kk>``: the kk-th
    largest singular value, from 0) and as one figure of all rounds. Because TensorBoard's charts are linear, three
    values are also logged as decimal logarithms: ``spectrum/log10/<what>/largest``, ``.../median`` and
    ``.../smallest``. There, rounding errors below 1e-12 of the largest value count as 1e-12 of it, and a spectrum of
    zeros has no logarithms. ``rank/classifier/...`` and ``rank/representation/...`` measure the collapse: the
    ``effective``, ``stable`` and ``numerical`` rank, ``above_threshold``, the number of singular values above
    ``threshold``, and the ``condition`` number of the values that count for the numerical rank. ``spectra.npz`` holds
    ``rounds`` (R,), ``classifier`` (R, C) and ``representation`` (R, d), neither normalised nor logarithmic; a report
    draws the spectra of several runs into one figure.

    In a round with an evaluation of the global model, a measurement costs only the covariance; in other rounds it costs
    an evaluation.

    Args:
        every_n_rounds: rounds from one measurement to the next, at least 1; the last round has one too.
        local_models: also measure the clients' local models before aggregation, every ``local_every_n_rounds`` rounds
            and in the last one: ``rank/<what>/local/mean``, the mean of their effective ranks, and
            ``rank/<what>/local/<id>``. ``spectra.npz`` then holds ``local_rounds`` (L,), ``local_classifier``
            (L, N, C), ``local_representation`` (L, N, d), nan for clients outside the cohort, and
            ``probe_representation`` (L, d) of the global model on the same images. The figures
            ``spectrum/local_classifier`` and ``spectrum/local_representation`` show each client, their mean and the
            global model in the last of these rounds.
        max_scalars: number of scalars of a spectrum, evenly spaced from the first to the last singular value.
        threshold: threshold of significant singular values, at least 0.
        local_every_n_rounds: rounds from one measurement of the local models to the next, at least 1. Each costs a pass
            over ``examples`` images for each client of the round, and one for the global model.
        examples: number n of test images for local models, at least 2; None for all test data, as in FedDecorr. With
            fewer images than d, a covariance has d + 1 - n singular values of 0.
        lora: also measure the product B A of each LoRA adapter, which does not depend on how it is split into factors:
            its singular values, r at most, as ``spectrum/lora/<layer>/<kk>``, ``rank/lora/<layer>/...`` and
            ``lora/<layer>`` (R, r), where ``<layer>`` is the path of the layer.

    If entries of the state stay with the clients (FedBN, FedProto), each spectrum is the mean over personalized models.
    Without test data, only the classifier of the global model has a spectrum.

    Raises:
        UsageError: an argument out of its range, a tap ``logits`` that is not a layer with a weight matrix, or
            ``lora`` without an adapter in the model.
    """

    file = "spectra.npz"
    requires = ("representation", "logits")

    def __init__(
        self,
        every_n_rounds: int = 1,
        local_models: bool = False,
        max_scalars: int = 32,
        threshold: float = 0.01,
        local_every_n_rounds: int = 10,
        examples: int | None = 512,
        lora: bool = False,
    ) -> None:
        super().__init__(every_n_rounds)
        require(max_scalars >= 2, "SpectrumMonitor.max_scalars", max_scalars, "use 2 or more")
        require(threshold >= 0, "SpectrumMonitor.threshold", threshold, "use 0 or more")
        key = "SpectrumMonitor.local_every_n_rounds"
        require(local_every_n_rounds >= 1, key, local_every_n_rounds, "use 1 or more")
        hint = "use 2 or more, or null for all test data"
        require(examples is None or examples >= 2, "SpectrumMonitor.examples", examples, hint)
        self.local_models, self.max_scalars, self.threshold = local_models, max_scalars, threshold
        self.local_every_n_rounds, self.examples, self.lora = local_every_n_rounds, examples, lora

    def local_due(self, round_: int) -> bool:
        """Return whether the local models of this round are measured."""
        return self.local_models and (round_ % self.local_every_n_rounds == 0 or round_ == self._last_round)

    def setup(self, trainer: RunContext) -> None:
        self._classifier, self._live = classifier_of(trainer, self), trainer.client.live
        module = trainer.client.module
        self._adapters = lora_adapters(module) if self.lora else []
        hint = f"{type(module).__name__} has no LoRA adapter; leave it out"
        require(bool(self._adapters) or not self.lora, "SpectrumMonitor.lora", self.lora, hint)
        missing = "test_dataloader" if not trainer.has_data("test") else "" if has_test_step(trainer) else "test_step"
        path = trainer.client.tap_paths["logits"]
        hint = f"it stays with the clients, and there is no {missing}; add one, or take SpectrumMonitor out"
        is_kept = f"{path}.weight" in trainer.client.kept
        require(not (missing and is_kept), "SpectrumMonitor: the classifier", path, hint)
        if missing:
            trainer.warn(f"SpectrumMonitor: no {missing}, so no spectra of representations; add one")

    def on_round_start(self, trainer: RunContext) -> None:
        super().on_round_start(trainer)
        self._seen = Sums()
        self._local: dict[int, dict[str, np.ndarray]] = {}

    @property
    def needs_client_access(self) -> bool:
        return self.local_models

    def on_client_end(self, trainer: RunContext, client: Client) -> None:
        if not self.local_due(trainer.server.round):
            return
        spectra = self._measure(self._probed(trainer, client.state()))
        for matrix_name, values in spectra.items():
            trainer.log(f"rank/{matrix_name}/local/{client.info.id}", float(effective_rank(values)))
        arrays = {matrix_name: values.cpu().numpy() for matrix_name, values in spectra.items()}
        self._local[client.info.id] = arrays

    def see(self, targets: Tensor | None, taps: dict[str, Tensor]) -> None:
        self._seen.add(rows_and_products(taps["representation"]))

    def of_model(self, trainer: RunContext) -> dict[str, Tensor]:
        trainer.all_reduce(self._seen)
        sums, self._seen = self._seen, Sums()
        return self._measure(sums)

    def on_round_end(self, trainer: RunContext) -> None:
        super().on_round_end(trainer)
        if self.local_due(trainer.server.round):
            self._keep_local(trainer)
            self.save(trainer)

    def measure(self, trainer: RunContext) -> None:
        for matrix_name, values in (self.measured(trainer) or self._measure(Sums())).items():
            self._log(trainer, matrix_name, values)
            self.append(matrix_name, values.cpu().numpy())
        self.keep(trainer)

    def plot(self, runs: Runs) -> Iterable[Plot]:
        from fl_lightning.plotting.plots import spectra

        return spectra(runs, self.threshold)

    def _probed(self, trainer: RunContext, state: State | None) -> Sums:
        """Return sums over this worker's batches of the probe for local models."""
        sums = Sums()
        for *_, taps in trainer.representations(state, ("representation",), examples=self.examples):
            sums.add(rows_and_products(taps["representation"]))
        return sums

    def _measure(self, sums: Sums) -> dict[str, Tensor]:
        """Return the spectra of the classifier and the adapters in the worker's module, and of representations."""
        spectra = {"classifier": singular_values(self._classifier.weight), "representation": spectrum_of_rows(sums)}
        for adapter in self._adapters:
            spectra[f"lora/{adapter.path}"] = adapter.singular_values(self._live)
        return {name: values for name, values in spectra.items() if values is not None}

    def _log(self, trainer: RunContext, matrix_name: str, values: Tensor) -> None:
        digits = max(2, len(str(len(values) - 1)))
        spread = np.linspace(0, len(values) - 1, min(self.max_scalars, len(values)))
        for index in np.unique(spread.round().astype(int)).tolist():
            trainer.log(f"spectrum/{matrix_name}/{index:0{digits}d}", float(values[index]))
        for which, index in {"largest": 0, "median": len(values) // 2, "smallest": -1}.items() if values.any() else ():
            value = max(float(values[index]), VISIBLE * float(values[0]))
            trainer.log(f"spectrum/log10/{matrix_name}/{which}", math.log10(value))
        ranks = {
            **{"effective": effective_rank(values), "stable": stable_rank(values), "numerical": numerical_rank(values)},
            **{"condition": condition_number(values), "above_threshold": (values > self.threshold).sum()},
        }
        for name, rank in ranks.items():
            trainer.log(f"rank/{matrix_name}/{name}", float(rank))
        if not values.any():
            trainer.warn(
                f"round {trainer.server.round}: the {matrix_name} has collapsed: all its singular values are 0"
            )

    def _keep_local(self, trainer: RunContext) -> None:
        local = merge_sorted(trainer.gather(self._local))
        for matrix_name in next(iter(local.values()), {}):
            spectra = np.stack([of_client[matrix_name] for of_client in local.values()])
            table = np.full((trainer.data.num_clients, spectra.shape[1]), np.nan)
            table[list(local)] = spectra
            self.append(f"local_{matrix_name}", table)
            ranks = [float(effective_rank(torch.from_numpy(values))) for values in spectra]
            trainer.log(f"rank/{matrix_name}/local/mean", math.fsum(ranks) / len(ranks))
            if matrix_name == "representation" and trainer.client.has_global_model:
                probed = self._probed(trainer, None)
                trainer.all_reduce(probed)
                self.append("probe_representation", spectrum_of_rows(probed))
        if local:
            self.append("local_rounds", trainer.server.round)
