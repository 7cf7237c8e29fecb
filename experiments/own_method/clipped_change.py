"""A method of one's own, in one file: no client may move much further than the others did."""

from __future__ import annotations

from fl_lightning import Client, Method, Server, ServerValue, Weighted
from fl_lightning.errors import require
from fl_lightning.state import State


class ClippedChange(Method):
    r"""Cuts a client's change to f times the mean length m that changes had in the round before.

    .. math:: \Delta_k \leftarrow \Delta_k \min(1, f m / \lVert \Delta_k \rVert)

    In the first round nothing is cut. ``train/clippedchange`` is the mean of the factors.

    Args:
        factor: f, above 0; infinity (``.inf`` in YAML) gives FedAvg.
    """

    needs_exchange = True  # Local beside it is refused
    mean_norm = ServerValue(lambda server: float("inf"))  # a checkpoint holds it

    def __init__(self, factor: float = 1.0) -> None:
        require(factor > 0, "ClippedChange.factor", factor, "give a number above 0")
        self.factor = factor

    def on_client_end(self, client: Client) -> dict[str, Weighted]:
        return {"norm": Weighted.of(client.drift)}

    def transform_client_update(self, client: Client, delta: State) -> State:
        scale = min(1.0, self.factor * self.mean_norm / client.drift) if client.drift else 1.0
        client.log(self.name, scale, weight=client.info.num_examples)
        return {name: scale * value for name, value in delta.items()}

    def on_round_end(self, server: Server, payload: dict[str, Weighted]) -> None:
        self.mean_norm = float(payload["norm"].mean())
