r"""FedAMP: Huang et al., Personalized Cross-Silo Federated Learning on Non-IID Data, AAAI 2021.

Paper: https://arxiv.org/abs/2007.03797

.. math::
    u_k = \sum_j \xi_{kj} w_j, \qquad \min_y f_k(y) + \frac{\lambda}{2 a} \lVert y - u_k \rVert^2
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.core.client_context import ClientContext
from fl_lightning.core.method import ServerValue
from fl_lightning.core.server import Server
from fl_lightning.core.state import State, clone, select
from fl_lightning.core.updates import Updates
from fl_lightning.core.weighted import LazyDifference
from fl_lightning.methods.aggregation_rule import AggregationRule
from fl_lightning.methods.ditto import check_pull
from fl_lightning.utilities.errors import require


class FedAMP(AggregationRule):
    r"""Sends each client a mixture of all clients' last models, in which similar ones have more weight.

    The server keeps the last model :math:`w_j` of each client, also of one that is absent or fails. With ``heuristic``,
    HeurFedAMP, the weights are

    .. math:: \xi_{kj} = (1 - \xi_{kk}) \frac{e^{\sigma \cos(w_k, w_j)}}{\sum_{h \ne k} e^{\sigma \cos(w_k, w_h)}}

    and otherwise :math:`\xi_{kj} = \frac{a}{\sigma} e^{-\lVert w_k - w_j \rVert^2 / \sigma}` for :math:`j \ne k`, where
    :math:`\xi_{kk}` is the rest to 1. All trained parameters together count. Buffers are averaged over the cohort.

    The global model is the plain mean of the last models, with which a new client starts, whatever the server
    optimizer. A client is evaluated with :math:`u_k` (evaluation point R).

    Args:
        a: :math:`a > 0`, at most :math:`\sigma / (N - 1)` for N clients unless ``heuristic``.
        sigma: :math:`\sigma`; above 0 unless ``heuristic``.
        weight: :math:`\lambda \ge 0`; 0 adds no proximal term. FedProx beside it pulls to :math:`u_k`, too.
        heuristic: whether to weight by cosines.
        own: :math:`\xi_{kk}` of ``heuristic``, in [0, 1]; None is 1 / m for m models. With 1, each client continues its
            own model.
        start: a visit begins at ``sent``, the mixture, or at ``own``, the client's last model, which is in its memory.

    Raises:
        UsageError: an argument is out of range, the learning rate times :math:`\lambda / a` is 2 or more, another
            method gives each client its own model or weights clients, or its sums would pass by the server's models.
    """

    name = "fedamp"
    memory_keys: ClassVar = {"model": "its last model, if start is own"}
    models = ServerValue[dict[str, State]](lambda server: {}, travels=False)

    def __init__(
        self,
        a: float = 0.1,
        sigma: float = 1.0,
        weight: float = 1.0,
        heuristic: bool = False,
        own: float | None = None,
        start: Literal["sent", "own"] = "sent",
    ) -> None:
        require(a > 0, "FedAMP.a", a, "use a number above 0")
        require(sigma > 0 or (heuristic and sigma == 0), "FedAMP.sigma", sigma, "use a number above 0")
        require(weight >= 0, "FedAMP.weight", weight, "give 0 or more")
        require(own is None or 0 <= own <= 1, "FedAMP.own", own, "use a share in [0, 1]")
        require(own is None or heuristic, "FedAMP.own", own, "set heuristic=True, or leave it out")
        self.a, self.sigma, self.weight, self.heuristic, self.own = a, sigma, weight, heuristic, own
        self.start = start

    @property
    def proximal(self) -> float:
        return self.weight / self.a

    def setup(self, client: ClientContext, optimizer: Optimizer) -> None:
        super().setup(client, optimizer)
        rate = max(group["lr"] for group in optimizer.param_groups)
        check_pull("FedAMP with the client optimizer's lr", rate, self.proximal, "weight / a")

    def on_fit_start(self, server: Server) -> None:
        neighbours = server.num_clients - 1
        fits = self.heuristic or self.a * neighbours <= self.sigma
        hint = (
            f"a client's weight of its own model may be negative; use at most sigma / {neighbours}, or heuristic=True"
        )
        require(fits, f"FedAMP with {server.num_clients} clients: a", self.a, hint)

    def sent_state(self, server: Server, k: int) -> State | None:
        if str(k) not in self.models:
            return None
        models, place = [*self.models.values()], [*self.models].index(str(k))
        weights, mixture = self.weights(models, place).tolist(), {}
        for name, value in models[place].items():
            mixture[name] = torch.zeros_like(value, dtype=torch.float64)
            for weight, model in zip(weights, models, strict=True):
                mixture[name].add_(model[name], alpha=weight)
        return mixture

    def weights(self, models: list[State], place: int) -> Tensor:
        r"""Return the weights :math:`\xi` ``(m,)`` of all models for the client whose model has this place."""
        own_model = models[place]
        is_other = torch.arange(len(models)) != place
        if self.heuristic:
            share = 1 / len(models) if self.own is None else self.own
            products = torch.stack([dot(model, own_model) for model in models]).cpu()
            lengths = torch.stack([dot(model, model) for model in models]).sqrt().cpu()
            lengths = lengths * lengths[place]
            cosines = products / lengths.where(lengths > 0, 1.0)
            weights = cosines.mul(self.sigma).where(is_other, -torch.inf).softmax(0) * (1 - share)
            weights = weights.where(is_other, share)
        else:
            gaps = (LazyDifference(model, own_model, own_model) for model in models)
            squares = torch.stack([dot(gap, gap) for gap in gaps]).cpu()
            weights = torch.exp(-squares / self.sigma) * (self.a / self.sigma) * is_other
            weights[place] = 1 - weights.sum()
        return weights if len(models) > 1 else torch.ones_like(weights)

    def on_client_start(self, client: ClientContext) -> None:
        model = client.memory(self).get("model", {})
        client.add_to_parameters({name: value - client.received[name] for name, value in model.items()})

    def on_before_optimizer_step(self, client: ClientContext, optimizer: Optimizer) -> None:
        if self.weight:
            client.add_to_gradients(client.drift_so_far(client.trainable), self.proximal)

    def on_client_end(self, client: ClientContext) -> None:
        if self.start == "own":
            client.memory(self)["model"] = clone(select(client.live, client.sent))

    def aggregate(self, server: Server, updates: Updates) -> Mapping[str, Tensor]:
        models = dict(self.models)
        for k, update in updates.items():
            start, model = ChainMap(dict(update.received), server.state), {}
            for name, change in update.change.items():
                model[name] = (start[name].double() + change).to(server.state[name].dtype)
            models[str(k)] = model
        self.models = models
        means = {}
        for name in updates.names:
            means[name] = torch.stack([model[name] for model in models.values()]).double().mean(0)
        server.assign(means)
        # no change is left for the server optimizer
        return {name: torch.zeros_like(value) for name, value in means.items()}


def dot(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> Tensor:
    """The inner product of two states, in float64."""
    products = []
    for name, value in first.items():
        values = value.double()
        products.append((values * (values if second is first else second[name].double())).sum())
    return sum(products[1:], products[0])
