"""Similarity of the models of a round, layer by layer, on the same images.

FedCKA (Son et al., 2021, Figure 2, https://arxiv.org/abs/2112.00407) argues with it that early layers of local models
are similar, and late layers are not. The estimate is due to Nguyen et al., Do Wide and Deep Networks Learn the Same
Things?, ICLR 2021, https://arxiv.org/abs/2010.15327.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fl_lightning.callbacks.measurement import Measurement, finite_mean, log_finite, merge_sorted, require_test_data
from fl_lightning.client import Client
from fl_lightning.client.run_context import RunContext
from fl_lightning.client.taps import resolve_taps, with_paths
from fl_lightning.core.state import State
from fl_lightning.functional import similarities, unbiased_gram
from fl_lightning.utilities.errors import require

if TYPE_CHECKING:
    from fl_lightning.client.run_context import Observed

# unbiased_gram of each layer, by (loader, batch)
Grams = dict[tuple[int, int], list[Tensor]]


class LayerSimilarity(Measurement):
    """Logs the CKA of each layer between pairs of models: local models, and the global model before and after a round.

    :func:`~fl_lightning.functional.similarities` compares the models on batches of test data, the probe. Logged values:

    - ``similarity/<layer>/global``: mean over the clients, of the local model and the new global model.
    - ``similarity/<layer>/clients``: mean over the pairs of clients.
    - ``similarity/<layer>/rounds``: the global model before and after the round.

    The last measurement is drawn in three figures: ``similarity/layers``, ``similarity/global`` and
    ``similarity/clients``.

    ``layer_similarity.npz`` holds ``rounds`` (R,), ``layers`` (R, L) with the same names in every row, the ids
    ``clients`` (R, M), filled up with -1, ``to_global`` (R, L, M), ``between_clients`` (R, L, M, M) and
    ``between_rounds`` (R, L). Missing values are nan.

    Args:
        every_n_rounds: rounds from one measurement to the next, at least 1; the last round has one too.
        layers: names of taps, or paths of submodules as in ``trainer.taps``; None for all taps of the module and
            ``trainer.taps``, each submodule once.
        examples: number of test images in the probe, at least 8; None is all test data.
        max_clients: number of clients of a round at most, at least 2, with the lowest ids. Each costs a pass over the
            probe.

    If entries of the state stay with the clients (FedBN, FedProto), only the clients' models are compared.

    Raises:
        UsageError: an argument out of its range, an unknown layer, or no test data.
    """

    file = "layer_similarity.npz"

    def __init__(
        self,
        every_n_rounds: int = 10,
        layers: list[str] | None = None,
        examples: int | None = 512,
        max_clients: int = 10,
    ) -> None:
        super().__init__(every_n_rounds)
        require(layers is None or len(layers) > 0, "LayerSimilarity.layers", layers, "name a layer, or use null")
        hint = "use 8 or more, or null for all test data"
        require(examples is None or examples >= 8, "LayerSimilarity.examples", examples, hint)
        require(max_clients >= 2, "LayerSimilarity.max_clients", max_clients, "use 2 or more")
        self.layers, self.examples, self.max_clients = layers, examples, max_clients

    def setup(self, trainer: RunContext) -> None:
        module = trainer.client.module
        names = self.layers or distinct({**getattr(module, "taps", {}), **trainer.taps})
        hint = f"{type(module).__name__} declares no taps; name submodules"
        require(bool(names), "LayerSimilarity.layers", self.layers, hint)
        resolve_taps(module, with_paths(module, trainer.taps, names), dict.fromkeys(names, type(self).__name__))
        require_test_data(trainer, self)
        self._layers = tuple(dict.fromkeys(names))

    def on_fit_start(self, trainer: RunContext) -> None:
        super().on_fit_start(trainer)
        # fails for a submodule that the forward does not call
        list(trainer.representations(None, self._layers, examples=1))

    def on_round_start(self, trainer: RunContext) -> None:
        self._local: dict[int, Grams] = {}
        self._before: Grams = {}
        if self.due(trainer.server.round):
            self._measured = sorted(trainer.server.cohort)[: self.max_clients]
            self._before = self._of_global(trainer)

    def on_client_end(self, trainer: RunContext, client: Client) -> None:
        if self.due(trainer.server.round) and client.info.id in self._measured:
            self._local[client.info.id] = self._grams(trainer, client.state())

    def measure(self, trainer: RunContext) -> None:
        parts = trainer.gather((self._before, self._of_global(trainer), self._local))
        self._local, self._before = {}, {}
        before, after, local = (merge_sorted(part) for part in zip(*parts, strict=True))
        width, number, grams = min(self.max_clients, trainer.data.num_clients), len(self._layers), local.values()
        # the global model first, then the clients; nan for a missing model
        table, between_rounds = np.full((number, width + 1, width + 1), np.nan), np.full(number, np.nan)
        models = [after, *grams] if after else [*grams]
        present_rows = slice(0 if after else 1, 1 + len(grams))
        above = np.triu_indices(width, 1)
        for i, layer in enumerate(self._layers):
            if after:
                between_rounds[i] = layer_similarities([before, after], i)[0, 1]
            if models:
                table[i, present_rows, present_rows] = layer_similarities(models, i)
            means = {"clients": finite_mean(table[i, 1:, 1:][above]), "global": finite_mean(table[i, 0, 1:])}
            name = layer.replace(":", ".")
            log_finite(trainer, {**means, "rounds": float(between_rounds[i])}, f"similarity/{name}/")
        measured = {
            "layers": np.array(self._layers),
            "clients": np.array([*local, *[-1] * (width - len(local))]),
            "to_global": table[:, 0, 1:],
            "between_clients": table[:, 1:, 1:],
            "between_rounds": between_rounds,
        }
        self.keep(trainer, measured)

    def _of_global(self, trainer: RunContext) -> Grams:
        """Return this worker's batches of the global model."""
        return self._grams(trainer, None) if trainer.client.has_global_model else {}

    def _grams(self, trainer: RunContext, state: State | None) -> Grams:
        batches: Iterable[Observed] = trainer.representations(state, self._layers, examples=self.examples)
        grams = {}
        for index, _, _, taps in batches:
            of_layers = [unbiased_gram(taps[layer]).cpu() for layer in self._layers]
            grams[index.loader, index.batch] = of_layers
        return grams


def distinct(taps: Mapping[str, str]) -> list[str]:
    """Return the names of taps, logits last; of several taps of one output only the last."""
    return sorted({binding: name for name, binding in taps.items()}.values(), key="logits".__eq__)


def layer_similarities(models: list[Grams], place: int) -> np.ndarray:
    """Return the similarity ``(m, m)`` of one layer of several models."""
    grams = [torch.cat([batch[place] for batch in model.values()]) for model in models]
    return similarities(torch.stack(grams)).numpy()
