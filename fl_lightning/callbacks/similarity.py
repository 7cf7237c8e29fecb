"""Layer by layer, how similar the models of a round represent the same images.

FedCKA (Son et al., 2021, Figure 2) trains its argument with it: early layers of local models are similar, late layers
are not. https://arxiv.org/abs/2112.00407. The estimate is that of Nguyen et al., Do Wide and Deep Networks Learn the
Same Things?, ICLR 2021. https://arxiv.org/abs/2010.15327
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fl_lightning.callbacks.access import RunAccess
from fl_lightning.callbacks.by_client import finite_mean, in_order, log_finite
from fl_lightning.callbacks.measurement import Measurement, require_test_data
from fl_lightning.client import Client
from fl_lightning.client.taps import resolve_taps, with_paths
from fl_lightning.errors import require
from fl_lightning.functional import similarities, unbiased_gram
from fl_lightning.state import State

if TYPE_CHECKING:
    from fl_lightning.callbacks.access import Observed

# what unbiased_gram gives of each batch, by (loader, batch), a list with one for each layer
Grams = dict[tuple[int, int], list[Tensor]]


class LayerSimilarity(Measurement):
    """Logs the CKA of each layer between local models, with the global model, and of the global model over a round.

    The models see a probe of the test data, and batches of it are compared by
    :func:`~fl_lightning.functional.minibatch_cka`. It logs ``similarity/<layer>/global``, the mean over clients of the
    similarity of the local model, before aggregation, and the new global model; ``similarity/<layer>/clients``, the
    mean over pairs of clients; and ``similarity/<layer>/rounds``, between the global model before and after the round.
    At the end there are three figures of the last measurement: ``similarity/layers``, ``similarity/global`` and
    ``similarity/clients``.

    ``layer_similarity.npz`` holds ``rounds`` (R,), ``layers`` (R, L), which is the same in every row, ``clients``
    (R, M), the ids, -1 where there was none, ``to_global`` (R, L, M), ``between_clients`` (R, L, M, M) and
    ``between_rounds`` (R, L), nan where there is no value.

    Args:
        every_n_rounds: rounds from one measurement to the next, at least 1; the last round has one too.
        layers: names of taps, or paths of submodules as in ``trainer.taps``; None is all taps that the module and
            ``trainer.taps`` declare, each submodule once.
        examples: number of test images in the probe, at least 8; None is all test data.
        max_clients: most clients of a round that are measured, at least 2: those of the lowest ids. Each costs a pass
            over the probe.

    Where entries of the state do not travel (FedBN, FedProto), there is no global model, and only clients are compared.

    Raises:
        UsageError: an argument out of its range, a layer that is not there, or no test data.
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
        require(layers is None or len(layers) > 0, "LayerSimilarity.layers", layers, "name a layer, or give null")
        hint = "give 8 or more, or null for all test data"
        require(examples is None or examples >= 8, "LayerSimilarity.examples", examples, hint)
        require(max_clients >= 2, "LayerSimilarity.max_clients", max_clients, "give 2 or more")
        self.layers, self.examples, self.max_clients = layers, examples, max_clients

    def setup(self, trainer: RunAccess) -> None:
        module = trainer.client.module
        names = self.layers or distinct({**getattr(module, "taps", {}), **trainer.taps})
        hint = f"{type(module).__name__} declares no taps; name submodules"
        require(bool(names), "LayerSimilarity.layers", self.layers, hint)
        resolve_taps(module, with_paths(module, trainer.taps, names), dict.fromkeys(names, type(self).__name__))
        require_test_data(trainer, self)
        self._layers = tuple(dict.fromkeys(names))
        self._has_global = not trainer.client.kept

    def on_fit_start(self, trainer: RunAccess) -> None:
        super().on_fit_start(trainer)
        # finds a submodule that the forward does not call
        list(trainer.representations(None, self._layers, examples=1))

    def on_round_start(self, trainer: RunAccess) -> None:
        self._local: dict[int, Grams] = {}
        self._before: Grams = {}
        if self.due(trainer.server.round):
            self._measured = sorted(trainer.server.cohort)[: self.max_clients]
            self._before = self._of_global(trainer)

    def on_client_end(self, trainer: RunAccess, client: Client) -> None:
        if self.due(trainer.server.round) and client.info.id in self._measured:
            self._local[client.info.id] = self._grams(trainer, client.state())

    def on_round_end(self, trainer: RunAccess) -> None:
        if not self.due(trainer.server.round):
            return
        parts = trainer.gather((self._before, self._of_global(trainer), self._local))
        before, after = in_order(before for before, _, _ in parts), in_order(after for _, after, _ in parts)
        local = in_order(theirs for *_, theirs in parts)
        measured = self._compared(before, after, local, min(self.max_clients, trainer.data.num_clients))
        self._log(trainer, measured)
        self.keep(trainer, measured)
        self._local, self._before = {}, {}

    def _of_global(self, trainer: RunAccess) -> Grams:
        """This worker's batches of the global model."""
        return self._grams(trainer, None) if self._has_global else {}

    def _grams(self, trainer: RunAccess, state: State | None) -> Grams:
        batches: Iterable[Observed] = trainer.representations(state, self._layers, examples=self.examples)
        return {
            (index.loader, index.batch): [unbiased_gram(taps[layer]).cpu() for layer in self._layers]
            for index, _, _, taps in batches
        }

    def _compared(self, before: Grams, after: Grams, local: dict[int, Grams], width: int) -> dict[str, np.ndarray]:
        """The arrays of a measurement, with places for ``width`` clients."""
        number, present = len(self._layers), [after, *local.values()]
        table, over_round = np.full((number, width + 1, width + 1), np.nan), np.full(number, np.nan)
        first = 0 if after else 1
        for place in range(number):
            if after:
                over_round[place] = layer_similarities([before, after], place)[0, 1]
            table[place, first : len(present), first : len(present)] = layer_similarities(present[first:], place)
        return {
            "layers": np.array(self._layers),
            "clients": np.array([*local, *[-1] * (width - len(local))]),
            "to_global": table[:, 0, 1:],
            "between_clients": table[:, 1:, 1:],
            "between_rounds": over_round,
        }

    def _log(self, trainer: RunAccess, measured: dict[str, np.ndarray]) -> None:
        above = np.triu_indices(measured["between_clients"].shape[1], 1)
        for place, layer in enumerate(self._layers):
            values = {
                "clients": finite_mean(measured["between_clients"][place][above]),
                "global": finite_mean(measured["to_global"][place]),
                "rounds": measured["between_rounds"][place],
            }
            name = layer.replace(":", ".")
            log_finite(trainer, {f"similarity/{name}/{what}": float(value) for what, value in values.items()})


def distinct(taps: Mapping[str, str]) -> list[str]:
    """The names of taps, with logits last; of several that are bound to the same output only the last one."""
    return sorted({binding: name for name, binding in taps.items()}.values(), key="logits".__eq__)


def layer_similarities(models: list[Grams], place: int) -> np.ndarray:
    """The similarity of one layer of several models, ``(m, m)``."""
    if not models:
        return np.zeros((0, 0))
    grams = torch.stack([torch.cat([batch[place] for batch in model.values()]) for model in models])
    return similarities(grams).numpy()
