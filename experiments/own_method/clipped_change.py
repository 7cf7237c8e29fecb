"""A method of your own in one file: it limits how far a client may move from the received model."""

from __future__ import annotations

from fl_lightning import ClientContext, Method, Server, ServerValue, Weighted
from fl_lightning.core.state import State
from fl_lightning.utilities.errors import require


class ClippedChange(Method):
    r"""Scales a client's change down to at most f times m, the mean norm of the changes in the previous round.

    .. math:: \Delta_k \leftarrow \Delta_k \min(1, f m / \lVert \Delta_k \rVert)

    The first round is FedAvg. ``train/clippedchange`` is the mean of the factors :math:`\min(1, \cdot)`.

    Args:
        factor: f, above 0; infinity (``.inf`` in YAML) gives FedAvg.

    Raises:
        UsageError: ``factor`` is not above 0, or the run sends no weights.
    """

    needs_exchange = True  # refused together with Local, which sends no weights
    mean_norm = ServerValue(lambda server: float("inf"))  # saved in checkpoints

    def __init__(self, factor: float = 1.0) -> None:
        require(factor > 0, "ClippedChange.factor", factor, "pass a number above 0")
        self.factor = factor

    def on_client_end(self, client: ClientContext) -> dict[str, Weighted]:
        return {"norm": Weighted.of(client.drift)}

    def transform_client_update(self, client: ClientContext, delta: State) -> State:
        scale = min(1.0, self.factor * self.mean_norm / client.drift) if client.drift else 1.0
        client.log(self.name, scale, weight=client.info.num_examples)
        return {name: scale * value for name, value in delta.items()}

    def on_round_end(self, server: Server, payload: dict[str, Weighted]) -> None:
        self.mean_norm = float(payload["norm"].mean())
