r"""FedDyn: Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021, Algorithm 1.

Paper: https://arxiv.org/abs/2111.04263
Code: https://github.com/alpemreacar/FedDyn

.. math::
    y_k = \arg\min_y f_k(y) + \alpha_k \langle y, g_k \rangle + \frac{\alpha_k}{2} \lVert y - w^t \rVert^2, \qquad
    g_k \leftarrow g_k + y_k - w^t, \qquad w^{t+1} = \frac{1}{|S|} \sum_{k \in S} y_k + \frac{1}{N} \sum_k g_k

As in the authors' code, :math:`g_k` stands for :math:`-\nabla_k / \alpha`, where :math:`\nabla_k` is the gradient that
the paper keeps for client k.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch.optim import Optimizer

from fl_lightning.core.client_context import ClientContext
from fl_lightning.core.method import Method, ServerValue
from fl_lightning.core.server import Server
from fl_lightning.core.state import State, clone, select
from fl_lightning.core.weighted import Weighted
from fl_lightning.utilities.errors import require


class FedDyn(Method):
    r"""Regularises the clients' objectives so that their optima agree with the optimum of the mean objective.

    The gradient of the added terms, :math:`\alpha_k (g_k + y - w^t)`, is added to the gradients in place. The terms
    cover trained parameters only, and clients have equal weights in the mean. The authors clip gradients to norm 10
    (``trainer.gradient_clip_val``) and train without momentum.

    Args:
        alpha: :math:`\alpha > 0`. No value gives FedAvg, since for any :math:`\alpha` the server adds the mean of the
            :math:`g_k`.
        scaled: use :math:`\alpha_k = \alpha n / (N n_k)`, as in the authors' code, which keeps clients with few
            examples closer to the received model; else :math:`\alpha_k = \alpha`, as in the paper.
        reported: the model to evaluate and save: the mean of the models of this round's cohort (``selected``), the mean
            of the latest models of ``all`` clients, or the model :math:`w^{t+1}` that the server sends (``cloud``).

    Raises:
        UsageError: ``alpha`` is not above 0, or the run sends no weights.
    """

    needs_exchange = True
    assumes_fresh = True
    memory_keys: ClassVar = {
        "g": "g_k, by the name of the parameter",
        "latest": "the client's last parameters, by name; for reported='all' only",
    }
    mean_g = ServerValue(Server.zeros, travels=False)
    shown: ServerValue[State] = ServerValue(lambda server: {}, travels=False)
    # for reported="all" only
    initial: ServerValue[State] = ServerValue(lambda server: {})

    def __init__(
        self, alpha: float = 0.01, scaled: bool = True, reported: Literal["selected", "cloud", "all"] = "selected"
    ) -> None:
        require(alpha > 0, "FedDyn.alpha", alpha, "use a number above 0")
        self.alpha, self.scaled, self.reported = alpha, scaled, reported

    def on_fit_start(self, server: Server) -> None:
        self._mean_examples = server.num_examples / server.num_clients
        if self.reported == "all":
            self.initial = clone(select(server.state, server.optimized))

    def on_client_start(self, client: ClientContext) -> None:
        share = client.info.num_examples / self._mean_examples if self.scaled else 1.0
        visit, sent = client.scratch(self), select(client.live, client.sent)
        visit.alpha = self.alpha / share if share else 0.0
        zeros = {name: torch.zeros_like(value.data) for name, value in sent.items()}
        visit.own = client.memory(self).get("g") or zeros

    def on_before_optimizer_step(self, client: ClientContext, optimizer: Optimizer) -> None:
        visit = client.scratch(self)
        client.add_to_gradients(visit.own, visit.alpha)
        client.add_to_gradients(client.drift_so_far(client.sent), visit.alpha)

    def on_client_end(self, client: ClientContext) -> dict[str, Weighted] | None:
        memory = client.memory(self)
        sent, gradients = {"clients": Weighted.summed(1.0, 1.0)}, client.scratch(self).own
        memory["g"] = {name: g + client.change[name].to(g) for name, g in gradients.items()}
        if self.reported == "all":
            before, now = memory.get("latest", self.initial), clone(select(client.live, client.sent))
            for name, value in now.items():
                sent[f"latest/{name}"] = Weighted.of(value.double() - before[name])
            memory["latest"] = now
        return sent

    def client_weight(self, client: ClientContext) -> float | None:
        return 1.0

    def transform_update(self, server: Server, delta: State, payload: dict[str, Weighted]) -> State:
        number = float(payload["clients"].total)
        for name, mean in delta.items():
            self.mean_g[name] += mean * number / server.num_clients
            if self.reported == "all":
                latest = payload[f"latest/{name}"].total / server.num_clients
                self.shown[name] = self.shown.get(name, self.initial[name].double()) + latest
            else:
                self.shown[name] = server.state[name].double() + mean
        return {name: mean + self.mean_g[name] for name, mean in delta.items()}

    def evaluated_state(self, server: Server, state: State) -> State:
        if self.reported == "cloud":
            return state
        return state | {name: value.to(state[name]) for name, value in self.shown.items()}
