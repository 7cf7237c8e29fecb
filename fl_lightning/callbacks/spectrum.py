"""Singular-value spectra of the classifier and of the representations' covariance.

The diagnostic of FedDecorr (Shi et al., ICLR 2023, Figures 1 to 3) and FedUV (Son et al., CVPR 2024): under label skew
the trailing singular values fall towards 0, and the representation collapses into few dimensions.
"""

from __future__ import annotations

import hashlib
import zipfile
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from fl_lightning.callbacks.base import Callback
from fl_lightning.errors import UsageError, require
from fl_lightning.functional import effective_rank, eigenvalues, singular_values, stable_rank
from fl_lightning.records.files import write_atomically
from fl_lightning.sums import Sums, Weighted

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.figure import Figure

    from fl_lightning.client import Client
    from fl_lightning.trainer import FederatedTrainer


class Covariance:
    """The covariance of rows that come batch by batch, in float64, with d x d numbers in memory.

    Attributes:
        sums: of the rows ``(d,)`` and of their outer products ``(d, d)``.
    """

    def __init__(self) -> None:
        self.sums = Sums()

    def add(self, z: Tensor) -> None:
        """Count rows ``(B, ...)``, each flattened to ``(d,)``."""
        rows = z.detach().flatten(1).double()
        totals = {"rows": rows.sum(0), "products": rows.T @ rows}
        self.sums.add({name: Weighted.summed(total, len(rows)) for name, total in totals.items()})

    def spectrum(self) -> Tensor | None:
        """Singular values of the covariance ``(d, d)``, which are its eigenvalues, descending; None without rows."""
        means = self.sums.means()
        return eigenvalues(means["products"] - torch.outer(means["rows"], means["rows"])) if means else None


