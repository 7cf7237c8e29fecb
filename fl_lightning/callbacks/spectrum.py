"""Singular-value spectra of the classifier and of the representations' covariance.

The diagnostic of FedDecorr (Shi et al., ICLR 2023, Figures 1 to 3) and FedUV (Son et al., CVPR 2024): under label skew
the trailing singular values fall towards 0, and the representation collapses into few dimensions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.callbacks.measurement import Measurement
from fl_lightning.errors import UsageError, require
from fl_lightning.functional import effective_rank, eigenvalues, singular_values, stable_rank
from fl_lightning.sums import Sums, Weighted

if TYPE_CHECKING:
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


class SpectrumMonitor(Measurement):
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

    file = "spectra.npz"
    requires = ("representation", "logits")

    def __init__(self, every_n_rounds: int = 1, local_models: bool = False, max_scalars: int = 32) -> None:
        super().__init__(every_n_rounds)
        require(max_scalars >= 2, "SpectrumMonitor.max_scalars", max_scalars, "give 2 or more")
        self.local_models, self.max_scalars = local_models, max_scalars

    def wants_evaluation(self, round_: int) -> bool:
        return self.due(round_)

    def setup(self, trainer: FederatedTrainer) -> None:
        self._classifier = self._find_classifier(trainer)

    def on_round_start(self, trainer: FederatedTrainer) -> None:
        self._covariance = Covariance()
        self._own, self._global = Sums(), Sums()
        self._local: dict[str, dict[int, np.ndarray]] = {}

    def on_client_end(self, trainer: FederatedTrainer, client: Client) -> None:
        if not (self.local_models and self.due(trainer.server.round)):
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
        if phase == "test" and self.due(trainer.server.round):
            self._covariance.add(taps["representation"])

    def on_evaluation_end(self, trainer: FederatedTrainer, phase: str, client: int | None = None) -> None:
        if phase == "test" and self.due(trainer.server.round):
            trainer.all_reduce(self._covariance.sums)
            spectra = {what: Weighted.of(values) for what, values in self._measure(self._covariance).items()}
            (self._global if client is None else self._own).add(spectra)
            self._covariance = Covariance()

    def on_round_end(self, trainer: FederatedTrainer) -> None:
        if not self.due(trainer.server.round):
            return
        trainer.all_reduce(self._own)
        spectra = self._own.means() or self._global.means() or self._measure(Covariance())
        for what, values in spectra.items():
            self._log(trainer, what, values)
            self.series.append(what, values.cpu().numpy())
        self._keep_local(trainer)
        self.keep(trainer)

    def on_fit_end(self, trainer: FederatedTrainer) -> None:
        if trainer.run_dir is None or not self.series:
            return
        spectra = self.series.values
        rounds = [int(one) for one in spectra["rounds"]]
        for what in [name for name in TITLES if name in spectra]:
            trainer.log_figure(f"spectrum/{what}", draw(what, rounds, spectra[what]))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "rounds" not in state:
            super().load_state_dict(state)
            return
        # of a version that kept the spectra in checkpoints
        for what, values in state["spectra"].items():
            for one in values:
                self.series.append(what, one.numpy())
        for round_ in state["rounds"]:
            self.series.append("rounds", np.array(round_))

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
            self.series.append(f"local_{what}", table)


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
TITLES = {"classifier": "classifier weight", "representation": "covariance of the test representations"}
