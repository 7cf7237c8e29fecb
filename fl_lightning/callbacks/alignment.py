"""Alignment of consecutive linear layers, which FedDecorr's theory assumes.

FedDecorr: Shi et al., Towards Understanding and Mitigating Dimensional Collapse in Heterogeneous Federated Learning,
ICLR 2023, Assumption 2 and Figure 6. https://arxiv.org/abs/2210.00226
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from torch import Tensor, nn

from fl_lightning.callbacks.measurement import Measurement
from fl_lightning.client import Client
from fl_lightning.client.run_context import RunContext
from fl_lightning.core.state import State
from fl_lightning.core.weighted import Sums, Weighted
from fl_lightning.functional import singular_alignment
from fl_lightning.utilities.errors import UsageError, choices, require


class LayerAlignment(Measurement):
    r"""Logs the alignment of the singular vectors of consecutive linear layers.

    For layers l and l + 1 with weights :math:`W = U S V^T`, the alignment is the mean of
    :math:`|\langle v_k^{l+1}, u_k^l \rangle|` over the top k: 1 for aligned layers, about
    :math:`\sqrt{2 / (\pi d)}` for unrelated directions in d dimensions, which is 0.05 for d = 256. It is logged as
    ``alignment/<layer>/global`` of the global model and as ``alignment/<layer>/local``, the mean over the local models
    before aggregation; ``<layer>`` is layer l + 1. The figures ``alignment/global`` and ``alignment/local`` have the
    last :func:`~fl_lightning.functional.singular_alignment` of each pair.

    ``layer_alignment.npz`` holds ``rounds`` (R,), ``pairs`` (R, P, 2), the layers' paths, the same in every row, and
    ``global`` and ``local`` (R, P, k, k), whose diagonals are the alignment; nan for layers with fewer than k
    singular values, and for a missing model.

    Args:
        every_n_rounds: rounds from one measurement to the next, at least 1; the last round has one too.
        layers: paths of consecutive linear layers, starting at the input, with only elementwise layers in between.
            None takes the linear layers in the order of their declaration, and compares neighbours of fitting sizes. A
            convolution is refused, since it has no such weight matrix.
        number: number k of compared singular vectors of each layer, at least 1.

    Layers whose weights stay with the clients have no global model.

    Raises:
        UsageError: an argument out of its range, a layer that is not linear, or no two layers that fit.
    """

    file = "layer_alignment.npz"

    def __init__(self, every_n_rounds: int = 10, layers: list[str] | None = None, number: int = 10) -> None:
        super().__init__(every_n_rounds)
        require(number >= 1, "LayerAlignment.number", number, "use 1 or more")
        require(
            layers is None or len(layers) >= 2, "LayerAlignment.layers", layers, "name at least 2 layers, or use null"
        )
        self.layers, self.number = layers, number

    def setup(self, trainer: RunContext) -> None:
        module, entries = trainer.client.module, trainer.client.live
        parts = dict(module.named_modules())
        layers = {path: part for path, part in parts.items() if isinstance(part, nn.Linear)}
        linear = {path: part for path, part in layers.items() if f"{path}.weight" in entries}
        for path in self.layers or ():
            unknown = f"no submodule of {type(module).__name__} has this path"
            fault = f"a {type(parts[path]).__name__} is not linear" if path in parts else unknown
            hint = f"{fault}; name some of its linear layers: {choices(linear, path)}"
            require(path in linear, "LayerAlignment.layers", path, hint)
        pairs = pairwise(self.layers or linear)
        self._pairs = [(a, b) for a, b in pairs if linear[a].out_features == linear[b].in_features]
        if self.layers is not None and len(self._pairs) < len(self.layers) - 1:
            consecutive = pairwise(self.layers)
            earlier, later = next(pair for pair in consecutive if pair not in self._pairs)
            numbers = f"{linear[earlier].out_features} outputs, {linear[later].in_features} inputs"
            raise UsageError(
                f"LayerAlignment.layers: {earlier!r}, {later!r}: {numbers}; name layers that follow directly"
            )
        hint = f"{type(module).__name__} has no two linear layers that follow each other; remove LayerAlignment"
        require(bool(self._pairs), "LayerAlignment.layers", self.layers, hint)

    def on_round_start(self, trainer: RunContext) -> None:
        self._local = Sums()

    def on_client_end(self, trainer: RunContext, client: Client) -> None:
        if self.due(trainer.server.round):
            matrices = self._of(client.live)
            values = {str(place): Weighted.of(matrix) for place, matrix in matrices.items()}
            self._local.add(values)

    def measure(self, trainer: RunContext) -> None:
        trainer.all_reduce(self._local)
        local = {int(place): mean for place, mean in self._local.means().items()}
        kept_entries, matrices = set(trainer.client.kept), self._of(trainer.methods.evaluated_state(trainer.server))
        of_global = {}
        for place, pair in enumerate(self._pairs):
            if kept_entries.isdisjoint(weights(pair)):
                of_global[place] = matrices[place]
        measured = {"pairs": np.array(self._pairs)}
        for model_name, matrices in (("global", of_global), ("local", local)):
            measured[model_name] = np.full((len(self._pairs), self.number, self.number), np.nan)
            for place, matrix in matrices.items():
                measured[model_name][place, : matrix.shape[0], : matrix.shape[1]] = matrix.numpy()
                trainer.log(f"alignment/{self._pairs[place][1]}/{model_name}", float(matrix.diagonal().mean()))
        self.keep(trainer, measured)

    def _of(self, state: State) -> dict[int, Tensor]:
        """Return the alignment of each pair by its index."""
        alignments = {}
        for place, pair in enumerate(self._pairs):
            earlier, later = (state[name] for name in weights(pair))
            alignments[place] = singular_alignment(earlier, later, self.number).cpu()
        return alignments


def weights(pair: tuple[str, str]) -> tuple[str, str]:
    """Return the names of the layers' weights in a state."""
    return f"{pair[0]}.weight", f"{pair[1]}.weight"
