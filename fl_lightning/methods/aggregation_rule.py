"""What methods with an aggregation of their own have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.core.client_context import ClientContext
from fl_lightning.core.method import Method, overrides
from fl_lightning.core.server import Server
from fl_lightning.core.state import State, select
from fl_lightning.core.updates import Updates
from fl_lightning.methods.fedbuff import FedBuff
from fl_lightning.utilities.errors import require

# methods whose sums over the clients move the model, and pass by the rule
MOVED_BY_SUMS = ("SCAFFOLD", "FedDyn", "FedNova", "FedExP", "LoRAProduct", "FedExLoRA")


class AggregationRule(Method):
    """A rule that aggregates the updates of a cohort.

    Attributes:
        reads_weights: whether the clients' weights count; otherwise methods that give weights are refused.
    """

    needs_exchange = True
    reads_weights = False

    def setup(self, client: ClientContext, optimizer: Optimizer) -> None:
        kind = type(self).__name__
        for method in client.methods.methods:
            name, key = type(method).__name__, f"{kind} with method"
            hint = "its sums would pass by the rule; take one of them out"
            require(name not in MOVED_BY_SUMS, key, name, hint)
            hint = "the rule ignores the clients' weights; take one of them out"
            weighs = overrides(method, "client_weight") and not isinstance(method, FedBuff)  # whose weights are equal
            require(self.reads_weights or not weighs, key, name, hint)
            reads_sums = overrides(method, "transform_update") or overrides(method, "on_round_end")
            if reads_sums and overrides(method, "on_client_end"):
                rank_zero_warn(f"method={[name]}: the sums of what its clients send pass by {kind}")


def move_models(
    server: Server, updates: Updates, models: Mapping[str, State], weights: Mapping[str, Tensor], names: Sequence[str]
) -> tuple[State, dict[str, State]]:
    """Move the models of clusters by the mean changes of their clients; cluster 0 has the global model.

    Floating-point buffers of a model take their mean. A model without clients stays. Other entries than ``names`` are
    averaged over all clients.

    Args:
        server: the server, whose global model moves, too.
        updates: the updates of a round.
        models: the entries ``names`` of the other models, by cluster.
        weights: weights ``(m,)`` of the clients of each cluster, 0 for the others.
        names: entries of which the clusters have their own.

    Returns:
        The change for the server optimizer, which is 0 for parameters in ``names``, and the other models.
    """
    names = [name for name in names if name in updates.entries]
    moved = {c: select(model, names) for c, model in models.items()} | {"0": select(server.state, names)}
    is_empty = [not clients.any() for clients in weights.values()]
    result: State = {}
    for name, means in updates.combined(torch.stack([*weights.values(), updates.weights]), mean=True).items():
        result[name] = means[-1]
        if name not in names:
            continue
        for c, mean, empty in zip(weights, means, is_empty, strict=False):
            before = moved[c][name]
            value = before.double() + mean if name in updates.names else mean
            moved[c][name] = before if empty else value.to(before.dtype)
        result[name] = torch.zeros_like(mean) if name in updates.names else moved["0"][name].double()
    server.assign(moved.pop("0"))
    return result, moved