class SpectrumMonitor(Callback):
    """Logs the spectra of the classifier weight and of the covariance of the test representations.

    Each one is logged as scalars (``spectrum/classifier/<kk>``, ``spectrum/representation/<kk>``: the kk-th largest
    singular value, from 0), as effective and stable rank (``rank/classifier/effective``, ...), in the run's
    ``spectra.npz`` (``rounds`` (R,), ``classifier`` (R, C), ``representation`` (R, d)) and as one figure of all rounds.

    Args:
        every_n_rounds: rounds from one measurement to the next, at least 1; the last round has one too.
        local_models: also measure every client's local model before aggregation (``rank/<what>/local/<id>``, and
            ``local_classifier`` (R, N, C), ``local_representation`` (R, N, d) in ``spectra.npz``, nan for clients that
            were not in the cohort). Each costs a pass over the test data.
        max_scalars: how many singular values of a spectrum become scalars, evenly spread from the first to the last.

    Where entries of the state do not travel (FedBN, FedProto), each spectrum is the mean over the clients' own models.
    Without test data only the classifier of the global model has one.

    Raises:
        UsageError: an argument out of its range, or the tap ``logits`` is no layer with a weight matrix.
    """

    requires = ("representation", "logits")

    def __init__(self, every_n_rounds: int = 1, local_models: bool = False, max_scalars: int = 32) -> None:
        require(every_n_rounds >= 1, "SpectrumMonitor.every_n_rounds", every_n_rounds, "give 1 or more")
        require(max_scalars >= 2, "SpectrumMonitor.max_scalars", max_scalars, "give 2 or more")
        self.every_n_rounds, self.local_models, self.max_scalars = every_n_rounds, local_models, max_scalars

    def wants_evaluation(self, round_: int) -> bool:
        return self._due(round_)

    def setup(self, trainer: FederatedTrainer) -> None:
        self._classifier = self._find_classifier(trainer)

    def on_fit_start(self, trainer: FederatedTrainer) -> None:
        self._last_round = trainer.max_rounds - 1
        self._source = trainer.resumed_from
        self._begin()

    def on_round_start(self, trainer: FederatedTrainer) -> None:
        self._covariance = Covariance()
        self._own, self._global = Sums(), Sums()
        self._local: dict[str, dict[int, np.ndarray]] = {}

    def on_client_end(self, trainer: FederatedTrainer, client: Client) -> None:
        if not (self.local_models and self._due(trainer.server.round)):
            return
        covariance = Covariance()
        for *_, taps in trainer.representations(client.state(), ("representation",)):
            covariance.add(taps["representation"])
        for what, values in self._measure(covariance).items():
            trainer.log(f"rank/{what}/local/{client.info.id}", float(effective_rank(values)))
            self._local.setdefault(what, {})[client.info.id] = values.cpu().numpy()

    def on_evaluation_batch_end(
        self, trainer: FederatedTrainer, phase: str, batch: Any, targets: Tensor | None, taps: dict[str, Tensor]
    ) -> None:
        if phase == "test" and self._due(trainer.server.round):
            self._covariance.add(taps["representation"])

    def on_evaluation_end(self, trainer: FederatedTrainer, phase: str, client: int | None = None) -> None:
        if phase == "test" and self._due(trainer.server.round):
            trainer.all_reduce(self._covariance.sums)
            spectra = {what: Weighted.of(values) for what, values in self._measure(self._covariance).items()}
            (self._global if client is None else self._own).add(spectra)
            self._covariance = Covariance()

    def on_round_end(self, trainer: FederatedTrainer) -> None:
        if not self._due(trainer.server.round):
            return
        trainer.all_reduce(self._own)
        spectra = self._own.means() or self._global.means() or self._measure(Covariance())
        for what, values in spectra.items():
            self._log(trainer, what, values)
            self._append(what, values.cpu().numpy())
        self._keep_local(trainer)
        self._append("rounds", np.array(trainer.server.round))
        if trainer.run_dir is not None:
            arrays: dict[str, Any] = {what: np.stack(values) for what, values in self._spectra.items()}
            write_atomically(trainer.run_dir / FILE, partial(np.savez, **arrays))

    def on_fit_end(self, trainer: FederatedTrainer) -> None:
        if trainer.run_dir is None or not self._spectra:
            return
        rounds = [int(one) for one in self._spectra["rounds"]]
        for what in [name for name in TITLES if name in self._spectra]:
            trainer.log_figure(f"spectrum/{what}", draw(what, rounds, self._spectra[what]))

    def state_dict(self) -> dict[str, Any]:
        # a checkpoint must not grow with the rounds: the spectra are in their file, and these tell whether it is theirs
        return {"stamps": {what: [len(self._spectra[what]), one.hexdigest()] for what, one in self._digests.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        known = {what: [one.numpy() for one in values] for what, values in state.get("spectra", {}).items()}
        if "rounds" in state:  # of a version that kept them in checkpoints
            known["rounds"] = [np.array(one) for one in state["rounds"]]
        elif self._source is not None:
            known = self._read(self._source / FILE, state.get("stamps", {}))
        for what, values in known.items():
            for one in values:
                self._append(what, one)

    def _begin(self) -> None:
        self._spectra: dict[str, list[np.ndarray]] = {}
        self._digests: dict[str, Any] = {}

    def _append(self, what: str, values: np.ndarray) -> None:
        self._spectra.setdefault(what, []).append(values)
        self._digests.setdefault(what, hashlib.sha256()).update(values.tobytes())

    def _read(self, path: Path, stamps: dict[str, Any]) -> dict[str, list[np.ndarray]]:
        """The spectra of the rounds before the checkpoint; none, with a warning, where the file is no longer theirs."""
        try:
            with np.load(path, allow_pickle=False) as saved:
                known = {what: saved[what][:number] for what, (number, _) in stamps.items()}
            same = all(hashlib.sha256(known[what].tobytes()).hexdigest() == one for what, (_, one) in stamps.items())
        except (OSError, ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile, EOFError, MemoryError):
            same = False
        if not same:
            rank_zero_warn(f"{path} was altered or is missing: it begins anew with the rounds after the checkpoint")
        return {what: list(values) for what, values in known.items()} if same else {}

    def _due(self, round_: int) -> bool:
        return round_ % self.every_n_rounds == 0 or round_ == self._last_round

    def _find_classifier(self, trainer: FederatedTrainer) -> torch.nn.Module:
        path = trainer.client.tap_paths["logits"]
        layer = trainer.client.module.get_submodule(path)
        if not (isinstance(getattr(layer, "weight", None), Tensor) and layer.weight.ndim == 2):
            raise UsageError(f"trainer.taps: logits={path!r} has no weight matrix; bind it to the last linear layer")
        return layer

    def _measure(self, covariance: Covariance) -> dict[str, Tensor]:
        """The spectra of the classifier in the resident module, and of ``covariance`` where it has rows."""
        weight: Tensor = self._classifier.weight  # type: ignore[assignment]
        spectra = {"classifier": singular_values(weight), "representation": covariance.spectrum()}
        return {what: values for what, values in spectra.items() if values is not None}

    def _log(self, trainer: FederatedTrainer, what: str, values: Tensor) -> None:
        chosen = np.unique(np.linspace(0, len(values) - 1, min(self.max_scalars, len(values))).round().astype(int))
        digits = max(2, len(str(len(values) - 1)))
        for index in chosen:
            trainer.log(f"spectrum/{what}/{index:0{digits}d}", float(values[index]))
        trainer.log(f"rank/{what}/effective", float(effective_rank(values)))
        trainer.log(f"rank/{what}/stable", float(stable_rank(values)))
        if not values.any():
            trainer.warn(f"round {trainer.server.round}: the {what} has collapsed, all its singular values are 0")

    def _keep_local(self, trainer: FederatedTrainer) -> None:
        if not self.local_models:
            return
        for theirs in trainer.gather(self._local):
            for what, spectra in theirs.items():
                self._local[what] = self._local.get(what, {}) | spectra
        for what, spectra in sorted(self._local.items()):
            table = np.full((trainer.data.num_clients, len(next(iter(spectra.values())))), np.nan)
            table[list(spectra)] = list(spectra.values())
            self._append(f"local_{what}", table)


def draw(what: str, rounds: list[int], spectra: list[np.ndarray]) -> Figure:
    """Plot the singular values of all rounds over their index, on a logarithmic scale; later rounds are lighter."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    shade = ScalarMappable(Normalize(min(rounds), max(max(rounds), 1)), colormaps["viridis"])
    for round_, values in zip(rounds, spectra, strict=True):
        # values below the rounding error of the largest mean nothing, and one of 1e-100 would flatten the other curves
        shown = np.where(values > VISIBLE * max(map(np.max, spectra)), values, np.nan)
        axes.semilogy(np.arange(len(values)), shown, color=shade.to_rgba(np.array(round_)), linewidth=1)
    axes.set(xlabel="index", ylabel="singular value", title=TITLES[what])
    figure.colorbar(shade, ax=axes, label="round")
    return figure


VISIBLE = 1e-12
FILE = "spectra.npz"
TITLES = {"classifier": "classifier weight", "representation": "covariance of the test representations"}
